"""Learners of controllers, and how controllers are judged."""

from agents.base import BatchLearner, Learner
from agents.exp3 import EXP3
from agents.linear import LinUCB
from agents.thompson import Thompson
from agents.ucb import UCB

__all__ = ["EXP3", "UCB", "BatchLearner", "Learner", "LinUCB", "Thompson"]
