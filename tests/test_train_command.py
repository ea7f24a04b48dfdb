"""train.py on a tiny model: what it leaves behind, resuming, interruption, wandb, bad input."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from safetensors.numpy import load_file

import train
from agents.training import STATE_FILE, read_curve
from engine import command_line, load_policy
from envs.live import SpeculativeDecodingEnv
from envs.workloads import load_workload

ROOT = Path(train.__file__).parent
ROWS = [
    {"id": "a", "kind": "talk", "turns": ["the and in", "then?"], "split": "train"},
    {"id": "b", "kind": "chat", "turns": ["on and on and on and on"], "split": "train"},
    {"id": "c", "kind": "chat", "turns": ["again and again"], "split": "validation"},
    {"id": "d", "kind": "talk", "turns": ["the other", "and then?"], "split": "validation"},
]

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module", autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Costs that are calibrated here stay here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRAFTGATE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("workload") / "small.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    return path


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def run(
    target_folder: Path,
    workload: Path,
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Run:
    """Runs the command with a tiny model; returns exit code, standard output, standard error."""

    def ran(*arguments: object) -> tuple[int, str, str]:
        defaults = ["--target", target_folder, "--workload", workload, "--out", out, "--max-new-tokens", 8]
        words = ["train.py", *defaults, "--steps", 30, "--check-requests", 0, *arguments]
        monkeypatch.setattr(sys, "argv", [str(word) for word in words])
        code = 0
        try:
            command_line.run(train.Options, train.main, "Train.")
        except SystemExit as end:
            code = int(end.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return ran


def interrupt_after(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Ctrl-C in the environment's step number `steps` + 1."""
    original, taken = SpeculativeDecodingEnv.step, []

    def step(self: SpeculativeDecodingEnv, action: Any) -> Any:
        if len(taken) == steps:
            raise KeyboardInterrupt
        taken.append(action)
        return original(self, action)

    monkeypatch.setattr(SpeculativeDecodingEnv, "step", step)


def learned_steps(folder: Path) -> float:
    """Steps of all cells and arms that were really pulled: the decoding ones are counted once in `times`."""
    return float(load_file(folder / STATE_FILE)["times"][..., 0].sum())


# -- what it leaves behind ----------------------------------------------------------------------------------------


def test_a_run_leaves_policy_curve_state_and_check(run: Run, out: Path, workload: Path, target_folder: Path) -> None:
    code, stdout, stderr = run("--check-requests", 5, "--seed", 3)
    assert code == 0, stderr
    files = {path.name for path in out.iterdir()}
    assert files == {
        "policy.json",
        "policy.safetensors",
        "config.json",
        "curve.csv",
        "curve.png",
        "check.json",
        STATE_FILE,
    }
    assert (out / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert "calibrated: plain step" in stderr
    assert str(out) in stderr

    curve = read_curve(out / "curve.csv")
    assert curve[-1].step >= 30 > curve[-2].step
    trained_on = {c.id for c in load_workload(str(workload), "train").conversations}
    assert {point.request.partition("/")[0] for point in curve} <= trained_on
    assert all(point.tokens <= 8 for point in curve)

    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    assert (config["target"], config["steps"], config["seed"]) == (str(target_folder), 30, 3)
    assert config["out"] == str(out)

    check = json.loads((out / "check.json").read_text(encoding="utf-8"))
    assert check["requests"] == 3  # all that the validation split holds
    assert [arm["arm"] for arm in check["arms"]] == ["plain", "ucb"]
    assert [arm["mismatched_tokens"] for arm in check["arms"]] == [0, 0]
    assert {o["request"] for o in check["outcomes"]["ucb"]} == {"c/1", "d/1", "d/2"}
    assert stdout.splitlines()[0] == "3 requests of small/validation"


def test_the_policy_says_where_it_comes_from(run: Run, out: Path, target_folder: Path) -> None:
    run("--menu", "fresh/0,reuse/0,reuse/2,reuse/4", "--seed", 2)
    policy = load_policy(out)
    assert (policy.name, str(policy.menu)) == ("ucb", "fresh/0,reuse/0,reuse/ngram/2,reuse/ngram/4")
    told = policy.provenance
    assert (told["target"], told["precision"], told["agent"], told["seed"]) == (str(target_folder), "fp32", "bandit", 2)
    assert told["steps"] == read_curve(out / "curve.csv")[-1].step
    assert told["command"].startswith("python train.py --target ")
    assert {"torch", "transformers", "gymnasium", "numpy"} == set(told["versions"])
    assert told["machine"] == policy.costs.machine
    assert told["created"].endswith("Z")


def test_no_check_is_run_where_none_is_asked_for(run: Run, out: Path) -> None:
    code, stdout, _ = run("--check-requests", 0)
    assert (code, stdout) == (0, "")
    assert not (out / "check.json").exists()


def test_a_workload_without_held_back_requests_is_refused_before_the_training(
    run: Run, out: Path, tmp_path: Path
) -> None:
    path = tmp_path / "train-only.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\n", encoding="utf-8")
    code, _, stderr = run("--workload", path, "--check-requests", 2)
    assert code == 2
    assert "the split 'validation'" in stderr
    assert not out.exists()


# -- resuming and interruption ------------------------------------------------------------------------------------


def test_resume_goes_on_where_the_state_ends(run: Run, out: Path) -> None:
    run("--steps", 12)
    before, learned = read_curve(out / "curve.csv"), learned_steps(out)
    code, _, stderr = run("--steps", 40, "--resume")
    assert code == 0, stderr
    curve = read_curve(out / "curve.csv")
    assert curve[: len(before)] == before
    assert curve[-1].step >= 40 > before[-1].step
    assert learned_steps(out) > learned
    assert load_policy(out).provenance["steps"] == curve[-1].step


def test_without_resume_a_run_begins_anew(run: Run, out: Path) -> None:
    run("--steps", 40)
    run("--steps", 8)
    assert read_curve(out / "curve.csv")[-1].step < 24


def test_there_must_be_something_to_resume(run: Run, out: Path) -> None:
    code, _, stderr = run("--resume")
    assert code == 2
    assert stderr.splitlines()[-1].endswith("holds no state to resume; train without --resume first")
    assert not (out / "policy.json").exists()


def test_a_damaged_state_is_one_line(run: Run, out: Path) -> None:
    run("--steps", 8)
    (out / STATE_FILE).write_bytes((out / STATE_FILE).read_bytes()[:-8])
    code, _, stderr = run("--resume")
    assert code == 2
    assert "cannot be resumed" in stderr.splitlines()[-1]


def test_the_state_of_another_menu_is_refused(run: Run, out: Path) -> None:
    run("--steps", 8)
    code, _, stderr = run("--resume", "--menu", "reuse/0,reuse/2")
    assert code == 2
    assert "cannot be resumed" in stderr.splitlines()[-1]


@pytest.mark.parametrize("steps", [0, 19])
def test_ctrl_c_saves_and_exports_what_was_learned(
    run: Run, out: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    with monkeypatch.context() as patch:
        interrupt_after(patch, steps)
        code, _, stderr = run("--steps", 400, "--check-requests", 3)
    assert code == 130
    assert f"interrupted after {steps} steps; exporting what was learned" in stderr
    assert stderr.splitlines()[-1] == "draftgate: interrupted"
    policy = load_policy(out)
    assert policy.provenance["steps"] == steps
    assert (steps == 0) == (float(load_file(out / STATE_FILE)["sums"].sum()) == 0.0)
    assert not (out / "check.json").exists()
    code, _, stderr = run("--steps", steps + 10, "--resume")
    assert code == 0, stderr
    assert read_curve(out / "curve.csv")[-1].step >= steps + 10


# -- wandb --------------------------------------------------------------------------------------------------------


class FakeRun:
    def __init__(self, fails: bool) -> None:
        self.fails = fails
        self.logged: list[tuple[int, dict[str, Any]]] = []
        self.finished = 0

    def log(self, figures: dict[str, Any], step: int) -> None:
        if self.fails:
            raise RuntimeError("the service is gone")
        self.logged.append((step, figures))

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


def test_wandb_gets_every_point_of_the_curve(run: Run, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake, settings = fake_wandb(monkeypatch)
    code, _, stderr = run("--wandb", "offline")
    assert code == 0, stderr
    assert [step for step, _ in fake.logged] == [point.step for point in read_curve(out / "curve.csv")]
    assert fake.logged[0][1]["train/speedup"] == read_curve(out / "curve.csv")[0].speedup
    assert all(name.startswith("train/") for _, figures in fake.logged for name in figures)
    assert (settings[0]["mode"], settings[0]["project"], settings[0]["dir"]) == ("offline", "draftgate", str(out))
    assert fake.finished == 1


def test_wandb_is_closed_when_interrupted(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    fake, _ = fake_wandb(monkeypatch)
    interrupt_after(monkeypatch, 20)
    assert run("--wandb", "offline")[0] == 130
    assert fake.finished == 1


def test_wandb_itself_works_offline(run: Run, out: Path) -> None:
    pytest.importorskip("wandb")
    code, stdout, stderr = run("--wandb", "offline", "--steps", 4)
    assert (code, stdout) == (0, ""), stderr
    assert "not available" not in stderr
    assert list(out.glob("wandb/offline-run-*"))


def test_wandb_is_not_touched_unless_wanted(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    _, settings = fake_wandb(monkeypatch)
    assert run()[0] == 0
    assert settings == []


def test_training_goes_on_without_the_wandb_package(run: Run, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    code, _, stderr = run("--wandb", "online")
    assert code == 0
    assert "wandb is not available" in stderr
    assert load_policy(out)


def test_training_goes_on_when_wandb_fails_on_the_way(run: Run, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_wandb(monkeypatch, fails=True)
    code, _, stderr = run("--wandb", "online")
    assert code == 0
    assert stderr.count("wandb has failed (the service is gone)") == 1
    assert load_policy(out)


# -- bad input ----------------------------------------------------------------------------------------------------


def test_a_misspelt_option_ends_with_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Through the file itself, as `python train.py --stepz 3` would."""
    monkeypatch.setattr(sys, "argv", ["train.py", "--stepz", "3"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
    assert end.value.code == 2
    assert "--steps" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "./nowhere"], "no such model file or folder"),
        (["--drafter", "ngramm"], "drafter 'ngramm' is unknown"),
        (["--menu", "reuse/0,reuse/x"], "menu entry 'reuse/x' cannot be read"),
        (["--workload", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
        (["--precision", "fp64"], "precision 'fp64' is unknown"),
        (["--device", "tpu"], "device 'tpu'"),
        (["--steps", "0"], "give at least 1 step"),
    ],
)
def test_bad_input_is_one_line_and_code_2(run: Run, out: Path, arguments: list[str], message: str) -> None:
    code, stdout, stderr = run(*arguments)
    assert (code, stdout) == (2, "")
    assert stderr.startswith("draftgate: error: ")
    assert message in stderr
    assert len(stderr.splitlines()) == 1
    assert not out.exists()
