"""The bandit on synthetic arms of known tokens and times: what it finds, what it learns from a step, what it keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save

from agents import UCB
from agents.gain_table import PRIOR_PULLS, default_cells
from agents.side_observations import KNOWN
from engine.cells import Cells
from engine.costs import CostTable
from engine.menu import Menu, default_menu, parse_menu
from engine.observation import ObservationSchema

DRAFTERS = ("ngram", "model:b")
PREFILL = 0.05  # plain steps of one prompt token


def costs(menu: Menu) -> CostTable:
    verify = {k: (1.0 + 0.1 * k,) for k in (0, *menu.lengths)}
    return CostTable((64,), verify, 0.0, dict.fromkeys(menu.drafters, 0.01), PREFILL, "synthetic")


def learner(menu: Menu, edges: tuple[float, ...] = (0.5,), seed: int = 0) -> UCB:
    """A bandit with one cell a bucket of `acceptance_short`."""
    schema = ObservationSchema(menu, costs(menu))
    return UCB(menu, schema, Cells((("acceptance_short", edges),), schema.names), seed)


def vector(menu: Menu, **features: float) -> np.ndarray:
    """An observation with these features, all others 0 but the costs."""
    schema = ObservationSchema(menu, costs(menu))
    values = np.zeros(len(schema), dtype=np.float32)
    values[schema.index("prefill_cost")] = PREFILL
    for name, value in features.items():
        values[schema.index(name)] = value
    return values


# -- which arms it finds ----------------------------------------------------------------------------------------

Outcome = tuple[int, int, float]  # drafted, accepted, plain steps


@dataclass
class World:
    """Cells that come up at random, whatever is chosen; each arm of each cell has fixed odds of its outcomes.

    Attributes:
        odds: probability of each cell.
        arms: `[cell][arm]` -> list of (probability, outcome).
    """

    menu: Menu
    odds: Sequence[float]
    arms: Sequence[Sequence[Sequence[tuple[float, Outcome]]]]

    def expected(self, cell: int, arm: int) -> tuple[float, float]:
        tokens = sum(p * (accepted + 1) for p, (_, accepted, _) in self.arms[cell][arm])
        return tokens, sum(p * time for p, (_, _, time) in self.arms[cell][arm])

    def rate(self, choice: Sequence[int]) -> float:
        """Tokens over time of a fixed choice, one arm a cell."""
        means = [np.array(self.expected(cell, arm)) * self.odds[cell] for cell, arm in enumerate(choice)]
        tokens, time = np.sum(means, axis=0)
        return float(tokens / time)

    def best(self) -> tuple[int, ...]:
        """By trying every choice."""
        return max(product(range(len(self.menu)), repeat=len(self.odds)), key=self.rate)

    def each_cell(self, worth: Callable[[int, int], float]) -> tuple[int, ...]:
        """What somebody would choose who takes the arm of the highest worth in each cell by itself."""
        return tuple(max(range(len(self.menu)), key=lambda a, c=c: worth(c, a)) for c in range(len(self.odds)))  # type: ignore[misc]

    def mean_speed(self, cell: int, arm: int) -> float:
        return sum(p * (accepted + 1) / time for p, (_, accepted, time) in self.arms[cell][arm])

    def teach(self, bandit: UCB, steps: int, seed: int) -> tuple[tuple[int, ...], float]:
        """Let a bandit learn; its final choice and the rate over the second half."""
        rng = np.random.default_rng(seed)
        vectors = [vector(self.menu, acceptance_short=(cell + 0.5) / len(self.odds)) for cell in range(len(self.odds))]
        mask = [True] * len(self.menu)
        late = np.zeros(2)
        for step in range(steps):
            cell = int(rng.choice(len(self.odds), p=self.odds))
            action = bandit.choose(vectors[cell], mask)
            chances = [p for p, _ in self.arms[cell][action]]
            drafted, accepted, time = self.arms[cell][action][int(rng.choice(len(chances), p=chances))][1]
            bandit.update(vectors[cell], action, drafted, accepted, accepted + 1, time)
            if step >= steps // 2:
                late += (accepted + 1, time)
        head = bandit.head()
        return tuple(head.decide(v, mask) for v in vectors), float(late[0] / late[1])


def nested(menu: Menu, matches: Sequence[float], time: Callable[[int], float]) -> list[list[tuple[float, Outcome]]]:
    """Arms of one drafter: `matches[m]` is the probability that m tokens match; noise of the time is +-20 %."""
    return [
        [(p / 2, (a.k, min(a.k, m), time(a.k) * noise)) for m, p in enumerate(matches) for noise in (0.8, 1.2)]
        for a in menu.actions
    ]


def test_finds_the_draft_length_of_each_cell() -> None:
    menu = parse_menu("reuse/0,reuse/1,reuse/2,reuse/4,reuse/8", ["ngram"])
    cheap = lambda k: 1.0 + 0.15 * k  # noqa: E731
    hopeless = nested(menu, [0.95, 0.05], cheap)
    fair = nested(menu, [0.2, 0.1, 0.6, 0.1], cheap)
    sure = nested(menu, [0.05, *[0.0] * 7, 0.95], cheap)
    world = World(menu, [0.4, 0.3, 0.3], [hopeless, fair, sure])
    assert world.best() == (0, 2, 4)
    choice, late = world.teach(learner(menu, (1 / 3, 2 / 3)), steps=3000, seed=1)
    assert choice == world.best()
    assert late > 0.97 * world.rate(world.best())


def test_aims_at_the_overall_ratio_and_not_at_each_cell_s_own() -> None:
    """In the good cell a short draft has the better ratio; but as the other cell is slow, its longer draft pays."""
    menu = parse_menu("reuse/0,reuse/ngram/4,reuse/model:b/8", DRAFTERS)
    slow = [[(1.0, (a.k, 0, 1.0 + 0.5 * a.k))] for a in menu.actions]
    good = [[(1.0, (0, 0, 1.0))], [(1.0, (4, 3, 2.0))], [(1.0, (8, 5, 3.2))]]
    world = World(menu, [0.6, 0.4], [slow, good])
    own_ratio = world.each_cell(lambda c, a: world.expected(c, a)[0] / world.expected(c, a)[1])
    assert own_ratio == (0, 1)
    assert world.best() == (0, 2)
    choice, _ = world.teach(learner(menu), steps=3000, seed=2)
    assert choice == (0, 2)


def test_is_not_misled_by_the_mean_of_the_steps_own_rewards() -> None:
    """An arm that is sometimes very fast and often very slow has the best mean speed and the worst ratio."""
    menu = parse_menu("reuse/0,reuse/ngram/2,reuse/model:b/2", DRAFTERS)
    arms: list[list[tuple[float, Outcome]]] = [
        [(1.0, (0, 0, 1.0))],
        [(0.5, (2, 0, 0.1)), (0.5, (2, 0, 3.0))],
        [(1.0, (2, 2, 2.0))],
    ]
    world = World(menu, [1.0], [arms])
    assert world.each_cell(world.mean_speed) == (1,)  # tokens over time, averaged over steps
    assert world.each_cell(lambda c, a: -world.expected(c, a)[1]) == (0,)  # the environment's reward, averaged
    assert world.best() == (2,)
    choice, late = world.teach(learner(menu, ()), steps=1500, seed=3)
    assert choice == (2,)
    assert late > 0.95 * world.rate((2,))


def test_drafters_of_different_cost_are_told_apart() -> None:
    """A costly drafter's times must not be taken for a cheap one's: both draft 2 and 4 tokens."""
    menu = parse_menu("reuse/0,reuse/ngram/2,reuse/ngram/4,reuse/model:b/2,reuse/model:b/4", DRAFTERS)
    price = {"": 1.0, "ngram": 1.1, "model:b": 3.0}
    arms = [[(0.9, (a.k, min(a.k, 1), price[a.drafter])), (0.1, (a.k, 0, price[a.drafter]))] for a in menu.actions]
    world = World(menu, [1.0], [arms])
    bandit = learner(menu, ())
    world.teach(bandit, steps=1500, seed=4)
    for arm, action in enumerate(menu.actions):
        pulls, _, time = bandit.sums[0, arm, :3]
        assert pulls > 0
        assert time / pulls == pytest.approx(price[action.drafter])


# -- what a step tells ------------------------------------------------------------------------------------------


def revealed(menu: Menu, action: int, drafted: int, accepted: int) -> dict[int, tuple[int, int]]:
    """arm -> (tokens, tokens drafted) for every other reusing arm of which this action tells whatever happens.

    A world: the pulled drafter has n tokens to propose, of which the first m are right. An arm of which only some
    outcomes of the action tell is left out: what would be learned is a biased sample.
    """
    pulled, longest = menu[action], max(menu.lengths) + 2

    def outcome(k: int, n: int, m: int) -> tuple[int, int]:
        return min(k, n, m) + 1, min(k, n)

    worlds = [(n, m) for n in range(longest + 1) for m in range(n + 1)]
    seen: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for world in worlds:
        seen.setdefault(outcome(pulled.k, *world), []).append(world)
    found: dict[int, tuple[int, int]] = {}
    for arm, entry in enumerate(menu.actions):
        if arm == action or not entry.reuse or entry.drafter not in ("", pulled.drafter):
            continue
        told = {what: {outcome(entry.k, *world) for world in agreeing} for what, agreeing in seen.items()}
        if all(len(outcomes) == 1 for outcomes in told.values()):
            found[arm] = next(iter(told[accepted + 1, drafted]))
    return found


@pytest.mark.parametrize(
    "text",
    [
        "fresh/0,reuse/0,reuse/1,reuse/2,reuse/3,reuse/4,reuse/6,reuse/8",
        "fresh/0,fresh/ngram/3,reuse/0,reuse/ngram/2,reuse/ngram/3,reuse/ngram/5,reuse/model:b/2,reuse/model:b/4",
    ],
)
def test_side_observations_are_those_that_every_world_agrees_on(text: str) -> None:
    menu = parse_menu(text, DRAFTERS)
    state = vector(menu, acceptance_short=0.9)
    count = 0
    for action, entry in enumerate(menu.actions):
        for drafted in range(entry.k + 1):
            for accepted in range(drafted + 1):
                bandit = learner(menu)
                # Every number of drafts of every drafter was seen before, and took a time that tells which it was.
                mean = 10.0 + np.arange(float(bandit.times[..., 0].size)).reshape(bandit.times.shape[:-1])
                square = mean**2 + 1.0
                bandit.times[...] = KNOWN * np.stack([np.ones_like(mean), mean, square], axis=-1)
                bandit.update(state, action, drafted, accepted, accepted + 1, 7.0)
                expected = np.zeros_like(bandit.sums)
                who = (*("", *menu.drafters),).index(entry.drafter)
                # This step's own time counts as well.
                mean[who, drafted] = (KNOWN * mean[who, drafted] + 7.0) / (KNOWN + 1)
                square[who, drafted] = (KNOWN * square[who, drafted] + 49.0) / (KNOWN + 1)
                told = {action: (accepted + 1, 7.0, 49.0)}
                for arm, (tokens, drafts) in revealed(menu, action, drafted, accepted).items():
                    owner = 0 if menu[arm].k == 0 else who
                    told[arm] = (tokens, mean[owner, drafts], square[owner, drafts])
                for arm, (tokens, time, squared) in told.items():
                    expected[1, arm] = (1, tokens, time, tokens**2, squared, tokens * time)
                np.testing.assert_allclose(bandit.sums, expected, err_msg=f"{entry} drafted {drafted} took {accepted}")
                count += len(told) - 1
    assert count > 50


def test_what_a_request_cuts_off_is_credited_to_no_arm() -> None:
    """A draft of 8 with 5 right, but the third token ended the request: no arm would have committed more than 3."""
    menu = parse_menu("reuse/0,reuse/1,reuse/2,reuse/4,reuse/8", ["ngram"])
    bandit = learner(menu, ())
    bandit.times[...] = (KNOWN, KNOWN * 1.5, KNOWN * 2.25)
    bandit.update(vector(menu), 4, 8, 3, 3, 1.5)
    assert bandit.sums[0, :, 0].tolist() == [1.0] * 5
    assert bandit.sums[0, :, 1].tolist() == [1.0, 2.0, 3.0, 3.0, 3.0]
    assert bandit.totals.tolist() == [3.0, 1.5]


def test_times_that_were_hardly_seen_are_not_told_on() -> None:
    menu = parse_menu("reuse/0,reuse/2,reuse/4", ["ngram"])
    bandit = learner(menu)
    for _ in range(KNOWN - 1):
        bandit.update(vector(menu), 1, 2, 2, 3, 1.25)
    bandit.update(vector(menu), 2, 4, 3, 4, 1.5)  # tells of a draft of 2, whose time is a rumour as yet
    assert bandit.sums[0, :, 0].tolist() == [0, KNOWN - 1, 1]
    bandit.update(vector(menu), 1, 2, 2, 3, 1.25)
    bandit.update(vector(menu), 2, 4, 0, 1, 1.5)
    assert bandit.sums[0, :, :3].tolist() == [
        [0, 0, 0],
        [KNOWN + 1, 3 * KNOWN + 1, 1.25 * (KNOWN + 1)],
        [2, 5, 3.0],
    ]


def test_estimates_are_unbiased_whichever_lengths_are_pulled() -> None:
    """All worlds alike: tokens that match are drawn first, then any arm is pulled; each arm's mean must be its own.

    Five means, none more than 5 standard errors off: a false alarm in fewer than 1 of 100,000 seeds.
    """
    menu = parse_menu("reuse/0,reuse/1,reuse/2,reuse/4,reuse/8", ["ngram"])
    bandit = learner(menu, ())
    rng = np.random.default_rng(11)
    state, matches = vector(menu), np.array([0, 1, 2, 3, 8])
    for _ in range(6000):
        action, m = int(rng.integers(0, 5)), int(rng.choice(matches))
        k = menu[action].k
        bandit.update(state, action, k, min(k, m), min(k, m) + 1, 1.0 + 0.1 * k)
    for arm, entry in enumerate(menu.actions):
        tokens = np.minimum(matches, entry.k) + 1.0
        pulls, total, time = bandit.sums[0, arm, :3]
        assert abs(total / pulls - tokens.mean()) <= 5.0 * tokens.std() / np.sqrt(pulls)
        assert time / pulls == pytest.approx(1.0 + 0.1 * entry.k)
    pulls = bandit.sums[0, :, 0]
    assert (pulls[1:-1] > pulls[2:]).all()  # the shorter a draft, the more steps tell of it


def test_an_unlucky_first_time_does_not_stick() -> None:
    """Plain steps take 1, but the first one was measured at 3 while the machine was busy."""
    menu = parse_menu("reuse/0,reuse/4", ["ngram"])
    bandit = learner(menu, ())
    rng, plain_steps = np.random.default_rng(10), 0
    for _ in range(3000):
        action = bandit.choose(vector(menu), [True, True])
        plain_steps += action == 0
        time = 1.5 if action else 3.0 if plain_steps == 1 else 1.0
        bandit.update(vector(menu), action, menu[action].k, 0, 1, time * (0.9 + 0.2 * float(rng.random())))
    assert bandit.head().decide(vector(menu), [True, True]) == 0


def test_a_first_step_is_charged_without_its_prefill_and_tells_of_no_other_arm() -> None:
    menu = default_menu(["ngram"])
    bandit = learner(menu, ())
    bandit.times[...] = 1.0
    first = vector(menu, prefill_pending=1.0, prompt_left=5.0)  # 31 tokens
    before = bandit.times.copy()
    bandit.update(first, 3, 2, 1, 2, 4.0)
    assert bandit.sums[0, :, 0].tolist() == [0, 0, 0, 1, 0, 0, 0, 0]
    assert bandit.sums[0, 3, 2] == pytest.approx(4.0 - 31 * PREFILL, rel=1e-5)
    assert bandit.totals == pytest.approx([2.0, 4.0 - 31 * PREFILL], rel=1e-5)
    np.testing.assert_array_equal(bandit.times, before)


def test_rate_counts_what_was_pulled_and_no_side_observation() -> None:
    menu = default_menu(["ngram"])
    bandit = learner(menu)
    assert bandit.rate == 1.0
    assert bandit.visits.tolist() == [0.0, 0.0]
    bandit.update(vector(menu), menu.plain, 0, 0, 1, 1.0)
    bandit.update(vector(menu), menu.find(4), 4, 3, 4, 1.5)
    bandit.update(vector(menu, acceptance_short=0.9), menu.plain, 0, 0, 1, 1.0)
    assert bandit.rate == pytest.approx(6 / 3.5)
    assert bandit.visits.tolist() == [2.0, 1.0]


# -- how it chooses ---------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.booleans(), min_size=8, max_size=8).filter(any),
    st.lists(st.tuples(st.integers(0, 7), st.integers(0, 8), st.floats(0.01, 5.0)), max_size=30),
    st.floats(0.0, 1.0),
)
def test_the_mask_is_kept_whatever_was_learned(
    mask: list[bool], steps: list[tuple[int, int, float]], level: float
) -> None:
    menu = default_menu(["ngram"])
    bandit = learner(menu)
    state = vector(menu, acceptance_short=level)
    for action, accepted, time in steps:
        k = menu[action].k
        bandit.update(state, action, k, min(k, accepted), min(k, accepted) + 1, time)
    assert mask[bandit.choose(state, mask)]
    assert mask[bandit.head().decide(state, mask)]


def test_every_arm_is_tried_once_before_any_is_tried_again() -> None:
    """Where nothing is learned from the side; in an order that depends on the seed."""
    menu = Menu(default_menu(()).actions + default_menu([f"d{i}" for i in range(6)], [1]).actions[2:])
    orders = set()
    for seed in range(8):
        bandit = learner(menu, seed=seed)
        order = []
        for _ in menu.actions:
            order.append(bandit.choose(vector(menu), [True] * len(menu)))
            bandit.sums[0, order[-1]] += (1.0, 1.0, 1.0, 1.0, 1.0, 1.0)
        assert sorted(order) == list(range(len(menu)))
        orders.add(tuple(order))
    assert len(orders) > 1


def test_the_bound_prefers_the_less_known_of_equal_arms() -> None:
    menu = parse_menu("reuse/0,reuse/2,reuse/4", ["ngram"])
    bandit = learner(menu)
    # tokens 1 and 3 in turn, time 1: all arms have the same mean and deviation
    for arm, pulls in enumerate((40, 10, 20)):
        bandit.sums[0, arm] = (pulls, 2.0 * pulls, pulls, 5.0 * pulls, pulls, 2.0 * pulls)
    bandit.times[..., 0] = 1000.0
    bandit.totals[:] = (140.0, 70.0)
    assert bandit.choose(vector(menu), [True] * 3) == 1
    assert bandit.choose(vector(menu), [True, False, True]) == 2
    bandit.sums[0, 0, 1] += 40.0 * 3
    assert bandit.choose(vector(menu), [True] * 3) == 0


def test_the_bound_is_as_wide_as_the_times_of_the_draft_length_are_few() -> None:
    menu = parse_menu("reuse/0,reuse/2,reuse/4", ["ngram"])
    bandit = learner(menu)
    bandit.sums[0] = (400.0, 800.0, 400.0, 2000.0, 400.0, 800.0)
    bandit.totals[:] = (140.0, 70.0)
    for fewest, entry in enumerate(menu.actions):
        bandit.times[..., 0] = 1000.0
        bandit.times[int(entry.k > 0), entry.k, 0] = 5.0
        assert bandit.choose(vector(menu), [True] * 3) == fewest


def test_an_arm_whose_tokens_cost_just_their_time_is_certain() -> None:
    """Tokens of 1 and 3 in turn. Where their times are 0.5 and 1.5, at a rate of 2, every step's gain is 0; where the
    time is always 1 the gain is -1 or 1: that arm's bound is the higher one."""
    menu = parse_menu("reuse/0,reuse/2", ["ngram"])
    bandit = learner(menu)
    bandit.times[..., 0] = 1000.0
    bandit.totals[:] = (20.0, 10.0)
    proportional = (50.0, 100.0, 50.0, 250.0, 62.5, 125.0)
    constant = (50.0, 100.0, 50.0, 250.0, 50.0, 100.0)
    for arms, wider in (((proportional, constant), 1), ((constant, proportional), 0)):
        bandit.sums[0] = arms
        assert bandit.choose(vector(menu), [True, True]) == wider


# -- what it exports --------------------------------------------------------------------------------------------


def fill(bandit: UCB, menu: Menu, pulls: np.ndarray, seed: int) -> None:
    """Known sums; every pull is a visit."""
    rng = np.random.default_rng(seed)
    for cell, arm in np.ndindex(*pulls.shape):
        for _ in range(int(pulls[cell, arm])):
            tokens, time = 1.0 + rng.integers(0, menu[arm].k + 1), 1.0 + rng.random() * 0.3 * menu[arm].k
            bandit.sums[cell, arm] += (1.0, tokens, time, tokens**2, time**2, tokens * time)
            bandit.visits[cell] += 1
            bandit.totals += (tokens, time)


def leaning_means(bandit: UCB, pulls: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean tokens and times `[cells, actions]`, a seldom seen cell's drawn towards the mean over all cells."""

    def means(sums: np.ndarray) -> np.ndarray:
        pooled = sums.sum(axis=0) / np.maximum(pulls.sum(axis=0), 1)
        own = np.where(pulls > 0, sums / np.maximum(pulls, 1), pooled)
        seen = pulls.max(axis=1, keepdims=True)
        return (seen * own + PRIOR_PULLS * pooled) / (seen + PRIOR_PULLS)  # type: ignore[no-any-return]

    return means(bandit.sums[..., 1]), means(bandit.sums[..., 2])


def best_rate(bandit: UCB, tokens: np.ndarray, time: np.ndarray) -> float:
    """By trying every choice of one arm a cell."""
    cells = np.arange(len(tokens))
    choices = [list(choice) for choice in product(range(tokens.shape[1]), repeat=len(tokens))]
    return max(float(bandit.visits @ tokens[cells, c] / (bandit.visits @ time[cells, c])) for c in choices)


def test_the_head_is_the_greedy_choice_leaning_on_all_cells_where_a_cell_is_seldom_seen() -> None:
    menu = parse_menu("reuse/0,reuse/2,reuse/4,reuse/8", ["ngram"])
    bandit = learner(menu, (0.25, 0.5, 0.75))
    pulls = np.array([[200, 150, 90, 60], [3, 0, 40, 1], [0, 0, 0, 0], [5, 5, 5, 5]])
    fill(bandit, menu, pulls, seed=5)
    tokens, time = leaning_means(bandit, pulls)
    expected = tokens - best_rate(bandit, tokens, time) * time
    head = bandit.head()
    np.testing.assert_allclose(head.values, expected, rtol=1e-5, atol=1e-6)
    for cell, level in enumerate((0.1, 0.3, 0.6, 0.9)):
        for mask in product([False, True], repeat=4):
            if any(mask):
                allowed = np.where(mask, expected[cell], -np.inf)
                assert head.decide(vector(menu, acceptance_short=level), mask) == allowed.argmax()


def test_the_head_s_rate_is_its_own_and_not_the_training_s() -> None:
    """A training that explored much was slow. At its rate of 1 token a plain step the longest drafts pay in the poor
    cell too; at the rate that the table itself reaches, the time is better spent elsewhere."""
    menu = parse_menu("reuse/0,reuse/4,reuse/8", ["ngram"])
    bandit = learner(menu)
    # cell, arm -> mean tokens and time of 1000 pulls
    figures = {(0, 0): (1.0, 1.0), (0, 1): (1.8, 1.6), (0, 2): (2.2, 1.9)}
    figures |= {(1, 0): (1.0, 1.0), (1, 1): (4.0, 1.6), (1, 2): (7.0, 2.0)}
    for (cell, arm), (tokens, time) in figures.items():
        bandit.sums[cell, arm] = 1000.0 * np.array([1.0, tokens, time, tokens**2, time**2, tokens * time])
    bandit.totals[:] = (1000.0, 1000.0)
    at_first = {cell: max(range(3), key=lambda a, c=cell: figures[c, a][0] - figures[c, a][1]) for cell in (0, 1)}  # type: ignore[misc]
    assert at_first == {0: 2, 1: 2}
    poor, rich = vector(menu, acceptance_short=0.1), vector(menu, acceptance_short=0.9)
    for visits, choice in (((100.0, 900.0), 0), ((999.0, 1.0), 2)):
        bandit.visits[:] = visits
        head = bandit.head()
        assert head.decide(rich, [True] * 3) == 2
        assert head.decide(poor, [True] * 3) == choice


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6))
def test_the_table_reaches_the_best_rate_of_all(seed: int) -> None:
    menu = parse_menu("reuse/0,reuse/2,reuse/4,reuse/8", ["ngram"])
    bandit = learner(menu, (0.25, 0.5, 0.75))
    rng = np.random.default_rng(seed)
    pulls = rng.integers(1, 30, (4, 4))
    fill(bandit, menu, pulls, seed)
    bandit.visits[:] = rng.integers(1, 1000, 4)
    tokens, time = leaning_means(bandit, pulls)
    chosen = bandit.head().values.argmax(axis=1)
    cells = np.arange(4)
    reached = bandit.visits @ tokens[cells, chosen] / (bandit.visits @ time[cells, chosen])
    assert reached == pytest.approx(best_rate(bandit, tokens, time), rel=1e-5)


def test_an_arm_that_was_never_tried_is_never_exported_as_a_choice() -> None:
    menu = parse_menu("reuse/0,reuse/2,reuse/4,reuse/8", ["ngram"])
    bandit = learner(menu)
    pulls = np.array([[20, 0, 9, 0], [0, 0, 0, 0]])
    fill(bandit, menu, pulls, seed=6)
    bandit.sums[0, 0, 2] += 500.0  # plain decoding has looked terrible; it is still better known than the unknown
    head = bandit.head()
    for level, mask in product((0.1, 0.9), product([False, True], repeat=4)):
        if mask[0] or mask[2]:
            assert head.decide(vector(menu, acceptance_short=level), mask) in (0, 2)


def test_a_learner_that_saw_nothing_still_exports_a_finite_table() -> None:
    head = learner(default_menu(["ngram"])).head()
    assert np.isfinite(head.values).all()
    assert head.values.shape == (2, 8)


# -- what it keeps ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps_before", [0, 3, 40])
def test_a_restored_learner_goes_on_as_if_nothing_had_happened(steps_before: int) -> None:
    """Also while arms are still untried, whose order is drawn at random; the state passes through a file."""
    menu = default_menu(DRAFTERS)

    def go_on(bandit: UCB, steps: int, seed: int) -> list[int]:
        rng = np.random.default_rng(seed)
        chosen = []
        for _ in range(steps):
            state = vector(menu, acceptance_short=float(rng.random()))
            action = bandit.choose(state, [True] * len(menu))
            k = menu[action].k
            accepted = int(rng.integers(0, k + 1))
            bandit.update(state, action, k, accepted, accepted + 1, 1.0 + 0.2 * k * float(rng.random()))
            chosen.append(action)
        return chosen

    original = learner(menu, seed=7)
    go_on(original, steps_before, seed=8)
    stored = save(original.state())
    copy = learner(menu, seed=99)
    copy.restore(load(stored))
    assert go_on(original, 60, seed=9) == go_on(copy, 60, seed=9)
    assert save(original.state()) == save(copy.state())
    np.testing.assert_array_equal(copy.visits, original.visits)
    np.testing.assert_array_equal(copy.head().values, original.head().values)


def test_a_state_of_another_shape_is_refused_and_changes_nothing() -> None:
    menu = default_menu(["ngram"])
    bandit = learner(menu)
    bandit.update(vector(menu), 3, 2, 1, 2, 1.0)
    before = save(bandit.state())
    for name in bandit.state():
        state = load(before)
        with pytest.raises(KeyError):
            bandit.restore({other: array for other, array in state.items() if other != name})
        for wrong in (state[name][:1] if state[name].shape[0] > 1 else state[name][:0], np.zeros(()), np.zeros((3, 3))):
            with pytest.raises(ValueError, match=name):
                bandit.restore({other: a * 0 for other, a in state.items()} | {name: wrong})
    assert save(bandit.state()) == before


def test_default_cells_tell_first_steps_matches_and_acceptance_apart() -> None:
    menu = default_menu(DRAFTERS)
    schema = ObservationSchema(menu)
    cells = default_cells(menu, schema)
    assert UCB(menu, schema).cells == cells
    states = [
        {},
        {"prefill_pending": 1.0},
        *({"ngram.match_length": length} for length in (1.0, 2.0, 3.0, 5.0, 9.0)),
        *({"acceptance_short": rate} for rate in (0.2, 0.5, 0.8)),
    ]
    indices = [cells.index(vector(menu, **state)) for state in states]
    assert len(set(indices)) == len(states)
    assert all(0 <= index < cells.count for index in indices)
    assert not any(name.startswith("model:") for name, _ in cells.features)
