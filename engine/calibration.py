"""Measuring the cost table of an engine, once for each machine."""

from __future__ import annotations

import hashlib
import json
import sys
import time
import warnings
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from engine.costs import CostTable, machine_fingerprint
from engine.drafters.base import Draft, Drafter
from engine.errors import StorageError
from engine.runner import Runner
from engine.sampling import GREEDY
from engine.storage import cache_folder, write_json
from engine.verify import verify

CONTEXTS = (128, 768)  # tokens already in the buffer when a step is timed
ROUNDS = 9
PREFILLS = 3  # timed at each context
FORMAT_VERSION = 2  # of the files kept


def cached_costs(
    engine: str, runner: Runner, drafters: Mapping[str, Drafter], lengths: Sequence[int], device: str = "cpu"
) -> CostTable:
    """The cost table of an engine on this machine, from the cache folder, or measured now and kept there.

    `engine` names in one line what the costs depend on besides the machine: the target, its precision, the drafters.
    A table that cannot be kept is used all the same, with a warning.
    """
    machine = machine_fingerprint(device)
    key = json.dumps([FORMAT_VERSION, engine, machine, sorted(drafters), sorted(set(lengths)), CONTEXTS, ROUNDS])
    path = cache_folder() / "costs" / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
    try:
        return CostTable.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass  # never measured, damaged, or by a version that wrote another form
    print("draftgate: calibrating costs on this machine", file=sys.stderr, flush=True)
    costs = calibrate(runner, drafters, lengths, machine=machine, engine=engine)
    try:
        write_json(path, costs.to_json())
    except StorageError as error:
        warnings.warn(f"the measured costs are not kept and will be measured again ({error})", stacklevel=2)
    return costs


def calibrate(
    runner: Runner,
    drafters: Mapping[str, Drafter],
    lengths: Sequence[int],
    contexts: Sequence[int] = CONTEXTS,
    rounds: int = ROUNDS,
    machine: str = "",
    engine: str = "",
) -> CostTable:
    """Measure the cost table of a runner and its drafters, in seconds of work.

    Warm-up first; then rounds in which every option runs once, so that drift of the machine touches all alike."""
    contexts = tuple(sorted({max(1, min(c, runner.max_context - max(lengths, default=0) - 2)) for c in contexts}))
    options = (0, *sorted(set(lengths) - {0}))
    verify_times: dict[int, list[float]] = {k: [] for k in options}
    prefill: list[float] = []
    plain_samples: list[np.ndarray] = []
    for context in contexts:
        samples, prefill_seconds = _time_context(runner, options, context, rounds)
        prefill.append(prefill_seconds / context)
        plain_samples.append(samples[0] / np.median(samples[0]))
        for k in options:
            verify_times[k].append(float(np.median(samples[k])))
    low, high = np.percentile(np.concatenate(plain_samples), [25, 75])
    return CostTable(
        contexts=contexts,
        verify={k: tuple(times) for k, times in verify_times.items()},
        spread=float(high - low) / 2,
        draft={name: _time_draft(runner, drafter, max(options), rounds) for name, drafter in drafters.items()},
        prefill=float(np.median(prefill)),
        machine=machine or machine_fingerprint(),
        engine=engine,
    )


def _time_context(
    runner: Runner, options: Sequence[int], context: int, rounds: int
) -> tuple[dict[int, np.ndarray], float]:
    """Seconds of each option at one context (`[rounds]` each), and of the prefill that led there."""
    prompt = calibration_tokens(runner.vocab_size, context + max(options) + 1)
    buffer = runner.new_buffer()
    prefills = []
    for _ in range(1 + PREFILLS):
        buffer.truncate(0)
        started = _now(runner)
        runner.forward(prompt[:context], buffer, 1)
        prefills.append(_now(runner) - started)
    generator = torch.Generator()
    times: dict[int, list[float]] = {k: [] for k in options}
    for turn in range(rounds + 1):
        for k in options:
            rows = prompt[context : context + k + 1]
            started = _now(runner)
            logits = runner.forward(rows, buffer, k + 1)
            verify(logits, Draft(rows[1:], [1.0] * k), GREEDY, generator)
            if turn > 0:  # the first turn warms up
                times[k].append(_now(runner) - started)
            buffer.truncate(context)
    return {k: np.array(seconds) for k, seconds in times.items()}, float(np.median(prefills[1:]))  # the first warms up


def _time_draft(runner: Runner, drafter: Drafter, k: int, rounds: int) -> float:
    """Median seconds of one drafted token: a text that repeats, so that every drafter has something to propose."""
    if k == 0:
        return 0.0
    tokens = calibration_tokens(runner.vocab_size, 64) * 2
    seconds: list[float] = []
    state = drafter.begin(tokens, salt="calibration")
    state.propose(tokens, k)
    for _ in range(rounds):
        tokens.append(tokens[-64])
        started = _now(runner)
        draft = state.propose(tokens, k)
        seconds.append((_now(runner) - started) / max(1, len(draft.tokens)))
    return float(np.median(seconds))


def calibration_tokens(vocab_size: int, count: int) -> list[int]:
    """Token ids to time passes on: what they say does not change the time."""
    return [int(token) for token in np.random.default_rng(0).integers(0, vocab_size, count)]


def _now(runner: Runner) -> float:
    runner.synchronize()
    return time.perf_counter()
