"""The KV buffer: after any rollback it holds what a fresh prefill would, and nothing stale is ever seen."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from tiny_models import (
    TARGETS,
    TableRunner,
    load_tiny,
    make_parts,
    random_tokens,
    reference,
    scripted_drafter,
    tiny_decoder,
)
from torch import Tensor

import engine.runner
from engine.kv import FIRST_CAPACITY, KVBuffer
from engine.request import Request
from engine.runner import HFRunner, kv_bytes_per_token
from engine.session import Session

PROMPT = tuple(random_tokens(11))

# Keys and values are of size 1 to 6 here. A pass over another number of rows sums in another order, which moves a
# number by a few units of 1e-6, and the second layer doubles that; a row of another token differs by about 1.
TOLERANCE = 1e-4


def prefilled(runner: HFRunner, tokens: Sequence[int]) -> KVBuffer:
    buffer = runner.new_buffer()
    runner.forward(tokens, buffer, 1)
    return buffer


def check_same(buffer: KVBuffer, expected: KVBuffer) -> None:
    assert buffer.length == expected.length
    assert len(buffer.views()) == len(expected.views())
    for ours, theirs in zip(buffer.views(), expected.views()):
        for one, other in zip(ours, theirs):
            assert one.shape == other.shape
            torch.testing.assert_close(one, other, atol=TOLERANCE, rtol=0.0)


def spoil_free_rows(buffer: KVBuffer) -> None:
    """NaN wherever nothing valid is stored: a pass that sees any of it gives NaN logits."""
    with torch.inference_mode():
        for layer in buffer.layers:
            layer.keys[:, :, layer.length :] = float("nan")
            layer.values[:, :, layer.length :] = float("nan")


# -- in the decoder -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", TARGETS)
def test_after_every_step_the_buffer_is_that_of_a_fresh_prefill(name: str, packed: bool) -> None:
    target = load_tiny(name, packed=packed)
    text = [*PROMPT, *reference(load_tiny(name), PROMPT, 40)]
    rng = random.Random(3)
    drafter = scripted_drafter(text, right=lambda k: rng.randint(0, k))
    parts = make_parts(target, [drafter], menu="fresh/0,reuse/0,reuse/1,reuse/3,reuse/8")
    for _ in range(2):  # the second request starts from the cache
        session = Session(parts, Request(PROMPT, 40, ignore_eos=True))
        while not session.finished:
            session.step(parts.menu.find(rng.choice((0, 1, 3, 8))))
            buffer = session._buffer
            assert len(session.tokens) - 1 <= buffer.length + (session.finished)
            check_same(buffer, prefilled(target.runner, session.tokens[: buffer.length]))  # type: ignore[arg-type]
            spoil_free_rows(buffer)
        session.close()
        assert session.tokens == text
        parts.prefix_cache.check_integrity()
        match = parts.prefix_cache.match(text)
        assert match.length >= len(text) - 1
        restored = target.runner.new_buffer()
        parts.prefix_cache.restore(match, restored)
        check_same(restored, prefilled(target.runner, text[: match.length]))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_growing_beyond_the_first_capacity_keeps_what_is_held(name: str) -> None:
    target = load_tiny(name)
    prompt = random_tokens(FIRST_CAPACITY - 9, 4)
    text = [*prompt, *reference(target, prompt, 20)]
    decoder = tiny_decoder(target, [scripted_drafter(text, lambda k: 3)], "fixed:6")
    session = decoder.session(prompt, 20, ignore_eos=True)
    while not session.finished:
        session.step(decoder.parts.menu.find(6))
    assert session.tokens == text
    assert session._buffer.layers[0].capacity == 2 * FIRST_CAPACITY
    check_same(session._buffer, prefilled(target.runner, text[: session._buffer.length]))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", TARGETS)
def test_a_prompt_read_in_pieces(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = load_tiny(name).runner
    tokens = random_tokens(41, 5)
    whole = runner.new_buffer()
    expected = runner.forward(tokens, whole, 3)
    monkeypatch.setattr(engine.runner, "PREFILL_ROWS", 8)
    pieces = runner.new_buffer()
    logits = runner.forward(tokens, pieces, 3)
    assert logits.shape == (3, runner.vocab_size)
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0.0)
    check_same(pieces, whole)


def test_pieces_are_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = HFRunner(load_tiny("llama").runner.model)  # type: ignore[attr-defined]
    monkeypatch.setattr(engine.runner, "PREFILL_ROWS", 8)
    sizes: list[int] = []
    inner = runner._pass

    def watched(tokens: Sequence[int], buffer: KVBuffer, num_logits: int) -> Tensor:
        sizes.append(len(tokens))
        return inner(tokens, buffer, num_logits)

    monkeypatch.setattr(runner, "_pass", watched)
    for count, num_logits, expected in ((8, 1, [8]), (9, 1, [1, 8]), (25, 3, [8, 8, 1, 8]), (20, 11, [8, 1, 11])):
        sizes.clear()
        runner.forward(random_tokens(count), runner.new_buffer(), num_logits)
        assert sizes == expected


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_pass_that_fails_half_way_leaves_the_buffer_as_it_was(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_tiny("llama").runner.model  # type: ignore[attr-defined]
    runner = HFRunner(model)
    buffer = prefilled(runner, PROMPT)
    before = [tensor.clone() for pair in buffer.views() for tensor in pair]
    monkeypatch.setattr(engine.runner, "PREFILL_ROWS", 4)
    calls = 0

    def fail(*args: object) -> None:
        nonlocal calls
        calls += 1
        if calls == failing:  # behind the first layer, which has appended its rows already
            raise MemoryError("no memory")

    hook = model.model.layers[1].register_forward_pre_hook(fail)
    try:
        with pytest.raises(MemoryError):
            runner.forward(random_tokens(12, 6), buffer, 1)
    finally:
        hook.remove()
    assert buffer.length == len(PROMPT)
    for now, then in zip((tensor for pair in buffer.views() for tensor in pair), before, strict=True):
        assert torch.equal(now, then)
    assert {layer.length for layer in buffer.layers} == {len(PROMPT)}
    check_same(buffer, prefilled(runner, PROMPT))


@pytest.mark.parametrize("num_logits", [0, 4, -1])
def test_logits_that_cannot_be_had(num_logits: int) -> None:
    runner = load_tiny("llama").runner
    buffer = runner.new_buffer()
    with pytest.raises(ValueError, match=f"num_logits is {num_logits} for 3 rows; ask for 1 to that many"):
        runner.forward([1, 2, 3], buffer, num_logits)
    assert buffer.length == 0


# -- on its own ---------------------------------------------------------------------------------------------------


def rows(*numbers: float) -> Tensor:
    """`[1, 2, n, 3]` that tells heads and places apart."""
    place = torch.arange(6.0).view(1, 2, 1, 3) / 10
    return torch.tensor(numbers).view(1, 1, -1, 1) + place


def test_random_updates_and_truncations_against_a_list() -> None:
    rng = random.Random(7)
    buffer = KVBuffer()
    expected: list[float] = []
    for number in range(600):
        if not expected or rng.random() < 0.6:
            new = [float(number * 100 + i) for i in range(rng.randint(1, 9))]
            before = buffer.length
            keys, values = buffer.update(rows(*new), -rows(*new), 0)
            buffer.update(rows(*new) + 0.5, rows(*new), 1)
            expected += new
            assert torch.equal(keys, rows(*expected))
            assert torch.equal(values, -rows(*expected))
            assert buffer.length == before + len(new)
        else:
            length = rng.randint(
                max(0, len(expected) - 8), len(expected) + 2
            )  # longer than what is held: nothing happens
            del expected[length:]
            if rng.random() < 0.5 and buffer.length:
                buffer.crop(len(expected) - buffer.length)
            else:
                buffer.truncate(length)
        assert buffer.length == len(expected) == buffer.get_seq_length()
        if expected:
            views = buffer.views()
            assert torch.equal(views[0][1], -rows(*expected))
            assert torch.equal(views[1][0], rows(*expected) + 0.5)
            assert buffer.nbytes == 4 * len(expected) * 6 * 4
            assert buffer.get_mask_sizes(3, 0) == (len(expected) + 3, 0)
    assert buffer.layers[0].capacity > FIRST_CAPACITY
    buffer.reset()  # type: ignore[no-untyped-call]
    assert buffer.length == 0


def test_appending_is_in_place_until_the_capacity_doubles() -> None:
    buffer = KVBuffer()
    buffer.update(rows(1.0), rows(1.0), 0)
    storage = buffer.layers[0].keys.data_ptr()
    for _ in range(FIRST_CAPACITY - 1):
        buffer.update(rows(1.0), rows(1.0), 0)
    assert buffer.layers[0].keys.data_ptr() == storage
    assert buffer.layers[0].capacity == FIRST_CAPACITY
    buffer.update(rows(1.0), rows(1.0), 0)
    assert buffer.layers[0].capacity == 2 * FIRST_CAPACITY
    buffer.truncate(1)
    assert buffer.layers[0].capacity == 2 * FIRST_CAPACITY


def test_one_append_may_need_several_doublings() -> None:
    buffer = KVBuffer()
    numbers = [float(i) for i in range(5 * FIRST_CAPACITY)]
    buffer.append([(rows(*numbers), -rows(*numbers))])
    assert buffer.layers[0].capacity == 8 * FIRST_CAPACITY
    assert torch.equal(buffer.views()[0][0], rows(*numbers))


def test_an_empty_buffer() -> None:
    buffer = KVBuffer()
    assert (buffer.length, buffer.nbytes, buffer.views()) == (0, 0, [])
    buffer.truncate(0)
    assert buffer.length == 0


def test_bytes_of_one_token() -> None:
    # 2 layers, keys and values, 2 KV heads of 8 numbers, 4 bytes each
    assert kv_bytes_per_token(load_tiny("llama").runner) == 2 * 2 * 2 * 8 * 4
    assert kv_bytes_per_token(TableRunner()) == 8
