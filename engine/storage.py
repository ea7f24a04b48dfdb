"""Where files go, and how they get there whole: atomic writes and the cache folder."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import platformdirs

from engine.errors import StorageError

CACHE_VARIABLE = "DRAFTGATE_CACHE"


def cache_folder() -> Path:
    """`$DRAFTGATE_CACHE`, or the user's cache directory. It can be deleted at any time."""
    return Path(os.environ.get(CACHE_VARIABLE) or platformdirs.user_cache_dir("draftgate", appauthor=False))


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file beside `path`, then move it there: a reader never sees half a file.

    Raises `StorageError` where the disk is full or the folder cannot be written; `path` then is as it was.
    """
    with _storage_errors(path):
        if path.exists() and not (path.is_file() or path.is_dir()):  # a device would become a file
            raise OSError(errno.EINVAL, "it is no regular file")
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(handle)
        temporary = Path(name)
        try:
            write(temporary)
            temporary.chmod(0o644)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def move(source: Path, path: Path) -> None:
    """Put a file in another's place. Raises `StorageError`."""
    with _storage_errors(path):
        source.replace(path)


def write_json(path: Path, document: Any) -> None:
    """Write `document` as indented JSON, atomically. Raises `StorageError`."""
    text = json.dumps(document, indent=2, allow_nan=False) + "\n"
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


@contextmanager
def folder_made_atomically(folder: Path) -> Iterator[Path]:
    """A temporary folder that becomes `folder` when the block ends well, and vanishes when it does not.

    Where another process made `folder` in the meantime, that one stays.
    """
    with _storage_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        yield temporary
        with _storage_errors(folder):
            _move_unless_there(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _move_unless_there(temporary: Path, folder: Path) -> None:
    try:
        temporary.replace(folder)
    except OSError:
        if not folder.is_dir():
            raise


@contextmanager
def _storage_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise StorageError(f"cannot write {path}: {reason}; free some space or choose another place") from error


def document_digest(document: Mapping[str, Any]) -> str:
    """SHA-256 of a JSON document without its own `sha256`, in a form that no spacing changes."""
    kept = {name: value for name, value in document.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()
