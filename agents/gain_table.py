"""What bandits over a table share: each arm's tokens and time in cells of the observation, and the best table.

The aim is a ratio, tokens over time, and not a mean of per-step rewards. By Dinkelbach (1967, "On nonlinear fractional
programming") the arm that maximises a ratio is the one that maximises `tokens - rate * time` at the best rate, so each
step's gain is that, with the rate reached so far; the table that is exported iterates to the best rate. Steps teach
arms that were not pulled too: see `agents.side_observations`.
"""

from __future__ import annotations

import numpy as np

from agents.bandit import Bandit
from agents.side_observations import KNOWN
from engine.cells import Cells
from engine.menu import Menu
from engine.observation import ObservationSchema
from engine.policy_heads import TableHead

PRIOR_PULLS = 8.0  # how many pulls the mean over all cells counts for in one cell's estimates
FIRST_DEVIATION = 1.0  # tokens, until an arm has been pulled often enough to tell
MOST_ROUNDS = 20  # of Dinkelbach's iteration, which settles after a few
UNTRIED = 1e6  # the bound of an arm that was never pulled


class GainTable(Bandit):
    """Arms with side observations over `cells` of the observation; who inherits says how the next arm is chosen.

    Attributes:
        sums: float64 `[cells, actions, 6]`: pulls, tokens, plain steps, and the sums of tokens squared, plain steps
            squared and their product.
        visits: float64 `[cells]`: steps really taken in each cell, whatever was pulled.
    """

    kept = ("sums", "visits", "totals", "times")

    def __init__(self, menu: Menu, schema: ObservationSchema, cells: Cells | None = None, seed: int = 0) -> None:
        super().__init__(menu, schema, seed)
        self.cells = cells or default_cells(menu, schema)
        self.sums = np.zeros((self.cells.count, len(menu), 6))
        self.visits = np.zeros(self.cells.count)

    def update(
        self, vector: np.ndarray, action: int, drafted: int, accepted: int, tokens: int, plain_steps: float
    ) -> None:
        cell = self.cells.index(vector)
        plain_steps -= self._first.prefill(vector)
        self.visits[cell] += 1.0
        self.totals += (tokens, plain_steps)
        self._add(cell, action, tokens, plain_steps, plain_steps**2)
        if self._first.pending(vector):
            return
        self._step_times.add(action, drafted, plain_steps)
        for arm, would_commit, time, squared in self._revealed(action, drafted, accepted, tokens):
            self._add(cell, arm, would_commit, time, squared)

    def head(self) -> TableHead:
        """Mean gains at the rate of the table itself; an arm that nobody tried is never the best one."""
        tokens, time = self._means()
        never = self.sums[..., 0].sum(axis=0) == 0
        values = tokens - self._best_rate(tokens, time, never) * time
        values[:, never] = values.min() - 1.0
        return TableHead(self.cells, values.astype(np.float32))

    def _means(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean tokens and plain steps of each arm, `[cells, actions]`; a cell seldom seen leans on all cells' mean.

        The whole cell leans, not each arm: an arm that one cell has given up after a pull or two would be judged by
        the cells that went on pulling it because it is good there.
        """
        pulls, figures = self.sums[..., :1], self.sums[..., 1:3]
        pooled = figures.sum(axis=0) / np.maximum(pulls.sum(axis=0), 1.0)
        own = np.where(pulls > 0, figures / np.maximum(pulls, 1.0), pooled)
        seen = pulls.max(axis=1, keepdims=True)
        means = (seen * own + PRIOR_PULLS * pooled) / (seen + PRIOR_PULLS)
        return means[..., 0], means[..., 1]

    def _best_rate(self, tokens: np.ndarray, time: np.ndarray, never: np.ndarray) -> float:
        """Dinkelbach's iteration: take each cell's best arm at a rate, then the rate that these arms would reach.

        The rate of the training itself is lower, as exploring costs: judged by it, slow long drafts look too good.
        """
        rate, cells = self.rate, np.arange(len(tokens))
        for _ in range(MOST_ROUNDS):
            arms = np.where(never, -np.inf, tokens - rate * time).argmax(axis=1)
            spent = float(self.visits @ time[cells, arms])
            reached = float(self.visits @ tokens[cells, arms]) / spent if spent > 0 else rate
            if np.isclose(reached, rate, rtol=1e-9, atol=0.0):
                break
            rate = reached
        return rate

    def _gains(self, sums: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mean and deviation of `tokens - rate * time` for sums `[..., 6]`."""
        rate = self.rate
        pulls = np.maximum(sums[..., 0], 1.0)
        mean = (sums[..., 1] - rate * sums[..., 2]) / pulls
        square = (sums[..., 3] - 2.0 * rate * sums[..., 5] + rate**2 * sums[..., 4]) / pulls
        known = sums[..., 0] >= KNOWN
        deviation = np.where(known, np.sqrt(np.maximum(square - mean**2, 1e-4)), FIRST_DEVIATION)
        return mean, np.asarray(deviation)

    def _certain(self, cell: int) -> np.ndarray:
        """`[actions]`: pulls that an arm's bound may be narrowed by: no more than its own time was seen."""
        return np.asarray(np.maximum(np.minimum(self.sums[cell, :, 0], self._step_times.seen()), 1.0))

    def _add(self, cell: int, arm: int, tokens: float, time: float, time_squared: float) -> None:
        self.sums[cell, arm] += (1.0, tokens, time, tokens**2, time_squared, tokens * time)


def default_cells(menu: Menu, schema: ObservationSchema) -> Cells:
    """First step or not, how long each n-gram match is, how well drafts went lately."""
    features: list[tuple[str, tuple[float, ...]]] = [("prefill_pending", (0.5,))]
    for drafter in menu.drafters:
        if drafter.startswith("ngram"):
            features.append((f"{drafter}.match_length", (1.0, 2.0, 3.0, 5.0, 9.0)))
    features.append(("acceptance_short", (0.2, 0.5, 0.8)))
    return Cells(tuple(features), schema.names)
