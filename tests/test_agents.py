"""Thompson, EXP3 and the linear bandit on synthetic arms, and the cost model: what they find and what they keep.

UCB and the table that it shares with Thompson are held in `test_ucb.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from safetensors.numpy import load, save
from test_ucb import World, costs, nested, vector

from agents import EXP3, UCB, Learner, LinUCB, Thompson
from engine.cells import Cells
from engine.controller_names import make_controller
from engine.controllers import CostModelController
from engine.cost_model import FIRST_ACCEPTANCE, Acceptance, CostModel, expected_tokens
from engine.costs import CostTable
from engine.errors import ControllerError
from engine.menu import Menu, default_menu, parse_menu
from engine.observation import ObservationSchema
from engine.results import StepRecord

MENU = parse_menu("reuse/0,reuse/1,reuse/2,reuse/4,reuse/8", ["ngram"])
DRAFTERS = ("ngram", "model:b")


def thompson(menu: Menu, seed: int = 0) -> Thompson:
    schema = ObservationSchema(menu, costs(menu))
    return Thompson(menu, schema, Cells((("acceptance_short", (1 / 3, 2 / 3)),), schema.names), seed)


def exp3(menu: Menu, seed: int = 0) -> EXP3:
    return EXP3(menu, ObservationSchema(menu, costs(menu)), seed)


def linear(menu: Menu, seed: int = 0) -> LinUCB:
    return LinUCB(menu, ObservationSchema(menu, costs(menu)), seed)


MAKERS: dict[str, Callable[[Menu, int], Learner]] = {"thompson": thompson, "exp3": exp3, "linucb": linear}
makers = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())


def cheap(k: int) -> float:
    return 1.0 + 0.15 * k


# Plain decoding, a draft of 2 and a draft of 8 are the best of all choices in these cells.
HOPELESS = nested(MENU, [0.95, 0.05], cheap)
FAIR = nested(MENU, [0.2, 0.1, 0.6, 0.1], cheap)
SURE = nested(MENU, [0.05, *[0.0] * 7, 0.95], cheap)


# -- which arms they find ---------------------------------------------------------------------------------------


def test_thompson_finds_the_draft_length_of_each_cell() -> None:
    """Of 60 seeds none missed; the rate over the second half varies with the world's own luck."""
    world = World(MENU, [0.4, 0.3, 0.3], [HOPELESS, FAIR, SURE])
    assert world.best() == (0, 2, 4)
    choice, late = world.teach(thompson(MENU), steps=3000, seed=1)  # type: ignore[arg-type]
    assert choice == world.best()
    assert late > 0.9 * world.rate(world.best())


def test_thompson_is_not_ucb() -> None:
    """Where one arm is known well and another hardly, UCB always tries the other and Thompson only sometimes."""
    menu = parse_menu("reuse/0,reuse/4", ["ngram"])
    schema = ObservationSchema(menu, costs(menu))
    cells = Cells((), schema.names)
    both = UCB(menu, schema, cells), Thompson(menu, schema, cells)
    for bandit in both:
        bandit.sums[0] = [(900.0, 900.0, 900.0, 900.0, 900.0, 900.0), (9.0, 8.4, 9.0, 12.0, 9.0, 8.4)]
        bandit.totals[:] = (900.0, 900.0)
        bandit.times[0, 0, 0], bandit.times[1, 4, 0] = 900.0, 9.0
    ucb, thompson = ([bandit.choose(vector(menu), [True, True]) for _ in range(400)] for bandit in both)
    assert set(ucb) == {1}
    # mean -0.067, deviation 2.1 over sqrt(9) with the prior: it wins a draw with odds of 0.46; the share errs by 0.025
    assert 0.36 < np.mean(thompson) < 0.56


@pytest.mark.parametrize(("world", "best"), [(HOPELESS, 0), (FAIR, 2), (SURE, 4)])
def test_exp3_finds_the_best_length(world: list[list[tuple[float, tuple[int, int, float]]]], best: int) -> None:
    """Of 40 seeds each none missed."""
    single = World(MENU, [1.0], [world])
    assert single.best() == (best,)
    bandit = exp3(MENU)
    choice, late = single.teach(bandit, steps=3000, seed=2)  # type: ignore[arg-type]
    assert choice == (best,)
    assert late > 0.9 * single.rate((best,))
    assert bandit.odds.argmax() == best
    assert bandit.odds[best] > 0.5


def test_exp3_weighs_an_arm_by_the_odds_that_it_was_seen() -> None:
    """A draft of 8 reveals 2, as does 2 itself; nothing shorter reveals it."""
    bandit = exp3(MENU)
    for k, drafted in ((1, 1), (2, 2), (3, 4), (4, 8), (0, 0)):
        for _ in range(4):
            bandit.update(vector(MENU), k, drafted, 0, 1, 1.0)
    before, odds, step = bandit.losses.copy(), bandit.odds, bandit._step_size
    center, deviation = bandit._moments_now()
    rate = bandit.rate
    bandit.update(vector(MENU), 3, 4, 3, 4, 1.6)
    seen = {0: (1, 1.0, 1.0), 1: (2, 1.0, odds[1:].sum()), 2: (3, 1.0, odds[2:].sum()), 3: (4, 1.6, odds[3:].sum())}
    for arm, (tokens, time, chance) in seen.items():
        gain = np.clip((tokens - rate * time - center) / (3.0 * deviation), -1.0, 1.0)
        expected = (1.0 - gain) / 2.0 / (chance + step / 2)
        assert bandit.losses[arm] - before[arm] == pytest.approx(expected, rel=1e-9)
    assert bandit.losses[4] == before[4]


def test_exp3_takes_no_fresh_entry_and_learns_nothing_from_first_steps() -> None:
    menu = default_menu(DRAFTERS)
    bandit = exp3(menu)
    chosen = [bandit.choose(vector(menu), [True] * len(menu)) for _ in range(600)]
    assert set(chosen) == set(range(1, len(menu)))
    before = bandit.odds
    bandit.update(vector(menu, prefill_pending=1.0, prompt_left=8.0), 3, 2, 2, 3, 40.0)
    np.testing.assert_array_equal(bandit.odds, before)
    head = bandit.head()
    assert head.decide(vector(menu), [True] * len(menu)) != 0


def test_the_linear_bandit_finds_the_length_that_an_observation_calls_for() -> None:
    """Tokens of a draft of 8 grow with the match length, its time does not. Of 40 seeds none missed."""
    menu = parse_menu("reuse/0,reuse/8", ["ngram"])
    bandit, rng = linear(menu), np.random.default_rng(3)
    for _ in range(1500):
        match = int(rng.integers(0, 9))
        state = vector(menu, **{"ngram.match_length": match})
        action = bandit.choose(state, [True, True])
        accepted = int(rng.binomial(8, match / 8)) if action else 0
        time = (2.5 if action else 1.0) * rng.uniform(0.9, 1.1)
        bandit.update(state, action, 8 * action, accepted, accepted + 1, time)
    # At the best rate r the draft pays from the match on where match > (2.5 - 1) r: between 3 and 4.
    head = bandit.head()
    choices = [head.decide(vector(menu, **{"ngram.match_length": m}), [True, True]) for m in range(9)]
    assert choices[:3] == [0, 0, 0]
    assert choices[5:] == [1, 1, 1, 1]
    assert choices == sorted(choices)


def test_the_linear_bandit_solves_the_ridge_regression() -> None:
    menu = default_menu(DRAFTERS)
    bandit, rng = linear(menu), np.random.default_rng(4)
    schema = ObservationSchema(menu, costs(menu))
    inputs, outcomes = [], []
    for _ in range(40):
        state = (rng.random(len(schema)) * schema.high).astype(np.float32)
        state[schema.index("prefill_pending")] = 0.0
        state[schema.index("prompt_left")] = 0.0
        tokens, time = int(rng.integers(1, 4)), float(rng.uniform(0.5, 2))
        bandit.update(state, 4, 3, tokens - 1, tokens, time)
        inputs.append(np.append(state / np.sqrt(schema.high), 1.0))
        outcomes.append((tokens, time))
    x, y = np.array(inputs), np.array(outcomes)
    solved = np.linalg.solve(np.eye(x.shape[1]) + x.T @ x, x.T @ y)
    np.testing.assert_allclose(bandit.inverse[4] @ bandit.moments[4], solved, rtol=1e-4, atol=1e-6)
    head = bandit.head()
    scores = head.scores(x[:, :-1] * np.sqrt(schema.high))
    np.testing.assert_allclose(scores[:, 4], x @ (solved[:, 0] - bandit.rate * solved[:, 1]), rtol=1e-4, atol=1e-4)
    assert (scores[:, [0, -1]] < -1e5).all(), "arms that nobody tried are no choice"


# -- what they keep ---------------------------------------------------------------------------------------------


def go_on(bandit: Learner, menu: Menu, steps: int, seed: int) -> list[int]:
    rng = np.random.default_rng(seed)
    chosen = []
    for _ in range(steps):
        state = vector(menu, acceptance_short=float(rng.random()), prefill_pending=float(rng.random() < 0.1))
        action = bandit.choose(state, [True] * len(menu))
        k = menu[action].k
        accepted = int(rng.integers(0, k + 1))
        bandit.update(state, action, k, accepted, accepted + 1, 1.0 + 0.2 * k * float(rng.random()))
        chosen.append(action)
    return chosen


@makers
@pytest.mark.parametrize("steps_before", [0, 3, 60])
def test_a_restored_bandit_goes_on_as_if_nothing_had_happened(
    make: Callable[[Menu, int], Learner], steps_before: int
) -> None:
    menu = default_menu(DRAFTERS)
    original, copy = make(menu, 7), make(menu, 99)
    go_on(original, menu, steps_before, seed=8)
    copy.restore(load(save(original.state())))
    assert go_on(original, menu, 80, seed=9) == go_on(copy, menu, 80, seed=9)
    assert save(original.state()) == save(copy.state())
    for name, tensor in original.head().tensors().items():
        np.testing.assert_array_equal(tensor, copy.head().tensors()[name])


@makers
def test_a_seed_decides_all_and_another_one_differs(make: Callable[[Menu, int], Learner]) -> None:
    menu = default_menu(DRAFTERS)
    runs = [go_on(make(menu, seed), menu, 60, seed=5) for seed in (1, 1, 2)]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


@makers
def test_a_state_of_another_shape_is_refused_and_changes_nothing(make: Callable[[Menu, int], Learner]) -> None:
    menu = default_menu(["ngram"])
    bandit = make(menu, 0)
    go_on(bandit, menu, 30, seed=1)
    before = save(bandit.state())
    for name in bandit.state():
        state = load(before)
        with pytest.raises(KeyError):
            bandit.restore({other: array for other, array in state.items() if other != name})
        with pytest.raises(ValueError, match=name):
            bandit.restore({other: a * 0 for other, a in state.items()} | {name: np.zeros((3, 3, 3))})
    assert save(bandit.state()) == before


@makers
def test_a_bandit_that_saw_nothing_exports_a_finite_head(make: Callable[[Menu, int], Learner]) -> None:
    menu = default_menu(["ngram"])
    head = make(menu, 0).head()
    assert all(np.isfinite(tensor).all() for tensor in head.tensors().values())
    assert 0 <= head.decide(vector(menu), menu.mask(can_reuse=False)) < len(menu)


@makers
def test_a_mask_is_obeyed(make: Callable[[Menu, int], Learner]) -> None:
    menu = default_menu(["ngram"])
    bandit = make(menu, 0)
    mask = menu.mask(can_reuse=False)
    assert all(mask[bandit.choose(vector(menu), mask)] for _ in range(50))


# -- the cost model ---------------------------------------------------------------------------------------------


def record(drafter: str, drafted: int, accepted: int) -> StepRecord:
    tokens = tuple(range(accepted + 1))
    return StepRecord(0, drafted, drafter, drafted, accepted, tokens, (), 0, 0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.85, 1.0])
@pytest.mark.parametrize("k", [0, 1, 4, 8])
def test_expected_tokens_are_the_mean_of_the_cut_geometric_run(acceptance: float, k: int) -> None:
    by_hand = sum(acceptance**i for i in range(k + 1))
    assert expected_tokens(acceptance, k) == pytest.approx(by_hand, rel=1e-12)


def machine(flat: float, draft: float, menu: Menu = MENU) -> CostTable:
    """A pass over k + 1 rows takes 1 + flat * k plain steps, a drafted token `draft` of them."""
    verify = {k: (0.02 * (1.0 + flat * k), 0.04 * (1.0 + flat * k)) for k in (0, *menu.lengths)}
    return CostTable((64, 512), verify, 0.0, dict.fromkeys(menu.drafters, 0.03 * draft), 0.001, "synthetic")


@pytest.mark.parametrize(("flat", "draft"), [(0.0, 0.0), (0.02, 0.001), (0.15, 0.01), (0.3, 0.2), (1.0, 0.0)])
@pytest.mark.parametrize("acceptance", [0.05, 0.4, 0.7, 0.95])
def test_takes_the_length_of_the_best_ratio(flat: float, draft: float, acceptance: float) -> None:
    model = CostModel(MENU, machine(flat, draft))
    for _ in range(2000):  # evidence of exactly this acceptance, beyond what the first hope weighs
        model.acceptance["ngram"]._accepted += acceptance
        model.acceptance["ngram"]._rejected += 1.0 - acceptance
    ratios = [sum(acceptance**i for i in range(a.k + 1)) / (1.0 + flat * a.k + draft * a.k) for a in MENU.actions]
    assert model.best() == int(np.argmax(ratios))


def test_acceptance_is_the_likelihood_s_estimate_and_begins_hopeful() -> None:
    estimate = Acceptance()
    assert estimate.rate == FIRST_ACCEPTANCE
    for _ in range(400):
        estimate.learn(8, 2)  # two accepted, one rejected, the others unknown
    assert estimate.rate == pytest.approx(2 / 3, abs=1e-3)
    for _ in range(10_000):
        estimate.learn(2, 2)
    assert estimate.rate > 0.94


def test_gives_a_useless_drafter_up_and_tries_it_again() -> None:
    controller = make_controller("cost-model", MENU, lambda: machine(0.2, 0.05))
    mask = MENU.mask(can_reuse=False)
    drafted = []
    for _ in range(400):
        action = controller.choose(None, mask)
        k = MENU[action].k
        drafted.append(k)
        controller.observe(record("ngram" if k else "", k, 0))
    assert drafted[0] > 0
    assert drafted[2:6] == [0] * 4
    tries = sum(k > 0 for k in drafted[8:])
    assert 4 <= tries <= 60, "neither stuck at plain decoding nor drafting most of the time"
    for _ in range(60):  # the text turns predictable
        k = MENU[controller.choose(None, mask)].k
        controller.observe(record("ngram" if k else "", k, k))
    assert MENU[controller.choose(None, mask)].k == 8


def test_takes_the_better_of_two_drafters() -> None:
    menu = parse_menu("fresh/0,reuse/0,reuse/ngram/4,reuse/model:b/4", DRAFTERS)
    controller = CostModelController(menu, machine(0.1, 0.02, menu))
    for _ in range(12):
        drafter = menu[controller.choose(None, [True] * 4)].drafter
        controller.observe(record(drafter, 4, 4 if drafter == "model:b" else 0))
    assert menu[controller.choose(None, [True] * 4)].drafter == "model:b"


def test_the_name_needs_costs_and_asks_for_them_only_then() -> None:
    def never() -> CostTable:
        raise AssertionError("no other controller reckons with costs")

    for name in ("plain", "fixed:4", "heuristic", "threshold:0.5"):
        make_controller(name, MENU, never)
    with pytest.raises(ControllerError, match="needs calibrated costs"):
        make_controller("cost-model", MENU)
    with pytest.raises(ControllerError, match="takes no argument"):
        make_controller("cost-model:3", MENU, never)
    controller = make_controller("cost-model", MENU, lambda: machine(0.1, 0.0))
    assert (controller.name, controller.needs_observation, controller.min_confidence) == ("cost-model", False, 0.0)


def test_plain_decoding_is_all_that_a_menu_without_drafts_offers() -> None:
    menu = default_menu(())
    controller = make_controller("cost-model", menu, lambda: machine(0.1, 0.0, menu))
    assert controller.choose(None, menu.mask(can_reuse=True)) == menu.plain
