"""The simple rules that a learned policy has to beat: one entry of the menu throughout, cut at doubt or not."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.controllers import fixed_name, threshold_name
from engine.costs import CostTable
from engine.cuts import Cut
from engine.menu import Menu
from engine.policy_heads import ConstantHead
from envs.trace import TraceSet
from envs.vector import rollout

THRESHOLDS = tuple(round(0.05 * step, 2) for step in range(20))


@dataclass(frozen=True)
class Rule:
    """An action that is taken throughout, without a look at anything.

    Attributes:
        name: as `make_controller` reads it.
        action: index of a reusing entry of the menu.
        min_confidence: drafts end before the first token that their drafter trusts less.
    """

    name: str
    action: int
    min_confidence: float = 0.0

    def head(self) -> ConstantHead:
        return ConstantHead(self.action)

    def cut(self, menu: Menu) -> Cut:
        """What a policy carries that stands for this rule: a cut of its drafter alone where the menu has several."""
        drafter = menu[self.action].drafter
        return {drafter: self.min_confidence} if drafter and len(menu.drafters) > 1 else self.min_confidence

    def replay(self, traces: TraceSet, costs: CostTable, menu: Menu) -> np.ndarray:
        """Seconds `[R]` of each request at these median costs."""
        cut = self.min_confidence
        return rollout(traces, costs, menu, self.action, observed=False, min_confidence=cut).seconds


def fixed_rules(menu: Menu) -> tuple[Rule, ...]:
    """Every reusing entry; the plain step is among them."""
    return tuple(Rule(fixed_name(menu, a), a) for a, entry in enumerate(menu.actions) if entry.reuse)


def threshold_rules(menu: Menu, drafter: str) -> tuple[Rule, ...]:
    """A drafter's longest draft, cut where confidence falls below each of `THRESHOLDS`."""
    longest = menu.longest(drafter)
    return tuple(Rule(threshold_name(menu, longest, each), longest, each) for each in THRESHOLDS)
