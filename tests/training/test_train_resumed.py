"""train.py interrupted and resumed: what is exported, and that it ends as an undisturbed run does."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from run_tools import Run, contents, interrupt, tensors

import agents.pipeline
import agents.seeds
import train
from agents.curve import read_curves
from agents.material import Material
from agents.run_folder import CARD_FILE, CHECK_FILE, COSTS_FILE
from agents.validation import Validation
from engine import load_policy
from engine.policy import Policy
from engine.policy_heads import ConstantHead
from envs.request_recorder import RequestRecorder
from envs.vector import ReplayBatch

pytestmark = pytest.mark.usefixtures("cache_folder")  # costs and traces of one module: every run here has the same


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
    card = (out / CARD_FILE).read_text(encoding="utf-8")
    assert "No learned policy is" in card
    assert "They chose this rule over what was learned" in card
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
    assert "56 steps, seed 0; the training was interrupted there" in card
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
