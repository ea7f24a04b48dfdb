"""Replay of many requests at once as Stable-Baselines3 takes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecEnv

from envs.vector import ReplayBatch


class ReplayVecEnv(VecEnv):
    """A thin adapter: arrays stay arrays, and `info` of a step is built only where an episode ends.

    There it holds `episode` (return `r`, length `l`, as `VecMonitor` tells them) and `terminal_observation`, which is
    all zeros and never read: no request is cut short, so nothing is bootstrapped from it.
    """

    def __init__(self, batch: ReplayBatch) -> None:
        self.batch = batch
        high = batch.schema.high
        box = spaces.Box(np.zeros_like(high), high, dtype=np.float32)
        super().__init__(batch.size, box, spaces.Discrete(len(batch.menu)))
        self._actions = np.zeros(batch.size, np.int64)
        self._returns, self._lengths = np.zeros(batch.size), np.zeros(batch.size, np.int64)
        self._ended = np.zeros_like(high)

    def reset(self) -> np.ndarray:
        """Begin anew; a seed that was given by `seed` restarts the order of requests."""
        seed = self._seeds[0]
        self._reset_seeds()
        self._returns[:], self._lengths[:] = 0.0, 0
        return self.batch.reset(seed)

    def step_async(self, actions: np.ndarray) -> None:
        self._actions = actions

    def step_wait(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        observations, rewards, dones, _ = self.batch.step(self._actions)
        self._returns += rewards
        self._lengths += 1
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        for lane in np.flatnonzero(dones):
            episode = {"r": float(self._returns[lane]), "l": int(self._lengths[lane])}
            infos[lane] = {"episode": episode, "terminal_observation": self._ended, "TimeLimit.truncated": False}
        self._returns[dones], self._lengths[dones] = 0.0, 0
        return observations, rewards.astype(np.float32), dones, infos

    def action_masks(self) -> np.ndarray:
        """Bool `[B, actions]`: which entries differ from all others now (the form that maskable agents ask for)."""
        return self.batch.masks()

    def close(self) -> None:
        return None

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        value = None if attr_name == "render_mode" else getattr(self.batch, attr_name)
        return [value] * len(self._lanes(indices))

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        raise AttributeError("the requests of a batch share their attributes; make another batch instead")

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        """`action_masks` of each request: what maskable agents call."""
        if method_name != "action_masks":
            raise AttributeError(f"a batch has no method {method_name!r} for single requests; use action_masks")
        masks = self.action_masks()
        return [masks[lane] for lane in self._lanes(indices)]

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        return [False] * len(self._lanes(indices))

    def _lanes(self, indices: Any) -> Sequence[int]:
        return list(self._get_indices(indices))
