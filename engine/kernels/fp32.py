"""float32 linear layers: weights in panels, and the loops that multiply rows with them (`fma.py`)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import prange

from engine.checkpoint import Stored
from engine.kernels.compile import parallel
from engine.kernels.fma import LANES, TILE, dot_panel
from engine.kernels.int8 import PACKED_AT_ONCE, aligned
from engine.kernels.lanes import pointer
from engine.kernels.rows import F, exp


class Panels(NamedTuple):
    """A linear layer's weight, or one for each layer of a model.

    Attributes:
        panels: float32 `[..., panels, inputs, LANES]`: channel c is `panels[..., c // LANES, :, c % LANES]`. The last
            panel is filled up with channels of zeros.
    """

    panels: np.ndarray


def pack_panels(weight: Stored) -> Panels:
    """Lay out a weight `[channels, inputs]` in panels."""
    channels, inputs = weight.shape
    panels = aligned((-(-channels // LANES), inputs, LANES), np.float32)
    for first in range(0, channels, PACKED_AT_ONCE):
        part = weight[first : first + PACKED_AT_ONCE]
        filled = np.pad(part, ((0, -len(part) % LANES), (0, 0))).reshape(-1, LANES, inputs)
        panels[first // LANES :][: len(filled)] = filled.transpose(0, 2, 1)
    return Panels(panels)


def channels_of(weight: Panels, channels: np.ndarray) -> np.ndarray:
    """Some channels of a stack of one weight, `[len(channels), inputs]`: embeddings, where the LM head is tied."""
    rows: np.ndarray = weight.panels[0, channels // LANES, :, channels % LANES]
    return rows


@parallel
def multiply_panels(x, panels, out, add):
    """`out = x w^T`, added to `out` where `add`; `x` float32 `[rows, inputs]`, `out` `[rows, channels]`."""
    rows, channels = out.shape
    inputs = panels.shape[1]
    for block in prange(panels.shape[0]):
        first = block * LANES
        count = min(LANES, channels - first)
        sums = np.empty((TILE, LANES), F)
        panel = pointer(panels, block * inputs * LANES)
        for row in range(0, rows, TILE):
            taken = min(TILE, rows - row)
            dot_panel(taken, pointer(x, row * inputs), inputs, panel, LANES, inputs, pointer(sums, 0))
            for r in range(taken):
                for n in range(count):
                    out[row + r, first + n] = out[row + r, first + n] + sums[r, n] if add else sums[r, n]


@parallel
def multiply_swiglu_panels(x, gate, up, out):
    """SwiGLU (Shazeer 2020): `silu(x gate^T) * (x up^T)`."""
    rows, channels = out.shape
    inputs = gate.shape[1]
    for block in prange(gate.shape[0]):
        first = block * LANES
        count = min(LANES, channels - first)
        gates = np.empty((TILE, LANES), F)
        ups = np.empty((TILE, LANES), F)
        at = block * inputs * LANES
        for row in range(0, rows, TILE):
            taken = min(TILE, rows - row)
            dot_panel(taken, pointer(x, row * inputs), inputs, pointer(gate, at), LANES, inputs, pointer(gates, 0))
            dot_panel(taken, pointer(x, row * inputs), inputs, pointer(up, at), LANES, inputs, pointer(ups, 0))
            for r in range(taken):
                for n in range(count):
                    out[row + r, first + n] = gates[r, n] / (F(1) + exp(-gates[r, n])) * ups[r, n]
