"""Judge exported policies against plain decoding and every fixed draft length, live and interleaved."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from tqdm import tqdm
from tyro.conf import UseAppendAction

from agents.evaluation import PLAIN, Judgement, judge
from agents.plots import plot_judgement
from agents.prompt_files import load_prompts
from agents.report import kinds_table, table
from engine import Menu, Policy, SpeculativeDecoder, command_line, load_policy
from engine.costs import machine_fingerprint
from engine.decoder import DEFAULT_CACHE_BYTES
from engine.errors import PolicyError, SettingError, StorageError
from engine.storage import write_json
from envs.workloads import BUNDLED

DEFAULT_POLICY = Path("checkpoints/local")


@dataclass(frozen=True)
class Options:
    policy: Annotated[list[Path], UseAppendAction] = field(default_factory=list)
    """Folder of an exported policy; default: checkpoints/local. Several must be made for one menu."""
    target: str | None = None
    """The model; default: what the first policy was trained with."""
    precision: str | None = None
    """fp32, bf16, fp16 or int8; default: what the first policy was trained with."""
    exact: str | None = None
    """What makes the tokens plain decoding's: bitwise, guarded or off; default: the best that costs little."""
    device: str = "cpu"
    """cpu or cuda."""
    controllers: list[str] = field(default_factory=list)
    """Further controllers to judge: heuristic, cost-model, threshold:T, fresh."""
    workload: Annotated[list[str], UseAppendAction] = field(default_factory=list)
    """Prompts: bundled (the default), or a file (chat JSONL, Spec-Bench JSONL, documents with questions, one prompt a
    line). Several are one workload."""
    split: Literal["train", "validation", "test", "all"] = "test"
    """Which part of the workload."""
    requests: int = 16
    """How many requests, balanced over kinds; 0 takes all."""
    max_new_tokens: int = 64
    """New tokens of a request at most."""
    guard: bool = True
    """Let policies fall back to plain decoding where they are slower, as when deployed."""
    prefix_cache_mib: int = DEFAULT_CACHE_BYTES >> 20
    """Memory for each arm's cached prefixes in MiB; 0 turns the caches off."""
    seed: int = 0
    """Which requests are sampled."""
    json: Path | None = None
    """Write the whole judgement, request by request, to this file too."""
    plot: Path | None = None
    """Draw the speed-ups into this PNG file; default: evaluation.png beside the first policy."""


def main(options: Options) -> None:
    if options.requests < 0:
        raise SettingError(f"requests is {options.requests}; give a number of requests, or 0 for all")
    if options.seed < 0:
        raise SettingError(f"seed is {options.seed}; give a seed from 0")
    folders = options.policy or [DEFAULT_POLICY]
    policies = {folder: load_policy(folder) for folder in dict.fromkeys(folders)}
    check_menus(policies)
    split = None if options.split == "all" else options.split
    workload = load_prompts(options.workload or [BUNDLED], split)
    if 0 < options.requests < workload.num_requests:
        workload = workload.sample(options.requests, options.seed)
    decoder = load_decoder(options, policies[folders[0]])
    arms = make_arms(policies, options.controllers)
    with tqdm(total=workload.num_requests, unit="request", desc=f"{len(arms)} arms") as bar:
        judgement = judge(decoder, arms, workload, options.max_new_tokens, bar.update, options.guard)
    print(table(judgement), kinds_table(judgement), sep="\n\n")
    report(options, judgement, list(policies))
    try:
        plot_judgement(judgement, options.plot or folders[0] / "evaluation.png")
    except StorageError as error:
        print(f"the plot is left out: {error}", file=sys.stderr)


def check_menus(policies: Mapping[Path, Policy]) -> None:
    """Raise `PolicyError` for policies that one engine cannot serve."""
    (first, reference), *others = policies.items()
    for folder, policy in others:
        if policy.menu != reference.menu:
            raise PolicyError(
                f"{folder} was made for menu {policy.menu}, {first} for {reference.menu}; judge them one by one"
            )


def load_decoder(options: Options, policy: Policy) -> SpeculativeDecoder:
    """A policy's engine, where nothing else was asked for."""
    return SpeculativeDecoder.from_pretrained(
        options.target or policy.target,
        drafter=list(policy.menu.drafters),
        controller=PLAIN,
        menu=policy.menu,
        precision=options.precision or policy.precision,
        device=options.device,
        prefix_cache_bytes=options.prefix_cache_mib << 20,
        exact=options.exact,
    )


def report(options: Options, judgement: Judgement, policies: Sequence[Path]) -> None:
    """The judgement as JSON: whole to a file if one was named, without its requests on standard output."""
    document = judgement.to_json() | {
        "policies": [str(folder) for folder in policies],
        "guard": options.guard,
        "machine": machine_fingerprint(options.device),
    }
    try:
        if options.json:
            write_json(options.json, document)
    finally:  # a disk that is full takes only the file
        print(json.dumps({name: value for name, value in document.items() if name != "outcomes"}), flush=True)


def make_arms(policies: Mapping[Path, Policy], controllers: list[str]) -> dict[str, str | Policy]:
    """Plain decoding, every fixed draft length of every drafter, what else was asked for, and the policies.

    Policies of one name are told apart by their folders.
    """
    arms: dict[str, str | Policy] = {PLAIN: PLAIN}
    menu = next(iter(policies.values())).menu
    arms |= {name: name for name in (*fixed_arms(menu), *controllers)}
    names = [policy.name for policy in policies.values()]
    for folder, policy in policies.items():
        where = f" in {folder}" if names.count(policy.name) > 1 else ""
        arms[f"policy {policy.name}{where}"] = policy
    return arms


def fixed_arms(menu: Menu) -> list[str]:
    """`fixed:4` for a menu's only drafter, `fixed:4:ngram` where there are several."""
    several = len(menu.drafters) > 1
    actions = [action for action in menu.actions if action.reuse and action.k > 0]
    return [f"fixed:{action.k}:{action.drafter}" if several else f"fixed:{action.k}" for action in actions]


if __name__ == "__main__":
    command_line.run(Options, main, "Judge policies against plain decoding and every fixed draft length.")
