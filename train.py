"""Learn a controller on the real engine: calibrate -> train live -> check on held-back requests -> export."""

from __future__ import annotations

import platform
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import gymnasium

import envs
from agents import UCB
from agents.evaluation import judge
from agents.plots import plot_curve
from agents.report import table
from agents.tracking import Tracker
from agents.training import Training
from engine import Policy, command_line
from engine.costs import machine_fingerprint
from engine.errors import PolicyError, SamplingError
from engine.storage import write_json
from envs.live import SpeculativeDecodingEnv
from envs.workloads import Workload, load_workload


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
    check_requests: int = 8
    """Validation requests that the learned policy is checked on; 0 skips the check."""
    seed: int = 0
    """Order of the requests and ties of the agent."""
    out: Path = Path("checkpoints/local")
    """Folder for the policy, the learning curve and the run's state."""
    resume: bool = False
    """Go on from the state in --out."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Log the learning curve to Weights & Biases as well."""


def main(options: Options) -> None:
    if options.steps < 1 or options.seed < 0:
        raise SamplingError(f"steps is {options.steps}, seed is {options.seed}; give at least 1 step and a seed from 0")
    validation = held_back(options)
    env = make_env(options)
    print(f"calibrated: {describe_costs(env)}", file=sys.stderr)
    learner = UCB(env.menu, env.schema, seed=options.seed)
    training = Training(env, learner, options.out, options.seed)
    if options.resume and not training.resume():
        raise PolicyError(f"{options.out} holds no state to resume; train without --resume first")
    write_json(options.out / "config.json", asdict(options) | {"out": str(options.out)})
    tracker = Tracker(options.wandb, asdict(options), options.out)
    try:
        training.run(options.steps, tracker.log)
    except KeyboardInterrupt:
        print(f"interrupted after {training.steps_done} steps; exporting what was learned", file=sys.stderr)
        export(options, env, learner, training)
        raise
    finally:
        tracker.close()
    policy = export(options, env, learner, training)
    if validation:
        check(options, env, policy, validation)


def held_back(options: Options) -> Workload | None:
    """The requests of the check, read before the training so that it is not lost on a file that has none."""
    if not options.check_requests:
        return None
    workload = load_workload(options.workload, "validation")
    return workload.sample(min(options.check_requests, workload.num_requests), options.seed)


def make_env(options: Options) -> SpeculativeDecodingEnv:
    """The live environment with its engine loaded and calibrated."""
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
    ).unwrapped
    assert isinstance(env, SpeculativeDecodingEnv)
    assert env.decoder
    return env


def export(options: Options, env: SpeculativeDecodingEnv, learner: UCB, training: Training) -> Policy:
    """Write the policy with all that a reader needs to trust it."""
    policy = Policy(learner.name, env.menu, learner.head(), env.costs, provenance(options, training.steps_done))
    policy.save(options.out)
    plot_curve(training.curve, options.out / "curve.png")
    print(f"exported the policy to {options.out}", file=sys.stderr)
    return policy


def check(options: Options, env: SpeculativeDecodingEnv, policy: Policy, workload: Workload) -> None:
    """The policy against plain decoding on validation requests, on the live engine."""
    judgement = judge(env.decoder, {"plain": "plain", policy.name: policy}, workload, options.max_new_tokens)
    print(table(judgement))
    write_json(options.out / "check.json", judgement.to_json())


def provenance(options: Options, steps: int) -> dict[str, Any]:
    packages = ("torch", "transformers", "gymnasium", "numpy")
    return {
        "target": options.target,
        "precision": options.precision,
        "agent": options.agent,
        "steps": steps,
        "seed": options.seed,
        "command": " ".join(["python", *sys.argv]),
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
