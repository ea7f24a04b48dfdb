"""A few features of the observation, cut into buckets: the finite contexts of a table of arms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.errors import PolicyError


@dataclass(frozen=True)
class Cells:
    """Maps an observation vector to one of `count` cells.

    Attributes:
        features: name -> ascending edges; a value v falls in bucket `sum(v >= edge)`.
    """

    features: tuple[tuple[str, tuple[float, ...]], ...]
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        for name, _ in self.features:
            if name not in self.names:
                raise PolicyError(f"the observation has no feature {name!r}; it has {', '.join(self.names)}")
        edges = [tuple(edges) for _, edges in self.features]
        object.__setattr__(self, "_at", [self.names.index(name) for name, _ in self.features])
        object.__setattr__(self, "_edges", edges)

    @property
    def count(self) -> int:
        return int(np.prod([len(edges) + 1 for _, edges in self.features], dtype=int))

    def index(self, vector: np.ndarray) -> int:
        """The cell of an observation vector `[len(names)]`."""
        cell = 0
        for at, edges in zip(self._at, self._edges, strict=True):  # type: ignore[attr-defined]
            value = vector[at]
            cell = cell * (len(edges) + 1) + sum(value >= edge for edge in edges)
        return cell

    def to_json(self) -> list[dict[str, Any]]:
        return [{"feature": name, "edges": list(edges)} for name, edges in self.features]

    @classmethod
    def from_json(cls, document: Sequence[dict[str, Any]], names: Sequence[str]) -> Cells:
        """The inverse of `to_json`. Raises `KeyError`, `TypeError` or `ValueError` on another form."""
        try:
            features = tuple((str(f["feature"]), tuple(float(e) for e in f["edges"])) for f in document)
        except OverflowError as error:
            raise ValueError(str(error)) from error
        return cls(features, tuple(names))
