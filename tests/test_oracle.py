"""The table of all steps against rollouts of them, and the clairvoyant optimum against every possible run."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_tools import made_up_costs, made_up_traces

from agents.oracle import optimum
from agents.step_table import step_table, with_every_length
from engine.controller_names import make_controller
from engine.controllers import BaseController
from engine.costs import CostTable
from engine.cuts import Cut, cut_of
from engine.errors import MenuError
from engine.menu import Menu, parse_menu
from engine.observation import Observation
from envs.replay_session import ReplaySession
from envs.trace import TraceSet
from envs.vector import rollout, run_controller

MENU = parse_menu("fresh/0,reuse/0,fresh/a/2,reuse/a/2,reuse/a/4,reuse/b/1,reuse/b/8", ("a", "b"))
SMALL = parse_menu("fresh/0,reuse/0,reuse/a/2,reuse/b/2,reuse/b/6", ("a", "b"))


def costs_of(seed: int) -> CostTable:
    return made_up_costs(np.random.default_rng(seed), ("a", "b"))


def short_traces(seed: int, longest: int, count: int = 40) -> TraceSet:
    """Made-up traces with so few tokens that every run can be tried."""
    traces = made_up_traces(seed, count)
    return traces.subset([i for i, trace in enumerate(traces.traces) if trace.length <= longest])


def replayed(traces: TraceSet, index: int, menu: Menu, costs: CostTable, actions: Sequence[int]) -> ReplaySession:
    session = ReplaySession(traces, index, menu, costs)
    for action in actions:
        session.step(action, observed=False)
    return session


def least(traces: TraceSet, index: int, menu: Menu, costs: CostTable) -> float:
    """By trying every sequence of allowed actions to its end."""
    best, waiting = np.inf, [()]  # type: ignore[var-annotated]
    while waiting:
        actions = waiting.pop()
        session = replayed(traces, index, menu, costs, actions)
        if session.finished:
            best = min(best, sum(step.seconds for step in session.steps))
        else:
            waiting += [(*actions, action) for action, allowed in enumerate(session.mask()) if allowed]
    return float(best)


@settings(deadline=None, max_examples=12)
@given(st.integers(0, 10**6))
def test_the_optimum_is_the_least_of_all_runs(seed: int) -> None:
    """With a drafter that lags and one that does not, cached prefixes, and requests that end within a draft."""
    traces, costs = short_traces(seed, longest=3, count=25), costs_of(seed)
    if len(traces):
        best = optimum(step_table(traces, SMALL, costs, observed=False))
        expected = [least(traces, index, SMALL, costs) for index in range(len(traces))]
        np.testing.assert_allclose(best, expected, rtol=1e-9)


class Drawn(BaseController):
    """Any allowed action."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def choose(self, observation: Observation | None, mask: Sequence[bool]) -> int:
        return self._rng.choice([action for action, allowed in enumerate(mask) if allowed])


def least_cut(traces: TraceSet, index: int, menu: Menu, costs: CostTable) -> float:
    """By trying every sequence of allowed actions, each with each of some cuts."""
    best, waiting = np.inf, [()]  # type: ignore[var-annotated]
    while waiting:
        steps = waiting.pop()
        session = ReplaySession(traces, index, menu, costs)
        for action, cut in steps:
            session.step(action, cut, observed=False)
        if session.finished:
            best = min(best, sum(step.seconds for step in session.steps))
        else:
            actions = [action for action, allowed in enumerate(session.mask()) if allowed]
            waiting += [(*steps, (action, cut)) for action in actions for cut in (0.0, 0.5, 0.75, 1.0)]
    return float(best)


@settings(deadline=None, max_examples=10)
@given(st.integers(0, 10**6))
def test_over_every_length_it_bounds_what_is_cut(seed: int) -> None:
    """Drafting a token is dearer than reading it, as it is on every machine: the draft reads it too."""
    costs = costs_of(seed)
    costs = replace(costs, draft_read={name: min(read, costs.draft[name]) for name, read in costs.draft_read.items()})
    traces, menu = short_traces(seed, longest=2, count=25), parse_menu("reuse/0,reuse/a/6,reuse/b/6", ("a", "b"))
    if len(traces):
        limit = optimum(step_table(traces, with_every_length(menu), costs, observed=False))
        assert all(limit[i] <= least_cut(traces, i, menu, costs) * (1 + 1e-9) for i in range(len(traces)))


def test_a_cut_may_beat_the_oracle_over_the_menu_alone() -> None:
    """Why the limit is taken over every length."""
    traces, costs = made_up_traces(1, 40), costs_of(1)
    menu = parse_menu("fresh/0,reuse/0,reuse/a/8", ("a",))
    alone, all_lengths = (
        optimum(step_table(traces, each, costs, observed=False)) for each in (menu, with_every_length(menu))
    )
    assert (all_lengths <= alone * (1 + 1e-12)).all()
    best = np.full(len(traces), np.inf)
    for threshold in np.linspace(0.0, 1.0, 21):
        best = np.minimum(best, rollout(traces, costs, menu, 2, observed=False, min_confidence=threshold).seconds)
    assert (best < alone * (1 - 1e-9)).any()
    assert (best >= all_lengths * (1 - 1e-9)).all()


def test_every_length_keeps_the_menu_and_adds_what_is_shorter() -> None:
    expected = "fresh/0,reuse/0,fresh/a/2,reuse/a/2,reuse/a/4,reuse/b/1,fresh/a/1,reuse/a/1,reuse/a/3"
    menu = parse_menu("fresh/0,reuse/0,fresh/a/2,reuse/a/2,reuse/a/4,reuse/b/1", ("a", "b"))
    assert str(with_every_length(menu)) == str(parse_menu(expected, ("a", "b")))


@settings(deadline=None, max_examples=10)
@given(st.integers(0, 10**6))
def test_no_controller_beats_it(seed: int) -> None:
    traces, costs = made_up_traces(seed), costs_of(seed)
    limit = optimum(step_table(traces, with_every_length(MENU), costs, observed=False)) * (1 - 1e-9)
    controllers = [
        *(make_controller(name, MENU) for name in ("plain", "fixed:4:a", "fixed:8:b", "heuristic", "threshold:0.6")),
        make_controller("cost-model", MENU, lambda: costs),
        Drawn(seed),
    ]
    for controller in controllers:
        assert (run_controller(traces, costs, MENU, controller).seconds >= limit).all(), controller.name


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10**6), st.sampled_from([0.0, 0.6, {"a": 0.4, "b": 0.8}]))
def test_the_table_holds_what_a_rollout_meets(seed: int, cut: Cut) -> None:
    """Random actions; reading debts are added up as the table's docstring says."""
    traces, costs = made_up_traces(seed), costs_of(seed)
    table, rng = step_table(traces, MENU, costs, min_confidence=cut), np.random.default_rng(seed)
    np.testing.assert_array_equal(table.length, [trace.length for trace in traces.traces])
    for index in range(len(traces)):
        session, owed = ReplaySession(traces, index, MENU, costs), table.first_debt[index].copy()
        while not session.finished:
            at = session.observe().generated
            assert table.allowed[index, at].tolist() == session.mask()
            action = int(rng.choice(np.flatnonzero(session.mask())))
            record = session.step(action, cut_of(cut, MENU[action].drafter))
            cell = (index, at, action)
            assert table.tokens[cell] == len(record.tokens)
            lagging = int(table.lags[cell])
            paid, owed[lagging if lagging >= 0 else 0] = (owed[lagging], 0.0) if lagging >= 0 else (0.0, owed[0])
            assert table.seconds[cell] + paid == pytest.approx(record.seconds, rel=1e-9)
            owed = owed + table.debt[cell]


@pytest.mark.parametrize("action", [action for action, entry in enumerate(MENU.actions) if entry.drafter != "b"])
def test_one_action_throughout_takes_what_the_table_says(action: int) -> None:
    """Drafter "b" lags; its reading debts are held by the rollout test."""
    traces, costs = made_up_traces(5, 30), costs_of(5)
    table = step_table(traces, MENU, costs)
    twin = MENU.allowed(action, MENU.mask(can_reuse=False))
    expected = []
    for index in range(len(traces)):
        position, seconds = 0, 0.0
        while position < table.length[index]:
            taken = action if position == 0 and traces.traces[index].cached_tokens else twin
            seconds += table.seconds[index, position, taken]
            position += int(table.tokens[index, position, taken])
        expected.append(seconds)
    np.testing.assert_allclose(rollout(traces, costs, MENU, action).seconds, expected, rtol=1e-9)


def test_each_request_may_have_costs_of_its_own() -> None:
    traces = made_up_traces(3, 6)
    tables = [costs_of(seed) for seed in range(6)]
    mixed = step_table(traces, MENU, tables)
    for index, costs in enumerate(tables):
        alone = step_table(traces.subset([index]), MENU, costs)
        positions = alone.tokens.shape[1]
        for name in ("tokens", "seconds", "debt", "allowed"):
            np.testing.assert_allclose(getattr(mixed, name)[index, :positions], getattr(alone, name)[0], rtol=1e-12)
        np.testing.assert_allclose(mixed.first_debt[index], alone.first_debt[0])


def test_a_drafter_that_was_not_recorded_is_refused() -> None:
    menu = parse_menu("reuse/0,reuse/c/2", ("c",))
    with pytest.raises(MenuError, match="not recorded: c"):
        step_table(made_up_traces(0), menu, costs_of(0))


def test_reading_debts_are_worth_paying_only_while_drafts_follow() -> None:
    """Reading the missed tokens is so dear that the model drafter drafts either from the start or never."""
    traces = made_up_traces(11, 60)
    costs = costs_of(11)
    dear = CostTable(**{**vars(costs), "draft_read": {"a": 0.0, "b": 10.0}})
    menu = parse_menu("reuse/0,reuse/b/1,reuse/b/8", ("b",))
    best, plain = (optimum(step_table(traces, each, dear)) for each in (menu, parse_menu("reuse/0", ())))
    assert (best <= plain).all()
    assert 0 < (best < plain).sum() < len(traces) / 4
