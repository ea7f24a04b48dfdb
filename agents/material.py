"""What a run trains and validates on: recorded requests, a menu, and what its steps cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from agents.network import run_head
from engine.costs import CostTable
from engine.cuts import Cut
from engine.menu import Menu
from engine.observation import ObservationSchema
from engine.policy_heads import Head
from envs.trace import TraceSet
from envs.vector import rollout


@dataclass(frozen=True, eq=False)
class Material:
    """The data of all seeds of a run.

    Attributes:
        train, validation: traces; no request is in both.
        menu: the actions.
        costs: this machine's, calibrated: what validation reckons with.
        tables: what training reckons with: `costs` alone, or tables of many machines.
        min_confidence: drafts end before the first token that their drafter trusts less; policies carry it.
    """

    train: TraceSet
    validation: TraceSet
    menu: Menu
    costs: CostTable
    tables: Sequence[CostTable]
    min_confidence: Cut = 0.0

    @property
    def schema(self) -> ObservationSchema:
        return ObservationSchema(self.menu, self.costs)

    def replay(self, head: Head) -> np.ndarray:
        """Seconds `[R]` of each validation request under a decision function, at this machine's median costs."""
        return run_head(self.validation, self.costs, self.menu, head, self.min_confidence).seconds

    def plain_seconds(self) -> float:
        """Plain decoding's seconds for all validation requests."""
        menu = self.menu
        return float(rollout(self.validation, self.costs, menu, menu.plain, observed=False).seconds.sum())
