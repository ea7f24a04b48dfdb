"""What the simple rules reach at best: one draft length for all, one for each request, and one confidence threshold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from agents.evaluation import PLAIN
from agents.rules import Rule, fixed_rule, fixed_rules, threshold_rules
from agents.some_costs import best_fixed
from engine.costs import CostTable
from engine.cuts import Cut
from engine.menu import Menu
from envs.trace import TraceSet


@dataclass(frozen=True, eq=False)
class Tried:
    """Every rule on every request.

    Attributes:
        rules: what was tried.
        seconds: float64 `[rules, R]`.
    """

    rules: tuple[Rule, ...]
    seconds: np.ndarray

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(rule.name for rule in self.rules)

    @property
    def best(self) -> int:
        """The place of the rule of the least time over all requests; of equal ones the first."""
        return int(self.seconds.sum(axis=1).argmin())

    @property
    def best_of_each(self) -> np.ndarray:
        """Seconds `[R]` if every request had the rule that suits it best: no rule, but a limit for choosing by the
        request alone."""
        return np.asarray(self.seconds.min(axis=0))


def try_fixed(traces: TraceSet, costs: CostTable, menu: Menu) -> Tried:
    """Every reusing entry of the menu, taken throughout; the plain step is among them."""
    return _try(fixed_rules(menu), traces, costs, menu)


def try_thresholds(traces: TraceSet, costs: CostTable, menu: Menu, drafters: Sequence[str] = ()) -> Tried:
    """The longest draft of each of these drafters, by default of all, cut where confidence falls below each limit."""
    rules = [rule for drafter in drafters or menu.drafters for rule in threshold_rules(menu, drafter)]
    return _try(tuple(rules), traces, costs, menu)


def tuned_cut(traces: TraceSet, costs: Sequence[CostTable], menu: Menu) -> Cut:
    """The threshold under which the longest draft takes the least time: one for each drafter where there are several.

    0 where nothing is ever drafted, and for several tables: what is too little confidence hangs on what a row costs,
    so a policy for many machines has to choose lengths itself.
    """
    if not menu.drafters or len(costs) > 1:
        return 0.0
    tried = {drafter: try_thresholds(traces, costs[0], menu, [drafter]) for drafter in menu.drafters}
    cuts = {drafter: each.rules[each.best].min_confidence for drafter, each in tried.items()}
    return cuts if len(cuts) > 1 else next(iter(cuts.values()))


def simple_rules(train: TraceSet, costs: CostTable, menu: Menu) -> tuple[Rule, ...]:
    """Plain decoding; the fixed choice that serves these requests best, which may be the same; the drafter and
    threshold that do, where anything is drafted."""
    fixed, _ = best_fixed(train, menu, [costs])
    rules = Rule(PLAIN, menu.plain), fixed_rule(menu, fixed)
    if not menu.drafters:
        return rules
    tried = try_thresholds(train, costs, menu)
    return *rules, tried.rules[tried.best]


def _try(rules: tuple[Rule, ...], traces: TraceSet, costs: CostTable, menu: Menu) -> Tried:
    return Tried(rules, np.array([rule.replay(traces, costs, menu) for rule in rules]))
