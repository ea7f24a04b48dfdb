"""Some of many cost tables, and what is reckoned under them: the best fixed action, and a head's mean speed-up."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agents.network import run_head
from engine.costs import CostTable
from engine.cuts import Cut
from engine.menu import Menu
from engine.policy_heads import Head
from envs.trace import TraceSet
from envs.vector import rollout

SOME = 4  # tables: enough to speak for machines of all kinds, and few enough to be tried often


def some_of(tables: Sequence[CostTable]) -> list[CostTable]:
    """Evenly spaced ones: all of fewer than `2 * SOME`, `SOME` of a multiple of it, and a few more otherwise."""
    return list(tables)[:: max(1, len(tables) // SOME)]


def best_fixed(
    traces: TraceSet, menu: Menu, tables: Sequence[CostTable], min_confidence: Cut = 0.0
) -> tuple[int, float]:
    """The best action to take throughout under these tables, and how many plain steps a token takes under it.

    Each table's times count in its own plain steps, so that slow and fast machines weigh alike.
    """
    runs = {
        action: [
            rollout(traces, table, menu, action, observed=False, min_confidence=min_confidence) for table in tables
        ]
        for action, entry in enumerate(menu.actions)
        if entry.reuse
    }
    steps = {action: sum(float(run.plain_steps.sum()) for run in rows) for action, rows in runs.items()}
    best = min(steps, key=steps.__getitem__)
    return best, steps[best] / sum(int(run.tokens.sum()) for run in runs[best])


class MeanSpeedup:
    """Plain decoding's time over that of a head's own choices, drafts cut at doubt, on average over some tables."""

    def __init__(self, traces: TraceSet, menu: Menu, tables: Sequence[CostTable], min_confidence: Cut = 0.0) -> None:
        self._traces, self._menu, self._tables, self._min_confidence = traces, menu, tables, min_confidence
        self._plain = [rollout(traces, table, menu, menu.plain, observed=False).seconds.sum() for table in tables]

    def __call__(self, head: Head) -> float:
        settings = self._menu, head, self._min_confidence
        chosen = [run_head(self._traces, table, *settings) for table in self._tables]
        return float(np.mean([plain / run.seconds.sum() for plain, run in zip(self._plain, chosen, strict=True)]))
