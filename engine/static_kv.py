"""KV storage that stays where it is, for passes of fixed shapes: what a captured graph reads and writes.

KVStorage        keys and values of all layers at fixed addresses, and the graphs captured on them
StoragePool      storages that no buffer uses at present: sessions that follow each other share one, with its graphs
StaticKVBuffer   a KV buffer on a storage of the pool
SlotCache        how one pass sees a storage: rows go to slots that a tensor names, attention reads a fixed span
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from engine.kv import KVBuffer, KVLayer, doubled
from engine.static_graph import Captured

FIRST_POSITIONS = 1024  # of the smallest storage


class TensorShape(NamedTuple):
    """What one tensor of a layer holds for a token."""

    heads: int
    dim: int


class KVStorage:
    """Keys and values `[1, heads, capacity, dim]` of every layer, views of one block of memory."""

    def __init__(self, shapes: Sequence[TensorShape], capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        self.capacity = capacity
        self.graphs: dict[tuple[int, int], Captured] = {}  # (rows, span) -> pass
        sizes = [shape.heads * capacity * shape.dim for shape in shapes]
        self._block = torch.zeros(sum(sizes), dtype=dtype, device=device)
        parts = zip(torch.split(self._block, sizes), shapes, strict=True)
        tensors = [part.view(1, shape.heads, capacity, shape.dim) for part, shape in parts]
        self.layers = list(zip(tensors[::2], tensors[1::2], strict=True))  # keys, values

    def clear(self) -> None:
        """Zero everything. Masked positions count with weight 0, and 0 times a NaN left by a failed request is NaN."""
        self._block.zero_()


class StoragePool:
    """Hands out storages of one layout: `(keys, values)` shapes in turn for each layer."""

    def __init__(
        self, shapes: Sequence[TensorShape], most_positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._shapes, self._most = tuple(shapes), most_positions
        self._dtype, self._device = dtype, device
        self._free: list[KVStorage] = []

    def take(self, positions: int) -> KVStorage:
        """A zeroed storage for at least so many positions: the smallest free one, or a new one."""
        fitting = [storage for storage in self._free if storage.capacity >= positions]
        if not fitting:
            capacity = doubled(FIRST_POSITIONS, positions, self._most)
            return KVStorage(self._shapes, capacity, self._dtype, self._device)
        best = min(fitting, key=lambda storage: storage.capacity)
        self._free.remove(best)
        best.clear()
        return best

    def give_back(self, storage: KVStorage) -> None:
        self._free.append(storage)


class StaticKVBuffer(KVBuffer):
    """A KV buffer on a pooled storage: taken when the first row comes, given back when outgrown or at its end.

    So the short spans of all texts run on the small storage, the long ones on larger, and few graphs are recorded.
    """

    def __init__(self, pool: StoragePool) -> None:
        super().__init__()
        self._pool = pool
        self._storage: KVStorage | None = None
        self._return: weakref.finalize[..., StaticKVBuffer] | None = None

    @property
    def storage(self) -> KVStorage:
        """Where the rows are, once `reserve` was called."""
        assert self._storage is not None
        return self._storage

    @torch.inference_mode()
    def reserve(self, positions: int) -> None:
        """See that the storage holds `positions`; views taken before may show another storage afterwards."""
        old, length = self._storage, self.length
        if old is not None and positions <= old.capacity:
            return
        new = self._pool.take(positions)
        if old is not None:
            for fresh, stale in zip(new.layers, old.layers, strict=True):
                for target, source in zip(fresh, stale, strict=True):
                    target[:, :, :length].copy_(source[:, :, :length])
        if self._return is not None:
            self._return()
        self._adopt(new, length)

    def append(self, rows: Sequence[tuple[Tensor, Tensor]]) -> None:
        if rows:
            self.reserve(self.length + rows[0][0].shape[-2])
        super().append(rows)

    def _adopt(self, storage: KVStorage, length: int) -> None:
        self._return = weakref.finalize(self, self._pool.give_back, storage)
        self._return.atexit = False
        self._storage = storage
        self.layers = [KVLayer() for _ in storage.layers]
        for layer, (keys, values) in zip(self.layers, storage.layers, strict=True):
            layer.keys, layer.values = keys, values
            layer.is_initialized, layer.length = True, length


class SlotLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer of a storage during one pass."""

    is_sliding = False

    def __init__(self, keys: Tensor, values: Tensor, slots: Tensor, span: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keys, self.values = keys, values
        self.is_initialized = True
        self._slots, self._span = slots, span

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write rows `[1, heads, rows, dim]` at the slots; keys and values of the whole span, to be masked."""
        assert self.keys is not None
        assert self.values is not None
        self.keys.index_copy_(2, self._slots, key_states)
        self.values.index_copy_(2, self._slots, value_states)
        return self.keys[:, :, : self._span], self.values[:, :, : self._span]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """There is nothing to do: the storage is there."""

    def get_seq_length(self) -> int:
        """Nothing may follow from it: the length is known to a tensor only, and a captured pass serves all lengths."""
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._span, 0

    def get_max_length(self) -> int:
        return self._span


class SlotCache(Cache):
    """A storage during one pass: row `i` is written to position `slots[i]`, attention reads `span` positions."""

    def __init__(self, storage: KVStorage, slots: Tensor, span: int) -> None:
        super().__init__(layers=[SlotLayer(keys, values, slots, span) for keys, values in storage.layers])
