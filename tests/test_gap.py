"""The judgement on traces: arms, intervals and shares against figures by hand; what is tuned never sees the test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from trace_tools import made_up_costs, made_up_traces
from two_cells import COSTS, FLAT, MENU, two_cells

from agents import UCB
from agents.gap import HINDSIGHT, ORACLE, Gap, judge_gap
from agents.hindsight import try_fixed, try_thresholds
from agents.network import greedy
from agents.online import LearningController
from agents.oracle import optimum
from agents.rules import THRESHOLDS
from agents.some_costs import MeanSpeedup, best_fixed, some_of
from agents.stationary import Counterfactual
from agents.step_table import step_table, with_every_length
from agents.tuning import tuned_cut
from engine.controller_names import make_controller
from engine.controllers import ThresholdController, fixed_name
from engine.guard import Guard
from engine.menu import default_menu, parse_menu
from engine.observation import ObservationSchema
from engine.policy_heads import LinearHead, MLPHead
from envs.replay_session import ReplaySession
from envs.vector import rollout, run_controller

TRAIN, VALIDATION, TEST = two_cells(10, 1), two_cells(6, 2), two_cells(14, 3)


@pytest.fixture(scope="module")
def heads() -> list[MLPHead]:
    return [Counterfactual(rounds=40).fit(TRAIN, VALIDATION, MENU, [COSTS], seed=seed) for seed in range(2)]


@pytest.fixture(scope="module")
def gap(heads: list[MLPHead]) -> Gap:
    table = UCB(MENU, ObservationSchema(MENU, COSTS)).head()
    return judge_gap(TRAIN, TEST, MENU, COSTS, {"counterfactual": heads, "ucb": [table]})


def test_every_arm_is_there_and_takes_its_controller_s_time(gap: Gap, heads: list[MLPHead]) -> None:
    arms = list(gap.seconds)
    assert arms[:4] == ["plain", "fixed:1", "fixed:4", "fixed:8"]
    assert arms[-1] == ORACLE
    assert {"heuristic", "cost-model", "threshold, tuned on train", "counterfactual", "ucb"} <= set(arms)
    for name in ("plain", "fixed:4", "heuristic", "cost-model"):
        expected = run_controller(TEST, COSTS, MENU, make_controller(name, MENU, lambda: COSTS)).seconds
        np.testing.assert_allclose(gap.seconds[name][0], expected, rtol=1e-9)
    for row, head in zip(gap.seconds["counterfactual"], heads, strict=True):
        np.testing.assert_array_equal(row, rollout(TEST, COSTS, MENU, greedy(head)).seconds)
    limit = optimum(step_table(TEST, with_every_length(MENU), COSTS, observed=False))
    np.testing.assert_array_equal(gap.seconds[ORACLE][0], limit)
    for name, seconds in gap.seconds.items():
        assert (seconds >= limit * (1 - 1e-9)).all(), name


def test_figures_follow_from_the_seconds() -> None:
    seconds = {
        "plain": np.array([[4.0, 4.0, 8.0, 8.0]]),
        HINDSIGHT: np.array([[4.0, 4.0, 4.0, 4.0]]),
        "learned": np.array([[4.0, 2.0, 3.0, 3.0], [2.0, 2.0, 3.0, 5.0]]),
        ORACLE: np.array([[2.0, 2.0, 2.0, 2.0]]),
    }
    arms = {arm.arm: arm for arm in Gap(seconds, ("a", "a", "b", "b"), ("g", "g", "h", "h")).arms()}
    learned = arms["learned"]
    assert (learned.seeds, learned.speedup, learned.over_fixed, learned.hindsight_share) == (2, 2.0, 16 / 12, 0.5)
    assert (learned.low, learned.high) == (8 / 5, 16 / 7), "two groups: an interval from the one to the other"
    assert (learned.over_fixed_low, learned.over_fixed_high) == (8 / 7, 8 / 5)
    assert learned.kinds == {"a": 8 / 5, "b": 16 / 7}
    assert learned.spread == 0.0
    shares = {name: arm.hindsight_share for name, arm in arms.items()}
    assert shares == {"plain": -1.0, HINDSIGHT: 0.0, "learned": 0.5, ORACLE: 1.0}


def test_the_spread_is_over_seeds() -> None:
    one = np.array([[2.0, 2.0]])
    seconds = {"plain": 2 * one, HINDSIGHT: one, ORACLE: one / 2, "x": np.array([[1.0, 1.0], [2.0, 2.0]])}
    arms = {arm.arm: arm for arm in Gap(seconds, ("k", "k"), ("g", "h")).arms()}
    assert arms["x"].spread == pytest.approx(np.std([4.0, 2.0], ddof=1))
    assert arms["plain"].spread == 0.0


def test_no_gap_is_no_share() -> None:
    one = np.array([[2.0, 2.0]])
    arms = Gap({"plain": one, HINDSIGHT: one, ORACLE: one}, ("k", "k"), ("g", "h")).arms()
    assert [arm.hindsight_share for arm in arms] == [0.0, 0.0, 0.0]


def test_what_is_tuned_is_tuned_on_the_training_requests(gap: Gap) -> None:
    fixed, thresholds = try_fixed(TRAIN, COSTS, MENU), try_thresholds(TRAIN, COSTS, MENU)
    chosen = fixed.names[int(fixed.seconds.sum(axis=1).argmin())]
    np.testing.assert_allclose(gap.seconds["best fixed, tuned on train"][0], gap.seconds[chosen][0])
    threshold = THRESHOLDS[int(thresholds.seconds.sum(axis=1).argmin())]
    expected = run_controller(TEST, COSTS, MENU, ThresholdController(MENU, threshold)).seconds
    np.testing.assert_allclose(gap.seconds["threshold, tuned on train"][0], expected)
    assert 0.1 < threshold <= 0.9, "it separates the drafter's two confidences"


def always(action: int) -> LinearHead:
    """A head of one choice."""
    nothing, scores = np.zeros(len(ObservationSchema(MENU)), np.float32), np.zeros(len(MENU), np.float32)
    scores[action] = 1.0
    return LinearHead(nothing, nothing, np.zeros((len(nothing), len(MENU)), np.float32), scores)


def test_the_cut_of_a_policy_is_tuned_as_the_threshold_is() -> None:
    cut = tuned_cut(TRAIN, [COSTS], MENU)
    assert isinstance(cut, float)
    assert f"threshold:{cut:g}" == try_thresholds(TRAIN, COSTS, MENU).names[try_thresholds(TRAIN, COSTS, MENU).best]
    assert tuned_cut(TRAIN, [COSTS], default_menu(())) == 0.0
    action, pace = best_fixed(TRAIN, MENU, [COSTS], cut)
    assert action == MENU.find(8), "under the cut the longest draft is best"
    assert pace < best_fixed(TRAIN, MENU, [COSTS])[1]
    heads = [always(action)]
    judged = judge_gap(TRAIN, TEST, MENU, COSTS, {"cut": heads, "uncut": heads}, cuts={"cut": cut}).seconds
    np.testing.assert_allclose(judged["cut"], judged["threshold, tuned on train"])  # observing costs nothing here
    np.testing.assert_allclose(judged["uncut"], judged["fixed:8"])


def test_hindsight_is_the_best_of_what_was_tried() -> None:
    tried = try_fixed(TEST, COSTS, MENU)
    assert tried.names == ("plain", "fixed:1", "fixed:4", "fixed:8")
    totals = [run_controller(TEST, COSTS, MENU, make_controller(name, MENU)).seconds.sum() for name in tried.names]
    assert tried.best == int(np.argmin(totals))
    np.testing.assert_array_equal(tried.best_of_each, tried.seconds.min(axis=0))
    two = parse_menu("reuse/0,reuse/a/2,reuse/b/2", ("a", "b"))

    assert [fixed_name(two, action) for action in range(3)] == ["plain", "fixed:2:a", "fixed:2:b"]
    assert all(make_controller(fixed_name(two, a), two).choose(None, [True] * 3) == a for a in range(3))


def test_tables_show_every_arm_and_kind(gap: Gap) -> None:
    lines = gap.table().splitlines()
    assert lines[0].startswith("14 requests in 7 groups")
    assert [line.split("  ")[0] for line in lines[2:]] == list(gap.seconds)
    assert gap.kinds_table().splitlines()[0].split() == ["speed-up", "even", "odd"]
    document = gap.to_json()
    assert [arm["arm"] for arm in document["arms"]] == list(gap.seconds)


def test_the_learned_arm_takes_much_of_the_gap(gap: Gap) -> None:
    arm = next(arm for arm in gap.arms() if arm.arm == "counterfactual")
    assert arm.hindsight_share > 0.5
    assert arm.over_fixed_low > 1.0


def test_a_menu_without_drafts_can_be_judged() -> None:
    menu = default_menu(())
    assert next(iter(judge_gap(TRAIN, TEST, menu, COSTS, {}).seconds)) == "plain"


def test_a_learner_goes_on_learning_as_a_controller() -> None:
    learner = UCB(MENU, ObservationSchema(MENU, COSTS), seed=0)
    controller = LearningController(learner, MENU, COSTS)
    first = run_controller(TRAIN, COSTS, MENU, controller)
    assert learner.visits.sum() == first.steps.sum()
    assert learner.totals[0] == first.tokens.sum()
    for _ in range(6):
        last = run_controller(TRAIN, COSTS, MENU, controller)
    assert last.seconds.sum() < first.seconds.sum()


def test_a_learner_cuts_the_drafts_of_whoever_it_chose() -> None:
    menu = parse_menu("reuse/0,reuse/a/2,reuse/b/4", ("a", "b"))
    costs = made_up_costs(np.random.default_rng(0), ("a", "b"))
    chosen = iter([1, 2, 0])

    class Told(UCB):
        def choose(self, vector: np.ndarray, mask: Sequence[bool]) -> int:
            return next(chosen)

    learner = Told(menu, ObservationSchema(menu, costs), seed=0)
    controller = LearningController(learner, menu, costs, {"a": 0.25, "b": 0.75})
    observation = ReplaySession(made_up_traces(0), 0, menu, costs).observe()
    for least in (0.25, 0.75, 0.0):
        controller.choose(observation, menu.mask(False))
        assert controller.min_confidence == least


def test_a_learner_is_not_taught_the_steps_that_a_guard_takes() -> None:
    """They were chosen without an observation: the newest one is of another position."""

    class Drafting(UCB):
        def choose(self, vector: np.ndarray, mask: Sequence[bool]) -> int:
            return MENU.find(8)

    learner = Drafting(MENU, ObservationSchema(MENU, COSTS))
    guard = Guard(LearningController(learner, MENU, COSTS), MENU, COSTS)
    totals = [run_controller(TRAIN, COSTS, MENU, guard) for _ in range(2)]
    assert guard.plain_steps > 0
    assert learner.visits.sum() == sum(run.steps.sum() for run in totals) - guard.plain_steps
    assert learner.totals[0] == sum(run.tokens.sum() for run in totals) - guard.plain_steps


def test_a_learner_may_be_told_of_a_guards_step_before_it_was_ever_asked() -> None:
    learner = UCB(MENU, ObservationSchema(MENU, COSTS), seed=0)
    session = ReplaySession(TRAIN, 0, MENU, COSTS)
    session.step(MENU.plain)
    LearningController(learner, MENU, COSTS).observe(session.steps[0])
    assert learner.visits.sum() == 0


# -- some of many cost tables -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "kept"), [(1, 1), (4, 4), (7, 7), (8, 4), (9, 5), (256, 4)])
def test_some_tables_are_spread_evenly(count: int, kept: int) -> None:
    tables = [replace(COSTS, machine=str(number)) for number in range(count)]
    some = [int(table.machine) for table in some_of(tables)]
    assert len(some) == kept
    assert some[0] == 0
    assert len(set(np.diff(some))) <= 1


def test_the_best_fixed_action_of_several_machines_is_of_none_alone() -> None:
    """Where rows are free the longest draft is best; a slow machine with dear rows counts as much as a fast one."""
    slow = replace(COSTS, verify={k: tuple(100 * s for s in seconds) for k, seconds in COSTS.verify.items()})
    steps = {
        action: [rollout(TRAIN, table, MENU, action, observed=False).plain_steps.sum() for table in (FLAT, slow)]
        for action, entry in enumerate(MENU.actions)
        if entry.reuse
    }
    alone = [min(steps, key=lambda action, place=place: steps[action][place]) for place in range(2)]  # type: ignore[misc]
    expected = min(steps, key=lambda action: sum(steps[action]))
    assert [best_fixed(TRAIN, MENU, [table])[0] for table in (FLAT, slow)] == alone
    for tables in ([FLAT, slow], [slow, FLAT]):
        action, pace = best_fixed(TRAIN, MENU, tables)
        assert action == expected
        assert pace == pytest.approx(sum(steps[action]) / (2 * TRAIN.num_tokens))
    assert len({*alone, expected}) > 1


def test_the_mean_speed_up_is_over_plain_decoding_under_each_table() -> None:
    """Figures of every table weigh alike, whatever its seconds; plain decoding observes nothing and cuts nothing."""
    tables, head, cut, expected = [COSTS, replace(FLAT, observe=0.001)], always(MENU.find(8)), 0.5, []
    for table in tables:
        plain = run_controller(TEST, table, MENU, make_controller("plain", MENU)).seconds.sum()
        expected.append(plain / rollout(TEST, table, MENU, greedy(head), min_confidence=cut).seconds.sum())
    speedup = MeanSpeedup(TEST, MENU, tables, cut)
    assert [speedup(head) for _ in range(2)] == pytest.approx([np.mean(expected)] * 2, rel=1e-12)
    assert expected[0] != pytest.approx(expected[1])
    assert speedup(head) != pytest.approx(MeanSpeedup(TEST, MENU, tables)(head))
