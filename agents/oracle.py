"""The clairvoyant optimum: the least time in which a request can be decoded by any controller.

Greedy decoding fixes the continuation, so that a step from position p leads to p + committed whatever came before. The
least time from p on is the least, over the actions, of the step's time and the least time from where it leads:
Bellman's recursion (1957, "Dynamic programming") on a line, solved backwards in one pass over the positions, for all
requests and actions at once. It knows the future; no controller can be expected to reach it, and none can beat it.

Drafters that lag are part of the state as the set of those that will draft at p or later: whoever is in it pays the
reading debts of the steps on the way, and leaves it with its last draft.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from agents.step_table import StepTable


@dataclass(frozen=True, eq=False)
class Optimum:
    """The best run of each request.

    Attributes:
        seconds: float64 `[R]`, the least time of each request.
        actions: for each request the (position, action) of every step; of equal actions the first in the menu.
    """

    seconds: np.ndarray
    actions: tuple[tuple[tuple[int, int], ...], ...]


def optimum(table: StepTable) -> Optimum:
    """Solve the recursion; give a table without observing time for a limit that no controller can be below."""
    requests, positions, _ = table.tokens.shape
    sets = 1 << table.debt.shape[-1]
    left = np.full((requests, positions + 1, sets), np.inf)
    left[..., 0] = 0.0
    choice = np.zeros((2, requests, positions, sets), dtype=np.int64)  # action, and the set after it
    for position in reversed(range(positions)):
        running = position < table.length
        for before in range(sets):
            spent, after = _options(table, left, position, before)
            best = spent.argmin(axis=1)
            rows = np.arange(requests)
            choice[:, :, position, before] = best, after[rows, best]
            left[:, position, before] = np.where(running, spent[rows, best], left[:, position, before])
    whole = left[:, 0] + np.stack([_due(table.first_debt, users) for users in range(sets)], axis=1)
    users = whole.argmin(axis=1)
    paths = tuple(_path(table, choice[:, request], request, int(users[request])) for request in range(requests))
    return Optimum(whole.min(axis=1), paths)


def _options(table: StepTable, left: np.ndarray, position: int, before: int) -> tuple[np.ndarray, np.ndarray]:
    """Seconds from a position on `[R, A]` for each action, where the drafters of `before` are to draft from here on;
    and the set `[R, A]` that is left of them after each action."""
    rows = np.arange(len(left))[:, None]
    then = position + table.tokens[:, position]
    lags, seconds, debt = table.lags[:, position], table.seconds[:, position], table.debt[:, position]
    allowed = table.allowed[:, position] & ((lags < 0) | (before >> np.maximum(lags, 0) & 1 == 1))
    spent = np.where(allowed, seconds + _due(debt, before) + left[rows, then, before], np.inf)
    after = np.full(spent.shape, before)
    for drafter in range(debt.shape[-1]):
        if before >> drafter & 1:  # this may be its last draft
            without = before & ~(1 << drafter)
            last = seconds + _due(debt, without) + left[rows, then, without]
            better = allowed & (lags == drafter) & (last < spent)
            spent, after = np.where(better, last, spent), np.where(better, without, after)
    return spent, after


def _due(debt: np.ndarray, users: int) -> np.ndarray:
    """The sum over the last axis of the debts of a set of drafters."""
    chosen = [drafter for drafter in range(debt.shape[-1]) if users >> drafter & 1]
    return np.asarray(debt[..., chosen].sum(axis=-1))


def _path(table: StepTable, choice: np.ndarray, request: int, users: int) -> tuple[tuple[int, int], ...]:
    steps, position = [], 0
    while position < table.length[request]:
        action, after = (int(number) for number in choice[:, position, users])
        steps.append((position, action))
        position, users = position + int(table.tokens[request, position, action]), after
    return tuple(steps)
