"""What each option costs on this machine: measured on the engine itself, never estimated."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class CostTable:
    """Median seconds of every option.

    Attributes:
        contexts: context lengths that were timed, tokens, ascending.
        verify: k -> seconds of one target pass over k + 1 rows with its verdict, one number a context; k = 0 is the
            plain step.
        spread: relative half-width of the middle half of the plain step's times: how noisy this machine is.
        draft: drafter -> seconds of one drafted token.
        prefill: seconds of one prompt token.
        machine: what it was measured on.
        engine: what was measured, in one line: the target, its precision and the drafters.
    """

    contexts: tuple[int, ...]
    verify: Mapping[int, tuple[float, ...]]
    spread: float
    draft: Mapping[str, float]
    prefill: float
    machine: str
    engine: str = ""

    def __post_init__(self) -> None:
        seconds = [s for times in self.verify.values() for s in times]
        if not self.contexts or list(self.contexts) != sorted(set(self.contexts)):
            raise ValueError("the contexts of a cost table must ascend")
        if 0 not in self.verify or any(len(times) != len(self.contexts) for times in self.verify.values()):
            raise ValueError("a cost table needs the plain step, and one time a context for each draft length")
        if not all(0.0 < s < math.inf for s in seconds):
            raise ValueError("the times of a cost table must be positive")
        if not all(0.0 <= s < math.inf for s in (self.spread, self.prefill, *self.draft.values())):
            raise ValueError("the spread, draft and prefill times of a cost table must be finite")

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
        return asdict(self) | {"verify": {str(k): list(v) for k, v in self.verify.items()}}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> CostTable:
        """The inverse of `to_json`. Raises `KeyError`, `TypeError` or `ValueError` on a document of another form."""
        return cls(
            contexts=tuple(int(c) for c in document["contexts"]),
            verify={int(k): tuple(float(s) for s in v) for k, v in document["verify"].items()},
            spread=float(document["spread"]),
            draft={str(name): float(s) for name, s in document["draft"].items()},
            prefill=float(document["prefill"]),
            machine=str(document["machine"]),
            engine=str(document["engine"]),
        )


def machine_fingerprint(device: str = "cpu") -> str:
    """A line that tells machines apart whose costs differ: processor or GPU, threads, torch version."""
    if device.startswith("cuda") and torch.cuda.is_available():
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{_processor()}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
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
