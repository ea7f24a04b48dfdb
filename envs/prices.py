"""Cost tables laid out as arrays: the time of many steps at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.costs import CostTable
from engine.errors import TraceError

MOST_LAYOUTS = 4096  # kept for tables that come again
_Knots = tuple[np.ndarray, np.ndarray, np.ndarray]
_Layout = tuple[_Knots, _Knots, np.ndarray, np.ndarray]
_SCALARS = ("overhead", "commit", "observe", "setup", "setup_token", "restore", "deviation")


class Prices:
    """A cost table in each of `size` slots, all for the same drafters and drafts of at most `longest` tokens.

    Times are those of `CostTable.step_seconds` and `CostTable.first_seconds`, up to rounding. Drafters are numbered
    from 1 in the order given; 0 is nobody. Arguments and results of methods are arrays `[B]`, or broadcast to one.
    """

    def __init__(self, size: int, drafters: Sequence[str], longest: int) -> None:
        self._drafters, self._longest = tuple(drafters), longest
        self._verify = _Lines(size, longest + 1)
        self._reading = _Lines(size, 1)
        self._draft = np.zeros((size, 3, 1 + len(self._drafters)))  # call, token, read
        self._scalars = np.zeros((size, len(_SCALARS)))
        self._layouts: dict[int, tuple[CostTable, _Layout]] = {}  # by identity: laying out takes longer than a step

    def put(self, slot: int, costs: CostTable) -> None:
        """Price what happens in `slot` by `costs`. Raises `TraceError` where these lack a draft length or drafter."""
        known = self._layouts.get(id(costs))
        if known is None:
            if len(self._layouts) >= MOST_LAYOUTS:
                self._layouts.clear()
            known = self._layouts[id(costs)] = (costs, self._lay_out(costs))
        verify, reading, draft, scalars = known[1]
        self._verify.put(slot, *verify)
        self._reading.put(slot, *reading)
        self._draft[slot], self._scalars[slot] = draft, scalars

    def _lay_out(self, costs: CostTable) -> _Layout:
        longest = [f"draft length {self._longest}"] if self._longest > max(costs.verify) else []
        if lacking := [*longest, *(f"drafter {name!r}" for name in self._drafters if name not in costs.draft)]:
            raise TraceError(
                f"the costs lack {', '.join(lacking)}, which the menu uses; calibrate an engine of this menu"
            )
        knots, options = [0, *costs.contexts], range(self._longest + 1)
        verify = np.array([[costs.rows_seconds(k, context) for context in knots] for k in options])
        beyond = [costs.rows_seconds(k, knots[-1] + 1) for k in options] - verify[:, -1]
        token = [costs.draft[name] for name in self._drafters]
        lengths = [0, *(costs.reading or (1,))]
        read = np.array([[costs.reading_seconds(length) for length in lengths]])
        slope = costs.reading_seconds(lengths[-1] + 1) - read[:, -1]
        call, reading = ([times.get(n, 0.0) for n in self._drafters] for times in (costs.draft_call, costs.draft_read))
        draft = np.pad(np.array([call, token, reading]).reshape(3, -1), ((0, 0), (1, 0)))
        scalars = np.array([getattr(costs, name) for name in _SCALARS])
        return (np.array(knots), verify, beyond), (np.array(lengths), read, slope), draft, scalars

    def step(
        self,
        slots: np.ndarray,
        context: np.ndarray,
        committed: np.ndarray,
        drafter: np.ndarray,
        drafted: np.ndarray,
        read: np.ndarray | int = 0,
        doubted: np.ndarray | int = 0,
        observed: bool = True,
    ) -> np.ndarray:
        """Seconds of steps, as `CostTable.step_seconds`; `drafter` is 0 where nobody was asked.

        `doubted` tokens were drafted beyond the `drafted` ones, and not verified.
        """
        figures = self._scalars[slots]
        call, token, reading = (self._draft[slots, row, drafter] for row in range(3))
        overhead = figures[..., 0] + figures[..., 1] * (committed - 1) + (figures[..., 2] if observed else 0.0)
        draft = call + token * (drafted + doubted) + reading * read
        seconds: np.ndarray = draft + self._verify.at(slots, drafted, context) + overhead
        return seconds

    def first(self, slots: np.ndarray, prompt: np.ndarray, cached: np.ndarray) -> np.ndarray:
        """Seconds that first steps take beyond `step`, as `CostTable.first_seconds`."""
        figures = self._scalars[slots]
        reading = self._reading.at(slots, 0, prompt - 1) - self._reading.at(slots, 0, cached)
        setup = figures[..., 3] + figures[..., 4] * prompt + figures[..., 5] * cached
        seconds: np.ndarray = np.maximum(0.0, reading) + setup
        return seconds

    def plain(self, slots: np.ndarray, context: np.ndarray) -> np.ndarray:
        """Seconds of the calibrated plain step, as `CostTable.plain_seconds`: what rewards are counted in."""
        return self._verify.at(slots, 0, context)

    def noise(self, slots: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Factors of median 1, drawn with each table's spread: log-normal."""
        drawn: np.ndarray = np.exp(self._scalars[slots, -1] * rng.standard_normal(len(slots)))
        return drawn


class _Lines:
    """Piecewise linear functions: `[slots, lines]` of them, each slot with knots of its own."""

    def __init__(self, size: int, lines: int) -> None:
        self._knots = np.full((size, 1), np.inf)
        self._heights = np.zeros((size, lines, 1))
        self._slopes = np.zeros((size, lines, 1))

    def put(self, slot: int, knots: np.ndarray, heights: np.ndarray, beyond: np.ndarray) -> None:
        """Functions of heights `[lines, knots]` at knots that begin with 0, and of slope `beyond` `[lines]` after."""
        have, count = self._knots.shape[1], len(knots)
        if count > have:
            self._knots = np.pad(self._knots, ((0, 0), (0, count - have)), constant_values=np.inf)
            self._heights, self._slopes = (
                np.pad(array, ((0, 0), (0, 0), (0, count - have))) for array in (self._heights, self._slopes)
            )
        self._knots[slot] = np.inf
        self._knots[slot, :count] = knots
        self._heights[slot, :, :count] = heights
        self._slopes[slot, :, :count] = np.column_stack([np.diff(heights) / np.diff(knots), beyond])

    def at(self, slots: np.ndarray, line: np.ndarray | int, x: np.ndarray) -> np.ndarray:
        piece = (np.asarray(x)[..., None] >= self._knots[slots]).sum(axis=-1) - 1
        start, height, slope = self._knots[slots, piece], self._heights[slots, line, piece], self._slopes
        value: np.ndarray = height + slope[slots, line, piece] * (x - start)
        return value
