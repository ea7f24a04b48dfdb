"""A folder of one JSON document and one file of tensors, sealed by digests: what was altered is not believed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from engine.errors import TraceError
from engine.storage import document_digest, write_atomically, write_json


def write_sealed(folder: Path, name: str, document: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    """Write `name`.safetensors and `name`.json into `folder`, each atomically. Raises `StorageError`."""
    tensors = save_tensors({key: np.ascontiguousarray(array) for key, array in arrays.items()})
    sealed = dict(document) | {"tensors_sha256": hashlib.sha256(tensors).hexdigest()}
    write_atomically(folder / f"{name}.safetensors", lambda path: path.write_bytes(tensors))
    write_json(folder / f"{name}.json", sealed | {"sha256": document_digest(sealed)})


def read_sealed(folder: Path, name: str, form: str, version: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The inverse of `write_sealed`, for a document whose `format` and `version` are these.

    Raises `TraceError` where a file is missing, truncated, altered or of another version.
    """
    document = _read_json(folder / f"{name}.json")
    path = folder / f"{name}.safetensors"
    tensors = _read_bytes(path)
    if document.get("format") != form:
        raise TraceError(f"{folder / name}.json holds no {form}; give a folder that was recorded")
    if document.get("version") != version:
        found = f"format {document.get('version')!r}, this version reads {version}"
        raise TraceError(f"the traces in {folder} have {found}; record them again")
    if hashlib.sha256(tensors).hexdigest() != document.get("tensors_sha256"):
        raise TraceError(f"{path} was truncated or altered since its recording; record it again")
    if document.get("sha256") != document_digest(document):
        raise TraceError(f"{folder / name}.json was altered since its recording; record it again")
    try:
        return document, load_tensors(tensors)
    except SafetensorError as error:
        raise TraceError(f"{path} is damaged ({error}); record it again") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(_read_bytes(path))
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path} is not valid JSON ({error}); record it again") from error
    if not isinstance(document, dict):
        raise TraceError(f"{path} holds no JSON object; give a folder that was recorded")
    return document


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise TraceError(f"{path} cannot be read ({reason}); give a folder that was recorded") from error
