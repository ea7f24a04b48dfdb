"""A linear layer in either precision. The compiler picks the form by the kind of weight (`int8.py`, `fp32.py`).

Either form takes float32 rows to float32 rows, and gives a row the same bits alone and among others.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numba.extending import overload

from engine.kernels.compile import plain
from engine.kernels.fp32 import Panels, multiply_panels, multiply_swiglu_panels
from engine.kernels.int8 import Packed, aligned
from engine.kernels.products import multiply, multiply_swiglu
from engine.kernels.rows import F, quantise

Weight = Packed | Panels


def stacked(weights: Iterable[Weight], count: int) -> Weight:
    """`count` weights of one shape in one, `[count, ...]`; each is copied before the next is asked for."""
    whole: Any = None
    for index, weight in enumerate(weights):
        if count == 1:  # no second copy of an LM head
            return type(weight)(*(part[None] for part in weight))
        if whole is None:
            whole = type(weight)(*(aligned((count, *part.shape), part.dtype.type) for part in weight))
        for all_of_them, part in zip(whole, weight, strict=True):
            all_of_them[index] = part
    stack: Weight = whole
    return stack


def linear(x, weight, layer, out, add):
    """`x w^T` into `out` `[rows, channels]`, added to it where `add`; `weight` is stacked. Only for compiled code."""


def swiglu(x, gate, up, layer, out):
    """`silu(x gate^T) * (x up^T)` into `out`. Only for compiled code."""


@overload(linear)
def _linear(x, weight, layer, out, add):
    def fp32(x, weight, layer, out, add):
        multiply_panels(x, weight.panels[layer], out, add)

    def int8(x, weight, layer, out, add):
        q, scale = quantise_rows(x, weight.weight.shape[2])
        multiply(q, scale, weight.weight[layer], weight.scale[layer], out, add)

    return fp32 if weight.instance_class is Panels else int8


@overload(swiglu)
def _swiglu(x, gate, up, layer, out):
    def fp32(x, gate, up, layer, out):
        multiply_swiglu_panels(x, gate.panels[layer], up.panels[layer], out)

    def int8(x, gate, up, layer, out):
        q, scale = quantise_rows(x, gate.weight.shape[2])
        gate_w, up_w = gate.weight[layer], up.weight[layer]
        multiply_swiglu(q, scale, gate_w, gate.scale[layer], up_w, up.scale[layer], out)

    return fp32 if gate.instance_class is Panels else int8


@plain
def quantise_rows(x, width):
    """Rows `[rows, inputs]` as int16 `[rows, width]` that begin on a cache line, and the scale of each."""
    rows = x.shape[0]
    memory = np.empty(rows * width + 32, np.int16)
    start = (64 - np.int64(memory.ctypes.data) % 64) // 2
    q = memory[start : start + rows * width].reshape(rows, width)
    scale = np.empty(rows, F)
    for m in range(rows):
        scale[m] = quantise(x[m], q[m])
    return q, scale


@plain
def linear_rows(x, weight, out):
    """`linear` for plain code, with a stack of one weight."""
    linear(x, weight, 0, out, False)
