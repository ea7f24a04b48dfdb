"""The tensors of a Hugging Face folder, read one at a time: no second model in memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from engine.errors import ModelFileError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class Checkpoint:
    """Tensors by name. Raises `ModelFileError` where the folder holds no safetensors, or lacks a tensor."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = _files(folder)

    def read(self, name: str) -> np.ndarray:
        """The tensor `name` as float32."""
        if name not in self._files:
            raise ModelFileError(f"{self._folder} lacks the tensor {name}; fetch the model again")
        with safe_open(self._folder / self._files[name], framework="pt") as file:
            array: np.ndarray = file.get_tensor(name).float().numpy()
        return array


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
