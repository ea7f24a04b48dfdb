"""The exact improvement of a stochastic policy on recorded requests: no sampling, no estimate of values.

A `StepTable` tells what each action would bring at each position, so the expected time of a policy from every position
on, and how often it comes by, follow from two passes of dynamic programming. The policy gradient theorem (Sutton,
McAllester, Singh, Mansour 1999, "Policy gradient methods for reinforcement learning with function approximation") then
holds with the true values: d time / d logit(p, a) = visits(p) * pi(a | p) * (time(p, a) - time(p)).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from agents.step_table import StepTable


@dataclass(frozen=True, eq=False)
class Lookahead:
    """What a policy meets.

    Attributes:
        visits: float64 `[R, T]`, the probability that a step begins at a position.
        seconds: float64 `[R, T, A]`, expected from a position on if an action is taken there and the policy followed
            afterwards; with what the action makes due for what was done before.
    """

    visits: np.ndarray
    seconds: np.ndarray


def look_ahead(table: StepTable, policy: np.ndarray) -> Lookahead:
    """Evaluate a policy `[R, T, A]`: probabilities, 0 where an action is masked; any row behind a request's end."""
    visits, owed = _forward(table, policy)
    requests, positions, _ = policy.shape
    lagging = table.debt.shape[-1]
    left = np.zeros((requests, positions + 1))
    later = np.zeros((requests, positions + 1, lagging))  # odds that each lagging drafter drafts from here on
    seconds = np.zeros(policy.shape)
    rows = np.arange(requests)[:, None]
    for position in reversed(range(positions)):
        odds, then = policy[:, position], position + table.tokens[:, position]
        due = np.where(table.lags[:, position, :, None] == np.arange(lagging), 1.0, later[rows, then])
        future = table.seconds[:, position] + left[rows, then]
        future = future + (table.debt[:, position] * later[rows, then]).sum(axis=-1)
        left[:, position] = (odds * future).sum(axis=1)
        later[:, position] = (odds[..., None] * due).sum(axis=1) * (position < table.length)[:, None]
        seconds[:, position] = future + (owed[:, position, None] * due).sum(axis=-1)
    return Lookahead(visits, seconds)


def _forward(table: StepTable, policy: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Visits `[R, T]`, and the reading debts `[R, T, L]` that lagging drafters owe on average at a position."""
    requests, positions, _ = policy.shape
    lagging = table.debt.shape[-1]
    visits = np.zeros((requests, positions + 1))
    owed = np.zeros((requests, positions + 1, lagging))  # times the visits
    visits[:, 0], owed[:, 0] = 1.0, table.first_debt
    rows = np.arange(requests)[:, None]
    for position in range(positions):
        odds, then = policy[:, position], position + table.tokens[:, position]
        flow = visits[:, position, None] * odds
        np.add.at(visits, (rows, then), flow)
        if lagging:
            kept = np.where(table.lags[:, position, :, None] == np.arange(lagging), 0.0, owed[:, position, None])
            np.add.at(owed, (rows, then), odds[..., None] * kept + flow[..., None] * table.debt[:, position])
    visits, owed = visits[:, :-1], owed[:, :-1]
    visits = visits * (np.arange(positions) < table.length[:, None])
    return visits, owed / np.maximum(visits, 1e-12)[..., None] * (visits > 0)[..., None]
