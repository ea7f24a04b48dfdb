"""What tests of train.py share."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import agents.pipeline
import agents.seeds
import train
from engine import load_policy

ROOT = Path(train.__file__).parent
ROWS = [
    {"id": "a", "kind": "talk", "turns": ["the and in", "then?"], "split": "train"},
    {"id": "b", "kind": "chat", "turns": ["on and on and on and on"], "split": "train"},
    {"id": "c", "kind": "chat", "turns": ["again and again"], "split": "validation"},
    {"id": "d", "kind": "talk", "turns": ["the other", "and then?"], "split": "validation"},
]
FILES = {
    *("README.md", "config.json", "costs.json", "costs.png", "curve.csv", "curve.png"),
    *("policy.json", "policy.safetensors", "seeds", "validation.json"),
}

Run = Callable[..., tuple[int, str, str]]

PLOTS = {name: getattr(agents.pipeline, name) for name in ("plot_costs", "plot_curves")}


def tensors(folder: Path) -> bytes:
    load_policy(folder)
    return (folder / "policy.safetensors").read_bytes()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def interrupt(patch: pytest.MonkeyPatch, owner: Any, name: str, after: int = 0) -> None:
    """Ctrl-C in call number `after` + 1 of a function."""
    original, calls = getattr(owner, name), []

    def interrupted(*args: Any, **settings: Any) -> Any:
        if len(calls) == after:
            raise KeyboardInterrupt
        calls.append(None)
        return original(*args, **settings)

    patch.setattr(owner, name, interrupted)


def write_rows(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
