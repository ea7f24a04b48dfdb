"""How long an exported policy takes to decide with numpy alone, and whether it decides as what was trained.

A short training on replay gives a PPO agent as Stable-Baselines3 holds it; its export decides in a process without
torch. Both are asked the same observations. The agent computes in float64 where it is compared, as the export does: in
float32 two scores may come within rounding, which is counted besides. A policy's own folder is timed as well.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import torch
from safetensors.numpy import save_file
from stable_baselines3 import PPO
from tyro.conf import UseAppendAction

from agents.network import greedy, standardisation
from agents.ppo import MaskedPolicy
from agents.sb3_env import ReplayVecEnv
from agents.visits import random_walk
from benchmarks.recordings import load_engine, record_split
from engine import Policy, load_policy
from engine.costs import CostTable
from engine.errors import DraftgateError, SettingError
from engine.menu import Menu
from engine.storage import write_json
from envs.replay_session import ReplaySession
from envs.trace import TraceSet
from envs.vector import ReplayBatch
from envs.workloads import BUNDLED

LANES = 64
TIMED_REQUESTS = 20


@dataclass(frozen=True)
class Options:
    policy: Path = Path("checkpoints/default")
    """Folder of an exported policy."""
    workload: Annotated[list[str], UseAppendAction] = field(default_factory=list)
    """Prompts that observations are taken from: bundled (the default), or a file."""
    requests: int = 0
    """Requests of the test split at most, balanced over kinds; 0 takes all."""
    max_new_tokens: int = 96
    """New tokens of a request at most."""
    observations: int = 10_000
    """How many the agent and its export are asked."""
    steps: int = 30_000
    """Steps that the agent is trained on."""
    json: Path | None = None
    """Write the result to this file too."""


def main(options: Options) -> None:
    if options.observations < 1 or options.steps < 1:
        raise SettingError("observations and steps must be 1 or more")
    policy = load_policy(options.policy)
    decoder = load_engine(policy.target, policy.menu.drafters, policy.precision)
    sources = options.workload or [BUNDLED]
    traces = record_split(decoder, sources, "test", options.requests, options.max_new_tokens)
    vectors, masks = sampled(traces, policy.menu, policy.costs, options.observations)
    agent = train(traces, policy.menu, policy.costs, options.steps)
    with TemporaryDirectory() as name:
        folder = Path(name)
        Policy("ppo", policy.menu, agent.head(), policy.costs).save(folder)
        ppo = decide_apart(folder, vectors, masks, folder)
        shipped = decide_apart(options.policy, vectors, masks, folder)
    result = {
        "observations": len(vectors),
        "threads": torch.get_num_threads(),
        "round_trip": {
            "differing": int((ppo.actions != actions_of(agent, vectors, masks, torch.float64)).sum()),
            "differing_float32": int((ppo.actions != actions_of(agent, vectors, masks, torch.float32)).sum()),
            "actions_used": len(set(ppo.actions.tolist())),
        },
        "ppo": ppo.timing(),
        "policy": shipped.timing()
        | {
            "name": policy.name,
            "differing": int((shipped.actions != greedy(policy.head)(vectors, masks)).sum()),
            "controller_median": controller_median(policy, traces),
        },
    }
    print(described(result))
    if options.json:
        write_json(options.json, result)
    print(json.dumps(result), flush=True)


class DeciderError(DraftgateError):
    """The process without torch did not come to its end; the message holds its last line."""


@dataclass(frozen=True, eq=False)
class Decisions:
    """What the process without torch did.

    Attributes:
        actions: int64 `[N]`.
        median: microseconds of a decision.
        low, high: ends of the middle 98 % of them.
    """

    actions: np.ndarray
    median: float
    low: float
    high: float

    def timing(self) -> dict[str, float]:
        return {"median": self.median, "low": self.low, "high": self.high}


def decide_apart(policy: Path, vectors: np.ndarray, masks: np.ndarray, folder: Path) -> Decisions:
    """Let a fresh process without torch decide observations under masks, one at a time.

    Args:
        policy: the exported policy's folder.
        vectors: float32 `[N, F]`.
        masks: bool `[N, A]`.
        folder: where a file may be put.

    Raises:
        DeciderError: the process failed, for example because something asked for torch.
    """
    shown = folder / "observations.safetensors"
    save_file({"vectors": np.ascontiguousarray(vectors), "masks": np.ascontiguousarray(masks)}, shown)
    words = [sys.executable, "-m", "benchmarks.decider", str(policy.resolve()), str(shown.resolve())]
    ended = subprocess.run(words, cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=False)
    if ended.returncode:
        last = (ended.stderr.strip().splitlines() or ["no message"])[-1]
        raise DeciderError(f"the process that decides without torch failed: {last}")
    told = json.loads(ended.stdout.splitlines()[-1])
    return Decisions(np.array(told["actions"]), told["median"], told["low"], told["high"])


def sampled(traces: TraceSet, menu: Menu, costs: CostTable, count: int) -> tuple[np.ndarray, np.ndarray]:
    """`count` observations float32 `[N, F]` and masks bool `[N, A]`, as random actions meet them."""
    vectors, masks = random_walk(ReplayBatch(traces, costs, menu, LANES), (count - 1) // LANES, seed=0)
    return vectors[:count], masks[:count]


def train(traces: TraceSet, menu: Menu, costs: CostTable, steps: int) -> MaskedPolicy:
    """The agent, trained just long enough to be no random network any more."""
    center, scale = standardisation(sampled(traces, menu, costs, 4096)[0])
    learner = PPO(
        MaskedPolicy,
        ReplayVecEnv(ReplayBatch(traces, costs, menu, LANES)),
        n_steps=32,
        batch_size=512,
        gamma=1.0,
        learning_rate=1e-3,
        seed=0,
        device="cpu",
        policy_kwargs={"menu": menu, "center": center, "scale": scale},
    )
    learner.learn(steps)
    assert isinstance(learner.policy, MaskedPolicy)
    return learner.policy


def actions_of(agent: MaskedPolicy, vectors: np.ndarray, masks: np.ndarray, precision: torch.dtype) -> np.ndarray:
    """The agent's likeliest actions int64 `[N]`, computed by torch in a precision."""
    agent.to(precision)
    with torch.no_grad():
        distribution: Any = agent.get_distribution(torch.from_numpy(vectors).to(precision)).distribution
    return np.asarray(np.where(masks, distribution.logits.numpy(), -np.inf).argmax(axis=1))


def controller_median(policy: Policy, traces: TraceSet) -> float:
    """Median microseconds of a whole choice in an engine: from the observation to its vector to the action."""
    controller, spent = policy.controller(), []
    for index in range(min(len(traces), TIMED_REQUESTS)):
        session = ReplaySession(traces, index, policy.menu, policy.costs)
        while not session.finished:
            observation, mask = session.observe(), session.mask()
            started = time.perf_counter_ns()
            action = controller.choose(observation, mask)
            spent.append(time.perf_counter_ns() - started)
            session.step(action)
    return float(np.median(spent)) / 1e3


def described(result: Mapping[str, Any]) -> str:
    """The result for people."""
    ppo, policy, trip = result["ppo"], result["policy"], result["round_trip"]
    lines = [
        f"without torch, microseconds of a decision: median of {result['observations']}, middle 98 %",
        *(
            f"{name}: {told['median']:.1f} ({told['low']:.1f} to {told['high']:.1f})"
            for name, told in (("ppo trained here", ppo), (f"policy {policy['name']}", policy))
        ),
        f"policy {policy['name']} in an engine, with its observation's vector: {policy['controller_median']:.1f}",
        f"round trip of the agent trained here, {trip['actions_used']} different actions: {trip['differing']} of "
        f"{result['observations']} decisions differ ({trip['differing_float32']} where the agent computes in float32)",
        f"policy {policy['name']}: {policy['differing']} decisions differ from many at once in this process",
    ]
    return "\n".join(lines)
