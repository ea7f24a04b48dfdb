"""Sampling is exact in distribution: speculative outputs against probabilities that are computed, not sampled.

Three tokens follow a prompt. Their joint distribution is enumerated by code of its own from the model's logits, and a
chi-square test holds thousands of speculative answers against it. A right product fails a test with odds of ALARM; as
all seeds are fixed, it either always passes or never does. Negative controls show that wrong rules are caught.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from tiny_models import (
    FunctionDrafter,
    TableRunner,
    load_table,
    load_tiny,
    make_parts,
    random_tokens,
    scripted_drafter,
    tiny_decoder,
)
from torch import Tensor

import engine.drafters.model
import engine.verify
from engine.drafters.base import Draft, Drafter
from engine.drafters.model import ModelDrafter
from engine.models import LoadedModel
from engine.prefix_cache import PrefixCache
from engine.request import Request
from engine.sampling import Sampling, draw, probabilities, seeded_generator
from engine.session import Parts, Session
from engine.verify import Verdict

ALARM = 1e-6  # odds that a right product fails one of these tests
ANSWERS = 2000
FEWEST = 8  # expected answers in a cell of the chi-square test
LENGTH = 3
VOCAB = 16
PROMPT = (3, 7)

SAMPLINGS = {
    "temperature 1": (1.0, 1.0, 0),
    "cold": (0.5, 1.0, 0),
    "top-p": (1.0, 0.7, 0),
    "top-k": (1.0, 1.0, 4),
    "all": (1.3, 0.8, 6),
}

Logits = Callable[[Sequence[int]], np.ndarray]


# -- what is right ------------------------------------------------------------------------------------------------


def direct(logits: np.ndarray, temperature: float, top_p: float, top_k: int) -> np.ndarray:
    """Probabilities `[vocab]` of one token, a token at a time."""
    weights = np.exp((logits - logits.max()) / temperature)
    order = sorted(range(len(weights)), key=lambda token: -weights[token])
    kept = order[:top_k] if top_k else order
    total, mass, nucleus = sum(weights[token] for token in kept), 0.0, []
    for token in kept:
        if mass >= top_p * total:
            break
        nucleus.append(token)
        mass += weights[token]
    result = np.zeros(len(weights))
    result[nucleus] = weights[nucleus] / mass
    return result


def joint(logits: Logits, setting: tuple[float, float, int], length: int = LENGTH) -> dict[tuple[int, ...], float]:
    """Probability of every possible answer."""
    answers: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        answers = {
            (*answer, token): probability * p
            for answer, probability in answers.items()
            for token, p in enumerate(direct(logits([*PROMPT, *answer]), *setting))
            if p > 0
        }
    return answers


def p_value(seen: Counter[tuple[int, ...]], probability: dict[tuple[int, ...], float]) -> float:
    """Of a chi-square test. Rare answers share a cell with those of the same beginning; impossible ones end it."""
    if any(answer not in probability for answer in seen):
        return 0.0
    count = seen.total()
    expected = {answer: count * p for answer, p in probability.items()}
    observed: dict[tuple[int, ...], float] = {answer: seen[answer] for answer in expected}
    cells: list[tuple[float, float]] = []
    for length in range(len(next(iter(expected))), -1, -1):
        rare_expected: dict[tuple[int, ...], float] = defaultdict(float)
        rare_observed: dict[tuple[int, ...], float] = defaultdict(float)
        for beginning, number in expected.items():
            if number >= FEWEST or length == 0:
                cells.append((observed[beginning], number))
            else:
                rare_expected[beginning[:-1]] += number
                rare_observed[beginning[:-1]] += observed[beginning]
        expected, observed = rare_expected, rare_observed
    assert len(cells) >= 4, "too few cells to notice anything"
    ours, theirs = np.array([cell for cell in cells if cell[1] > 0]).T
    return float(chisquare(ours, theirs * ours.sum() / theirs.sum()).pvalue)


# -- who drafts ---------------------------------------------------------------------------------------------------


def far_off(width: int = VOCAB) -> FunctionDrafter:
    """Draws from a q that has nothing to do with the target and differs from place to place; tells it truthfully."""
    generator = torch.Generator().manual_seed(11)
    table = torch.rand(VOCAB, width, generator=generator, dtype=torch.float64) ** 4
    table[:, 5] = 0.0
    table /= table.sum(-1, keepdim=True)

    def propose(tokens: list[int], k: int, sampling: Sampling) -> Draft:
        drafted: list[int] = []
        for _ in range(k):
            row = table[[*tokens, *drafted][-1]]
            drafted.append(int(torch.multinomial(row, 1, generator=generator)))
        return Draft(drafted, [0.5] * k, torch.stack([table[t] for t in [tokens[-1], *drafted[:-1]]]))

    return FunctionDrafter(propose)


def deterministic() -> FunctionDrafter:
    """Proposes the likeliest tokens of a model that resembles the target, and tells no q: it is one-hot."""
    table = target().table + torch.randn(VOCAB, VOCAB, VOCAB, generator=torch.Generator().manual_seed(5))

    def propose(tokens: list[int], k: int, sampling: Sampling) -> Draft:
        text = list(tokens)
        for _ in range(k):
            text.append(int(table[text[-2], text[-1]].argmax()))
        return Draft(text[len(tokens) :], [0.5] * k)

    return FunctionDrafter(propose)


def model_drafter() -> ModelDrafter:
    """A model that resembles the target: its table, blurred."""
    runner = TableRunner(VOCAB, seed=2, scale=0.7)
    runner.table = runner.table + 0.7 * target().table
    return ModelDrafter("model", runner, PrefixCache(0, 8), VOCAB)


DRAFTERS: dict[str, tuple[Callable[[], Drafter], int, float]] = {  # drafter, k, min_confidence
    "far off": (far_off, 2, 0.0),
    "far off, one token": (far_off, 1, 0.0),
    "narrow q": (lambda: far_off(VOCAB - 4), 2, 0.0),
    "deterministic": (deterministic, 2, 0.0),
    "model": (model_drafter, 2, 0.0),
    "model while confident": (model_drafter, 2, 0.1),
    "model while surer": (model_drafter, 2, 0.22),
}


def target() -> TableRunner:
    return TableRunner(VOCAB, seed=1)


def answers(parts: Parts, setting: tuple[float, float, int], k: int, least: float, count: int) -> Any:
    """Speculative answers with their number, and all step records."""
    seen: Counter[tuple[int, ...]] = Counter()
    records = []
    action = parts.menu.find(k)
    for seed in range(count):
        session = Session(parts, Request(PROMPT, LENGTH, Sampling(*setting, seed=seed), ignore_eos=True))
        while not session.finished:
            session.step(action, least)
        seen[tuple(session.generated)] += 1
        records += session.steps
    return seen, records


def judged(drafter: str, sampling: str, count: int = ANSWERS) -> float:
    """p-value of one drafter under one sampling setting."""
    make, k, least = DRAFTERS[drafter]
    parts = make_parts(load_table(target()), [make()], menu="reuse/0,reuse/1,reuse/2", cache_tokens=0)
    seen, records = answers(parts, SAMPLINGS[sampling], k, least, count)
    drafted, accepted = sum(r.drafted for r in records), sum(r.accepted for r in records)
    assert 0 < accepted < drafted, "a test in which nothing is accepted, or everything, would show little"
    if least:
        first = {record.drafted for record in records if record.prefilled}
        assert len(first) > 1, "min_confidence is not at work"
    return p_value(seen, joint(lambda tokens: target().logits_after(tokens).double().numpy(), SAMPLINGS[sampling]))


# -- exactness ----------------------------------------------------------------------------------------------------


PAIRS = [
    *(("far off", sampling) for sampling in SAMPLINGS),
    ("far off, one token", "temperature 1"),
    ("narrow q", "temperature 1"),
    ("deterministic", "temperature 1"),
    ("deterministic", "all"),
    ("model", "temperature 1"),
    ("model", "all"),
    ("model while confident", "temperature 1"),
    ("model while surer", "all"),
]


@pytest.mark.parametrize(("drafter", "sampling"), PAIRS)
def test_speculative_answers_have_the_targets_distribution(drafter: str, sampling: str) -> None:
    assert judged(drafter, sampling) > ALARM


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_plain_answers_have_the_targets_distribution(sampling: str) -> None:
    parts = make_parts(load_table(target()), cache_tokens=0)
    seen, _ = answers(parts, SAMPLINGS[sampling], 0, 0.0, count=1000)
    logits: Logits = lambda tokens: target().logits_after(tokens).double().numpy()  # noqa: E731
    assert p_value(seen, joint(logits, SAMPLINGS[sampling])) > ALARM


def test_a_transformer_with_a_smaller_one_as_drafter() -> None:
    target = load_tiny("llama", vocab_size=VOCAB, seed=3)
    runner = load_tiny("drafter", vocab_size=VOCAB).runner
    drafter = ModelDrafter("model", runner, PrefixCache(0, 1), VOCAB)
    parts = make_parts(target, [drafter], menu="reuse/0,reuse/2", cache_tokens=64)
    setting = (1.5, 0.9, 0)
    seen, records = answers(parts, setting, 2, 0.05, count=400)
    model = target.runner.model  # type: ignore[attr-defined]

    @torch.no_grad()
    def logits(tokens: Sequence[int]) -> np.ndarray:
        row: Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]
        return row.double().numpy()

    assert p_value(seen, joint(logits, setting)) > ALARM
    assert 0 < sum(record.accepted for record in records) < sum(record.drafted for record in records)
    parts.prefix_cache.check_integrity()


# -- negative controls --------------------------------------------------------------------------------------------


def _redraws_from_p(p: Tensor, q: Tensor) -> Tensor:
    return p


def _redraws_from_difference(p: Tensor, q: Tensor) -> Tensor:
    return (p - q).abs()


def _right_residual(p: Tensor, q: Tensor) -> Tensor:
    return (p - q).clamp_min(0.0)


def _rule(accept: Callable[[float, float], float], residual: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Any]:
    """A rejection rule that accepts with probability `accept(p, q)` and else draws from `residual(p, q)`."""

    def verify(target: Tensor, draft: Draft, generator: torch.Generator) -> Verdict:
        for row, token in enumerate(draft.tokens):
            p, q = target[row], engine.verify._draft_distribution(draft, row, target)
            u = float(torch.rand((), generator=generator, dtype=torch.float64))
            if u >= accept(float(p[token]), float(q[token])):
                return Verdict(row, draw(residual(p, q), generator))
        return Verdict(len(draft.tokens), draw(target[len(draft.tokens)], generator))

    return verify


RULES = {
    "right": (lambda p, q: min(1.0, p / q), _right_residual, True),
    "rejected tokens are drawn anew from p": (lambda p, q: min(1.0, p / q), _redraws_from_p, False),
    "the residual is no positive part": (lambda p, q: min(1.0, p / q), _redraws_from_difference, False),
    "q is not divided by": (lambda p, q: p, _right_residual, False),
    "everything is accepted": (lambda p, q: 1.0, _right_residual, False),
    "the root of the ratio": (lambda p, q: min(1.0, (p / q) ** 0.5), _right_residual, False),
}


@pytest.mark.parametrize("rule", RULES)
def test_wrong_rules_are_caught(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    accept, residual, right = RULES[rule]
    monkeypatch.setattr(engine.verify, "_verify_sampled", _rule(accept, residual))
    if rule == "everything is accepted":  # `judged` would notice by itself
        with pytest.raises(AssertionError, match="everything"):
            judged("far off", "temperature 1", 100)
        return
    assert (judged("far off", "temperature 1", 1200) > ALARM) == right


def test_a_drafter_that_shares_the_verifiers_random_numbers_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    assert seeded_generator(1, 0).initial_seed() != seeded_generator(1, 1).initial_seed()
    monkeypatch.setattr(engine.drafters.model, "seeded_generator", lambda seed, stream: seeded_generator(seed, 0))
    assert judged("model", "temperature 1") < ALARM


def test_a_drafter_that_stops_by_the_token_it_drew_is_caught() -> None:
    """Why confidence may look at q, never at the token: leaving out drawn tokens biases the rest."""
    inner = far_off()

    def propose(tokens: list[int], k: int, sampling: Sampling) -> Draft:
        draft = inner.function(tokens, k, sampling)
        assert draft.probs is not None
        keep = next((i for i, t in enumerate(draft.tokens) if t < VOCAB // 2), k)
        return Draft(draft.tokens[:keep], draft.confidences[:keep], draft.probs[:keep] if keep else None)

    parts = make_parts(load_table(target()), [FunctionDrafter(propose)], menu="reuse/0,reuse/2", cache_tokens=0)
    seen, _ = answers(parts, SAMPLINGS["temperature 1"], 2, 0.0, count=1200)
    logits: Logits = lambda tokens: target().logits_after(tokens).double().numpy()  # noqa: E731
    assert p_value(seen, joint(logits, SAMPLINGS["temperature 1"])) < ALARM


# -- the distribution of one token --------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 10_000),
    st.sampled_from([0.2, 0.7, 1.0, 3.0]),
    st.sampled_from([0.05, 0.5, 0.9, 0.999, 1.0]),
    st.sampled_from([0, 1, 2, 5, 15, 16, 40]),
)
def test_probabilities_against_a_direct_computation(seed: int, temperature: float, top_p: float, top_k: int) -> None:
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    logits[0, seed % VOCAB] = float("-inf")
    found = probabilities(logits, Sampling(temperature, top_p, top_k))
    assert found.dtype == torch.float64
    for row, expected in zip(found.numpy(), logits.double().numpy()):
        np.testing.assert_allclose(row, direct(expected, temperature, top_p, top_k), atol=1e-12)


def test_tied_logits_at_the_edge_of_top_k_are_kept() -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, 0.0]])
    found = probabilities(logits, Sampling(1.0, 1.0, 2))
    assert (found > 0).tolist() == [[True, True, True, False]]


# -- seeds --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("controller", ["plain", "fixed:2", "fixed:8"])
def test_a_seed_fixes_the_tokens_and_no_seed_leaves_them_free(controller: str, llama: LoadedModel) -> None:
    prompt = random_tokens(9)

    def generate(seed: int | None) -> list[int]:
        drafter = scripted_drafter([*prompt, *[1] * 40])
        decoder = tiny_decoder(llama, [drafter], controller)
        return decoder.generate(prompt, 20, temperature=1.0, seed=seed, ignore_eos=True).tokens

    assert generate(5) == generate(5)
    assert generate(5) != generate(6)
    # 20 tokens of 1.5 nats and more each: the odds of drawing the same twice are below 1e-9.
    assert generate(None) != generate(None)


def test_a_seed_fixes_the_tokens_whether_the_prefix_is_cached_or_not(llama: LoadedModel) -> None:
    decoder = tiny_decoder(llama)
    prompt = random_tokens(9)
    first, second = (decoder.generate(prompt, 20, temperature=0.9, top_p=0.95, seed=3) for _ in range(2))
    assert (first.counters.num_cached_tokens, second.counters.num_cached_tokens) == (0, 8)
    assert first.tokens == second.tokens


def test_greedy_needs_no_seed_and_heeds_none(llama: LoadedModel) -> None:
    decoder = tiny_decoder(llama)
    prompt = random_tokens(9)
    tokens = {tuple(decoder.generate(prompt, 12, seed=seed).tokens) for seed in (None, 1, 2)}
    assert len(tokens) == 1


# -- distributions that are not quite one, and other devices ------------------------------------------------------


@pytest.mark.parametrize("scale", [0.995, 1.0, 1.005])
@pytest.mark.parametrize("width", [VOCAB - 4, VOCAB, VOCAB + 5])
def test_a_draft_distribution_that_is_off_by_rounding_is_made_one(scale: float, width: int) -> None:
    """q = scale * p on the shared vocabulary: as p = q there, every draft is accepted."""
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(1))
    logits[:, min(width, VOCAB) :] = float("-inf")
    p = probabilities(logits, Sampling(1.0))
    probs = torch.nn.functional.pad(p, (0, 9))[:1, :width] * scale
    generator = torch.Generator().manual_seed(2)
    for _ in range(500):
        token = draw(p[0], generator)
        verdict = engine.verify.verify(logits, Draft([token], [1.0], probs), Sampling(1.0), generator)
        assert verdict.accepted == 1
    q = engine.verify._draft_distribution(Draft([0], [1.0], probs), 0, p)
    torch.testing.assert_close(q, p[0], rtol=1e-12, atol=0.0)


def test_mass_beyond_the_shared_vocabulary_is_left_out() -> None:
    q = engine.verify._draft_distribution(Draft([0], [1.0], torch.tensor([[0.25, 0.25, 0.5]])), 0, torch.ones(1, 2))
    assert q.tolist() == [0.5, 0.5]


def test_where_no_residual_is_left_the_target_decides() -> None:
    """u = 1 would reject even q = p; then what is drawn comes from p."""
    p = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]], dtype=torch.float64)
    draft = Draft([0], [1.0], torch.tensor([[0.0, 1.0, 0.0]]))  # q and p give token 0 no chance
    verdict = engine.verify._verify_sampled(p, draft, torch.Generator().manual_seed(0))
    assert verdict == Verdict(0, 1)


def test_a_row_on_another_device_is_drawn_from_on_the_cpu() -> None:
    """Generators live on the CPU, and torch refuses to mix."""
    probs = torch.rand(50, generator=torch.Generator().manual_seed(0))

    class Elsewhere:
        def cpu(self) -> Tensor:
            return probs

    ours, theirs = (torch.Generator().manual_seed(3) for _ in range(2))
    assert draw(Elsewhere(), ours) == draw(probs, theirs)  # type: ignore[arg-type]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_verification_on_a_gpu_gives_what_it_gives_on_the_cpu() -> None:
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(1))
    probs = torch.rand(3, VOCAB, generator=torch.Generator().manual_seed(2)).softmax(-1)
    for seed in range(50):
        told = set()
        for device in ("cpu", "cuda"):
            draft = Draft([1, 2, 3], [1.0] * 3, probs.to(device))
            generator = torch.Generator().manual_seed(seed)
            told.add(engine.verify.verify(logits.to(device), draft, Sampling(1.0), generator))
        assert len(told) == 1
