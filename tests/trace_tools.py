"""Recorded and made-up traces for tests."""

from __future__ import annotations

import numpy as np

from engine.costs import CostTable
from envs.trace import Trace, TraceSet
from envs.workloads import Conversation, Workload
from envs.workloads.conversation import Message


def talk(name: str, *turns: str) -> Conversation:
    """A conversation whose answers are the model's own."""
    return Conversation(name, "talk", tuple(Message("user", turn) for turn in turns))


TALKS = Workload(
    "talks",
    (
        talk("a", "the in and the in and the in", "again and again the in", "the then"),
        talk("b", "on the other thing in the end on the other thing"),
        talk("c", "er er er er an an an an er er er", "the 1 2 3 1 2 3 1 2 and"),
        talk("d", "the in and the in and the in"),  # asked before: a history knows the answer
    ),
)


def made_up_costs(rng: np.random.Generator, drafters: tuple[str, ...], longest: int = 8) -> CostTable:
    """A cost table in which every figure counts and no two are alike."""
    plain = np.array([0.01, 0.013, 0.02]) * rng.uniform(0.5, 2.0)
    steps = 1.0 + np.cumsum(rng.uniform(0.0, 0.4, longest + 1)) - 0.2
    lengths = (0, 1, 2, 3, 4, 7, longest)  # a drafter that proposes 5 or 6 is priced in between
    names = ("overhead", "commit", "observe", "setup", "setup_token", "restore")
    return CostTable(
        contexts=(40, 100, 300),
        verify={k: tuple((plain * (steps[k] if k else 1.0)).tolist()) for k in lengths},
        spread=0.05,
        draft={name: float(rng.uniform(1e-4, 3e-3)) for name in drafters},
        prefill=1e-3,
        machine="made up",
        draft_call={name: float(rng.uniform(1e-5, 1e-3)) for name in drafters},
        draft_read={name: float(rng.uniform(1e-5, 1e-3)) for name in drafters},
        reading={16: 0.012, 64: 0.05, 256: 0.3},
        **{name: float(rng.uniform(1e-5, 1e-3)) for name in names},
    )


def made_up_trace(rng: np.random.Generator, number: int, drafters: int = 2, max_k: int = 8) -> Trace:
    """A trace that obeys all rules, and is random otherwise."""
    limit = int(rng.integers(1, 40))
    length = limit if rng.random() < 0.5 else int(rng.integers(1, limit + 1))
    prompt = int(rng.integers(1, 400))
    proposed = rng.integers(0, max_k + 1, (drafters, length))
    left = length - np.arange(length)
    matched = np.minimum(proposed * rng.choice([0.0, 0.5, 1.0], proposed.shape), left).astype(np.uint8)
    confidences = np.cumprod(rng.uniform(0.5, 1.0, (drafters, length, max_k)), axis=-1)
    certain = rng.random((3, length)) * (np.arange(length) > 0)
    return Trace(
        request=f"talk{number // 2}/{number % 2 + 1}",
        kind="talk",
        group=f"talk{number // 2}",
        prompt_tokens=prompt,
        cached_tokens=int(rng.integers(0, prompt)) if rng.random() < 0.7 else 0,
        limit=limit,
        tokens=rng.integers(0, 50_000, length).astype(np.int32),
        proposed=proposed.astype(np.uint8),
        matched=matched,
        confidences=confidences * (np.arange(max_k) < proposed[..., None]),
        match_length=rng.integers(0, 90, (drafters, length)).astype(np.int32),
        support=rng.integers(0, 90, (drafters, length)).astype(np.int32),
        signal_confidence=rng.random((drafters, length)),
        top_probability=certain[0],
        entropy=10 * certain[1],
        margin=certain[2],
    )


def made_up_traces(seed: int, count: int = 12) -> TraceSet:
    """Traces of drafters "a", whose signal tells of the position, and "b", whose signal lags."""
    rng = np.random.default_rng(seed)
    traces = tuple(made_up_trace(rng, number) for number in range(count))
    return TraceSet(traces, ("a", "b"), 8, (False, True), "made up", {"seed": seed})
