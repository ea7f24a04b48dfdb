"""Seconds by part, each counted once: what runs within a part that is timed itself is taken off the outer one."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from engine.drafters.base import Draft, Drafter, DraftState, Signal
from engine.sampling import Sampling


class Stopwatch:
    """Times calls under the name of a part.

    Attributes:
        seconds: part -> seconds, without those of parts that ran within it.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._within = [0.0]  # seconds of timed calls inside of each call under way

    def time(self, part: str, function: Callable[..., Any], *args: Any, **settings: Any) -> Any:
        self._within.append(0.0)
        started = time.perf_counter()
        try:
            return function(*args, **settings)
        finally:
            elapsed = time.perf_counter() - started
            self.seconds[part] += elapsed - self._within.pop()
            self._within[-1] += elapsed


class Watched:
    """An object all of whose methods are timed as one part."""

    def __init__(self, inner: Any, part: str, watch: Stopwatch) -> None:
        self._inner, self._part, self._watch = inner, part, watch

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if not callable(value):
            return value
        return lambda *args, **settings: self._watch.time(self._part, value, *args, **settings)


class FullDrafts:
    """A drafter whose drafts are filled up to k tokens, so that every pass has k + 1 rows; its own work is timed."""

    def __init__(self, inner: Drafter, part: str, watch: Stopwatch) -> None:
        self.name = inner.name
        self._inner, self._part, self._watch = inner, part, watch

    def begin(self, tokens: list[int], salt: str = "") -> DraftState:
        state = self._watch.time(self._part, self._inner.begin, tokens, salt)
        return _FullDraftState(Watched(state, self._part, self._watch))


class _FullDraftState:
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def signal(self, tokens: Sequence[int]) -> Signal:
        signal: Signal = self._inner.signal(tokens)
        return signal

    def propose(
        self, tokens: list[int], k: int, sampling: Sampling | None = None, min_confidence: float = 0.0
    ) -> Draft:
        draft: Draft = self._inner.propose(tokens, k, sampling, min_confidence)
        lacking = k - len(draft.tokens)
        return Draft([*draft.tokens, *tokens[-1:] * lacking], [*draft.confidences, *[0.0] * lacking])

    def close(self, tokens: list[int]) -> None:
        self._inner.close(tokens)
