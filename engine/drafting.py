"""The drafters of one request: whatever goes wrong in them, the request goes on with plain steps."""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Callable, Mapping
from itertools import islice
from numbers import Real
from typing import TypeVar

from torch import Tensor

from engine.drafters.base import EMPTY_DRAFT, Draft, Drafter, DraftState, Signal
from engine.request import Request

_Answer = TypeVar("_Answer")
SUM_TOLERANCE = 1e-2  # half precision over a large vocabulary rounds by this much


class Drafting:
    """Every drafter's state for one request.

    A drafter may raise or propose nonsense at any time: it is warned of once in a request, counted in `failures`,
    and its proposal counts as empty. A draft of tokens that were not drawn merely ends before the first one outside
    the vocabulary. `tokens` is the session's own growing list; each drafter reads a copy of its own, so that whatever
    it writes there reaches neither the session nor another drafter.
    """

    def __init__(self, drafters: Mapping[str, Drafter], tokens: list[int], request: Request, vocab_size: int) -> None:
        self._tokens = tokens
        self._copies: dict[str, list[int]] = {name: list(tokens) for name in drafters}
        self._sampling = request.sampling
        self._vocab_size = vocab_size
        self._states: dict[str, DraftState] = {}
        self._warned: set[str] = set()
        self.failures = 0
        for name, drafter in drafters.items():
            self._begin(name, drafter, request.salt)

    def signals(self) -> dict[str, Signal]:
        """What each drafter knows of the next position at no cost."""
        return {name: self._signal(name, state) for name, state in self._states.items()}

    def propose(self, name: str, k: int, min_confidence: float) -> Draft:
        """At most `k` tokens of the drafter `name`, all within the target's vocabulary; empty where it fails."""
        state = self._states.get(name)
        if k <= 0 or state is None:
            return EMPTY_DRAFT

        def draft(copy: list[int]) -> Draft:
            return self._checked(state.propose(copy, k, self._sampling, min_confidence), k)

        return self._ask(name, "propose", draft, EMPTY_DRAFT)

    def close(self) -> None:
        """Tell the drafters that the request has ended with the tokens as they are."""
        for name, state in self._states.items():
            self._ask(name, "close", state.close, None)

    def _begin(self, name: str, drafter: Drafter, salt: str) -> None:
        def begin(copy: list[int]) -> DraftState | None:
            state = drafter.begin(copy, salt)
            if state is None:
                raise TypeError("it gave no state")
            return state

        state = self._ask(name, "begin", begin, None)
        if state is not None:
            self._states[name] = state

    def _signal(self, name: str, state: DraftState) -> Signal:
        return self._ask(name, "signal", lambda copy: _checked_signal(state.signal(copy)), Signal())

    def _ask(self, name: str, call: str, ask: Callable[[list[int]], _Answer], otherwise: _Answer) -> _Answer:
        """What a drafter answers to its copy of the tokens, or `otherwise` where it fails or changes the copy."""
        copy = self._copies[name]
        copy += self._tokens[len(copy) :]
        try:
            answer = ask(copy)
            if len(copy) != len(self._tokens) or copy[-1] != self._tokens[-1]:
                raise ValueError("it changed the tokens that it was given")
        except Exception as error:
            copy[:] = self._tokens
            self._fail(name, call, error)
            return otherwise
        return answer

    def _checked(self, draft: Draft, k: int) -> Draft:
        """The draft up to its first token outside the vocabulary. Raises `ValueError` where it is broken."""
        tokens = [operator.index(token) for token in islice(draft.tokens, k + 1)]
        count = len(tokens)
        if count > k:
            raise ValueError(f"more than {k} tokens proposed where {k} were asked for")
        if draft.probs is not None and not _are_distributions(draft.probs, count):
            raise ValueError("the draft distribution is not one")
        valid = next((i for i, t in enumerate(tokens) if not 0 <= t < self._vocab_size), count)
        if draft.probs is not None and valid < count:  # leaving a drawn token out would bias what is emitted
            raise ValueError(f"token {tokens[valid]} was drawn from outside the target's vocabulary")
        return Draft(tokens[:valid], draft.confidences[:valid], draft.probs)

    def _fail(self, name: str, call: str, error: Exception) -> None:
        self.failures += 1
        if name not in self._warned:
            self._warned.add(name)
            reason = f"{type(error).__name__}: {error}"
            message = f"drafter {name} failed in {call} ({reason}); {_CONSEQUENCES[call]}"
            warnings.warn(message, RuntimeWarning, stacklevel=5)


_CONSEQUENCES = {
    "begin": "this request goes on without it",
    "signal": "it counts as knowing nothing",
    "propose": "such a step runs plain",
    "close": "it may forget this request",
}


def _checked_signal(signal: Signal) -> Signal:
    """The signal itself. Raises `TypeError` or `ValueError` where it is none."""
    if not isinstance(signal, Signal):
        raise TypeError(f"{type(signal).__name__} is no Signal")
    for value in (signal.match_length, signal.support, signal.confidence):
        if not isinstance(value, Real) or not math.isfinite(value):
            raise ValueError(f"{signal} is not of finite numbers")
    return signal


def _are_distributions(probs: Tensor, count: int) -> bool:
    """Whether `probs` is `[count, vocab]` with rows that are finite, not negative, and sum to 1 up to rounding."""
    if probs.ndim != 2 or len(probs) != count or not (probs.isfinite() & (probs >= 0)).all():
        return False
    return bool(((probs.sum(dim=-1) - 1.0).abs() < SUM_TOLERANCE).all())
