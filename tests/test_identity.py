"""The promise: the same tokens as plain decoding, whatever the menu, the drafter, the cache and the architecture.

The reference is a loop of its own that keeps no KV at all. Tiny random models in fp32; the reference asserts that no
token hangs on rounding.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import pytest
import torch
from tiny_models import (
    CONTEXT,
    TARGETS,
    FunctionDrafter,
    WatchedRunner,
    load_tiny,
    make_parts,
    random_tokens,
    reference,
    scripted_drafter,
    tiny_decoder,
    tiny_model_drafter,
    tiny_tokenizer,
    vocab_size,
)

from engine.controllers import BaseController
from engine.decoder import SpeculativeDecoder
from engine.drafters.base import Draft
from engine.drafters.ngram import NGramDrafter
from engine.errors import MenuError, NumericalError, PromptError
from engine.models import LoadedModel
from engine.request import Request
from engine.results import Generation
from engine.session import Session

PROMPT = tuple(random_tokens(11))


@lru_cache
def truth(name: str, prompt: tuple[int, ...] = PROMPT, count: int = 48, **settings: Any) -> list[int]:
    return reference(load_tiny(name, **settings), prompt, count)


class RandomController(BaseController):
    """Any allowed action at any time."""

    def __init__(self, seed: int, min_confidence: float = 0.0) -> None:
        self.random = random.Random(seed)
        self.min_confidence = min_confidence

    def choose(self, observation: object, mask: Sequence[bool]) -> int:
        return self.random.choice([index for index, allowed in enumerate(mask) if allowed])


def check_generation(generation: Generation, prompt: Sequence[int]) -> None:
    """What every generation's records owe each other."""
    steps, counters = generation.steps, generation.counters
    assert [token for step in steps for token in step.tokens] == generation.tokens
    for step in steps[:-1]:
        assert len(step.tokens) == step.accepted + 1
    for index, step in enumerate(steps):
        assert 0 <= step.accepted <= step.drafted <= step.k
        assert step.drafted == step.accepted + len(step.rejected)
        assert step.prefilled + step.cached + 1 == (len(prompt) if index == 0 else 1)
    assert counters.num_generated_tokens == len(generation.tokens)
    assert counters.num_prompt_tokens == len(prompt)
    assert counters.num_accepted_tokens == sum(step.accepted for step in steps)
    assert counters.num_draft_tokens == sum(step.drafted for step in steps)


# -- every architecture -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", TARGETS)
def test_every_accepted_length_of_every_draft_length(name: str, packed: bool) -> None:
    pairs = [(k, accepted) for k in (1, 2, 3, 4, 6) for accepted in range(k + 1)]
    random.Random(1).shuffle(pairs)
    count = sum(accepted + 1 for _, accepted in pairs)
    text = [*PROMPT, *truth(name, count=count)]
    accepted_now = 0
    drafter = scripted_drafter(text, right=lambda k: accepted_now)
    parts = make_parts(
        load_tiny(name, packed=packed), [drafter], menu="reuse/0,reuse/1,reuse/2,reuse/3,reuse/4,reuse/6"
    )
    session = Session(parts, Request(PROMPT, max_new_tokens=CONTEXT, ignore_eos=True))
    for k, accepted in pairs:
        accepted_now = accepted
        record = session.step(parts.menu.find(k))
        assert (record.drafted, record.accepted, len(record.tokens)) == (k, accepted, accepted + 1)
        assert len(record.rejected) == k - accepted
        assert session.tokens == text[: len(session.tokens)]
    assert session.tokens == text


@pytest.mark.parametrize("name", TARGETS)
def test_random_actions_over_requests_that_share_prefixes(name: str) -> None:
    target = load_tiny(name)
    tails = [(), tuple(random_tokens(3, 5)), tuple(random_tokens(2, 6))]
    texts = [[*PROMPT, *tail, *truth(name, (*PROMPT, *tail), 36)] for tail in tails]
    scripted = FunctionDrafter(lambda tokens, k, sampling: Draft([], []))
    menu = (
        "fresh/0,reuse/0,fresh/scripted/3,reuse/scripted/1,reuse/scripted/5,reuse/ngram/4,reuse/model/3,fresh/model/7"
    )
    decoder = tiny_decoder(target, [scripted, NGramDrafter(), tiny_model_drafter(target)], menu=menu)
    for seed in range(9):
        text, prompt = texts[seed % 3], (*PROMPT, *tails[seed % 3])
        rng = random.Random(seed)
        scripted.function = scripted_drafter(text, right=lambda k, rng=rng: rng.randint(0, k)).function
        generation = decoder.with_controller(RandomController(seed, rng.choice([0.0, 0.4]))).generate(
            prompt, 36, ignore_eos=True
        )
        assert generation.tokens == text[len(prompt) :]
        assert generation.finish_reason == "length"
        check_generation(generation, prompt)
        decoder.parts.prefix_cache.check_integrity()


def test_texts_are_neither_constant_nor_uniform() -> None:
    """Otherwise the tests above would notice little."""
    for name in TARGETS:
        assert len(set(truth(name))) >= 8


# -- drafters good and bad ----------------------------------------------------------------------------------------


def _wrong(tokens: list[int], k: int, text: list[int]) -> Draft:
    at = len(tokens)
    return Draft([(token + 1) % vocab_size() for token in [*text[at : at + k], *[0] * k][:k]], [1.0] * k)


def _right(tokens: list[int], k: int, text: list[int]) -> Draft:
    return Draft(text[len(tokens) : len(tokens) + k], [1.0] * k)


def _raising(tokens: list[int], k: int, text: list[int]) -> Draft:
    raise OSError("the drafter is gone")


def _with_probs(fill: Callable[[int], torch.Tensor]) -> Callable[[list[int], int, list[int]], Draft]:
    def propose(tokens: list[int], k: int, text: list[int]) -> Draft:
        return Draft(text[len(tokens) : len(tokens) + k], [1.0] * k, fill(k))

    return propose


BROKEN: dict[str, Callable[[list[int], int, list[int]], Any]] = {
    "raising": _raising,
    "too many": lambda tokens, k, text: Draft([0] * (k + 1), [1.0] * (k + 1)),
    "nothing at all": lambda tokens, k, text: None,
    "no whole numbers": lambda tokens, k, text: Draft([0.5] * k, [1.0] * k),  # type: ignore[list-item]
    "no numbers": lambda tokens, k, text: Draft(["a"] * k, [1.0] * k),  # type: ignore[list-item]
    "nan probs": _with_probs(lambda k: torch.full((k, vocab_size()), float("nan"))),
    "negative probs": _with_probs(lambda k: torch.full((k, vocab_size()), -1.0)),
    "too few probs": _with_probs(lambda k: torch.ones(k - 1, vocab_size()) / vocab_size()),
    "flat probs": _with_probs(lambda k: torch.ones(k) / k),
    "probs that sum to 2": _with_probs(lambda k: torch.full((k, vocab_size()), 2.0 / vocab_size())),
    "out of vocabulary with probs": lambda tokens, k, text: Draft(
        [vocab_size()] * k, [1.0] * k, torch.ones(k, vocab_size() + 1) / (vocab_size() + 1)
    ),
}

SOUND: dict[str, tuple[Callable[[list[int], int, list[int]], Draft], int]] = {  # propose, tokens accepted of 4
    "right": (_right, 4),
    "always wrong": (_wrong, 0),
    "empty": (lambda tokens, k, text: Draft([], []), 0),
    "fewer": (lambda tokens, k, text: _right(tokens, 1, text), 1),
    "out of vocabulary": (lambda tokens, k, text: Draft([vocab_size()] * k, [1.0] * k), 0),
    "negative": (lambda tokens, k, text: Draft([-1] * k, [1.0] * k), 0),
    "out of vocabulary behind two": (
        lambda tokens, k, text: Draft([*_right(tokens, 2, text).tokens, vocab_size(), 0][:k], [1.0] * k),
        2,
    ),
}


def _decode(
    propose: Callable[[list[int], int, list[int]], Draft], **settings: Any
) -> tuple[Generation, SpeculativeDecoder]:
    text = [*PROMPT, *truth("llama")]
    drafter = FunctionDrafter(lambda tokens, k, sampling: propose(tokens, k, text))
    decoder = tiny_decoder(load_tiny("llama"), [drafter], "fixed:4")
    return decoder.generate(PROMPT, 31, ignore_eos=True, **settings), decoder


@pytest.mark.parametrize("kind", SOUND)
def test_sound_drafters(kind: str) -> None:
    propose, accepted = SOUND[kind]
    generation, _ = _decode(propose)
    assert generation.tokens == truth("llama")[:31]
    assert [step.accepted for step in generation.steps[:-1]] == [accepted] * (len(generation.steps) - 1)
    assert generation.counters.num_drafter_failures == 0
    check_generation(generation, PROMPT)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", BROKEN)
def test_broken_drafters_are_warned_of_once_and_cost_nothing(kind: str, temperature: float) -> None:
    with pytest.warns(RuntimeWarning, match="drafter scripted failed in propose .*; such a step runs plain") as warned:
        generation, decoder = _decode(BROKEN[kind], temperature=temperature, seed=5)
    assert len(warned) == 1
    plain = decoder.with_controller("plain").generate(PROMPT, 31, ignore_eos=True, temperature=temperature, seed=5)
    assert generation.tokens == plain.tokens
    assert temperature > 0 or plain.tokens == truth("llama")[:31]
    # The last step has room for no draft, so nobody is asked.
    assert generation.counters.num_drafter_failures == generation.counters.num_steps - 1 == 30
    assert generation.counters.num_drafts == 0


@pytest.mark.parametrize(
    ("method", "then"),
    [
        ("begin", "this request goes on without it"),
        ("signal", "it counts as knowing nothing"),
        ("close", "it may forget this request"),
    ],
)
def test_a_drafter_that_fails_elsewhere(method: str, then: str) -> None:
    def fail(*args: object) -> None:
        raise KeyError("no such state")

    drafter = scripted_drafter([*PROMPT, *truth("llama")])
    setattr(drafter, method, fail)

    class Watching(RandomController):
        needs_observation = True

    decoder = tiny_decoder(load_tiny("llama"), [drafter], Watching(3))
    with pytest.warns(RuntimeWarning) as warned:
        generation = decoder.generate(PROMPT, 24, ignore_eos=True)
    told = f"drafter scripted failed in {method} (KeyError: 'no such state'); {then}"
    assert [str(warning.message) for warning in warned] == [told]
    assert generation.tokens == truth("llama")[:24]
    assert (generation.counters.num_drafts > 0) == (method != "begin")


def test_one_failing_drafter_leaves_the_other_at_work() -> None:
    text = [*PROMPT, *truth("llama")]
    broken = FunctionDrafter(lambda tokens, k, sampling: _raising(tokens, k, text), name="broken")
    decoder = tiny_decoder(load_tiny("llama"), [broken, scripted_drafter(text)], "fixed:4:scripted")
    assert decoder.generate(PROMPT, 20, ignore_eos=True).counters.num_accepted_tokens == 16


# -- prefixes and turns -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("controller", ["plain", "fresh", "fixed:3", "fixed:8", "heuristic", "threshold:0.3"])
@pytest.mark.parametrize("packed", [False, True])
def test_turns_of_a_conversation(controller: str, packed: bool) -> None:
    target = load_tiny("llama", packed=packed)
    decoder = tiny_decoder(target, [NGramDrafter(), tiny_model_drafter(target)], controller)
    messages: list[dict[str, str]] = []
    previous = 0
    for question in ("Name the rivers and the other", "and the king?", "the in and out"):
        messages.append({"role": "user", "content": question})
        prompt = decoder.encode(messages)
        generation = decoder.generate(messages, 20, ignore_eos=True)
        assert generation.tokens == truth("llama", tuple(prompt), 20)
        cached = generation.counters.num_cached_tokens
        assert cached == 0 if controller == "fresh" else cached >= previous
        previous = len(prompt)  # the rendered reply may differ from the generated tokens; the prompt before it cannot
        messages.append({"role": "assistant", "content": generation.text})
        decoder.parts.prefix_cache.check_integrity()


@pytest.mark.parametrize("name", TARGETS)
def test_full_and_partial_hits_with_fresh_and_reusing_first_steps(name: str) -> None:
    target = load_tiny(name)
    shorter = PROMPT[:7]
    texts = {prompt: [*prompt, *truth(name, prompt, 12)] for prompt in (PROMPT, shorter)}
    for first, second in ((PROMPT, PROMPT), (PROMPT, shorter), (shorter, PROMPT)):
        scripted = scripted_drafter(texts[second])
        menu = "fresh/0,reuse/0,fresh/4,reuse/4"
        for action in range(4):
            decoder = tiny_decoder(target, [scripted], menu=menu)
            decoder.generate(first, 1, ignore_eos=True)
            session = decoder.session(second, 12, ignore_eos=True)
            assert session.observe().cached_tokens == min(len(first), len(second) - 1)
            record = session.step(action)
            assert record.cached == (0 if action in (0, 2) else min(len(first), len(second) - 1))
            while not session.finished:
                session.step(3)
            session.close()
            assert session.tokens == texts[second]
            decoder.parts.prefix_cache.check_integrity()


def test_what_was_generated_is_cached_up_to_the_last_verified_token() -> None:
    decoder = tiny_decoder(load_tiny("llama"), [scripted_drafter([*PROMPT, *truth("llama")])], "fixed:8")
    generation = decoder.generate(PROMPT, 15, ignore_eos=True)
    longer = decoder.generate([*PROMPT, *generation.tokens, 3], 1, ignore_eos=True)
    # The newest token was never read.
    assert longer.counters.num_cached_tokens == len(PROMPT) + 14


def test_salts_share_nothing() -> None:
    decoder = tiny_decoder(load_tiny("llama"))
    for salt, cached in (("a", 0), ("b", 0), ("", 0), ("a", 10), ("b", 10)):
        generation = decoder.generate(PROMPT, 8, salt=salt, ignore_eos=True)
        assert generation.counters.num_cached_tokens == cached
        assert generation.tokens == truth("llama")[:8]
        decoder.parts.prefix_cache.check_integrity()


def test_a_cache_that_holds_almost_nothing() -> None:
    decoder = tiny_decoder(
        load_tiny("llama"), [scripted_drafter([*PROMPT, *truth("llama")])], "fixed:4", cache_tokens=5
    )
    for cached in (0, 5, 5):
        generation = decoder.generate(PROMPT, 20, ignore_eos=True)
        assert generation.tokens == truth("llama")[:20]
        assert generation.counters.num_cached_tokens == cached
        decoder.parts.prefix_cache.check_integrity()


# -- where a request ends -----------------------------------------------------------------------------------------


def all_lengths(generate: Callable[[SpeculativeDecoder], Generation], eos_ids: set[int], name: str = "llama") -> None:
    """The result must be that of plain decoding under every draft length, accepted in full or in part."""
    plain: Generation | None = None
    for k in (0, 1, 2, 3, 4, 6, 8):
        for wrong in (None, 0, 2):
            drafter = scripted_drafter([*PROMPT, *truth(name)], right=lambda k, w=wrong: k if w is None else w)
            decoder = tiny_decoder(load_tiny(name), [drafter], f"fixed:{k}", eos_ids=eos_ids)
            one = generate(decoder)
            plain = plain or one
            assert (one.tokens, one.text, one.finish_reason) == (plain.tokens, plain.text, plain.finish_reason)
            check_generation(one, PROMPT)
            decoder.parts.prefix_cache.check_integrity()
            again = generate(decoder)  # now from the cache, which must not hold tokens behind the end
            assert (again.tokens, again.text) == (plain.tokens, plain.text)


@pytest.mark.parametrize("place", [0, 1, 4, 7, 12])
def test_end_of_sequence_inside_an_accepted_draft(place: int) -> None:
    continuation = truth("llama")
    end = next(i for i in range(place, 48) if continuation[i] not in continuation[:i])

    def generate(decoder: SpeculativeDecoder) -> Generation:
        generation = decoder.generate(PROMPT, 48)
        assert generation.tokens == continuation[: end + 1]
        assert generation.finish_reason == "stop"
        return generation

    all_lengths(generate, {continuation[end]})


def test_nothing_is_held_behind_the_end() -> None:
    continuation = truth("llama")
    end = next(i for i in range(2, 8) if continuation[i] not in continuation[:i])
    drafter = scripted_drafter([*PROMPT, *continuation])
    decoder = tiny_decoder(load_tiny("llama"), [drafter], eos_ids={continuation[end]}, menu="reuse/0,reuse/16")
    session = decoder.session(PROMPT, 48)
    record = session.step(decoder.parts.menu.find(16))
    assert (record.drafted, record.accepted, len(record.rejected)) == (16, end + 1, 15 - end)
    assert session._buffer.length == len(session.tokens) == len(PROMPT) + end + 1
    session.close()
    # Neither is the newest token kept, which plain decoding would not hold.
    assert decoder.parts.prefix_cache.match([*PROMPT, *continuation]).length == len(session.tokens) - 1


def test_end_of_sequence_ignored() -> None:
    continuation = truth("llama")

    def generate(decoder: SpeculativeDecoder) -> Generation:
        generation = decoder.generate(PROMPT, 20, ignore_eos=True)
        assert generation.tokens == continuation[:20]
        assert generation.finish_reason == "length"
        return generation

    all_lengths(generate, {continuation[3]})


@pytest.mark.parametrize("place", [0, 2, 5, 11])
def test_stop_string_completed_inside_an_accepted_draft(place: int) -> None:
    continuation = truth("llama")
    # The first token from `place` on that shows as text of its own, with its right neighbour.
    tokenizer = tiny_tokenizer()
    texts = [str(tokenizer.decode([token])) for token in continuation]
    at = next(i for i in range(place, 40) if "\ufffd" not in texts[i] + texts[i + 1])
    stop = texts[at] + texts[at + 1]
    whole = str(tokenizer.decode(continuation))

    def generate(decoder: SpeculativeDecoder) -> Generation:
        generation = decoder.generate(PROMPT, 48, stop=["never there", stop])
        assert generation.text == whole[: whole.index(stop)]
        assert stop in tokenizer.decode(generation.tokens)
        assert stop not in tokenizer.decode(generation.tokens[:-1])
        assert generation.finish_reason == "stop"
        return generation

    all_lengths(generate, set())


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_max_new_tokens_is_never_passed(count: int) -> None:
    def generate(decoder: SpeculativeDecoder) -> Generation:
        generation = decoder.generate(PROMPT, count, ignore_eos=True)
        assert generation.tokens == truth("llama")[:count]
        assert generation.finish_reason == "length"
        if count == 1:
            assert generation.counters.num_draft_tokens == 0
        return generation

    all_lengths(generate, set())


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt"])
@pytest.mark.parametrize("room", [1, 2, 5])
@pytest.mark.parametrize("k", [0, 1, 4, 8])
def test_the_context_limit_is_reached_and_never_passed(name: str, room: int, k: int) -> None:
    """GPT-2 and OPT have no positions beyond it: a pass over one row too many raises."""
    target = load_tiny(name, max_position_embeddings=24)
    prompt = tuple(random_tokens(24 - room, 2))
    text = [*prompt, *truth(name, prompt, room, max_position_embeddings=24)]
    decoder = tiny_decoder(target, [scripted_drafter(text)], f"fixed:{k}")
    generation = decoder.generate(prompt, 100, ignore_eos=True)
    assert generation.tokens == text[24 - room :]
    assert generation.finish_reason == "length"
    with pytest.raises(PromptError, match="the prompt has 24 tokens, the context window 24; shorten"):
        decoder.generate(text, 1)


# -- streams, sessions, failures ----------------------------------------------------------------------------------


@pytest.mark.parametrize("controller", ["plain", "fixed:1", "fixed:4", "fixed:8"])
@pytest.mark.parametrize("stop", [(), ("\n", "e"), ("zzz",)])
def test_generate_is_the_concatenation_of_stream(controller: str, stop: tuple[str, ...]) -> None:
    text = [*PROMPT, *truth("llama")]
    decoder = tiny_decoder(load_tiny("llama"), [scripted_drafter(text, right=lambda k: k - 1)], controller)
    whole = decoder.generate(PROMPT, 30, stop=stop, ignore_eos=True)
    stream = decoder.stream(PROMPT, 30, stop=stop, ignore_eos=True)
    pieces = []
    while True:
        try:
            pieces.append(next(stream))
        except StopIteration as end:
            streamed = end.value
            break
    assert "".join(piece.text for piece in pieces) == whole.text == streamed.text
    assert [token for piece in pieces for token in piece.record.tokens] == whole.tokens == streamed.tokens
    assert [piece.record for piece in pieces] == streamed.steps
    assert streamed.finish_reason == whole.finish_reason
    assert len(whole.tokens) == 30 or stop


def test_a_stream_left_early_unlocks_and_stores_what_it_verified() -> None:
    decoder = tiny_decoder(load_tiny("llama"), [scripted_drafter([*PROMPT, *truth("llama")])], "fixed:4")
    stream = decoder.stream(PROMPT, 30, ignore_eos=True)
    next(stream)
    stream.close()
    assert decoder.parts.prefix_cache.statistics.locked_tokens == 0
    assert decoder.parts.prefix_cache.statistics.stored_tokens == len(PROMPT) + 4
    decoder.parts.prefix_cache.check_integrity()


def test_a_look_at_the_result_changes_nothing() -> None:
    continuation = truth("llama")
    decoder = tiny_decoder(load_tiny("llama"))
    tokenizer = tiny_tokenizer()
    at = next(i for i in range(3, 40) if "\ufffd" not in tokenizer.decode(continuation[i : i + 2]))
    stop = tokenizer.decode(continuation[at : at + 2])
    plain = decoder.generate(PROMPT, 48, stop=stop)
    session = decoder.session(PROMPT, 48, stop=stop)
    while not session.finished:
        session.step(decoder.parts.menu.plain)
        assert session.result().tokens == session.generated
    session.close()
    assert (session.result().tokens, session.result().text) == (plain.tokens, plain.text)
    assert session.result().finish_reason == "stop"


def test_observing_changes_nothing_and_tells_the_truth() -> None:
    target = load_tiny("llama")
    drafter = NGramDrafter(name="model:that is none")  # beside models the target's certainty is shown
    decoder = tiny_decoder(target, [drafter], menu="reuse/0,reuse/4")
    session = decoder.session(PROMPT, 20, ignore_eos=True)
    assert session.observe() == session.observe()
    assert session.observe().prefill_pending
    session.step(0)
    model = target.runner.model  # type: ignore[attr-defined]
    while not session.finished:
        seen = session.observe()
        assert seen == session.observe()
        with torch.no_grad():
            row = model(input_ids=torch.tensor([session.tokens[:-1]]), use_cache=False).logits[0, -1].softmax(-1)
        assert seen.target_top_probability == pytest.approx(float(row.max()), abs=1e-4)
        assert seen.target_entropy == pytest.approx(float(-(row * row.log()).sum()), abs=1e-3)
        assert (seen.context, seen.generated, seen.left) == (
            len(session.tokens),
            len(session.generated),
            20 - len(session.generated),
        )
        record = session.step(1)
        if not session.finished:
            known = session.observe()
            assert (known.last_drafted, known.last_accepted) == (record.drafted, record.accepted)
    assert session.generated == truth("llama")[:20]


def test_each_pass_reads_the_rows_it_must_and_no_more() -> None:
    target = load_tiny("llama")
    runner = WatchedRunner(target.runner)
    decoder = tiny_decoder(
        target, [scripted_drafter([*PROMPT, *truth("llama")], lambda k: 2)], "fixed:4", runner=runner
    )
    generation = decoder.generate(PROMPT, 17, ignore_eos=True)
    assert runner.passes == [step.prefilled + step.drafted + 1 for step in generation.steps]
    assert runner.passes == [len(PROMPT) + 4, 5, 5, 5, 5, 2]
    runner.passes.clear()
    decoder.with_controller("plain").generate(PROMPT, 3, ignore_eos=True)
    assert runner.passes == [1, 1, 1]  # a full hit leaves one token to be read


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("failure", ["raise", "nan"])
def test_a_failing_pass_leaves_the_session_usable(name: str, failure: str) -> None:
    target = load_tiny(name)
    runner = WatchedRunner(target.runner)
    text = [*PROMPT, *truth(name)]
    decoder = tiny_decoder(target, [scripted_drafter(text, lambda k: 2)], "fixed:4", runner=runner)
    decoder.generate(PROMPT[:5], 1)  # so that first steps restore something
    session = decoder.session(PROMPT, 30, ignore_eos=True)
    action = decoder.parts.menu.find(4)
    while not session.finished:
        before = list(session.tokens)
        if failure == "raise":
            runner.error = MemoryError("no memory for this pass")
        else:
            runner.poison = 1
        with pytest.raises(MemoryError if failure == "raise" else NumericalError):
            session.step(action)
        assert session.tokens == before
        session.step(action)
        assert session.tokens == text[: len(session.tokens)]
    session.close()
    assert len(session.generated) == 30
    decoder.parts.prefix_cache.check_integrity()
    assert decoder.generate(PROMPT, 30, ignore_eos=True).tokens == truth(name)[:30]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_logits_end_a_request_and_harm_no_other(temperature: float) -> None:
    target = load_tiny("llama")
    runner = WatchedRunner(target.runner)
    decoder = tiny_decoder(target, runner=runner)
    runner.poison = 1
    with pytest.raises(NumericalError, match="the target's logits are not finite; load it in a wider precision"):
        decoder.generate(PROMPT, 8, temperature=temperature)
    assert decoder.parts.prefix_cache.statistics.locked_tokens == 0
    decoder.parts.prefix_cache.check_integrity()
    assert decoder.generate(PROMPT, 8, ignore_eos=True).tokens == truth("llama")[:8]


def test_actions_that_may_not_be_taken() -> None:
    decoder = tiny_decoder(load_tiny("llama"))
    session = decoder.session(PROMPT, 1, ignore_eos=True)
    with pytest.raises(MenuError, match="fresh/0 is masked"):
        session.step(0)
    with pytest.raises(MenuError, match="action 7 is outside the menu of 2 entries"):
        session.step(7)
    session.step(1)
    with pytest.raises(MenuError, match="the request has finished; start a new session"):
        session.step(1)
    session.close()
    session.close()  # idempotent
    assert decoder.parts.prefix_cache.statistics.locked_tokens == 0


# -- from a folder ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("cache_folder")
def test_from_pretrained_on_folders(target_folder: Any, drafter_folder: Any, llama: LoadedModel) -> None:
    decoder = SpeculativeDecoder.from_pretrained(
        str(target_folder), [f"model:{drafter_folder}", "ngram"], "heuristic", prefix_cache_bytes=1 << 20
    )
    messages = [{"role": "user", "content": "the king and the other"}]
    prompt = tuple(decoder.encode(messages))
    assert tiny_tokenizer().decode(list(prompt)) == "<|user|>the king and the other<|end|><|assistant|>"
    for controller in ("plain", "heuristic", "fixed:4:ngram", "threshold:0.2"):
        generation = decoder.with_controller(controller).generate(messages, 24, ignore_eos=True)
        assert generation.tokens == truth("llama", prompt, 24)
    assert decoder.parts.eos_ids == llama.eos_ids
    budgets = [decoder.parts.prefix_cache.byte_budget]
    budgets.append(decoder.parts.drafters[f"model:{drafter_folder}"].prefix_cache.byte_budget)  # type: ignore[attr-defined]
    assert min(budgets) > 0
    assert sum(budgets) <= 1 << 20
