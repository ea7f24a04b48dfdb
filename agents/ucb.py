"""A bandit over the menu: upper confidence bounds on tokens per second, in cells of the observation.

The aim is a ratio, tokens over time, and not a mean of per-step rewards. By Dinkelbach (1967, "On nonlinear fractional
programming") the arm that maximises a ratio is the one that maximises `tokens - rate * time` at the best rate, so each
step's gain is that, with the rate reached so far; the table that is exported iterates to the best rate. Bounds are
UCB1-Normal's form (Auer, Cesa-Bianchi, Fischer 2002, "Finite-time analysis of the multiarmed bandit problem"):
mean + width * deviation * sqrt(2 log n / pulls).

A step tells more than its own arm: a draft of 8 with 3 accepted says what 1, 2, 3, 4 and 6 would have brought. Of
longer drafts it tells only where tokens were rejected; learning from just those steps would make long drafts look bad.
These side observations (Caron, Kveton, Lelarge, Bhagat 2012, "Leveraging side observations in stochastic bandits") take
their times from the mean of the steps in which the same drafter proposed as many tokens. A mean over few steps is a
rumour: below `KNOWN` of them nothing is told, and an arm's bound is as wide as times of its own draft length are few.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from engine.cells import Cells
from engine.menu import Menu
from engine.observation import ObservationSchema
from engine.policy_heads import TableHead

WIDTH = 0.5  # of the confidence bound; UCB1 itself has 1, meant for gains that can be anything in their range
PRIOR_PULLS = 8.0  # how many pulls the mean over all cells counts for in one cell's estimates
FIRST_DEVIATION = 1.0  # tokens, until an arm has been pulled often enough to tell
KNOWN = 4  # observations that make a deviation
MOST_ROUNDS = 20  # of Dinkelbach's iteration, which settles after a few
_ARRAYS = ("sums", "visits", "totals", "times")
_WORD = (1 << 64) - 1


class UCB:
    """UCB with side observations over `cells` of the observation.

    Attributes:
        sums: float64 `[cells, actions, 6]`: pulls, tokens, plain steps, and the sums of tokens squared, plain steps
            squared and their product.
        visits: float64 `[cells]`: steps really taken in each cell, whatever was pulled.
        totals: tokens and plain steps of all that was really pulled; their ratio is the rate.
        times: float64 `[1 + drafters, longest draft + 1, 3]`: steps seen in which nobody (row 0) or a drafter of the
            menu drafted as many tokens, their plain steps, and the sum of these squared.
    """

    name = "ucb"

    def __init__(self, menu: Menu, schema: ObservationSchema, cells: Cells | None = None, seed: int = 0) -> None:
        self.menu = menu
        self.cells = cells or default_cells(menu, schema)
        self._schema = schema
        self._rng = np.random.default_rng(seed)
        self.sums = np.zeros((self.cells.count, len(menu), 6))
        self.visits = np.zeros(self.cells.count)
        self.totals = np.zeros(2)
        self._rows = {name: row for row, name in enumerate(("", *menu.drafters))}
        self.times = np.zeros((len(self._rows), max(menu.lengths, default=0) + 1, 3))

    @property
    def rate(self) -> float:
        """Tokens per plain step reached so far; 1 is plain decoding."""
        tokens, time = self.totals
        return float(tokens / time) if time > 0 else 1.0

    def choose(self, vector: np.ndarray, mask: Sequence[bool]) -> int:
        """The arm with the highest bound in the observation's cell; arms never tried come first, in random order."""
        cell = self.cells.index(vector)
        pulls = self.sums[cell, :, 0]
        mean, deviation = self._gains(self.sums[cell])
        certain = np.maximum(np.minimum(pulls, self._times_seen()), 1.0)
        bonus = WIDTH * deviation * np.sqrt(2.0 * np.log(max(2.0, pulls.sum())) / certain)
        bound = np.where(pulls > 0, mean + bonus, 1e6 + self._rng.random(len(pulls)))
        return int(np.where(mask, bound, -np.inf).argmax())

    def update(
        self, vector: np.ndarray, action: int, drafted: int, accepted: int, tokens: int, plain_steps: float
    ) -> None:
        cell = self.cells.index(vector)
        plain_steps -= self._prefill(vector)
        self.visits[cell] += 1.0
        self.totals += (tokens, plain_steps)
        self._add(cell, action, tokens, plain_steps, plain_steps**2)
        if not self._decoding(vector):
            return
        self.times[self._row(action), drafted] += (1.0, plain_steps, plain_steps**2)
        for arm, would_commit, would_draft in self._side_observations(action, drafted, accepted, tokens):
            seen, total, squares = self.times[self._row(arm), would_draft]
            if seen >= KNOWN:
                self._add(cell, arm, would_commit, total / seen, squares / seen)

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

    def state(self) -> dict[str, np.ndarray]:
        arrays = {name: getattr(self, name) for name in _ARRAYS}
        return arrays | {"rng": _rng_words(self._rng)}

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """The inverse of `state`. Raises `KeyError` or `ValueError` for another form, and then changes nothing."""
        ours = self.state()
        for name, array in ours.items():
            if state[name].shape != array.shape:
                raise ValueError(f"{name} has shape {state[name].shape}, here {array.shape}")
        for name in _ARRAYS:
            ours[name][...] = state[name]
        _set_rng_words(self._rng, state["rng"])

    def _gains(self, sums: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mean and deviation of `tokens - rate * time` for sums `[..., 6]`."""
        rate = self.rate
        pulls = np.maximum(sums[..., 0], 1.0)
        mean = (sums[..., 1] - rate * sums[..., 2]) / pulls
        square = (sums[..., 3] - 2.0 * rate * sums[..., 5] + rate**2 * sums[..., 4]) / pulls
        known = sums[..., 0] >= KNOWN
        deviation = np.where(known, np.sqrt(np.maximum(square - mean**2, 1e-4)), FIRST_DEVIATION)
        return mean, deviation

    def _add(self, cell: int, arm: int, tokens: float, time: float, time_squared: float) -> None:
        self.sums[cell, arm] += (1.0, tokens, time, tokens**2, time_squared, tokens * time)

    def _times_seen(self) -> np.ndarray:
        """`[actions]`: steps whose time tells what a full draft of each arm takes."""
        return np.array([self.times[self._row(arm), entry.k, 0] for arm, entry in enumerate(self.menu.actions)])

    def _side_observations(
        self, action: int, drafted: int, accepted: int, tokens: int
    ) -> Iterator[tuple[int, int, int]]:
        """(arm, tokens, drafted tokens) of the other arms whose outcome this step reveals.

        The plain step, which always yields one token, and all shorter drafts of the same drafter. Where the request
        ended within the draft, no arm would have committed more.
        """
        pulled = self.menu[action]
        for arm, entry in enumerate(self.menu.actions):
            if arm == action or not entry.reuse:
                continue
            if entry.k == 0:
                yield arm, 1, 0
            elif entry.drafter == pulled.drafter and entry.k <= pulled.k:
                yield arm, min(entry.k + 1, accepted + 1, tokens), min(entry.k, drafted)

    def _row(self, action: int) -> int:
        return self._rows[self.menu[action].drafter]

    def _prefill(self, vector: np.ndarray) -> float:
        """Plain steps that reading the uncached prompt takes anyway: they would drown the arms' difference."""
        uncached = 2.0 ** vector[self._schema.index("prompt_left")] - 1.0
        return float(uncached * vector[self._schema.index("prefill_cost")])

    def _decoding(self, vector: np.ndarray) -> bool:
        return not vector[self._schema.index("prefill_pending")]


def default_cells(menu: Menu, schema: ObservationSchema) -> Cells:
    """First step or not, how long each n-gram match is, how well drafts went lately."""
    features: list[tuple[str, tuple[float, ...]]] = [("prefill_pending", (0.5,))]
    for drafter in menu.drafters:
        if drafter.startswith("ngram"):
            features.append((f"{drafter}.match_length", (1.0, 2.0, 3.0, 5.0, 9.0)))
    features.append(("acceptance_short", (0.2, 0.5, 0.8)))
    return Cells(tuple(features), schema.names)


def _rng_words(rng: np.random.Generator) -> np.ndarray:
    """The state of a PCG64 generator, uint64 `[4]`: two numbers of 128 bits, low word first."""
    numbers = rng.bit_generator.state["state"]
    return np.array([numbers[name] >> shift & _WORD for name in ("state", "inc") for shift in (0, 64)], dtype=np.uint64)


def _set_rng_words(rng: np.random.Generator, words: np.ndarray) -> None:
    low, high, inc_low, inc_high = (int(word) for word in words)
    numbers = {"state": high << 64 | low, "inc": inc_high << 64 | inc_low}
    rng.bit_generator.state = {**rng.bit_generator.state, "state": numbers}
