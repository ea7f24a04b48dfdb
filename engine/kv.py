"""The KV buffer: preallocated, appended in place, rolled back by moving a length.

It is a transformers `Cache` (5.24 and later), so any causal LM of that library runs on it::

    |<------------- capacity ------------->|
    |  verified  |  drafted  |  free       |
    0         length      appended

A forward pass appends its rows behind `length`; `truncate` forgets them again without touching memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

FIRST_CAPACITY = 256


class KVLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """Keys and values of one layer, `[1, heads, capacity, dim]`, of which the first `length` positions count."""

    is_sliding = False
    is_croppable = True
    keys: Tensor
    values: Tensor

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.length = 0

    @property
    def capacity(self) -> int:
        return int(self.keys.shape[-2]) if self.is_initialized else 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.device = key_states.device
        self.dtype = key_states.dtype
        self.keys = key_states.new_empty(_with_positions(key_states, FIRST_CAPACITY))
        self.values = value_states.new_empty(_with_positions(value_states, FIRST_CAPACITY))
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append `[1, heads, n, dim]` rows in place and return views of all `length + n` positions."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, stop = self.length, self.length + key_states.shape[-2]
        self.reserve(stop)
        self.keys[:, :, start:stop].copy_(key_states)
        self.values[:, :, start:stop].copy_(value_states)
        self.length = stop
        return self.keys[:, :, :stop], self.values[:, :, :stop]

    def reserve(self, positions: int) -> None:
        """Grow the storage, doubling, until it holds `positions`."""
        if positions <= self.capacity:
            return
        capacity = doubled(max(self.capacity, FIRST_CAPACITY), positions)
        self.keys = self._grown(self.keys, capacity)
        self.values = self._grown(self.values, capacity)

    def _grown(self, old: Tensor, capacity: int) -> Tensor:
        new = old.new_empty(_with_positions(old, capacity))
        new[:, :, : self.length].copy_(old[:, :, : self.length])
        return new

    def truncate(self, length: int) -> None:
        self.length = min(self.length, length)

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last `-tokens_to_remove` positions: transformers counts them as a negative number."""
        self.truncate(max(0, self.length - abs(tokens_to_remove)))

    def reset(self) -> None:
        self.length = 0

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(kv length, kv offset) of the next pass; sliding windows are left to the mask, so nothing is dropped."""
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        return -1


class KVBuffer(Cache):
    """The keys and values of one request for one model, batch size 1."""

    layers: list[KVLayer]  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=KVLayer)

    @property
    def length(self) -> int:
        """Tokens held."""
        return self.layers[0].length if self.layers else 0

    @property
    def nbytes(self) -> int:
        """Bytes of the valid positions."""
        return sum(k.nbytes + v.nbytes for k, v in self.views())

    def truncate(self, length: int) -> None:
        """Keep the first `length` positions, in O(layers) integer work. Also mends a pass that failed half-way."""
        for layer in self.layers:
            layer.truncate(length)

    def advance(self, positions: int) -> None:
        """Count positions that were written behind `length` without `update`."""
        for layer in self.layers:
            layer.length += positions

    def views(self) -> list[tuple[Tensor, Tensor]]:
        """The valid part of each layer: keys and values `[1, heads, length, dim]`, sharing the storage."""
        return [(layer.keys[:, :, : layer.length], layer.values[:, :, : layer.length]) for layer in self.layers]

    @torch.inference_mode()
    def append(self, rows: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Append keys and values `[1, heads, n, dim]` for each layer, for example from a prefix cache."""
        for index, (keys, values) in enumerate(rows):
            self.update(keys, values, index)


def doubled(size: int, positions: int, most: int | None = None) -> int:
    """`size` doubled until it holds `positions`; no more than `most` where that is enough."""
    while size < positions:
        size *= 2
    return size if most is None or not positions <= most < size else most


def _with_positions(like: Tensor, positions: int) -> tuple[int, ...]:
    return (*like.shape[:-2], positions, like.shape[-1])


class StackedKVBuffer(KVBuffer):
    """A buffer whose layers are views of two tensors `[layers, kv_heads, capacity, dim]`, for compiled runners.

    It reserves for all layers at once, so that the views stay views.
    """

    def __init__(self, layers: int, kv_heads: int, dim: int) -> None:
        super().__init__()
        self._shape = (layers, kv_heads, dim)
        self.layers = [KVLayer() for _ in range(layers)]
        self._view(*(self._empty(FIRST_CAPACITY) for _ in range(2)))

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values as numpy arrays `[layers, kv_heads, capacity, dim]` on the same memory."""
        return self._keys.numpy(), self._values.numpy()

    def reserve(self, positions: int) -> None:
        """Grow the storage of all layers, doubling, until it holds `positions`."""
        if positions <= self._keys.shape[2]:
            return
        capacity = doubled(self._keys.shape[2], positions)
        grown = [self._empty(capacity) for _ in range(2)]
        for new, old in zip(grown, (self._keys, self._values), strict=True):
            new[:, :, : self.length] = old[:, :, : self.length]
        self._view(*grown)

    def append(self, rows: Sequence[tuple[Tensor, Tensor]]) -> None:
        self.reserve(self.length + rows[0][0].shape[-2])
        super().append(rows)

    def _empty(self, capacity: int) -> Tensor:
        layers, kv_heads, dim = self._shape
        return torch.empty(layers, kv_heads, capacity, dim)

    def _view(self, keys: Tensor, values: Tensor) -> None:
        self._keys, self._values = keys, values
        for index, layer in enumerate(self.layers):
            layer.keys, layer.values = keys[index : index + 1], values[index : index + 1]
            layer.is_initialized = True
