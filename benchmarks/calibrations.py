"""Costs measured again and again during a live run: each request is reckoned with what held around it."""

from __future__ import annotations

from typing import Any

from engine.calibration import calibrate
from engine.costs import CostTable
from engine.session import Parts


class Calibrations:
    """Tables of one engine: one before every `every`-th request, and one at the end.

    Attributes:
        tables: in the order in which they were measured.
    """

    def __init__(self, parts: Parts, every: int) -> None:
        self._parts, self._every = parts, every
        self._places: list[int] = []  # of each request: the table that was measured before it
        self.tables: list[CostTable] = []

    def before_request(self) -> None:
        """Measure where a table is due."""
        if len(self._places) % self._every == 0:
            self.measure()
        self._places.append(len(self.tables) - 1)

    def measure(self) -> None:
        self.tables.append(calibrate(self._parts))

    @property
    def drift(self) -> float:
        """The longest plain step that was measured over the shortest."""
        steps = [table.plain_seconds(0) for table in self.tables]
        return max(steps) / min(steps)

    def around(self) -> list[CostTable]:
        """For each request the mean of the tables before and after it."""
        means = [average(*pair) for pair in zip(self.tables, self.tables[1:])]
        return [means[place] for place in self._places]


def average(first: CostTable, second: CostTable) -> CostTable:
    """The means of all figures of two tables of one engine."""
    return CostTable.from_json(_mean(first.to_json(), second.to_json()))


def _mean(first: Any, second: Any) -> Any:
    if isinstance(first, dict):
        return {name: _mean(value, second[name]) for name, value in first.items() if name in second}
    if isinstance(first, list | tuple):
        return [_mean(*pair) for pair in zip(first, second)]
    return first if isinstance(first, str) else (first + second) / 2
