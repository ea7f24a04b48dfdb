"""train.py on a tiny model: what it leaves behind, resuming, interruption, wandb, bad input."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import shutil
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import agents.pipeline
import agents.seeds
import train
from agents.curve import read_curves
from agents.material import Material
from agents.run_folder import CARD_FILE, CHECK_FILE, COSTS_FILE, RunFolder
from agents.trainers import MACHINES
from agents.training import STATE_FILE, STRETCHES
from agents.validation import Validation
from engine import load_policy
from engine.errors import SettingError
from engine.exactness import MODES
from engine.policy import Policy
from engine.policy_heads import ConstantHead
from envs.request_recorder import RequestRecorder
from envs.vector import ReplayBatch
from envs.workloads import load_workload

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

pytestmark = pytest.mark.usefixtures("cache_folder")  # costs and traces of one module: every run here has the same


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


PLOTS = {name: getattr(agents.pipeline, name) for name in ("plot_costs", "plot_curves")}


@pytest.fixture(autouse=True)
def quick_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes longer than a whole run of these; one test puts the real ones back."""
    for name in PLOTS:
        monkeypatch.setattr(agents.pipeline, name, lambda _, path: path.write_text("drawn"))


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


# -- what it leaves behind ----------------------------------------------------------------------------------------


def test_a_run_leaves_policy_card_curve_and_check(
    run: Run, out: Path, workload: Path, target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, plot in PLOTS.items():
        monkeypatch.setattr(agents.pipeline, name, plot)
    code, stdout, stderr = run("--check-requests", 5, "--seed", 3)
    assert code == 0, stderr
    assert {path.name for path in out.iterdir()} == FILES | {CHECK_FILE}
    for name in ("curve.png", "costs.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    stages = re.findall(r"^([a-z ]+): done in [\d.]+ s$", stderr, re.MULTILINE)
    assert stages == ["model", "costs", "recording", "training", "validation", "live check"]
    assert "costs: plain step" in stderr

    curve = read_curves(out / "curve.csv")
    assert list(curve) == [3]
    assert [point.step for point in curve[3]] == [8 * (i + 1) for i in range(STRETCHES)]
    assert all(point.speedup > 0 for point in curve[3])

    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    assert (config["target"], config["steps"], config["seed"], config["seeds"]) == (str(target_folder), 160, 3, [3])
    assert config["out"] == str(out)
    assert config["drafter"] == ["ngram"]
    assert config["menu"].startswith("fresh/0,reuse/0,reuse/ngram/1,")
    fingerprints = [load_workload(str(workload), split).fingerprint for split in ("train", "validation")]
    assert config["workload_fingerprint"] == "-".join(fingerprints)
    assert {"command", "machine", "git_commit", "versions", "python", "created"} <= set(config)

    validation = json.loads((out / "validation.json").read_text(encoding="utf-8"))
    assert (validation["requests"], validation["groups"]) == (3, 2)
    names = [arm["arm"] for arm in validation["arms"]]
    assert (names[0], names[-1]) == ("plain", "oracle")
    assert validation["arms"][0]["speedup"] == 1.0
    assert validation["arms"][-1]["share"] in (0.0, 1.0)
    assert list(validation["seeds"]) == ["3"]

    check = json.loads((out / CHECK_FILE).read_text(encoding="utf-8"))
    assert check["requests"] == 3  # all that the validation split holds
    arms = [arm["arm"] for arm in check["arms"]]
    assert arms == list(dict.fromkeys([*validation["rules"], "policy ucb"]))
    assert all(arm["mismatched_tokens"] == 0 for arm in check["arms"])
    assert {o["request"] for o in check["outcomes"]["policy ucb"]} == {"c/1", "d/1", "d/2"}
    assert stdout.startswith("3 validation requests; ")
    assert "3 requests of small/validation; intervals resample 2 groups " in stdout


def test_the_policy_says_where_it_comes_from(run: Run, out: Path, target_folder: Path, workload: Path) -> None:
    assert run("--menu", "fresh/0,reuse/0,reuse/2,reuse/4", "--seed", 2)[0] == 0
    policy = load_policy(out)
    assert (policy.name, str(policy.menu)) == ("ucb", "fresh/0,reuse/0,reuse/ngram/2,reuse/ngram/4")
    told = policy.provenance
    assert (policy.target, policy.precision) == (str(target_folder), "fp32")
    assert (told["agent"], told["seed"], told["workload"]) == ("bandit", 2, [str(workload)])
    assert (told["steps"], told["whole"]) == (160, True)
    assert told["exactness"] in MODES
    assert told["command"].startswith("python train.py --target ")
    assert {"torch", "transformers", "gymnasium", "stable-baselines3", "numpy"} == set(told["versions"])
    assert told["machine"] == policy.costs.machine
    assert told["created"].endswith("Z")


def test_the_card_tells_what_was_measured(run: Run, out: Path, workload: Path) -> None:
    run("--check-requests", 2, "--seeds", 2)
    card = (out / "README.md").read_text(encoding="utf-8")
    validation = json.loads((out / "validation.json").read_text(encoding="utf-8"))
    for arm in [*validation["arms"], *validation["seeds"].values()]:
        assert re.search(rf"^{arm['arm']} +{arm['speedup']:.3f} ", card, re.MULTILINE)
    assert f"over 2 seeds: speed-up {validation['spread']['mean']:.3f} on average" in card
    check = json.loads((out / CHECK_FILE).read_text(encoding="utf-8"))
    assert re.search(rf"^policy ucb +[\d.]+ +{check['arms'][-1]['speedup']:.3f} ", card, re.MULTILINE)
    assert str(workload) in card
    assert f'load_policy("{out}")' in card
    assert all(f"\n## {part}\n" in card for part in ("Trained on", "Load it", "Limits", "Origin"))
    run("--seed", 7, "--overwrite")
    assert "Not checked." in (out / "README.md").read_text(encoding="utf-8")
    assert not (out / CHECK_FILE).exists()


def test_precision_and_exactness_reach_the_engine(run: Run, out: Path) -> None:
    assert run("--precision", "bf16", "--exact", "off", "--steps", 8)[0] == 0
    policy = load_policy(out)
    assert (policy.precision, policy.provenance["exactness"]) == ("bf16", "off")
    code, _, stderr = run("--precision", "bf16", "--exact", "bitwise", "--overwrite")
    assert code == 2
    assert "exact='bitwise' is not to be had here" in stderr.splitlines()[-1]


def test_the_command_can_be_pasted_into_a_shell(run: Run, tmp_path: Path) -> None:
    odd = tmp_path / "it's here; really"
    run("--out", odd, "--steps", 8)
    words = shlex.split(load_policy(odd).provenance["command"])
    assert words[:2] == ["python", "train.py"]
    assert words[words.index("--out") + 1] == str(odd)


def test_the_prefix_cache_can_be_turned_off(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    original = train.load_decoder

    def load_decoder(*args: Any) -> Any:
        decoder = original(*args)
        made.append(decoder.parts.prefix_cache.byte_budget)
        return decoder

    monkeypatch.setattr(train, "load_decoder", load_decoder)
    run("--prefix-cache-mib", 0, "--steps", 8)
    run("--prefix-cache-mib", 1, "--steps", 8, "--overwrite")
    assert made[0] == 0
    assert 0 < made[1] <= 1 << 20


# -- prompts ------------------------------------------------------------------------------------------------------


def write_rows(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_several_files_are_one_workload(run: Run, out: Path, tmp_path: Path) -> None:
    one, two = write_rows(tmp_path / "one.jsonl", *ROWS[:2]), write_rows(tmp_path / "two.jsonl", *ROWS[2:])
    code, _, stderr = run("--workload", one, "--workload", two, "--check-requests", 9)
    assert code == 0, stderr
    assert "recording: 3 training and 3 validation requests" in stderr
    assert load_policy(out).provenance["workload"] == [str(one), str(two)]
    code, _, stderr = run("--workload", one, "--workload", write_rows(tmp_path / "again.jsonl", *ROWS), "--overwrite")
    assert code == 2
    assert re.search(r"again\.jsonl:1: id 'a' stands at .*one\.jsonl:1 too; give each line its own id\n", stderr)


def test_a_workload_without_held_back_requests_is_refused_before_anything(run: Run, out: Path, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "train-only.jsonl", ROWS[0])
    code, _, stderr = run("--workload", path)
    told = f'{path}: no validation rows; add rows, or give some the field "split": "validation"'
    assert (code, stderr) == (2, f"draftgate: error: {told}\n")
    assert not out.exists()


def test_a_workload_that_is_broken_is_not_taken_for_one_without_validation_rows(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text("{\n", encoding="utf-8")
    code, _, stderr = run("--workload", path)
    assert code == 2
    assert f"{path}:1: " in stderr
    assert "validation" not in stderr


# -- seeds and costs ----------------------------------------------------------------------------------------------


def test_the_best_of_several_seeds_is_exported(run: Run, out: Path) -> None:
    code, _, stderr = run("--seeds", 3, "--seed", 4)
    assert code == 0, stderr
    validation = json.loads((out / "validation.json").read_text(encoding="utf-8"))
    speedups = {int(seed): arm["speedup"] for seed, arm in validation["seeds"].items()}
    assert list(speedups) == [4, 5, 6] == list(read_curves(out / "curve.csv"))
    best = max(speedups, key=lambda seed: speedups[seed])
    assert load_policy(out).provenance["seed"] == best
    assert tensors(out) == tensors(out / "seeds" / str(best))
    assert len({tensors(out / "seeds" / str(seed)) for seed in speedups}) > 1
    spread = validation["spread"]
    assert (spread["low"], spread["high"]) == (min(speedups.values()), max(speedups.values()))
    assert spread["mean"] == pytest.approx(sum(speedups.values()) / 3)


def test_more_seeds_may_be_trained_later(run: Run, out: Path, tmp_path: Path) -> None:
    run()
    first = tensors(out)
    code, _, stderr = run("--seeds", 2, "--resume")
    assert code == 0, stderr
    assert tensors(out / "seeds" / "0") == first
    assert run("--seeds", 2, "--out", tmp_path / "whole")[0] == 0
    assert tensors(out / "seeds" / "1") == tensors(tmp_path / "whole" / "seeds" / "1")
    assert json.loads((out / "config.json").read_text())["seeds"] == [0, 1]


@pytest.mark.parametrize(
    ("agent", "steps", "name"),
    [
        ("ppo", 4096, "ppo"),
        ("counterfactual", 20, "counterfactual"),
        ("thompson", 80, "thompson"),
        ("exp3", 80, "exp3"),
        ("linear", 80, "linucb"),
    ],
)
def test_every_agent_gives_a_policy_and_the_same_for_the_same_seed(
    run: Run, out: Path, tmp_path: Path, agent: str, steps: int, name: str
) -> None:
    """Also where its first run was killed."""
    words = ("--agent", agent, "--steps", steps, "--seed", 3)
    code, _, stderr = run(*words)
    assert code == 0, stderr
    assert {path.name for path in out.iterdir()} == FILES
    policy, curves = load_policy(out), read_curves(out / "curve.csv")
    assert (policy.name, policy.provenance["agent"], policy.provenance["steps"]) == (name, agent, steps)
    assert curves[3][-1].step == steps
    with pytest.MonkeyPatch.context() as patch:
        interrupt(patch, agents.seeds, "write_curves")
        assert run(*words, "--out", tmp_path / "again")[0] == 130
    assert run(*words, "--out", tmp_path / "again", "--resume")[0] == 0
    assert tensors(out) == tensors(tmp_path / "again")
    assert read_curves(tmp_path / "again" / "curve.csv") == curves


@pytest.mark.parametrize(("agent", "steps"), [("bandit", 160), ("ppo", 4096), ("counterfactual", 20)])
def test_costs_of_many_machines(run: Run, out: Path, monkeypatch: pytest.MonkeyPatch, agent: str, steps: int) -> None:
    """The agent is handed made-up tables; what is validated, exported and told is this machine's."""
    made: list[Material] = []
    original = agents.seeds.make_trainer

    def make_trainer(name: str, material: Material, *others: Any) -> Any:
        made.append(material)
        return original(name, material, *others)

    monkeypatch.setattr(agents.seeds, "make_trainer", make_trainer)
    code, _, stderr = run("--agent", agent, "--steps", steps, "--costs", "randomised")
    assert code == 0, stderr
    (material,) = made
    policy = load_policy(out)
    assert len(material.tables) == MACHINES == len({str(table.verify) for table in material.tables})
    assert all(table.machine != policy.costs.machine for table in material.tables)
    assert material.costs == policy.costs
    assert policy.provenance["costs"] == "randomised"
    assert f"- costs: {MACHINES} tables drawn at random" in (out / "README.md").read_text(encoding="utf-8")


# -- resuming and interruption ------------------------------------------------------------------------------------

STAGES = {
    "the costs": lambda patch: interrupt(patch, agents.pipeline, "plot_costs"),
    "the recording": lambda patch: interrupt(patch, RequestRecorder, "record", 2),
    "the first step": lambda patch: interrupt(patch, ReplayBatch, "step"),
    "a training": lambda patch: interrupt(patch, ReplayBatch, "step", 13),
    "a state": lambda patch: interrupt(patch, agents.training, "save_tensors", 3),
    "a seed's end": lambda patch: interrupt(patch, Policy, "save"),
    "the second seed": lambda patch: interrupt(patch, ReplayBatch, "step", 29),
    "the validation": lambda patch: interrupt(patch, agents.pipeline, "validate"),
    "the export": lambda patch: interrupt(patch, Policy, "save", 2),
    "the card": lambda patch: interrupt(patch, agents.pipeline, "write_card"),
    "the check": lambda patch: interrupt(patch, agents.pipeline, "judge"),
}


@pytest.fixture(scope="module")
def undisturbed(
    target_folder: Path, workload: Path, tmp_path_factory: pytest.TempPathFactory, cache_folder: Path
) -> dict[str, bytes]:
    """What a run of two seeds leaves that nothing has disturbed."""
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    settings = {"max_new_tokens": 12, "agent": "bandit", "steps": 160, "check_requests": 1, "export": "learned"}
    train.main(train.Options(target=str(target_folder), workload=[str(workload)], out=out, seeds=2, **settings))
    return contents(out)


@pytest.mark.parametrize("stage", STAGES)
def test_an_interrupted_run_becomes_what_an_undisturbed_one_is(
    run: Run,
    out: Path,
    undisturbed: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    cache_folder: Path,
    tmp_path: Path,
    stage: str,
) -> None:
    monkeypatch.setenv("DRAFTGATE_CACHE", str(tmp_path / "cache"))
    copy_all_but_traces(cache_folder, tmp_path / "cache")
    words = ("--seeds", 2, "--check-requests", 1)
    with monkeypatch.context() as patch:
        STAGES[stage](patch)
        code, _, stderr = run(*words)
    assert code == 130
    assert stderr.splitlines()[-1] == "draftgate: interrupted"
    assert (out / COSTS_FILE).is_file()
    if (out / "policy.json").is_file():
        load_policy(out)
    code, _, stderr = run(*words, "--resume")
    assert code == 0, stderr
    now = contents(out)
    assert set(now) == set(undisturbed)
    same = {
        name for name in now if name.endswith((".safetensors", ".csv")) or name in ("costs.json", "validation.json")
    }
    assert len(same) == 10
    assert {name for name in same if now[name] != undisturbed[name]} == set()


def test_a_rule_goes_out_in_the_place_of_a_policy_that_is_no_faster(
    run: Run, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Validation, "best_rule", property(lambda self: self.rules[2]))
    code, _, stderr = run("--export", "best", "--check-requests", 1)
    assert code == 0, stderr
    policy = load_policy(out)
    assert policy.name.startswith("threshold:")
    assert isinstance(policy.head, ConstantHead)
    assert policy.min_confidence == float(policy.name.partition(":")[2])
    assert f"no seed is faster than {policy.name}, so this rule is exported" in stderr
    assert "No learned policy is" in (out / CARD_FILE).read_text(encoding="utf-8")
    assert load_policy(out / "seeds" / "0").name == "ucb"
    code, _, _ = run("--export", "learned", "--check-requests", 1, "--resume")
    assert (code, load_policy(out).name) == (0, "ucb")


def copy_all_but_traces(source: Path, target: Path) -> None:
    """The cache of a machine that has the same costs and has recorded nothing yet."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("traces"))


@pytest.mark.parametrize("stage", ["the costs", "the recording", "the first step"])
def test_nothing_is_exported_before_the_first_training_step(
    run: Run, out: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache_folder: Path, stage: str
) -> None:
    run("--steps", 24)
    before = contents(out)
    monkeypatch.setenv("DRAFTGATE_CACHE", str(tmp_path / "cache"))
    copy_all_but_traces(cache_folder, tmp_path / "cache")
    with monkeypatch.context() as patch:
        STAGES[stage](patch)
        code, _, stderr = run("--overwrite", "--seed", 4)
    assert code == 130
    assert stderr.splitlines()[-2:] == [
        "interrupted before there was a policy; nothing was exported; --resume goes on",
        "draftgate: interrupted",
    ]
    after = contents(out)
    assert {name: after[name] for name in ("policy.json", "policy.safetensors", "README.md")} == {
        name: before[name] for name in ("policy.json", "policy.safetensors", "README.md")
    }


def test_ctrl_c_exports_the_best_so_far(run: Run, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        interrupt(patch, ReplayBatch, "step", 7)
        code, _, stderr = run("--check-requests", 3)
    assert code == 130
    assert "interrupted; exporting the best so far: seed 0 after 56 steps" in stderr
    policy = load_policy(out)
    assert (policy.provenance["steps"], policy.provenance["whole"]) == (56, False)
    assert not {CHECK_FILE, "validation.json"} & {path.name for path in out.iterdir()}
    card = (out / "README.md").read_text(encoding="utf-8")
    assert "56 steps, seed 0 of 0; the training was interrupted there" in card
    assert "Not validated: the run was interrupted." in card
    assert len(read_curves(out / "curve.csv")[0]) == 7


@pytest.mark.parametrize(
    ("agent", "steps", "done", "owner", "name", "after"),
    [
        ("ppo", 40_960, 20_480, "agents.ppo.ReplayBatch", "step", 64 + 16 * 5 + 3),
        ("counterfactual", 60, 20, "agents.stationary.Counterfactual", "_improve", 33),
    ],
)
def test_ctrl_c_exports_what_a_batch_learner_has_found(
    run: Run,
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
    agent: str,
    steps: int,
    done: int,
    owner: str,
    name: str,
    after: int,
) -> None:
    module, _, kind = owner.rpartition(".")
    interrupt(monkeypatch, getattr(sys.modules[module], kind), name, after)
    code, _, stderr = run("--agent", agent, "--steps", steps)
    assert code == 130
    assert f"interrupted; exporting the best so far: seed 0 after {done} steps" in stderr
    policy = load_policy(out)
    assert (policy.name, policy.provenance["whole"]) == (agent, False)


def test_ctrl_c_in_a_later_seed_may_export_an_earlier_one(run: Run, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second seed's policy is made bad, so that the first one is the best."""
    original = Material.replay

    def replay(self: Material, head: Any) -> Any:
        return original(self, head) + (out / "seeds" / "0" / "policy.json").exists()

    with monkeypatch.context() as patch:
        patch.setattr(Material, "replay", replay)
        interrupt(patch, ReplayBatch, "step", 30)
        _, _, stderr = run("--seeds", 2)
    assert "interrupted; exporting the best so far: seed 0 after 160 steps" in stderr
    assert tensors(out) == tensors(out / "seeds" / "0")
    assert load_policy(out).provenance["whole"] is True


def test_ctrl_c_in_the_check_leaves_the_policy(run: Run, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    STAGES["the check"](monkeypatch)
    code, stdout, stderr = run("--check-requests", 3)
    assert code == 130
    assert f"interrupted in the live check; the policy in {out} stays, --resume checks it" in stderr
    assert load_policy(out).provenance["whole"] is True
    assert stdout.startswith("3 validation requests; ")


def test_a_run_is_lost_only_where_that_was_asked_for(run: Run, out: Path) -> None:
    run("--steps", 40)
    before = contents(out)
    code, _, stderr = run("--steps", 8)
    mend = "go on with --resume, begin anew with --overwrite, or choose another --out"
    assert (code, stderr) == (2, f"draftgate: error: {out} holds a run; {mend}\n")
    code, _, stderr = run("--steps", 8, "--resume", "--overwrite")
    assert (code, stderr) == (2, "draftgate: error: --resume and --overwrite exclude each other; give one of them\n")
    assert contents(out) == before
    code, _, stderr = run("--steps", 8, "--overwrite", "--menu", "reuse/0,reuse/2")
    assert code == 0, stderr
    assert [point.step for point in read_curves(out / "curve.csv")[0]] == [8]
    assert str(load_policy(out).menu) == "reuse/0,reuse/ngram/2"


def test_a_policy_without_its_run_is_not_lost_either(run: Run, out: Path) -> None:
    run("--steps", 8)
    for name in ("config.json", COSTS_FILE):
        (out / name).unlink()
    assert f"{out} holds a run; " in run("--steps", 8)[2]


@pytest.mark.parametrize("name", ["README.md", "config.json", "seeds/list.txt"])
def test_files_that_no_run_made_are_never_lost(run: Run, out: Path, name: str) -> None:
    (out / name).parent.mkdir(parents=True)
    (out / name).write_text('{"model_type": "llama"}')
    before = contents(out)
    for words in ([], ["--overwrite"]):
        code, _, stderr = run(*words)
        told = f"{out} holds files that no training made, which would be lost; choose another --out"
        assert (code, stderr) == (2, f"draftgate: error: {told}\n")
    assert contents(out) == before


def test_a_folder_is_one_training_s_at_a_time(run: Run, out: Path) -> None:
    first = RunFolder(out, {})
    first.lock()
    code, _, stderr = run("--steps", 8)
    assert code == 2
    assert f"error: another training is at work in {out}; wait for its end" in stderr.splitlines()[-1]
    assert {path.name for path in out.iterdir()} == {".lock"}
    first.release()
    assert run("--steps", 8)[0] == 0
    with pytest.raises(SettingError, match="holds a run"):  # which has come since this one was checked
        first.lock()
    first.release()
    assert not (out / ".lock").exists()


@pytest.mark.parametrize("other", [["--seed", 1], ["--agent", "thompson"], ["--menu", "reuse/0,reuse/2"]])
def test_a_seed_of_another_run_is_trained_anew(run: Run, out: Path, tmp_path: Path, other: list[object]) -> None:
    run()
    before, theirs = tensors(out), tmp_path / "theirs"
    run("--out", theirs, *other)
    shutil.rmtree(out / "seeds" / "0")
    (folder,) = (theirs / "seeds").iterdir()
    shutil.copytree(folder, out / "seeds" / "0")
    code, _, stderr = run("--resume")
    assert code == 0, stderr
    assert f"{out / 'seeds' / '0'} is of another run; seed 0 is trained anew\n" in stderr
    assert tensors(out) == before


def test_all_settings_that_differ_are_named_at_once(run: Run, out: Path) -> None:
    run("--steps", 8)
    stderr = run("--steps", 16, "--seed", 1, "--resume")[2]
    assert f"{out} was trained with steps 8 (now 16), seed 0 (now 1); give the same" in stderr


def test_an_interrupted_run_says_how_to_go_on(run: Run, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("--steps", 8)
    STAGES["a training"](monkeypatch)
    stderr = run("--overwrite")[2]
    (line,) = re.findall("^to go on: (.*)$", stderr, re.MULTILINE)
    command = shlex.split(json.loads((out / "config.json").read_text())["command"])
    assert shlex.split(line) == [word for word in command if word != "--overwrite"] + ["--resume"]


def test_few_requests_to_learn_from_are_told(run: Run) -> None:
    assert "3 training requests are few to learn from; give 20 or more\n" in run("--steps", 8)[2]


def test_the_card_names_the_command_that_judges_this_policy(run: Run, tmp_path: Path, workload: Path) -> None:
    odd = tmp_path / "it's here"
    run("--out", odd, "--steps", 8)
    words = ["python", "evaluate.py", "--policy", str(odd), "--workload", str(workload), "--split", "test"]
    assert (odd / CARD_FILE).read_text(encoding="utf-8").count(f"`{shlex.join(words)}`") == 2


def test_there_must_be_something_to_resume(run: Run, out: Path) -> None:
    code, _, stderr = run("--resume")
    assert code == 2
    assert stderr == f"draftgate: error: {out} holds no run to resume; train without --resume first\n"
    assert not out.exists()


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("agent", ["--agent", "thompson"]),
        ("target", ["--target", "./other"]),
        ("drafter", ["--drafter", "ngram:history"]),
        ("drafter", ["--drafter", "ngram", "--drafter", "ngram:history"]),
        ("menu", ["--menu", "reuse/0,reuse/2"]),
        ("precision", ["--precision", "bf16"]),
        ("exact", ["--exact", "off"]),
        ("device", ["--device", "cuda"]),
        ("steps", ["--steps", 16]),
        ("max_new_tokens", ["--max-new-tokens", 9]),
        ("prefix_cache_mib", ["--prefix-cache-mib", 3]),
        ("seed", ["--seed", 1]),
        ("costs", ["--costs", "randomised"]),
    ],
)
def test_a_run_is_resumed_only_with_its_own_settings(run: Run, out: Path, name: str, arguments: list[object]) -> None:
    run("--steps", 8)
    before = contents(out)
    steps = () if name == "steps" else ("--steps", 8)
    code, _, stderr = run("--resume", *steps, *arguments)
    assert code == 2
    assert f"error: {out} was trained with {name} " in stderr
    assert stderr.endswith("; give the same, or begin anew with --overwrite\n")
    assert contents(out) == before


def test_a_run_is_resumed_only_on_its_own_prompts(run: Run, workload: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_bytes(workload.read_bytes())
    run("--steps", 8, "--workload", other)
    assert "was trained with workload [" in run("--steps", 8, "--resume")[2]
    write_rows(other, *ROWS[1:])
    assert "was trained with workload_fingerprint '" in run("--steps", 8, "--resume", "--workload", other)[2]


def test_the_default_menu_is_the_one_that_it_stands_for(run: Run, out: Path) -> None:
    run("--steps", 8)
    menu = json.loads((out / "config.json").read_text(encoding="utf-8"))["menu"]
    assert run("--resume", "--steps", 8, "--menu", menu)[0] == 0


@pytest.mark.parametrize("content", [None, b"", b"[]", b"{", b"\xff"])
def test_a_configuration_that_is_damaged_is_one_line(run: Run, out: Path, content: bytes | None) -> None:
    run("--steps", 8)
    if content is None:
        (out / "config.json").unlink()
    else:
        (out / "config.json").write_bytes(content)
    code, _, stderr = run("--steps", 8, "--resume")
    assert code == 2
    assert stderr.startswith(f"draftgate: error: {out / 'config.json'} cannot be read (")
    assert stderr.endswith("); begin anew with --overwrite\n")


def test_damaged_costs_are_one_line(run: Run, out: Path) -> None:
    run("--steps", 8)
    (out / COSTS_FILE).write_bytes(b"{}")
    code, _, stderr = run("--steps", 8, "--resume")
    assert code == 2
    assert f"error: {out / COSTS_FILE} holds no cost table (" in stderr.splitlines()[-1]


@pytest.mark.parametrize("name", ["policy.json", "policy.safetensors", "curve.csv"])
def test_a_seed_that_is_damaged_is_trained_anew(run: Run, out: Path, name: str) -> None:
    run()
    before, path = tensors(out), out / "seeds" / "0" / name
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] if name != "curve.csv" else b"\xff\xfe")
    code, _, stderr = run("--resume")
    assert code == 0, stderr
    assert "; seed 0 is trained anew" in stderr
    assert path.read_bytes() == whole or name == "policy.json"
    assert tensors(out) == before


def test_a_state_that_is_damaged_starts_its_seed_anew(
    run: Run, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        interrupt(patch, ReplayBatch, "step", 13)
        run()
    state = out / "seeds" / "0" / STATE_FILE
    state.write_bytes(state.read_bytes()[:-8])
    code, _, stderr = run("--resume")
    assert code == 0
    assert f"{state} cannot be resumed (" in stderr
    assert run("--out", tmp_path / "other")[0] == 0
    assert tensors(out) == tensors(tmp_path / "other")


def test_a_disk_that_fills_up_keeps_the_last_policy(run: Run, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("--steps", 8)[0] == 0
    before = tensors(out)

    def full(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        code, _, stderr = run("--seed", 9, "--overwrite")
    assert code == 2
    assert re.search(r"error: cannot write .*: No space left on device; free some space or", stderr.splitlines()[-1])
    assert tensors(out) == before


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
    STAGES["a training"](monkeypatch)
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
        (["--agent", "pppo"], "unknown agent 'pppo'; did you mean 'ppo'? choose one of ppo, counterfactual, bandit,"),
        (["--costs", "randomized"], "unknown costs 'randomized'; did you mean 'randomised'? choose one of measured,"),
        (["--wandb", "offlin"], "unknown wandb mode 'offlin'; did you mean 'offline'?"),
        (["--menu", "reuse/0,reuse/x"], "menu entry 'reuse/x' cannot be read"),
        (["--menu", "fresh/0,reuse/0"], "drafts nothing, so there is nothing to learn; add lengths, as reuse/4"),
        (["--menu", "fresh/8,reuse/0"], "holds fresh/ngram/8 without reuse/ngram/8; add that"),
        (["--menu", "fresh/8,reuse/0,reuse/4"], "holds fresh/ngram/8 without reuse/ngram/8; add that"),
        (["--workload", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
        (["--exact", "yes"], "exact is 'yes'; choose one of bitwise, guarded, off"),
        (["--steps", "0"], "--steps is 0; give 1 or more"),
        (["--steps", "-4"], "--steps is -4; give 1 or more"),
        (["--seed", "-1"], "--seed is -1; give 0 or more"),
        (["--seeds", "0"], "--seeds is 0; give 1 or more"),
        (["--seeds", "1001"], "--seeds is 1001; give 1000 or less"),
        (["--seed", "4294967296"], "come to seed 4294967296; give seeds up to 4294967295"),
        (["--seed", "4294967295", "--seeds", "2"], "come to seed 4294967296; give seeds up to 4294967295"),
        (["--out", ""], "--out is empty or no folder of the run's own"),
        (["--out", "."], "--out is empty or no folder of the run's own"),
        (["--out", "a\udcff"], "--out 'a\\udcff' is not UTF-8; give a name that is"),
        (["--max-new-tokens", "0"], "--max-new-tokens is 0; give 1 or more"),
        (["--check-requests", "-1"], "--check-requests is -1; give 0 or more"),
        (["--prefix-cache-mib", "-1"], "--prefix-cache-mib is -1; give 0 or more"),
    ],
)
def test_bad_input_is_one_line_and_code_2(run: Run, out: Path, arguments: list[str], message: str) -> None:
    code, stdout, stderr = run(*arguments)
    assert (code, stdout) == (2, "")
    assert stderr.startswith("draftgate: error: ")
    assert message in stderr
    assert len(stderr.splitlines()) == 1
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "./nowhere"], "no such model file or folder"),
        (["--drafter", "ngramm"], "drafter 'ngramm' is unknown"),
        (["--precision", "fp64"], "precision 'fp64' is unknown"),
        (["--device", "tpu"], "device 'tpu'"),
    ],
)
def test_an_engine_that_cannot_be_had_is_one_line(run: Run, out: Path, arguments: list[str], message: str) -> None:
    code, stdout, stderr = run(*arguments)
    assert (code, stdout) == (2, "")
    loading, line = stderr.splitlines()
    assert loading.startswith("model: loading ")
    assert line.startswith("draftgate: error: ")
    assert message in line
    assert not out.exists()
