"""Passes of fixed shapes: the plain runner's logits whatever the way there, and bitwise the same bits in any company.

They run uncaptured here, or through a stand-in for a CUDA graph that replays the pass into the same memory. What only
a GPU can show is at the end.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as hf
from tiny_models import (
    CONTEXT,
    FunctionDrafter,
    eos_id,
    load_tiny,
    random_tokens,
    reference,
    scripted_drafter,
    tiny_decoder,
    tiny_model,
    tiny_model_drafter,
    vocab_size,
)
from torch import Tensor

from engine import static_kv, static_runner
from engine.controllers import BaseController
from engine.drafters.base import Draft
from engine.errors import SettingError
from engine.kv import KVBuffer
from engine.models import LoadedModel
from engine.prefix_cache import PrefixCache
from engine.runner import HFRunner, kv_bytes_per_token
from engine.static_graph import Captured
from engine.static_runner import StaticRunner, static_or_plain, why_not_static

SERVED = ("llama", "qwen2", "gpt2", "neox", "opt", "phi")
SPAN, STORAGE = 32, 64  # of the tests: longer texts cross the boundaries
TEXT = random_tokens(140, 3)

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="captures CUDA graphs, and torch sees no GPU here")


@pytest.fixture(autouse=True)
def small_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static_runner, "FIRST_SPAN", SPAN)
    monkeypatch.setattr(static_kv, "FIRST_POSITIONS", STORAGE)


class Tape:
    """A stand-in for `Recorder`: the pass runs again at each replay, into the logits of the first time."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def record(self, compute: Callable[[], Tensor]) -> Captured:
        self.recorded += 1
        logits = torch.full_like(compute(), float("nan"))

        def replay() -> None:
            self.replayed += 1
            logits.copy_(compute())

        return Captured(replay, logits)


class Untapeable:
    def record(self, compute: Callable[[], Tensor]) -> Captured:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")


def make_runner(name: str, exact: str | None = None, tape: Any = None) -> StaticRunner:
    runner = StaticRunner(load_tiny(name).runner.model, exact)  # type: ignore[attr-defined]
    runner.recorder = tape
    return runner


def with_runner(loaded: LoadedModel, runner: Any) -> LoadedModel:
    return replace(loaded, runner=runner)


def read(runner: HFRunner, buffer: KVBuffer, sizes: Sequence[int], text: Sequence[int] = TEXT) -> Tensor:
    """Logits of every row of a text, in passes of the given sizes."""
    logits = []
    for size in sizes:
        rows = text[buffer.length : buffer.length + size]
        logits.append(runner.forward(rows, buffer, len(rows)))
    return torch.cat(logits)


def groupings(total: int, seed: int, most: int = 9) -> list[int]:
    rng, sizes = random.Random(seed), []
    while sum(sizes) < total:
        sizes.append(min(rng.randint(1, most), total - sum(sizes)))
    return sizes


def close(ours: Tensor, theirs: Tensor) -> bool:
    return ours.shape == theirs.shape and torch.allclose(ours, theirs, atol=1e-4, rtol=1e-4)


# -- the plain runner's logits ------------------------------------------------------------------------------------


@pytest.mark.parametrize("exact", [None, "bitwise"])
@pytest.mark.parametrize("name", SERVED)
def test_logits_are_those_of_the_plain_runner(name: str, exact: str | None) -> None:
    runner, plain = make_runner(name, exact), load_tiny(name).runner
    mine, theirs = runner.new_buffer(), plain.new_buffer()
    rng = random.Random(5)
    for turn in range(32):
        held = mine.length
        count = 45 if turn == 0 else rng.choice([1, 1, 2, 3, 5, 9, 16, 17, 40])
        tokens = random_tokens(count, 100 + turn)
        wanted = rng.randint(1, count)
        ours = runner.forward(tokens, mine, wanted)
        assert close(ours, plain.forward(tokens, theirs, wanted))  # type: ignore[arg-type]
        assert ours.dtype == torch.float32
        assert mine.length == theirs.length == held + count
        kept = held + rng.randint(0, count) if rng.random() < 0.8 else rng.randint(0, held)
        mine.truncate(kept)
        theirs.truncate(kept)
        if turn % 8 == 0:
            ours_held, theirs_held = mine.views(), theirs.views()
            assert len(ours_held) == len(theirs_held)
            pairs = [(a, b) for x, y in zip(ours_held, theirs_held, strict=True) for a, b in zip(x, y, strict=True)]
            assert all(close(a, b) for a, b in pairs)
    assert mine.storage.capacity > STORAGE  # it grew


@pytest.mark.parametrize("exact", [None, "bitwise"])
@pytest.mark.parametrize("name", ["gpt2", "opt", "llama"])
def test_the_last_position_of_the_context(name: str, exact: str | None) -> None:
    """Padding then lies behind the positions that the model has."""
    runner, plain, text = make_runner(name, exact), load_tiny(name).runner, random_tokens(CONTEXT, 9)
    buffer, theirs = runner.new_buffer(), plain.new_buffer()
    runner.forward(text[:-6], buffer, 1)
    plain.forward(text[:-6], theirs, 1)
    assert close(read(runner, buffer, [5, 1], text), read(plain, theirs, [5, 1], text))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="513 tokens are beyond the context window of 512"):
        runner.forward([1], buffer, 1)
    assert buffer.length == CONTEXT


def test_half_precision_keeps_its_precision_and_gives_fp32_logits() -> None:
    model = tiny_model("llama").to(torch.bfloat16)
    runner, plain = StaticRunner(model, "bitwise"), HFRunner(model)
    buffer, theirs = runner.new_buffer(), plain.new_buffer()
    ours, expected = read(runner, buffer, [3, 20, 1]), plain.forward(TEXT[:24], theirs, 24)
    assert ours.dtype == torch.float32
    assert buffer.views()[0][0].dtype == torch.bfloat16
    assert (ours - expected).abs().max() < 0.05 * expected.abs().max()
    assert kv_bytes_per_token(runner) == theirs.nbytes // 24


@pytest.mark.parametrize("num_logits", [0, 3])
def test_as_many_logits_as_there_are_rows(num_logits: int) -> None:
    runner = make_runner("llama")
    with pytest.raises(ValueError, match=f"num_logits is {num_logits} for 2 rows"):
        runner.forward([1, 2], runner.new_buffer(), num_logits)


@pytest.mark.parametrize("exact", [None, "bitwise"])
def test_a_pass_that_fails_leaves_the_buffer_as_it_was(exact: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner("llama", exact)
    buffer, other = runner.new_buffer(), runner.new_buffer()
    expected = read(runner, other, [20, 14, 3])
    read(runner, buffer, [20])
    compute, passes = runner._compute, 0

    def failing(*arguments: Any) -> Tensor:
        nonlocal passes
        passes += 1
        if passes == 2:  # the first pass has appended its rows by then
            raise MemoryError
        return compute(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(runner, "_compute", failing)
        patch.setattr(runner, "bitwise", True)  # so that 20 rows are several passes
        with pytest.raises(MemoryError):
            runner.forward(random_tokens(20, 7), buffer, 1)
    assert buffer.length == 20
    assert close(read(runner, buffer, [14, 3]), expected[20:])


# -- bitwise ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SERVED)
def test_a_row_has_the_same_bits_in_every_grouping(name: str) -> None:
    runner = make_runner(name, "bitwise")
    assert runner.bitwise
    alone = read(runner, runner.new_buffer(), [1] * len(TEXT))
    for size in range(2, 10):
        whole, rest = divmod(len(TEXT), size)
        sizes = [size] * whole + [rest] * (rest > 0)
        assert torch.equal(read(runner, runner.new_buffer(), sizes), alone)
    assert torch.equal(read(runner, runner.new_buffer(), [len(TEXT)]), alone)
    assert torch.equal(read(runner, runner.new_buffer(), groupings(len(TEXT), 1, most=40)), alone)


def test_neither_place_nor_company_change_a_row() -> None:
    """A token is the first row, then row j behind the same text, with other tokens after it and in the padding."""
    runner, rows = make_runner("llama", "bitwise"), static_runner.ROWS
    for position in (1, SPAN - rows, SPAN - rows + 1, 2 * SPAN - rows + 1, 80):
        expected = None
        for before in range(min(rows, position + 1)):
            buffer = runner.new_buffer()
            runner.forward(random_tokens(40, before), buffer, 1)  # another text's rows, stale afterwards
            buffer.truncate(0)
            if position > before:
                runner.forward(TEXT[: position - before], buffer, 1)
            behind = random_tokens(rows - 1 - before, 50 + before)
            pass_rows = [*TEXT[position - before : position + 1], *behind]
            logits = runner.forward(pass_rows, buffer, len(pass_rows))[before]
            expected = logits if expected is None else expected
            assert torch.equal(logits, expected)


def test_a_position_meets_one_span_however_rows_are_grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels may divide a longer span otherwise; those of this machine do not, so that the bits alone tell nothing."""
    runner = make_runner("drafter", "bitwise")
    static_pass = runner._static_pass
    met: dict[int, set[tuple[int, int]]] = {position: set() for position in range(CONTEXT)}

    def watched(ids: Tensor, buffer: Any, rows: int, span: int) -> Tensor:
        for position in range(buffer.length, buffer.length + len(ids)):
            met[position].add((rows, span))
        return static_pass(ids, buffer, rows, span)

    monkeypatch.setattr(runner, "_static_pass", watched)
    text = random_tokens(CONTEXT, 2)
    for sizes in ([1] * CONTEXT, [CONTEXT], *(groupings(CONTEXT, seed, most=40) for seed in range(8))):
        read(runner, runner.new_buffer(), sizes, text)
    assert [len(shapes) for shapes in met.values()] == [1] * CONTEXT
    spans = {span for shapes in met.values() for _, span in shapes}
    assert spans == {32, 64, 128, 256, 512, 576}  # the last one: no further than the context and its padding


def test_rollback_and_a_larger_storage_change_no_bit() -> None:
    runner = make_runner("llama", "bitwise")
    alone = read(runner, runner.new_buffer(), [1] * 140)
    buffer = runner.new_buffer()
    runner.forward(random_tokens(280, 4), buffer, 1)
    capacity = buffer.storage.capacity
    buffer.truncate(0)
    assert torch.equal(read(runner, buffer, groupings(140, 2)), alone)
    buffer.truncate(29)
    assert torch.equal(read(runner, buffer, groupings(111, 3)), alone[29:])
    assert buffer.storage.capacity == capacity > 256


def test_a_restored_prefix_changes_no_bit() -> None:
    runner = make_runner("llama", "bitwise")
    token_bytes = kv_bytes_per_token(runner)
    cache = PrefixCache(1000 * token_bytes, token_bytes)
    buffer = runner.new_buffer()
    alone = read(runner, buffer, [1] * 140)
    cache.insert(TEXT[:120], buffer)
    for length in (1, 31, 70, 120):
        other = runner.new_buffer()
        cache.restore(cache.match(TEXT).truncated(length), other)
        assert other.length == length
        assert torch.equal(read(runner, other, groupings(140 - length, length)), alone[length:])
    cache.check_integrity()


def test_without_bitwise_a_pass_has_no_more_rows_than_its_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: dict[str, set[tuple[int, int]]] = {"": set(), "bitwise": set()}
    for exact, seen in shapes.items():
        runner = make_runner("llama", exact)
        compute = runner._compute

        def watched(storage: Any, rows: int, span: int, compute: Any = compute, seen: Any = seen) -> Tensor:
            seen.add((rows, span))
            return compute(storage, rows, span)  # type: ignore[no-any-return]

        monkeypatch.setattr(runner, "_compute", watched)
        for size in (1, 2, 3, 5, 9, 16):
            buffer = runner.new_buffer()
            read(runner, buffer, [size])
    assert shapes[""] == {(rows, SPAN) for rows in (1, 2, 4, 8, 16)}
    assert shapes["bitwise"] == {(16, SPAN)}


# -- buffers, storages, graphs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("exact", [None, "bitwise"])
def test_buffers_used_in_turns(exact: str | None) -> None:
    runner, plain = make_runner("llama", exact, tape=Tape()), load_tiny("llama").runner
    texts = [random_tokens(150, seed) for seed in range(3)]
    pairs = [(runner.new_buffer(), plain.new_buffer()) for _ in texts]
    for turn in range(18):
        for text, (mine, theirs) in zip(texts, pairs, strict=True):
            size = [1, 7, 3][turn % 3]
            ours = read(runner, mine, [size], text)
            assert close(ours, read(plain, theirs, [size], text))  # type: ignore[arg-type]
            mine.truncate(mine.length - size // 2)
            theirs.truncate(theirs.length - size // 2)
    assert len({id(mine.storage) for mine, _ in pairs}) == 3


def test_sessions_that_follow_each_other_share_storages_and_graphs() -> None:
    tape = Tape()
    runner = make_runner("llama", "bitwise", tape=tape)
    storages: list[Any] = []
    for seed in range(3):
        buffer = runner.new_buffer()
        for size in groupings(140, seed):
            read(runner, buffer, [size])
            if buffer.storage not in storages:
                storages.append(buffer.storage)
        del buffer
        gc.collect()
    assert [storage.capacity for storage in storages] == [64, 128, 256]
    assert [set(storage.graphs) for storage in storages] == [{(16, 32), (16, 64)}, {(16, 128)}, {(16, 256)}]
    assert tape.recorded == 4 < tape.replayed


def test_prepared_passes_are_not_recorded_again() -> None:
    for exact, recorded in ((None, 10), ("bitwise", 2)):
        tape = Tape()
        runner = make_runner("llama", exact, tape=tape)
        runner.prepare()
        assert tape.recorded == recorded  # 1, 2, 4, 8, 16 rows; spans of 32 and 64
        buffer = runner.new_buffer()
        logits = read(runner, buffer, [1, 2, 3, 5, 9, 16, 10])
        assert tape.recorded == recorded
        assert close(logits, load_tiny("llama").runner.forward(TEXT[:46], KVBuffer(), 46))


def test_what_a_failed_request_leaves_behind_reaches_no_other() -> None:
    runner, plain = make_runner("llama"), load_tiny("llama").runner
    buffer = runner.new_buffer()
    read(runner, buffer, [40])
    storage = buffer.storage
    with torch.inference_mode():
        for pair in storage.layers:
            for tensor in pair:
                tensor.fill_(float("nan"))
    del buffer
    gc.collect()
    other, third = runner.new_buffer(), runner.new_buffer()
    ours = read(runner, other, [4])
    read(runner, third, [7], random_tokens(7, 1))
    ours = torch.cat([ours, read(runner, other, [1])])
    assert other.storage is storage
    assert third.storage is not storage
    assert close(ours, plain.forward(TEXT[:5], plain.new_buffer(), 5))


@pytest.mark.parametrize("exact", [None, "bitwise"])
def test_replayed_passes_give_the_same_and_earlier_logits_stay(exact: str | None) -> None:
    tape = Tape()
    taped, eager = make_runner("qwen2", exact, tape=tape), make_runner("qwen2", exact)
    mine, theirs = taped.new_buffer(), eager.new_buffer()
    sizes = groupings(140, 8)
    kept = []
    for size in sizes:
        rows = TEXT[mine.length : mine.length + size]
        kept.append((taped.forward(rows, mine, size), eager.forward(rows, theirs, size)))
    assert all(torch.equal(ours, expected) for ours, expected in kept)
    assert 0 < tape.recorded < tape.replayed


def test_where_nothing_can_be_captured_passes_run_all_the_same() -> None:
    runner, plain = make_runner("llama", tape=Untapeable()), load_tiny("llama").runner
    buffer = runner.new_buffer()
    with pytest.warns(RuntimeWarning, match=r"cannot be captured \(operation not permitted when stream is capturing\)"):
        first = read(runner, buffer, [4])
    rest = read(runner, buffer, [3, 1])  # a second warning would be an error here
    assert close(torch.cat([first, rest]), plain.forward(TEXT[:8], plain.new_buffer(), 8))


# -- through the decoder ------------------------------------------------------------------------------------------


class RandomController(BaseController):
    """Any allowed action at any time."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def choose(self, observation: object, mask: Sequence[bool]) -> int:
        return self.random.choice([index for index, allowed in enumerate(mask) if allowed])


@pytest.mark.parametrize("exact", [None, "bitwise"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_random_menus_give_the_tokens_of_plain_decoding(name: str, exact: str | None) -> None:
    loaded, prompt = load_tiny(name), random_tokens(11)
    target = with_runner(loaded, make_runner(name, exact, tape=Tape()))
    text = [*prompt, *reference(loaded, prompt, 48)]
    scripted = FunctionDrafter(lambda tokens, k, sampling: Draft([], []))
    drafter = tiny_model_drafter(target, runner=make_runner("drafter", exact))
    menu = "fresh/0,reuse/0,fresh/scripted/3,reuse/scripted/1,reuse/scripted/5,reuse/model/3,reuse/scripted/20"
    decoder = tiny_decoder(target, [scripted, drafter], menu=menu)
    for seed in range(6):
        rng = random.Random(seed)
        scripted.function = scripted_drafter(text, right=lambda k, rng=rng: rng.randint(0, k)).function
        generation = decoder.with_controller(RandomController(seed), guard=False).generate(prompt, 48, ignore_eos=True)
        assert generation.tokens == text[len(prompt) :]
        decoder.parts.prefix_cache.check_integrity()
    assert generation.counters.num_accepted_tokens > 0


def test_seeded_sampling_is_that_of_the_plain_runner() -> None:
    loaded, prompt = load_tiny("llama"), random_tokens(11)
    runner = make_runner("llama", "bitwise")
    drafter = tiny_model_drafter(loaded)
    settings: dict[str, Any] = {"temperature": 0.8, "top_k": 20, "seed": 3, "ignore_eos": True}
    ours = tiny_decoder(with_runner(loaded, runner), [drafter], "fixed:3").generate(prompt, 40, **settings)
    theirs = tiny_decoder(loaded, [drafter], "fixed:3").generate(prompt, 40, **settings)
    assert ours.tokens == theirs.tokens


# -- which models -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exact", [None, "bitwise"])
@pytest.mark.parametrize("name", SERVED)
def test_models_that_are_served(name: str, exact: str | None) -> None:
    runner = static_or_plain(tiny_model(name), exact)
    assert type(runner) is StaticRunner
    assert runner.bitwise == (exact == "bitwise")


def _mixtral() -> Any:
    config = hf.MixtralConfig(
        vocab_size=vocab_size(),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=2,
        max_position_embeddings=CONTEXT,
        pad_token_id=eos_id(),
    )
    return hf.AutoModelForCausalLM.from_config(config)


def _bloom() -> Any:
    config = hf.BloomConfig(vocab_size=vocab_size(), hidden_size=32, n_layer=2, n_head=4, pad_token_id=eos_id())
    return hf.AutoModelForCausalLM.from_config(config)


def _rotary_by_length() -> Any:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    return tiny_model("llama", rope_parameters=rope)


UNSERVED: dict[str, tuple[Callable[[], Any], str]] = {
    "sliding window": (lambda: tiny_model("mistral"), "its attention has a window"),
    "some windows": (lambda: tiny_model("gemma2"), "its layers are full_attention, sliding_attention"),
    "experts": (_mixtral, "its experts take rows together"),
    "rotary by length": (_rotary_by_length, r"its rotary angles \(dynamic\) depend on the text's length"),
    "biases by position": (_bloom, "passes of fixed shapes fail|its logits differ"),
}


@pytest.mark.parametrize("kind", UNSERVED)
def test_models_that_are_left_to_the_plain_runner(kind: str) -> None:
    make, reason = UNSERVED[kind]
    model = make()
    assert type(static_or_plain(model)) is HFRunner
    with pytest.raises(SettingError, match=f"exact='bitwise' cannot be kept for this model: ({reason})"):
        static_or_plain(model, "bitwise")


def test_a_mistral_without_a_window_is_served() -> None:
    model = tiny_model("mistral", sliding_window=None)
    assert why_not_static(model) is None
    assert type(static_or_plain(model)) is StaticRunner


def test_a_model_that_answers_otherwise_with_a_mask_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    forward = model.forward

    def careless(*arguments: Any, attention_mask: Any = None, **settings: Any) -> Any:
        seen = attention_mask if attention_mask is None else torch.zeros_like(attention_mask)
        return forward(*arguments, attention_mask=seen, **settings)

    monkeypatch.setattr(model, "forward", careless)
    assert type(static_or_plain(model)) is HFRunner
    with pytest.raises(SettingError, match="its logits differ by"):
        static_or_plain(model, "bitwise")


def test_rows_that_touch_each_other_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    forward = model.forward

    def touching(*arguments: Any, **settings: Any) -> Any:
        output = forward(*arguments, **settings)
        output.logits = output.logits * (1 + 1e-6 * output.logits[:, -1:].sign())
        return output

    monkeypatch.setattr(model, "forward", touching)
    with pytest.raises(SettingError, match="a row's bits depend on the rows beside it on this device"):
        static_or_plain(model, "bitwise")
    assert type(static_or_plain(model)) is StaticRunner


# -- on a GPU -----------------------------------------------------------------------------------------------------


@on_gpu
@pytest.mark.parametrize("exact", [None, "bitwise"])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("llama", torch.float32), ("llama", torch.float16), *((name, torch.bfloat16) for name in SERVED)],
    ids=str,
)
def test_captured_passes_on_a_gpu(name: str, dtype: torch.dtype, exact: str | None) -> None:
    model = tiny_model(name).to("cuda", dtype)
    runner = static_or_plain(model, exact)
    assert isinstance(runner, StaticRunner)
    eager = StaticRunner(model, exact)
    eager.recorder = None
    mine, theirs = runner.new_buffer(), eager.new_buffer()
    sizes = groupings(140, 4)
    ours, expected = read(runner, mine, sizes), read(eager, theirs, sizes)
    assert (ours - expected).abs().max() <= (1e-3 if dtype == torch.float32 else 0.05) * expected.abs().max()
    assert runner.recorder is not None
    assert mine.storage.graphs
    if exact:
        assert torch.equal(read(runner, runner.new_buffer(), [1] * 140), ours)


@on_gpu
def test_a_look_at_a_value_cannot_be_captured_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what failed in between leaves the current stream as it was."""
    model = tiny_model("llama").to("cuda")
    forward = model.forward

    def looking(*arguments: Any, **settings: Any) -> Any:
        assert float(settings["input_ids"].sum()) >= 0
        return forward(*arguments, **settings)

    monkeypatch.setattr(model, "forward", looking)
    before = torch.cuda.current_stream()
    runner, plain = StaticRunner(model), HFRunner(model)
    with pytest.warns(RuntimeWarning, match="passes cannot be captured"):
        ours = read(runner, runner.new_buffer(), [4, 1])
    assert runner.recorder is None
    assert torch.cuda.current_stream() == before
    assert close(ours, plain.forward(TEXT[:5], plain.new_buffer(), 5))


@on_gpu
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "seed": 1}], ids=["greedy", "sampled"])
def test_decoding_on_a_gpu(sampling: dict[str, Any]) -> None:
    target = with_runner(load_tiny("llama"), static_or_plain(tiny_model("llama").to("cuda"), "bitwise"))
    drafter = tiny_model_drafter(target, runner=static_or_plain(tiny_model("drafter").to("cuda"), "bitwise"))
    decoder, prompt = tiny_decoder(target, [drafter]), random_tokens(11)
    drafted = decoder.with_controller("fixed:4").generate(prompt, 48, ignore_eos=True, **sampling)
    assert drafted.counters.num_drafter_failures == 0
    assert len(drafted.tokens) == 48
    if not sampling:
        assert drafted.tokens == decoder.generate(prompt, 48, ignore_eos=True).tokens
