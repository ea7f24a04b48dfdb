"""What the live and the replay environment share: one request at a time, and what they tell of it and of its steps."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from engine.menu import Menu
from engine.observation import ObservationSchema
from engine.results import StepRecord
from engine.session import Session
from envs.replay_session import ReplaySession

AnySession = TypeVar("AnySession", Session, ReplaySession)


class RequestEnv(gym.Env[np.ndarray, np.int64], Generic[AnySession]):
    """An environment whose episode is one request.

    Attributes:
        menu: the actions.
        schema: names and bounds of the observation's features.
    """

    def __init__(self, menu: Menu, schema: ObservationSchema) -> None:
        self.menu, self.schema = menu, schema
        self.action_space = spaces.Discrete(len(menu))
        self.observation_space = spaces.Box(np.zeros_like(schema.high), schema.high, dtype=np.float32)
        self._session: AnySession | None = None

    @property
    def session(self) -> AnySession:
        """The request under way. Raises `ResetNeeded` where there is none."""
        if self._session is None:
            raise gym.error.ResetNeeded("no request is under way; call reset() first")
        return self._session

    def action_masks(self) -> np.ndarray:
        """Bool `[actions]`: which entries differ from all others now (the form that maskable agents ask for)."""
        mask = self._session.mask() if self._session else self.menu.mask(can_reuse=True)
        return np.array(mask, dtype=bool)

    def _unfinished(self) -> AnySession:
        """The request under way, for a step. Raises `ResetNeeded` where it has finished."""
        if self.session.finished:
            raise gym.error.ResetNeeded("the request has finished; call reset() first")
        return self.session

    def _info(self) -> dict[str, Any]:
        request, kind = self._asked()
        return {"action_mask": self.action_masks().astype(np.int8), "request": request, "kind": kind}

    def _asked(self) -> tuple[str, str]:
        """Id and kind of the request under way."""
        raise NotImplementedError


def step_info(record: StepRecord) -> dict[str, Any]:
    """The `info` of a step: its seconds with their parts, its tokens, and whether it was the request's first."""
    return {
        "seconds": record.seconds,
        "seconds_draft": record.seconds_draft,
        "seconds_verify": record.seconds_verify,
        "seconds_overhead": record.seconds_overhead,
        "tokens": len(record.tokens),
        "drafted": record.drafted,
        "accepted": record.accepted,
        "prefilled": record.prefilled,
        "cached": record.cached,
        "first": record.first,
    }
