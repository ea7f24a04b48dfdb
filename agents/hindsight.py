"""What the simple rules reach at best: one draft length for all, one for each request, and one confidence threshold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.controllers import fixed_name
from engine.costs import CostTable
from engine.menu import Menu
from envs.trace import TraceSet
from envs.vector import rollout

THRESHOLDS = (
    0.0,
    0.05,
    0.1,
    0.15,
    0.2,
    0.25,
    0.3,
    0.35,
    0.4,
    0.45,
    0.5,
    0.55,
    0.6,
    0.65,
    0.7,
    0.75,
    0.8,
    0.85,
    0.9,
    0.95,
)


@dataclass(frozen=True, eq=False)
class Tried:
    """Every candidate on every request.

    Attributes:
        names: one a candidate, as `make_controller` reads it where it can.
        seconds: float64 `[candidates, R]`.
    """

    names: tuple[str, ...]
    seconds: np.ndarray

    @property
    def best(self) -> int:
        """The candidate of the least time over all requests; of equal ones the first."""
        return int(self.seconds.sum(axis=1).argmin())

    @property
    def best_of_each(self) -> np.ndarray:
        """Seconds `[R]` if every request had the candidate that suits it best: no rule, but a limit for choosing by
        the request alone."""
        return np.asarray(self.seconds.min(axis=0))


def try_fixed(traces: TraceSet, costs: CostTable, menu: Menu) -> Tried:
    """Every reusing entry of the menu, taken throughout; the plain step is among them."""
    actions = [action for action, entry in enumerate(menu.actions) if entry.reuse]
    seconds = [rollout(traces, costs, menu, action, observed=False).seconds for action in actions]
    return Tried(tuple(fixed_name(menu, action) for action in actions), np.array(seconds))


def try_thresholds(
    traces: TraceSet,
    costs: CostTable,
    menu: Menu,
    thresholds: Sequence[float] = THRESHOLDS,
    drafter: str | None = None,
) -> Tried:
    """The longest draft of a drafter, else of the menu, cut where confidence falls below each of these."""
    entries = [entry for entry in menu.actions if drafter in (None, entry.drafter)]
    longest = menu.find(max((entry.k for entry in entries), default=0), drafter)
    rows = [rollout(traces, costs, menu, longest, observed=False, min_confidence=each).seconds for each in thresholds]
    return Tried(tuple(f"threshold:{each:g}" for each in thresholds), np.array(rows))


def tuned_cut(traces: TraceSet, costs: Sequence[CostTable], menu: Menu) -> float:
    """The threshold under which the longest draft of the fastest drafter takes the least time.

    0 where nothing is ever drafted, and for several tables: what is too little confidence hangs on what a row costs,
    so a policy for many machines has to choose lengths itself.
    """
    if not menu.lengths or len(costs) > 1:
        return 0.0
    tried = [try_thresholds(traces, costs[0], menu, drafter=drafter) for drafter in menu.drafters]
    fastest = min(tried, key=lambda one: float(one.seconds[one.best].sum()))
    return THRESHOLDS[fastest.best]
