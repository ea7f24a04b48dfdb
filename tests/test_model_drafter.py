"""A model as drafter: what it proposes, what it re-reads, what it remembers, and what happens when it breaks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from tiny_models import (
    TableRunner,
    WatchedRunner,
    load_table,
    load_tiny,
    random_tokens,
    reference,
    scripted_drafter,
    tiny_decoder,
    tiny_model_drafter,
)

from engine.decoder import SpeculativeDecoder
from engine.drafters.factory import emptied
from engine.drafters.model import ModelDrafter, ModelDraftState
from engine.errors import NumericalError
from engine.prefix_cache import PrefixCache
from engine.runner import Runner, kv_bytes_per_token
from engine.sampling import Sampling, probabilities
from engine.session import Session

PROMPT = random_tokens(11)
TOLERANCE = 1e-4  # as in test_kv


def watched(name: str = "drafter") -> WatchedRunner:
    return WatchedRunner(load_tiny(name).runner)


def drafter_of(runner: Runner, vocab_size: int | None = None, cache_tokens: int = 1024) -> ModelDrafter:
    size = kv_bytes_per_token(runner)
    if isinstance(runner, WatchedRunner):
        runner.passes.clear()
    return ModelDrafter("model", runner, PrefixCache(cache_tokens * size, size), vocab_size or runner.vocab_size)


def check_buffer(state: ModelDraftState, tokens: Sequence[int]) -> None:
    """The drafter's KV is that of a fresh prefill of what it says it holds, a beginning of `tokens` and own drafts."""
    held = state._held
    assert state._buffer.length == len(held)
    fresh = state._runner.new_buffer()
    state._runner.forward(held, fresh, 1)
    for ours, theirs in zip(state._buffer.views(), fresh.views(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0.0)


# -- what it proposes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 2, 5, 9])
def test_greedy_drafts_are_the_models_own_continuation(k: int) -> None:
    runner = watched()
    state = drafter_of(runner).begin(PROMPT)
    draft = state.propose(PROMPT, k)
    assert draft.tokens == reference(load_tiny("drafter"), PROMPT, k)
    assert draft.probs is None
    assert runner.passes == [len(PROMPT)] + [1] * (k - 1)


def test_confidences_are_products_of_top_probabilities() -> None:
    loaded = load_tiny("drafter")
    draft = drafter_of(loaded.runner).begin(PROMPT).propose(PROMPT, 6)
    model, tokens, product, expected = loaded.runner.model, list(PROMPT), 1.0, []  # type: ignore[attr-defined]
    for token in draft.tokens:
        with torch.no_grad():
            row = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].softmax(-1)
        product *= float(row.max())
        expected.append(product)
        tokens.append(token)
    assert draft.confidences == pytest.approx(expected, rel=1e-4)


def test_a_draft_ends_before_the_first_doubtful_token() -> None:
    drafter = drafter_of(load_tiny("drafter").runner)
    whole = drafter.begin(PROMPT).propose(PROMPT, 6)
    for count, confidence in enumerate(whole.confidences):
        exactly = drafter.begin(PROMPT).propose(PROMPT, 6, min_confidence=confidence * 0.999)
        above = drafter.begin(PROMPT).propose(PROMPT, 6, min_confidence=confidence * 1.001)
        assert exactly.tokens == whole.tokens[: count + 1]
        assert above.tokens == whole.tokens[:count]


def test_the_signal_is_the_last_drafts_first_confidence() -> None:
    state = drafter_of(load_tiny("drafter").runner).begin(PROMPT)
    assert state.signal(PROMPT).confidence == 0.0
    draft = state.propose(PROMPT, 3)
    assert state.signal(PROMPT).confidence == draft.confidences[0]
    longer = [*PROMPT, 4]
    empty = state.propose(longer, 3, min_confidence=1.0)
    assert empty.tokens == []
    assert 0.0 < state.signal(longer).confidence != draft.confidences[0]


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.6, 0.8, 5)])
def test_q_is_what_the_tokens_were_drawn_from(sampling: Sampling) -> None:
    runner = TableRunner(12)
    sampling = replace(sampling, seed=4)
    state = drafter_of(runner).begin([3, 4])
    draft = state.propose([3, 4], 6, sampling)
    assert draft.probs is not None
    assert draft.probs.shape == (6, 12)
    text = [3, 4, *draft.tokens]
    for row in range(6):
        expected = probabilities(runner.logits_after(text[: 2 + row])[None], sampling)[0]
        torch.testing.assert_close(draft.probs[row], expected)
        assert draft.probs[row, draft.tokens[row]] > 0
    again = drafter_of(runner).begin([3, 4]).propose([3, 4], 6, sampling)
    assert again.tokens == draft.tokens
    other = drafter_of(runner).begin([3, 4]).propose([3, 4], 6, replace(sampling, seed=5))
    assert other.tokens != draft.tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ids_beyond_the_targets_vocabulary_are_never_drafted(temperature: float) -> None:
    runner = TableRunner(16)
    runner.table[:, :, 12:] += 20.0  # it would love to
    drafter = drafter_of(runner, vocab_size=12)
    draft = drafter.begin([3, 4]).propose([3, 4], 20, Sampling(temperature, seed=1))
    assert len(draft.tokens) == 20
    assert max(draft.tokens) < 12
    if draft.probs is not None:
        assert draft.probs.shape == (20, 12)
        torch.testing.assert_close(draft.probs.sum(-1), torch.ones(20, dtype=torch.float64))


@pytest.mark.parametrize("k", [0, -1])
def test_nothing_is_read_for_no_draft(k: int) -> None:
    runner = watched()
    state = drafter_of(runner).begin(PROMPT)
    assert state.propose(PROMPT, k).tokens == []
    assert runner.passes == []


def test_a_drafter_with_a_shorter_context_drafts_up_to_it() -> None:
    runner = TableRunner(12, max_context=6)
    state = drafter_of(runner).begin([1, 2, 3])
    assert len(state.propose([1, 2, 3], 8).tokens) == 3
    assert len(state.propose([1, 2, 3, 4, 5], 8).tokens) == 1
    assert state.propose([1, 2, 3, 4, 5, 6], 8).tokens == []
    target = TableRunner(12, seed=1, max_context=40)
    plain = tiny_decoder(load_table(target)).generate([1, 2, 3], 30)
    decoder = tiny_decoder(load_table(target), [drafter_of(runner)], "fixed:4")
    assert decoder.generate([1, 2, 3], 30).tokens == plain.tokens


# -- following the verified text ----------------------------------------------------------------------------------


def test_its_kv_follows_whatever_was_verified() -> None:
    """Drafts accepted in part, in full or not at all, and steps that others drafted or nobody."""
    rng = random.Random(2)
    loaded = load_tiny("drafter")
    state = drafter_of(loaded.runner).begin(PROMPT)
    tokens = list(PROMPT)
    for _ in range(25):
        if rng.random() < 0.3:  # a step of somebody else's
            tokens += random_tokens(rng.randint(1, 4), rng.randint(0, 99))
            continue
        k = rng.randint(1, 5)
        before = list(tokens)
        draft = state.propose(tokens, k)
        assert tokens == before
        assert draft.tokens == drafter_of(loaded.runner).begin(tokens).propose(list(tokens), k).tokens
        check_buffer(state, tokens)
        accepted = rng.randint(0, k)
        tokens += [*draft.tokens[:accepted], rng.randint(0, 250)]
    state.close(tokens)
    check_buffer(state, tokens)
    assert state._held == tokens[: len(state._held)]


def test_asking_twice_at_one_place_gives_the_same() -> None:
    runner = watched()
    state = drafter_of(runner).begin(PROMPT)
    first = state.propose(PROMPT, 4)
    runner.passes.clear()
    second = state.propose(PROMPT, 4)
    assert second.tokens == first.tokens
    assert second.confidences == pytest.approx(first.confidences, rel=1e-4)
    assert runner.passes == [1, 1, 1, 1]


def test_each_step_reads_only_what_is_new() -> None:
    runner = watched("llama")
    target = load_tiny("llama")
    decoder = tiny_decoder(target, [drafter_of(runner)], "fixed:4")
    generation = decoder.generate(PROMPT, 21, ignore_eos=True)
    # It is the target itself, so all is accepted; then it lacks its last draft and the bonus token.
    assert generation.counters.acceptance_rate == 1.0
    assert [len(step.tokens) for step in generation.steps] == [5, 5, 5, 5, 1]
    assert runner.passes == [len(PROMPT), 1, 1, 1] + [2, 1, 1, 1] * 3


def test_the_second_question_of_a_conversation_hits_its_prefix_cache() -> None:
    runner = watched()
    target = load_tiny("llama")
    decoder = tiny_decoder(target, [drafter_of(runner)], "fixed:3")
    messages = [{"role": "user", "content": "a long question about the rivers and the other things in the king's land"}]
    first_prompt = decoder.encode(messages)
    answer = decoder.generate(messages, 10, ignore_eos=True)
    assert runner.passes[0] == len(first_prompt)
    messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "and then?"}]
    second_prompt = decoder.encode(messages)
    runner.passes.clear()
    second = decoder.generate(messages, 10, ignore_eos=True)
    shared = runner.passes[0]
    assert shared <= len(second_prompt) - len(first_prompt)  # at least the first prompt was not read again
    assert second.tokens == reference(target, second_prompt, 10)
    drafter = decoder.parts.drafters["model"]
    assert isinstance(drafter, ModelDrafter)
    drafter.prefix_cache.check_integrity()
    assert drafter.prefix_cache.statistics.locked_tokens == 0
    assert drafter.prefix_cache.statistics.hits == 1
    # The same once more without a cache reads the whole prompt.
    runner.passes.clear()
    cold = tiny_decoder(target, [drafter_of(runner, cache_tokens=0)], "fixed:3")
    assert cold.generate(messages, 10, ignore_eos=True).tokens == second.tokens
    assert runner.passes[0] == len(second_prompt)


def test_a_repeated_question_reads_one_token() -> None:
    runner = watched()
    drafter = drafter_of(runner)
    tokens = list(PROMPT)
    state = drafter.begin(tokens)
    first = state.propose(tokens, 3)
    tokens += [*first.tokens[:2], 9]
    state.close(tokens)
    runner.passes.clear()
    again = drafter.begin(PROMPT)
    assert again.propose(PROMPT, 3).tokens == first.tokens
    assert runner.passes == [1, 1, 1]
    drafter.prefix_cache.check_integrity()


def test_only_verified_tokens_are_cached() -> None:
    drafter = drafter_of(load_tiny("drafter").runner)
    tokens = list(PROMPT)
    state = drafter.begin(tokens)
    draft = state.propose(tokens, 4)
    wrong = (draft.tokens[1] + 1) % 250
    tokens += [draft.tokens[0], wrong]
    state.close(tokens)
    assert drafter.prefix_cache.match([*PROMPT, *draft.tokens]).length == len(PROMPT) + 1
    drafter.prefix_cache.check_integrity()


def test_salts_share_nothing_in_the_drafter_either() -> None:
    runner = watched()
    target = load_tiny("llama")
    decoder = tiny_decoder(target, [drafter_of(runner)], "fixed:3")
    read = []
    for salt in ("a", "b", "a"):
        runner.passes.clear()
        decoder.generate(PROMPT, 8, salt=salt, ignore_eos=True)
        read.append(runner.passes[0])
    assert read == [len(PROMPT), len(PROMPT), 1]


def test_an_unused_drafter_stores_nothing() -> None:
    drafter = drafter_of(load_tiny("drafter").runner)
    drafter.begin(PROMPT).close(PROMPT)
    assert drafter.prefix_cache.statistics.stored_tokens == 0
    drafter.prefix_cache.check_integrity()


def test_emptied_shares_weights_and_no_memory() -> None:
    drafter = drafter_of(load_tiny("drafter").runner)
    state = drafter.begin(PROMPT)
    state.propose(PROMPT, 2)
    state.close(PROMPT)
    fresh = emptied(drafter)
    assert isinstance(fresh, ModelDrafter)
    assert fresh.runner is drafter.runner
    assert fresh.prefix_cache.match(PROMPT).length == 0
    assert fresh.prefix_cache.byte_budget == drafter.prefix_cache.byte_budget
    assert drafter.prefix_cache.match(PROMPT).length == len(PROMPT)


# -- in the decoder, and broken -----------------------------------------------------------------------------------


def decoder_with(runner: Runner, controller: str = "fixed:4") -> SpeculativeDecoder:
    return tiny_decoder(load_tiny("llama"), [drafter_of(runner)], controller)


@pytest.mark.parametrize("controller", ["fixed:1", "fixed:4", "fixed:8", "heuristic", "threshold:0.2"])
@pytest.mark.parametrize("drafter", ["drafter", "llama"])
def test_tokens_are_the_targets(controller: str, drafter: str) -> None:
    decoder = decoder_with(load_tiny(drafter).runner, controller)
    expected = reference(load_tiny("llama"), PROMPT, 40)
    for _ in range(2):
        generation = decoder.generate(PROMPT, 40, ignore_eos=True)
        assert generation.tokens == expected
        assert generation.counters.num_drafter_failures == 0
        decoder.parts.prefix_cache.check_integrity()


def test_switching_between_drafters_keeps_each_right() -> None:
    target = load_tiny("llama")
    text = [*PROMPT, *reference(target, PROMPT, 40)]
    decoder = tiny_decoder(target, [tiny_model_drafter(target, "llama"), scripted_drafter(text, lambda k: 1)])
    session = decoder.session(PROMPT, 40, ignore_eos=True)
    rng = random.Random(4)
    while not session.finished:
        name = rng.choice(("model", "scripted"))
        record = session.step(decoder.parts.menu.find(rng.choice((2, 4, 6)), name))
        expected = record.drafted if name == "model" else min(1, record.drafted)
        assert record.accepted == expected  # the target drafting for itself is always right
    assert session.tokens == text


def run_to_end(session: Session, action: int) -> None:
    while not session.finished:
        session.step(action)
    session.close()


@pytest.mark.parametrize("failure", ["raise", "nan"])
@pytest.mark.parametrize("place", [0, 1, 5, 6])
def test_a_pass_that_fails_costs_one_draft(failure: str, place: int) -> None:
    runner = watched("llama")
    decoder = decoder_with(runner)
    session = decoder.session(PROMPT, 30, ignore_eos=True)
    inner, calls = runner.forward, 0

    def forward(*args: object) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == place + 1:
            if failure == "raise":
                raise MemoryError("no memory")
            runner.poison = 1
        return inner(*args)  # type: ignore[arg-type]

    runner.forward = forward  # type: ignore[method-assign, assignment]
    with pytest.warns(RuntimeWarning, match="drafter model failed"):
        run_to_end(session, decoder.parts.menu.find(4))
    assert session.generated == reference(load_tiny("llama"), PROMPT, 30)
    assert session.counters().num_drafter_failures == 1
    # Every other draft is right: the drafter recovered.
    assert session.counters().acceptance_rate == 1.0
    drafter = decoder.parts.drafters["model"]
    assert isinstance(drafter, ModelDrafter)
    drafter.prefix_cache.check_integrity()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_is_told_as_what_it_is(temperature: float) -> None:
    runner = watched()
    runner.poison = 1
    state = ModelDrafter("model", runner, PrefixCache(0, 1), runner.vocab_size).begin(PROMPT)
    with pytest.raises(NumericalError, match="the drafter's logits are not finite"):
        state.propose(PROMPT, 2, Sampling(temperature))
    assert len(state.propose(PROMPT, 2, Sampling(temperature)).tokens) == 2
