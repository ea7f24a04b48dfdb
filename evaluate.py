"""Judge exported policies against plain decoding and the simple rules, live and interleaved.

The rules are every fixed draft length of every drafter, and for a policy that cuts its drafts the longest draft with
the same cut, `threshold:T`, or `threshold:T:DRAFTER` where there are several. They need no learning: a policy is
worth its name only where it beats them.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from tqdm import tqdm
from tyro.conf import UseAppendAction

from agents.evaluation import PLAIN, Judgement, judge
from agents.plots import plot_judgement
from agents.report import kinds_table, table
from engine import Policy, SpeculativeDecoder, command_line, load_policy
from engine.controller_names import make_controller
from engine.controllers import fixed_name, threshold_name
from engine.costs import machine_fingerprint
from engine.cuts import cut_of
from engine.decoder import DEFAULT_CACHE_BYTES
from engine.errors import PolicyError, SettingError, StorageError
from engine.storage import write_json
from envs.workloads import BUNDLED, load_workload

DEFAULT_POLICY = Path("checkpoints/local")


@dataclass(frozen=True)
class Options:
    policy: Annotated[list[Path], UseAppendAction] = field(default_factory=list)
    """Folder of an exported policy; default: checkpoints/local. Several must be made for one menu, and for
    one target and precision unless these are given."""
    target: str | None = None
    """The model; default: what the policies were trained with."""
    precision: str | None = None
    """fp32, bf16, fp16 or int8; default: what the policies were trained with."""
    exact: str | None = None
    """What makes the tokens plain decoding's: bitwise, guarded or off; default: the best that costs little."""
    device: str = "cpu"
    """cpu or cuda."""
    controllers: list[str] = field(default_factory=list)
    """Controllers to judge beside plain decoding, the fixed draft lengths and the policies' own thresholds: heuristic,
    cost-model, threshold:T, threshold:T:DRAFTER, fresh."""
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
    check_numbers(options)
    folders = options.policy or [DEFAULT_POLICY]
    policies = {folder: load_policy(folder) for folder in dict.fromkeys(folders)}
    check_together(policies, options)
    if not options.workload:
        tell_of_other_prompts(policies)
    arms = make_arms(policies, options.controllers)
    split = None if options.split == "all" else options.split
    workload = load_workload(options.workload or [BUNDLED], split).at_most(options.requests, options.seed)
    decoder = load_decoder(options, policies[folders[0]])
    with tqdm(total=workload.num_requests, unit="request", desc=f"{len(arms)} arms") as bar:
        judgement = judge(decoder, arms, workload, options.max_new_tokens, bar.update, options.guard)
    print(table(judgement), kinds_table(judgement), sep="\n\n")
    report(options, judgement, list(policies))
    try:
        plot_judgement(judgement, options.plot or folders[0] / "evaluation.png")
    except StorageError as error:
        print(f"the plot is left out: {error}", file=sys.stderr)


def check_numbers(options: Options) -> None:
    """Raise `SettingError` for a number out of its range."""
    if options.requests < 0:
        raise SettingError(f"requests is {options.requests}; give a number of requests, or 0 for all")
    if options.seed < 0:
        raise SettingError(f"seed is {options.seed}; give a seed from 0")
    if options.max_new_tokens < 1:
        raise SettingError(f"max-new-tokens is {options.max_new_tokens}; give 1 or more")


def check_together(policies: Mapping[Path, Policy], options: Options) -> None:
    """Raise `PolicyError` for policies that one engine cannot serve: what differs must have been given."""
    (first, reference), *others = policies.items()
    for folder, policy in others:
        for what, ours, theirs, given in (
            ("menu", policy.menu, reference.menu, None),
            ("target", policy.target, reference.target, options.target),
            ("precision", policy.precision, reference.precision, options.precision),
        ):
            if given is None and ours != theirs:
                mend = "judge them one by one" + ("" if what == "menu" else f", or give --{what} for all")
                raise PolicyError(f"{folder} was made for {what} {ours}, {first} for {theirs}; {mend}")


def tell_of_other_prompts(policies: Mapping[Path, Policy]) -> None:
    """Say which policies have learned from other prompts than the bundled ones, on which they are judged."""
    for folder, policy in policies.items():
        learned_from = policy.provenance.get("workload", [BUNDLED])
        if isinstance(learned_from, list) and learned_from != [BUNDLED]:
            options = shlex.join(word for name in learned_from for word in ("--workload", str(name)))
            print(
                f"{folder} was trained on other prompts than the bundled ones; for those give {options}",
                file=sys.stderr,
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


def make_arms(policies: Mapping[Path, Policy], controllers: Sequence[str]) -> dict[str, str | Policy]:
    """Plain decoding, every fixed draft length of every drafter, what else was asked for, each cut of a policy as a
    rule of its own, and the policies; policies of one name are told apart by their folders.

    Raises `ControllerError` or `MenuError` for a name that is no controller of the policies' menu.
    """
    reference = next(iter(policies.values()))
    menu = reference.menu
    made = {make_controller(name, menu, lambda: reference.costs).name for name in controllers}
    fixed = [fixed_name(menu, action) for action, entry in enumerate(menu.actions) if entry.reuse]
    cuts = [rule for policy in policies.values() for rule in _thresholds(policy) if rule not in made]
    arms: dict[str, str | Policy] = {name: name for name in (PLAIN, *fixed, *controllers, *cuts)}
    names = [policy.name for policy in policies.values()]
    for folder, policy in policies.items():
        where = f" in {folder}" if names.count(policy.name) > 1 else ""
        arms[f"policy {policy.name}{where}"] = policy
    return arms


def _thresholds(policy: Policy) -> list[str]:
    """A policy's cut of each drafter as a rule."""
    menu, cut = policy.menu, policy.min_confidence
    cuts = [(menu.longest(drafter), cut_of(cut, drafter)) for drafter in menu.drafters]
    return [threshold_name(menu, longest, limit) for longest, limit in cuts if limit > 0]


if __name__ == "__main__":
    command_line.run(
        Options, main, "Judge policies against plain decoding, fixed draft lengths and their own cuts as thresholds."
    )
