"""The arrays of a policy's head: checked when they are read, in the form that decisions take."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from engine.errors import PolicyError


def folded(weight: np.ndarray, bias: np.ndarray, one: float) -> np.ndarray:
    """`[inputs + 1, outputs + 1]`: weight and bias for inputs that end with a 1, with outputs that do so again once the
    activation has been applied."""
    matrix = np.zeros((weight.shape[0] + 1, weight.shape[1] + 1))
    matrix[:-1, :-1], matrix[-1, :-1], matrix[-1, -1] = weight, bias, one
    return matrix


def doubled(*arrays: np.ndarray) -> tuple[np.ndarray, ...]:
    """The arrays in float64."""
    return tuple(np.ascontiguousarray(array, dtype=np.float64) for array in arrays)


def contiguous(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays as they are stored."""
    return {name: np.ascontiguousarray(array, dtype=np.float32) for name, array in arrays.items()}


def check(tensors: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Hold a policy's tensors against what its observation, menu and settings ask for."""
    if set(tensors) != set(shapes):
        odd = ", ".join(sorted(set(tensors) ^ set(shapes))[:4])
        raise PolicyError(f"the policy's tensors are not those of its head ({odd}); export it again")
    for name, shape in shapes.items():
        tensor = tensors[name]
        if tensor.dtype != np.float32 or tensor.shape != shape or not np.isfinite(tensor).all():
            raise PolicyError(
                f"the policy's {name} is {tensor.dtype} of shape {tensor.shape}, its observation and menu ask for "
                f"float32 of {shape}, all finite; export it again"
            )
