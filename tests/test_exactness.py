"""Exactness modes: near-ties come out as plain decoding decides them, at the price that is stated; nothing else moves.

Most tests run on a model in a table whose passes round visibly: how a pass is cut moves the distance of two logits by
up to `NOISE`, which is far more than many of its margins.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import (
    FunctionDrafter,
    TableRunner,
    WatchedRunner,
    load_table,
    load_tiny,
    make_parts,
    save_tiny,
    scripted_drafter,
    tiny_decoder,
    tiny_tokenizer,
)
from torch import Tensor

import engine.__main__ as engine_command
from engine import rounding as rounding_module
from engine.assembly import engine_line, settle_rounding
from engine.controller_names import make_controller
from engine.controllers import BaseController
from engine.decoder import SpeculativeDecoder
from engine.drafters.base import Draft
from engine.drafters.ngram import NGramDrafter
from engine.errors import SettingError
from engine.exactness import margins, settle_exact
from engine.kv import KVBuffer
from engine.lean import LeanRunner
from engine.models import load_model
from engine.results import Generation
from engine.rounding import CANDIDATES, SAFETY, Rounding, cached_rounding, change, measure_rounding

VOCAB, NOISE, SEEDS = 64, 0.25, range(12)
MENU = "fresh/0,reuse/0,fresh/ngram/3,reuse/ngram/2,reuse/scripted/1,reuse/scripted/4,fresh/scripted/6"


class RoundingRunner(TableRunner):
    """A table whose logits depend on how all rows so far were cut into passes.

    The buffer's values hold a number for each position, from its pass's size and its place there. A row's noise is
    drawn by their sum, each logit's from [-NOISE / 4, NOISE / 4]: two cuts differ in a distance by at most NOISE.
    """

    bitwise = False

    def __init__(self, seed: int = 0, noise: float = NOISE) -> None:
        super().__init__(VOCAB, seed, scale=1.0, max_context=192)
        generator = torch.Generator().manual_seed(seed + 1)
        self.noise = (torch.rand(1009, VOCAB, generator=generator) - 0.5) * noise / 2

    @torch.inference_mode()
    def forward(self, tokens: Sequence[int], buffer: KVBuffer, num_logits: int) -> Tensor:
        rows = torch.tensor(tokens, dtype=torch.float32).view(1, 1, -1, 1)
        cut = torch.arange(len(tokens)).view(1, 1, -1, 1) * 37.0 + 101.0 * len(tokens)
        keys, values = buffer.update(rows, cut, 0)
        now = keys.flatten().long()
        before = torch.cat([torch.zeros(1, dtype=torch.long), now])[:-1]
        logits: Tensor = (self.table[before, now] + self.noise[values.flatten().long().cumsum(0) % 1009])[-num_logits:]
        return logits


class Random(BaseController):
    """Any allowed action at any time."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def choose(self, observation: object, mask: Sequence[bool]) -> int:
        return self.random.choice([index for index, allowed in enumerate(mask) if allowed])


def prompt_of(seed: int) -> list[int]:
    return [5, 6, 7, 8, *random.Random(seed).choices(range(VOCAB), k=3 + seed % 9)]


def decoder_of(
    runner: Any, rounding: Rounding | None, drafters: Sequence[Any] = (), menu: str | None = None, **settings: Any
) -> SpeculativeDecoder:
    loaded = load_table(runner)
    parts = replace(make_parts(loaded, drafters, menu, **settings), rounding=rounding)
    return SpeculativeDecoder(parts, make_controller("plain", parts.menu), loaded)


def plainly(runner: Any, prompt: Sequence[int], count: int, **settings: Any) -> Generation:
    """Plain decoding, nothing cached."""
    return decoder_of(runner, None).generate(prompt, count, ignore_eos=True, **settings)


def unsure(text: Sequence[int], seed: int) -> FunctionDrafter:
    """Proposes the text's tokens, and now and then another."""
    rng = random.Random(seed)

    def propose(tokens: list[int], k: int, sampling: object) -> Draft:
        ahead = [*text[len(tokens) : len(tokens) + k], *[0] * k][:k]
        return Draft([t if rng.random() < 0.9 else rng.randrange(VOCAB) for t in ahead], [1.0] * k)

    return FunctionDrafter(propose)


def at_random(rounding: Rounding | None, seed: int) -> tuple[list[Generation], list[Generation]]:
    """Four requests that share prefixes, over random entries of the menu; and the same decoded plainly."""
    runner = RoundingRunner(seed)
    scripted = FunctionDrafter(lambda *_: Draft([], []))
    decoder = decoder_of(runner, rounding, [NGramDrafter(), scripted], MENU).with_controller(Random(seed), guard=False)
    ours, plain = [], []
    for prompt in (prompt_of(seed), prompt_of(seed), prompt_of(seed + 1), [*prompt_of(seed), 9, 10]):
        plain.append(plainly(runner, prompt, 40))
        scripted.function = unsure([*prompt, *plain[-1].tokens], seed).function
        ours.append(decoder.generate(prompt, 40, ignore_eos=True))
        decoder.parts.prefix_cache.check_integrity()
    return ours, plain


# -- the promise --------------------------------------------------------------------------------------------------


def test_without_guarding_tokens_differ() -> None:
    """Else the tests below would show nothing."""
    runs = [pair for seed in SEEDS for pair in zip(*at_random(None, seed), strict=True)]
    assert sum(ours.tokens != plain.tokens for ours, plain in runs) > len(runs) / 2
    assert all(ours.counters.num_guarded_rows == 0 for ours, _ in runs)


@pytest.mark.parametrize("seed", SEEDS)
def test_guarded_tokens_are_plain_decodings(seed: int) -> None:
    rounding = Rounding(NOISE / SAFETY)
    ours, plain = at_random(rounding, seed)
    assert [one.tokens for one in ours] == [one.tokens for one in plain]
    assert sum(one.counters.num_guarded_rows for one in ours) > 0
    assert sum(one.counters.num_accepted_tokens for one in ours) > 40
    assert sum(one.counters.num_cached_tokens for one in ours) > 0


def test_a_models_own_rounding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny Llama in bf16, whose near-ties are many, with the bound that its engine measured."""
    monkeypatch.setenv("DRAFTGATE_CACHE", str(tmp_path / "cache"))
    folder = str(save_tiny(tmp_path / "model"))
    menu = "reuse/0,fresh/0,reuse/scripted/3,reuse/scripted/5,fresh/scripted/2"
    scripted = FunctionDrafter(lambda *_: Draft([], []))
    decoder = SpeculativeDecoder.from_pretrained(folder, scripted, "plain", menu, "bf16", exact="guarded")
    guarded = 0
    for seed in range(6, 12):
        prompt = random.Random(seed // 2).choices(range(250), k=9)
        plain = decoder.with_empty_caches().generate(prompt, 48, ignore_eos=True)
        assert plain.counters.num_guarded_rows == 0
        scripted.function = scripted_drafter([*prompt, *plain.tokens]).function
        ours = decoder.with_controller(Random(seed), guard=False).generate(prompt, 48, ignore_eos=True)
        assert ours.tokens == plain.tokens
        guarded += ours.counters.num_guarded_rows
    assert guarded > 0


# -- where a request ends -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("wrong", [None, 1])
@pytest.mark.parametrize("k", [1, 3, 8])
def test_ends_are_plain_decodings(k: int, wrong: int | None, seed: int) -> None:
    """Every length, an end of sequence at every place, and a stop string at many, first and from the cache."""
    runner, prompt = RoundingRunner(seed), prompt_of(seed)
    truth = plainly(runner, prompt, 24).tokens
    ends: list[tuple[dict[str, Any], set[int]]] = [({"max_new_tokens": count}, set()) for count in (1, 2, 5, 9, 24)]
    ends += [({"max_new_tokens": 24}, {token}) for token in truth[:9]]
    texts = [str(tiny_tokenizer().decode(truth[at : at + 2])) for at in range(0, 20, 3)]
    ends += [({"max_new_tokens": 24, "stop": text}, set()) for text in texts if "\ufffd" not in text]
    for settings, eos_ids in ends:
        drafter = scripted_drafter([*prompt, *truth], right=lambda k: k if wrong is None else wrong)
        # Behind the text's end the scripted drafter proposes what the table may not hold.
        plain = decoder_of(runner, None, eos_ids=eos_ids).generate(prompt, **settings)
        decoder = decoder_of(runner, Rounding(NOISE / SAFETY), [drafter], f"reuse/0,reuse/{k}", eos_ids=eos_ids)
        arm = decoder.with_controller(f"fixed:{k}")
        for _ in range(2):
            ours = arm.generate(prompt, **settings)
            assert (ours.tokens, ours.text, ours.finish_reason) == (plain.tokens, plain.text, plain.finish_reason)


# -- what it costs ------------------------------------------------------------------------------------------------

PROMPT = prompt_of(5)
LONG = len(PROMPT)


def watched(rounding: Rounding | None, right: int, menu: str) -> tuple[SpeculativeDecoder, WatchedRunner]:
    runner = RoundingRunner()
    text = [*PROMPT, *plainly(runner, PROMPT, 40).tokens]
    watch = WatchedRunner(runner)
    decoder = decoder_of(watch, rounding, [scripted_drafter(text, right=lambda k: min(k, right))], menu)
    watch.passes.clear()  # the decoder has measured a token's bytes
    return decoder, watch


def test_where_all_is_a_near_tie_every_row_is_read_again_but_those_read_plainly() -> None:
    decoder, watch = watched(Rounding(100.0), 4, "reuse/0,reuse/4,reuse/6")
    with decoder.session(PROMPT, 30, ignore_eos=True) as session:
        counted = []
        for k, passes in (
            (4, [LONG + 4, LONG, 4, 1, 3, 1, 2, 1, 1]),  # the last pass has one row, on plain decoding's KV
            (0, [1]),
            (6, [7, 1, 6, 1, 5, 1, 4, 1, 3, 1]),  # four are right
            (0, [1]),
        ):
            watch.passes.clear()
            session.step(decoder.parts.menu.find(k))
            assert watch.passes == passes
            counted.append(session.counters().num_guarded_rows)
        assert counted == [4, 4, 9, 9]
        assert session.result().counters.num_guarded_rows == 9


@pytest.mark.parametrize("rounding", [None, Rounding(0.0)])
def test_where_nothing_is_a_near_tie_no_pass_is_added(rounding: Rounding | None) -> None:
    decoder, watch = watched(rounding, 4, "reuse/0,reuse/4")
    with decoder.session(PROMPT, 30, ignore_eos=True) as session:
        for k in (4, 0, 4):
            session.step(decoder.parts.menu.find(k))
    # Not every draft may hold: without guarding the tokens are not those of the script.
    assert watch.passes == [LONG + 4, 1, 5]
    assert session.counters().num_guarded_rows == 0


def test_plain_decoding_adds_nothing_and_a_cached_prefix_costs_one_prefill() -> None:
    decoder, watch = watched(Rounding(100.0), 4, "fresh/0,reuse/0")
    first = decoder.generate(PROMPT, 5, ignore_eos=True)
    assert (watch.passes, first.counters.num_guarded_rows) == ([LONG, 1, 1, 1, 1], 0)
    watch.passes.clear()
    second = decoder.generate(PROMPT, 5, ignore_eos=True)
    assert (watch.passes, second.counters.num_guarded_rows) == ([1, LONG, 1, 1, 1, 1], 1)
    assert second.counters.num_cached_tokens == LONG - 1
    watch.passes.clear()
    fresh = decoder.with_controller("fresh").generate(PROMPT, 5, ignore_eos=True)
    assert (watch.passes, fresh.counters.num_guarded_rows) == ([LONG, 1, 1, 1, 1], 0)
    assert first.tokens == second.tokens == fresh.tokens


def test_a_late_near_tie_is_read_from_the_last_exact_position_on() -> None:
    rounding = Rounding(0.0)
    decoder, watch = watched(rounding, 8, "reuse/0,reuse/2")
    with decoder.session(PROMPT, 40, ignore_eos=True) as session:
        session.step(0)  # the prompt, plainly
        session.step(1)
        held = len(session.tokens) - LONG
        rounding.largest = 100.0
        watch.passes.clear()
        session.step(0)
        # One row, then all generated tokens one by one.
        assert watch.passes == [1, *[1] * held]
        assert session.counters().num_guarded_rows == 1


def test_the_time_of_reading_again_is_the_verifying_time(monkeypatch: pytest.MonkeyPatch) -> None:
    import engine.session

    decoder, watch = watched(Rounding(100.0), 4, "reuse/0,reuse/2")
    monkeypatch.setattr(engine.session.time, "perf_counter", lambda: float(len(watch.passes)))
    with decoder.session(PROMPT, 10, ignore_eos=True) as session:
        record = session.step(1)
    assert watch.passes == [LONG + 2, LONG, 2, 1, 1]
    assert (record.seconds_verify, record.seconds_draft, record.seconds_overhead) == (5.0, 0.0, 0.0)


# -- when something fails -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError("gone"), KeyboardInterrupt()])
@pytest.mark.parametrize("cached", [False, True])
def test_a_pass_that_fails_at_any_time_costs_no_token(error: BaseException, cached: bool) -> None:
    runner = RoundingRunner(3)
    truth = plainly(runner, PROMPT, 16).tokens

    class Failing(WatchedRunner):
        def forward(self, tokens: Sequence[int], buffer: KVBuffer, num_logits: int) -> Tensor:
            if len(self.passes) == failing_pass and not failed:
                failed.append(len(self.passes))
                raise error
            return super().forward(tokens, buffer, num_logits)

    failing_pass, failed = -1, [0]
    for turn in range(40):
        watch = Failing(runner)
        decoder = decoder_of(watch, Rounding(NOISE / SAFETY), [scripted_drafter([*PROMPT, *truth])], "reuse/0,reuse/3")
        if cached:
            decoder.generate(PROMPT[:5], 1, ignore_eos=True)
        watch.passes.clear()
        failing_pass, failed = turn, []
        with decoder.session(PROMPT, 16, ignore_eos=True) as session:
            while not session.finished:
                try:
                    session.step(1)
                except type(error):
                    assert failed == [turn]
        assert session.generated == truth
        if not failed:
            break
    assert turn > 8


# -- sampling -----------------------------------------------------------------------------------------------------


def test_sampling_is_left_alone() -> None:
    """Where tokens are drawn, no token hangs on which of two is higher by a hair."""
    told = []
    for rounding in (None, Rounding(100.0)):
        decoder, watch = watched(rounding, 4, "reuse/0,reuse/4")
        generation = decoder.with_controller("fixed:4").generate(PROMPT, 20, temperature=0.8, seed=3, ignore_eos=True)
        told.append((generation.tokens, list(watch.passes), generation.counters))
    assert told[0] == told[1]
    assert told[1][2].num_guarded_rows == 0


# -- the bound ----------------------------------------------------------------------------------------------------


def test_a_larger_change_raises_the_bound_for_all_requests_that_follow() -> None:
    rounding = Rounding(NOISE / 50)
    ours, _ = at_random(rounding, 2)
    assert sum(one.counters.num_guarded_rows for one in ours) > 0
    assert NOISE / 50 < rounding.largest <= NOISE
    assert rounding.bound == SAFETY * rounding.largest
    largest = rounding.largest
    rounding.learn(torch.zeros(3), torch.zeros(3))
    assert rounding.largest == largest
    rounding.learn(torch.tensor([1.0, 2.0, 9.0]), torch.tensor([1.5, 1.75, 9.0]))
    assert rounding.largest == 0.75


def test_a_change_is_that_of_distances_among_the_highest_logits() -> None:
    plain = torch.arange(100.0)
    assert change(plain, plain + 5.0) == 0.0
    for at, moved in ((99, 0.5), (100 - CANDIDATES, 0.5), (99 - CANDIDATES, 0.0)):
        grouped = plain.clone()
        grouped[at] -= 0.5
        assert change(plain, grouped) == moved
    masked = torch.tensor([1.0, float("-inf"), 3.0])
    assert change(masked, masked + torch.tensor([0.0, 0.0, 0.25])) == 0.25


def test_margins() -> None:
    logits = torch.tensor([[1.0, 4.0, 3.5], [2.0, 2.0, 0.0], [7.0, -1.0, float("-inf")], [0.0, 1.0, 4.0]])
    assert margins(logits) == [0.5, 0.0, 8.0, 3.0]
    assert margins(logits[:0]) == []


def test_the_measurement_meets_every_number_of_rows_and_both_forms_of_prefill() -> None:
    watch = WatchedRunner(RoundingRunner())
    count = rounding_module.PROMPT + rounding_module.ROWS
    tokens = [i * 7 % VOCAB for i in range(count)]
    rounding = measure_rounding(watch, [tokens], 5)
    plain = [rounding_module.PROMPT, *[1] * rounding_module.ROWS]
    assert watch.passes[: len(plain)] == plain
    rest = watch.passes[len(plain) :]
    assert rest[:6] == [rounding_module.PROMPT // 2] * 2 + [2, 3, 4, 5]
    second = rest.index(rounding_module.PROMPT + 4)
    assert sum(rest[:second]) == sum(rest[second:]) == count
    assert rest[second + 1 : second + 5] == [5, 4, 3, 2]
    # 50 rows of noise that moves distances by up to NOISE
    assert NOISE / 2 < rounding.largest <= NOISE


@pytest.mark.parametrize("count", [1, 2, 3, 20, 79])
def test_short_texts_can_be_measured(count: int) -> None:
    for rows in (1, 2, 9):
        largest = measure_rounding(RoundingRunner(), [[3] * count], rows).largest
        assert (largest > 0.0) == (count > 3 or min(rows, count) > 1)  # else all passes are plain decoding's
    assert measure_rounding(TableRunner(VOCAB), [[3] * count], 9).largest == 0.0


def test_the_measured_bound_is_kept_for_the_bits_that_it_was_measured_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTGATE_CACHE", str(tmp_path))

    def measured(runner: Any, lengths: Sequence[int] = (1, 4)) -> tuple[float, bool]:
        watch = WatchedRunner(runner)
        largest = cached_rounding(watch, TokenizerOfTable(), lengths).largest
        return largest, len(watch.passes) > 1

    largest, anew = measured(RoundingRunner())
    assert anew
    assert measured(RoundingRunner()) == (largest, False)
    assert measured(RoundingRunner(), (4, 2)) == (largest, False)
    assert measured(RoundingRunner(), (1, 5))[1]
    assert measured(RoundingRunner(noise=NOISE / 2))[1]
    assert len(list((tmp_path / "rounding").iterdir())) == 3
    for damaged in ("", "{}", '{"largest": NaN}', '{"largest": -1}', '{"largest": "x"}', "[]"):
        for file in (tmp_path / "rounding").iterdir():
            file.write_text(damaged, encoding="utf-8")
        assert measured(RoundingRunner()) == (largest, True)
    monkeypatch.setenv("DRAFTGATE_CACHE", str(tmp_path / "rounding" / "x" / "y"))
    (tmp_path / "rounding" / "x").write_text("in the way", encoding="utf-8")
    with pytest.warns(UserWarning, match="the measured rounding is not kept and will be measured again"):
        assert measured(RoundingRunner()) == (largest, True)


class TokenizerOfTable:
    """Ids that the table has."""

    def __call__(self, text: str, **settings: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) % VOCAB for letter in text]}


# -- modes --------------------------------------------------------------------------------------------------------

REFUSED = (
    "exact='bitwise' is not to be had here: this model in {} rounds differently in passes of several rows; "
    "use fp32 or int8 with a Llama or Qwen2 model on the CPU, a GPU, or exact='guarded'"
)


@pytest.mark.parametrize(
    ("asked", "precision", "settled"),
    [
        (None, "fp32", "guarded"),
        (None, "bf16", "off"),
        (None, "fp16", "off"),
        (None, "int8", "off"),
        ("guarded", "fp32", "guarded"),
        ("guarded", "bf16", "guarded"),
        ("off", "fp32", "off"),
    ],
)
def test_modes_of_a_runner_that_rounds(asked: str | None, precision: str, settled: str) -> None:
    assert settle_exact(asked, RoundingRunner(), precision) == settled


@pytest.mark.parametrize("asked", [None, "bitwise", "guarded", "off"])
def test_a_bitwise_runner_is_always_bitwise(asked: str | None) -> None:
    assert settle_exact(asked, TableRunner(), "int8") == "bitwise"
    loaded = load_table(TableRunner())
    assert settle_rounding(asked, loaded, make_parts(loaded).menu) is None
    assert tiny_decoder(loaded).exact == "bitwise"


def test_modes_of_an_engine(target_folder: Path, cache_folder: Path) -> None:
    def make(exact: str | None) -> SpeculativeDecoder:
        return SpeculativeDecoder.from_pretrained(str(target_folder), controller="plain", precision="bf16", exact=exact)

    assert [make(exact).exact for exact in (None, "guarded", "off")] == ["off", "guarded", "off"]
    rounding = make("guarded").parts.rounding
    assert rounding is not None
    assert rounding.largest > 0.0
    with pytest.raises(SettingError) as caught:
        make("bitwise")
    assert str(caught.value) == REFUSED.format("bf16")


def test_one_bound_for_an_engine_whatever_its_controller_and_caches() -> None:
    rounding = Rounding(1.0)
    decoder = decoder_of(RoundingRunner(), rounding)
    assert decoder.exact == "guarded"
    assert decoder.with_empty_caches().with_controller("fresh").parts.rounding is rounding


@pytest.mark.parametrize("exact", ["exactly", "", "Bitwise"])
def test_unknown_modes_are_refused_before_anything_is_loaded(exact: str) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: load_model("/none", exact=exact),
        lambda: SpeculativeDecoder.from_pretrained("/none", exact=exact),
    ]
    for call in calls:
        with pytest.raises(SettingError) as caught:
            call()
        assert str(caught.value) == f"exact is {exact!r}; choose one of bitwise, guarded, off"


def test_the_command_line(command: Any, target_folder: Path, cache_folder: Path) -> None:
    words = (
        "the cat",
        "--target",
        target_folder,
        "--max-new-tokens",
        6,
        "--controller",
        "plain",
        "--precision",
        "bf16",
    )
    for exact in ("guarded", "off"):
        assert command(engine_command, *words, "--exact", exact)[0] == 0
    code, out, err = command(engine_command, *words, "--exact", "bitwise")
    assert (code, out, err) == (2, "", f"draftgate: error: {REFUSED.format('bf16')}\n")
    code, _, err = command(engine_command, *words, "--exact", "x")
    assert (code, err) == (2, "draftgate: error: exact is 'x'; choose one of bitwise, guarded, off\n")


def test_the_statistics_line_counts_near_ties() -> None:
    decoder, _ = watched(Rounding(100.0), 4, "reuse/0,reuse/4")
    generation = decoder.with_controller("fixed:4").generate(PROMPT, 5, ignore_eos=True)
    assert generation.counters.num_guarded_rows == 4
    assert "4/4 drafts accepted, 4 near-ties computed anew, " in engine_command.statistics_line(generation, "me")


def test_the_promise_of_runners() -> None:
    assert LeanRunner.bitwise
    assert not load_tiny("llama").runner.bitwise
    assert WatchedRunner(TableRunner()).bitwise


def test_costs_of_a_bitwise_runner_are_not_anothers() -> None:
    lines = [engine_line(load_table(runner), {}) for runner in (TableRunner(), RoundingRunner())]
    assert lines == ["target table, fp32 bitwise, drafters none", "target table, fp32, drafters none"]
