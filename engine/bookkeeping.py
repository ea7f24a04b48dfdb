"""What a live step spends beside its pass and its draft, measured on real sessions."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from engine.drafters.factory import emptied
from engine.drafters.told import ToldDrafter
from engine.menu import Menu, default_menu
from engine.observation import Observation, ObservationSchema
from engine.policy_heads import HIDDEN, MLPHead
from engine.request import Request
from engine.results import StepRecord
from engine.session import Parts, Session
from engine.stopwatch import calibration_tokens

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


def time_bookkeeping(parts: Parts, rounds: int) -> Bookkeeping:
    """Decode prompts that nobody has seen, plainly, then again from the prefix cache with drafts that all hold."""
    longest = max(parts.menu.lengths, default=1)
    decide = _decision(parts.menu)
    book, told = Bookkeeping(), ToldDrafter()
    drafters = {**{name: emptied(drafter) for name, drafter in parts.drafters.items()}, told.name: told}
    parts = replace(parts, prefix_cache=parts.prefix_cache.emptied(), drafters=drafters)
    parts = replace(parts, menu=default_menu((told.name,), (longest,)))
    room = parts.runner.max_context - PLAIN_STEPS - longest - 2
    prompts = [max(1, min(count, room)) for count in PROMPTS]
    for turn in range(rounds + 1):
        kept = book if turn > 0 else Bookkeeping()  # the first turn warms up
        _time_round(parts, told, prompts, decide, turn, kept)
    return book


def _decision(menu: Menu) -> Callable[[Observation], int]:
    """A decision by a network of the usual size: what its weights are changes no time."""
    schema = ObservationSchema(menu)
    sizes = (len(schema), *HIDDEN, len(menu))
    weights = tuple(np.zeros(shape, np.float32) for shape in pairwise(sizes))
    biases = tuple(np.zeros(size, np.float32) for size in sizes[1:])
    head = MLPHead(np.zeros(len(schema), np.float32), np.ones(len(schema), np.float32), weights, biases)
    mask = menu.mask(can_reuse=False)
    return lambda observation: head.decide(schema.vector(observation), mask)


def _time_round(
    parts: Parts,
    told: ToldDrafter,
    prompts: Sequence[int],
    decide: Callable[[Observation], int],
    turn: int,
    book: Bookkeeping,
) -> None:
    plain: list[StepRecord] = []
    setups, restores, drafted, observed = [], [], [], []
    for count in prompts:
        tokens = tuple(calibration_tokens(parts.runner.vocab_size, count, seed=1 + turn * len(prompts) + count))
        request = Request(tokens, PLAIN_STEPS + max(parts.menu.lengths) + 1, salt="calibration", ignore_eos=True)
        with Session(parts, request) as session:
            for _ in range(PLAIN_STEPS):
                started = time.perf_counter()
                decide(session.observe())
                observed.append(time.perf_counter() - started)
                session.step(parts.menu.plain)
            told.text = list(session.tokens)
        setups.append(session.steps[0].seconds_overhead)
        plain += session.steps[1:]
        with Session(parts, request) as session:
            session.step(parts.menu.plain)
            session.step(parts.menu.find(max(parts.menu.lengths)))
        restores.append((session.steps[0].seconds_overhead, session.steps[0].cached))
        drafted.append(session.steps[1])
    book.observe.append(float(np.median(observed)))
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
