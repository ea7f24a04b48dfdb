"""Exponential weights over draft lengths: a bandit that assumes nothing about how outcomes come about.

EXP3 (Auer, Cesa-Bianchi, Freund, Schapire 2002, "The nonstochastic multiarmed bandit problem") with what a draft
reveals of shorter ones: each arm's gain is weighted by the odds that it was seen, whoever was pulled (EXP3-SET of
Alon, Cesa-Bianchi, Gentile, Mannor, Mansour, Shamir 2017, "Nonstochastic multi-armed bandits with graph-structured
feedback"), and these odds are raised a little against outliers (EXP3-IX of Kocak, Neu, Valko, Munos 2014, "Efficient
learning by implicit exploration"). It looks at no observation: it is the reference that contexts must beat.

A step's gain is `tokens - rate * time` at the rate reached so far, since the aim is the ratio; in deviations, and
cut at `CUT` of them, since the method wants gains of a known range.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from agents.side_observations import FirstStep, StepTimes, restore_arrays, rng_words, side_observations
from engine.cells import Cells
from engine.menu import Menu
from engine.observation import ObservationSchema
from engine.policy_heads import TableHead

CUT = 3.0  # deviations
_ARRAYS = ("gains", "totals", "moments", "times")


class EXP3:
    """Draws among the menu's reusing entries, each with the odds that its estimated gains earn.

    Attributes:
        gains: float64 `[actions]`: sums of estimated gains, each at most 1 in size before weighting.
        totals: tokens and plain steps of all that was pulled; their ratio is the rate.
        moments: steps, and sums of their gains and of these squared.
        times: the sums of `StepTimes`.
    """

    name = "exp3"

    def __init__(self, menu: Menu, schema: ObservationSchema, seed: int = 0) -> None:
        self.menu = menu
        self._schema = schema
        self._arms = np.array([entry.reuse for entry in menu.actions])
        self._sees = _who_sees(menu)
        self.gains = np.zeros(len(menu))
        self.totals = np.zeros(2)
        self.moments = np.zeros(3)
        self._step_times = StepTimes(menu)
        self.times = self._step_times.sums
        self._first = FirstStep(schema)
        self._rng = np.random.default_rng(seed)

    @property
    def rate(self) -> float:
        """Tokens per plain step reached so far; 1 is plain decoding."""
        tokens, time = self.totals
        return float(tokens / time) if time > 0 else 1.0

    @property
    def odds(self) -> np.ndarray:
        """`[actions]`: the probability of each arm to be drawn next."""
        scores = np.where(self._arms, self._step_size * self.gains, -np.inf)
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
        seen = [(action, tokens, plain_steps)]
        for arm, would_commit, would_draft in side_observations(self.menu, action, drafted, accepted, tokens):
            known = self._step_times.mean(arm, would_draft)
            seen += [(arm, would_commit, known[0])] if known else []
        center, deviation = self._moments_now()
        for arm, count, time in seen:
            gain = np.clip((count - self.rate * time - center) / (CUT * deviation), -1.0, 1.0)
            self.gains[arm] += gain / (odds @ self._sees[:, arm] + step / 2.0)
        self._step_times.add(action, drafted, plain_steps)
        gain = tokens - self.rate * plain_steps
        self.totals += (tokens, plain_steps)
        self.moments += (1.0, gain, gain**2)

    def head(self) -> TableHead:
        """The arm that has earned most, whatever is observed."""
        values = np.where(self._arms, self.gains, self.gains.min() - 1.0)
        return TableHead(Cells((), self._schema.names), values[None].astype(np.float32))

    def state(self) -> dict[str, np.ndarray]:
        return self._arrays() | {"rng": rng_words(self._rng)}

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """The inverse of `state`. Raises `KeyError` or `ValueError` for another form, and then changes nothing."""
        restore_arrays(self._arrays(), self._rng, state)

    def _arrays(self) -> dict[str, np.ndarray]:
        return {name: getattr(self, name) for name in _ARRAYS}

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
