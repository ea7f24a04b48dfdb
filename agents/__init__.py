"""Learners of controllers, and how controllers are judged."""

from agents.base import Learner
from agents.ucb import UCB

__all__ = ["UCB", "Learner"]
