"""Judging controllers: pairing, order, caches, mismatches, summaries, intervals, and the report."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tiny_models import load_tiny, tiny_decoder

from agents import evaluation
from agents.evaluation import Judgement, Outcome, count_mismatches, judge
from agents.report import aligned, kinds_table, table
from engine import Generation, SpeculativeDecoder
from engine.drafters.ngram import NGramDrafter
from engine.errors import ControllerError, PromptError
from envs.workloads import Conversation, Message, Workload

ARMS = {"plain": "plain", "four": "fixed:4", "heuristic": "heuristic"}


def workload() -> Workload:
    """A talk of three turns, two questions on one document, and a chat: six requests of three kinds."""

    def conversation(name: str, kind: str, *said: str, group: str = "") -> Conversation:
        return Conversation(name, kind, tuple(Message("user", text) for text in said), group)

    document = "the in and on the other thing in the end " * 2
    return Workload(
        "small",
        (
            conversation("talk", "talk", "the and in", "then?", "and then?"),
            conversation("doc#1", "documents", f"{document} who?", group="doc"),
            conversation("doc#2", "documents", f"{document} why?", group="doc"),
            conversation("chat", "chat", "on and on and on and on"),
        ),
    )


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    return tiny_decoder(load_tiny("llama"), [NGramDrafter()])


Calls = list[tuple[str, Any, Generation]]


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Calls]:
    """Lets every measured request be seen, and changed: `watch(change)` returns the list of
    (controller, prompt, generation) that grows as requests are decoded."""

    def watched(change: Callable[[str, Generation], Generation] = lambda _, generation: generation) -> Calls:
        calls: Calls = []
        original = SpeculativeDecoder.generate

        def generate(self: SpeculativeDecoder, prompt: Any, *args: Any, **settings: Any) -> Generation:
            generation = original(self, prompt, *args, **settings)
            if settings.get("salt") == "warm-up":
                return generation
            generation = change(self.controller.name, generation)
            calls.append((self.controller.name, prompt, generation))
            return generation

        monkeypatch.setattr(SpeculativeDecoder, "generate", generate)
        return calls

    return watched


# -- judge --------------------------------------------------------------------------------------------------------


def test_every_arm_meets_every_request_with_what_its_own_cache_holds(decoder: SpeculativeDecoder) -> None:
    ticks: list[None] = []
    judgement = judge(decoder, ARMS, workload(), 24, lambda: ticks.append(None))
    assert list(judgement.outcomes) == list(ARMS)
    assert len(ticks) == 6
    names = ["talk/1", "talk/2", "talk/3", "doc#1/1", "doc#2/1", "chat/1"]
    plain = judgement.outcomes["plain"]
    assert [outcome.cached > 6 for outcome in plain] == [False, True, True, False, True, False]
    assert plain[0].cached == 0  # not even the template's first marker: the warm-up shares no prefix
    for outcomes in judgement.outcomes.values():
        assert [outcome.request for outcome in outcomes] == names
        assert [outcome.kind for outcome in outcomes] == ["talk"] * 3 + ["documents"] * 2 + ["chat"]
        assert [outcome.group for outcome in outcomes] == ["talk"] * 3 + ["doc"] * 2 + ["chat"]
        assert [outcome.cached for outcome in outcomes] == [outcome.cached for outcome in plain]
        assert [outcome.tokens for outcome in outcomes] == [outcome.tokens for outcome in plain]
        assert all(outcome.mismatched == 0 for outcome in outcomes)
        assert all(outcome.seconds >= outcome.first_token > 0 for outcome in outcomes)
    assert all(outcome.drafts == outcome.drafted == 0 for outcome in plain)
    four = judgement.outcomes["four"]
    assert sum(outcome.accepted for outcome in four) > 0
    assert all(o.accepted <= o.drafted <= 4 * o.drafts for o in four)
    assert decoder.parts.prefix_cache.statistics.lookups == 0  # the engine that was handed in is left alone


def test_outcomes_are_the_generations_figures(decoder: SpeculativeDecoder, watch: Callable[..., Calls]) -> None:
    """The guard's steps are put in, as none of these arms has a guard."""
    calls = watch(lambda _, given: replace(given, counters=replace(given.counters, num_guard_steps=3)))
    judgement = judge(decoder, ARMS, workload(), 16)
    controllers = {"plain": "plain", "fixed:4": "four", "heuristic": "heuristic"}
    for arm, outcomes in judgement.outcomes.items():
        generations = [generation for name, _, generation in calls if controllers[name] == arm]
        for outcome, generation in zip(outcomes, generations, strict=True):
            counters = generation.counters
            assert outcome == Outcome(
                request=outcome.request,
                kind=outcome.kind,
                group=outcome.group,
                tokens=len(generation.tokens),
                seconds=generation.seconds,
                first_token=generation.time_to_first_token,
                steps=counters.num_steps,
                guard_steps=3,
                drafts=counters.num_drafts,
                drafted=counters.num_draft_tokens,
                accepted=counters.num_accepted_tokens,
                cached=counters.num_cached_tokens,
                mismatched=0,
            )


def test_arms_take_turns_in_an_order_that_rotates(decoder: SpeculativeDecoder, watch: Callable[..., Calls]) -> None:
    calls = watch()
    judge(decoder, ARMS, workload(), 4)
    order = [name for name, _, _ in calls]
    a, b, c = "plain", "fixed:4", "heuristic"
    assert order == [a, b, c, b, c, a, c, a, b] * 2


def test_a_request_s_prompt_is_the_same_for_every_arm(decoder: SpeculativeDecoder, watch: Callable[..., Calls]) -> None:
    """Even where an arm answers something else: the history is plain decoding's."""

    def spoil(name: str, generation: Generation) -> Generation:
        return replace(generation, text=f"{name} says so")

    calls = watch(spoil)
    judge(decoder, ARMS, workload(), 8)
    for start in range(0, len(calls), 3):
        first, second, third = (prompt for _, prompt, _ in calls[start : start + 3])
        assert first == second == third
    last = calls[6][1]
    assert [message["content"] for message in last] == [
        "the and in",
        "plain says so",
        "then?",
        "plain says so",
        "and then?",
    ]


def test_an_engine_that_emits_other_tokens_is_found_out(
    decoder: SpeculativeDecoder, watch: Callable[..., Calls]
) -> None:
    """One arm's third token is another in every request, one arm always loses its last two tokens."""

    def spoil(name: str, generation: Generation) -> Generation:
        tokens = list(generation.tokens)
        if name == "fixed:4":
            tokens[2] += 1
        if name == "heuristic":
            del tokens[-2:]
        return replace(generation, tokens=tokens)

    watch(spoil)
    judgement = judge(decoder, ARMS, workload(), 8)
    mismatched = {arm: [outcome.mismatched for outcome in outcomes] for arm, outcomes in judgement.outcomes.items()}
    assert mismatched == {"plain": [0] * 6, "four": [1] * 6, "heuristic": [2] * 6}
    assert [summary.mismatched_tokens for summary in judgement.summaries()] == [0, 6, 12]


def test_each_arm_is_warmed_up_before_anything_is_measured(
    decoder: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, str]] = []
    original = SpeculativeDecoder.session

    def session(self: SpeculativeDecoder, *args: Any, **settings: Any) -> Any:
        seen.append((self.controller.name, settings.get("salt", "")))
        return original(self, *args, **settings)

    monkeypatch.setattr(SpeculativeDecoder, "session", session)
    judge(decoder, ARMS, workload(), 4)
    assert seen[:3] == [("plain", "warm-up"), ("fixed:4", "warm-up"), ("heuristic", "warm-up")]
    assert all(salt == "" for _, salt in seen[3:])


def test_arms_must_include_plain_and_be_known(decoder: SpeculativeDecoder) -> None:
    with pytest.raises(ValueError, match="the arms four lack 'plain'"):
        judge(decoder, {"four": "fixed:4"}, workload(), 4)
    with pytest.raises(ControllerError, match="did you mean heuristic"):
        judge(decoder, {"plain": "plain", "x": "heuristics"}, workload(), 4)


@pytest.mark.parametrize(
    ("tokens", "reference", "count"),
    [
        ([], [], 0),
        ([1, 2, 3], [1, 2, 3], 0),
        ([1, 9, 3], [1, 2, 3], 1),
        ([1, 2], [1, 2, 3, 4], 2),
        ([1, 2, 3, 4], [1, 2], 2),
        ([9, 2, 8, 4], [1, 2, 3], 3),
        ([], [5], 1),
        ([2, 3, 1], [1, 2, 3], 3),
    ],
)
def test_count_mismatches(tokens: list[int], reference: list[int], count: int) -> None:
    assert count_mismatches(tokens, reference) == count


# -- summaries ----------------------------------------------------------------------------------------------------


NUMBERS = itertools.count()


def outcome(seconds: float, kind: str = "chat", **figures: Any) -> Outcome:
    """One request of a group of its own, unless `group` says otherwise."""
    defaults = {"tokens": 10, "first_token": 0.1, "drafts": 0, "drafted": 0, "accepted": 0, "cached": 0}
    defaults |= {"group": f"g{next(NUMBERS)}", "steps": 10, "guard_steps": 0, "mismatched": 0}
    return Outcome(request="r", kind=kind, seconds=seconds, **(defaults | figures))


def judgement() -> Judgement:
    plain = [outcome(2.0, first_token=0.2), outcome(4.0, "code", first_token=0.9), outcome(6.0, first_token=0.4)]
    fast = [
        outcome(1.0, drafts=2, drafted=8, accepted=6, first_token=0.3, steps=4, guard_steps=1),
        outcome(4.0, "code", drafts=3, drafted=12, accepted=1, first_token=0.1),
        outcome(3.0, drafts=1, drafted=4, accepted=3, tokens=20, first_token=0.2),
    ]
    return Judgement("w", {"plain": plain, "fast": fast})


def test_a_summary_is_of_sums_and_not_of_ratios() -> None:
    plain, fast = judgement().summaries()
    assert (plain.arm, plain.speedup, plain.speedup_low, plain.speedup_high) == ("plain", 1.0, 1.0, 1.0)
    assert (plain.acceptance_rate, plain.mean_acceptance_length) == (0.0, 1.0)
    assert fast.speedup == pytest.approx(12 / 8)
    assert fast.speedup_low <= fast.speedup <= fast.speedup_high
    assert (fast.tokens, fast.seconds, fast.tokens_per_second) == (40, 8.0, 5.0)
    assert fast.time_to_first_token == pytest.approx(0.2)
    assert fast.acceptance_rate == pytest.approx(10 / 24)
    assert fast.mean_acceptance_length == pytest.approx(1 + 10 / 6)
    assert (plain.guarded, fast.guarded) == (0.0, pytest.approx(1 / 24))


def test_summaries_by_kind() -> None:
    both = judgement()
    assert both.kinds == ["chat", "code"]
    chat, code = both.summaries("chat")[1], both.summaries("code")[1]
    assert (chat.speedup, chat.tokens) == (2.0, 30)
    assert (code.speedup, code.speedup_low, code.speedup_high) == (1.0, 1.0, 1.0)
    assert code.acceptance_rate == pytest.approx(1 / 12)
    assert both.speedups("chat") == {"plain": 1.0, "fast": 2.0}
    assert both.speedups("code") == {"plain": 1.0, "fast": 1.0}


def test_the_document_is_json_without_nan() -> None:
    document = json.loads(json.dumps(judgement().to_json(), allow_nan=False))
    assert (document["workload"], document["requests"], document["groups"]) == ("w", 3, 3)
    assert [arm["arm"] for arm in document["arms"]] == ["plain", "fast"]
    assert document["arms"][1]["speedup"] == pytest.approx(1.5)
    assert document["kinds"] == {"chat": {"plain": 1.0, "fast": 2.0}, "code": {"plain": 1.0, "fast": 1.0}}
    assert [o["seconds"] for o in document["outcomes"]["fast"]] == [1.0, 4.0, 3.0]
    assert set(document["outcomes"]["plain"][0]) == set(Outcome.__dataclass_fields__)


def test_a_judgement_of_plain_alone_has_a_document(decoder: SpeculativeDecoder) -> None:
    document = judge(decoder, {"plain": "plain"}, workload(), 1).to_json()
    json.dumps(document, allow_nan=False)
    assert document["arms"][0]["speedup"] == 1.0


# -- the interval -------------------------------------------------------------------------------------------------


def interval(reference: np.ndarray, seconds: np.ndarray, groups: list[str] | None = None) -> tuple[float, float]:
    names = groups or [f"g{i}" for i in range(len(seconds))]

    def outcomes_of(times: np.ndarray) -> list[Outcome]:
        return [outcome(s, group=name) for s, name in zip(times.tolist(), names, strict=True)]

    outcomes = {"plain": outcomes_of(reference), "arm": outcomes_of(seconds)}
    summary = Judgement("w", outcomes).summaries()[1]
    return summary.speedup_low, summary.speedup_high


def test_the_interval_covers_the_true_speed_up_about_as_often_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """300 judgements of 40 requests with a known ratio of mean times.

    A percentile interval of 40 skewed pairs covers about 93 %: 279 of 300, deviation 4.4. Fewer than 258 or more
    than 296 are a false alarm in fewer than 1 of 10,000 seeds.
    """
    monkeypatch.setattr(evaluation, "RESAMPLES", 400)
    rng = np.random.default_rng(1)
    sigma, covered = 0.5, 0
    true = 1.6 / np.exp(0.3**2 / 2)
    for _ in range(300):
        reference = np.exp(sigma * rng.standard_normal(40))
        seconds = reference / 1.6 * np.exp(0.3 * rng.standard_normal(40))
        low, high = interval(reference, seconds)
        covered += low <= true <= high
    assert 258 <= covered <= 296


def test_the_interval_is_paired_over_requests() -> None:
    """Requests of very different length, all twice as fast: nothing is uncertain."""
    seconds = np.exp(2.0 * np.random.default_rng(2).standard_normal(30))
    assert interval(2.0 * seconds, seconds) == pytest.approx((2.0, 2.0))


def test_the_interval_narrows_with_requests_and_is_the_same_each_time() -> None:
    rng = np.random.default_rng(3)
    reference, seconds = rng.uniform(1, 2, 400), rng.uniform(0.5, 1, 400)
    few, many = interval(reference[:25], seconds[:25]), interval(reference, seconds)
    assert many == interval(reference, seconds)
    assert 2.5 < (few[1] - few[0]) / (many[1] - many[0]) < 6.0  # 4 = sqrt(400 / 25)
    standard_error = np.std(reference - 2.0 * seconds) / np.sqrt(400) / seconds.mean()
    assert many[1] - many[0] == pytest.approx(2 * 1.96 * standard_error, rel=0.15)


def test_requests_of_one_group_are_no_samples_of_their_own() -> None:
    """Every request counted eight times over tells no more than once, whatever the order."""
    rng = np.random.default_rng(4)
    reference, seconds = rng.uniform(1, 2, 30), rng.uniform(0.5, 1, 30)
    once = interval(reference, seconds)
    order = rng.permutation(240)
    names = [f"g{i % 30:02}" for i in order]
    grouped = interval(reference[order % 30], seconds[order % 30], names)
    alone = interval(reference[order % 30], seconds[order % 30])
    assert grouped[1] - grouped[0] == pytest.approx(once[1] - once[0], rel=0.1)
    assert alone[1] - alone[0] < 0.5 * (once[1] - once[0])  # 1 / sqrt(8) of it


def test_one_group_alone_has_no_spread() -> None:
    assert interval(np.array([2.0, 4.0]), np.array([1.0, 2.0]), ["g", "g"]) == (2.0, 2.0)


def test_the_interval_over_groups_covers_the_true_speed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """300 judgements of 40 documents with 4 questions each, which share most of their luck.

    As above: about 93 % are covered; fewer than 258 or more than 296 are a false alarm in fewer than 1 of 10,000 seeds.
    Were requests resampled, hardly 70 % would be.
    """
    monkeypatch.setattr(evaluation, "RESAMPLES", 400)
    rng = np.random.default_rng(5)
    names = [f"g{i // 4}" for i in range(160)]
    true, covered = 1.6 / np.exp(0.3**2 / 2), 0
    for _ in range(300):
        reference = np.exp(np.repeat(0.5 * rng.standard_normal(40), 4))
        seconds = reference / 1.6 * np.exp(np.repeat(0.3 * rng.standard_normal(40), 4))
        low, high = interval(reference, seconds, names)
        covered += low <= true <= high
    assert 258 <= covered <= 296


# -- the report ---------------------------------------------------------------------------------------------------


def test_the_table_has_a_line_for_each_arm() -> None:
    lines = table(judgement()).splitlines()
    assert lines[0] == (
        "3 requests of w; intervals resample 3 groups (conversations, or documents with their questions)"
    )
    assert lines[1].split()[:3] == ["arm", "tokens/s", "speed-up"]
    assert lines[2].split() == ["plain", "2.5", "1.000", "1.000", "to", "1.000", "400", "ms", "-", "-", "-", "0"]
    assert lines[3].split()[:3] == ["fast", "5.0", "1.500"]
    assert lines[3].split()[-5:] == ["ms", "41.7%", "2.67", "4.2%", "0"]
    assert len({len(line) for line in lines[1:]}) == 1


def test_one_group_alone_gets_no_interval() -> None:
    alone = Judgement("w", {"plain": [outcome(2.0, group="g"), outcome(4.0, group="g")]})
    assert table(alone).splitlines()[-1].split() == ["plain", "3.3", "1.000", *"-", "100", "ms", *"---", "0"]


def test_the_table_of_kinds() -> None:
    rows = [line.split() for line in kinds_table(judgement()).splitlines()]
    assert rows == [["speed-up", "chat", "code"], ["plain", "1.00", "1.00"], ["fast", "2.00", "1.00"]]


def test_columns_are_of_even_width() -> None:
    assert aligned([("a", "bb"), ("ccc", "d")]) == "a    bb\nccc   d"


def test_a_request_beyond_the_context_is_left_out_with_the_rest_of_its_conversation(
    decoder: SpeculativeDecoder,
) -> None:
    long = Conversation("long", "chat", (Message("user", "the in " * 400), Message("user", "and?")))
    whole = workload()
    with pytest.warns(UserWarning, match=r"request long/1 is left out: the prompt has"):
        judgement = judge(decoder, ARMS, replace(whole, conversations=(long, *whole.conversations)), 4)
    assert [outcome.request for outcome in judgement.outcomes["plain"]] == [
        *("talk/1", "talk/2", "talk/3", "doc#1/1", "doc#2/1", "chat/1")
    ]
    with pytest.warns(UserWarning, match="left out"), pytest.raises(PromptError, match="no request of small fits"):
        judge(decoder, ARMS, replace(whole, conversations=(long,)), 4)
