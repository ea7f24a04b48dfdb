"""The tensors of a Hugging Face folder: read a few channels at a time, so that no second model is in memory, or whole
as transformers' own model. Either way all must be there, and finite."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from engine.errors import ModelFileError, UnsupportedModelError

SHOWN = 3  # missing tensors that an error names
_FLOATS = {torch.float32, torch.bfloat16, torch.float16, torch.float64}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class Stored(Protocol):
    """What is read when it is sliced, as float32: an array, or a tensor in a file."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, rows: slice, /) -> np.ndarray: ...


class StoredTensor:
    """A tensor in a file: slices of its first dimension are read, as float32, when they are asked for.

    Raises `ModelFileError` where one that is read holds NaN or infinity.
    """

    def __init__(self, path: Path, name: str) -> None:
        with safe_open(path, framework="pt") as file:
            self._slice = file.get_slice(name)
        self._name = name
        self.shape = tuple(self._slice.get_shape())

    def __getitem__(self, rows: slice) -> np.ndarray:
        array: np.ndarray = self._slice[rows].float().numpy()
        if not np.isfinite(array).all():
            raise ModelFileError(_not_finite(self._name))
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


def load_whole(folder: str, dtype: torch.dtype) -> Any:
    """transformers' own model of a folder or hub id, on the CPU.

    Raises `ModelFileError` where the files lack tensors, which transformers would fill with random numbers, or hold
    some that are not finite in `dtype`; `UnsupportedModelError` for a model without layers.
    """
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, use_safetensors=True, output_loading_info=True
    )
    model, report = loaded
    if getattr(model.config.get_text_config(), "num_hidden_layers", None) == 0:
        raise UnsupportedModelError(f"the model in {folder} has no layers; use one that has")
    missing = sorted(report["missing_keys"])
    if missing:
        some = ", ".join(missing[:SHOWN]) + (f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else "")
        raise ModelFileError(f"{folder} lacks the tensors {some}; fetch the model again")
    for name, parameter in model.named_parameters():
        if not _is_finite(parameter):
            raise ModelFileError(_not_finite(name, " in fp16" if dtype == torch.float16 else ""))
    return model


def _is_finite(tensor: torch.Tensor) -> bool:
    if tensor.dtype not in _FLOATS or not tensor.numel():
        return True
    return all(bool(bound.isfinite()) for bound in tensor.aminmax())  # NaN comes out as both


def _not_finite(name: str, where: str = "") -> str:
    wider = " or choose a wider precision" if where else ""
    return f"{name} holds numbers that are not finite{where}; fetch the model again{wider}"


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
