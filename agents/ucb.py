"""Upper confidence bounds on the gain of each arm, in cells of the observation.

Bounds are UCB1-Normal's form (Auer, Cesa-Bianchi, Fischer 2002, "Finite-time analysis of the multiarmed bandit
problem"): mean + width * deviation * sqrt(2 log n / pulls). What a gain is, and what a step teaches:
`agents.gain_table`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agents.gain_table import UNTRIED, GainTable

WIDTH = 0.5  # of the confidence bound; UCB1 itself has 1, meant for gains that can be anything in their range


class UCB(GainTable):
    """Takes the arm that may be the best one as far as anybody knows."""

    name = "ucb"

    def choose(self, vector: np.ndarray, mask: Sequence[bool]) -> int:
        """The arm with the highest bound in the observation's cell; arms never tried come first, in random order."""
        cell = self.cells.index(vector)
        pulls = self.sums[cell, :, 0]
        mean, deviation = self._gains(self.sums[cell])
        bonus = WIDTH * deviation * np.sqrt(2.0 * np.log(max(2.0, pulls.sum())) / self._certain(cell))
        bound = np.where(pulls > 0, mean + bonus, UNTRIED + self._rng.random(len(pulls)))
        return int(np.where(mask, bound, -np.inf).argmax())
