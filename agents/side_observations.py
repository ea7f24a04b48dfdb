"""What one step tells of the arms that were not pulled.

A draft of 8 with 3 accepted says what 1, 2, 3, 4 and 6 would have brought. Of longer drafts it tells only where tokens
were rejected; learning from just those steps would make long drafts look bad. These side observations (Caron, Kveton,
Lelarge, Bhagat 2012, "Leveraging side observations in stochastic bandits") take their times from the mean of the steps
in which the same drafter proposed as many tokens. A mean over few steps is a rumour: below `KNOWN` of them nothing is
told, and an arm's bound is as wide as times of its own draft length are few.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from engine.menu import Menu
from engine.observation import ObservationSchema

KNOWN = 4  # observations that make a mean or a deviation


def side_observations(
    menu: Menu, action: int, drafted: int, accepted: int, tokens: int
) -> Iterator[tuple[int, int, int]]:
    """(arm, tokens, drafted tokens) of the other arms whose outcome a step reveals.

    The plain step, which always yields one token, and all shorter drafts of the same drafter. Where the request ended
    within the draft, no arm would have committed more.
    """
    pulled = menu[action]
    for arm, entry in enumerate(menu.actions):
        if arm == action or not entry.reuse:
            continue
        if entry.k == 0:
            yield arm, 1, 0
        elif entry.drafter == pulled.drafter and entry.k <= pulled.k:
            yield arm, min(entry.k + 1, accepted + 1, tokens), min(entry.k, drafted)


class StepTimes:
    """Times of decoding steps by who drafted how many tokens.

    Attributes:
        sums: float64 `[1 + drafters, longest draft + 1, 3]`: steps seen in which nobody (row 0) or a drafter of the
            menu drafted as many tokens, their plain steps, and the sum of these squared.
    """

    def __init__(self, menu: Menu) -> None:
        rows = {name: row for row, name in enumerate(("", *menu.drafters))}
        self._rows = [rows[entry.drafter] for entry in menu.actions]
        self._lengths = [entry.k for entry in menu.actions]
        self.sums = np.zeros((len(rows), max(menu.lengths, default=0) + 1, 3))

    def add(self, arm: int, drafted: int, plain_steps: float) -> None:
        self.sums[self._rows[arm], drafted] += (1.0, plain_steps, plain_steps**2)

    def mean(self, arm: int, drafted: int) -> tuple[float, float] | None:
        """Mean plain steps and mean square of steps in which the arm's drafter drafted as many; None: hardly known."""
        seen, total, squares = self.sums[self._rows[arm], drafted]
        return (total / seen, squares / seen) if seen >= KNOWN else None

    def seen(self) -> np.ndarray:
        """`[actions]`: steps whose time tells what a full draft of each arm takes."""
        return np.asarray(self.sums[self._rows, self._lengths, 0])


class FirstStep:
    """Tells a request's first step, whose prefill every arm would pay, from decoding."""

    def __init__(self, schema: ObservationSchema) -> None:
        self._places = [schema.index(name) for name in ("prompt_left", "prefill_cost", "prefill_pending")]

    def prefill(self, vector: np.ndarray) -> float:
        """Plain steps that reading the uncached prompt takes anyway: they would drown the arms' difference."""
        prompt_left, cost, _ = self._places
        return float((2.0 ** vector[prompt_left] - 1.0) * vector[cost])

    def pending(self, vector: np.ndarray) -> bool:
        return bool(vector[self._places[2]])
