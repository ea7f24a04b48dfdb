"""A learner at work in an engine, or in the replay of one, that goes on learning there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agents.base import Learner
from engine.controllers import BaseController
from engine.costs import CostTable
from engine.cuts import Cut, cuts_of_actions
from engine.menu import Menu
from engine.observation import Observation, ObservationSchema
from engine.results import StepRecord


class LearningController(BaseController):
    """Chooses by a learner and teaches it how each step of its own turned out."""

    needs_observation = True

    def __init__(self, learner: Learner, menu: Menu, costs: CostTable, min_confidence: Cut = 0.0) -> None:
        self.name = f"{learner.name}, learning"
        self._learner, self._costs, self._cuts = learner, costs, cuts_of_actions(min_confidence, menu)
        self._schema = ObservationSchema(menu, costs)
        self._vector: np.ndarray | None = None

    def choose(self, observation: Observation | None, mask: Sequence[bool]) -> int:
        assert observation is not None
        self._vector = self._schema.vector(observation)
        action = self._learner.choose(self._vector, mask)
        self.min_confidence = self._cuts[action]
        return action

    def observe(self, record: StepRecord) -> None:
        """Learn from a step that was chosen here; one that a guard took plain was chosen without an observation."""
        if self._vector is None:
            return
        plain_steps = record.seconds / self._costs.plain_seconds(record.context)
        outcome = record.drafted, record.accepted, len(record.tokens)
        self._learner.update(self._vector, record.action, *outcome, plain_steps)
        self._vector = None
