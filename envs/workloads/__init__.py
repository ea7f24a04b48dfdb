"""Prompts to decode: the bundled ones and those of a user's file."""

from envs.workloads.conversation import Conversation, Message
from envs.workloads.loaders import BUNDLED, load_workload
from envs.workloads.splits import SPLITS
from envs.workloads.workload import Workload

__all__ = ["BUNDLED", "SPLITS", "Conversation", "Message", "Workload", "load_workload"]
