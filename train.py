"""Learn a controller on the real engine: calibrate -> train live -> export -> check on held-back requests."""

from __future__ import annotations

import platform
import shlex
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import gymnasium

import envs
from agents import UCB, Learner
from agents.evaluation import judge
from agents.plots import plot_curve
from agents.report import table
from agents.run_folder import check_folder
from agents.tracking import Tracker
from agents.training import Training
from engine import Policy, command_line
from engine.costs import machine_fingerprint
from engine.decoder import DEFAULT_CACHE_BYTES
from engine.errors import SettingError, WorkloadError
from engine.storage import write_json
from envs.live import SpeculativeDecodingEnv
from envs.workloads import Workload, load_workload

CHECK_FILE = "check.json"


@dataclass(frozen=True)
class Options:
    agent: Literal["bandit"] = "bandit"
    """Who learns: bandit (UCB on measured tokens per second)."""
    target: str = "smollm2-135m"
    """The model: a bundled name, a Hugging Face folder, a .gguf file, or a hub id."""
    drafter: list[str] = field(default_factory=lambda: ["ngram"])
    """Who drafts; several may be named: ngram, ngram:history, model:<name>."""
    workload: str = "bundled"
    """Prompts: bundled, or a file (chat JSONL, Spec-Bench JSONL, documents with questions, one prompt a line)."""
    menu: str | None = None
    """Actions, for example fresh/0,reuse/0,reuse/2,reuse/8; default: reuse/0 to reuse/8 and fresh/0."""
    precision: str = "fp32"
    """fp32, bf16 or fp16."""
    device: str = "cpu"
    """cpu or cuda."""
    steps: int = 4000
    """Decoding steps to learn from."""
    max_new_tokens: int = 96
    """New tokens of a request at most."""
    prefix_cache_mib: int = DEFAULT_CACHE_BYTES >> 20
    """Memory for cached prefixes in MiB; 0 turns the cache off."""
    check_requests: int = 8
    """Validation requests that the learned policy is checked on; 0 skips the check."""
    seed: int = 0
    """Order of the requests and ties of the agent."""
    out: Path = Path("checkpoints/local")
    """Folder for the policy, the learning curve and the run's state."""
    resume: bool = False
    """Go on from the state in --out, with the settings that it was learned with."""
    overwrite: bool = False
    """Begin anew although --out holds the state of a run, which is lost."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Log the learning curve to Weights & Biases as well."""


def main(options: Options) -> None:
    if options.steps < 1 or options.seed < 0:
        raise SettingError(f"steps is {options.steps}, seed is {options.seed}; give at least 1 step and a seed from 0")
    if options.check_requests < 0:
        raise SettingError(f"check_requests is {options.check_requests}; give a number of requests, or 0 for no check")
    validation = held_back(options)
    env = make_env(options)
    config = describe_run(options, env)
    check_folder(options.out, config, options.resume, options.overwrite)
    print(f"calibrated: {describe_costs(env)}", file=sys.stderr)
    learner = make_learner(options, env)
    training = Training(env, learner, options.out, options.seed, config)
    if options.resume:
        training.resume()
    policy = learn(options, env, learner, training)
    if validation:
        check(options, env, policy, validation)


def learn(options: Options, env: SpeculativeDecodingEnv, learner: Learner, training: Training) -> Policy:
    """Train and export; what was learned until an interrupt is exported too."""
    tracker = Tracker(options.wandb, asdict(options), options.out)
    try:
        training.run(options.steps, tracker.log)
    except KeyboardInterrupt:
        if training.steps_done:
            print(f"interrupted after {training.steps_done} steps; exporting what was learned", file=sys.stderr)
            export(options, env, learner, training)
        else:
            print("interrupted before the first step; nothing was written", file=sys.stderr)
        raise
    finally:
        tracker.close()
    return export(options, env, learner, training)


def held_back(options: Options) -> Workload | None:
    """The requests of the check, read before the training so that it is not lost on a file that has none."""
    if not options.check_requests:
        return None
    try:
        workload = load_workload(options.workload, "validation")
    except WorkloadError as error:
        load_workload(options.workload)  # raises where the file itself is what is wrong
        raise WorkloadError(
            f"{options.workload}: no validation rows to check the policy on; "
            'give some rows the field "split": "validation", or skip the check with --check-requests 0'
        ) from error
    return workload.sample(min(options.check_requests, workload.num_requests), options.seed)


def make_env(options: Options) -> SpeculativeDecodingEnv:
    """The live environment; its engine is loaded and calibrated at its first use."""
    env = gymnasium.make(
        envs.LIVE_ENV,
        target=options.target,
        drafter=options.drafter,
        workload=options.workload,
        split="train",
        menu=options.menu,
        max_new_tokens=options.max_new_tokens,
        precision=options.precision,
        device=options.device,
        prefix_cache_bytes=options.prefix_cache_mib << 20,
    ).unwrapped
    assert isinstance(env, SpeculativeDecodingEnv)
    return env


def make_learner(options: Options, env: SpeculativeDecodingEnv) -> Learner:
    learners = {"bandit": UCB}
    return learners[options.agent](env.menu, env.schema, seed=options.seed)


def describe_run(options: Options, env: SpeculativeDecodingEnv) -> dict[str, Any]:
    """The options with what they came to, as config.json keeps them."""
    found = {"menu": str(env.menu), "workload_fingerprint": env.workload.fingerprint, "out": str(options.out)}
    return asdict(options) | found


def export(options: Options, env: SpeculativeDecodingEnv, learner: Learner, training: Training) -> Policy:
    """Write the policy with all that a reader needs to trust it."""
    policy = Policy(
        name=learner.name,
        menu=env.menu,
        head=learner.head(),
        costs=env.costs,
        target=options.target,
        precision=options.precision,
        provenance=provenance(options, env.workload, training.steps_done),
    )
    policy.save(options.out)
    (options.out / CHECK_FILE).unlink(missing_ok=True)  # it told of the policy that is now replaced
    plot_curve(training.curve, options.out / "curve.png")
    print(f"exported the policy to {options.out}", file=sys.stderr)
    return policy


def check(options: Options, env: SpeculativeDecodingEnv, policy: Policy, workload: Workload) -> None:
    """The policy against plain decoding on validation requests, on the live engine."""
    judgement = judge(env.decoder, {"plain": "plain", policy.name: policy}, workload, options.max_new_tokens)
    print(table(judgement))
    write_json(options.out / CHECK_FILE, judgement.to_json())


def provenance(options: Options, workload: Workload, steps: int) -> dict[str, Any]:
    packages = ("torch", "transformers", "gymnasium", "numpy")
    return {
        "agent": options.agent,
        "workload": options.workload,
        "workload_fingerprint": workload.fingerprint,
        "steps": steps,
        "seed": options.seed,
        "command": shlex.join(["python", *sys.argv]),
        "machine": machine_fingerprint(options.device),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in packages},
        "git_commit": git_commit(),
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def git_commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def describe_costs(env: SpeculativeDecodingEnv) -> str:
    costs = env.costs
    ratios = ", ".join(f"v({k}) {costs.verify_ratio(k):.2f}" for k in env.menu.lengths)
    return f"plain step {costs.plain_seconds(256) * 1e3:.1f} ms; {ratios}"


if __name__ == "__main__":
    command_line.run(Options, main, "Learn a controller for speculative decoding on the real engine.")
