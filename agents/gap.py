"""Every controller on the same recorded requests: its speed-up, and what it takes of the gap that there is to take.

The gap is from best fixed in hindsight to the clairvoyant optimum, which may draft any length up to the menu's longest:
drafts that are cut at doubt come to any. An arm's share is counted in seconds: (fixed - arm) / (fixed - oracle).
`agents.validation` tells another share, from the fixed choice that was tuned on train. What was learned or tuned saw
other requests only, but for the arms "in hindsight".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from agents.evaluation import PLAIN, ratio_interval
from agents.hindsight import Tried, try_fixed, try_thresholds
from agents.network import run_head
from agents.oracle import optimum
from agents.report import aligned
from agents.step_table import step_table, with_every_length
from engine.controller_names import make_controller
from engine.costs import CostTable
from engine.cuts import Cut
from engine.menu import Menu
from engine.policy_heads import Head
from envs.trace import TraceSet
from envs.vector import run_controller

ORACLE, HINDSIGHT = "oracle", "best fixed, in hindsight"


@dataclass(frozen=True)
class GapArm:
    """One arm over all requests; where it has several seeds, the mean of their seconds.

    Attributes:
        speedup, low, high: over plain decoding, with the ends of a 95 % interval that resamples groups of requests.
        over_fixed, over_fixed_low, over_fixed_high: the same over the best fixed choice in hindsight.
        hindsight_share: of the gap from the best fixed choice in hindsight to the oracle, what the arm takes.
        spread: standard deviation of the speed-up over the seeds; 0 for one.
        kinds: kind of request -> speed-up over plain decoding.
    """

    arm: str
    seeds: int
    speedup: float
    low: float
    high: float
    over_fixed: float
    over_fixed_low: float
    over_fixed_high: float
    hindsight_share: float
    spread: float
    kinds: dict[str, float]


@dataclass(frozen=True, eq=False)
class Gap:
    """The judgement.

    Attributes:
        seconds: arm -> float64 `[seeds, R]`.
        kinds, groups: one a request.
    """

    seconds: Mapping[str, np.ndarray]
    kinds: tuple[str, ...]
    groups: tuple[str, ...]

    def arms(self) -> list[GapArm]:
        """One a row, in the order in which they were judged."""
        return [self._arm(name, seconds) for name, seconds in self.seconds.items()]

    def ratio(self, slower: str, faster: str) -> tuple[float, float, float]:
        """One arm's time over another's, with the ends of its interval: paired over requests."""
        times = self.seconds[slower].mean(axis=0), self.seconds[faster].mean(axis=0)
        return float(times[0].sum() / times[1].sum()), *ratio_interval(*times, self.groups)

    def table(self) -> str:
        """For people."""
        head = (
            "arm",
            "seeds",
            "speed-up",
            "95 % interval",
            "over best fixed",
            "95 % interval",
            "share of hindsight gap",
            "spread",
        )
        requests = f"{len(self.groups)} requests in {len(set(self.groups))} groups; intervals resample groups"
        caption = f"{requests}; the hindsight gap is from {HINDSIGHT} to the {ORACLE}"
        return f"{caption}\n{aligned([head, *(_row(arm) for arm in self.arms())])}"

    def kinds_table(self) -> str:
        """Speed-up over plain decoding of every arm on every kind of request."""
        kinds = tuple(dict.fromkeys(self.kinds))
        rows = [(arm.arm, *(f"{arm.kinds[kind]:.2f}" for kind in kinds)) for arm in self.arms()]
        return aligned([("speed-up", *kinds), *rows])

    def to_json(self) -> dict[str, Any]:
        return {"requests": len(self.groups), "groups": len(set(self.groups)), "arms": [asdict(a) for a in self.arms()]}

    def _arm(self, name: str, seconds: np.ndarray) -> GapArm:
        plain, fixed, oracle = (self.seconds[arm].mean(axis=0) for arm in (PLAIN, HINDSIGHT, ORACLE))
        mean, gap = seconds.mean(axis=0), float(fixed.sum() - oracle.sum())
        each = plain.sum() / seconds.sum(axis=1)
        kinds = np.array(self.kinds)
        return GapArm(
            name,
            len(seconds),
            *self.ratio(PLAIN, name),
            *self.ratio(HINDSIGHT, name),
            hindsight_share=float(fixed.sum() - mean.sum()) / gap if gap > 0 else 0.0,
            spread=float(each.std(ddof=1)) if len(each) > 1 else 0.0,
            kinds={kind: float(plain[kinds == kind].sum() / mean[kinds == kind].sum()) for kind in self.kinds},
        )


def judge_gap(
    train: TraceSet,
    test: TraceSet,
    menu: Menu,
    costs: CostTable,
    learned: Mapping[str, Sequence[Head]],
    others: Mapping[str, Sequence[np.ndarray]] | None = None,
    cuts: Mapping[str, Cut] | None = None,
) -> Gap:
    """Judge the baselines, what was learned, and the limits.

    Args:
        train: what the threshold and the fixed length are tuned on.
        test: what everything is judged on.
        menu: the actions.
        costs: what steps take.
        learned: arm -> one decision function a seed.
        others: arm -> seconds `[R]` a seed, of arms that were run elsewhere.
        cuts: arm -> the `min_confidence` that its policies carry; 0 for those that are not named.
    """
    fixed, thresholds = try_fixed(test, costs, menu), try_thresholds(test, costs, menu)
    arms = {PLAIN: [fixed.seconds[fixed.names.index(PLAIN)]]}
    arms |= {name: [row] for name, row in zip(fixed.names, fixed.seconds) if name != PLAIN}
    arms["best fixed, tuned on train"] = [_tuned(try_fixed(train, costs, menu), fixed)]
    arms[HINDSIGHT] = [fixed.seconds[fixed.best]]
    arms["best fixed of each request, in hindsight"] = [fixed.best_of_each]
    if menu.lengths:
        for name in ("heuristic", "cost-model"):
            controller = make_controller(name, menu, lambda: costs)
            arms[name] = [run_controller(test, costs, menu, controller).seconds]
        arms["threshold, tuned on train"] = [_tuned(try_thresholds(train, costs, menu), thresholds)]
        arms["threshold, in hindsight"] = [thresholds.seconds[thresholds.best]]
    for name, heads in learned.items():
        cut = (cuts or {}).get(name, 0.0)
        arms[name] = [run_head(test, costs, menu, head, cut).seconds for head in heads]
    arms |= {name: list(rows) for name, rows in (others or {}).items()}
    arms[ORACLE] = [optimum(step_table(test, with_every_length(menu), costs, observed=False))]
    requests = test.traces
    return Gap(
        {name: np.array(rows) for name, rows in arms.items()},
        tuple(trace.kind for trace in requests),
        tuple(trace.group for trace in requests),
    )


def _tuned(on_train: Tried, on_test: Tried) -> np.ndarray:
    """Seconds on the test requests of the candidate that was best on the training requests."""
    return np.asarray(on_test.seconds[on_train.best])


def _row(arm: GapArm) -> tuple[str, ...]:
    return (
        arm.arm,
        str(arm.seeds),
        f"{arm.speedup:.3f}",
        f"{arm.low:.3f} to {arm.high:.3f}",
        f"{arm.over_fixed:.3f}",
        f"{arm.over_fixed_low:.3f} to {arm.over_fixed_high:.3f}",
        f"{arm.hindsight_share:.1%}",
        f"{arm.spread:.3f}" if arm.seeds > 1 else "-",
    )
