"""One policy for many machines: trained under made-up costs, against policies trained on each machine's own costs.

All are trained on the same recorded requests and judged on the same others; what differs is what steps cost. The
general policy meets the machines it is judged on for the first time and is told their costs as inputs, as a policy is
that was only calibrated. Two of the machines are made up and never drawn in training.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

from tyro.conf import UseAppendAction

from agents.evaluation import PLAIN
from agents.gap import Gap, judge_gap
from agents.material import Material
from agents.randomise import HELD_OUT, held_out_costs
from agents.report import aligned
from agents.stages import say, stage
from agents.trainers import training_costs
from agents.tuning import tuned_cut
from benchmarks.controllers import costs_line
from benchmarks.field import FIXED, THRESHOLD
from benchmarks.lessons import check_agents, check_amounts, teach
from benchmarks.recordings import Splits, load_engine, record_splits
from engine.costs import CostTable
from engine.cuts import Cut
from engine.errors import SettingError
from engine.menu import Menu
from engine.storage import write_json
from envs.workloads import BUNDLED

GENERAL, OWN = "general policy", "own policy"
WITHIN = 0.03  # what the general policy may lose to a machine's own


@dataclass(frozen=True)
class Options:
    target: str = "smollm2-135m"
    """The model."""
    drafter: Annotated[list[str], UseAppendAction] = field(default_factory=list)
    """Who drafts, as for `controllers`: ngram (the default), ngram:history, model:<name>, first:N."""
    precision: list[str] = field(default_factory=lambda: ["int8", "fp32"])
    """Whose measured costs are judged; the requests are recorded in the first one."""
    agent: str = "ppo"
    """Who learns: ppo, counterfactual, or a bandit."""
    seeds: int = 1
    """Seeds of every policy."""
    effort: float = 1.0
    """Share of the agent's default steps that every policy is trained on."""
    general_effort: float | None = None
    """The same for the general policy, which has more to learn; default: as the others."""
    workload: Annotated[list[str], UseAppendAction] = field(default_factory=list)
    """Prompts: bundled (the default), or a file with all three splits."""
    requests: int = 0
    """Requests of each split at most, balanced over kinds; 0 takes all."""
    max_new_tokens: int = 96
    """New tokens of a request at most."""
    json: Path | None = None
    """Write the result to this file too."""


def main(options: Options) -> None:
    check_agents([options.agent])
    general_effort = options.effort if options.general_effort is None else options.general_effort
    for effort in (options.effort, general_effort):
        check_amounts(options.seeds, effort)
    if not options.precision:
        raise SettingError("name at least one precision; the requests are recorded in the first one")
    first, *others = dict.fromkeys(options.precision)
    decoder = load_engine(options.target, options.drafter, first)
    menu = decoder.parts.menu
    with stage("recording", "the three splits, or their traces from the cache folder"):
        splits = record_splits(decoder, options.workload or [BUNDLED], options.requests, options.max_new_tokens)
    tables = {f"{first}, measured": decoder.costs()}
    for precision in others:
        tables[f"{precision}, measured"] = load_engine(options.target, options.drafter, precision).costs()
    tables |= {name: held_out_costs(name, menu) for name in HELD_OUT}
    for name, costs in tables.items():
        say(f"{name}: {costs_line(costs, menu)}")
    efforts = options.effort, general_effort
    machines = compare(splits, menu, tables, options.agent, range(options.seeds), efforts)
    document = {
        "agent": options.agent,
        "seeds": options.seeds,
        "efforts": efforts,
        "requests": len(splits.test),
        "menu": str(menu),
        "within": WITHIN,
        "machines": [asdict(machine) for machine in machines],
    }
    print(described(machines))
    if options.json:
        write_json(options.json, document)
    print(json.dumps(document), flush=True)


@dataclass(frozen=True)
class Machine:
    """The policies on one machine; where there are several seeds, the mean of their seconds.

    Attributes:
        ratio, low, high: the general policy's time over that of the machine's own, with the ends of a 95 % interval
            that resamples groups of requests.
        general, own: speed-ups over plain decoding.
        fixed, threshold: of the best fixed choice and of the best threshold, tuned on train.
        general_seeds, own_seeds: speed-ups of each seed.
        general_cut, own_cut: the policies' `min_confidence`: none, and tuned on train.
    """

    machine: str
    ratio: float
    low: float
    high: float
    general: float
    own: float
    fixed: float
    threshold: float
    general_seeds: list[float]
    own_seeds: list[float]
    general_cut: Cut
    own_cut: Cut


def compare(
    splits: Splits,
    menu: Menu,
    tables: Mapping[str, CostTable],
    agent: str,
    seeds: Iterable[int],
    efforts: tuple[float, float] = (1.0, 1.0),
) -> list[Machine]:
    """Train the general policy and each machine's own, and judge them on the test requests.

    Args:
        splits: what is trained on, validated on and judged on.
        menu: the actions.
        tables: machine -> what steps take there.
        agent: who learns.
        seeds: of each policy.
        efforts: share of the agent's default steps, for machines' own policies and for the general one.
    """
    seeds = list(seeds)
    own, general = efforts
    here = next(iter(tables.values()))  # costs that only a bandit's curve is drawn with
    with stage("training", f"{agent} under made-up costs"):
        made_up = {seed: training_costs("randomised", here, menu, seed) for seed in seeds}
        cut = tuned_cut(splits.train, made_up[seeds[0]], menu)
        lessons = [Material(splits.train, splits.validation, menu, here, made_up[seed], cut) for seed in seeds]
        heads = [teach(agent, lesson, seed, general).head for lesson, seed in zip(lessons, seeds, strict=True)]
    machines = []
    for name, costs in tables.items():
        with stage("training", f"{agent} for {name}"):
            theirs = tuned_cut(splits.train, [costs], menu)
            material = Material(splits.train, splits.validation, menu, costs, [costs], theirs)
            own_heads = [teach(agent, material, seed, own).head for seed in seeds]
        cuts = {GENERAL: cut, OWN: theirs}
        gap = judge_gap(splits.train, splits.test, menu, costs, {GENERAL: heads, OWN: own_heads}, cuts=cuts)
        machines.append(_machine(name, gap, (cut, theirs)))
    return machines


def _machine(name: str, gap: Gap, cuts: tuple[Cut, Cut]) -> Machine:
    ratio, low, high = gap.ratio(GENERAL, OWN)
    arms = {arm.arm: arm.speedup for arm in gap.arms()}
    plain = gap.seconds[PLAIN].sum()
    each = {arm: (plain / gap.seconds[arm].sum(axis=1)).tolist() for arm in (GENERAL, OWN)}
    return Machine(
        name, ratio, low, high, arms[GENERAL], arms[OWN], arms[FIXED], arms[THRESHOLD], each[GENERAL], each[OWN], *cuts
    )


def described(machines: Sequence[Machine]) -> str:
    """The comparison for people."""
    head = (
        "machine",
        "best fixed",
        "threshold",
        "own policy",
        "general policy",
        "general/own time",
        "95 % interval",
        "within 3 %",
    )
    rows = [
        (
            one.machine,
            f"{one.fixed:.3f}",
            f"{one.threshold:.3f}",
            f"{one.own:.3f}",
            f"{one.general:.3f}",
            f"{one.ratio:.4f}",
            f"{one.low:.4f} to {one.high:.4f}",
            "yes" if one.ratio <= 1.0 + WITHIN else "no",
        )
        for one in machines
    ]
    return f"speed-ups over plain decoding\n{aligned([head, *rows])}"
