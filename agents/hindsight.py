"""What the simple rules reach at best: one draft length for all, one for each request, and one confidence threshold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from agents.rules import Rule, fixed_rules, threshold_rules
from engine.costs import CostTable
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


def _try(rules: tuple[Rule, ...], traces: TraceSet, costs: CostTable, menu: Menu) -> Tried:
    return Tried(rules, np.array([rule.replay(traces, costs, menu) for rule in rules]))
