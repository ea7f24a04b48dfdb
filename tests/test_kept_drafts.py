"""Drafting at every token: the drafts of a model drafter, without the passes that the last draft has made."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from tiny_models import WatchedRunner, load_tiny, random_tokens, reference
from torch import Tensor

from engine.drafters.base import EMPTY_DRAFT
from engine.drafters.kept import KeptDrafter
from engine.drafters.model import ModelDrafter, ModelDraftState
from engine.kv import KVBuffer
from engine.prefix_cache import PrefixCache
from engine.runner import kv_bytes_per_token

K = 5
PROMPT = random_tokens(9)


def begun(kind: type[ModelDrafter], runner: WatchedRunner) -> ModelDraftState:
    size = kv_bytes_per_token(runner)
    return kind("model", runner, PrefixCache(1024 * size, size), runner.vocab_size).begin(PROMPT)


def watched() -> WatchedRunner:
    return WatchedRunner(load_tiny("drafter").runner)


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9, 1.0])
def test_drafts_and_signals_are_the_model_drafters(share: float) -> None:
    """The text goes on as drafted with odds of `share`, by up to seven tokens at once: a draft has five."""
    rng, text = random.Random(3), list(PROMPT)
    kept, plain = begun(KeptDrafter, watched()), begun(ModelDrafter, watched())
    for _ in range(20):
        assert kept.signal(text) == plain.signal(text)
        ours, theirs = kept.propose(text, K), plain.propose(text, K)
        assert ours == theirs
        assert kept.propose(text, K) == theirs
        for token in reference(load_tiny("drafter"), text, K + 2)[: rng.randrange(1, K + 3)]:
            text.append(token if rng.random() < share else rng.randrange(40))
    assert len(kept.propose(text, K).tokens) == K


def test_only_what_is_new_is_drafted() -> None:
    runner = watched()
    state, text = begun(KeptDrafter, runner), list(PROMPT)
    continuation = reference(load_tiny("drafter"), PROMPT, 2 * K)
    runner.passes.clear()
    for token in continuation[:K]:
        state.propose(text, K)
        text.append(token)
    assert runner.passes == [len(PROMPT)] + [1] * (K - 1) + [1] * (K - 1)


def test_fewer_tokens_than_are_kept_are_the_beginning_of_the_draft() -> None:
    state = begun(KeptDrafter, watched())
    draft = state.propose(PROMPT, K)
    assert state.propose(PROMPT, 2).tokens == draft.tokens[:2]
    assert state.propose(PROMPT, K) == draft


@pytest.mark.parametrize("k", [0, -1])
def test_no_draft_is_asked_for(k: int) -> None:
    state = begun(KeptDrafter, watched())
    state.propose(PROMPT, K)
    assert state.propose(PROMPT, k) == EMPTY_DRAFT


@pytest.mark.parametrize("kept", [False, True])
def test_drafts_end_at_the_drafter_s_context(kept: bool) -> None:
    runner = watched()
    runner.max_context = len(PROMPT) + 3
    state, text = begun(KeptDrafter if kept else ModelDrafter, runner), list(PROMPT)
    counts, shown = [], []
    for token in reference(load_tiny("drafter"), PROMPT, 5):
        counts.append(len(state.propose(text, K).tokens))
        text.append(token)
        shown.append(state.signal(text).confidence)
    assert counts == [3, 2, 1, 0, 0]
    assert shown[2] == shown[3] == shown[4] > 0.0


@pytest.mark.parametrize("place", range(1, K + 1))
def test_a_pass_that_fails_leaves_later_drafts_right(place: int) -> None:
    runner, plain, text = FailingRunner(load_tiny("drafter").runner), begun(ModelDrafter, watched()), list(PROMPT)
    state = begun(KeptDrafter, runner)
    state.propose(text, K)
    text += [1, 2]
    runner.left = place - 1
    with pytest.raises(RuntimeError, match="it broke"):
        state.propose(text, K)
    text += [3]
    ours, theirs = state.propose(text, K), plain.propose(text, K)
    assert ours.tokens == theirs.tokens
    assert ours.confidences == pytest.approx(theirs.confidences, rel=1e-4)  # rows were read in other passes


class FailingRunner(WatchedRunner):
    """Fails once, after some more passes."""

    left = -1

    def forward(self, tokens: Sequence[int], buffer: KVBuffer, num_logits: int) -> Tensor:
        self.error = RuntimeError("it broke") if self.left == 0 else None
        self.left -= 1
        return super().forward(tokens, buffer, num_logits)


def test_only_verified_tokens_are_cached() -> None:
    runner = watched()
    size = kv_bytes_per_token(runner)
    drafter = KeptDrafter("model", runner, PrefixCache(1024 * size, size), runner.vocab_size)
    state = drafter.begin(PROMPT)
    drafted = state.propose(PROMPT, K).tokens
    state.close([*PROMPT, (drafted[0] + 1) % 40])
    assert drafter.prefix_cache.match([*PROMPT, *drafted], "").length == len(PROMPT)
