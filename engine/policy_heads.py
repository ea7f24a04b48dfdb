"""The decision functions that a policy can hold: an observation vector and a mask to an action, in numpy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np

from engine.cells import Cells
from engine.errors import PolicyError


class Head(Protocol):
    """A decision function that can be stored."""

    kind: ClassVar[str]

    def decide(self, vector: np.ndarray, mask: Sequence[bool]) -> int: ...

    def tensors(self) -> dict[str, np.ndarray]:
        """Its numbers, for safetensors."""
        ...

    def settings(self) -> dict[str, Any]:
        """What else it needs, for JSON."""
        ...

    @classmethod
    def load(
        cls, settings: Mapping[str, Any], tensors: Mapping[str, np.ndarray], names: Sequence[str], actions: int
    ) -> Head:
        """The inverse of `tensors` and `settings`, for observation features `names` and a menu of `actions` entries."""
        ...


@dataclass(frozen=True)
class TableHead:
    """The best action of the cell that an observation falls in.

    Attributes:
        cells: the buckets.
        values: float32 `[cells, actions]`, the worth of each action; the highest one allowed is taken.
    """

    cells: Cells
    values: np.ndarray
    kind: ClassVar[str] = "table"

    def decide(self, vector: np.ndarray, mask: Sequence[bool]) -> int:
        row = self.values[self.cells.index(vector)]
        return int(np.where(mask, row, -np.inf).argmax())

    def tensors(self) -> dict[str, np.ndarray]:
        return {"values": np.ascontiguousarray(self.values, dtype=np.float32)}

    def settings(self) -> dict[str, Any]:
        return {"cells": self.cells.to_json()}

    @classmethod
    def load(
        cls, settings: Mapping[str, Any], tensors: Mapping[str, np.ndarray], names: Sequence[str], actions: int
    ) -> TableHead:
        cells = Cells.from_json(settings["cells"], names)
        values = tensors["values"]
        if values.shape != (cells.count, actions) or not np.isfinite(values).all():
            raise PolicyError(
                f"the policy's table has shape {values.shape}, its cells and menu ask for {(cells.count, actions)}, "
                "all finite; export it again"
            )
        return cls(cells, values)


HEADS: dict[str, type[TableHead]] = {TableHead.kind: TableHead}
