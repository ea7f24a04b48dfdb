"""A contextual bandit whose arms' tokens and time are linear in the observation.

LinUCB with one model an arm (Li, Chu, Langford, Schapire 2010, "A contextual-bandit approach to personalized news
article recommendation"): ridge regression, and a bound that is wide where the arm saw few observations of the kind.
The aim is the ratio of tokens to time, so an arm's gain is `tokens - rate * time` (Dinkelbach 1967); tokens and time
are regressed apart, so that the rate may move. Steps teach arms that were not pulled too: see
`agents.side_observations`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agents.bandit import Bandit
from engine.menu import Menu
from engine.observation import ObservationSchema
from engine.policy_heads import LinearHead

WIDTH = 2.0  # of the confidence bound, tokens: what a draft brings deviates about as much
RIDGE = 1.0
RATE_MEMORY = 0.998  # what a step leaves of the older ones in the rate: about 500 steps count, so that exploring fades
NEVER = 1e6  # an arm that nobody tried is exported as worse than any other by this much


class LinUCB(Bandit):
    """One pair of linear models, tokens and time, for each arm.

    Attributes:
        inverse: float64 `[actions, inputs, inputs]`: inverse of the ridge plus the sum of squares of the inputs seen;
            the inputs are the scaled observation and a constant.
        moments: float64 `[actions, inputs, 2]`: sums of inputs times tokens and times plain steps.
        pulls: float64 `[actions]`: outcomes seen.
        totals: tokens and plain steps of what was pulled lately; their ratio is the rate.
    """

    name = "linucb"
    kept = ("inverse", "moments", "pulls", "totals", "times")

    def __init__(self, menu: Menu, schema: ObservationSchema, seed: int = 0) -> None:
        super().__init__(menu, schema, seed)
        self._scale = 1.0 / np.sqrt(schema.high.astype(np.float64))
        inputs = len(schema) + 1
        self.inverse = np.tile(np.eye(inputs) / RIDGE, (len(menu), 1, 1))
        self.moments = np.zeros((len(menu), inputs, 2))
        self.pulls = np.zeros(len(menu))

    def choose(self, vector: np.ndarray, mask: Sequence[bool]) -> int:
        """The arm with the highest bound; equal ones, as at the very beginning, are drawn from at random."""
        inputs = self._inputs(vector)
        wide = np.sqrt(np.maximum(np.einsum("i,aij,j->a", inputs, self.inverse, inputs), 0.0))
        bound = self._weights() @ inputs + WIDTH * wide + 1e-9 * self._rng.random(len(self.menu))
        return int(np.where(mask, bound, -np.inf).argmax())

    def update(
        self, vector: np.ndarray, action: int, drafted: int, accepted: int, tokens: int, plain_steps: float
    ) -> None:
        inputs = self._inputs(vector)
        plain_steps -= self._first.prefill(vector)
        self.totals *= RATE_MEMORY
        self.totals += (tokens, plain_steps)
        self._learn(inputs, action, tokens, plain_steps)
        if self._first.pending(vector):
            return
        self._step_times.add(action, drafted, plain_steps)
        for arm, would_commit, time, _ in self._revealed(action, drafted, accepted, tokens):
            self._learn(inputs, arm, would_commit, time)

    def head(self) -> LinearHead:
        """The gain of each arm at the rate reached lately."""
        weights = self._weights()
        bias = np.where(self.pulls > 0, weights[:, -1], -NEVER)
        center = np.zeros(len(self._scale), dtype=np.float32)
        scale = self._scale.astype(np.float32)
        return LinearHead(center, scale, weights[:, :-1].T.astype(np.float32), bias.astype(np.float32))

    def _inputs(self, vector: np.ndarray) -> np.ndarray:
        return np.append(vector * self._scale, 1.0)

    def _weights(self) -> np.ndarray:
        """`[actions, inputs]`: of each arm's gain."""
        tokens, time = np.moveaxis(self.inverse @ self.moments, -1, 0)
        return np.asarray(tokens - self.rate * time)

    def _learn(self, inputs: np.ndarray, arm: int, tokens: float, time: float) -> None:
        """One more outcome of an arm: a change of rank one (Sherman and Morrison 1950)."""
        along = self.inverse[arm] @ inputs
        self.inverse[arm] -= np.outer(along, along) / (1.0 + inputs @ along)
        self.moments[arm] += np.outer(inputs, (tokens, time))
        self.pulls[arm] += 1.0
