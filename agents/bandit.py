"""What bandits share: the rate reached so far, how steps are timed, and a state that can be kept and taken up again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import numpy as np

from agents.side_observations import FirstStep, StepTimes, side_observations
from engine.menu import Menu
from engine.observation import ObservationSchema
from engine.policy_heads import Head

_WORD = (1 << 64) - 1


class Bandit(ABC):
    """A learner whose whole state is some arrays and a generator.

    Attributes:
        kept: the names of its arrays.
        totals: tokens and plain steps of what was really pulled; their ratio is the rate.
        times: float64, the sums of `StepTimes`.
    """

    name: str
    kept: ClassVar[tuple[str, ...]]

    def __init__(self, menu: Menu, schema: ObservationSchema, seed: int = 0) -> None:
        self.menu = menu
        self.totals = np.zeros(2)
        self._step_times = StepTimes(menu)
        self.times = self._step_times.sums
        self._first = FirstStep(schema)
        self._rng = np.random.default_rng(seed)

    @abstractmethod
    def choose(self, vector: np.ndarray, mask: Sequence[bool]) -> int:
        """The arm to try next for an observation `[features]`."""

    @abstractmethod
    def update(
        self, vector: np.ndarray, action: int, drafted: int, accepted: int, tokens: int, plain_steps: float
    ) -> None:
        """Learn from a step, as `agents.base.Learner` describes it."""

    @abstractmethod
    def head(self) -> Head:
        """The decision function learned so far."""

    @property
    def rate(self) -> float:
        """Tokens per plain step reached so far; 1 is plain decoding."""
        tokens, time = self.totals
        return float(tokens / time) if time > 0 else 1.0

    def state(self) -> dict[str, np.ndarray]:
        """All that `restore` needs to go on learning as if nothing had happened."""
        return self._arrays() | {"rng": rng_words(self._rng)}

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """The inverse of `state`. Raises `KeyError` or `ValueError` for another form, and then changes nothing."""
        ours = self._arrays()
        for name, array in {**ours, "rng": rng_words(self._rng)}.items():
            if state[name].shape != array.shape:
                raise ValueError(f"{name} has shape {state[name].shape}, here {array.shape}")
        for name, array in ours.items():
            array[...] = state[name]
        set_rng_words(self._rng, state["rng"])

    def _revealed(
        self, action: int, drafted: int, accepted: int, tokens: int
    ) -> Iterator[tuple[int, float, float, float]]:
        """(arm, tokens, plain steps and these squared) of the other arms whose outcome a step reveals.

        Times are means of steps that drafted as much; arms whose time is hardly known yet are left out.
        """
        for arm, would_commit, would_draft in side_observations(self.menu, action, drafted, accepted, tokens):
            known = self._step_times.mean(arm, would_draft)
            if known:
                yield arm, would_commit, *known

    def _arrays(self) -> dict[str, np.ndarray]:
        return {name: getattr(self, name) for name in self.kept}


def rng_words(rng: np.random.Generator) -> np.ndarray:
    """The state of a PCG64 generator, uint64 `[4]`: two numbers of 128 bits, low word first."""
    numbers = rng.bit_generator.state["state"]
    return np.array([numbers[name] >> shift & _WORD for name in ("state", "inc") for shift in (0, 64)], dtype=np.uint64)


def set_rng_words(rng: np.random.Generator, words: np.ndarray) -> None:
    low, high, inc_low, inc_high = (int(word) for word in words)
    numbers = {"state": high << 64 | low, "inc": inc_high << 64 | inc_low}
    rng.bit_generator.state = {**rng.bit_generator.state, "state": numbers}
