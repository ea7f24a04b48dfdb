"""Learn a controller: calibrate -> record -> train on replay -> validate -> export -> check live."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import UseAppendAction

from agents.pipeline import Pipeline
from agents.provenance import provenance
from agents.run_folder import RunFolder
from agents.stages import stage
from agents.tracking import Tracker
from agents.trainers import AGENTS, COSTS, STEPS, training_costs
from engine import Menu, SpeculativeDecoder, command_line
from engine.decoder import DEFAULT_CACHE_BYTES
from engine.errors import MenuError, SettingError
from engine.exactness import check_exact
from engine.menu import default_menu, parse_menu
from envs.workloads import BUNDLED, Workload, load_workload
from envs.workloads.splits import unknown_name

MOST_SEED, MOST_SEEDS = 2**32 - 1, 1000  # numpy takes no greater seed
WANDB = ("off", "offline", "online")
EXPORTS = ("best", "learned")


@dataclass(frozen=True)
class Options:
    agent: str = "ppo"
    """Who learns: ppo, counterfactual, or a bandit: bandit (UCB), thompson, exp3, linear."""
    target: str = "smollm2-135m"
    """The model: a bundled name, a Hugging Face folder, a .gguf file, or a hub id."""
    drafter: Annotated[list[str], UseAppendAction] = field(default_factory=list)
    """Who drafts: ngram (the default), ngram:history, model:<name>."""
    workload: Annotated[list[str], UseAppendAction] = field(default_factory=list)
    """Prompts: bundled (the default), or a file (chat JSONL, Spec-Bench JSONL, documents with questions, one prompt a
    line). Several are one workload."""
    precision: str = "fp32"
    """fp32, bf16, fp16 or int8."""
    exact: str | None = None
    """What makes the tokens plain decoding's: bitwise, guarded or off; default: the best that costs little."""
    device: str = "cpu"
    """cpu or cuda."""
    menu: str | None = None
    """Actions, for example fresh/0,reuse/0,reuse/2,reuse/8; default: reuse/0 to reuse/8 and fresh/0."""
    steps: int | None = None
    """Decoding steps for each seed to learn from (counterfactual: rounds over all traces); default: the agent's own."""
    max_new_tokens: int = 96
    """New tokens of a request at most."""
    prefix_cache_mib: int = DEFAULT_CACHE_BYTES >> 20
    """Memory for cached prefixes in MiB; 0 turns the cache off."""
    seed: int = 0
    """Order of the requests, first weights and draws of the agent."""
    seeds: int = 1
    """How many seeds to train, counted from --seed; the best one on the validation traces is exported."""
    costs: str = "measured"
    """What steps cost in training: measured (this machine's), or randomised (of many machines, for a policy that only
    needs calibration elsewhere)."""
    check_requests: int = 8
    """Validation requests that the policy is checked on live; 0 skips the check."""
    export: str = "best"
    """What is exported: best (the policy of the best seed, or a simple rule where no seed is faster on the validation
    requests), or learned (that policy in any case)."""
    out: Path = Path("checkpoints/local")
    """Folder for the policy, its card, and the run's state."""
    resume: bool = False
    """Go on with the run in --out, with the settings that it was begun with; more --seeds may be asked for."""
    overwrite: bool = False
    """Begin anew although --out holds a run, which is lost."""
    wandb: str = "off"
    """Log the figures to Weights & Biases as well: off, offline or online."""


def main(options: Options) -> None:
    options = settle(options)
    menu = settle_menu(options)
    train, validation = (load_workload(options.workload, split) for split in ("train", "validation"))
    config = describe(options, menu, [train, validation])
    folder = RunFolder(options.out, config, options.resume, options.overwrite)
    folder.check()
    with stage("model", f"loading {options.target}"):
        decoder = load_decoder(options, menu)
    tracker = Tracker(options.wandb, config, options.out)
    pipeline = Pipeline(decoder, folder, tracker)
    try:
        run(pipeline, options, train, validation)
    except KeyboardInterrupt:
        pipeline.rescue()
        raise
    finally:
        folder.release()
        tracker.close()


def run(pipeline: Pipeline, options: Options, train: Workload, validation: Workload) -> None:
    """Every stage in its order."""
    costs = pipeline.measure(options.resume)
    tables = training_costs(options.costs, costs, pipeline.menu, options.seed)
    pipeline.record(train, validation, options.max_new_tokens, costs, tables)
    assert options.steps is not None
    pipeline.train(options.agent, options.steps, seeds_of(options))
    pipeline.validate()
    pipeline.export(rules=options.export == "best")
    if options.check_requests:
        pipeline.check(validation.at_most(options.check_requests, options.seed), options.max_new_tokens)


def settle(options: Options) -> Options:
    """The options with defaults that depend on others filled in. Raises `SettingError` for any out of its range."""
    for name, value, known in (
        ("agent", options.agent, AGENTS),
        ("costs", options.costs, COSTS),
        ("export", options.export, EXPORTS),
        ("wandb mode", options.wandb, WANDB),
    ):
        if value not in known:
            raise SettingError("; ".join(unknown_name(name, value, known)))
    steps = STEPS[options.agent] if options.steps is None else options.steps
    for name, number, least in (
        ("steps", steps, 1),
        ("seed", options.seed, 0),
        ("seeds", options.seeds, 1),
        ("max-new-tokens", options.max_new_tokens, 1),
        ("check-requests", options.check_requests, 0),
        ("prefix-cache-mib", options.prefix_cache_mib, 0),
    ):
        if number < least:
            raise SettingError(f"--{name} is {number}; give {least} or more")
    if options.seeds > MOST_SEEDS:
        raise SettingError(f"--seeds is {options.seeds}; give {MOST_SEEDS} or less")
    if (last := options.seed + options.seeds - 1) > MOST_SEED:
        raise SettingError(f"--seed and --seeds come to seed {last}; give seeds up to {MOST_SEED}")
    check_exact(options.exact)
    check_names(options)
    drafter, workload = options.drafter or ["ngram"], options.workload or [BUNDLED]
    return replace(options, steps=steps, drafter=drafter, workload=workload)


def check_names(options: Options) -> None:
    """Raise `SettingError` for a folder that is none of the run's own, and for what its card could not tell."""
    if not options.out.name:
        raise SettingError(f"--out is empty or no folder of the run's own ({options.out}); name one to be made")
    for option, names in (
        ("out", [str(options.out)]),
        ("target", [options.target]),
        ("drafter", options.drafter),
        ("workload", options.workload),
    ):
        for name in names:
            if name.encode("utf-8", "replace").decode() != name:
                raise SettingError(f"--{option} {name!r} is not UTF-8; give a name that is")


def settle_menu(options: Options) -> Menu:
    """The menu that was asked for, or the default one. Raises `MenuError` for one that there is nothing to learn on."""
    menu = parse_menu(options.menu, options.drafter) if options.menu else default_menu(options.drafter)
    if not menu.lengths:
        raise MenuError(f"the menu {menu} drafts nothing, so there is nothing to learn; add lengths, as reuse/4")
    for action in menu.actions:
        # The rules that a policy is held against, and calibration, draft under reuse.
        if action.k and (twin := replace(action, reuse=True)) not in menu.actions:
            raise MenuError(f"the menu {menu} holds {action} without {twin}; add that")
    return menu


def seeds_of(options: Options) -> range:
    return range(options.seed, options.seed + options.seeds)


def load_decoder(options: Options, menu: Menu) -> SpeculativeDecoder:
    return SpeculativeDecoder.from_pretrained(
        options.target,
        drafter=options.drafter,
        controller="plain",
        menu=menu,
        precision=options.precision,
        device=options.device,
        prefix_cache_bytes=options.prefix_cache_mib << 20,
        exact=options.exact,
    )


def describe(options: Options, menu: Menu, prompts: Sequence[Workload]) -> dict[str, Any]:
    """The options with what they came to and where the run was made, as config.json keeps them."""
    found = {
        "menu": str(menu),
        "seeds": list(seeds_of(options)),
        "workload_fingerprint": "-".join(workload.fingerprint for workload in prompts),
        "out": str(options.out),
    }
    return asdict(options) | found | provenance(options.device)


if __name__ == "__main__":
    command_line.run(
        Options, main, "Learn a controller for speculative decoding on recorded traces of the real engine."
    )
