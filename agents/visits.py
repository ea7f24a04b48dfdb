"""Observations of recorded requests: at every position, also where a policy did not step; and under random actions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.costs import CostTable
from engine.cuts import Cut
from engine.menu import Menu
from engine.observation import ObservationSchema
from envs.lanes import Lanes
from envs.trace import TraceSet
from envs.vector import PolicyFunction, ReplayBatch

_OF_THE_PAST = ("cached_fraction", "last_drafted", "last_accepted", "acceptance_short", "acceptance_long")


class Visits:
    """The observations of a set of traces, `[R, T, F]`: T the longest request.

    Most of an observation is a matter of the position and is told by plain decoding, which stops everywhere. What
    tells of earlier steps comes from a policy's own rollout: of its newest step at or before the position.
    """

    def __init__(self, traces: TraceSet, menu: Menu, min_confidence: Cut = 0.0) -> None:
        self._traces, self._menu, self._min_confidence = traces, menu, min_confidence
        names = ObservationSchema(menu).names
        lagging = [name for name, lags in zip(traces.drafters, traces.lagging) if lags]
        past = {*_OF_THE_PAST, *(f"{name}.confidence" for name in lagging)}
        self._past = np.array([name in past for name in names])
        self._shape = (len(traces), int(traces.flat().length.max()), len(names))

    def under(self, policy: PolicyFunction, costs: Sequence[CostTable]) -> np.ndarray:
        """Observations under a policy, float32 `[R, T, F]`; zeros behind a request's end.

        `costs` holds one table a request.
        """
        everywhere, _ = self._walk(lambda vectors, _: np.full(len(vectors), self._menu.plain), costs)
        walked, visited = self._walk(policy, costs)
        newest = np.maximum.accumulate(np.where(visited, np.arange(self._shape[1]), 0), axis=1)
        past = np.take_along_axis(walked, newest[..., None], axis=1)
        running = np.arange(self._shape[1]) < self._traces.flat().length[:, None]
        return np.where(self._past & running[..., None], past, everywhere)

    def _walk(self, policy: PolicyFunction, costs: Sequence[CostTable]) -> tuple[np.ndarray, np.ndarray]:
        """Observations `[R, T, F]` of the positions where a policy stepped, and which these are `[R, T]`."""
        lanes = Lanes(self._traces, self._menu, len(self._traces), self._min_confidence)
        for request, table in enumerate(costs):
            lanes.begin(request, request, table)
        seen, visited = np.zeros(self._shape, dtype=np.float32), np.zeros(self._shape[:2], dtype=bool)
        length = self._traces.flat().length
        while (running := lanes.position < length).any():
            vectors = lanes.observations()
            rows, at = np.flatnonzero(running), lanes.position[running]
            seen[rows, at], visited[rows, at] = vectors[running], True
            lanes.step(policy(vectors, lanes.masks()))
        return seen, visited


def random_walk(batch: ReplayBatch, steps: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Observations float32 `[N, F]` and masks bool `[N, A]` of a batch begun anew, as random actions meet them.

    N is `steps + 1` times the batch's size.
    """
    rng = np.random.default_rng(seed)
    vectors, masks = [batch.reset(seed)], [batch.masks()]
    for _ in range(steps):
        vectors.append(batch.step(random_actions(masks[-1], rng))[0])
        masks.append(batch.masks())
    return np.concatenate(vectors), np.concatenate(masks)


def random_actions(masks: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """One allowed action `[B]` for each of the masks `[B, A]`, all alike likely."""
    return np.asarray(np.where(masks, rng.random(masks.shape), -1.0).argmax(axis=1))
