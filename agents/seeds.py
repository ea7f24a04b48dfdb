"""The seeds of a run, trained one after the other, each kept as soon as it is finished."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from agents.curve import CURVE_FILE, CurvePoint, read_curves, write_curves
from agents.material import Material
from agents.run_folder import COMPARED, RunFolder
from agents.trainers import Trainer, make_trainer
from agents.training import OnPoint
from engine.errors import PolicyError
from engine.policy import FORMAT as POLICY
from engine.policy import Policy, load_policy
from engine.policy_heads import Head


@dataclass(frozen=True, eq=False)
class Trained:
    """What a seed has learned.

    Attributes:
        steps: decoding steps that it was learned from.
        seconds: float64 `[R]`, of each validation request, replayed.
        whole: whether the training came to its end.
    """

    seed: int
    name: str
    head: Head
    steps: int
    curve: list[CurvePoint]
    seconds: np.ndarray
    whole: bool


class Seeds:
    """Trains seeds of one agent and keeps what they learn.

    Attributes:
        trained: the seeds that have learned anything, in order.
    """

    def __init__(self, agent: str, material: Material, steps: int, folder: RunFolder) -> None:
        self.trained: list[Trained] = []
        self._agent, self._material, self._steps, self._folder = agent, material, steps, folder

    @property
    def best(self) -> Trained:
        """The seed whose policy serves the validation requests in the least time."""
        return min(self.trained, key=lambda one: float(one.seconds.sum()))

    def train(self, seed: int, on_point: OnPoint = lambda point: None) -> None:
        """Train a seed, or take it as it was finished before. What an interrupt leaves unfinished counts too."""
        kept = self._kept(seed)
        if kept is not None:
            self.trained.append(kept)
            return
        trainer = self._resumed(seed)
        try:
            trainer.run(on_point)
        except KeyboardInterrupt:
            if trainer.steps_done:
                self.trained.append(self._result(seed, trainer, whole=False))
            raise
        result = self._result(seed, trainer, whole=True)
        self._keep(result)
        self.trained.append(result)

    def policy(self, trained: Trained, **told: Any) -> Policy:
        """What a seed has learned, with all that a reader needs to trust it."""
        material, config = self._material, self._folder.config
        return Policy(
            name=trained.name,
            menu=material.menu,
            head=trained.head,
            costs=material.costs,
            target=config["target"],
            precision=config["precision"],
            provenance=config | {"seed": trained.seed, "steps": trained.steps, "whole": trained.whole} | told,
            min_confidence=material.min_confidence,
        )

    def _resumed(self, seed: int) -> Trainer:
        settings = (self._agent, self._material, self._steps, seed, self._folder.seed(seed))
        trainer = make_trainer(*settings)
        try:
            trainer.resume()
        except PolicyError as error:
            print(f"{error}; seed {seed} is trained anew", file=sys.stderr)
            return make_trainer(*settings)
        return trainer

    def _result(self, seed: int, trainer: Trainer, whole: bool) -> Trained:
        head = trainer.head()
        seconds = self._material.replay(head)
        return Trained(seed, trainer.name, head, trainer.steps_done, list(trainer.curve), seconds, whole)

    def _keep(self, result: Trained) -> None:
        """The policy's JSON comes last: where it is, the seed is finished."""
        folder = self._folder.seed(result.seed)
        write_curves(folder / CURVE_FILE, {result.seed: result.curve})
        self.policy(result).save(folder)

    def _kept(self, seed: int) -> Trained | None:
        folder = self._folder.seed(seed)
        if not POLICY.is_in(folder):
            return None
        try:
            policy = load_policy(folder)
            if not self._is_of_this_run(policy, seed):
                self._folder.forget_seed(seed)  # with the state, which does not tell whose it is
                raise PolicyError(f"{folder} is of another run")
            curve = read_curves(folder / CURVE_FILE).get(seed, [])
        except PolicyError as error:
            print(f"{error}; seed {seed} is trained anew", file=sys.stderr)
            return None
        seconds = self._material.replay(policy.head)
        return Trained(seed, policy.name, policy.head, policy.provenance["steps"], curve, seconds, whole=True)

    def _is_of_this_run(self, policy: Policy, seed: int) -> bool:
        told, config = policy.provenance, self._folder.config
        steps = told.get("steps")  # what was done: all that was asked for, or a little more
        return (
            (policy.menu, policy.min_confidence) == (self._material.menu, self._material.min_confidence)
            and told.get("seed") == seed
            and isinstance(steps, int)
            and steps >= self._steps
            and all(told.get(name) == config[name] for name in COMPARED if name not in ("seed", "steps"))
        )
