"""The programs that judge controllers on replay: what is trained on what, which arms there are, and end to end."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import load_tiny, random_tokens, save_tiny
from trace_tools import made_up_traces
from two_cells import COSTS, FLAT, MENU, two_cells

from agents.gap import HINDSIGHT, ORACLE
from agents.hindsight import try_fixed
from agents.material import Material
from agents.network import greedy
from agents.online import LearningController
from agents.randomise import random_costs
from agents.stationary import Counterfactual
from agents.trainers import AGENTS, BANDITS, training_costs
from agents.tuning import tuned_cut
from agents.ucb import UCB
from benchmarks import controllers, decide, decider, folds, transfer
from benchmarks.cut_model import cut_drafter, cut_folder
from benchmarks.field import FIXED, THRESHOLD, Field, judge_field
from benchmarks.folds import pooled
from benchmarks.lessons import teach
from benchmarks.recordings import Splits, load_engine, record_splits
from engine.costs import CostTable
from engine.cuts import Cut
from engine.errors import DrafterError, SettingError
from engine.menu import default_menu
from engine.models import load_model
from engine.observation import ObservationSchema
from engine.policy import Policy
from engine.policy_heads import LinearHead
from envs.vector import rollout, run_controller

Program = Callable[..., tuple[int, str, str]]

pytestmark = pytest.mark.usefixtures("cache_folder")

SPLITS = Splits(two_cells(8, 1), two_cells(4, 2), two_cells(10, 3))
CUT = tuned_cut(SPLITS.train, [COSTS], MENU)
MATERIAL = Material(SPLITS.train, SPLITS.validation, MENU, COSTS, [COSTS], CUT)
TEXTS = {"train": "the and in the and in", "validation": "on and on", "test": "again and again"}
ROWS = [
    {"id": f"{split} {kind}", "kind": kind, "turns": [text, "and then?"], "split": split}
    for split, text in TEXTS.items()
    for kind in ("talk", "chat")
]


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("workload") / "small.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def deep_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama of three layers."""
    return save_tiny(tmp_path_factory.mktemp("deep"), "llama", num_hidden_layers=3)


# -- the field ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def judged() -> Field:
    return judge_field(SPLITS, MENU, COSTS, ["bandit", "counterfactual"], range(2), 0.02, uncut=True)


def test_bandits_are_judged_frozen_and_going_on_learning(judged: Field) -> None:
    arms = judged.gap.seconds
    assert {"ucb", "ucb, learning on", "counterfactual"} <= set(arms)
    assert "counterfactual, learning on" not in arms
    for seed in range(2):
        one = teach("bandit", MATERIAL, seed, 0.02)
        frozen = rollout(SPLITS.test, COSTS, MENU, greedy(one.head), min_confidence=CUT)
        np.testing.assert_array_equal(arms["ucb"][seed], frozen.seconds)
        assert isinstance(one.learner, UCB)
        assert one.learner.visits.sum() == 600, "a fiftieth of 30,000 steps"
        controller = LearningController(one.learner, MENU, COSTS, CUT)
        going_on = run_controller(SPLITS.test, COSTS, MENU, controller)
        np.testing.assert_array_equal(arms["ucb, learning on"][seed], going_on.seconds)


def test_policies_carry_the_cut_that_was_tuned_on_train(judged: Field) -> None:
    assert CUT > 0.0
    assert judged.cuts == [CUT]
    for name, cut in (("counterfactual", CUT), ("counterfactual, uncut", 0.0)):
        for seed in range(2):
            head = teach("counterfactual", replace(MATERIAL, min_confidence=cut), seed, 0.02).head
            expected = rollout(SPLITS.test, COSTS, MENU, greedy(head), min_confidence=cut).seconds
            np.testing.assert_array_equal(judged.gap.seconds[name][seed], expected)


def test_ratios_are_what_a_learned_arm_has_to_beat(judged: Field) -> None:
    told = {(one.arm, one.over): one for one in judged.ratios}
    arms, bases = [f"{n}{u}" for n in ("ucb", "counterfactual") for u in ("", ", uncut")], (HINDSIGHT, FIXED, THRESHOLD)
    assert set(told) == {(arm, base) for arm in arms for base in bases}
    for (arm, over), ratio in told.items():
        ours, theirs = (judged.gap.seconds[name].mean(axis=0).sum() for name in (arm, over))
        assert ratio.value == pytest.approx(theirs / ours)
        assert ratio.low <= ratio.value <= ratio.high
    document = judged.to_json()
    assert {(one["arm"], one["over"]) for one in document["ratios"]} == set(told)
    assert [len(seconds) for seconds in document["training_seconds"].values()] == [2, 2, 2, 2]
    json.dumps(document, allow_nan=False)


def test_networks_are_trained_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    before, seen, fit = torch.get_num_threads(), [], Counterfactual.fit

    def noted(*told: Any, **settings: Any) -> Any:
        seen.append(torch.get_num_threads())
        return fit(*told, **settings)

    monkeypatch.setattr(Counterfactual, "fit", noted)
    torch.set_num_threads(2)
    try:
        teach("counterfactual", MATERIAL, 0, 0.005)
        assert (seen, torch.get_num_threads()) == ([1], 2)
    finally:
        torch.set_num_threads(before)


def test_with_several_drafters_each_is_judged_alone_too() -> None:
    splits = Splits(*(made_up_traces(seed) for seed in range(3)))
    menu = default_menu(("a", "b"))
    costs = random_costs(np.random.default_rng(0), menu)
    field = judge_field(splits, menu, costs, ["bandit"], [0], 0.01)
    arms, fixed = field.gap.seconds, try_fixed(splits.test, costs, menu)
    for drafter in ("a", "b"):
        own = [seconds.sum() for name, seconds in zip(fixed.names, fixed.seconds) if name.endswith(drafter)]
        plain = arms["plain"].sum()
        assert arms[f"{HINDSIGHT}, {drafter} alone"].sum() == pytest.approx(min(*own, plain))
        alone = default_menu((drafter,))
        cut = tuned_cut(splits.train, [costs], alone)
        material = Material(splits.train, splits.validation, alone, costs, [costs], cut)
        head = teach("bandit", material, 0, 0.01).head
        np.testing.assert_array_equal(
            arms[f"ucb, {drafter} alone"][0],
            rollout(splits.test, costs, alone, greedy(head), min_confidence=cut).seconds,
        )
    over = {one.over: one.value for one in field.ratios}
    for arm in ("ucb", HINDSIGHT, THRESHOLD):
        totals = {name: arms[name].sum() for name in (f"{arm}, a alone", f"{arm}, b alone")}
        better = min(totals, key=totals.__getitem__)
        assert over[better] == pytest.approx(totals[better] / arms["ucb"].sum())
        assert len(set(totals) & set(over)) == 1
    assert list(arms)[-1] == ORACLE


@pytest.mark.parametrize("drafters", [("a",), ("a", "b")])
def test_every_request_is_judged_once_by_what_learned_on_other_groups(
    drafters: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    splits = Splits(*(made_up_traces(seed) for seed in range(3)))
    pool, menu = pooled(splits), default_menu(drafters)
    costs, dealt = random_costs(np.random.default_rng(0), default_menu(("a", "b"))), []

    def noted(fold: Splits, *told: Any) -> Field:
        dealt.append(fold)
        return judge_field(fold, *told)

    monkeypatch.setattr(folds, "judge_field", noted)
    field = folds.judge_folds(splits, menu, costs, ["bandit"], [0, 1], 0.01, True, 3)
    for fold in dealt:
        groups = [{trace.group for trace in part.traces} for part in (fold.train, fold.validation, fold.test)]
        assert all(groups)
        assert not groups[0] & groups[1]
        assert not (groups[0] | groups[1]) & groups[2]
        assert sum(len(part) for part in (fold.train, fold.validation, fold.test)) == len(pool)
    judged = [trace for fold in dealt for trace in fold.test.traces]
    assert sorted(map(id, judged)) == sorted(map(id, pool.traces))
    assert field.gap.groups == tuple(trace.group for trace in judged)
    alone = [judge_field(fold, menu, costs, ["bandit"], [0, 1], 0.01, True) for fold in dealt]
    for arm, seconds in field.gap.seconds.items():
        np.testing.assert_array_equal(seconds, np.concatenate([each.gap.seconds[arm] for each in alone], axis=1))
    assert field.cuts == [cut for each in alone for cut in each.cuts]
    assert [one.arm for one in field.ratios] == [one.arm for one in alone[0].ratios]
    for one in field.ratios:
        assert (one.value, one.low, one.high) == field.gap.ratio(one.over, one.arm)
    assert len(field.seconds["ucb"]) == 6


@pytest.mark.parametrize("count", [-1, 1, 99])
def test_folds_that_cannot_be_dealt_are_refused(count: int) -> None:
    with pytest.raises(SettingError, match=f"^folds is {count}; these requests are of .* groups: give 2 to "):
        next(folds.folded(pooled(SPLITS), count))


# -- transfer -----------------------------------------------------------------------------------------------------


def test_the_general_policy_never_sees_the_machines_that_it_is_judged_on(monkeypatch: pytest.MonkeyPatch) -> None:
    lessons: list[tuple[list[CostTable], float, Cut]] = []

    def noted(agent: str, material: Material, seed: int, effort: float) -> Any:
        lessons.append((list(material.tables), effort, material.min_confidence))
        return teach(agent, material, seed, effort)

    monkeypatch.setattr(transfer, "teach", noted)
    tables = {"two cells": COSTS, "flat": FLAT}
    machines = transfer.compare(SPLITS, MENU, tables, "counterfactual", range(2), (0.2, 0.1))
    assert [one.machine for one in machines] == ["two cells", "flat"]
    made_up = [training_costs("randomised", COSTS, MENU, seed) for seed in range(2)]
    cut, *own = (tuned_cut(SPLITS.train, tables, MENU) for tables in (made_up[0][::64], [COSTS], [FLAT]))
    assert lessons[:2] == [(tables, 0.1, cut) for tables in made_up]
    assert lessons[2:] == [([table], 0.2, theirs) for table, theirs in zip((COSTS, FLAT), own) for _ in range(2)]
    assert [(one.general_cut, one.own_cut) for one in machines] == [(cut, theirs) for theirs in own]
    for one in machines:
        assert one.ratio == pytest.approx(one.own / one.general)
        assert one.low <= one.ratio <= one.high
        assert (len(one.general_seeds), len(one.own_seeds)) == (2, 2)
        assert min(one.own_seeds) <= one.own <= max(one.own_seeds)
    assert machines[0].fixed != machines[1].fixed
    text = transfer.described(machines)
    assert [line.split("  ")[0] for line in text.splitlines()[2:]] == ["two cells", "flat"]
    far = [
        transfer.Machine("m", ratio, 1.0, 1.1, 2.0, 2.0, 1.0, 1.0, [2.0], [2.0], 0.0, 0.0) for ratio in (1.03, 1.031)
    ]
    assert [line.split()[-1] for line in transfer.described(far).splitlines()[2:]] == ["yes", "no"]


# -- decisions ----------------------------------------------------------------------------------------------------


def test_the_process_without_torch_decides_as_the_trained_agent(tmp_path: Path) -> None:
    agent = decide.train(SPLITS.train, MENU, COSTS, 4096)
    vectors, masks = decide.sampled(SPLITS.test, MENU, COSTS, 1000)
    assert (vectors.shape, masks.shape) == ((1000, len(ObservationSchema(MENU))), (1000, len(MENU)))
    assert len(np.unique(vectors, axis=0)) > 300
    Policy("ppo", MENU, agent.head(), COSTS).save(tmp_path / "policy")
    told = decide.decide_apart(tmp_path / "policy", vectors, masks, tmp_path)
    np.testing.assert_array_equal(told.actions, decide.actions_of(agent, vectors, masks, torch.float64))
    assert len(set(told.actions.tolist())) > 1
    assert 0.0 < told.low <= told.median <= told.high
    assert "torch" in decider.LOCKED


def test_a_process_that_fails_is_told_in_one_line(tmp_path: Path) -> None:
    vectors, masks = decide.sampled(SPLITS.test, MENU, COSTS, 64)
    with pytest.raises(decide.DeciderError, match=r"without torch failed: FileNotFoundError: .*policy\.json"):
        decide.decide_apart(tmp_path, vectors, masks, tmp_path)


# -- a drafter that is cut from the target ------------------------------------------------------------------------


def test_a_cut_drafter_is_the_targets_first_layers(deep_folder: Path) -> None:
    drafter = cut_drafter(str(deep_folder), 2, "bf16")
    assert (drafter.name, drafter.vocab_size) == ("model:first-2", drafter.runner.vocab_size)
    model: Any = load_tiny("llama", num_hidden_layers=3).runner
    cut: Any = load_model(str(cut_folder(str(deep_folder), 2)), packed=False).runner
    ids = torch.tensor([random_tokens(9)])
    with torch.no_grad():
        states = model.model(input_ids=ids, output_hidden_states=True).hidden_states[2]
        expected = model.model.lm_head(model.model.model.norm(states))
        assert torch.allclose(cut.model(input_ids=ids).logits, expected, atol=1e-5)


def test_what_cannot_be_cut_is_refused(deep_folder: Path, tmp_path: Path) -> None:
    for layers in (0, 3):
        with pytest.raises(DrafterError, match=r"which has 3 layers; give 1 to 2"):
            cut_folder(str(deep_folder), layers)
    with pytest.raises(DrafterError, match="keeps its layers elsewhere"):
        cut_folder(str(save_tiny(tmp_path, "gpt2")), 1)


def test_splits_are_recorded_under_their_names(deep_folder: Path, workload: Path) -> None:
    decoder = load_engine(str(deep_folder), ["ngram", "first:1"], "bf16")
    assert decoder.parts.menu == default_menu(("ngram", "model:first-1"))
    for requests, expected in ((0, 4), (3, 3)):
        splits = record_splits(decoder, [str(workload)], requests, 8)
        for name in TEXTS:
            traces = getattr(splits, name)
            assert {trace.request.split()[0] for trace in traces.traces} == {name}
            assert len(traces) == expected
            assert (traces.max_k, traces.lagging) == (8, (False, True))
            assert max(trace.limit for trace in traces.traces) == 8
    assert load_engine(str(deep_folder), [], "bf16").parts.menu == default_menu(("ngram",))


# -- the programs -------------------------------------------------------------------------------------------------


@pytest.fixture
def run(command: Program, deep_folder: Path, workload: Path) -> Callable[..., tuple[int, str, str]]:
    """Runs a program on the tiny model with what was given, and small numbers elsewhere."""

    def ran(program: Any, *words: object) -> tuple[int, str, str]:
        given = dict(pairwise(words))
        defaults: dict[object, object] = {"--target": deep_folder, "--workload": workload, "--max-new-tokens": 12}
        defaults |= {"--precision": "bf16", "--seeds": 1, "--effort": 0.001}
        if program is decide:
            defaults = {"--workload": workload, "--max-new-tokens": 12}
        return command(
            program, *(w for name, value in defaults.items() if name not in given for w in (name, value)), *words
        )

    return ran


def test_controllers_from_end_to_end(run: Program, tmp_path: Path) -> None:
    files = "--plot", tmp_path / "plot.png", "--json", tmp_path / "told.json"
    code, out, err = run(controllers, "--drafter", "ngram", "--drafter", "first:1", *files)
    assert code == 0, err
    told = json.loads(out.splitlines()[-1])
    assert told == json.loads((tmp_path / "told.json").read_text(encoding="utf-8"))
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    arms = [arm["arm"] for arm in told["arms"]]
    learners = {"ppo", "counterfactual", "ucb", "thompson", "exp3", "linucb"}
    assert learners <= set(arms)
    assert {f"{name}, learning on" for name in learners - {"ppo", "counterfactual"}} <= set(arms)
    assert {f"{HINDSIGHT}, {name} alone" for name in ("ngram", "model:first-1")} <= set(arms)
    assert all(f"\n{arm} " in out for arm in arms)
    assert told["requests"] == 4, "two talks of two turns"
    assert set(told["arms"][0]["kinds"]) == {"talk", "chat"}
    assert told["menu"] == str(default_menu(("ngram", "model:first-1")))
    assert told["options"]["agents"] == list(AGENTS)
    assert CostTable.from_json(told["costs"]).machine
    assert len(told["training_seconds"]["ppo"]) == 1
    assert sorted(BANDITS) == ["bandit", "exp3", "linear", "thompson"]


def test_costs_may_be_a_made_up_machine_s(run: Program) -> None:
    code, out, err = run(controllers, "--costs", "gpu-like", "--agents", "counterfactual", "--requests", 3)
    assert code == 0, err
    told = json.loads(out.splitlines()[-1])
    assert (told["costs"]["machine"], told["requests"]) == ("gpu-like", 3)


def test_transfer_from_end_to_end(run: Program, tmp_path: Path) -> None:
    code, out, err = run(
        transfer, "--agent", "counterfactual", "--general-effort", 0.01, "--json", tmp_path / "told.json"
    )
    assert code == 0, err
    told = json.loads(out.splitlines()[-1])
    assert told == json.loads((tmp_path / "told.json").read_text(encoding="utf-8"))
    assert [one["machine"] for one in told["machines"]] == ["bf16, measured", "gpu-like", "vllm-like"]
    assert told["efforts"] == [0.001, 0.01]


def test_decide_from_end_to_end(run: Program, deep_folder: Path, tmp_path: Path) -> None:
    menu, rng = default_menu(("ngram",)), np.random.default_rng(0)
    size, costs = len(ObservationSchema(menu)), random_costs(rng, menu)
    zeros = np.zeros(size, np.float32)
    head = LinearHead(zeros, zeros + 1, rng.normal(size=(size, len(menu))).astype(np.float32), zeros[: len(menu)])
    Policy("drawn", menu, head, costs, str(deep_folder), "bf16").save(tmp_path)
    words = "--policy", tmp_path, "--observations", 300, "--steps", 2048, "--json", tmp_path / "told.json"
    code, out, err = run(decide, *words)
    assert code == 0, err
    told = json.loads(out.splitlines()[-1])
    assert told == json.loads((tmp_path / "told.json").read_text(encoding="utf-8"))
    assert told["observations"] == 300
    assert (told["round_trip"]["differing"], told["policy"]["differing"]) == (0, 0)
    assert told["policy"]["name"] == "drawn"
    assert min(told["ppo"]["median"], told["policy"]["median"], told["policy"]["controller_median"]) > 0
    assert "0 of 300 decisions differ" in out


@pytest.mark.parametrize(
    ("program", "words", "message"),
    [
        (controllers, ("--agents", "pop"), "unknown agent 'pop'; did you mean 'ppo'?"),
        (controllers, ("--agents", "ppo", "ppo"), "name each agent once"),
        (controllers, ("--costs", "gpulike"), "unknown costs 'gpulike'; did you mean 'gpu-like'?"),
        (controllers, ("--seeds", "0"), "seeds is 0"),
        (controllers, ("--effort", "0"), "effort is 0.0"),
        (controllers, ("--requests", "-1"), "requests is -1"),
        (controllers, ("--drafter", "first:x"), "write first:N"),
        (transfer, ("--agent", "pop"), "unknown agent 'pop'"),
        (transfer, ("--general-effort", "-1"), "effort is -1.0"),
        (decide, ("--steps", "0"), "must be 1 or more"),
        (decide, ("--policy", "nowhere"), "cannot be read"),
    ],
)
def test_what_cannot_be_is_refused(run: Program, program: Any, words: tuple[str, ...], message: str) -> None:
    code, _, err = run(program, *words)
    assert code == 2
    assert message in err.splitlines()[-1]
