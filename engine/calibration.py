"""Measuring the cost table of an engine, once for each machine."""

from __future__ import annotations

import hashlib
import json
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

import numpy as np

from engine.bookkeeping import Bookkeeping, time_bookkeeping
from engine.costs import CostTable, machine_fingerprint
from engine.errors import StorageError
from engine.session import Parts
from engine.stopwatch import interval, time_draft, time_passes, time_reading
from engine.storage import cache_folder, write_json

CONTEXTS = (128, 768)  # tokens already in the buffer when a step is timed
READINGS = (16, 64, 256, 768)  # prompt tokens
ROUNDS = 9
READING_ROUNDS = BOOKKEEPING_ROUNDS = 6
EVERY_LENGTH = 8  # draft lengths up to this are timed also where the menu lacks them: a drafter may propose fewer
NOISY = 0.15  # a spread of the plain step's times beyond this is warned of
TRIES = 3  # calibrations of a machine that is too noisy
FORMAT_VERSION = 4  # of the files kept


def cached_costs(engine: str, parts: Parts, device: str = "cpu") -> CostTable:
    """The cost table of an engine on this machine, from the cache folder, or measured now and kept there.

    `engine` names in one line what the costs depend on besides the machine: the target, its precision, the drafters.
    A table that cannot be kept is used all the same, with a warning. A machine that is too busy to tell is measured
    again, up to `TRIES` times in all; the least noisy table is then used with a warning, and not kept.
    """
    machine = machine_fingerprint(device)
    measured = [CONTEXTS, READINGS, ROUNDS]
    key = json.dumps([FORMAT_VERSION, engine, machine, sorted(parts.drafters), list(parts.menu.lengths), measured])
    path = cache_folder() / "costs" / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
    try:
        costs = CostTable.from_json(json.loads(path.read_text(encoding="utf-8")))
        if (costs.engine, costs.machine) == (engine, machine) and costs.covers(
            parts.menu.lengths, tuple(parts.drafters)
        ):
            return costs
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass  # never measured, damaged, or by a version that wrote another form
    print("draftgate: calibrating costs on this machine, once; up to a minute", file=sys.stderr, flush=True)
    costs = _least_noisy(parts, device, engine)
    if warning := noise_warning(costs):
        print(f"draftgate: {warning}", file=sys.stderr, flush=True)
        return costs
    try:
        write_json(path, costs.to_json())
    except StorageError as error:
        warnings.warn(f"the measured costs are not kept and will be measured again ({error})", stacklevel=2)
    return costs


def _least_noisy(parts: Parts, device: str, engine: str) -> CostTable:
    """The first table that can be trusted, else the one of the least spread."""
    tables: list[CostTable] = []
    while len(tables) < TRIES:
        if tables:
            print("draftgate: something else keeps this machine busy; calibrating again", file=sys.stderr, flush=True)
        tables.append(calibrate(parts, CONTEXTS, ROUNDS, device, engine))
        if noise_warning(tables[-1]) is None:
            break
    return min(tables, key=lambda table: table.spread)


def calibrate(
    parts: Parts,
    contexts: Sequence[int] = CONTEXTS,
    rounds: int = ROUNDS,
    device: str = "cpu",
    engine: str = "",
) -> CostTable:
    """Measure the cost table of an engine's menu, in seconds of work, with an interval for each figure."""
    longest = max(parts.menu.lengths, default=0)
    contexts = _within(contexts, parts.runner.max_context - longest - 2)
    samples = _measure(parts, contexts, rounds)
    middle = {name: float(np.median(times)) for name, times in samples.items()}
    reading = dict(
        sorted((int(name.rpartition(".")[2]), middle[name]) for name in samples if name.startswith("reading"))
    )
    figures: dict[str, Any] = {name: middle[name] for name in _BOOKKEEPING}
    figures |= {what: {name: middle[f"{what}.{name}"] for name in parts.drafters} for what in _DRAFTING}
    return CostTable(
        contexts=contexts,
        verify={k: tuple(middle[f"verify.{k}.{context}"] for context in contexts) for k in _options(parts)},
        spread=_spread([samples[f"verify.0.{context}"] for context in contexts]),
        prefill=float(np.median([seconds / tokens for tokens, seconds in reading.items()])),
        machine=machine_fingerprint(device),
        engine=engine,
        reading=dict(zip(reading, np.maximum.accumulate(list(reading.values())).tolist())),
        intervals={name: interval(times) for name, times in samples.items()},
        **figures,
    )


def noise_warning(costs: CostTable) -> str | None:
    """One line for people where the machine was too noisy for the costs to be trusted, else None."""
    if costs.spread <= NOISY:
        return None
    found = f"the times of a plain step spread by {costs.spread:.0%} here, beyond {NOISY:.0%}"
    return f"{found}: these costs are not to be trusted and not kept; stop what else runs and start again"


_DRAFTING = ("draft", "draft_call", "draft_read")
_BOOKKEEPING = tuple(field.name for field in fields(Bookkeeping))


def _measure(parts: Parts, contexts: Sequence[int], rounds: int) -> dict[str, np.ndarray]:
    """Seconds of each figure, one a round; named as in `CostTable.intervals`."""
    runner, longest = parts.runner, max(parts.menu.lengths, default=0)
    samples: dict[str, np.ndarray] = {}
    for context in contexts:
        passes = time_passes(runner, _options(parts), context, rounds)
        samples |= {f"verify.{k}.{context}": times for k, times in passes.items()}
    plain = [float(np.median(samples[f"verify.0.{context}"])) for context in contexts]
    lengths = _within(READINGS, runner.max_context - 2)
    for tokens, times in time_reading(runner, lengths, READING_ROUNDS).items():
        samples[f"reading.{tokens}"] = np.maximum(0.0, times - np.interp(tokens, contexts, plain))
    for name, drafter in parts.drafters.items():
        figures = time_draft(runner, drafter, longest, rounds)
        samples |= {f"{what}.{name}": times for what, times in zip(_DRAFTING, figures)}
    return samples | {
        name: np.array(times) for name, times in asdict(time_bookkeeping(parts, BOOKKEEPING_ROUNDS)).items()
    }


def _options(parts: Parts) -> tuple[int, ...]:
    """The draft lengths that are timed, the plain step among them."""
    lengths = parts.menu.lengths
    return (0, *sorted({*lengths, *range(1, min(max(lengths, default=0), EVERY_LENGTH) + 1)}))


def _within(counts: Sequence[int], most: int) -> tuple[int, ...]:
    """The counts in ascending order, each once, none beyond what the context window leaves."""
    return tuple(sorted({max(1, min(count, most)) for count in counts}))


def _spread(plain: Sequence[np.ndarray]) -> float:
    """Relative half-width of the middle half of plain steps' times."""
    low, high = np.percentile(np.concatenate([times / np.median(times) for times in plain]), [25, 75])
    return float(high - low) / 2
