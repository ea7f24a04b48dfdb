"""int8 on the CPU: exact products, rows that do not depend on each other, and the lean runner against transformers."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import random_tokens, save_tiny, scripted_drafter, tiny_decoder, tiny_lean, tiny_model

from engine import SpeculativeDecoder, load_model
from engine.errors import DeviceError
from engine.kernels.attention import attend_rows
from engine.kernels.fused import normalise_rows
from engine.kernels.int8 import aligned, channels_of, pack, padded
from engine.kernels.int8 import reference as reference_product
from engine.kernels.int8_linear import Int8Linear, quantise_linears
from engine.kernels.linear import linear_rows, quantise_rows, stacked
from engine.kernels.madd import MAX_ROWS, MAX_TERMS
from engine.kernels.products import multiply
from engine.kernels.rows import exp
from engine.lean import LeanRunner, can_run_lean

RNG = np.random.default_rng(7)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("rows", [*range(1, MAX_ROWS + 3), 2 * MAX_ROWS, 40])
@pytest.mark.parametrize(("inputs", "channels"), [(32, 16), (33, 7), (576, 50), (1, 1), (100, 33)])
def test_a_linear_layer_equals_its_reference_to_the_bit(rows: int, inputs: int, channels: int) -> None:
    x, weight = normal(rows, inputs), pack(normal(channels, inputs))
    out = np.full((rows, channels), np.nan, np.float32)
    linear_rows(x, stacked([weight], 1), out)
    np.testing.assert_array_equal(out, reference_product(x, weight))


@pytest.mark.parametrize("terms", [MAX_TERMS - 32, MAX_TERMS, MAX_TERMS + 32, 2 * MAX_TERMS + 64])
def test_the_largest_sums_do_not_overflow(terms: int) -> None:
    x = np.full((3, terms), 4095, np.int16)
    x[1] *= -1
    weight = np.full((2, terms), 127, np.int8)
    weight[1] = -127
    out = np.zeros((3, 2), np.float32)
    multiply(x, np.ones(3, np.float32), weight, np.ones(2, np.float32), out, False)
    np.testing.assert_array_equal(out, (x.astype(np.int64) @ weight.T.astype(np.int64)).astype(np.float32))


def test_rows_of_zeros_and_of_extreme_values() -> None:
    x = np.zeros((4, 64), np.float32)
    x[1], x[2, 5], x[3] = 1e-30, 3e38, -1e30
    weight = pack(np.concatenate([normal(3, 64), np.zeros((1, 64), np.float32)]))
    out = np.empty((4, 4), np.float32)
    with np.errstate(over="ignore"):
        linear_rows(x, stacked([weight], 1), out)
    np.testing.assert_array_equal(out[0], np.zeros(4, np.float32))
    np.testing.assert_array_equal(out[:, 3], np.zeros(4, np.float32))


def test_packing_keeps_every_weight_within_half_a_step() -> None:
    weight = normal(20, 50)
    packed = pack(weight)
    assert packed.weight.shape == (20, padded(50)) == (20, 64)
    assert not packed.weight[:, 50:].any()
    error = np.abs(packed.weight[:, :50] * packed.scale[:, None] - weight)
    assert (error <= packed.scale[:, None] * 0.5001).all()
    assert packed.weight.ctypes.data % 64 == aligned((3, 5), np.int16).ctypes.data % 64 == 0


def test_exp_is_right_to_a_few_units_in_the_last_place() -> None:
    x = np.linspace(-86, 87, 20_001).astype(np.float32)
    ours = np.array([exp(value) for value in x], np.float64)
    assert np.abs(ours / np.exp(x.astype(np.float64)) - 1).max() < 4e-7


@pytest.mark.parametrize("heads", [2, 6, 18])  # 1, 3 and 9 query heads for each key and value head
@pytest.mark.parametrize("dim", [6, 16, 40, 64])
def test_a_row_of_attention_does_not_depend_on_its_neighbours(dim: int, heads: int) -> None:
    keys, values, qkv = normal(2, 64, dim), normal(2, 64, dim), normal(9, (heads + 4) * dim)
    together = np.empty((9, heads * dim), np.float32)
    attend_rows(qkv, keys, values, 55, heads, together)
    for row in range(9):
        alone = np.empty((1, heads * dim), np.float32)
        unseen = [np.where(np.arange(64)[:, None] > 55 + row, np.float32(np.nan), part) for part in (keys, values)]
        attend_rows(qkv[row : row + 1], *unseen, 55 + row, heads, alone)
        np.testing.assert_array_equal(alone[0], together[row])


def test_a_row_of_norm_and_quantisation_does_not_depend_on_its_neighbours() -> None:
    x = normal(MAX_ROWS, 128)
    normed = np.empty_like(x)
    normalise_rows(x, np.ones(128, np.float32), np.float32(1e-5), normed)
    q, scale = quantise_rows(x, 128)
    for row in range(MAX_ROWS):
        alone = np.empty((1, 128), np.float32)
        normalise_rows(x[row : row + 1], np.ones(128, np.float32), np.float32(1e-5), alone)
        np.testing.assert_array_equal(alone[0], normed[row])
        q1, scale1 = quantise_rows(x[row : row + 1], 128)
        np.testing.assert_array_equal(q1[0], q[row])
        assert scale1[0] == scale[row]


@pytest.mark.parametrize("dim", [6, 8, 40, 64])
@pytest.mark.parametrize("length", [1, 5, 16, 20, 37])
def test_attention_is_softmax_of_scaled_products(length: int, dim: int) -> None:
    keys, values, qkv = normal(2, 37, dim), normal(2, 37, dim), normal(1, (6 + 4) * dim)
    out = np.empty((1, 6 * dim), np.float32)
    attend_rows(qkv, keys, values, length - 1, 6, out)
    for head in range(6):
        query, seen, mixed = qkv[0, head * dim :][:dim], keys[head // 3, :length], values[head // 3, :length]
        weights = torch.softmax(torch.tensor(seen @ query) / dim**0.5, dim=0).numpy()
        np.testing.assert_allclose(out[0, head * dim :][:dim], weights @ mixed, rtol=2e-5, atol=2e-6)


# -- models -------------------------------------------------------------------------------------------------------


def lean(name: str, **settings: Any) -> tuple[LeanRunner, Any]:
    """A lean runner, and transformers' model with the weights that int8 keeps."""
    runner, model = tiny_lean(name, "int8", **settings)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                packed = pack(module.weight.numpy())
                kept = packed.weight[:, : module.in_features] * packed.scale[:, None]
                module.weight.copy_(torch.from_numpy(kept))
    return runner, model


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_the_lean_runner_computes_what_transformers_does(name: str) -> None:
    runner, model = lean(name)
    tokens = random_tokens(60)
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([tokens])).logits[0]
    got = runner.forward(tokens, runner.new_buffer(), len(tokens))
    # The weights are the same; what differs is activations rounded to 13 bits.
    assert (got - expected).abs().max() < 0.02 * expected.std()
    assert (got.argmax(dim=-1) == expected.argmax(dim=-1)).float().mean() > 0.95


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_logits_and_kv_are_the_same_bits_for_any_grouping_of_rows(name: str) -> None:
    runner, _ = lean(name)
    tokens = random_tokens(400)  # beyond the first capacity of the buffer
    whole = runner.new_buffer()
    expected = runner.forward(tokens, whole, len(tokens))
    rng = np.random.default_rng(3)
    for _ in range(4):
        buffer = runner.new_buffer()
        while buffer.length < len(tokens):
            rows = tokens[buffer.length :][: int(rng.integers(1, 25))]
            drafted = random_tokens(int(rng.integers(0, 4)))
            start = buffer.length
            logits = runner.forward([*rows, *drafted], buffer, len(rows) + len(drafted))
            buffer.truncate(start + len(rows))
            assert torch.equal(logits[: len(rows)], expected[start : start + len(rows)])
        for ours, theirs in zip(buffer.views(), whole.views(), strict=True):
            assert torch.equal(ours[0], theirs[0])
            assert torch.equal(ours[1], theirs[1])


def test_prefill_in_pieces_gives_the_logits_that_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, _ = lean("llama")
    tokens = random_tokens(50)
    expected = runner.forward(tokens, runner.new_buffer(), 50)
    monkeypatch.setattr("engine.lean.PREFILL_ROWS", 16)
    for count in (1, 2, 17, 50):
        assert torch.equal(runner.forward(tokens, runner.new_buffer(), count), expected[-count:])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    names = ("llama", "qwen2", "mistral", "neox")
    return {name: str(save_tiny(tmp_path_factory.mktemp(name), name)) for name in names}


def test_the_lean_runner_runs_where_it_can(folders: dict[str, str]) -> None:
    kinds = {name: type(load_model(folder, "int8").runner).__name__ for name, folder in folders.items()}
    assert kinds == {"llama": "LeanRunner", "qwen2": "LeanRunner", "mistral": "HFRunner", "neox": "HFRunner"}
    assert not can_run_lean(tiny_model("qwen2", layer_types=["sliding_attention"] * 2).config)
    assert not can_run_lean(tiny_model("llama", hidden_act="gelu").config)
    quantised = tiny_model("llama").config
    quantised.quantization_config = {"quant_method": "fp8"}
    assert not can_run_lean(quantised)
    stretched = tiny_model("llama").config
    stretched.rope_parameters = {**stretched.rope_parameters, "rope_type": "dynamic", "factor": 2.0}
    assert not can_run_lean(stretched)  # its angles change with the text's length


def test_a_pass_that_fails_half_way_leaves_the_buffer_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, _ = lean("llama")
    tokens, buffer = random_tokens(50), runner.new_buffer()
    expected = runner.forward(tokens, runner.new_buffer(), 1)
    runner.forward(tokens[:10], buffer, 1)
    monkeypatch.setattr("engine.lean.PREFILL_ROWS", 16)
    forward_rows, calls = runner._forward_rows, iter(range(9))

    def interrupted(*args: Any) -> np.ndarray:
        if next(calls) == 1:
            raise KeyboardInterrupt
        return forward_rows(*args)

    monkeypatch.setattr(runner, "_forward_rows", interrupted)
    with pytest.raises(KeyboardInterrupt):
        runner.forward(tokens[10:], buffer, 1)
    assert buffer.length == 10
    assert torch.equal(runner.forward(tokens[10:], buffer, 1), expected)


@pytest.mark.parametrize("name", ["llama", "qwen2", "mistral", "neox"])
def test_tokens_do_not_depend_on_menu_drafts_or_cache(folders: dict[str, str], name: str) -> None:
    engine = SpeculativeDecoder.from_pretrained(folders[name], controller="plain", precision="int8")
    prompts = [random_tokens(40, seed=1), random_tokens(40, seed=1)[:30] + random_tokens(10, seed=2)]
    expected = [engine.generate(prompt, 60, ignore_eos=True).tokens for prompt in prompts]
    rng = np.random.default_rng(5)
    for trial in range(6):
        session_engine = engine.with_empty_caches()
        for prompt, tokens in zip(prompts, expected, strict=True):
            session = session_engine.session(prompt, 60, ignore_eos=True)
            while not session.finished:
                session.step(int(rng.choice(np.flatnonzero(session.mask()))))
            session.close()
            assert session.generated == tokens, trial
            session_engine.parts.prefix_cache.check_integrity()


def test_partial_acceptance_on_the_lean_runner(folders: dict[str, str]) -> None:
    loaded = load_model(folders["llama"], "int8")
    prompt = random_tokens(20)
    truth = tiny_decoder(loaded).generate(prompt, 50, ignore_eos=True).tokens
    right = iter(range(10**6))
    drafter = scripted_drafter([*prompt, *truth], right=lambda k: next(right) % (k + 1))
    drafted = tiny_decoder(loaded, [drafter], "fixed:8").generate(prompt, 50, ignore_eos=True)
    assert drafted.tokens == truth
    assert 0 < drafted.counters.num_accepted_tokens < drafted.counters.num_draft_tokens


def test_int8_linear_layers_take_the_place_of_plain_ones() -> None:
    model = tiny_model("phi")
    linear = torch.nn.Linear(40, 24)
    x = torch.randn(2, 3, 40, generator=torch.Generator().manual_seed(0))
    plain = linear(x)
    assert (Int8Linear(linear)(x) - plain).abs().max() < 0.02 * plain.std() + 0.02
    count = sum(isinstance(module, torch.nn.Linear) for module in model.modules())
    assert quantise_linears(model) == count > 0
    assert not any(isinstance(module, torch.nn.Linear) for module in model.modules())


def test_int8_on_a_gpu_is_refused(folders: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeviceError, match="precision int8 runs on the CPU only; use bf16 on cuda"):
        load_model(folders["llama"], "int8", device="cuda")


def test_kernels_compiled_for_other_sources_are_not_used() -> None:
    import numba

    from engine.kernels import compile as compiling
    from engine.kernels.fused import decode_layers

    assert compiling.FOLDER.name == compiling._sources_digest()
    assert Path(decode_layers._cache.cache_path).is_relative_to(compiling.FOLDER)
    assert str(compiling.FOLDER) != numba.config.CACHE_DIR  # what else is compiled here goes where its owner wants it


def test_results_are_kept_by_one_process_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Locks on files that were opened apart exclude each other within a process too."""
    from engine.kernels import compile as compiling

    monkeypatch.setattr(compiling, "FOLDER", tmp_path / "kernels")
    events: list[str] = []

    def save() -> None:
        events.append("begin")
        time.sleep(0.05)
        events.append("end")

    threads = [threading.Thread(target=compiling._alone(save)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert events == ["begin", "end"] * 4


def test_embeddings_are_read_from_the_packed_head() -> None:
    weight = np.random.default_rng(0).normal(size=(2500, 40)).astype(np.float32)
    packed = pack(weight)
    chosen = np.array([0, 2499, 1024, 7])
    rows = channels_of(stacked([packed], 1), 40, chosen)
    assert rows.dtype == np.float32
    np.testing.assert_array_equal(rows, packed.weight[chosen, :40] * packed.scale[chosen, None])
    np.testing.assert_allclose(rows, weight[chosen], atol=float(packed.scale.max()) / 2 * 1.001)
