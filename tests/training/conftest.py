"""train.py on a tiny model, run in this process."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from run_tools import PLOTS, ROWS, Run, write_rows

import agents.pipeline
import agents.seeds
import train


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("workload") / "small.jsonl", *ROWS)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def run(target_folder: Path, workload: Path, out: Path, command: Run) -> Run:
    """Runs the command with a tiny model; returns exit code, standard output, standard error."""

    def ran(*arguments: object) -> tuple[int, str, str]:
        given = dict(pairwise(arguments))
        defaults: dict[object, object] = {
            "--target": target_folder,
            "--workload": workload,
            "--out": out,
            "--max-new-tokens": 12,
            "--agent": "bandit",
            "--steps": 160,
            "--check-requests": 0,
            "--export": "learned",
        }
        words = [word for name, value in defaults.items() if name not in given for word in (name, value)]
        return command(train, *words, *arguments)

    return ran


@pytest.fixture(autouse=True)
def quick_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes longer than a whole run of these; one test puts the real ones back."""
    for name in PLOTS:
        monkeypatch.setattr(agents.pipeline, name, lambda _, path: path.write_text("drawn"))
