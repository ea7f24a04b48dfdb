"""A session by hand: what its records tell, how it closes, and what happens where it cannot store its prefix."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
from tiny_models import WatchedRunner, load_tiny, make_parts, scripted_drafter, tiny_decoder

from engine.controllers import make_controller
from engine.decoder import SpeculativeDecoder
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
