"""Made-up machines: every draw is a table that the engine would accept, over the stated ranges, and none held out."""

from __future__ import annotations

import numpy as np
import pytest

from agents.randomise import (
    CHEAPEST_DRAFT,
    CHEAPEST_PREFILL,
    DEAREST_DRAFT,
    DEAREST_PREFILL,
    HELD_OUT,
    MARGIN,
    held_out_costs,
    random_costs,
)
from engine.costs import CostTable
from engine.menu import default_menu
from engine.observation import ObservationSchema

MENU = default_menu(("ngram", "model:b"))
TABLES = [random_costs(np.random.default_rng(seed), MENU) for seed in range(400)]


def ratios(costs: CostTable) -> np.ndarray:
    return np.array([costs.verify_ratio(k) for k in range(9)])


def test_every_draw_covers_the_menu_and_passes_through_json() -> None:
    for costs in TABLES:
        assert costs.covers(MENU.lengths, MENU.drafters)
        assert CostTable.from_json(costs.to_json()) == costs
        assert (np.diff(ratios(costs)) >= -1e-12).all(), "more rows never take less time"
        assert ratios(costs)[0] == 1.0


def test_draws_fill_the_ranges_and_stay_within() -> None:
    for figures, low, high in (
        ([t.draft_ratio("ngram") for t in TABLES], CHEAPEST_DRAFT, DEAREST_DRAFT),
        ([t.draft_ratio("model:b") for t in TABLES], CHEAPEST_DRAFT, DEAREST_DRAFT),
        ([t.prefill_ratio for t in TABLES], CHEAPEST_PREFILL, DEAREST_PREFILL),
    ):
        assert low * 0.999 <= min(figures) < 1.3 * low
        assert 0.8 * high < max(figures) <= high * 1.001
    eight = [ratios(t)[8] for t in TABLES]
    assert min(eight) < 1.1
    assert max(eight) > 5.0


def test_draws_are_flat_linear_in_steps_and_with_one_price() -> None:
    rows = np.array([np.diff(ratios(t)) for t in TABLES])
    even = np.isclose(rows, rows[:, :1], rtol=1e-6).all(axis=1)
    leaving = np.isclose(rows[:, 1:], rows[:, 1:2], rtol=1e-6).all(axis=1) & (rows[:, 0] > rows[:, 1] + 0.04)
    flat = even & (rows[:, 0] < 0.04)
    # A quarter of the draws each; 400 draws leave a share of a quarter outside 0.15 to 0.35 once in 300,000 seeds.
    for share in (flat.mean(), (even & ~flat).mean(), leaving.mean(), (~even & ~leaving).mean()):
        assert 0.15 < share < 0.35


def test_a_seed_decides_the_draw() -> None:
    assert random_costs(np.random.default_rng(3), MENU) == TABLES[3]
    assert len({t.prefill for t in TABLES}) == len(TABLES)


@pytest.mark.parametrize("name", HELD_OUT)
def test_no_draw_is_near_a_held_out_vector(name: str) -> None:
    held_out = held_out_costs(name, MENU)
    assert held_out.machine == name
    assert held_out.draft_ratio("ngram") < held_out.draft_ratio("model:b")
    assert min(np.abs(ratios(t) - ratios(held_out)).mean() for t in TABLES) >= MARGIN - 1e-9


def test_the_observation_shows_the_costs() -> None:
    schema = ObservationSchema(MENU, TABLES[0])
    shown = schema.cost_vector()[-schema.num_costs :]
    expected = [*(TABLES[0].verify_ratio(k) for k in MENU.lengths), *(TABLES[0].draft_ratio(d) for d in MENU.drafters)]
    np.testing.assert_allclose(shown, [*expected, TABLES[0].prefill_ratio], rtol=1e-6)


def test_a_menu_without_drafts_has_a_table_too() -> None:
    costs = random_costs(np.random.default_rng(0), default_menu(()))
    assert list(costs.verify) == [0]
