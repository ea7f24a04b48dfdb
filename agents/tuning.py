"""What is tuned on the training requests: the simple rules that a policy has to beat, and the cut that it carries."""

from __future__ import annotations

from collections.abc import Sequence

from agents.hindsight import try_fixed, try_thresholds
from agents.rules import Rule
from engine.costs import CostTable
from engine.cuts import Cut
from engine.menu import Menu
from envs.trace import TraceSet


def tuned_cut(train: TraceSet, costs: Sequence[CostTable], menu: Menu) -> Cut:
    """The threshold under which the longest draft takes the least time: one for each drafter where there are several.

    0 where nothing is ever drafted, and for several tables: what is too little confidence hangs on what a row costs,
    so a policy for many machines has to choose lengths itself.
    """
    if not menu.drafters or len(costs) > 1:
        return 0.0
    tried = {drafter: try_thresholds(train, costs[0], menu, [drafter]) for drafter in menu.drafters}
    cuts = {drafter: each.rules[each.best].min_confidence for drafter, each in tried.items()}
    return cuts if len(cuts) > 1 else next(iter(cuts.values()))


def simple_rules(train: TraceSet, costs: CostTable, menu: Menu) -> tuple[Rule, ...]:
    """Plain decoding; the fixed choice that takes the least time, which may be the same; where anything is drafted,
    the drafter and threshold that do."""
    tried = [try_fixed(train, costs, menu), *([try_thresholds(train, costs, menu)] if menu.drafters else [])]
    plain = next(rule for rule in tried[0].rules if rule.action == menu.plain)
    return plain, *(each.rules[each.best] for each in tried)
