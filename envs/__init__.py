"""Gymnasium environments over the engine. Importing this package registers them."""

from gymnasium.envs.registration import register

from envs.live import SpeculativeDecodingEnv
from envs.replay import ReplayEnv

LIVE_ENV = "draftgate/SpeculativeDecoding-v0"
REPLAY_ENV = "draftgate/SpeculativeDecodingReplay-v0"

# Rewards are measured times, which no seed can repeat.
register(id=LIVE_ENV, entry_point="envs.live:SpeculativeDecodingEnv", nondeterministic=True)
register(id=REPLAY_ENV, entry_point="envs.replay:ReplayEnv")

__all__ = ["LIVE_ENV", "REPLAY_ENV", "ReplayEnv", "SpeculativeDecodingEnv"]
