"""train.py on a tiny model: what it leaves behind, prompts, seeds and costs."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from run_tools import FILES, PLOTS, ROWS, Run, interrupt, tensors, write_rows

import agents.pipeline
import agents.seeds
import train
from agents.curve import read_curves
from agents.material import Material
from agents.run_folder import CHECK_FILE
from agents.trainers import MACHINES
from agents.training import STRETCHES
from engine import calibration, load_policy
from engine.exactness import MODES
from envs.workloads import load_workload

pytestmark = pytest.mark.usefixtures("cache_folder")  # costs and traces of one module: every run here has the same


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


def test_the_card_of_a_busy_machine_says_so(run: Run, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = "made on a machine that was too busy"
    run()
    assert told not in (out / "README.md").read_text(encoding="utf-8")
    monkeypatch.setattr(calibration, "NOISY", -1.0)
    run("--overwrite")
    assert told in (out / "README.md").read_text(encoding="utf-8")


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
