"""A folder of one JSON document and one file of tensors, sealed by digests: what was altered is not believed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from engine.errors import DraftgateError
from engine.storage import document_digest, move, write_atomically, write_json


@dataclass(frozen=True)
class SealedFormat:
    """A kind of such a folder, and how its errors are worded.

    Attributes:
        name: of both files.
        form: the document's `format`.
        versions: the document's `version`: the one that is written, and older ones that can be read too.
        error: what is raised; each names cause and mend.
        noun: what such a folder holds, as in "holds a policy".
        made, again: how it came to be, and what mends it.
        wanted: what a user should have given.
    """

    name: str
    form: str
    versions: tuple[int, ...]
    error: type[DraftgateError]
    noun: str
    made: str
    again: str
    wanted: str

    def write(self, folder: Path, document: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        """Write both files into `folder`; whoever is killed meanwhile leaves the earlier pair or the new one.

        The tensors wait beside the earlier ones until the document that tells their digest is there. Raises
        `StorageError`.
        """
        tensors = save_tensors({key: np.ascontiguousarray(array) for key, array in arrays.items()})
        sealed = {"format": self.form, "version": self.versions[0], **document}
        sealed["tensors_sha256"] = _digest(tensors)
        self._settle(folder)
        write_atomically(self._waiting(folder), lambda path: path.write_bytes(tensors))
        write_json(self._json(folder), sealed | {"sha256": document_digest(sealed)})
        move(self._waiting(folder), self._tensors(folder))

    def read(self, folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """The inverse of `write`; whoever has understood the document calls `check_document` too.

        Raises `error` where a file is missing, truncated, altered or of another version.
        """
        document = self._read_json(folder)
        path = self._waiting(folder) if self._waits(folder, document) else self._tensors(folder)
        tensors = self._read_bytes(path)
        if document.get("format") != self.form:
            raise self.error(f"{self._json(folder)} is no {self.form} document; {self.wanted}")
        if document.get("version") not in self.versions:
            found = f"format {document.get('version')!r}, this version reads {self.versions[0]}"
            raise self.error(f"{folder} holds {self.noun} of {found}; {self.again} or update draftgate")
        if _digest(tensors) != document.get("tensors_sha256"):
            raise self.error(f"{path} was truncated or altered since its {self.made}; {self.again}")
        try:
            return document, load_tensors(tensors)
        except SafetensorError as error:
            raise self.error(f"{path} is damaged ({error}); {self.again}") from error

    def check_document(self, folder: Path, document: Mapping[str, Any]) -> None:
        """Raise `error` where the document is not as it was written: after its contents were checked, whose faults
        have clearer messages."""
        if document.get("sha256") != document_digest(document):
            raise self.error(f"{self._json(folder)} was altered since its {self.made}; {self.again}")

    def is_in(self, folder: Path) -> bool:
        """Whether such a document was written here, damaged or not."""
        return self._json(folder).exists()

    def _json(self, folder: Path) -> Path:
        return folder / f"{self.name}.json"

    def _tensors(self, folder: Path) -> Path:
        return folder / f"{self.name}.safetensors"

    def _waiting(self, folder: Path) -> Path:
        return folder / f"{self.name}.next.safetensors"

    def _settle(self, folder: Path) -> None:
        """Finish a save that was killed: tensors that the document tells of do not wait on, or the next would go over
        them."""
        try:
            document = self._read_json(folder)
        except DraftgateError:  # nothing was saved here, or nothing that is whole
            return
        if self._waits(folder, document):
            move(self._waiting(folder), self._tensors(folder))

    def _waits(self, folder: Path, document: Mapping[str, Any]) -> bool:
        """Whether the tensors that the document tells of still wait to be put in place."""
        waiting = self._waiting(folder)
        return waiting.is_file() and _digest(self._read_bytes(waiting)) == document.get("tensors_sha256")

    def _read_json(self, folder: Path) -> dict[str, Any]:
        path = self._json(folder)
        data = self._read_bytes(path)
        try:
            document = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise self.error(f"{path} is not valid JSON ({error}); {self.again}") from error
        if not isinstance(document, dict):
            raise self.error(f"{path} is no {self.form} document; {self.wanted}")
        return document

    def _read_bytes(self, path: Path) -> bytes:
        try:
            return path.read_bytes()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise self.error(f"{path} cannot be read ({reason}); {self.wanted}") from error


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
