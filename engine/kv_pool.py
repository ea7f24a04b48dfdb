"""Keys and values of cached tokens, addressed by slot. Tensors only: the radix tree says who owns a slot.

For each layer two tensors, keys `[capacity, kv_heads, key_dim]` and values `[capacity, kv_heads, value_dim]`;
layers may differ. Shapes, precision and device are those of the first buffer that is stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class TokenBuffer(Protocol):
    """What the pool needs of a KV buffer; `engine.kv.KVBuffer` is one."""

    @property
    def length(self) -> int: ...

    def views(self) -> list[tuple[Tensor, Tensor]]: ...

    def append(self, rows: Sequence[tuple[Tensor, Tensor]], /) -> None: ...

    def truncate(self, length: int, /) -> None: ...


class Rows(NamedTuple):
    """What one tensor of a layer holds for a token."""

    heads: int
    dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def nbytes(self) -> int:
        return self.heads * self.dim * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.heads}x{self.dim} {str(self.dtype).removeprefix('torch.')} on {self.device}"


class KVPool:
    """KV of `capacity` tokens in at most `capacity * bytes_per_token` bytes, allocated when first needed."""

    def __init__(self, capacity: int, bytes_per_token: int) -> None:
        self.capacity = capacity
        self.bytes_per_token = bytes_per_token
        self._layout: list[Rows] = []
        self._tensors: list[Tensor] = []  # keys of layer 0, values of layer 0, keys of layer 1, ...

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(tensor.nbytes for tensor in self._tensors)

    def prepare(self, buffer: TokenBuffer) -> None:
        """Allocate for this buffer's layers, or check that they are those allocated for.

        Raises ValueError if they are not, or if a token of theirs takes more bytes than the pool counts.
        """
        layout = _layout(buffer)
        if not self._tensors:
            self._allocate(layout)
        if layout != self._layout:
            raise ValueError(
                f"the buffer has {_summary(layout)} and the cache {_summary(self._layout)}; "
                "use one cache for each model, precision and device"
            )

    def write(self, slots: Sequence[int], buffer: TokenBuffer, start: int) -> None:
        """Copy positions `start` to `start + len(slots)` of a buffer that the pool is prepared for."""
        if not slots:
            return
        stop = start + len(slots)
        with torch.no_grad():
            index = self._index(slots)
            rows = (tensor[0, :, start:stop] for pair in buffer.views() for tensor in pair)
            for stored, fresh in zip(self._tensors, rows, strict=True):
                stored.index_copy_(0, index.to(stored.device), fresh.transpose(0, 1))  # [n, heads, dim]

    def read(self, slots: Sequence[int], buffer: TokenBuffer) -> None:
        """Append the KV of the slots, in their order, to the buffer; one gather a tensor."""
        if not slots:
            return
        with torch.no_grad():
            index = self._index(slots)
            found = [stored.index_select(0, index.to(stored.device)) for stored in self._tensors]
            rows = [tensor.transpose(0, 1)[None] for tensor in found]
        buffer.append(list(zip(rows[::2], rows[1::2], strict=True)))  # [1, heads, n, dim]

    def release(self) -> None:
        """Give the memory back; the next buffer may have another layout."""
        self._layout, self._tensors = [], []

    def _index(self, slots: Sequence[int]) -> Tensor:
        return torch.tensor(slots, dtype=torch.long, device=self._tensors[0].device)

    def _allocate(self, layout: list[Rows]) -> None:
        needed = sum(rows.nbytes for rows in layout)
        if needed > self.bytes_per_token:
            raise ValueError(
                f"a token of this buffer takes {needed} bytes, the cache counts {self.bytes_per_token}; "
                f"give bytes_per_token={needed}"
            )
        # A tensor made in inference mode could not be written outside of it.
        with torch.inference_mode(False):
            self._tensors = [
                torch.empty(self.capacity, rows.heads, rows.dim, dtype=rows.dtype, device=rows.device)
                for rows in layout
            ]
        self._layout = layout


def _layout(buffer: TokenBuffer) -> list[Rows]:
    return [
        Rows(tensor.shape[1], tensor.shape[3], tensor.dtype, tensor.device)
        for pair in buffer.views()
        for tensor in pair
    ]


def _summary(layout: list[Rows]) -> str:
    kinds = dict.fromkeys(str(rows) for rows in layout)
    return f"{len(layout) // 2} layers of {' and '.join(kinds)}"
