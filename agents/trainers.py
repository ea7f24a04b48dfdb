"""From an agent's name to the training of one seed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from tqdm import tqdm

from agents.base import BatchLearner
from agents.curve import CurvePoint
from agents.exp3 import EXP3
from agents.linear import LinUCB
from agents.material import Material
from agents.ppo import ProximalPolicy
from agents.randomise import random_costs
from agents.stationary import Counterfactual
from agents.thompson import Thompson
from agents.training import OnPoint, Training
from agents.ucb import UCB
from engine.costs import CostTable
from engine.menu import Menu
from engine.policy_heads import Head

BANDITS = {"bandit": UCB, "thompson": Thompson, "exp3": EXP3, "linear": LinUCB}
AGENTS = ("ppo", "counterfactual", *BANDITS)
# What each agent learns from unless told otherwise: decoding steps; rounds over all traces.
STEPS = {"ppo": ProximalPolicy.steps, "counterfactual": Counterfactual.rounds} | dict.fromkeys(BANDITS, 30_000)
COSTS = ("measured", "randomised")
MACHINES = 256  # that randomised costs are drawn for


class Trainer(Protocol):
    """A seed's training under way.

    Attributes:
        name: what the policy will be called.
        steps_done: steps or rounds learned from; 0: there is nothing to export yet.
        curve: how it did on its way.
    """

    name: str
    steps_done: int
    curve: list[CurvePoint]

    def resume(self) -> None:
        """Take up what a killed training has left, if anything. Raises `PolicyError` where that is damaged."""
        ...

    def run(self, on_point: OnPoint) -> None:
        """Train to the end, which is the same however often it was killed and resumed."""
        ...

    def head(self) -> Head:
        """The decision function learned so far."""
        ...


class BatchTraining:
    """One seed of a learner that takes all traces at once. One that was killed begins anew, and ends the same."""

    def __init__(self, learner: BatchLearner, material: Material, steps: int, seed: int) -> None:
        self.name = learner.name
        self.steps_done = 0
        self.curve: list[CurvePoint] = []
        self._learner, self._material, self._steps, self._seed = learner, material, steps, seed
        self._head: Head | None = None

    def resume(self) -> None:
        return None

    def run(self, on_point: OnPoint = lambda point: None) -> None:
        material = self._material
        with one_thread(), tqdm(total=self._steps, unit="step", desc=f"{self.name} seed {self._seed}") as bar:

            def on_round(done: int, speed: float, head: Head) -> None:
                bar.update(min(done, self._steps) - bar.n)
                bar.set_postfix_str(f"speed-up {speed:.3f}")
                self.steps_done, self._head = done, head
                self.curve.append(CurvePoint(done, speed))
                on_point(self.curve[-1])

            self._head = self._learner.fit(
                material.train,
                material.validation,
                material.menu,
                material.tables,
                self._seed,
                on_round,
                material.min_confidence,
            )

    def head(self) -> Head:
        assert self._head is not None
        return self._head


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread for torch: networks this small gain nothing from a second one, and where another program holds a core
    each of their operations waits for it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def make_trainer(agent: str, material: Material, steps: int, seed: int, folder: Path) -> Trainer:
    """The training of one seed of an agent; a bandit keeps its state in `folder`."""
    if agent == "ppo":
        return BatchTraining(ProximalPolicy(steps=steps), material, steps, seed)
    if agent == "counterfactual":
        return BatchTraining(Counterfactual(rounds=steps), material, steps, seed)
    learner = BANDITS[agent](material.menu, material.schema, seed=seed)
    return Training(learner, material, steps, seed, folder)


def training_costs(kind: str, costs: CostTable, menu: Menu, seed: int) -> list[CostTable]:
    """The tables that training reckons with: this machine's, or those of many made-up machines."""
    if kind == "measured":
        return [costs]
    rng = np.random.default_rng(seed)
    return [random_costs(rng, menu) for _ in range(MACHINES)]
