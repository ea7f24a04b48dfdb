"""What all tests share: one thread, and tiny models saved once a session."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import load_tiny, save_tiny

from engine.models import LoadedModel


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


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
