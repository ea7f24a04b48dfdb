"""Made-up requests whose text is copied or new, and whose drafter knows which: what a learner should find out."""

from __future__ import annotations

import numpy as np

from engine.costs import CostTable
from engine.menu import Menu, parse_menu
from envs.trace import Trace, TraceSet

MENU: Menu = parse_menu("fresh/0,reuse/0,reuse/1,reuse/4,reuse/8", ["ngram"])
COPIED, NEW = 12, 1  # match lengths that the drafter tells
# A pass over k + 1 rows takes 1 + 0.3 k plain steps: drafting 8 pays where all hold, and nothing pays where none does.
COSTS = CostTable(
    contexts=(64, 512),
    verify={k: (0.01 * (1 + 0.3 * k), 0.012 * (1 + 0.3 * k)) for k in range(9)},
    spread=0.0,
    draft={"ngram": 1e-6},
    prefill=1e-3,
    machine="two cells",
)
# Where rows are free, as on a GPU, drafting costs nothing anywhere.
FLAT = CostTable(
    contexts=(64, 512),
    verify={k: (0.01 * (1 + 0.001 * k), 0.012 * (1 + 0.001 * k)) for k in range(9)},
    spread=0.0,
    draft={"ngram": 1e-6},
    prefill=1e-3,
    machine="flat",
)


def trace(rng: np.random.Generator, number: int) -> Trace:
    """Stretches of copied text, of 9 to 27 tokens, between new ones of 4 to 12."""
    copied = np.concatenate([np.repeat([True, False], [9 * rng.integers(1, 4), rng.integers(4, 13)]) for _ in range(3)])
    length = len(copied)
    ahead = np.array([next((n for n in range(9) if p + n >= length or not copied[p + n]), 8) for p in range(length)])
    left = length - np.arange(length)
    matched = np.where(copied, np.minimum(ahead, left), 0).astype(np.uint8)[None]
    return Trace(
        request=f"r{number}/1",
        kind="even" if number % 2 == 0 else "odd",
        group=f"g{number // 2}",
        prompt_tokens=40,
        cached_tokens=20 if number % 3 == 0 else 0,
        limit=length + 8,
        tokens=np.zeros(length, np.int32),
        proposed=np.full((1, length), 8, np.uint8),
        matched=matched,
        confidences=np.where(copied, 0.9, 0.1)[None, :, None] * np.ones(8),
        match_length=np.where(copied, COPIED, NEW).astype(np.int32)[None],
        support=np.ones((1, length), np.int32),
        signal_confidence=np.where(copied, 0.9, 0.1)[None],
        top_probability=np.full(length, 0.5),
        entropy=np.full(length, 1.0),
        margin=np.zeros(length),
    )


def two_cells(count: int, seed: int) -> TraceSet:
    rng = np.random.default_rng(seed)
    return TraceSet(tuple(trace(rng, number) for number in range(count)), ("ngram",), 8, (False,), "two cells")
