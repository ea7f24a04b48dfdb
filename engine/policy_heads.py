"""The decision functions that a policy can hold: an observation vector and a mask to an action, in numpy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Protocol

import numpy as np

from engine.cells import Cells
from engine.errors import PolicyError
from engine.head_tensors import check, contiguous, doubled, folded

ACTIVATIONS = ("tanh", "relu")
TANH_OF_IT_IS_ONE = 20.0  # to the last bit of a float64
HIDDEN = (64, 64)  # units of a network's layers, where nothing else is asked for


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


@dataclass(frozen=True)
class LinearHead:
    """The action with the highest score, each a linear function of the standardised observation.

    Attributes:
        center, scale: float32 `[features]`: an observation x is read as `(x - center) * scale`.
        weight: float32 `[features, actions]`.
        bias: float32 `[actions]`.
    """

    center: np.ndarray
    scale: np.ndarray
    weight: np.ndarray
    bias: np.ndarray
    kind: ClassVar[str] = "linear"

    def __post_init__(self) -> None:
        object.__setattr__(self, "_layers", doubled(self.center, self.scale, self.weight, self.bias))

    def decide(self, vector: np.ndarray, mask: Sequence[bool]) -> int:
        return _best(self.scores(vector).tolist(), mask)

    def scores(self, vectors: np.ndarray) -> np.ndarray:
        """Float64 `[..., actions]` of observations `[..., features]`."""
        center, scale, weight, bias = self._layers  # type: ignore[attr-defined]
        return np.asarray((vectors - center) * scale @ weight + bias)

    def tensors(self) -> dict[str, np.ndarray]:
        return contiguous({name: getattr(self, name) for name in ("center", "scale", "weight", "bias")})

    def settings(self) -> dict[str, Any]:
        return {}

    @classmethod
    def load(
        cls, settings: Mapping[str, Any], tensors: Mapping[str, np.ndarray], names: Sequence[str], actions: int
    ) -> LinearHead:
        features = len(names)
        shapes = {"center": (features,), "scale": (features,), "weight": (features, actions), "bias": (actions,)}
        check(tensors, shapes)
        return cls(**{name: tensors[name] for name in shapes})


@dataclass(frozen=True)
class ConstantHead:
    """One action throughout: a rule, for which no observation need be made.

    Attributes:
        action: index of a reusing entry of the menu, which no mask excludes.
    """

    action: int
    kind: ClassVar[str] = "constant"

    def __post_init__(self) -> None:
        if not isinstance(self.action, int) or isinstance(self.action, bool):
            raise PolicyError(f"the policy's constant action is {self.action!r}; give the index of a menu entry")

    def decide(self, vector: np.ndarray | None, mask: Sequence[bool]) -> int:
        return self.action

    def tensors(self) -> dict[str, np.ndarray]:
        return {}

    def settings(self) -> dict[str, Any]:
        return {"action": self.action}

    @classmethod
    def load(
        cls, settings: Mapping[str, Any], tensors: Mapping[str, np.ndarray], names: Sequence[str], actions: int
    ) -> ConstantHead:
        if tensors:
            raise PolicyError("the policy's constant action comes with tensors; export it again")
        return cls(settings["action"])


@dataclass(frozen=True)
class MLPHead:
    """The action with the highest output of a small network on the standardised observation.

    Weights are kept as float32, as trained; sums are taken in float64, so that the order in which a library adds them
    up moves a score by 1e-15 and not by 1e-7, and no near tie falls differently here than where it was trained.
    Standardisation and biases are folded into the matrices: right behind a model's pass, whose weights have pushed all
    else out of the caches, each call costs microseconds.

    Attributes:
        center, scale: float32 `[features]`: an observation x is read as `(x - center) * scale`.
        weights: one float32 `[inputs, outputs]` a layer; the last one's outputs are the actions.
        biases: one float32 `[outputs]` a layer.
        activation: "tanh" or "relu", between the layers.
    """

    center: np.ndarray
    scale: np.ndarray
    weights: tuple[np.ndarray, ...]
    biases: tuple[np.ndarray, ...]
    activation: str = "tanh"
    kind: ClassVar[str] = "mlp"

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise PolicyError(f"the policy's activation is {self.activation!r}; known: {', '.join(ACTIVATIONS)}")
        center, scale = doubled(self.center, self.scale)
        weights, biases = list(doubled(*self.weights)), list(doubled(*self.biases))
        biases[0] = biases[0] - center * scale @ weights[0]
        weights[0] = scale[:, None] * weights[0]
        one = TANH_OF_IT_IS_ONE if self.activation == "tanh" else 1.0
        matrices = [folded(weight, bias, one) for weight, bias in zip(weights, biases, strict=True)]
        object.__setattr__(self, "_hidden", tuple(matrices[:-1]))
        object.__setattr__(self, "_last", np.ascontiguousarray(matrices[-1][:, :-1]))

    def decide(self, vector: np.ndarray, mask: Sequence[bool]) -> int:
        return _best(self.scores(vector).tolist(), mask)

    def scores(self, vectors: np.ndarray) -> np.ndarray:
        """Float64 `[..., actions]` of observations `[..., features]`."""
        values = np.ones((*vectors.shape[:-1], vectors.shape[-1] + 1))
        values[..., :-1] = vectors
        tanh = self.activation == "tanh"
        for matrix in self._hidden:  # type: ignore[attr-defined]
            values = values @ matrix
            values = np.tanh(values, out=values) if tanh else np.maximum(values, 0.0, out=values)
        return np.asarray(values @ self._last)  # type: ignore[attr-defined]

    def tensors(self) -> dict[str, np.ndarray]:
        arrays = {"center": self.center, "scale": self.scale}
        for layer, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            arrays |= {f"weight.{layer}": weight, f"bias.{layer}": bias}
        return contiguous(arrays)

    def settings(self) -> dict[str, Any]:
        return {"activation": self.activation, "hidden": [len(bias) for bias in self.biases[:-1]]}

    @classmethod
    def load(
        cls, settings: Mapping[str, Any], tensors: Mapping[str, np.ndarray], names: Sequence[str], actions: int
    ) -> MLPHead:
        widths = [len(names), *(int(width) for width in settings["hidden"]), actions]
        shapes: dict[str, tuple[int, ...]] = {"center": (len(names),), "scale": (len(names),)}
        for layer, (inputs, outputs) in enumerate(pairwise(widths)):
            shapes |= {f"weight.{layer}": (inputs, outputs), f"bias.{layer}": (outputs,)}
        check(tensors, shapes)
        layers = range(len(widths) - 1)
        return cls(
            tensors["center"],
            tensors["scale"],
            tuple(tensors[f"weight.{layer}"] for layer in layers),
            tuple(tensors[f"bias.{layer}"] for layer in layers),
            str(settings["activation"]),
        )


def _best(scores: list[float], mask: Sequence[bool]) -> int:
    """The allowed action of the highest score, or the first allowed one where every score is NaN or minus infinity.

    A loop over some numbers is faster than any array operation.
    """
    best, highest = -1, -math.inf
    for action, score in enumerate(scores):
        if score > highest and mask[action]:
            best, highest = action, score
    return best if best >= 0 else list(mask).index(True)


HEADS: dict[str, type[TableHead] | type[LinearHead] | type[MLPHead] | type[ConstantHead]] = {
    head.kind: head for head in (TableHead, LinearHead, MLPHead, ConstantHead)
}
