"""The simple rules that a learned policy has to beat: one action throughout, tuned on the training requests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from agents.evaluation import PLAIN
from agents.hindsight import tuned_cut
from agents.material import Material
from agents.some_costs import best_fixed
from engine.controllers import fixed_name
from engine.policy_heads import ConstantHead
from envs.trace import TraceSet
from envs.vector import rollout


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

    def replay(self, traces: TraceSet, material: Material) -> np.ndarray:
        """Seconds `[R]` of each request at this machine's median costs."""
        cut = self.min_confidence
        return rollout(traces, material.costs, material.menu, self.action, observed=False, min_confidence=cut).seconds


def simple_rules(material: Material) -> tuple[Rule, Rule, Rule]:
    """Plain decoding; the fixed choice that serves the training requests best, which may be the same; the menu's
    longest draft under the cut that was tuned on these requests."""
    menu = material.menu
    cut = tuned_cut(material.train, [material.costs], menu)
    fixed, _ = best_fixed(material.train, menu, [material.costs])
    longest = menu.find(max(menu.lengths, default=0))
    return Rule(PLAIN, menu.plain), Rule(fixed_name(menu, fixed), fixed), Rule(f"threshold:{cut:g}", longest, cut)
