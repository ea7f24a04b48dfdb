"""What all tests share: one thread, tiny models saved once a session, a cache of one's own, commands run in-process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import compile_kernels, load_tiny, save_tiny

from engine import calibration, command_line, storage
from engine.models import LoadedModel

KERNELS = storage.cache_folder().resolve() / "kernels"


def pytest_configure(config: pytest.Config) -> None:
    """Compile the kernels before workers begin, each of which would compile them for itself."""
    if not hasattr(config, "workerinput"):
        compile_kernels()


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def quick_calibration() -> Iterator[None]:
    """Costs of tiny models need not be known well."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"CONTEXTS": (32, 96), "READINGS": (16, 64), "ROUNDS": 3}.items():
            patch.setattr(calibration, name, value)
        patch.setattr(calibration, "NOISY", float("inf"))  # else a busy machine would keep nothing
        patch.setattr(calibration, "READING_ROUNDS", 2)
        patch.setattr(calibration, "BOOKKEEPING_ROUNDS", 2)
        yield


@pytest.fixture(scope="session")
def llama() -> LoadedModel:
    """A tiny Llama in memory."""
    return load_tiny("llama")


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a chat template, saved as a Hugging Face folder."""
    return save_tiny(tmp_path_factory.mktemp("target"), "llama")


@pytest.fixture(scope="session")
def drafter_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A smaller Llama with the same tokenizer."""
    return save_tiny(tmp_path_factory.mktemp("drafter"), "drafter")


@pytest.fixture(scope="module")
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What a module's tests calibrate or convert stays here; compiled kernels are everyone's."""
    folder = tmp_path_factory.mktemp("cache")
    KERNELS.mkdir(parents=True, exist_ok=True)
    (folder / "kernels").symlink_to(KERNELS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRAFTGATE_CACHE", str(folder))
        yield folder


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs a command's module in this process with the words that follow its file's name.

    Returns exit code, standard output, standard error.
    """

    def ran(module: Any, *words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [Path(module.__file__).name, *map(str, words)])
        capsys.readouterr()
        code = 0
        try:
            command_line.run(module.Options, module.main, "A command.")
        except SystemExit as end:
            code = int(end.code or 0)
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.out, captured.err

    return ran
