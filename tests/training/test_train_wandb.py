"""The figures that train.py sends to Weights & Biases, where wanted."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from run_tools import Run, interrupt

from agents.curve import read_curves
from agents.run_folder import CHECK_FILE
from engine import load_policy
from envs.vector import ReplayBatch

pytestmark = pytest.mark.usefixtures("cache_folder")  # costs and traces of one module: every run here has the same


# -- wandb --------------------------------------------------------------------------------------------------------


class FakeRun:
    def __init__(self, fails: bool) -> None:
        self.fails = fails
        self.logged: list[dict[str, Any]] = []
        self.finished = 0

    def log(self, figures: dict[str, Any]) -> None:
        if self.fails:
            raise RuntimeError("the service is gone")
        self.logged.append(figures)

    def finish(self) -> None:
        self.finished += 1


def fake_wandb(patch: pytest.MonkeyPatch, fails: bool = False) -> tuple[FakeRun, list[dict[str, Any]]]:
    fake, module, settings = FakeRun(fails), ModuleType("wandb"), []

    def init(**given: Any) -> FakeRun:
        settings.append(given)
        return fake

    module.init = init  # type: ignore[attr-defined]
    patch.setitem(sys.modules, "wandb", module)
    return fake, settings


def test_wandb_gets_the_same_figures(run: Run, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake, settings = fake_wandb(monkeypatch)
    code, _, stderr = run("--wandb", "offline", "--seeds", 2, "--check-requests", 1)
    assert code == 0, stderr
    for seed, curve in read_curves(out / "curve.csv").items():
        logged = [figures for figures in fake.logged if f"seed{seed}/step" in figures]
        assert [figures[f"seed{seed}/step"] for figures in logged] == [point.step for point in curve]
        assert [figures[f"seed{seed}/speedup"] for figures in logged] == [point.speedup for point in curve]
    spread = json.loads((out / "validation.json").read_text(encoding="utf-8"))["spread"]
    assert {f"validation/{name}": value for name, value in spread.items()} in fake.logged
    check = json.loads((out / CHECK_FILE).read_text(encoding="utf-8"))
    assert fake.logged[-1] == {f"check/{arm['arm']}": arm["speedup"] for arm in check["arms"]}
    assert (settings[0]["mode"], settings[0]["project"], settings[0]["dir"]) == ("offline", "draftgate", str(out))
    assert settings[0]["config"]["steps"] == 160
    assert fake.finished == 1


def test_wandb_is_closed_when_interrupted(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    fake, _ = fake_wandb(monkeypatch)
    interrupt(monkeypatch, ReplayBatch, "step", 13)
    assert run("--wandb", "offline")[0] == 130
    assert fake.finished == 1


def test_wandb_itself_works_offline(run: Run, out: Path) -> None:
    pytest.importorskip("wandb")
    code, _, stderr = run("--wandb", "offline", "--steps", 8)
    assert code == 0, stderr
    assert "not available" not in stderr
    assert list(out.glob("wandb/offline-run-*"))


def test_wandb_is_not_touched_unless_wanted(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    _, settings = fake_wandb(monkeypatch)
    assert run("--steps", 8)[0] == 0
    assert settings == []


def test_training_goes_on_without_the_wandb_package(run: Run, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    code, _, stderr = run("--wandb", "online", "--steps", 8)
    assert code == 0
    assert "wandb is not available" in stderr
    assert load_policy(out)


def test_training_goes_on_when_wandb_fails_on_the_way(run: Run, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_wandb(monkeypatch, fails=True)
    code, _, stderr = run("--wandb", "online", "--steps", 24)
    assert code == 0
    assert stderr.count("wandb has failed (the service is gone)") == 1
    assert load_policy(out)
