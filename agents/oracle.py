"""The clairvoyant optimum: the least time in which a request can be decoded by any controller.

Greedy decoding fixes the continuation, so that a step from position p leads to p + committed whatever came before. The
least time from p on is the least, over the actions, of the step's time and the least time from where it leads:
Bellman's recursion (1957, "Dynamic programming") on a line, solved backwards in one pass over the positions, for all
requests and actions at once. It knows the future; no controller can be expected to reach it, and none can beat it.

Drafters that lag are part of the state as the set of those that will draft at p or later: whoever is in it pays the
reading debts of the steps on the way, and leaves it with its last draft.
"""

from __future__ import annotations

import numpy as np

from agents.step_table import StepTable


def optimum(table: StepTable) -> np.ndarray:
    """The least seconds of each request, float64 `[R]`.

    Give a table without observing time for a limit that no controller can be below.
    """
    requests, positions, _ = table.tokens.shape
    sets = 1 << table.debt.shape[-1]
    left = np.full((requests, positions + 1, sets), np.inf)
    left[..., 0] = 0.0
    for position in reversed(range(positions)):
        running = position < table.length
        for users in range(sets):
            least = _least(table, left, position, users)
            left[:, position, users] = np.where(running, least, left[:, position, users])
    whole = left[:, 0] + np.stack([_due(table.first_debt, users) for users in range(sets)], axis=1)
    return np.asarray(whole.min(axis=1))


def _least(table: StepTable, left: np.ndarray, position: int, users: int) -> np.ndarray:
    """Least seconds `[R]` from a position on, where the drafters of the set `users` are to draft from here on."""
    rows = np.arange(len(left))[:, None]
    then = position + table.tokens[:, position]
    lags, seconds, debt = table.lags[:, position], table.seconds[:, position], table.debt[:, position]
    spent = seconds + _due(debt, users) + left[rows, then, users]
    for drafter in range(debt.shape[-1]):
        if users >> drafter & 1:  # this may be its last draft
            without = users & ~(1 << drafter)
            last = seconds + _due(debt, without) + left[rows, then, without]
            spent = np.where(lags == drafter, np.minimum(spent, last), spent)
    allowed = table.allowed[:, position] & ((lags < 0) | (users >> np.maximum(lags, 0) & 1 == 1))
    return np.asarray(np.where(allowed, spent, np.inf).min(axis=1))


def _due(debt: np.ndarray, users: int) -> np.ndarray:
    """The sum over the last axis of the debts of a set of drafters."""
    chosen = [drafter for drafter in range(debt.shape[-1]) if users >> drafter & 1]
    return np.asarray(debt[..., chosen].sum(axis=-1))
