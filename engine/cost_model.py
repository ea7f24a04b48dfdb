"""The analytic rule for a draft length: what a draft is expected to bring against what it is known to cost.

Where each drafted token is accepted with probability a, whatever went before, a draft of k tokens commits
E(k) = (1 - a^(k+1)) / (1 - a) tokens on average (Leviathan, Kalman, Matias 2023, "Fast inference from transformers via
speculative decoding", equation 1). It takes v(k) + k c plain steps: the pass over k + 1 rows and the drafting, both
calibrated. The best k is the one of the highest ratio; drafting breaks even where that exceeds 1, a plain step's.
"""

from __future__ import annotations

from collections.abc import Mapping

from engine.costs import CostTable
from engine.menu import Action, Menu

FIRST_ACCEPTANCE = 0.7  # hopeful, so that every drafter is tried
PRIOR_TOKENS = 1.0  # how many tokens that hope counts for
MEMORY = 0.98  # what a step leaves of older evidence: about 50 steps count


def expected_tokens(acceptance: float, k: int) -> float:
    """E(k): tokens that a step commits on average, its bonus token included."""
    if acceptance >= 1.0:
        return k + 1.0
    return float((1.0 - acceptance ** (k + 1)) / (1.0 - acceptance))


class Acceptance:
    """A running estimate of the probability that a drafted token is accepted.

    The likelihood of a cut geometric run: each accepted token is a success and the first rejected one a failure; what
    stands behind that says nothing. Evidence fades with every step of the request, also with those in which the
    drafter did not draft, so that one that was given up returns to the first hope and is tried again.
    """

    def __init__(self) -> None:
        self._accepted = self._rejected = 0.0

    @property
    def rate(self) -> float:
        hoped = FIRST_ACCEPTANCE * PRIOR_TOKENS
        return (self._accepted + hoped) / (self._accepted + self._rejected + PRIOR_TOKENS)

    def fade(self) -> None:
        self._accepted *= MEMORY
        self._rejected *= MEMORY

    def learn(self, drafted: int, accepted: int) -> None:
        self._accepted += accepted
        self._rejected += accepted < drafted


class CostModel:
    """Break-even over a menu, from the costs of a machine and each drafter's running acceptance.

    Attributes:
        acceptance: drafter -> its estimate.
    """

    def __init__(self, menu: Menu, costs: CostTable) -> None:
        self.acceptance: Mapping[str, Acceptance] = {drafter: Acceptance() for drafter in menu.drafters}
        self._times = {index: _plain_steps(action, costs) for index, action in enumerate(menu.actions) if action.reuse}
        self._menu = menu

    def best(self) -> int:
        """The reusing action of the highest expected tokens over time; of equal ones the first in the menu."""
        return max(self._times, key=self._rate)

    def learn(self, drafter: str, drafted: int, accepted: int) -> None:
        """Learn how a step turned out; `drafter` is empty where it was plain."""
        for estimate in self.acceptance.values():
            estimate.fade()
        if drafter in self.acceptance:
            self.acceptance[drafter].learn(drafted, accepted)

    def _rate(self, index: int) -> float:
        action = self._menu[index]
        tokens = expected_tokens(self.acceptance[action.drafter].rate, action.k) if action.k else 1.0
        return tokens / self._times[index]


def _plain_steps(action: Action, costs: CostTable) -> float:
    """v(k) + k c."""
    return costs.verify_ratio(action.k) + (action.k * costs.draft_ratio(action.drafter) if action.k else 0.0)
