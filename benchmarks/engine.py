"""How fast each engine decodes, and why: ours in every precision, transformers' `generate`, llama.cpp.

First the memory's bandwidth and what it allows. Then what verifying k drafts costs over a plain step, and where a
step's time goes. Then every arm answers each request in turn, in rotating order, greedily, without reuse between
requests. Ratios are to transformers' plain `generate`, in tokens per second over the whole request.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from agents.report import aligned
from benchmarks.arms import figures, our_arms, run_all, summarise
from benchmarks.breakdown import Breakdown, break_down
from benchmarks.passes import fitting, time_passes, verify_ratios
from benchmarks.peers import BASE, Arm, llama_peers, transformers_peers
from benchmarks.plots import plot_engine
from benchmarks.roofline import memory_bandwidth, roofline
from benchmarks.tables import bounds_text, costs_table, figures_text, parts_table
from engine import Policy, SpeculativeDecoder, load_policy
from engine.costs import machine_fingerprint
from engine.errors import SettingError
from engine.storage import write_json
from envs.workloads import Workload, load_workload

BREAKDOWN_LENGTHS = (0, 4)
BREAKDOWN_STEPS, BREAKDOWN_ROUNDS = 16, 3
BREAKDOWN_CONTEXT = 256  # prompt tokens


@dataclass(frozen=True)
class Options:
    target: str = "smollm2-135m"
    """The model."""
    precisions: list[str] = field(default_factory=lambda: ["fp32", "int8"])
    """Of our arms."""
    controllers: list[str] = field(default_factory=lambda: ["plain", "fixed:4", "heuristic"])
    """Of our arms."""
    policies: list[Path] = field(default_factory=lambda: [Path("checkpoints/default")])
    """Folders of exported policies, arms too; the first one is the controller whose time is taken."""
    drafters: list[str] = field(default_factory=lambda: ["ngram"])
    """Of our arms: ngram, model:<name>."""
    device: str = "cpu"
    """cpu or cuda."""
    exact: str | None = None
    """The engine's exactness mode; default: its own."""
    assistant: str | None = None
    """A smaller model for transformers' assistant_model; default: the target's first layers, named as such."""
    workload: str = "bundled"
    """Prompts: bundled, or a file."""
    requests: int = 4
    """Requests of the test split, balanced over kinds; 0 takes all."""
    max_new_tokens: int = 128
    """New tokens of a request at most."""
    contexts: list[int] = field(default_factory=lambda: [128, 768])
    """Tokens in the buffer when passes are timed."""
    rounds: int = 15
    """Passes of each length at each context."""
    seed: int = 0
    """Of the sample of requests and of the intervals."""
    json: Path | None = None
    """Write the result to this file too, and the plot beside it."""
    out: Path | None = None
    """Write engine.json and engine.png into this folder."""


def main(options: Options) -> None:
    started = time.perf_counter()
    check(options)
    policies = {str(folder): load_policy(folder) for folder in options.policies}
    workload = load_workload(options.workload, "test" if options.workload == "bundled" else None)
    workload = workload.at_most(options.requests, options.seed)
    bandwidth = memory_bandwidth(options.device)
    decoders = {precision: load_decoder(options, precision) for precision in options.precisions}
    bounds = {name: roofline(decoder.parts.runner, bandwidth) for name, decoder in decoders.items()}
    print(bounds_text(bandwidth, torch.get_num_threads(), bounds), flush=True)
    costs = {name: pass_costs(options, decoder) for name, decoder in decoders.items()}
    parts = take_apart(options, decoders, policies, workload)
    measured = run_arms(options, decoders, policies, workload)
    bandwidth = max(bandwidth, memory_bandwidth(options.device))  # a bound: the better of before and after
    document = {
        "benchmark": "engine",
        "machine": machine_fingerprint(options.device),
        "options": json.loads(json.dumps(asdict(options), default=str)),
        "threads": torch.get_num_threads(),
        "bandwidth": bandwidth,
        "roofline": {name: reached(decoders[name], bandwidth, cost) for name, cost in costs.items()},
        "verify": costs,
        "breakdown": parts,
        "base": BASE,
        **measured,
        "seconds": time.perf_counter() - started,
    }
    print(costs_table(document), parts_table(document), figures_text(document), sep="\n\n")
    report(options, document)


def check(options: Options) -> None:
    """Raise `SettingError` for numbers that cannot be."""
    for name, least in (("requests", 0), ("max_new_tokens", 1), ("rounds", 1), ("seed", 0)):
        if getattr(options, name) < least:
            raise SettingError(f"{name} is {getattr(options, name)}; give {least} or more")
    if not options.precisions or not options.contexts or min(options.contexts) < 1:
        raise SettingError("precisions or contexts are missing; give at least one of each")


def load_decoder(options: Options, precision: str) -> SpeculativeDecoder:
    exact: dict[str, Any] = {} if options.exact is None else {"exact": options.exact}
    return SpeculativeDecoder.from_pretrained(
        options.target,
        options.drafters,
        controller="plain",
        precision=precision,
        device=options.device,
        prefix_cache_bytes=0,
        **exact,
    )


def make_arms(
    options: Options, decoders: dict[str, SpeculativeDecoder], policies: dict[str, Policy]
) -> tuple[list[Arm], list[str]]:
    """Every arm, and a line for each that could not be had."""
    unquantised = next((name for name in options.precisions if name != "int8"), "fp32")
    theirs = "fp32" if options.device == "cpu" else unquantised
    eos_ids = next(iter(decoders.values())).target.eos_ids
    peers = [
        transformers_peers(options.target, theirs, options.device, options.assistant),
        llama_peers(options.target, options.device, eos_ids),
    ]
    arms = [arm for peer in peers for arm in peer.arms]
    missing = [line for peer in peers for line in peer.missing]
    usable = {name: policy for name, policy in policies.items() if set(policy.menu.drafters) <= set(options.drafters)}
    missing += [f"policy {name}: it drafts with others than --drafters" for name in policies if name not in usable]
    for precision, decoder in decoders.items():
        arms += our_arms(decoder, precision, options.controllers, {})
        for name, policy in usable.items():
            arms += our_arms(with_menu(decoder, policy), precision, [], {name: policy})
    return arms, missing


def with_menu(decoder: SpeculativeDecoder, policy: Policy) -> SpeculativeDecoder:
    """The same engine with the policy's menu."""
    return SpeculativeDecoder(replace(decoder.parts, menu=policy.menu), decoder.controller, decoder.target)


def run_arms(
    options: Options, decoders: dict[str, SpeculativeDecoder], policies: dict[str, Policy], workload: Workload
) -> dict[str, Any]:
    """The interleaved run: its part of the document. Prints its table."""
    arms, missing = make_arms(options, decoders, policies)
    with tqdm(total=workload.num_requests, unit="request", desc=f"{len(arms)} arms") as bar:
        runs = run_all(workload, arms, next(iter(decoders.values())), options.max_new_tokens, bar.update)
    rows, table = summarise(runs, arms, options.seed)
    print(f"\n{len(runs.groups)} requests in {len(set(runs.groups))} groups\n{aligned(table)}\n")
    return {
        "arms": rows,
        "figures": figures(runs, options.precisions, options.seed),
        "missing": missing,
        "requests": len(runs.groups),
        "groups": len(set(runs.groups)),
    }


def pass_costs(options: Options, decoder: SpeculativeDecoder) -> dict[str, Any]:
    """For each context the plain step's median milliseconds and v(k) with intervals."""
    runner, lengths = decoder.parts.runner, decoder.parts.menu.lengths
    found = {}
    for context in fitting(options.contexts, lengths, runner):
        seconds = time_passes(runner, lengths, context, options.rounds)
        ratios = verify_ratios(seconds, options.seed)
        plain = float(np.median(seconds[0])) * 1e3
        found[str(context)] = {"plain_ms": plain, "v": {str(k): asdict(ratio) for k, ratio in ratios.items()}}
    return found


def reached(decoder: SpeculativeDecoder, bandwidth: float, costs: dict[str, Any]) -> dict[str, float]:
    """The bound of a precision, and the share of it that the plain step reaches at the shortest context."""
    bound = roofline(decoder.parts.runner, bandwidth)
    plain = next(iter(costs.values()))["plain_ms"] / 1e3
    return asdict(bound) | {"share": 1.0 / (plain * bound.tokens_per_second)}


def take_apart(
    options: Options, decoders: dict[str, SpeculativeDecoder], policies: dict[str, Policy], workload: Workload
) -> list[dict[str, Any]]:
    """Where the time of a step goes, for every precision and some k."""
    policy = next(iter(policies.values()), None)
    found = []
    for precision, decoder in decoders.items():
        asked: Policy | str = "heuristic"
        if policy and set(policy.menu.drafters) <= set(decoder.parts.drafters):
            asked, decoder = policy, with_menu(decoder, policy)
        prompt = some_text(decoder, workload, BREAKDOWN_CONTEXT)
        for taken in break_down(decoder, asked, prompt, BREAKDOWN_LENGTHS, BREAKDOWN_STEPS, BREAKDOWN_ROUNDS):
            found.append({"precision": precision, "controller": str(getattr(asked, "name", asked)), **told(taken)})
    return found


def some_text(decoder: SpeculativeDecoder, workload: Workload, tokens: int) -> list[int]:
    """The prompts' words as one text of at most so many tokens, with room behind them for the steps."""
    room = decoder.parts.runner.max_context - (BREAKDOWN_STEPS + 2) * (max(BREAKDOWN_LENGTHS) + 1)
    text = "\n\n".join(message.content for talk in workload.conversations for message in talk.messages)
    return decoder.encode(text)[: max(1, min(tokens, room))]


def told(taken: Breakdown) -> dict[str, Any]:
    """A breakdown as JSON, in milliseconds."""
    return {
        "k": taken.k,
        "parts_ms": {part: seconds * 1e3 for part, seconds in taken.parts.items()},
        "sum_ms": taken.sum * 1e3,
        "whole_ms": taken.whole * 1e3,
        "by_difference": list(taken.by_difference),
        "inside": taken.inside,
    }


def report(options: Options, document: dict[str, Any]) -> None:
    """The document to the files that were asked for, with the plot beside it, and on standard output."""
    path = options.json or (options.out / "engine.json" if options.out else None)
    try:
        if path:
            write_json(path, document)
            plot_engine(document, path.with_suffix(".png"))
    finally:  # a disk that is full takes only the files
        print(json.dumps(document), flush=True)
