"""The drafters of one request: whatever goes wrong in them, the request goes on with plain steps."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Mapping

from torch import Tensor

from engine.drafters.base import EMPTY_DRAFT, Draft, Drafter, DraftState, Signal
from engine.request import Request

SUM_TOLERANCE = 1e-2  # half precision over a large vocabulary rounds by this much


class Drafting:
    """Every drafter's state for one request.

    A drafter may raise or propose nonsense at any time: it is warned of once in a request, counted in `failures`,
    and its proposal counts as empty. A draft of tokens that were not drawn merely ends before the first one outside
    the vocabulary. `tokens` is the session's own growing list and is never changed here.
    """

    def __init__(self, drafters: Mapping[str, Drafter], tokens: list[int], request: Request, vocab_size: int) -> None:
        self._tokens = tokens
        self._sampling = request.sampling
        self._vocab_size = vocab_size
        self._states: dict[str, DraftState] = {}
        self._warned: set[str] = set()
        self.failures = 0
        for name, drafter in drafters.items():
            try:
                self._states[name] = drafter.begin(tokens, request.salt)
            except Exception as error:
                self._fail(name, "begin", error)

    def signals(self) -> dict[str, Signal]:
        """What each drafter knows of the next position at no cost."""
        return {name: self._signal(name, state) for name, state in self._states.items()}

    def propose(self, name: str, k: int, min_confidence: float) -> Draft:
        """At most `k` tokens of the drafter `name`, all within the target's vocabulary; empty where it fails."""
        state = self._states.get(name)
        if k <= 0 or state is None:
            return EMPTY_DRAFT
        try:
            return self._checked(state.propose(self._tokens, k, self._sampling, min_confidence), k)
        except Exception as error:
            self._fail(name, "propose", error)
            return EMPTY_DRAFT

    def close(self) -> None:
        """Tell the drafters that the request has ended with the tokens as they are."""
        for name, state in self._states.items():
            try:
                state.close(self._tokens)
            except Exception as error:
                self._fail(name, "close", error)

    def _signal(self, name: str, state: DraftState) -> Signal:
        try:
            return state.signal(self._tokens)
        except Exception as error:
            self._fail(name, "signal", error)
            return Signal()

    def _checked(self, draft: Draft, k: int) -> Draft:
        """The draft up to its first token outside the vocabulary. Raises `ValueError` where it is broken."""
        tokens = [operator.index(token) for token in draft.tokens]
        count = len(tokens)
        if count > k:
            raise ValueError(f"{count} tokens proposed where {k} were asked for")
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
            warnings.warn(message, RuntimeWarning, stacklevel=4)


_CONSEQUENCES = {
    "begin": "this request goes on without it",
    "signal": "it counts as knowing nothing",
    "propose": "such a step runs plain",
    "close": "it may forget this request",
}


def _are_distributions(probs: Tensor, count: int) -> bool:
    """Whether `probs` is `[count, vocab]` with rows that are finite, not negative, and sum to 1 up to rounding."""
    if probs.ndim != 2 or len(probs) != count or not (probs.isfinite() & (probs >= 0)).all():
        return False
    return bool(((probs.sum(dim=-1) - 1.0).abs() < SUM_TOLERANCE).all())
