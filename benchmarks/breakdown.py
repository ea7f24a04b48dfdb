"""Where a step's time goes, for plain steps and for drafted ones, in whole requests on the live engine.

Two requests alternate: a bare one, which gives the whole step, and one whose parts are timed. Both find their prompt in
the prefix cache, so that every step's pass has k + 1 rows, and store what they generate. The n-gram drafts are filled
up to k tokens. Nothing else is made up: the controller is asked at every step, though k is given.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.compiled_parts import PARTS, CycleLedger, InsideLook, can_look_inside, cycles_per_second
from benchmarks.profiled_parts import profile_pass
from benchmarks.stopwatch import FullDrafts, Stopwatch, Watched
from engine import Policy, SpeculativeDecoder
from engine.controllers import Controller
from engine.drafters.ngram import NGramDrafter
from engine.menu import default_menu
from engine.prefix_cache import PrefixCache
from engine.request import Request
from engine.session import Parts, Session

PASS, REST_OF_PASS = "pass", "Python of the pass"
CACHE, OBSERVATION, CONTROLLER, DRAFTER = "prefix cache", "observation", "controller", "n-gram drafter"
REST = "verdict, text, records"
ORDER = (*PARTS, REST_OF_PASS, CACHE, OBSERVATION, CONTROLLER, DRAFTER, REST)
CACHE_BYTES = 256 << 20
WARM_UP = 1  # turns that are thrown away; the first one compiles

Asked = tuple[Controller, list[bool]]  # the controller that is asked, and the mask of its own menu


@dataclass(frozen=True)
class Breakdown:
    """One step at one k.

    Attributes:
        whole: seconds of a bare step: a request's seconds over its steps.
        parts: part -> seconds of a step, in the order of `ORDER`. Their sum exceeds `whole` by what timing costs.
        by_difference: the parts that were not timed themselves: what is left of the one around them.
        inside: how the pass itself was taken apart.
    """

    k: int
    whole: float
    parts: dict[str, float]
    by_difference: tuple[str, ...]
    inside: str

    @property
    def sum(self) -> float:
        return sum(self.parts.values())


def break_down(
    decoder: SpeculativeDecoder,
    controller: str | Policy,
    prompt: list[int],
    lengths: Sequence[int],
    steps: int,
    rounds: int,
) -> list[Breakdown]:
    """Take the step of `decoder` behind `prompt` apart, for each draft length; the round of the median sum is told."""
    asked = decoder.with_controller(controller, guard=False).controller, decoder.parts.menu.mask(can_reuse=False)
    look = InsideLook(decoder.parts.runner) if can_look_inside(decoder.parts.runner) else None
    per_second = cycles_per_second() if look else 1.0
    found = []
    for k in lengths:
        turns = [_turn(decoder, asked, prompt, k, steps, look) for _ in range(WARM_UP + rounds)][WARM_UP:]
        turn = sorted(turns, key=lambda one: one.spent)[len(turns) // 2]
        if look:
            within = {part: cycles / per_second for part, cycles in turn.cycles.items()}
        else:
            within = profile_pass(decoder.parts.runner, len(prompt), k + 1)
        parts = turn.timed | within
        parts[REST_OF_PASS] = turn.timed[PASS] - sum(within.values())
        parts[REST] = turn.spent - sum(turn.timed.values())
        found.append(
            Breakdown(
                k,
                sorted(one.whole for one in turns)[len(turns) // 2],
                {name: parts.get(name, 0.0) for name in ORDER},
                (REST_OF_PASS, REST),
                "a clock read around each compiled loop" if look else "torch's profiler, in passes of their own",
            )
        )
    return found


@dataclass(frozen=True)
class _Turn:
    """A bare request and a timed one: seconds of a step of each, and of the timed one by part; cycles of its passes."""

    whole: float
    spent: float
    timed: dict[str, float]
    cycles: dict[str, float]


def _turn(
    decoder: SpeculativeDecoder, asked: Asked, prompt: list[int], k: int, steps: int, look: InsideLook | None
) -> _Turn:
    whole = _run(_parts(decoder, k, Stopwatch()), asked, prompt, k, steps)
    watch = Stopwatch()
    parts = _parts(decoder, k, watch)
    if look is None:
        spent, cycles = _run(parts, asked, prompt, k, steps, watch), {}
    else:
        with look.looking() as ledger:
            spent = _run(parts, asked, prompt, k, steps, watch, ledger)
        cycles = {part: count / steps for part, count in zip(PARTS, ledger.cycles.tolist(), strict=True)}
    return _Turn(whole, spent, {name: seconds / steps for name, seconds in watch.seconds.items()}, cycles)


def _parts(decoder: SpeculativeDecoder, k: int, watch: Stopwatch) -> Parts:
    """The engine with a cache of its own and full drafts, whose drafter is timed."""
    drafter = NGramDrafter()
    return replace(
        decoder.parts,
        menu=default_menu((drafter.name,), (0, k)),
        drafters={drafter.name: FullDrafts(drafter, DRAFTER, watch)},
        prefix_cache=PrefixCache(CACHE_BYTES, decoder.parts.prefix_cache.bytes_per_token),
    )


def _run(
    parts: Parts,
    asked: Asked,
    prompt: list[int],
    k: int,
    steps: int,
    watch: Stopwatch | None = None,
    ledger: CycleLedger | None = None,
) -> float:
    """Seconds of a step over a request whose prompt was stored before; timed where there is a watch."""
    request = Request(tuple(prompt), max_new_tokens=(k + 1) * (steps + 1), ignore_eos=True)
    _drive(parts, replace(request, max_new_tokens=1), asked, parts.menu.plain, 1, Stopwatch())
    if watch:
        watch.seconds.clear()
        parts = replace(
            parts,
            runner=Watched(parts.runner, PASS, watch),
            prefix_cache=Watched(parts.prefix_cache, CACHE, watch),  # type: ignore[arg-type]
        )
    if ledger:
        ledger.cycles[:] = 0
    started = time.perf_counter()
    _drive(parts, request, asked, parts.menu.find(k), steps, watch or Stopwatch())
    return (time.perf_counter() - started) / steps


def _drive(parts: Parts, request: Request, asked: Asked, action: int, steps: int, watch: Stopwatch) -> None:
    """The decoder's loop with a given action: observe, choose, step, learn."""
    controller, mask = asked
    with Session(parts, request) as session:
        for _ in range(steps):
            observation = watch.time(OBSERVATION, session.observe)
            watch.time(CONTROLLER, controller.choose, observation, mask)
            record = session.step(action)
            watch.time(CONTROLLER, controller.observe, record)
