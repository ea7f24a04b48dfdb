"""train.py on a tiny model: what it leaves behind, resuming, interruption, wandb, bad input."""

from __future__ import annotations

import json
import runpy
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from safetensors.numpy import load_file

import train
from agents.training import STATE_FILE, read_curve
from engine import load_policy
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

pytestmark = pytest.mark.usefixtures("cache_folder")  # costs that are calibrated here stay here


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("workload") / "small.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    return path


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def run(target_folder: Path, workload: Path, out: Path, command: Run) -> Run:
    """Runs the command with a tiny model; returns exit code, standard output, standard error."""

    def ran(*arguments: object) -> tuple[int, str, str]:
        defaults = ["--target", target_folder, "--workload", workload, "--out", out, "--max-new-tokens", 8]
        return command(train, *defaults, "--steps", 30, "--check-requests", 0, *arguments)

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
    assert config["menu"].startswith("fresh/0,reuse/0,reuse/ngram/1,")
    assert config["workload_fingerprint"] == load_workload(str(workload), "train").fingerprint

    check = json.loads((out / "check.json").read_text(encoding="utf-8"))
    assert check["requests"] == 3  # all that the validation split holds
    assert [arm["arm"] for arm in check["arms"]] == ["plain", "ucb"]
    assert [arm["mismatched_tokens"] for arm in check["arms"]] == [0, 0]
    assert {o["request"] for o in check["outcomes"]["ucb"]} == {"c/1", "d/1", "d/2"}
    assert stdout.startswith("3 requests of small/validation; intervals resample 2 groups ")


def test_the_policy_says_where_it_comes_from(run: Run, out: Path, target_folder: Path, workload: Path) -> None:
    run("--menu", "fresh/0,reuse/0,reuse/2,reuse/4", "--seed", 2)
    policy = load_policy(out)
    assert (policy.name, str(policy.menu)) == ("ucb", "fresh/0,reuse/0,reuse/ngram/2,reuse/ngram/4")
    told = policy.provenance
    assert (policy.target, policy.precision) == (str(target_folder), "fp32")
    assert (told["agent"], told["seed"], told["workload"]) == ("bandit", 2, str(workload))
    assert told["workload_fingerprint"] == load_workload(str(workload), "train").fingerprint
    assert told["steps"] == read_curve(out / "curve.csv")[-1].step
    assert told["command"].startswith("python train.py --target ")
    assert {"torch", "transformers", "gymnasium", "numpy"} == set(told["versions"])
    assert told["machine"] == policy.costs.machine
    assert told["created"].endswith("Z")


def test_the_policy_keeps_its_precision(run: Run, out: Path) -> None:
    assert run("--precision", "bf16", "--steps", 4)[0] == 0
    assert load_policy(out).precision == "bf16"


def test_the_command_can_be_pasted_into_a_shell(run: Run, out: Path, tmp_path: Path) -> None:
    odd = tmp_path / "it's here; really"
    run("--out", odd)
    words = shlex.split(load_policy(odd).provenance["command"])
    assert words[:2] == ["python", "train.py"]
    assert words[-2:] == ["--out", str(odd)]


def test_no_check_is_run_where_none_is_asked_for(run: Run, out: Path) -> None:
    out.mkdir()
    (out / "check.json").write_text("of the policy before")
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
    assert stderr == (
        f"draftgate: error: {path}: no validation rows to check the policy on; "
        'give some rows the field "split": "validation", or skip the check with --check-requests 0\n'
    )
    assert not out.exists()
    assert run("--workload", path, "--check-requests", 0)[0] == 0


def test_a_workload_that_is_broken_is_not_taken_for_one_without_validation_rows(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text("{\n", encoding="utf-8")
    code, _, stderr = run("--workload", path, "--check-requests", 2)
    assert code == 2
    assert f"{path}:1: " in stderr
    assert "validation" not in stderr


def test_the_prefix_cache_can_be_turned_off(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    original = train.make_env

    def make_env(options: train.Options) -> SpeculativeDecodingEnv:
        env = original(options)
        made.append(env.decoder.parts.prefix_cache.byte_budget)
        return env

    monkeypatch.setattr(train, "make_env", make_env)
    run("--prefix-cache-mib", 0)
    run("--prefix-cache-mib", 1, "--overwrite")
    assert made[0] == 0
    assert 0 < made[1] <= 1 << 20


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


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_state_is_lost_only_where_that_was_asked_for(run: Run, out: Path) -> None:
    run("--steps", 40)
    before = contents(out)
    code, _, stderr = run("--steps", 8)
    mend = "go on with --resume, begin anew with --overwrite, or choose another --out"
    assert (code, stderr) == (2, f"draftgate: error: {out} holds a run's state; {mend}\n")
    code, _, stderr = run("--steps", 8, "--resume", "--overwrite")
    assert (code, stderr) == (2, "draftgate: error: --resume and --overwrite exclude each other; give one of them\n")
    assert contents(out) == before
    code, _, stderr = run("--steps", 8, "--overwrite", "--menu", "reuse/0,reuse/2")
    assert code == 0, stderr
    assert read_curve(out / "curve.csv")[-1].step < 24
    assert str(load_policy(out).menu) == "reuse/0,reuse/ngram/2"
    assert run("--steps", 40, "--resume", "--menu", "reuse/0,reuse/2")[0] == 0


def test_there_must_be_something_to_resume(run: Run, out: Path) -> None:
    code, _, stderr = run("--resume")
    assert code == 2
    assert stderr == f"draftgate: error: {out} holds no state to resume; train without --resume first\n"
    assert not out.exists()


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("target", ["--target", "./other"]),
        ("drafter", ["--drafter", "ngram:history"]),
        ("drafter", ["--drafter", "ngram", "ngram:history"]),
        ("menu", ["--menu", "reuse/0,reuse/2"]),
        ("precision", ["--precision", "bf16"]),
        ("device", ["--device", "cuda"]),
        ("max_new_tokens", ["--max-new-tokens", 9]),
    ],
)
def test_a_run_is_resumed_only_with_its_own_settings(run: Run, out: Path, name: str, arguments: list[object]) -> None:
    run("--steps", 8)
    before = contents(out)
    code, _, stderr = run("--resume", "--steps", 40, *arguments)
    assert code == 2
    assert f"error: {out} was trained with {name} " in stderr
    assert stderr.endswith("; give the same, or begin anew with --overwrite\n")
    assert contents(out) == before


def test_a_run_is_resumed_only_on_its_own_prompts(run: Run, out: Path, workload: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_bytes(workload.read_bytes())
    run("--steps", 8, "--workload", other)
    assert "was trained with workload '" in run("--resume")[2]
    other.write_text(json.dumps(ROWS[0]) + "\n", encoding="utf-8")
    assert "was trained with workload_fingerprint '" in run("--resume", "--workload", other)[2]


def test_the_default_menu_is_the_one_that_it_stands_for(run: Run, out: Path) -> None:
    run("--steps", 8)
    menu = json.loads((out / "config.json").read_text(encoding="utf-8"))["menu"]
    assert run("--resume", "--steps", 30, "--menu", menu)[0] == 0


@pytest.mark.parametrize("content", [None, b"", b"[]", b"{", b"\xff"])
def test_a_configuration_that_is_damaged_is_one_line(run: Run, out: Path, content: bytes | None) -> None:
    run("--steps", 8)
    if content is None:
        (out / "config.json").unlink()
    else:
        (out / "config.json").write_bytes(content)
    code, _, stderr = run("--resume")
    assert code == 2
    assert stderr.startswith(f"draftgate: error: {out / 'config.json'} cannot be read (")
    assert stderr.endswith("); begin anew with --overwrite\n")


def test_a_damaged_state_is_one_line(run: Run, out: Path) -> None:
    run("--steps", 8)
    (out / STATE_FILE).write_bytes((out / STATE_FILE).read_bytes()[:-8])
    code, _, stderr = run("--resume")
    assert code == 2
    assert "cannot be resumed" in stderr.splitlines()[-1]


def test_ctrl_c_saves_and_exports_what_was_learned(run: Run, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        interrupt_after(patch, 19)
        code, _, stderr = run("--steps", 400, "--check-requests", 3)
    assert code == 130
    assert "interrupted after 19 steps; exporting what was learned" in stderr
    assert stderr.splitlines()[-1] == "draftgate: interrupted"
    assert load_policy(out).provenance["steps"] == 19
    assert float(load_file(out / STATE_FILE)["visits"].sum()) == 19.0
    assert not (out / "check.json").exists()
    code, _, stderr = run("--steps", 30, "--resume")
    assert code == 0, stderr
    assert read_curve(out / "curve.csv")[-1].step >= 30


def test_nothing_is_written_before_the_first_step(run: Run, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        interrupt_after(patch, 0)
        code, _, stderr = run()
    assert code == 130
    assert "interrupted before the first step; nothing was written" in stderr
    assert not out.exists()
    run("--steps", 8)
    before = contents(out)
    with monkeypatch.context() as patch:
        interrupt_after(patch, 0)
        assert run("--overwrite", "--seed", 4)[0] == 130
    assert contents(out) == before


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
        (["--seed", "-1"], "a seed from 0"),
        (["--check-requests", "-1"], "check_requests is -1"),
        (["--prefix-cache-mib", "-1"], "give 0 (no cache)"),
    ],
)
def test_bad_input_is_one_line_and_code_2(run: Run, out: Path, arguments: list[str], message: str) -> None:
    code, stdout, stderr = run(*arguments)
    assert (code, stdout) == (2, "")
    assert stderr.startswith("draftgate: error: ")
    assert message in stderr
    assert len(stderr.splitlines()) == 1
    assert not out.exists()
