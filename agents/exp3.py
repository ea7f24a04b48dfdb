"""Exponential weights over draft lengths: a bandit that assumes nothing about how outcomes come about.

EXP3 (Auer, Cesa-Bianchi, Freund, Schapire 2002, "The nonstochastic multiarmed bandit problem") with what a draft
reveals of shorter ones: each arm's loss is weighted by the odds that it was seen, whoever was pulled (EXP3-SET of
Alon, Cesa-Bianchi, Gentile, Mannor, Mansour, Shamir 2017, "Nonstochastic multi-armed bandits with graph-structured
feedback"), and these odds are raised a little against outliers (EXP3-IX of Kocak, Neu, Valko, Munos 2014, "Efficient
learning by implicit exploration"). Raised odds make losses look smaller, so that what is seldom seen looks better and
is tried; gains would look smaller too. It looks at no observation: it is the reference that contexts must beat.

A step's gain is `tokens - rate * time` at the rate reached so far, since the aim is the ratio; in deviations, and
cut at `CUT` of them, since the method wants a known range: the loss is 0 at `CUT` above the usual gain and 1 at `CUT`
below. The step size is that of Neu 2015, "Explore no more", for as many arms and nothing revealed.

The papers' guarantees are not claimed. Rate, usual gain and deviation move while losses add up; and a draft reveals a
shorter one only where `KNOWN` steps told its time. Until then that counts as no loss, though the odds say that it was
seen: such an arm looks too good, and is pulled until its times are known.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agents.bandit import Bandit
from agents.side_observations import side_observations
from engine.menu import Menu
from engine.observation import ObservationSchema
from engine.policy_heads import ConstantHead

CUT = 3.0  # deviations


class EXP3(Bandit):
    """Draws among the menu's reusing entries, each with the odds that its estimated losses leave it.

    Attributes:
        losses: float64 `[actions]`: sums of estimated losses, each from 0 to 1 before weighting.
        moments: steps, and sums of their gains and of these squared.
    """

    name = "exp3"
    kept = ("losses", "totals", "moments", "times")

    def __init__(self, menu: Menu, schema: ObservationSchema, seed: int = 0) -> None:
        super().__init__(menu, schema, seed)
        self._arms = np.array([entry.reuse for entry in menu.actions])
        self._sees = _who_sees(menu)
        self.losses = np.zeros(len(menu))
        self.moments = np.zeros(3)

    @property
    def odds(self) -> np.ndarray:
        """`[actions]`: the probability of each arm to be drawn next."""
        scores = np.where(self._arms, -self._step_size * self.losses, -np.inf)
        weights = np.exp(scores - scores.max())
        return np.asarray(weights / weights.sum())

    def choose(self, vector: np.ndarray, mask: Sequence[bool]) -> int:
        """An arm drawn at random; the mask never excludes one, as only entries that reuse are arms."""
        drawn = int(np.searchsorted(self.odds.cumsum(), self._rng.random(), side="right"))
        return min(drawn, self._last)

    def update(
        self, vector: np.ndarray, action: int, drafted: int, accepted: int, tokens: int, plain_steps: float
    ) -> None:
        """Learn from a decoding step; first steps, which also prefill, are no fair comparison.

        Odds are those of now: where many requests are under way at once they have moved a little since the choice.
        """
        if self._first.pending(vector):
            return
        odds, step = self.odds, self._step_size
        revealed = self._revealed(action, drafted, accepted, tokens)
        seen = [(action, tokens, plain_steps), *((arm, count, time) for arm, count, time, _ in revealed)]
        center, deviation = self._moments_now()
        for arm, count, time in seen:
            gain = np.clip((count - self.rate * time - center) / (CUT * deviation), -1.0, 1.0)
            self.losses[arm] += (1.0 - gain) / 2.0 / (odds @ self._sees[:, arm] + step / 2.0)
        self._step_times.add(action, drafted, plain_steps)
        gain = tokens - self.rate * plain_steps
        self.totals += (tokens, plain_steps)
        self.moments += (1.0, gain, gain**2)

    def head(self) -> ConstantHead:
        """The arm that has lost least."""
        return ConstantHead(int(np.where(self._arms, self.losses, np.inf).argmin()))

    @property
    def _last(self) -> int:
        return int(np.flatnonzero(self._arms)[-1])

    @property
    def _step_size(self) -> float:
        """Falls with the root of the steps, so that no horizon need be known."""
        arms = max(2, int(self._arms.sum()))
        return float(np.sqrt(2.0 * np.log(arms) / (arms * (1.0 + self.moments[0]))))

    def _moments_now(self) -> tuple[float, float]:
        steps, total, squares = self.moments
        if steps < 2:
            return 0.0, 1.0
        mean = total / steps
        return float(mean), float(np.sqrt(max(squares / steps - mean**2, 1e-4)))


def _who_sees(menu: Menu) -> np.ndarray:
    """Bool `[actions, actions]`: whether pulling the one reveals what the other would have brought."""
    sees = np.eye(len(menu), dtype=bool)
    for action, entry in enumerate(menu.actions):
        sees[action, [arm for arm, _, _ in side_observations(menu, action, entry.k, entry.k, entry.k + 1)]] = True
    return sees
