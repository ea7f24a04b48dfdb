"""Every controller on the same recorded test requests: its speed-up, and its share of what there is to gain.

What learns or is tuned sees the training requests, and the validation requests where it chooses among its own
iterates; with `--folds` every request of the three splits is judged, by what learned on others. Bandits are judged
twice: frozen as they are exported, and going on learning over the requests that are judged. With several drafters in
the menu each is judged alone besides, so that their choice is held against the better one.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

from tyro.conf import UseAppendAction

from agents.randomise import HELD_OUT, held_out_costs
from agents.report import aligned
from agents.stages import say, stage
from agents.trainers import AGENTS
from benchmarks.field import Field, judge_field
from benchmarks.folds import judge_folds, pooled
from benchmarks.gap_plot import plot_gap
from benchmarks.lessons import check_agents, check_amounts
from benchmarks.recordings import load_engine, record_splits
from engine import SpeculativeDecoder, cuts
from engine.calibration import noise_warning
from engine.costs import CostTable
from engine.errors import SettingError
from engine.menu import Menu
from engine.storage import write_json
from envs.workloads import BUNDLED
from envs.workloads.splits import unknown_name

MEASURED = "measured"


@dataclass(frozen=True)
class Options:
    target: str = "smollm2-135m"
    """The model."""
    drafter: Annotated[list[str], UseAppendAction] = field(default_factory=list)
    """Who drafts: ngram (the default), ngram:history, model:<name>, or first:N, the target's first N layers, which
    were not trained for it. Several make one menu, and each is judged alone besides."""
    precision: str = "int8"
    """fp32, int8, bf16 or fp16."""
    costs: str = MEASURED
    """What steps take: measured (this machine's), or gpu-like or vllm-like."""
    agents: list[str] = field(default_factory=lambda: list(AGENTS))
    """Who learns."""
    seeds: int = 5
    """Seeds of each agent."""
    effort: float = 1.0
    """Share of each agent's default steps that it is trained on."""
    uncut: bool = False
    """Train every agent too without the cut that policies carry: drafts end before the first token that their drafter
    trusts less than the threshold tuned on train."""
    folds: int = 0
    """Deal the requests of all splits into so many folds and judge each by what was learned on the others; 0: train,
    validation and test as they are."""
    workload: Annotated[list[str], UseAppendAction] = field(default_factory=list)
    """Prompts: bundled (the default), or a file with all three splits."""
    requests: int = 0
    """Requests of each split at most, balanced over kinds; 0 takes all."""
    max_new_tokens: int = 96
    """New tokens of a request at most."""
    plot: Path | None = None
    """Draw the speed-ups into this PNG file."""
    json: Path | None = None
    """Write the result to this file too."""


def main(options: Options) -> None:
    check_agents(options.agents)
    check_amounts(options.seeds, options.effort)
    if options.costs not in (MEASURED, *HELD_OUT):
        raise SettingError("; ".join(unknown_name("costs", options.costs, (MEASURED, *HELD_OUT))))
    with stage("model", f"loading {options.target}"):
        decoder = load_engine(options.target, options.drafter, options.precision)
    menu = decoder.parts.menu
    with stage("recording", "the three splits, or their traces from the cache folder"):
        splits = record_splits(decoder, options.workload or [BUNDLED], options.requests, options.max_new_tokens)
    costs = chosen_costs(options.costs, decoder, menu)
    say(f"costs: {costs_line(costs, menu)}")
    if warning := noise_warning(costs):
        say(warning)
    seeds = range(options.seeds)
    told = (menu, costs, options.agents, seeds, options.effort, options.uncut)
    judged = judge_folds(splits, *told, options.folds) if options.folds else judge_field(splits, *told)
    document = {
        "options": {name: value for name, value in asdict(options).items() if name not in ("plot", "json")},
        "menu": str(menu),
        "costs": costs.to_json(),
        "judged_tokens": (pooled(splits) if options.folds else splits.test).num_tokens,
        **judged.to_json(),
    }
    print(described(judged))
    if options.plot:
        plot_gap(judged.gap.arms(), options.plot)
    if options.json:
        write_json(options.json, document | {"options": json.loads(json.dumps(document["options"], default=str))})
    print(json.dumps(document, default=str), flush=True)


def chosen_costs(name: str, decoder: SpeculativeDecoder, menu: Menu) -> CostTable:
    """This engine's calibrated costs, or a made-up machine's."""
    return decoder.costs() if name == MEASURED else held_out_costs(name, menu)


def costs_line(costs: CostTable, menu: Menu) -> str:
    """What matters of a table, over its plain step."""
    verify = ", ".join(f"v({k}) {costs.verify_ratio(k):.2f}" for k in menu.lengths)
    drafts = ", ".join(f"a token of {name} {costs.draft_ratio(name):.3f}" for name in menu.drafters)
    return f"plain step {costs.plain_seconds(256) * 1e3:.1f} ms; {verify}; {drafts}"


def described(judged: Field) -> str:
    """The judgement for people."""
    rows = [(one.arm, one.over, f"{one.value:.3f}", f"{one.low:.3f} to {one.high:.3f}") for one in judged.ratios]
    ratios = aligned([("arm", "how many times faster than", "ratio", "95 % interval"), *rows])
    training = ", ".join(f"{name} {max(seconds):.1f}" for name, seconds in judged.seconds.items())
    tables = judged.gap.table(), judged.gap.kinds_table()
    return "\n\n".join(
        [
            *tables,
            ratios,
            f"seconds of training, the slowest seed: {training}",
            f"cut of the policies, tuned on train: {'; '.join(map(cuts.described, judged.cuts))}",
        ]
    )
