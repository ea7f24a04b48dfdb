"""The replay environment: recorded requests under calibrated costs, thousands of steps a second."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from engine.costs import CostTable
from engine.cuts import Cut, check_cut, cuts_of_actions
from engine.errors import SettingError, TraceError
from engine.menu import default_menu, parse_menu
from engine.observation import ObservationSchema
from envs.info import RequestEnv, step_info
from envs.replay_session import ReplaySession, check_recorded, exact_latency
from envs.trace import TraceSet, load_traces

LATENCIES = ("median", "sampled")


class ReplayEnv(RequestEnv[ReplaySession]):
    """Choose the draft length of each step of recorded requests.

    Actions, observations, masks, rewards and `info` are those of the live environment, `envs.live`. Tokens are the
    recorded ones, whatever is chosen; times come from the cost table. So the environment is deterministic for a seed.
    Requests come in random order, each as often as the others; a conversation's turns need not follow each other,
    because what the prefix cache held was recorded. The observation behind a request's last step is all zeros.

    Example:
        >>> import envs, gymnasium
        >>> env = gymnasium.make("draftgate/SpeculativeDecodingReplay-v0", traces="traces", costs="costs.json")
        >>> observation, info = env.reset(seed=1)
        >>> observation, reward, terminated, truncated, info = env.step(3)

    Args:
        traces: a folder that was recorded, or the traces themselves.
        costs: a JSON file that `CostTable.to_json` made, or the table itself.
        menu: text as `parse_menu` reads it; None for the default one of the recorded drafters.
        latency: "median", or "sampled": each step's time is drawn with the spread that was measured.
        min_confidence: drafts end before the first token that their drafter trusts less.
    """

    def __init__(
        self,
        traces: str | Path | TraceSet,
        costs: str | Path | CostTable,
        menu: str | None = None,
        latency: str = "median",
        min_confidence: Cut = 0.0,
    ) -> None:
        check_latency(latency)
        self.traces = traces if isinstance(traces, TraceSet) else load_traces(traces)
        self.costs = costs if isinstance(costs, CostTable) else read_costs(costs)
        if not len(self.traces):
            raise TraceError("the set holds no trace; record a workload that has requests")
        drafters = self.traces.drafters
        actions = parse_menu(menu, drafters) if menu else default_menu(drafters)
        check_cut(min_confidence, actions)
        check_recorded(self.traces, actions)
        check_priced(self.costs, actions.lengths, actions.drafters)
        super().__init__(actions, ObservationSchema(actions, self.costs))
        self._latency, self._cuts = latency, cuts_of_actions(min_confidence, actions)
        self._waiting: list[int] = []

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin the next request. A seed also restarts the order of requests."""
        super().reset(seed=seed)
        if seed is not None:
            self._waiting = []
        if not self._waiting:
            self._waiting = self.np_random.permutation(len(self.traces)).tolist()
        noise = self._noise if self._latency == "sampled" else exact_latency
        self._session = ReplaySession(self.traces, self._waiting.pop(), self.menu, self.costs, noise)
        return self._observe(), self._info()

    def step(self, action: np.int64 | int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """One recorded step. Raises `MenuError` for an action outside the menu."""
        session = self._unfinished()
        action = self.menu.allowed(action, session.mask())
        record = session.step(action, self._cuts[action])
        reward = -record.seconds / self.costs.plain_seconds(record.context)
        return self._observe(), reward, session.finished, False, self._info() | step_info(record)

    def _noise(self) -> float:
        return float(np.exp(self.costs.deviation * self.np_random.standard_normal()))

    def _observe(self) -> np.ndarray:
        if self.session.finished:
            return np.zeros_like(self.schema.high)
        return self.schema.vector(self.session.observe())

    def _asked(self) -> tuple[str, str]:
        return self.session.trace.request, self.session.trace.kind


def read_costs(path: str | Path) -> CostTable:
    """A cost table from a JSON file. Raises `TraceError` where it is missing or damaged."""
    try:
        return CostTable.from_json(json.loads(Path(path).read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise TraceError(f"{path} holds no cost table ({type(error).__name__}: {error}); calibrate anew") from error


def check_latency(latency: str) -> None:
    """Raise `SettingError` for a `latency` that is not among `LATENCIES`."""
    if latency not in LATENCIES:
        raise SettingError(f"latency is {latency!r}; choose one of {', '.join(LATENCIES)}")


def check_priced(costs: CostTable, lengths: tuple[int, ...], drafters: tuple[str, ...]) -> None:
    """Raise `TraceError` for costs that do not cover a menu."""
    if not costs.covers(lengths, drafters):
        raise TraceError(
            "the costs do not cover the menu's draft lengths and drafters; calibrate an engine of this menu"
        )
