"""int8 weights for each output channel, and the reference that the compiled products are held against."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine.checkpoint import Stored
from engine.kernels.madd import PADDING

LARGEST_WEIGHT = 127
CACHE_LINE = 64  # bytes
PACKED_AT_ONCE = 1024  # channels: what lies between is held for these only


class Packed(NamedTuple):
    """A linear layer's weight.

    Attributes:
        weight: int8 `[channels, padded]`, zeros beyond the layer's inputs so that `padded` is a multiple of PADDING.
        scale: float32 `[channels]`; the layer's weight is about `weight * scale[:, None]`.
    """

    weight: np.ndarray
    scale: np.ndarray


def padded(size: int) -> int:
    """`size` rounded up to what the products take at a time."""
    return -(-size // PADDING) * PADDING


def aligned(shape: tuple[int, ...], kind: type[np.generic]) -> np.ndarray:
    """An empty array that begins on a cache line: vector loads across two lines cost twice."""
    size = int(np.prod(shape)) * np.dtype(kind).itemsize
    memory = np.empty(size + CACHE_LINE, np.uint8)
    start = -memory.ctypes.data % CACHE_LINE
    return memory[start : start + size].view(kind).reshape(shape)


def pack(weight: Stored) -> Packed:
    """Quantise a weight `[channels, inputs]`, symmetrically, to the nearest of 255 steps for each channel."""
    channels, inputs = weight.shape
    steps, scale = aligned((channels, padded(inputs)), np.int8), np.empty(channels, np.float32)
    steps[:, inputs:] = 0
    for first in range(0, channels, PACKED_AT_ONCE):
        block = slice(first, first + PACKED_AT_ONCE)
        part = weight[block]
        largest = np.abs(part).max(axis=1)
        scale[block] = np.where(largest > 0, largest / LARGEST_WEIGHT, 1.0)
        np.rint(part / scale[block, None], out=steps[block, :inputs], casting="unsafe")
    return Packed(steps, scale)


def channels_of(weight: Packed, inputs: int, channels: np.ndarray) -> np.ndarray:
    """Some channels of a stack of one weight, float32 `[len(channels), inputs]`: embeddings, where the head is tied."""
    rows: np.ndarray = weight.weight[0, channels, :inputs] * weight.scale[0, channels, None]
    return rows


def reference(x: np.ndarray, packed_weight: Packed) -> np.ndarray:
    """`x` `[rows, inputs]` times a packed weight, in numpy: what the compiled products must give to the bit.

    The integer sums are exact; the three float32 operations behind them are in the order of `products.multiply`.
    """
    inputs = x.shape[1]
    largest = np.abs(x).max(axis=1)
    largest = np.where(largest > 0, largest, np.float32(1))
    factor = np.float32(4095) / largest
    steps = np.rint(x * factor[:, None]).astype(np.int64)
    sums = steps @ packed_weight.weight[:, :inputs].astype(np.int64).T
    scales = (largest / np.float32(4095))[:, None] * packed_weight.scale[None, :]
    product: np.ndarray = sums.astype(np.float32) * scales
    return product
