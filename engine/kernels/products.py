"""Rows of quantised activations times int8 weights, over many output channels.

Activations are quantised for each row to 13 bits in int16: `x = q * scale`, |q| <= 4,095. Weights are int8 for each
output channel. Their products are summed exactly (`madd.py`).
"""

from __future__ import annotations

import numpy as np
from numba import prange

from engine.kernels.compile import parallel, plain
from engine.kernels.lanes import pointer
from engine.kernels.madd import (
    CHANNELS,
    MAX_ROWS,
    MAX_TERMS,
    OUT_STRIDE,
    dot_channel,
    dot_channels,
)
from engine.kernels.rows import F, exp

BLOCK = OUT_STRIDE  # output channels that a thread takes at a time


@plain
def dots(x, w, first, count, row, rows, sums):
    """`sums[r, n] = x[row + r] . w[first + n]` as float32, from exact sums; `x` int16 and `w` int8 `[_, padded]`.

    Rows beyond MAX_TERMS are added up in float64 from exact chunks, which is exact below 2^53.
    """
    terms = w.shape[1]
    part = np.empty((MAX_ROWS, OUT_STRIDE), np.int32)
    if terms <= MAX_TERMS:
        chunk_dots(x, w, first, count, row, rows, 0, terms, part)
        for r in range(rows):
            for n in range(count):
                sums[r, n] = F(part[r, n])
        return
    total = np.zeros((MAX_ROWS, OUT_STRIDE), np.float64)
    for start in range(0, terms, MAX_TERMS):
        chunk_dots(x, w, first, count, row, rows, start, min(MAX_TERMS, terms - start), part)
        for r in range(rows):
            for n in range(count):
                total[r, n] += part[r, n]
    for r in range(rows):
        for n in range(count):
            sums[r, n] = F(total[r, n])


@plain
def chunk_dots(x, w, first, count, row, rows, start, size, part):
    """Terms `start` to `start + size` of the products, exact in int32: `part[r, n]`."""
    terms = w.shape[1]
    rows_at = pointer(x, row * terms + start)
    n = 0
    while n + CHANNELS <= count:
        dot_channels(rows, rows_at, pointer(w, (first + n) * terms + start), terms, size, pointer(part, n))
        n += CHANNELS
    while n < count:
        dot_channel(rows, rows_at, pointer(w, (first + n) * terms + start), terms, size, pointer(part, n))
        n += 1


@parallel
def multiply(x, scale, w, channel_scale, out, add):
    """`out[m] = (x w^T)[m] * scale[m] * channel_scale`, added to `out` where `add`; float32 `[rows, channels]`."""
    rows, channels = out.shape
    for block in prange((channels + BLOCK - 1) // BLOCK):
        first = block * BLOCK
        count = min(BLOCK, channels - first)
        sums = np.empty((MAX_ROWS, BLOCK), F)
        for row in range(0, rows, MAX_ROWS):
            taken = min(MAX_ROWS, rows - row)
            dots(x, w, first, count, row, taken, sums)
            for r in range(taken):
                for n in range(count):
                    value = sums[r, n] * (scale[row + r] * channel_scale[first + n])
                    out[row + r, first + n] = out[row + r, first + n] + value if add else value


@parallel
def multiply_swiglu(x, scale, gate, gate_scale, up, up_scale, out):
    """SwiGLU (Shazeer 2020): `silu(x gate^T) * (x up^T)`."""
    rows, channels = out.shape
    for block in prange((channels + BLOCK - 1) // BLOCK):
        first = block * BLOCK
        count = min(BLOCK, channels - first)
        gates = np.empty((MAX_ROWS, BLOCK), F)
        ups = np.empty((MAX_ROWS, BLOCK), F)
        for row in range(0, rows, MAX_ROWS):
            taken = min(MAX_ROWS, rows - row)
            dots(x, gate, first, count, row, taken, gates)
            dots(x, up, first, count, row, taken, ups)
            for r in range(taken):
                for n in range(count):
                    g = gates[r, n] * (scale[row + r] * gate_scale[first + n])
                    u = ups[r, n] * (scale[row + r] * up_scale[first + n])
                    out[row + r, first + n] = g / (F(1) + exp(-g)) * u
