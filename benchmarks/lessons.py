"""One seed of any agent on replay, with the library's own settings, timed."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from agents.base import Learner
from agents.material import Material
from agents.trainers import AGENTS, BANDITS, STEPS, Trainer, make_trainer
from agents.training import Training
from engine.errors import SettingError
from engine.policy_heads import Head
from envs.workloads.splits import unknown_name


@dataclass(frozen=True, eq=False)
class Taught:
    """What a seed has learned.

    Attributes:
        name: how tables call the agent.
        head: its decisions, frozen.
        seconds: that the training took.
        learner: of a bandit: the learner itself, which can go on learning.
    """

    name: str
    head: Head
    seconds: float
    learner: Learner | None


def teach(agent: str, material: Material, seed: int, effort: float = 1.0) -> Taught:
    """Train one seed.

    Args:
        agent: as `agents.trainers.AGENTS` calls it.
        material: what it learns from, and where its policy cuts drafts.
        seed: of all that is drawn.
        effort: share of the steps that the agent takes by default.
    """
    steps = max(1, round(STEPS[agent] * effort))
    started = time.perf_counter()
    with TemporaryDirectory() as name:
        folder, learner = Path(name), None
        trainer: Trainer
        if agent in BANDITS:
            learner = BANDITS[agent](material.menu, material.schema, seed=seed)
            trainer = Training(learner, material, steps, seed, folder)
        else:
            trainer = make_trainer(agent, material, steps, seed, folder)
        trainer.run(lambda point: None)
    return Taught(trainer.name, trainer.head(), time.perf_counter() - started, learner)


def check_agents(agents: list[str]) -> None:
    """Raise `SettingError` for an agent that nobody knows."""
    for agent in agents:
        if agent not in AGENTS:
            raise SettingError("; ".join(unknown_name("agent", agent, AGENTS)))
    if len(set(agents)) < len(agents) or not agents:
        raise SettingError("name each agent once, and at least one")


def check_amounts(seeds: int, effort: float) -> None:
    """Raise `SettingError` for numbers that nothing can be trained with."""
    if seeds < 1:
        raise SettingError(f"seeds is {seeds}; give 1 or more")
    if not 0.0 < effort < float("inf"):
        raise SettingError(f"effort is {effort}; give a share of the default steps above 0")
