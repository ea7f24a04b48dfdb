"""evaluate.py on a tiny model and the policy that train.py made of it."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import evaluate
import train
from engine import load_policy
from engine.decoder import SpeculativeDecoder
from engine.guard import Guard
from engine.menu import parse_menu
from engine.results import Generation
from envs.workloads import load_workload

ROOT = Path(evaluate.__file__).parent
ROWS = [
    {"id": "a", "kind": "talk", "turns": ["the and in", "then?"], "split": "train"},
    {"id": "c", "kind": "chat", "turns": ["again and again"], "split": "test"},
    {"id": "d", "kind": "talk", "turns": ["the other", "and then?"], "split": "test"},
    {"id": "e", "kind": "chat", "turns": ["on and on and on"], "split": "validation"},
]
ARMS = ["plain", "fixed:2", "fixed:4", "policy ucb"]

Run = Callable[..., tuple[int, str, str]]

pytestmark = pytest.mark.usefixtures("cache_folder")  # costs that are calibrated here stay here


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("workload") / "small.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def policy(cache_folder: Path, target_folder: Path, workload: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("policy")
    train.main(
        train.Options(
            target=str(target_folder),
            workload=[str(workload)],
            agent="bandit",
            menu="fresh/0,reuse/0,reuse/2,reuse/4",
            steps=20,
            max_new_tokens=8,
            check_requests=0,
            export="learned",
            out=out,
        )
    )
    # The cut hangs on measured costs: without one the arms are the same wherever this runs.
    replace(load_policy(out), min_confidence=0.0).save(out)
    return out


@pytest.fixture
def run(policy: Path, workload: Path, command: Run) -> Run:
    """Runs the command; returns exit code, standard output, standard error."""

    def ran(*arguments: object) -> tuple[int, str, str]:
        return command(evaluate, "--policy", policy, "--workload", workload, "--max-new-tokens", 8, *arguments)

    return ran


def strict(text: str) -> Any:
    """JSON proper: Python's own reader lets NaN and infinities pass."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_it_ends_with_one_json_document(run: Run, policy: Path) -> None:
    code, stdout, stderr = run()
    assert code == 0, stderr
    lines = stdout.splitlines()
    document = strict(lines[-1])
    assert [arm["arm"] for arm in document["arms"]] == ARMS
    assert [arm["mismatched_tokens"] for arm in document["arms"]] == [0] * 4
    assert len({arm["tokens"] for arm in document["arms"]}) == 1
    assert document["arms"][0]["speedup"] == 1.0
    assert (document["requests"], document["groups"], document["guard"]) == (3, 2, True)
    assert set(document["kinds"]) == {"chat", "talk"}
    assert document["workload"] == "small/test"
    assert document["policies"] == [str(policy)]
    assert document["machine"] == load_policy(policy).costs.machine
    assert "outcomes" not in document
    assert lines[0].startswith("3 requests of small/test; intervals resample 2 groups ")
    assert [line[:12].rstrip() for line in lines[2:6]] == ARMS
    assert lines[7].split() == ["speed-up", "chat", "talk"]
    assert not any(line.startswith("{") for line in lines[:-1])
    assert (policy / "evaluation.png").read_bytes().startswith(b"\x89PNG")


def test_the_whole_judgement_goes_to_a_file(run: Run, tmp_path: Path) -> None:
    target, plot = tmp_path / "deeper" / "judgement.json", tmp_path / "plots" / "speed.png"
    code, stdout, stderr = run("--json", target, "--plot", plot)
    assert code == 0, stderr
    document = strict(target.read_text(encoding="utf-8"))
    outcomes = document.pop("outcomes")
    assert document == strict(stdout.splitlines()[-1])
    assert list(outcomes) == ARMS
    assert [o["request"] for o in outcomes["policy ucb"]] == ["c/1", "d/1", "d/2"]
    assert all(o["tokens"] <= 8 for arm in outcomes.values() for o in arm)
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_the_document_comes_before_the_plot_and_without_it(run: Run, tmp_path: Path) -> None:
    blocked, target = tmp_path / "file" / "speed.png", tmp_path / "judgement.json"
    (tmp_path / "file").write_text("not a folder")
    code, stdout, stderr = run("--requests", 1, "--plot", blocked, "--json", target)
    assert code == 0
    assert strict(stdout.splitlines()[-1])["requests"] == 1
    assert strict(target.read_text(encoding="utf-8"))["requests"] == 1
    assert f"the plot is left out: cannot write {blocked}: " in stderr.splitlines()[-1]


def test_a_file_that_cannot_be_written_takes_only_itself(run: Run, tmp_path: Path) -> None:
    blocked = tmp_path / "file" / "judgement.json"
    (tmp_path / "file").write_text("not a folder")
    code, stdout, stderr = run("--requests", 1, "--json", blocked)
    assert code == 2
    assert strict(stdout.splitlines()[-1])["requests"] == 1
    assert f"draftgate: error: cannot write {blocked}: " in stderr.splitlines()[-1]


@pytest.mark.parametrize("guard", [True, False])
def test_the_guard_is_an_option(run: Run, monkeypatch: pytest.MonkeyPatch, guard: bool) -> None:
    guarded: dict[str, bool] = {}
    original = SpeculativeDecoder.generate

    def generate(self: SpeculativeDecoder, *args: Any, **settings: Any) -> Generation:
        guarded[self.controller.name] = isinstance(self.controller, Guard)
        return original(self, *args, **settings)

    monkeypatch.setattr(SpeculativeDecoder, "generate", generate)
    code, stdout, stderr = run("--requests", 1, "--controllers", "heuristic", "--guard" if guard else "--no-guard")
    assert code == 0, stderr
    assert strict(stdout.splitlines()[-1])["guard"] == guard
    names = ("plain", "fixed:2", "fixed:4", "heuristic")
    assert guarded == {**dict.fromkeys(names, False), "ucb": guard}


def test_the_policy_s_engine_is_the_default(policy: Path, target_folder: Path) -> None:
    loaded = load_policy(policy)
    options = evaluate.Options(policy=[policy], prefix_cache_mib=1)
    decoder = evaluate.load_decoder(options, loaded)
    assert decoder.target.precision == loaded.precision == "fp32"
    assert loaded.target == str(target_folder)
    assert 0 < decoder.parts.prefix_cache.byte_budget <= 1 << 20
    other = evaluate.load_decoder(replace(options, precision="bf16", exact="off"), loaded)
    assert (other.target.precision, other.exact) == ("bf16", "off")


@pytest.mark.parametrize(
    ("arguments", "requests", "name"),
    [
        (["--requests", "2"], 2, "small/test"),
        (["--requests", "0"], 3, "small/test"),
        (["--split", "all", "--requests", "0"], 6, "small"),
        (["--split", "validation"], 1, "small/validation"),
    ],
)
def test_which_requests_are_judged(run: Run, arguments: list[str], requests: int, name: str) -> None:
    code, stdout, stderr = run(*arguments)
    assert code == 0, stderr
    document = strict(stdout.splitlines()[-1])
    assert (document["requests"], document["workload"]) == (requests, name)
    assert f"{requests}/{requests}" in stderr  # the progress bar counts requests


def test_further_controllers_are_judged_too(run: Run) -> None:
    names = ["heuristic", "cost-model", "threshold:0.5", "fresh"]
    code, stdout, stderr = run("--controllers", *names, "--requests", "1")
    assert code == 0, stderr
    arms = [arm["arm"] for arm in strict(stdout.splitlines()[-1])["arms"]]
    assert arms == ["plain", "fixed:2", "fixed:4", *names, "policy ucb"]


def test_several_policies_are_judged_in_one_run(run: Run, policy: Path, tmp_path: Path) -> None:
    ours = load_policy(policy)
    other, named, menu = tmp_path / "other", tmp_path / "named", tmp_path / "menu"
    ours.save(other)
    replace(ours, name="mine").save(named)
    code, stdout, stderr = run("--policy", other, "--policy", named, "--requests", 1)
    assert code == 0, stderr
    document = strict(stdout.splitlines()[-1])
    assert document["policies"] == [str(policy), str(other), str(named)]
    arms = [arm["arm"] for arm in document["arms"]]
    assert arms == [*ARMS[:3], f"policy ucb in {policy}", f"policy ucb in {other}", "policy mine"]
    reordered = parse_menu("reuse/0,fresh/0,reuse/2,reuse/4", ["ngram"])
    replace(ours, menu=reordered).save(menu)
    code, _, stderr = run("--policy", menu)
    assert code == 2
    assert f"{menu} was made for menu {reordered}, {policy} for {ours.menu}; judge them one by one" in stderr


@pytest.mark.parametrize(("what", "other"), [("target", "./elsewhere"), ("precision", "int8")])
def test_policies_of_two_engines_are_not_judged_on_one_unasked(
    run: Run, policy: Path, target_folder: Path, tmp_path: Path, what: str, other: str
) -> None:
    ours = load_policy(policy)
    replace(ours, name="mine", **{what: other}).save(tmp_path / "mine")
    code, stdout, stderr = run("--policy", tmp_path / "mine")
    assert (code, stdout) == (2, "")
    told = f"{tmp_path / 'mine'} was made for {what} {other}, {policy} for {getattr(ours, what)}"
    assert f"{told}; judge them one by one, or give --{what} for all" in stderr
    code, stdout, stderr = run("--policy", tmp_path / "mine", f"--{what}", getattr(ours, what), "--requests", 1)
    assert code == 0, stderr
    assert [arm["arm"] for arm in strict(stdout.splitlines()[-1])["arms"]] == [*ARMS, "policy mine"]


@pytest.mark.parametrize(
    "arguments", [["--controllers", "heuristics"], ["--controllers", "fixed:3"], ["--max-new-tokens", "0"]]
)
def test_what_was_asked_for_is_checked_before_the_model_loads(
    run: Run, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.setattr(evaluate, "load_decoder", lambda *_: pytest.fail("the model is loaded"))
    assert run(*arguments)[0] == 2


def test_a_policy_s_cut_is_judged_as_a_rule_of_its_own(run: Run, policy: Path, tmp_path: Path) -> None:
    replace(load_policy(policy), name="cut", min_confidence=0.35).save(tmp_path)
    code, stdout, stderr = run("--policy", tmp_path, "--requests", 1)
    assert code == 0, stderr
    document = strict(stdout.splitlines()[-1])
    assert [arm["arm"] for arm in document["arms"]] == [*ARMS[:3], "threshold:0.35", "policy ucb", "policy cut"]


def test_several_files_are_one_workload(run: Run, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    row = {"id": "z", "kind": "code", "turns": ["in the other thing"], "split": "test"}
    other.write_text(json.dumps(row) + "\n", encoding="utf-8")
    code, stdout, stderr = run("--workload", other)
    assert code == 0, stderr
    document = strict(stdout.splitlines()[-1])
    assert (document["requests"], document["workload"]) == (4, "small+other/test")


def test_every_fixed_length_of_every_drafter_and_every_cut_is_an_arm(policy: Path) -> None:
    ours, others = load_policy(policy), parse_menu("fresh/0,reuse/0,fresh/a/3,reuse/a/3,reuse/b/3", ["a", "b"])
    assert list(evaluate.make_arms({policy: replace(ours, menu=others)}, [])) == [
        *("plain", "fixed:3:a", "fixed:3:b", "policy ucb")
    ]
    cut = replace(ours, name="cut", min_confidence=0.5)
    policies = {Path("one"): ours, Path("two"): cut, Path("three"): replace(cut, name="same")}
    arms = evaluate.make_arms(policies, ["fresh", "fixed:4"])
    assert list(arms) == [*ARMS[:3], "fresh", "threshold:0.5", "policy ucb", "policy cut", "policy same"]
    assert (arms["threshold:0.5"], arms["policy cut"]) == ("threshold:0.5", cut)
    two = replace(ours, menu=others, min_confidence={"a": 0.2, "b": 0.0})
    assert list(evaluate.make_arms({policy: two}, []))[3:] == ["threshold:0.2:a", "policy ucb"]
    assert list(evaluate.make_arms({Path("two"): cut}, ["threshold:.50"]))[3:] == ["threshold:.50", "policy cut"]


def test_other_prompts_than_the_training_s_are_told(
    policy: Path, workload: Path, command: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = load_workload(str(workload), "test")
    monkeypatch.setattr(evaluate, "load_workload", lambda *_: small)
    told = f"{policy} was trained on other prompts than the bundled ones; for those give --workload {workload}\n"
    words = ("--policy", policy, "--requests", 1, "--max-new-tokens", 8)
    assert told in command(evaluate, *words)[2]
    assert told not in command(evaluate, *words, "--workload", workload)[2]


def test_a_misspelt_option_ends_with_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Through the file itself, as `python evaluate.py --polcy x` would."""
    monkeypatch.setattr(sys, "argv", ["evaluate.py", "--polcy", "x"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / "evaluate.py"), run_name="__main__")
    assert end.value.code == 2
    assert "--policy" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "./nowhere"], "nowhere/policy.json cannot be read"),
        (["--exact", "maybe"], "exact is 'maybe'; choose one of bitwise, guarded, off"),
        (["--workload", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
        (["--target", "./nowhere"], "no such model file or folder"),
        (["--controllers", "heuristics"], "did you mean heuristic?"),
        (["--controllers", "fixed:3"], "draft length 3 is not in the menu"),
        (["--controllers", "threshold:2"], "the confidence threshold is 2.0; give a number from 0 to 1"),
        (["--max-new-tokens", "0"], "max-new-tokens is 0; give 1 or more"),
        (["--requests", "-1"], "requests is -1"),
        (["--seed", "-1"], "a seed from 0"),
        (["--prefix-cache-mib", "-1"], "0 (no cache)"),
        (["--precision", "fp64"], "precision 'fp64' is unknown"),
    ],
)
def test_bad_input_is_one_line_and_code_2(run: Run, arguments: list[str], message: str) -> None:
    code, stdout, stderr = run(*arguments)
    assert (code, stdout) == (2, "")
    last = stderr.splitlines()[-1]
    assert last.startswith("draftgate: error: ")
    assert message in last


def test_an_altered_policy_is_refused(run: Run, policy: Path, tmp_path: Path) -> None:
    for name in ("policy.json", "policy.safetensors"):
        content = (policy / name).read_bytes()
        (tmp_path / name).write_bytes(content[:-1] if name.endswith("safetensors") else content)
    code, _, stderr = run("--policy", tmp_path)
    assert code == 2
    assert "was truncated or altered since its export" in stderr
