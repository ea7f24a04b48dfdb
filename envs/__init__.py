"""Gymnasium environments over the engine. Importing this package registers them."""

from gymnasium.envs.registration import register

from envs.live import SpeculativeDecodingEnv

LIVE_ENV = "draftgate/SpeculativeDecoding-v0"

# Rewards are measured times, which no seed can repeat.
register(id=LIVE_ENV, entry_point="envs.live:SpeculativeDecodingEnv", nondeterministic=True)

__all__ = ["LIVE_ENV", "SpeculativeDecodingEnv"]
