"""How fast replay is, and how well its times predict live ones: every arm live and interleaved, against the costs.

Costs are calibrated anew during the live run, before every few requests and at its end. A request is replayed under the
mean of the tables around it, so that a machine that is slower for a while is so on both sides. Drift, the longest
calibrated plain step over the shortest, tells how far absolute times are to be trusted. A ratio is an arm's replayed
time over its live time on the same requests, prefill included, with a 95 % bootstrap interval over groups of requests.
Rankings are compared too; replay may order otherwise what is nearly tied live.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from agents.evaluation import PLAIN, Judgement, judge
from agents.report import aligned
from benchmarks.calibrations import Calibrations
from benchmarks.intervals import rate_ratio
from engine import SpeculativeDecoder
from engine.calibration import noise_warning
from engine.controller_names import make_controller
from engine.costs import CostTable
from engine.errors import SettingError
from engine.menu import Menu
from engine.storage import write_json
from envs.recorder import record
from envs.replay import ReplayEnv
from envs.trace import TraceSet
from envs.vector import ReplayBatch, Totals, run_controller
from envs.workloads import load_workload

RATE_SECONDS = 2.0  # of each measurement of replay's own speed


@dataclass(frozen=True)
class Options:
    target: str = "smollm2-135m"
    """The model."""
    drafters: list[str] = field(default_factory=lambda: ["ngram"])
    """Who drafts: ngram, ngram:history, model:<name>."""
    precision: str = "int8"
    """fp32, int8, bf16 or fp16."""
    arms: list[str] = field(default_factory=lambda: [f"fixed:{k}" for k in (1, 2, 4, 8)] + ["heuristic"])
    """Controllers beside plain."""
    workload: str = "bundled"
    """Prompts: bundled, or a file."""
    split: str = "test"
    """train, validation or test."""
    requests: int = 12
    """Requests of the split, balanced over kinds; 0 takes all."""
    max_new_tokens: int = 96
    """New tokens of a request at most."""
    calibrate_every: int = 1
    """Requests between two calibrations."""
    lanes: int = 512
    """Requests under way at once where replay's speed is measured."""
    json: Path | None = None
    """Write the result to this file too."""


def main(options: Options) -> None:
    if options.calibrate_every < 1:
        raise SettingError(f"calibrate-every is {options.calibrate_every}; give 1 request or more")
    if options.lanes < 1 or not options.drafters:
        raise SettingError(f"{options.lanes} lanes and {len(options.drafters)} drafters; give 1 or more of each")
    decoder = SpeculativeDecoder.from_pretrained(
        options.target, options.drafters, controller="plain", precision=options.precision
    )
    workload = load_workload(options.workload, options.split).at_most(options.requests, seed=0)
    menu = decoder.parts.menu
    traces = record(decoder, workload, options.max_new_tokens, max(menu.lengths))
    measured = Calibrations(decoder.parts, options.calibrate_every)
    arms = {name: name for name in dict.fromkeys([PLAIN, *options.arms])}
    with tqdm(total=workload.num_requests, unit="request", desc="live, and calibrating") as bar:

        def on_request() -> None:
            measured.before_request()
            bar.update()

        judgement = judge(decoder, arms, workload, options.max_new_tokens, on_request)
    measured.measure()
    costs = measured.around()
    if len(costs) != len(traces):
        raise SettingError(f"{len(costs) - len(traces)} requests do not fit the model; give shorter prompts")
    if warning := noise_warning(max(costs, key=lambda table: table.spread)):
        print(warning)
    replayed = {arm: run_controller(traces, costs, menu, make_controller(arm, menu, decoder.costs)) for arm in arms}
    result = {
        "requests": len(traces),
        "tokens": traces.num_tokens,
        "spread": max(table.spread for table in costs),
        "drift": measured.drift,
        "calibrations": len(measured.tables),
        "arms": {arm: compare(judgement, arm, replayed) for arm in arms},
        "ranking": rank(judgement, replayed),
        "speed": speeds(traces, costs[0], menu, options.lanes),
    }
    print(described(result))
    if options.json:
        write_json(options.json, result)
    print(json.dumps(result))


def compare(judgement: Judgement, arm: str, replayed: Mapping[str, Totals]) -> dict[str, Any]:
    """Replayed over live seconds of one arm: of all steps with an interval, of first steps, and of the others.

    And how much faster than plain decoding it is, live and replayed.
    """
    outcomes, totals = judgement.outcomes[arm], replayed[arm]
    plain = sum(o.seconds for o in judgement.outcomes[PLAIN])
    live = np.array([(o.tokens, o.seconds) for o in outcomes])
    first = np.array([o.first_token for o in outcomes])
    ratio = rate_ratio(live, np.column_stack([live[:, 0], totals.seconds]), [o.group for o in outcomes])
    return {
        "live_seconds": float(live[:, 1].sum()),
        "replayed_seconds": float(totals.seconds.sum()),
        "ratio": asdict(ratio),
        "first_steps": float(totals.first_seconds.sum() / first.sum()),
        "other_steps": float((totals.seconds - totals.first_seconds).sum() / (live[:, 1] - first).sum()),
        "speedup_live": plain / float(live[:, 1].sum()),
        "speedup_replayed": float(replayed[PLAIN].seconds.sum() / totals.seconds.sum()),
        "same_steps": [o.steps for o in outcomes] == totals.steps.tolist(),
    }


def rank(judgement: Judgement, replayed: dict[str, Totals]) -> dict[str, Any]:
    """Both orders, fastest first, and the widest live difference among pairs that replay orders otherwise."""
    live = {arm: sum(o.seconds for o in outcomes) for arm, outcomes in judgement.outcomes.items()}
    ours = {arm: float(totals.seconds.sum()) for arm, totals in replayed.items()}
    swapped = [live[b] / live[a] - 1.0 for a in live for b in live if live[a] < live[b] and ours[a] > ours[b]]
    return {
        "live": sorted(live, key=live.__getitem__),
        "replayed": sorted(ours, key=ours.__getitem__),
        "widest_swap": max(swapped, default=0.0),
    }


def speeds(traces: TraceSet, costs: CostTable, menu: Menu, lanes: int) -> dict[str, float]:
    """Replay steps a second, with observations and rewards, under random actions: many at once, and one."""
    rng = np.random.default_rng(0)
    batch = ReplayBatch(traces, costs, menu, lanes)
    batch.reset(seed=0)
    actions = rng.integers(0, len(menu), (64, lanes))
    env = ReplayEnv(traces, costs, str(menu))
    env.reset(seed=0)

    def one(turn: int) -> None:
        if env.step(int(actions[turn % 64, 0]))[2]:
            env.reset()

    return {
        "many_at_once": lanes * _rate(lambda turn: batch.step(actions[turn % 64])),
        "one": _rate(one),
    }


def _rate(step: Any) -> float:
    """Calls a second."""
    for turn in range(10):  # warms up
        step(turn)
    started, turn = time.perf_counter(), 0
    while (seconds := time.perf_counter() - started) < RATE_SECONDS:
        step(turn)
        turn += 1
    return turn / seconds


def described(result: dict[str, Any]) -> str:
    """The result for people."""
    rows = [["arm", "live s", "replayed s", "replayed/live", "first steps", "others", "speed-up live", "replayed"]]
    for arm, told in result["arms"].items():
        ratio = told["ratio"]
        between = "" if ratio["low"] is None else f" ({ratio['low']:.3f} to {ratio['high']:.3f})"
        seconds = [f"{told[name]:.2f}" for name in ("live_seconds", "replayed_seconds")]
        parts = [f"{told[name]:.3f}" for name in ("first_steps", "other_steps", "speedup_live", "speedup_replayed")]
        rows.append([arm, *seconds, f"{ratio['value']:.3f}{between}", *parts])
    ranking, speed = result["ranking"], result["speed"]
    swap = (
        f"; arms in another order differ live by up to {ranking['widest_swap']:.1%}" if ranking["widest_swap"] else ""
    )
    return (
        f"{result['requests']} requests, {result['tokens']} tokens; drift {result['drift']:.3f}\n{aligned(rows)}\n"
        f"fastest first, live: {', '.join(ranking['live'])}\nreplayed: {', '.join(ranking['replayed'])}{swap}\n"
        f"replay: {speed['many_at_once']:,.0f} steps/s many at once, {speed['one']:,.0f} one by one"
    )
