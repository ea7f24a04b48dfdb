"""Every agent trained, and everything judged on the test requests: alone for each drafter too, where there are several.

The better single drafter is found on the test requests themselves, which favours it over the choice between them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from tqdm import tqdm

from agents.gap import HINDSIGHT, Gap, judge_gap
from agents.material import Material
from agents.online import LearningController
from agents.stages import stage
from agents.tuning import tuned_cut
from benchmarks.lessons import Taught, teach
from benchmarks.recordings import Splits
from engine.costs import CostTable
from engine.cuts import Cut
from engine.menu import Menu, default_menu
from engine.policy_heads import Head
from envs.trace import TraceSet
from envs.vector import run_controller

FIXED, THRESHOLD = "best fixed, tuned on train", "threshold, tuned on train"  # arms of `agents.gap`
UNCUT = ", uncut"  # of an arm's name


@dataclass(frozen=True)
class Ratio:
    """How many times faster an arm is than another, with the ends of a 95 % interval that resamples groups."""

    arm: str
    over: str
    value: float
    low: float
    high: float


@dataclass(frozen=True, eq=False)
class Field:
    """The judgement.

    Attributes:
        gap: every arm.
        ratios: what was learned, over what it has to beat.
        cuts: the `min_confidence` that policies carry, tuned on train: one, or one a fold; those named "uncut" carry
            none.
        seconds: agent -> what the training of each seed took.
    """

    gap: Gap
    ratios: list[Ratio]
    cuts: list[Cut]
    seconds: dict[str, list[float]]

    def to_json(self) -> dict[str, Any]:
        ratios = [asdict(one) for one in self.ratios]
        return self.gap.to_json() | {"ratios": ratios, "cuts": self.cuts, "training_seconds": self.seconds}


def judge_field(
    splits: Splits,
    menu: Menu,
    costs: CostTable,
    agents: Sequence[str],
    seeds: Iterable[int],
    effort: float = 1.0,
    uncut: bool = False,
) -> Field:
    """Train the agents and judge them beside all baselines and limits.

    Args:
        splits: what is trained on, validated on and judged on.
        menu: the actions.
        costs: what steps take, in training and in judgement.
        agents: as `agents.trainers.AGENTS` calls them.
        seeds: of each agent.
        effort: share of each agent's default steps.
        uncut: whether the agents are trained too for policies that do not cut their drafts.
    """
    seeds = list(seeds)
    material = _material(splits, menu, costs)
    cut = material.min_confidence
    taught = _teach_all(material, agents, seeds, effort)
    others = _going_on(splits.test, material, taught)
    cuts = dict.fromkeys(taught, cut)
    if uncut:
        without = _teach_all(replace(material, min_confidence=0.0), agents, seeds, effort)
        taught |= {name + UNCUT: rows for name, rows in without.items()}
    for drafter in _several(menu):
        with stage("alone", f"only {drafter} in the menu"):
            others |= _alone(splits, drafter, costs, agents, seeds, effort)
    with stage("judgement", f"every arm on {len(splits.test)} test requests"):
        gap = judge_gap(splits.train, splits.test, menu, costs, _heads(taught), others, cuts)
    seconds = {name: [one.seconds for one in rows] for name, rows in taught.items()}
    return Field(gap, ratios_of(gap, list(taught), menu), [cut], seconds)


def ratios_of(gap: Gap, learned: Sequence[str], menu: Menu) -> list[Ratio]:
    """What was learned, over what it has to beat."""
    return [ratio for name in learned for ratio in _ratios(gap, name, _several(menu))]


def _material(splits: Splits, menu: Menu, costs: CostTable) -> Material:
    cut = tuned_cut(splits.train, [costs], menu)
    return Material(splits.train, splits.validation, menu, costs, [costs], cut)


def _teach_all(
    material: Material, agents: Sequence[str], seeds: Sequence[int], effort: float
) -> dict[str, list[Taught]]:
    """Name -> one a seed."""
    taught: dict[str, list[Taught]] = {}
    for agent in agents:
        with stage("training", f"{agent}, {len(seeds)} seeds"):
            rows = [teach(agent, material, seed, effort) for seed in seeds]
        taught[rows[0].name] = rows
    return taught


def _going_on(test: TraceSet, material: Material, taught: dict[str, list[Taught]]) -> dict[str, list[np.ndarray]]:
    """Seconds of the test requests under learners that learn from them too, in order."""
    others: dict[str, list[np.ndarray]] = {}
    pairs = [(name, one.learner) for name, rows in taught.items() for one in rows if one.learner is not None]
    for name, learner in tqdm(pairs, unit="seed", desc="going on learning", disable=not pairs):
        controller = LearningController(learner, material.menu, material.costs, material.min_confidence)
        seconds = run_controller(test, material.costs, material.menu, controller).seconds
        others.setdefault(f"{name}, learning on", []).append(seconds)
    return others


def _alone(
    splits: Splits, drafter: str, costs: CostTable, agents: Sequence[str], seeds: Sequence[int], effort: float
) -> dict[str, list[np.ndarray]]:
    """Arm -> seconds a seed, of what uses one drafter only: fixed, tuned and learned."""
    menu = default_menu((drafter,))
    material = _material(splits, menu, costs)
    taught = _teach_all(material, agents, seeds, effort)
    cuts = dict.fromkeys(taught, material.min_confidence)
    gap = judge_gap(splits.train, splits.test, menu, costs, _heads(taught), cuts=cuts)
    kept = (FIXED, HINDSIGHT, THRESHOLD, *taught)
    return {_single(name, drafter): list(gap.seconds[name]) for name in kept}


def _several(menu: Menu) -> Sequence[str]:
    """The drafters, where there is a choice between them."""
    return menu.drafters if len(menu.drafters) > 1 else ()


def _ratios(gap: Gap, name: str, drafters: Sequence[str]) -> list[Ratio]:
    """A learned arm over the best fixed choices and the tuned threshold; over the better drafter alone besides."""
    over = [HINDSIGHT, FIXED, THRESHOLD]
    if drafters:
        for alone in (HINDSIGHT, THRESHOLD, name.removesuffix(UNCUT)):
            over.append(
                min((_single(alone, d) for d in drafters), key=lambda arm: float(gap.seconds[arm].mean(axis=0).sum()))
            )
    return [Ratio(name, base, *gap.ratio(base, name)) for base in over]


def _heads(taught: dict[str, list[Taught]]) -> dict[str, list[Head]]:
    return {name: [one.head for one in rows] for name, rows in taught.items()}


def _single(arm: str, drafter: str) -> str:
    return f"{arm}, {drafter} alone"
