"""PPO and the counterfactual learner: they solve a problem whose solution is known, and export what they learned."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stable_baselines3 import PPO
from trace_tools import made_up_costs, made_up_traces
from two_cells import COPIED, COSTS, FLAT, MENU, NEW, two_cells

from agents.base import BatchLearner
from agents.hindsight import try_fixed
from agents.lookahead import look_ahead
from agents.network import exported, greedy, network, standardisation, standardised
from agents.oracle import optimum
from agents.ppo import MaskedPolicy, ProximalPolicy, _TokenBatch
from agents.sb3_env import ReplayVecEnv
from agents.some_costs import MeanSpeedup, best_fixed
from agents.stationary import Counterfactual
from agents.step_table import StepTable, step_table
from agents.visits import Visits, random_actions, random_walk
from engine.costs import CostTable
from engine.menu import Menu, parse_menu
from engine.policy_heads import MLPHead
from envs.lanes import Lanes
from envs.trace import TraceSet
from envs.vector import ReplayBatch, rollout

TRAIN, VALIDATION, TEST = two_cells(24, 1), two_cells(8, 2), two_cells(16, 3)
FEW = ProximalPolicy(steps=40_000, lanes=64, batch=512, learning_rate=3e-3, check_every=10)
LEARNERS: dict[str, BatchLearner] = {"ppo": FEW, "counterfactual": Counterfactual(rounds=80)}
learners = pytest.mark.parametrize("learner", LEARNERS.values(), ids=LEARNERS.keys())


@pytest.fixture(scope="module")
def heads() -> dict[str, MLPHead]:
    return {name: learner.fit(TRAIN, VALIDATION, MENU, [COSTS], seed=0) for name, learner in LEARNERS.items()}  # type: ignore[misc]


def taken(head: MLPHead, traces: TraceSet, costs: CostTable) -> dict[int, set[int]]:
    """Match length -> draft lengths chosen there, in a rollout; first steps left out."""
    chosen: dict[int, set[int]] = {COPIED: set(), NEW: set()}
    lanes = Lanes(traces, MENU, len(traces))
    for lane in range(lanes.size):
        lanes.begin(lane, lane, costs)
    length, match = traces.flat().length, lanes.schema.index("ngram.match_length")
    while (running := lanes.position < length).any():
        vectors = lanes.observations()
        actions = greedy(head)(vectors, lanes.masks())
        for lane in np.flatnonzero(running & (lanes.position > 0)):
            chosen[int(vectors[lane, match])].add(MENU[int(actions[lane])].k)
        lanes.step(actions)
    return chosen


# -- what they find ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LEARNERS)
def test_learns_to_draft_where_text_is_copied_and_only_there(heads: dict[str, MLPHead], name: str) -> None:
    """PPO, which samples, may still try a token at times. Of 3 seeds each none missed."""
    chosen = taken(heads[name], TEST, COSTS)
    assert chosen[COPIED] == {8}
    assert 0 in chosen[NEW]
    assert chosen[NEW] <= ({0, 1} if name == "ppo" else {0})
    fixed = try_fixed(TEST, COSTS, MENU).seconds.sum(axis=1).min()
    oracle = optimum(step_table(TEST, MENU, COSTS)).sum()
    learned = rollout(TEST, COSTS, MENU, greedy(heads[name])).seconds.sum()
    assert (fixed - learned) / (fixed - oracle) > 0.7


def test_one_policy_reads_the_costs_and_serves_two_machines() -> None:
    """Where rows are free it drafts everywhere; where they are dear, only copied text."""
    head = Counterfactual(rounds=120).fit(TRAIN, VALIDATION, MENU, [COSTS, FLAT], seed=1)
    assert taken(head, TEST, COSTS)[NEW] == {0}
    assert 0 not in taken(head, TEST, FLAT)[COPIED]
    for costs in (COSTS, FLAT):
        alone = Counterfactual(rounds=80).fit(TRAIN, VALIDATION, MENU, [costs], seed=1)
        speedup = MeanSpeedup(TEST, MENU, [costs])
        assert speedup(head) > 0.97 * speedup(alone)


@learners
def test_a_seed_decides_all(learner: BatchLearner) -> None:
    short: Any = ProximalPolicy(steps=2048, lanes=32, batch=256) if learner.name == "ppo" else Counterfactual(rounds=20)
    first, again, other = (short.fit(TRAIN, VALIDATION, MENU, [COSTS], seed=s).tensors() for s in (3, 3, 4))
    for name, tensor in first.items():
        np.testing.assert_array_equal(tensor, again[name])
    assert any((tensor != other[name]).any() for name, tensor in first.items())


@learners
def test_the_validation_requests_choose_among_the_iterates(learner: BatchLearner) -> None:
    told: list[float] = []
    short: Any = (
        ProximalPolicy(steps=8192, lanes=32, batch=256, check_every=2)
        if learner.name == "ppo"
        else Counterfactual(rounds=60)
    )
    head = short.fit(TRAIN, VALIDATION, MENU, [COSTS], 0, lambda done, speed, head: told.append(speed))
    assert len(told) >= 3
    assert MeanSpeedup(VALIDATION, MENU, [COSTS])(head) == pytest.approx(max(told), rel=1e-12)


def test_ppo_begins_near_the_best_fixed_action_of_some_machines_and_not_of_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where rows are free the longest draft is best; on the others, which are three of four, it is not."""
    tables = [FLAT, COSTS, COSTS, COSTS]
    best, first = (best_fixed(TRAIN, MENU, some)[0] for some in (tables, tables[:1]))
    assert best != first
    favoured: list[int] = []
    monkeypatch.setattr(MaskedPolicy, "favour", lambda policy, action, log_odds: favoured.append(action))
    ProximalPolicy(steps=64, lanes=8, horizon=8, batch=64).fit(TRAIN, VALIDATION, MENU, tables)
    assert favoured == [best]


def test_random_actions_are_allowed_and_all_alike_likely() -> None:
    """9,000 draws: shares err by 0.005, five of which are 0.025; a false alarm in fewer than 1 of 100,000 seeds."""
    masks = np.tile([[True, False, True, True], [False, False, False, True]], (9000, 1))
    actions = random_actions(masks, np.random.default_rng(3))
    shares = np.bincount(actions[0::2], minlength=4) / 9000
    assert shares[1] == 0.0
    np.testing.assert_allclose(shares[[0, 2, 3]], 1 / 3, atol=0.025)
    assert (actions[1::2] == 3).all()


# -- what they export -------------------------------------------------------------------------------------------


def sampled(traces: TraceSet, menu: Menu, count: int) -> tuple[np.ndarray, np.ndarray]:
    """At least `count` observations and masks as random actions meet them."""
    return random_walk(ReplayBatch(traces, COSTS, menu, 100), count // 100 - 1, seed=5)


def ppo() -> PPO:
    batch = ReplayBatch(TRAIN, COSTS, MENU, 16)
    vectors, _ = sampled(TRAIN, MENU, 1000)
    center, scale = standardisation(vectors)
    policy = {"menu": MENU, "center": center, "scale": scale}
    return PPO(MaskedPolicy, ReplayVecEnv(batch), n_steps=16, batch_size=64, seed=0, device="cpu", policy_kwargs=policy)


def test_the_exported_head_decides_as_the_trained_agent_on_10_000_observations() -> None:
    """Both in float64, in which no two scores come within rounding: without an exception, one at a time or batched."""
    learner = ppo()
    learner.learn(1024)
    policy: Any = learner.policy
    head = policy.head()
    vectors, masks = sampled(TRAIN, MENU, 10_000)
    policy.double()
    with torch.no_grad():
        scores = policy.get_distribution(torch.from_numpy(vectors.astype(np.float64))).distribution.logits.numpy()
    trained = np.where(masks, scores, -np.inf).argmax(axis=1)
    assert len(trained) >= 10_000
    assert [head.decide(v, m) for v, m in zip(vectors, masks, strict=True)] == trained.tolist()
    np.testing.assert_array_equal(greedy(head)(vectors, masks), trained)
    assert len(set(trained.tolist())) > 1


def test_the_policy_masks_what_the_menu_masks() -> None:
    learner = ppo()
    vectors, masks = sampled(TRAIN, MENU, 3000)
    assert masks.all(axis=1).any()
    assert not masks.all(axis=1).all()
    policy: Any = learner.policy
    with torch.no_grad():
        odds = policy.get_distribution(torch.from_numpy(vectors)).distribution.probs.numpy()
        values, log_odds, _ = policy.evaluate_actions(torch.from_numpy(vectors), torch.from_numpy(masks.argmax(axis=1)))
    np.testing.assert_array_equal(odds > 0, masks)
    np.testing.assert_allclose(np.exp(log_odds.numpy()), odds[np.arange(len(odds)), masks.argmax(axis=1)], rtol=1e-5)
    assert values.shape == (len(vectors), 1)


@pytest.mark.parametrize("hidden", [(), (8,), (64, 64)], ids=str)
def test_a_network_and_its_head_are_the_same_function(hidden: tuple[int, ...]) -> None:
    vectors, masks = sampled(TRAIN, MENU, 10_000)
    center, scale = standardisation(vectors)
    layers = network(vectors.shape[1], len(MENU), hidden, seed=2)
    head = exported(layers, center, scale)
    with torch.no_grad():
        scores = layers.double()(torch.from_numpy((vectors.astype(np.float64) - center) * scale)).numpy()
    np.testing.assert_array_equal(greedy(head)(vectors, masks), np.where(masks, scores, -np.inf).argmax(axis=1))
    np.testing.assert_allclose(head.scores(vectors), scores, rtol=1e-9, atol=1e-12)


def test_standardisation_ignores_what_does_not_vary() -> None:
    vectors = np.random.default_rng(0).normal(3.0, 2.0, (500, 3)).astype(np.float32)
    vectors[:, 1] = 0.3
    center, scale = standardisation(vectors)
    inputs = standardised(vectors, center, scale).numpy()
    np.testing.assert_allclose(inputs[:, [0, 2]].mean(axis=0), 0.0, atol=1e-5)
    np.testing.assert_allclose(inputs[:, [0, 2]].std(axis=0), 1.0, rtol=1e-5)
    assert scale[1] == 0.0


def test_the_potential_adds_the_same_to_every_run_of_a_request() -> None:
    worth, differences = 0.7, []
    for action in range(len(MENU)):
        batches = [kind(TEST.subset([4]), COSTS, MENU, 1) for kind in (ReplayBatch, _TokenBatch)]
        batches[1].worth = worth  # type: ignore[attr-defined]
        returns = np.zeros(2)
        for place, batch in enumerate(batches):
            batch.reset(0)
            done = False
            while not done:
                _, rewards, dones, _ = batch.step(np.array([action]))
                returns[place] += rewards[0]
                done = bool(dones[0])
        differences.append(returns[1] - returns[0])
    np.testing.assert_allclose(differences, worth * TEST.traces[4].length, rtol=1e-9)


# -- the exact gradient -----------------------------------------------------------------------------------------

SMALL = parse_menu("fresh/0,reuse/0,reuse/a/2,reuse/b/1,reuse/b/8", ("a", "b"))


def random_policy(table: StepTable, seed: int) -> np.ndarray:
    odds = np.random.default_rng(seed).random(table.tokens.shape) * table.allowed
    return np.asarray(odds / odds.sum(axis=-1, keepdims=True))


def expected_seconds(table: StepTable, policy: np.ndarray) -> np.ndarray:
    """By following every run of each request with its odds and its reading debts."""
    totals = []
    for request, length in enumerate(table.length):
        total, waiting = 0.0, [(0, 1.0, table.first_debt[request].tolist())]
        while waiting:
            position, odds, owed = waiting.pop()
            if position == length:
                continue
            for action in np.flatnonzero(table.allowed[request, position]):
                cell = (request, position, int(action))
                chance, after = odds * policy[cell], list(owed)
                lagging = int(table.lags[cell])
                total += chance * (table.seconds[cell] + (owed[lagging] if lagging >= 0 else 0.0))
                if lagging >= 0:
                    after[lagging] = 0.0
                after = [each + debt for each, debt in zip(after, table.debt[cell], strict=True)]
                waiting.append((position + int(table.tokens[cell]), chance, after))
        totals.append(total)
    return np.array(totals)


@settings(deadline=None, max_examples=8)
@given(st.integers(0, 10**6))
def test_looking_ahead_is_exact(seed: int) -> None:
    """Its expected times, and its derivatives against differences, with a drafter that lags."""
    traces = made_up_traces(seed, 16)
    traces = traces.subset([i for i, t in enumerate(traces.traces) if t.length <= 4] or [0])
    if traces.traces[0].length > 4:
        return
    table = step_table(traces, SMALL, made_up_costs(np.random.default_rng(seed), ("a", "b")))
    policy = random_policy(table, seed)
    ahead = look_ahead(table, policy)
    first = table.first_debt.shape[1]
    assert first == 1
    np.testing.assert_allclose((policy * ahead.seconds).sum(axis=-1)[:, 0], expected_seconds(table, policy), rtol=1e-8)
    rng = np.random.default_rng(seed)
    for request in range(len(traces)):
        position = int(rng.integers(table.length[request]))
        row = policy[request, position]
        for action in np.flatnonzero(table.allowed[request, position]):
            # the derivative to a logit, by central differences
            changed = []
            for step in (1e-5, -1e-5):
                moved = policy.copy()
                shifted = row * np.exp(step * (np.arange(len(row)) == action))
                moved[request, position] = shifted / shifted.sum()
                changed.append(expected_seconds(table, moved)[request])
            values = ahead.seconds[request, position]
            expected = ahead.visits[request, position] * row[action] * (values[action] - (row * values).sum())
            assert (changed[0] - changed[1]) / 2e-5 == pytest.approx(expected, rel=1e-4, abs=1e-8)


def test_visits_are_the_observations_of_a_rollout_where_it_stepped() -> None:
    traces = made_up_traces(4, 10)
    costs = [made_up_costs(np.random.default_rng(seed), ("a", "b")) for seed in range(10)]
    policy: Callable[[np.ndarray, np.ndarray], np.ndarray] = lambda vectors, masks: np.full(len(vectors), 4)  # noqa: E731
    vectors = Visits(traces, SMALL).under(policy, costs)
    lanes = Lanes(traces, SMALL, 10)
    for lane, table in enumerate(costs):
        lanes.begin(lane, lane, table)
    length = traces.flat().length
    while (running := lanes.position < length).any():
        rows = np.flatnonzero(running)
        np.testing.assert_array_equal(vectors[rows, lanes.position[rows]], lanes.observations()[rows])
        lanes.step(np.full(10, 4))
    behind = np.arange(vectors.shape[1]) >= length[:, None]
    assert (vectors[behind] == 0).all()


def test_visits_between_steps_tell_of_the_newest_step_before() -> None:
    vectors = Visits(TEST, MENU).under(lambda v, m: np.full(len(v), MENU.find(8)), [COSTS] * len(TEST))
    lanes = Lanes(TEST, MENU, 1)
    lanes.begin(0, 0, COSTS)
    lanes.step(np.array([MENU.find(8)]))
    second = int(lanes.position[0])
    places = [lanes.schema.index(name) for name in ("last_drafted", "last_accepted", "acceptance_short")]
    position = lanes.schema.index("generated")
    for place, at in product(places, range(1, second)):
        assert vectors[0, at, place] == vectors[0, 0, place]
    assert [vectors[0, second, place] for place in places] != [vectors[0, 0, place] for place in places]
    assert (np.diff(vectors[0, : int(TEST.traces[0].length), position]) > 0).all()
