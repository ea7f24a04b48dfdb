"""Thompson sampling on the gain of each arm, in cells of the observation.

Each arm's mean gain is believed to be normal around the mean seen so far; a draw from each belief, and the arm of
the highest draw is pulled (Thompson 1933, "On the likelihood that one unknown probability exceeds another"; for
normal gains Agrawal and Goyal 2017, "Near-optimal regret bounds for Thompson sampling"). The belief's deviation
mixes what was seen with a prior one, since some alike outcomes in a row are no proof that an arm never does better.
What a gain is, and what a step teaches: `agents.gain_table`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agents.gain_table import UNTRIED, GainTable

PRIOR_DEVIATION = 3.0  # tokens, of one step's gain
PRIOR_STEPS = 8.0  # what that counts for


class Thompson(GainTable):
    """Pulls each arm as often as it is believed to be the best one."""

    name = "thompson"

    def choose(self, vector: np.ndarray, mask: Sequence[bool]) -> int:
        """The arm of the highest draw in the observation's cell; arms never tried come first, in random order."""
        cell = self.cells.index(vector)
        pulls = self.sums[cell, :, 0]
        mean, deviation = self._gains(self.sums[cell])
        steps = self._certain(cell)
        variance = (steps * deviation**2 + PRIOR_STEPS * PRIOR_DEVIATION**2) / (steps + PRIOR_STEPS)
        drawn = mean + np.sqrt(variance / steps) * self._rng.standard_normal(len(pulls))
        bound = np.where(pulls > 0, drawn, UNTRIED + self._rng.random(len(pulls)))
        return int(np.where(mask, bound, -np.inf).argmax())
