"""A session by hand: what its records tell, how it closes, and what happens where it cannot store its prefix."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tiny_models import FunctionDrafter, WatchedRunner, load_tiny, make_parts, scripted_drafter, tiny_decoder

from engine.controller_names import make_controller
from engine.decoder import SpeculativeDecoder
from engine.drafters.base import Draft, Signal
from engine.errors import ControllerError, MenuError

PROMPT = list(range(40, 60))


def failing(error: BaseException) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[:1]])
def test_records_tell_the_first_step_and_the_context_before_each(prompt: list[int]) -> None:
    """The second time the whole prompt is cached and nothing prefilled: the first step is known all the same."""
    decoder = tiny_decoder(load_tiny("llama"), [scripted_drafter(prompt)], menu="reuse/0,reuse/3")
    for round_ in range(2):
        with decoder.session(prompt, 10, ignore_eos=True) as session:
            while not session.finished:
                before = len(session.tokens)
                record = session.step(len(session.steps) % 2)
                assert record.context == before
                assert record.first == (len(session.steps) == 1)
        assert [step.first for step in session.steps].count(True) == 1
        if round_ == 1:
            assert (session.steps[0].cached, session.steps[0].prefilled) == (len(prompt) - 1, 0)


def test_no_finish_reason_while_under_way() -> None:
    with tiny_decoder(load_tiny("llama")).session(PROMPT, 3, ignore_eos=True) as session:
        assert session.result().finish_reason is None
        session.step(1)
        assert session.result().finish_reason is None
        while not session.finished:
            session.step(1)
        assert session.result().finish_reason == "length"


def test_a_finished_request_holds_no_text_back() -> None:
    decoder = tiny_decoder(load_tiny("llama"))
    text = decoder.generate(PROMPT, 6, ignore_eos=True).text
    pieces = []
    with decoder.session(PROMPT, 6, ignore_eos=True, stop=text[-1] + "\x00") as session:
        while not session.finished:
            session.step(1)
            pieces.append(session.take_text())
    assert "".join(pieces) == text


def test_a_session_closes_at_the_end_of_its_block_even_by_an_error() -> None:
    decoder = tiny_decoder(load_tiny("llama"))
    cache = decoder.parts.prefix_cache
    with decoder.session(PROMPT, 3) as session:
        session.step(1)
        assert cache.statistics.stored_tokens == 0
    assert cache.statistics.stored_tokens == len(PROMPT)
    locked = []

    def fail() -> None:
        with decoder.session(PROMPT, 3) as session:
            locked.append(cache.statistics.locked_tokens)
            session.step(99)

    with pytest.raises(MenuError):
        fail()
    assert locked == [len(PROMPT)]  # a node is locked whole
    assert cache.statistics.locked_tokens == 0


@pytest.mark.parametrize("error", [RuntimeError("no memory left\nsecond line"), MemoryError()])
def test_a_prefix_that_cannot_be_stored_loses_neither_the_answer_nor_the_drafters(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = scripted_drafter(PROMPT)
    decoder = tiny_decoder(load_tiny("llama"), [drafter])
    expected = decoder.generate(PROMPT, 6, ignore_eos=True).tokens
    drafter.closed.clear()
    monkeypatch.setattr(decoder.parts.prefix_cache, "insert", failing(error))
    with pytest.warns(RuntimeWarning) as told:
        assert decoder.generate(PROMPT, 6, ignore_eos=True).tokens == expected
    reason = "no memory left" if str(error) else "MemoryError"
    assert [str(warning.message) for warning in told] == [f"the prefix was not kept ({reason})"]
    assert drafter.closed == [PROMPT + expected]
    assert decoder.parts.prefix_cache.statistics.locked_tokens == 0


def test_an_interrupt_while_storing_still_tells_the_drafters(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = scripted_drafter(PROMPT)
    decoder = tiny_decoder(load_tiny("llama"), [drafter])
    session = decoder.session(PROMPT, 6)
    session.step(1)
    monkeypatch.setattr(decoder.parts.prefix_cache, "insert", failing(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        session.close()
    assert len(drafter.closed) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        session.close()
    assert len(drafter.closed) == 1


# -- drafters that reach for what is not theirs -------------------------------------------------------------------


def overwrite(tokens: list[int]) -> None:
    tokens[0] = 1


TAMPERINGS: dict[str, Callable[[list[int]], object]] = {
    "append": lambda tokens: tokens.append(7),
    "clear": lambda tokens: tokens.clear(),
    "pop": lambda tokens: tokens.pop(),
    "last": lambda tokens: tokens.__setitem__(-1, tokens[-1] + 1),
    "first": overwrite,
}


@pytest.mark.parametrize("method", ["begin", "signal", "propose", "close"])
@pytest.mark.parametrize("kind", TAMPERINGS)
def test_a_drafter_that_writes_into_its_tokens_changes_nothing_else(kind: str, method: str) -> None:
    """Not the answer, not what other drafters read, not what other requests find in the prefix cache."""
    loaded = load_tiny("llama")
    truth = tiny_decoder(loaded).generate(PROMPT, 10, ignore_eos=True).tokens
    vandal, honest = scripted_drafter(PROMPT + truth, name="vandal"), scripted_drafter(PROMPT + truth, name="honest")
    inner = getattr(vandal, method)

    def tampering(tokens: list[int], *rest: Any) -> Any:
        answer = inner(tokens, *rest)
        TAMPERINGS[kind](tokens)
        return answer

    setattr(vandal, method, tampering)
    decoder = tiny_decoder(loaded, [vandal, honest], menu="reuse/0,reuse/vandal/2,reuse/honest/2")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with decoder.session(PROMPT, 10, ignore_eos=True) as session:
            while not session.finished:
                session.observe()
                record = session.step(1 + len(session.steps) % 2)
                assert record.drafter == "vandal" or record.accepted == record.drafted
    assert session.generated == truth
    assert session.tokens == PROMPT + truth == honest.closed[0]
    what = f"drafter vandal failed in {method} (ValueError: it changed the tokens that it was given); "
    assert [str(warning.message).startswith(what) for warning in told] == ([] if kind == "first" else [True])
    setattr(vandal, method, inner)
    assert decoder.generate(PROMPT, 10, ignore_eos=True).tokens == truth
    decoder.parts.prefix_cache.check_integrity()


def test_a_drafter_is_handed_its_own_text_whole_again_after_it_was_cleared() -> None:
    read: list[list[int]] = []

    def propose(tokens: list[int], k: int, sampling: object) -> Draft:
        read.append(list(tokens))
        tokens.clear()
        return Draft([], [])

    decoder = tiny_decoder(load_tiny("llama"), [FunctionDrafter(propose)], menu="reuse/0,reuse/2")
    with pytest.warns(RuntimeWarning, match="it changed the tokens that it was given"):
        generation = decoder.with_controller("fixed:2", guard=False).generate(PROMPT, 4, ignore_eos=True)
    assert read == [PROMPT + generation.tokens[:count] for count in range(3)]
    assert generation.counters.num_drafter_failures == 3


@pytest.mark.parametrize(
    "signal",
    [None, 3, Signal(confidence=float("nan")), Signal(match_length=float("inf")), Signal(support="2")],  # type: ignore[arg-type]
    ids=str,
)
def test_a_signal_that_is_none_counts_as_knowing_nothing(signal: Any) -> None:
    drafter: Any = scripted_drafter(PROMPT)
    drafter.signal = lambda tokens: signal
    with tiny_decoder(load_tiny("llama"), [drafter]).session(PROMPT, 3) as session:
        with pytest.warns(RuntimeWarning, match="failed in signal .*; it counts as knowing nothing"):
            assert session.observe().signals == {"scripted": Signal()}
        assert session.counters().num_drafter_failures == 1


def test_a_draft_that_never_ends_is_refused() -> None:
    endless: Any = itertools.repeat(5)
    drafter = FunctionDrafter(lambda tokens, k, sampling: Draft(endless, [1.0] * k))
    decoder = tiny_decoder(load_tiny("llama"), [drafter], menu="reuse/0,reuse/2")
    with pytest.warns(RuntimeWarning, match="more than 2 tokens proposed where 2 were asked for"):
        generation = decoder.with_controller("fixed:2", guard=False).generate(PROMPT, 4, ignore_eos=True)
    assert generation.counters.num_draft_tokens == 0


def test_a_drafter_without_a_state_is_left_out() -> None:
    drafter: Any = scripted_drafter(PROMPT)
    drafter.begin = lambda tokens, salt: None
    with pytest.warns(RuntimeWarning, match="failed in begin .*it gave no state.; this request goes on without it"):
        generation = tiny_decoder(load_tiny("llama"), [drafter], "fixed:2").generate(PROMPT, 4, ignore_eos=True)
    assert (generation.counters.num_drafter_failures, generation.counters.num_drafts) == (1, 0)


# -- controllers of one's own -------------------------------------------------------------------------------------


class Bare:
    """All that an engine asks of a controller."""

    def __init__(self, action: int) -> None:
        self.action = action
        self.seen: list[Any] = []

    def choose(self, observation: Any, mask: Any) -> int:
        self.seen.append(observation)
        return self.action


def learning(leave_out: str) -> Any:
    """A controller with every member but one."""

    def observe(self: Any, record: Any) -> None:
        self.records.append(record)

    members = {"name": "mine", "needs_observation": False, "min_confidence": 0.25, "observe": observe, "records": []}
    return type("Part", (Bare,), {name: member for name, member in members.items() if name != leave_out})(1)


def around(controller: Any) -> SpeculativeDecoder:
    loaded = load_tiny("llama")
    parts = make_parts(loaded, [scripted_drafter(PROMPT)], "reuse/0,reuse/3", runner=WatchedRunner(loaded.runner))
    plain = SpeculativeDecoder(parts, make_controller("plain", parts.menu), loaded)
    return plain.with_controller(controller, guard=False)


def test_an_object_with_choose_is_a_controller() -> None:
    bare = Bare(1)
    decoder = around(bare)
    generation = decoder.generate(PROMPT, 8, ignore_eos=True)
    assert {step.k for step in generation.steps} == {3}
    assert [seen.context for seen in bare.seen] == [step.context for step in generation.steps]
    assert (decoder.controller.name, decoder.controller.min_confidence) == ("Bare", 0.0)


@pytest.mark.parametrize("lacks", ["", "name", "min_confidence", "needs_observation", "observe"])
def test_what_an_object_has_is_used(lacks: str) -> None:
    mine = learning(lacks)
    decoder = around(mine)
    generation = decoder.generate(PROMPT, 8, ignore_eos=True)
    assert mine.records == ([] if lacks == "observe" else generation.steps)
    assert decoder.controller.name == ("Part" if lacks == "name" else "mine")
    assert decoder.controller.min_confidence == (0.0 if lacks == "min_confidence" else 0.25)
    assert all(seen is None for seen in mine.seen) == (lacks != "needs_observation")
    assert (decoder.controller is mine) == (lacks == "")


@pytest.mark.parametrize("thing", [3, None, object(), type("Odd", (), {"choose": 3})()])
def test_what_cannot_choose_is_refused(thing: Any) -> None:
    with pytest.raises(ControllerError, match="is no controller; give a name, a policy, or define choose"):
        around(thing)


def test_a_class_in_place_of_an_object_is_refused() -> None:
    with pytest.raises(ControllerError, match="Bare is a class; give an object of it"):
        around(Bare)


@pytest.mark.parametrize(
    "cut", [-0.1, 1.1, float("nan"), 10**400, "0.5", None, True, [0.5]], ids=lambda cut: str(cut)[:9]
)
def test_a_cut_that_is_no_share_is_refused(cut: Any) -> None:
    bare: Any = Bare(0)
    bare.min_confidence = cut
    with pytest.raises(ControllerError, match=r"min_confidence of Bare is .*; give a number from 0 to 1"):
        around(bare)


@pytest.mark.parametrize("cut", [0, 1, 0.5, np.float32(0.5)])
def test_a_cut_of_any_real_kind_is_taken(cut: Any) -> None:
    bare: Any = Bare(0)
    bare.min_confidence = cut
    assert around(bare).controller.min_confidence == cut


def test_an_observe_that_cannot_be_called_is_refused() -> None:
    bare: Any = Bare(0)
    bare.observe = None
    with pytest.raises(ControllerError, match="observe of Bare cannot be called; make it a method, or leave it out"):
        around(bare)
