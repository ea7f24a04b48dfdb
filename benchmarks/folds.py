"""Cross-validation: every request of all splits is judged once, by what was trained and tuned on others.

It narrows intervals where the test split alone has few requests. Arms in hindsight are so fold by fold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from agents.gap import Gap
from agents.stages import say
from benchmarks.field import Field, judge_field, ratios_of
from benchmarks.recordings import Splits
from engine.costs import CostTable
from engine.errors import SettingError
from engine.menu import Menu
from envs.trace import TraceSet

VALIDATION = 5  # every so many-th group that is not judged chooses among iterates


def judge_folds(
    splits: Splits,
    menu: Menu,
    costs: CostTable,
    agents: Sequence[str],
    seeds: Sequence[int],
    effort: float,
    uncut: bool,
    folds: int,
) -> Field:
    """As `judge_field`, with the requests of all splits dealt anew into so many folds, whole groups together."""
    fields: list[Field] = []
    for fold in folded(pooled(splits), folds):
        say(f"fold {len(fields) + 1} of {folds}: {len(fold.train)} requests to learn from, {len(fold.test)} to judge")
        fields.append(judge_field(fold, menu, costs, agents, seeds, effort, uncut))
    gap = Gap(
        {arm: np.concatenate([each.gap.seconds[arm] for each in fields], axis=1) for arm in fields[0].gap.seconds},
        tuple(kind for each in fields for kind in each.gap.kinds),
        tuple(group for each in fields for group in each.gap.groups),
    )
    seconds = {name: [one for each in fields for one in each.seconds[name]] for name in fields[0].seconds}
    return Field(gap, ratios_of(gap, list(seconds), menu), [cut for each in fields for cut in each.cuts], seconds)


def pooled(splits: Splits) -> TraceSet:
    """The requests of all splits as one set."""
    parts = (splits.train, splits.validation, splits.test)
    return replace(splits.train, traces=tuple(trace for part in parts for trace in part.traces))


def folded(pool: TraceSet, folds: int) -> Iterator[Splits]:
    """One a fold: what it learns from, what chooses among iterates, and what it is judged on; groups stay whole."""
    names = sorted({trace.group for trace in pool.traces})
    if not 2 <= folds <= len(names) - 2:
        raise SettingError(f"folds is {folds}; these requests are of {len(names)} groups: give 2 to {len(names) - 2}")
    dealt = [names[place] for place in np.random.default_rng(0).permutation(len(names))]
    for fold in range(folds):
        judged = set(dealt[fold::folds])
        others = [name for name in dealt if name not in judged]
        chosen = set(others[::VALIDATION])
        yield Splits(_of(pool, set(others) - chosen), _of(pool, chosen), _of(pool, judged))


def _of(pool: TraceSet, groups: set[str]) -> TraceSet:
    return pool.subset(place for place, trace in enumerate(pool.traces) if trace.group in groups)
