"""All that exact replay needs of requests that were decoded greedily, in memory and on disk.

Under greedy decoding the target's continuation is fixed. At a position p (tokens generated before the step) a step with
drafter d and draft length k therefore gives, for any controller:

    drafted   = min(k, limit - p - 1, proposed[d, p])
    accepted  = min(drafted, matched[d, p])
    committed = accepted + 1, or T - p where fewer remain

A controller that cuts its drafts where confidence is low drafts no further than the first of `confidences[d, p]` below
its limit. This holds for drafters whose draft of k tokens is the beginning of their longest draft.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from engine.errors import TraceError
from engine.sealed import SealedFormat

FORMAT = SealedFormat(
    name="traces",
    form="draftgate-traces",
    versions=(1,),
    error=TraceError,
    noun="traces",
    made="recording",
    again="record it again",
    wanted="give a folder that was recorded",
)

# name -> (type, axes before the positions', axes behind it); D drafters, K = max_k.
_ARRAYS: dict[str, tuple[type, str, str]] = {
    "tokens": (np.int32, "", ""),
    "proposed": (np.uint8, "D", ""),
    "matched": (np.uint8, "D", ""),
    "confidences": (np.float64, "D", "K"),
    "match_length": (np.int32, "D", ""),
    "support": (np.int32, "D", ""),
    "signal_confidence": (np.float64, "D", ""),
    "top_probability": (np.float64, "", ""),
    "entropy": (np.float64, "", ""),
    "margin": (np.float64, "", ""),
}
_COUNTS = ("prompt_tokens", "cached_tokens", "limit")


@dataclass(frozen=True, eq=False)
class Positions:
    """What was recorded at positions; `[N]` is a request's T positions, or those of many requests in a row.

    Numbers that observations or thresholds read are float64, as live ones are: replay then equals live to the bit.

    Attributes:
        tokens: int32 `[N]`, the token that plain decoding chose at each position.
        proposed: uint8 `[D, N]`, tokens that each drafter proposes if asked for max_k.
        matched: uint8 `[D, N]`, how many of them plain decoding continues with, at most those that remain.
        confidences: float64 `[D, N, max_k]`, one a proposed token, 0 behind the last.
        match_length, support: int32 `[D, N]`, of each drafter's signal before the step.
        signal_confidence: float64 `[D, N]`, of the same; of a lagging drafter as if it had drafted at every position.
        top_probability, entropy, margin: float64 `[N]`, of the target where the newest token was chosen, nats for the
            entropy; the margin is the top probability less the second one. Zeros at a request's first position.
    """

    tokens: np.ndarray
    proposed: np.ndarray
    matched: np.ndarray
    confidences: np.ndarray
    match_length: np.ndarray
    support: np.ndarray
    signal_confidence: np.ndarray
    top_probability: np.ndarray
    entropy: np.ndarray
    margin: np.ndarray

    def arrays(self) -> dict[str, np.ndarray]:
        return {name: getattr(self, name) for name in _ARRAYS}


@dataclass(frozen=True, eq=False)
class Trace(Positions):
    """One request.

    Attributes:
        request, kind, group: as in `envs.dialogue.Turn`.
        prompt_tokens: tokens of the prompt.
        cached_tokens: those of them that the prefix cache held, with requests decoded in the workload's order.
        limit: new tokens at most.
    """

    request: str
    kind: str
    group: str
    prompt_tokens: int
    cached_tokens: int
    limit: int

    @property
    def length(self) -> int:
        """T: tokens of the continuation."""
        return len(self.tokens)


@dataclass(frozen=True, eq=False)
class FlatTraces(Positions):
    """Many requests in a row: request r has the positions `offsets[r]` to `offsets[r + 1] - 1`.

    Attributes:
        offsets: int64 `[R + 1]`.
        prompt_tokens, cached_tokens, limit, length: int64 `[R]`.
    """

    offsets: np.ndarray
    prompt_tokens: np.ndarray
    cached_tokens: np.ndarray
    limit: np.ndarray
    length: np.ndarray


@dataclass(frozen=True, eq=False)
class TraceSet:
    """Traces of one engine.

    Attributes:
        traces: one a request, in the workload's order.
        drafters: names, in the order of the arrays' first axis.
        max_k: tokens that drafters were asked for at each position.
        lagging: which drafters' signal tells of the place where they last drafted, and not of the position.
        fingerprint: of the model, precision, drafters, prompts and lengths; see `envs.recorder`.
        provenance: for people; never acted on.
    """

    traces: tuple[Trace, ...]
    drafters: tuple[str, ...]
    max_k: int
    lagging: tuple[bool, ...]
    fingerprint: str = ""
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.lagging) != len(self.drafters) or len(set(self.drafters)) != len(self.drafters):
            raise ValueError("a set of traces needs one `lagging` a drafter, and drafters of different names")
        for trace in self.traces:
            _check(trace, len(self.drafters), self.max_k)

    def __len__(self) -> int:
        return len(self.traces)

    @property
    def num_tokens(self) -> int:
        """Tokens of all continuations."""
        return sum(trace.length for trace in self.traces)

    def subset(self, indices: Iterable[int]) -> TraceSet:
        """The traces at these places, in this order."""
        return replace(self, traces=tuple(self.traces[index] for index in indices))

    def of_conversations(self, ids: Iterable[str]) -> TraceSet:
        """The traces of conversations with these ids, in recorded order: how a split is taken out of a recording."""
        kept = set(ids)
        return replace(self, traces=tuple(t for t in self.traces if t.request.rpartition("/")[0] in kept))

    def flat(self) -> FlatTraces:
        """All positions in a row, for vectorised use; computed once."""
        return self._flat

    @cached_property
    def _flat(self) -> FlatTraces:
        if not self.traces:
            raise TraceError("the set holds no trace; record a workload that has requests")
        arrays = {name: _joined(name, [getattr(t, name) for t in self.traces]) for name in _ARRAYS}
        counts = {name: np.array([getattr(t, name) for t in self.traces], dtype=np.int64) for name in _COUNTS}
        length = np.array([t.length for t in self.traces], dtype=np.int64)
        return FlatTraces(**arrays, **counts, length=length, offsets=np.concatenate([[0], np.cumsum(length)]))

    def save(self, folder: str | Path) -> None:
        """Write the set into `folder`, each file atomically. Raises `StorageError`."""
        told = ("request", "kind", "group", "length", *_COUNTS)
        document = {
            "drafters": list(self.drafters),
            "max_k": self.max_k,
            "lagging": list(self.lagging),
            "fingerprint": self.fingerprint,
            "provenance": dict(self.provenance),
            "requests": [{name: getattr(trace, name) for name in told} for trace in self.traces],
        }
        FORMAT.write(Path(folder), document, self.flat().arrays())


def load_traces(folder: str | Path) -> TraceSet:
    """Load a set of traces. Raises `TraceError` where it is missing, truncated, altered or of another version."""
    document, arrays = FORMAT.read(Path(folder))
    FORMAT.check_document(Path(folder), document)
    try:
        return _assembled(document, arrays)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise TraceError(f"the traces in {folder} are damaged ({reason}); record them again") from error


def _assembled(document: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> TraceSet:
    traces, start = [], 0
    for told in document["requests"]:
        told = dict(told)
        end = start + told.pop("length")
        told |= {name: _positions_of(name, arrays[name], slice(start, end)) for name in _ARRAYS}
        traces.append(Trace(**told))
        start = end
    if start != len(arrays["tokens"]):
        raise ValueError("the lengths of the requests do not add up")
    return TraceSet(
        traces=tuple(traces),
        drafters=tuple(document["drafters"]),
        max_k=document["max_k"],
        lagging=tuple(document["lagging"]),
        fingerprint=document["fingerprint"],
        provenance=document["provenance"],
    )


def _check(trace: Trace, num_drafters: int, max_k: int) -> None:
    """Raise `ValueError` for arrays of another shape or numbers that cannot be."""
    sizes = {"D": num_drafters, "K": max_k}
    for name, (kind, before, behind) in _ARRAYS.items():
        array = getattr(trace, name)
        shape = (*(sizes[axis] for axis in before), trace.length, *(sizes[axis] for axis in behind))
        if array.dtype != kind or array.shape != shape:
            raise ValueError(
                f"{trace.request}: {name} is {array.dtype} {array.shape}, expected {kind.__name__} {shape}"
            )
    if not 1 <= trace.length <= trace.limit or not 0 <= trace.cached_tokens < trace.prompt_tokens:
        raise ValueError(f"{trace.request}: its lengths contradict each other")
    remaining = trace.length - np.arange(trace.length)
    if (trace.proposed > max_k).any() or (trace.matched > np.minimum(trace.proposed, remaining)).any():
        raise ValueError(f"{trace.request}: more tokens match than were proposed")


def _joined(name: str, parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts, axis=len(_ARRAYS[name][1]))


def _positions_of(name: str, array: np.ndarray, where: slice) -> np.ndarray:
    return array[:, where] if _ARRAYS[name][1] else array[where]
