"""Judge an exported policy against plain decoding and every fixed draft length, live and interleaved."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tqdm import tqdm

from agents.evaluation import PLAIN, Judgement, judge
from agents.plots import plot_judgement
from agents.report import kinds_table, table
from engine import Menu, Policy, SpeculativeDecoder, command_line, load_policy
from engine.costs import machine_fingerprint
from engine.decoder import DEFAULT_CACHE_BYTES
from engine.errors import SettingError, StorageError
from engine.storage import write_json
from envs.workloads import load_workload


@dataclass(frozen=True)
class Options:
    policy: Path = Path("checkpoints/local")
    """Folder of an exported policy."""
    target: str | None = None
    """The model; default: what the policy was trained with."""
    precision: str | None = None
    """fp32, bf16 or fp16; default: what the policy was trained with."""
    device: str = "cpu"
    """cpu or cuda."""
    controller: list[str] = field(default_factory=list)
    """Further controllers to judge: heuristic, threshold:T, fresh."""
    workload: str = "bundled"
    """Prompts: bundled, or a file (chat JSONL, Spec-Bench JSONL, documents with questions, one prompt a line)."""
    split: Literal["train", "validation", "test", "all"] = "test"
    """Which part of the workload."""
    requests: int = 16
    """How many requests, balanced over kinds; 0 takes all."""
    max_new_tokens: int = 64
    """New tokens of a request at most."""
    guard: bool = True
    """Let the policy fall back to plain decoding where it is slower, as when it is deployed."""
    prefix_cache_mib: int = DEFAULT_CACHE_BYTES >> 20
    """Memory for each arm's cached prefixes in MiB; 0 turns the caches off."""
    seed: int = 0
    """Which requests are sampled."""
    json: Path | None = None
    """Write the whole judgement, request by request, to this file too."""
    plot: Path | None = None
    """Draw the speed-ups into this PNG file; default: evaluation.png beside the policy."""


def main(options: Options) -> None:
    if options.requests < 0:
        raise SettingError(f"requests is {options.requests}; give a number of requests, or 0 for all")
    if options.seed < 0:
        raise SettingError(f"seed is {options.seed}; give a seed from 0")
    policy = load_policy(options.policy)
    workload = load_workload(options.workload, None if options.split == "all" else options.split)
    if 0 < options.requests < workload.num_requests:
        workload = workload.sample(options.requests, options.seed)
    decoder = load_decoder(options, policy)
    arms = make_arms(policy, options.controller)
    with tqdm(total=workload.num_requests, unit="request", desc=f"{len(arms)} arms") as bar:
        judgement = judge(decoder, arms, workload, options.max_new_tokens, bar.update, options.guard)
    print(table(judgement), kinds_table(judgement), sep="\n\n")
    report(options, judgement)
    try:
        plot_judgement(judgement, options.plot or options.policy / "evaluation.png")
    except StorageError as error:
        print(f"the plot is left out: {error}", file=sys.stderr)


def load_decoder(options: Options, policy: Policy) -> SpeculativeDecoder:
    """The policy's engine, where nothing else was asked for."""
    return SpeculativeDecoder.from_pretrained(
        options.target or policy.target,
        drafter=list(policy.menu.drafters),
        controller=PLAIN,
        menu=policy.menu,
        precision=options.precision or policy.precision,
        device=options.device,
        prefix_cache_bytes=options.prefix_cache_mib << 20,
    )


def report(options: Options, judgement: Judgement) -> None:
    """The judgement as JSON: whole to a file if one was named, without its requests on standard output."""
    document = judgement.to_json() | {
        "policy": str(options.policy),
        "guard": options.guard,
        "machine": machine_fingerprint(options.device),
    }
    try:
        if options.json:
            write_json(options.json, document)
    finally:  # a disk that is full takes only the file
        print(json.dumps({name: value for name, value in document.items() if name != "outcomes"}), flush=True)


def make_arms(policy: Policy, controllers: list[str]) -> dict[str, str | Policy]:
    """Plain decoding, every fixed draft length of every drafter, what else was asked for, and the policy."""
    arms: dict[str, str | Policy] = {PLAIN: PLAIN}
    arms |= {name: name for name in fixed_arms(policy.menu)}
    arms |= {name: name for name in controllers}
    return arms | {f"policy {policy.name}": policy}


def fixed_arms(menu: Menu) -> list[str]:
    """`fixed:4` for a menu's only drafter, `fixed:4:ngram` where there are several."""
    several = len(menu.drafters) > 1
    actions = [action for action in menu.actions if action.reuse and action.k > 0]
    return [f"fixed:{action.k}:{action.drafter}" if several else f"fixed:{action.k}" for action in actions]


if __name__ == "__main__":
    command_line.run(Options, main, "Judge a policy against plain decoding and every fixed draft length.")
