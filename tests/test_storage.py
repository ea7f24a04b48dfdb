"""Files arrive whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path

import pytest

from engine import storage
from engine.errors import StorageError
from engine.storage import cache_folder, folder_made_atomically, write_atomically, write_json

MEND = "free some space or choose another place"


def full_disk(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_write_makes_folders_and_replaces(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.txt"
    for text in ("one", "two"):
        write_atomically(path, lambda temporary, text=text: temporary.write_text(text))
        assert path.read_text() == text
    assert names(path.parent) == ["b.txt"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("old")

    def write(temporary: Path) -> None:
        temporary.write_text("ne")
        assert path.read_text() == "old"
        assert temporary.parent == path.parent  # a rename within one folder is atomic
        temporary.write_text("new")

    write_atomically(path, write)
    assert path.read_text() == "new"


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt(), MemoryError()])
def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "x"
    path.write_text("old")

    def write(temporary: Path) -> None:
        temporary.write_text("half")
        raise error

    with pytest.raises(type(error)):
        write_atomically(path, write)
    assert path.read_text() == "old"
    assert names(tmp_path) == ["x"]


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("old")
    with pytest.raises(StorageError) as caught:
        write_atomically(path, full_disk)
    assert str(caught.value) == f"cannot write {path}: No space left on device; {MEND}"
    assert path.read_text() == "old"
    assert names(tmp_path) == ["x"]


def test_a_device_that_is_full(tmp_path: Path) -> None:
    with pytest.raises(StorageError) as caught:
        write_atomically(tmp_path / "x", lambda _: Path("/dev/full").write_bytes(b"x"))
    assert str(caught.value) == f"cannot write {tmp_path / 'x'}: No space left on device; {MEND}"
    assert names(tmp_path) == []


def test_a_device_stays_a_device(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StorageError, match="pipe: it is no regular file; "):
        write_json(tmp_path / "pipe", {})
    assert (tmp_path / "pipe").is_fifo()
    assert names(tmp_path) == ["pipe"]


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    for path, reason in [
        (tmp_path / "file" / "x", "File exists"),
        (tmp_path / "file" / "x" / "y", "Not a directory"),
        (tmp_path / "folder", "Is a directory"),
        (tmp_path / ("n" * 300), "File name too long"),
        (Path("/proc/nowhere/x"), "No such file or directory"),
    ]:
        with pytest.raises(StorageError) as caught:
            write_json(path, {})
        assert str(caught.value) == f"cannot write {path}: {reason}; {MEND}"
    assert names(tmp_path) == ["file", "folder"]
    assert names(tmp_path / "folder") == ["inner"]


def test_json_is_indented_and_ends_its_last_line(tmp_path: Path) -> None:
    write_json(tmp_path / "x.json", {"a": [1, "é"]})
    text = (tmp_path / "x.json").read_text(encoding="utf-8")
    assert json.loads(text) == {"a": [1, "é"]}
    assert text.startswith('{\n  "a"')
    assert text.endswith("}\n")


def test_json_without_nan(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "x.json", float("nan"))
    assert names(tmp_path) == []


def test_folder_appears_when_the_block_ends(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "model"
    with folder_made_atomically(folder) as temporary:
        (temporary / "weights").write_text("w")
        assert not folder.exists()
    assert names(folder) == ["weights"]
    assert names(folder.parent) == ["model"]


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt()])
def test_folder_vanishes_when_the_block_fails(tmp_path: Path, error: BaseException) -> None:
    def fill() -> None:
        with folder_made_atomically(tmp_path / "model") as temporary:
            (temporary / "weights").write_text("half")
            raise error

    with pytest.raises(type(error)):
        fill()
    assert names(tmp_path) == []


def test_the_first_of_two_processes_keeps_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    with folder_made_atomically(folder) as slow:
        (slow / "weights").write_text("second")
        with folder_made_atomically(folder) as quick:
            (quick / "weights").write_text("first")
    assert (folder / "weights").read_text() == "first"
    assert names(tmp_path) == ["model"]


def test_a_file_in_a_folders_place(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.write_text("a file")
    with pytest.raises(StorageError) as caught, folder_made_atomically(folder):
        pass
    assert str(caught.value) == f"cannot write {folder}: Not a directory; {MEND}"
    assert folder.read_text() == "a file"


def test_a_disk_too_full_for_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage.tempfile, "mkdtemp", full_disk)
    with pytest.raises(StorageError) as caught, folder_made_atomically(tmp_path / "model"):
        pass
    assert str(caught.value) == f"cannot write {tmp_path / 'model'}: No space left on device; {MEND}"


def test_cache_folder_can_be_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTGATE_CACHE", "/somewhere/else")
    assert cache_folder() == Path("/somewhere/else")
    for name in ("", None):
        monkeypatch.setenv("DRAFTGATE_CACHE", name) if name is not None else monkeypatch.delenv("DRAFTGATE_CACHE")
        assert cache_folder().name == "draftgate"
