"""Every seed's policy on the validation traces, beside plain decoding, the simple rules and the clairvoyant optimum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from agents.evaluation import PLAIN, ratio_interval
from agents.material import Material
from agents.oracle import optimum
from agents.report import aligned
from agents.rules import Rule
from agents.seeds import Trained
from agents.step_table import step_table, with_every_length
from agents.tuning import simple_rules

ORACLE = "oracle"


@dataclass(frozen=True)
class Replayed:
    """One arm over all validation requests, at calibrated median costs.

    Attributes:
        speedup: plain decoding's seconds over the arm's, prefill included, with the ends of a 95 % interval that
            resamples groups of requests.
        share: of the seconds between the best fixed choice and the oracle, those that the arm saves; 0 where the two
            do not differ.
    """

    arm: str
    seconds: float
    speedup: float
    speedup_low: float
    speedup_high: float
    share: float


@dataclass(frozen=True)
class Validation:
    """Figures of a run's seeds.

    Attributes:
        fixed: the best fixed choice, found on the training requests.
        rules: what needs no learning: plain decoding, that choice, the tuned threshold.
        arms: these, and the oracle.
        seeds: one a seed that was trained.
    """

    requests: int
    groups: int
    fixed: str
    rules: tuple[Rule, ...]
    arms: tuple[Replayed, ...]
    seeds: dict[int, Replayed]

    def spread(self) -> dict[str, float]:
        """Mean, standard deviation (0 for one seed), least and greatest speed-up over the seeds."""
        speedups = np.array([arm.speedup for arm in self.seeds.values()])
        deviation = float(speedups.std(ddof=1)) if len(speedups) > 1 else 0.0
        figures = {"mean": speedups.mean(), "deviation": deviation, "low": speedups.min(), "high": speedups.max()}
        return {name: float(value) for name, value in figures.items()}

    @property
    def best_rule(self) -> Rule | None:
        """The fastest rule, where no seed's policy takes less time."""
        seconds = {arm.arm: arm.seconds for arm in self.arms}
        best = min(self.rules, key=lambda rule: seconds[rule.name])
        beaten = any(arm.seconds < seconds[best.name] for arm in self.seeds.values())
        return None if beaten else best

    def to_json(self) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "groups": self.groups,
            "best_fixed": self.fixed,
            "rules": [rule.name for rule in self.rules],
            "arms": [asdict(arm) for arm in self.arms],
            "seeds": {str(seed): asdict(arm) for seed, arm in self.seeds.items()},
            "spread": self.spread(),
        }

    def table(self) -> str:
        """One line an arm, then one a seed, then how these spread where there are several."""
        head = ("replayed", "speed-up", "95 % interval", "share of the gap")
        rows = [_row(arm, self.groups > 1) for arm in (*self.arms, *self.seeds.values())]
        caption = f"{self.requests} validation requests; the gap is what lies between {self.fixed} and the oracle"
        spread = self.spread()
        several = (
            f"\nover {len(self.seeds)} seeds: speed-up {spread['mean']:.3f} on average, standard deviation "
            f"{spread['deviation']:.3f}, from {spread['low']:.3f} to {spread['high']:.3f}"
        )
        return f"{caption}\n{aligned([head, *rows])}{several if len(self.seeds) > 1 else ''}"


def validate(material: Material, trained: Sequence[Trained]) -> Validation:
    """Replay every arm over the validation requests."""
    menu, costs, traces = material.menu, material.costs, material.validation
    rules = simple_rules(material.train, costs, menu)
    arms = {rule.name: rule.replay(traces, costs, menu) for rule in rules}
    _, fixed, *_ = rules
    plain, least = arms[PLAIN], arms[fixed.name]
    oracle = optimum(step_table(traces, with_every_length(menu), costs, observed=False))
    gap = float(least.sum() - oracle.sum())
    groups = [trace.group for trace in traces.traces]

    def replayed(arm: str, seconds: np.ndarray) -> Replayed:
        low, high = ratio_interval(plain, seconds, groups)
        total = float(seconds.sum())
        share = (float(least.sum()) - total) / gap if gap > 0 else 0.0
        return Replayed(arm, total, float(plain.sum()) / total, low, high, share)

    arms[ORACLE] = oracle
    return Validation(
        requests=len(traces),
        groups=len(set(groups)),
        fixed=fixed.name,
        rules=rules,
        arms=tuple(replayed(arm, seconds) for arm, seconds in arms.items()),
        seeds={one.seed: replayed(f"{one.name} seed {one.seed}", one.seconds) for one in trained},
    )


def _row(arm: Replayed, spread: bool) -> tuple[str, ...]:
    interval = f"{arm.speedup_low:.3f} to {arm.speedup_high:.3f}" if spread else "-"
    return arm.arm, f"{arm.speedup:.3f}", interval, f"{arm.share:.0%}"
