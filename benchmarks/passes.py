"""What verifying k drafts costs over a plain step: v(k), every k in each round, in an order that rotates."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch

from benchmarks.intervals import Estimate, paired_median
from engine.drafters.base import Draft
from engine.runner import Runner
from engine.sampling import GREEDY
from engine.verify import verify

WARM_UP = 2  # rounds that are thrown away


def time_passes(runner: Runner, lengths: Sequence[int], context: int, rounds: int) -> dict[int, np.ndarray]:
    """Seconds of a pass over k + 1 rows behind `context` tokens, verdict included: `[rounds]` for each k."""
    options = sorted({0, *lengths})
    tokens = [int(t) for t in np.random.default_rng(0).integers(0, runner.vocab_size, context + max(options) + 1)]
    buffer = runner.new_buffer()
    runner.forward(tokens[:context], buffer, 1)
    seconds: dict[int, list[float]] = {k: [] for k in options}
    generator = torch.Generator()
    for turn in range(WARM_UP + rounds):
        first = turn % len(options)
        for k in options[first:] + options[:first]:
            rows = tokens[context : context + k + 1]
            runner.synchronize()
            started = time.perf_counter()
            verify(runner.forward(rows, buffer, k + 1), Draft(rows[1:], [1.0] * k), GREEDY, generator)
            runner.synchronize()
            seconds[k].append(time.perf_counter() - started)
            buffer.truncate(context)
    return {k: np.array(measured[WARM_UP:]) for k, measured in seconds.items()}


def verify_ratios(seconds: dict[int, np.ndarray], seed: int = 0) -> dict[int, Estimate]:
    """v(k) with its interval, for every k above 0."""
    return {k: paired_median(measured, seconds[0], seed) for k, measured in seconds.items() if k > 0}


def fitting(contexts: Sequence[int], lengths: Sequence[int], runner: Runner) -> list[int]:
    """The contexts, cut to what the model can hold besides the longest draft."""
    most = runner.max_context - max(lengths, default=0) - 2
    return sorted({max(1, min(context, most)) for context in contexts})
