"""Times of a runner's passes and of drafters, measured: what a calibration is made of."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np
import torch

from engine.drafters.base import Draft, Drafter
from engine.runner import Runner
from engine.sampling import GREEDY
from engine.verify import verify

LONGEST_PASS = 2.0  # seconds: prompts beyond the first one that takes longer are not timed
CONFIDENCE = 0.95


def time_passes(runner: Runner, options: Sequence[int], context: int, rounds: int) -> dict[int, np.ndarray]:
    """Seconds `[rounds]` of a verify pass for each draft length at one context.

    In each round every option runs once, so that drift of the machine touches all alike; the first round warms up.
    """
    prompt = calibration_tokens(runner.vocab_size, context + max(options) + 1)
    buffer = runner.new_buffer()
    runner.forward(prompt[:context], buffer, 1)
    generator = torch.Generator()
    times: dict[int, list[float]] = {k: [] for k in options}
    for turn in range(rounds + 1):
        for k in options:
            rows = prompt[context : context + k + 1]
            started = now(runner)
            logits = runner.forward(rows, buffer, k + 1)
            verify(logits, Draft(rows[1:], [1.0] * k), GREEDY, generator)
            if turn > 0:
                times[k].append(now(runner) - started)
            buffer.truncate(context)
    return {k: np.array(seconds) for k, seconds in times.items()}


def time_reading(runner: Runner, lengths: Sequence[int], rounds: int) -> dict[int, np.ndarray]:
    """Seconds `[rounds]` of a pass over n prompt tokens and one more, for each n; the first pass of each warms up."""
    times: dict[int, np.ndarray] = {}
    for length in lengths:
        prompt = calibration_tokens(runner.vocab_size, length + 1)
        buffer = runner.new_buffer()
        seconds = []
        for _ in range(1 + rounds):
            buffer.truncate(0)
            started = now(runner)
            runner.forward(prompt, buffer, 1)
            seconds.append(now(runner) - started)
        times[length] = np.array(seconds[1:])
        if np.median(times[length]) > LONGEST_PASS:
            break
    return times


def time_draft(runner: Runner, drafter: Drafter, k: int, rounds: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Seconds of a drafted token, of a draft besides, and of a token read first, `[rounds]` each.

    The text repeats, so that every drafter has something to propose. A pass of the target goes before each draft, as
    when decoding: it takes the drafter's data out of the processor's caches.
    """
    if k == 0:
        return np.zeros(rounds), np.zeros(rounds), np.zeros(rounds)
    tokens = calibration_tokens(runner.vocab_size, 64) * 2
    buffer = runner.new_buffer()
    token, call, read = [], [], []
    state = drafter.begin(tokens, salt="calibration")
    for turn in range(rounds + 1):
        seconds = {}
        for length in dict.fromkeys((1, k)):
            tokens.append(tokens[-64])
            runner.forward(tokens[-1:], buffer, 1)
            started = now(runner)
            proposed = len(state.propose(tokens, length).tokens)
            seconds[proposed] = now(runner) - started
        fresh = drafter.begin(tokens, salt="calibration")
        runner.forward(tokens[-1:], buffer, 1)
        buffer.truncate(0)
        started = now(runner)
        fewest, most = min(seconds), max(seconds)
        fresh.propose(tokens, 1)
        first = now(runner) - started
        each = (seconds[most] - seconds[fewest]) / (most - fewest) if most > fewest else seconds[most] / max(1, most)
        if turn > 0:  # the first turn warms up
            token.append(max(0.0, each))
            call.append(max(0.0, seconds[fewest] - token[-1] * fewest))
            read.append(max(0.0, first - seconds[fewest]) / len(tokens))
    return np.array(token), np.array(call), np.array(read)


def interval(times: np.ndarray) -> tuple[float, float]:
    """Ends of a 95 % interval of the median of independent times: order statistics, whatever their distribution.

    With fewer than 6 times the least and the greatest, which cover less.
    """
    ordered, count = np.sort(times), len(times)
    outside, cut = 2.0**-count, 0  # chance that the median lies below the `cut`-th of them
    while 2 * (outside + math.comb(count, cut + 1) * 2.0**-count) <= 1 - CONFIDENCE:
        cut += 1
        outside += math.comb(count, cut) * 2.0**-count
    return float(ordered[cut]), float(ordered[count - 1 - cut])


def calibration_tokens(vocab_size: int, count: int, seed: int = 0) -> list[int]:
    """Token ids to time passes on: what they say does not change the time."""
    return [int(token) for token in np.random.default_rng(seed).integers(0, vocab_size, count)]


def now(runner: Runner) -> float:
    """Seconds of a clock, read when the device has finished."""
    runner.synchronize()
    return time.perf_counter()
