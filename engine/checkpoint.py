"""The tensors of a Hugging Face folder, read a few channels at a time: no second model in memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from safetensors import safe_open

from engine.errors import ModelFileError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class Stored(Protocol):
    """What is read when it is sliced, as float32: an array, or a tensor in a file."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, rows: slice, /) -> np.ndarray: ...


class StoredTensor:
    """A tensor in a file: slices of its first dimension are read, as float32, when they are asked for."""

    def __init__(self, path: Path, name: str) -> None:
        with safe_open(path, framework="pt") as file:
            self._slice = file.get_slice(name)
        self.shape = tuple(self._slice.get_shape())

    def __getitem__(self, rows: slice) -> np.ndarray:
        array: np.ndarray = self._slice[rows].float().numpy()
        return array


class Checkpoint:
    """Tensors by name. Raises `ModelFileError` where the folder holds no safetensors, or lacks a tensor."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = _files(folder)

    def tensor(self, name: str) -> StoredTensor:
        if name not in self._files:
            raise ModelFileError(f"{self._folder} lacks the tensor {name}; fetch the model again")
        return StoredTensor(self._folder / self._files[name], name)


def _files(folder: Path) -> dict[str, str]:
    """Tensor name -> file name."""
    index = folder / INDEX
    if index.is_file():
        document: dict[str, Any] = json.loads(index.read_text(encoding="utf-8"))
        return dict(document["weight_map"])
    if not (folder / SINGLE).is_file():
        raise ModelFileError(f"{folder} holds no {SINGLE}; save the model with save_pretrained")
    with safe_open(folder / SINGLE, framework="pt") as file:
        return dict.fromkeys(file.keys(), SINGLE)
