"""Replay of many requests at once, in numpy: what learners train on and baselines are judged with offline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from gymnasium.error import ResetNeeded

from engine.controllers import Controller
from engine.costs import CostTable
from engine.cuts import Cut
from engine.errors import SettingError
from engine.menu import Menu
from envs.lanes import Lanes
from envs.replay import check_latency
from envs.replay_session import ReplaySession
from envs.trace import TraceSet

CostSource = CostTable | Sequence[CostTable] | Callable[[np.random.Generator], CostTable]
PolicyFunction = Callable[[np.ndarray, np.ndarray], np.ndarray]  # observations [B, F], masks [B, M] -> actions [B]


class ReplayBatch:
    """`size` requests under way at once; one that ends is replaced by another in the same step (autoreset).

    Requests come in random order, each as often as the others. Observations are those of the replay and the live
    environment; rewards are minus the step's seconds over the calibrated plain step's.

    Args:
        traces: the recorded requests.
        costs: what steps take: one table, tables to draw one from at each request's beginning, or a function that
            draws one. The cost features of the observation follow.
        menu: the actions.
        size: requests under way.
        latency: "median", or "sampled" with the table's spread.
        seed: of the order of requests, the drawing of tables and sampled latency; `reset` may give another.
        min_confidence: drafts end before the first token that their drafter trusts less.

    Attributes:
        schema: names and bounds of the observation's features.
    """

    def __init__(
        self,
        traces: TraceSet,
        costs: CostSource,
        menu: Menu,
        size: int,
        latency: str = "median",
        seed: int = 0,
        min_confidence: Cut = 0.0,
    ) -> None:
        check_latency(latency)
        if not isinstance(costs, CostTable) and not callable(costs) and not len(costs):
            raise SettingError("costs hold no table; give one at least")
        self._lanes = Lanes(traces, menu, size, min_confidence)
        self.menu, self.schema, self.size = menu, self._lanes.schema, size
        self._costs, self._sampled, self._num_requests = costs, latency == "sampled", len(traces)
        self._begun = False
        self._seed(seed)

    def reset(self, seed: int | None = None) -> np.ndarray:
        """Begin `size` requests; observations float32 `[B, F]`. A seed also restarts the order of requests."""
        if seed is not None:
            self._seed(seed)
        self._begun = True
        for lane in range(self.size):
            self._begin(lane)
        return self._lanes.observations()

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, np.ndarray]]:
        """One step of each request. Raises `MenuError` for an action outside the menu, `ResetNeeded` before `reset`.

        Returns observations float32 `[B, F]` (of the next request where one ended), rewards float64 `[B]`, dones bool
        `[B]`, and arrays `[B]` of what happened, named as in `envs.lanes.Steps`.
        """
        if not self._begun:
            raise ResetNeeded("call reset before step")
        steps = self._lanes.step(actions, self._rng if self._sampled else None)
        for lane in np.flatnonzero(steps.done):
            self._begin(int(lane))
        return self._lanes.observations(), -steps.seconds / steps.plain, steps.done, vars(steps)

    def masks(self) -> np.ndarray:
        """bool `[B, actions]`: which entries differ from all others now."""
        return self._lanes.masks()

    @property
    def requests(self) -> np.ndarray:
        """int64 `[B]`: the request under way in each lane, by its place in the set."""
        return self._lanes.request.copy()

    def _seed(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._waiting: list[int] = []

    def _begin(self, lane: int) -> None:
        if not self._waiting:
            self._waiting = self._rng.permutation(self._num_requests).tolist()
        self._lanes.begin(lane, self._waiting.pop(), self._draw_costs())

    def _draw_costs(self) -> CostTable:
        if isinstance(self._costs, CostTable):
            return self._costs
        if callable(self._costs):
            return self._costs(self._rng)
        return self._costs[int(self._rng.integers(len(self._costs)))]


@dataclass(frozen=True, eq=False)
class Totals:
    """What each request of a set took, in the set's order; all arrays `[R]`.

    Attributes:
        seconds: time of all steps.
        plain_steps: the same, each step over the calibrated plain step at its context: minus the return.
        first_seconds: time of the first step, which reads the prompt.
        tokens, steps, drafts, drafted, accepted: counts.
    """

    seconds: np.ndarray
    plain_steps: np.ndarray
    first_seconds: np.ndarray
    tokens: np.ndarray
    steps: np.ndarray
    drafts: np.ndarray
    drafted: np.ndarray
    accepted: np.ndarray


def rollout(
    traces: TraceSet,
    costs: CostTable,
    menu: Menu,
    policy: PolicyFunction | np.ndarray | int,
    observed: bool = True,
    min_confidence: Cut = 0.0,
) -> Totals:
    """Run a deterministic policy over every trace once, at median costs.

    Args:
        traces: the recorded requests.
        costs: what steps take.
        menu: the actions.
        policy: maps observations `[R, F]` and masks `[R, M]` to actions `[R]`; or the same action throughout, for all
            requests or one for each. What it answers for requests that have ended is ignored.
        observed: whether the time of observing counts: not for a controller that reads no observation.
        min_confidence: drafts end before the first token that their drafter trusts less.
    """
    lanes = Lanes(traces, menu, len(traces), min_confidence)
    for lane in range(lanes.size):
        lanes.begin(lane, lane, costs)
    sums = np.zeros((8, lanes.size))
    ended = np.zeros(lanes.size, dtype=bool)
    while not ended.all():
        if callable(policy):
            actions = policy(lanes.observations(), lanes.masks())
        else:
            actions = np.broadcast_to(policy, (lanes.size,))
        step = lanes.step(actions, observed=observed)
        seconds = step.seconds
        counts = (step.tokens, ~ended, step.drafted > 0, step.drafted, step.accepted)
        sums += np.stack([seconds, seconds / step.plain, seconds * step.first, *counts])
        ended = step.done
    return Totals(*sums[:3], *sums[3:].astype(np.int64))


def run_controller(
    traces: TraceSet, costs: CostTable | Sequence[CostTable], menu: Menu, controller: Controller
) -> Totals:
    """Run a controller of the engine over every trace once, in order, at median costs: one table for all, or one each.

    A controller that learns or keeps a state carries it from request to request, as in an engine.
    """
    rows = []
    tables = [costs] * len(traces) if isinstance(costs, CostTable) else costs
    for index, table in enumerate(tables):
        session = ReplaySession(traces, index, menu, table)
        session.run(controller)
        steps = session.steps
        seconds = [step.seconds for step in steps]
        plain = [step.seconds / table.plain_seconds(step.context) for step in steps]
        counts = [(len(step.tokens), 1, step.drafted > 0, step.drafted, step.accepted) for step in steps]
        rows.append((sum(seconds), sum(plain), seconds[0], *np.sum(counts, axis=0)))
    columns = np.array(rows, dtype=np.float64).T
    return Totals(*columns[:3], *columns[3:].astype(np.int64))
