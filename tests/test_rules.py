"""Simple rules, and their export where no learned policy is faster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trace_tools import made_up_costs, made_up_traces

from agents.evaluation import PLAIN
from agents.material import Material
from agents.rules import THRESHOLDS
from agents.seeds import Trained
from agents.tuning import simple_rules, tuned_cut
from agents.validation import validate
from engine.controller_names import make_controller
from engine.cuts import cut_of
from engine.errors import PolicyError
from engine.menu import Action, Menu, parse_menu
from engine.policy import Policy, load_policy
from engine.policy_heads import ConstantHead
from envs.vector import run_controller

MENU = parse_menu("fresh/0,reuse/0,reuse/a/2,reuse/a/8,reuse/b/4", ("a", "b"))
COSTS = made_up_costs(np.random.default_rng(0), ("a", "b"))
TRAIN, VALIDATION = made_up_traces(1, 40), made_up_traces(2, 20)
CUT = tuned_cut(TRAIN, [COSTS], MENU)
MATERIAL = Material(TRAIN, VALIDATION, MENU, COSTS, [COSTS], CUT)


def test_a_rule_takes_the_time_of_the_controller_that_it_is_named_after() -> None:
    for rule in simple_rules(TRAIN, COSTS, MENU):
        controller = make_controller(rule.name, MENU)
        expected = run_controller(VALIDATION, COSTS, MENU, controller).seconds
        np.testing.assert_allclose(rule.replay(VALIDATION, COSTS, MENU), expected, rtol=1e-12)


def test_rules_are_plain_the_best_fixed_choice_and_the_tuned_threshold() -> None:
    plain, fixed, threshold = simple_rules(TRAIN, COSTS, MENU)
    assert (plain.name, plain.action, plain.min_confidence) == (PLAIN, MENU.plain, 0.0)
    seconds = {
        action: run_controller(TRAIN, COSTS, MENU, Constant(action)).seconds.sum()
        for action, entry in enumerate(MENU.actions)
        if entry.reuse
    }
    assert seconds[fixed.action] == pytest.approx(min(seconds.values()), rel=1e-9)
    names = [f"threshold:{each:g}:{drafter}" for drafter in "ab" for each in THRESHOLDS]
    times = [run_controller(TRAIN, COSTS, MENU, make_controller(name, MENU)).seconds.sum() for name in names]
    best = int(np.argmin(times))
    longest, cut = MENU.find((8, 4)[best // len(THRESHOLDS)], "ab"[best // len(THRESHOLDS)]), THRESHOLDS[best % 20]
    assert (threshold.name, threshold.action, threshold.min_confidence) == (names[best], longest, cut)


def test_without_a_drafter_there_is_no_threshold() -> None:
    assert [rule.name for rule in simple_rules(TRAIN, COSTS, parse_menu("reuse/0", ()))] == [PLAIN, PLAIN]


def test_each_drafter_has_a_cut_of_its_own() -> None:
    for drafter in "ab":
        alone = Menu(tuple(entry for entry in MENU.actions if entry.drafter in ("", drafter)))
        assert cut_of(CUT, drafter) == tuned_cut(TRAIN, [COSTS], alone)
    assert isinstance(CUT, Mapping)
    assert tuned_cut(TRAIN, [COSTS, COSTS], MENU) == 0.0


class Constant:
    """Takes one action throughout."""

    name, needs_observation, min_confidence = "constant", False, 0.0

    def __init__(self, action: int) -> None:
        self.action = action

    def choose(self, observation: object, mask: object) -> int:
        return self.action

    def observe(self, record: object) -> None:
        return None


@pytest.mark.parametrize(("factor", "exported"), [(0.99, False), (1.0, True), (1.01, True)])
def test_the_fastest_rule_is_named_unless_a_seed_is_faster(factor: float, exported: bool) -> None:
    rules = simple_rules(TRAIN, COSTS, MENU)
    times = [rule.replay(VALIDATION, COSTS, MENU) for rule in rules]
    best = int(np.argmin([seconds.sum() for seconds in times]))
    trained = [Trained(0, "ppo", ConstantHead(0), 1, [], times[best] * factor, True)]
    assert validate(MATERIAL, trained).best_rule == (rules[best] if exported else None)


def test_a_rule_is_a_policy_that_looks_at_nothing(tmp_path: Path) -> None:
    _, _, rule = simple_rules(TRAIN, COSTS, MENU)
    policy = Policy(rule.name, MENU, rule.head(), COSTS, min_confidence=rule.cut(MENU))
    assert policy.min_confidence == {MENU[rule.action].drafter: rule.min_confidence}
    policy.save(tmp_path)
    loaded = load_policy(tmp_path)
    assert loaded == replace(policy, costs=loaded.costs)
    controller = loaded.controller()
    assert not controller.needs_observation
    for can_reuse in (False, True):
        assert controller.choose(None, MENU.mask(can_reuse)) == rule.action
        assert controller.min_confidence == rule.min_confidence


@pytest.mark.parametrize("action", [-1, len(MENU), 99])
def test_a_constant_outside_the_menu_is_refused(action: int) -> None:
    with pytest.raises(PolicyError, match=f"constant action {action} is not in its menu .*; export it again"):
        Policy("rule", MENU, ConstantHead(action), COSTS)


def test_a_constant_that_a_mask_may_exclude_is_refused() -> None:
    fresh = MENU.actions.index(Action(reuse=False, k=0))
    with pytest.raises(PolicyError, match="constant action fresh/0 does not reuse"):
        Policy("rule", MENU, ConstantHead(fresh), COSTS)


@pytest.mark.parametrize("action", [True, 1.0, "1", None])
def test_a_constant_that_is_no_index_is_refused(action: Any) -> None:
    with pytest.raises(PolicyError, match=f"constant action is {action!r}; give the index of a menu entry"):
        ConstantHead(action)
