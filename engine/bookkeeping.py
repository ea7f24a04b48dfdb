"""What a live step spends beside its pass and its draft, measured on real sessions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from engine.drafters.told import ToldDrafter
from engine.menu import default_menu
from engine.observation import ObservationSchema
from engine.request import Request
from engine.results import StepRecord
from engine.session import Parts, Session
from engine.stopwatch import calibration_tokens

ROUNDS = 6
PROMPTS = (48, 240)  # tokens; the difference tells what a prompt token takes
PLAIN_STEPS = 6


@dataclass
class Bookkeeping:
    """Seconds, one figure a round; named as in `CostTable`."""

    overhead: list[float] = field(default_factory=list)
    commit: list[float] = field(default_factory=list)
    observe: list[float] = field(default_factory=list)
    setup: list[float] = field(default_factory=list)
    setup_token: list[float] = field(default_factory=list)
    restore: list[float] = field(default_factory=list)


def time_bookkeeping(parts: Parts, rounds: int = ROUNDS) -> Bookkeeping:
    """Decode prompts that nobody has seen, plainly, then again from the prefix cache with drafts that all hold."""
    longest = max(parts.menu.lengths, default=1)
    schema = ObservationSchema(parts.menu)
    book, told = Bookkeeping(), ToldDrafter()
    drafters = {**parts.drafters, told.name: told}
    parts = replace(parts, prefix_cache=parts.prefix_cache.emptied(), drafters=drafters)
    parts = replace(parts, menu=default_menu((told.name,), (longest,)))
    room = parts.runner.max_context - PLAIN_STEPS - longest - 2
    prompts = [max(1, min(count, room)) for count in PROMPTS]
    for turn in range(rounds + 1):
        kept = book if turn > 0 else Bookkeeping()  # the first turn warms up
        _time_round(parts, told, prompts, schema, turn, kept)
    return book


def _time_round(
    parts: Parts, told: ToldDrafter, prompts: Sequence[int], schema: ObservationSchema, turn: int, book: Bookkeeping
) -> None:
    plain: list[StepRecord] = []
    setups, restores, drafted = [], [], []
    for count in prompts:
        tokens = tuple(calibration_tokens(parts.runner.vocab_size, count, seed=1 + turn * len(prompts) + count))
        request = Request(tokens, PLAIN_STEPS + max(parts.menu.lengths) + 1, salt="calibration", ignore_eos=True)
        with Session(parts, request) as session:
            for _ in range(PLAIN_STEPS):
                started = time.perf_counter()
                schema.vector(session.observe())
                book.observe.append(time.perf_counter() - started)
                session.step(parts.menu.plain)
            told.text = list(session.tokens)
        setups.append(session.steps[0].seconds_overhead)
        plain += session.steps[1:]
        with Session(parts, request) as session:
            session.step(parts.menu.plain)
            session.step(parts.menu.find(max(parts.menu.lengths)))
        restores.append((session.steps[0].seconds_overhead, session.steps[0].cached))
        drafted.append(session.steps[1])
    overhead = float(np.median([step.seconds_overhead for step in plain]))
    book.overhead.append(overhead)
    further = [(s.seconds_overhead - overhead) / (len(s.tokens) - 1) for s in drafted if len(s.tokens) > 1]
    book.commit.append(max(0.0, float(np.median(further))) if further else 0.0)
    more = max(1, prompts[-1] - prompts[0])
    token = max(0.0, setups[-1] - setups[0]) / more
    book.setup_token.append(token)
    book.setup.append(max(0.0, setups[0] - overhead - token * prompts[0]))
    restored = max(0.0, restores[-1][0] - setups[-1])
    book.restore.append(restored / restores[-1][1] if restores[-1][1] else 0.0)
