"""What each option costs on this machine: measured on the engine itself, never estimated."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

SHORTEST, LONGEST = 1e-9, 1e6  # seconds that a pass can take
QUARTILE = 0.6744897501960817  # of the standard normal distribution


class StepSeconds(NamedTuple):
    """The predicted time of a step, in the parts that a `StepRecord` has."""

    draft: float
    verify: float
    overhead: float

    @property
    def total(self) -> float:
        return self.draft + self.verify + self.overhead


THREADS = torch.get_num_threads()  # read before any kernel runs: libraries that share OpenMP change each other's number


@dataclass(frozen=True)
class CostTable:
    """Median seconds of every option, and of what a live step spends besides.

    A field that has a default was not told apart by early versions: 0 there.

    Attributes:
        contexts: context lengths that were timed, tokens, ascending.
        verify: k -> seconds of one target pass over k + 1 rows with its verdict, one number a context; k = 0 is the
            plain step.
        spread: relative half-width of the middle half of the plain step's times: how noisy this machine is.
        draft: drafter -> seconds of one drafted token.
        prefill: seconds of one prompt token.
        machine: what it was measured on.
        engine: what was measured, in one line: the target, its precision and the drafters.
        draft_call: drafter -> seconds of a draft beside those of its tokens.
        draft_read: drafter -> seconds of each token that it reads before it can draft: those that are new to it.
        reading: prompt tokens -> seconds that they add to a pass, ascending; empty: in proportion, by `prefill`.
        overhead: seconds of a step's bookkeeping, one committed token included.
        commit: seconds of each further committed token.
        observe: seconds of an observation and of a network's decision on it; only controllers that read it spend them.
        setup: seconds that a request's first step spends besides.
        setup_token: the same for each prompt token: matching and indexing.
        restore: seconds of each token taken from the prefix cache.
        intervals: figure -> ends of its median's 95 % interval (more than that for few rounds), seconds.
    """

    contexts: tuple[int, ...]
    verify: Mapping[int, tuple[float, ...]]
    spread: float
    draft: Mapping[str, float]
    prefill: float
    machine: str
    engine: str = ""
    draft_call: Mapping[str, float] = field(default_factory=dict)
    draft_read: Mapping[str, float] = field(default_factory=dict)
    reading: Mapping[int, float] = field(default_factory=dict)
    overhead: float = 0.0
    commit: float = 0.0
    observe: float = 0.0
    setup: float = 0.0
    setup_token: float = 0.0
    restore: float = 0.0
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        seconds = [s for times in self.verify.values() for s in times]
        if not self.contexts or list(self.contexts) != sorted(set(self.contexts)):
            raise ValueError("the contexts of a cost table must ascend")
        if 0 not in self.verify or any(len(times) != len(self.contexts) for times in self.verify.values()):
            raise ValueError("a cost table needs the plain step, and one time a context for each draft length")
        if not all(SHORTEST <= s <= LONGEST for s in seconds):
            raise ValueError(f"the times of a cost table must lie between {SHORTEST} and {LONGEST} seconds")
        drafting = [s for times in (self.draft, self.draft_call, self.draft_read) for s in times.values()]
        other = [getattr(self, name) for name in ("spread", "prefill", *_BOOKKEEPING)]
        if not all(0.0 <= s <= LONGEST for s in (*other, *drafting, *self.reading.values())):
            raise ValueError(f"the spread, draft, prefill and other times of a cost table must lie from 0 to {LONGEST}")
        if list(self.reading) != sorted(self.reading) or any(tokens < 1 for tokens in self.reading):
            raise ValueError("the prompt lengths of a cost table must ascend")

    def plain_seconds(self, context: int) -> float:
        """Seconds of a plain step at `context` tokens, interpolated between those measured; see `verify_seconds`."""
        return self.verify_seconds(0, context)

    def verify_seconds(self, k: int, context: int) -> float:
        """Seconds of a pass over k + 1 rows at `context` tokens; beyond the last context measured it grows as between
        the last two, and never falls. Raises `KeyError` for a k that was not measured."""
        times = self.verify[k]
        within = float(np.interp(context, self.contexts, times))
        beyond = context - self.contexts[-1]
        if beyond <= 0 or len(times) < 2:
            return within
        slope = (times[-1] - times[-2]) / (self.contexts[-1] - self.contexts[-2])
        return within + max(0.0, slope) * beyond

    def rows_seconds(self, k: int, context: int) -> float:
        """As `verify_seconds`, for any k up to the longest measured: in between it is interpolated.

        Raises `KeyError` for a longer one.
        """
        if k in self.verify:
            return self.verify_seconds(k, context)
        below = max(length for length in self.verify if length < k)
        above = min((length for length in self.verify if length > k), default=None)
        if above is None:
            raise KeyError(k)
        share = (k - below) / (above - below)
        return (1 - share) * self.verify_seconds(below, context) + share * self.verify_seconds(above, context)

    def reading_seconds(self, tokens: int) -> float:
        """Seconds that `tokens` prompt tokens add to a pass that starts with an empty buffer."""
        if not self.reading:
            return self.prefill * tokens
        lengths, times = [0, *self.reading], [0.0, *self.reading.values()]
        within = float(np.interp(tokens, lengths, times))
        slope = (times[-1] - times[-2]) / (lengths[-1] - lengths[-2])
        return within + max(0.0, slope) * max(0, tokens - lengths[-1])

    def step_seconds(
        self,
        context: int,
        committed: int,
        drafter: str = "",
        drafted: int = 0,
        read: int = 0,
        observed: bool = True,
    ) -> StepSeconds:
        """A whole step at `context` tokens, as live: its pass, its draft and its bookkeeping.

        Args:
            context: tokens of the request before the step.
            committed: tokens that it commits.
            drafter: who was asked for a draft; empty: nobody.
            drafted: how many tokens came.
            read: tokens that the drafter had to read first.
            observed: whether the controller read an observation.
        """
        draft = 0.0
        if drafter:
            draft = self.draft_call.get(drafter, 0.0) + self.draft[drafter] * drafted
            draft += self.draft_read.get(drafter, 0.0) * read
        overhead = self.overhead + self.commit * (committed - 1) + (self.observe if observed else 0.0)
        return StepSeconds(draft, self.rows_seconds(drafted, context), overhead)

    def first_seconds(self, prompt: int, cached: int) -> StepSeconds:
        """What a request's first step takes beyond `step_seconds`: reading the prompt outside a cached prefix."""
        verify = max(0.0, self.reading_seconds(prompt - 1) - self.reading_seconds(cached))
        return StepSeconds(0.0, verify, self.setup + self.setup_token * prompt + self.restore * cached)

    @property
    def deviation(self) -> float:
        """Standard deviation of a step's log time, were it normal: what sampled latencies are drawn with."""
        return self.spread / QUARTILE

    def verify_ratio(self, k: int) -> float:
        """v(k): a verify pass over a plain step, mean over the contexts; NaN-free, 1 for k = 0."""
        return float(np.mean(np.divide(self.verify[k], self.verify[0])))

    def draft_ratio(self, drafter: str) -> float:
        """c: one drafted token over a plain step."""
        return self.draft[drafter] / self._plain

    @property
    def prefill_ratio(self) -> float:
        """One prompt token over a plain step."""
        return self.prefill / self._plain

    @property
    def _plain(self) -> float:
        return float(np.mean(self.verify[0]))

    def covers(self, lengths: Sequence[int], drafters: Sequence[str]) -> bool:
        """Whether every draft length and drafter was measured."""
        return all(k in self.verify for k in lengths) and all(name in self.draft for name in drafters)

    def to_json(self) -> dict[str, Any]:
        document = asdict(self)
        for name in ("verify", "reading"):
            document[name] = {str(key): value for key, value in document[name].items()}
        return document

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> CostTable:
        """The inverse of `to_json`. Raises `KeyError`, `TypeError` or `ValueError` on a document of another form."""
        try:
            return cls._from_json(document)
        except OverflowError as error:
            raise ValueError(str(error)) from error

    @classmethod
    def _from_json(cls, document: Mapping[str, Any]) -> CostTable:
        return cls(
            contexts=tuple(int(c) for c in document["contexts"]),
            verify={int(k): tuple(float(s) for s in v) for k, v in document["verify"].items()},
            spread=float(document["spread"]),
            draft=_seconds(document["draft"]),
            prefill=float(document["prefill"]),
            machine=str(document["machine"]),
            engine=str(document["engine"]),
            draft_call=_seconds(document.get("draft_call", {})),
            draft_read=_seconds(document.get("draft_read", {})),
            reading={int(n): float(s) for n, s in document.get("reading", {}).items()},
            intervals={str(n): (float(low), float(high)) for n, (low, high) in document.get("intervals", {}).items()},
            **{name: float(document.get(name, 0.0)) for name in _BOOKKEEPING},
        )


_BOOKKEEPING = ("overhead", "commit", "observe", "setup", "setup_token", "restore")


def _seconds(document: Mapping[str, Any]) -> dict[str, float]:
    return {str(name): float(seconds) for name, seconds in document.items()}


def machine_fingerprint(device: str = "cpu") -> str:
    """A line that tells machines apart whose costs differ: processor or GPU, threads, torch version."""
    if device.startswith("cuda") and torch.cuda.is_available():
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{_processor()}, {THREADS} threads, {torch.backends.cpu.get_cpu_capability()}"
    return f"{name}, torch {torch.__version__}"


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
