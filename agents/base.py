"""What training needs of a learner."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from engine.costs import CostTable
from engine.cuts import Cut
from engine.menu import Menu
from engine.policy_heads import Head
from envs.trace import TraceSet

# Told the steps or rounds done, the speed-up over plain decoding on the validation requests, and the best head so far.
OnRound = Callable[[int, float, Head], object]


class Learner(Protocol):
    """Learns a controller from steps of an environment."""

    name: str

    def choose(self, vector: np.ndarray, mask: Sequence[bool]) -> int:
        """The action to try next for an observation `[features]`."""
        ...

    def update(
        self, vector: np.ndarray, action: int, drafted: int, accepted: int, tokens: int, plain_steps: float
    ) -> None:
        """Learn from a step: tokens drafted, accepted and committed, and its time in plain steps.

        `tokens` is `accepted + 1`, or `accepted` where the request ended within the draft.
        """
        ...

    def head(self) -> Head:
        """The decision function learned so far, for export."""
        ...

    def state(self) -> dict[str, np.ndarray]:
        """All that `restore` needs to go on learning as if nothing had happened."""
        ...

    def restore(self, state: Mapping[str, np.ndarray]) -> None: ...


class BatchLearner(Protocol):
    """Learns a controller from recorded requests, all of them at once."""

    @property
    def name(self) -> str: ...

    def fit(
        self,
        train: TraceSet,
        validation: TraceSet,
        menu: Menu,
        costs: Sequence[CostTable],
        seed: int = 0,
        on_round: OnRound = ...,
        min_confidence: Cut = 0.0,
    ) -> Head:
        """The decision function that serves the training requests best under all of these costs; a seed decides all.

        The validation requests choose among candidates; no other figure is taken from them. Drafts end before the first
        token that their drafter trusts less than `min_confidence`.
        """
        ...
