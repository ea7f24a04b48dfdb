"""fp32 on the lean runner: transformers' logits, and rows that are the same bits alone and among others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import random_tokens, save_tiny, scripted_drafter, tiny_decoder, tiny_lean, tiny_model

from engine import load_model
from engine.errors import ModelFileError
from engine.kernels.fma import LANES, TILE
from engine.kernels.fp32 import channels_of, pack_panels
from engine.kernels.linear import linear_rows, stacked
from engine.lean import LeanRunner

RNG = np.random.default_rng(11)
SHAPES = [(1, 1), (7, 5), (64, LANES), (33, LANES + 1), (577, 3 * LANES - 1)]  # inputs, channels


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(("inputs", "channels"), SHAPES)
def test_a_linear_layer_is_the_product_and_its_rows_do_not_depend_on_each_other(inputs: int, channels: int) -> None:
    x, weight = normal(2 * TILE + 1, inputs), normal(channels, inputs)
    panels = stacked([pack_panels(weight)], 1)
    out = np.full((len(x), channels), np.nan, np.float32)
    linear_rows(x, panels, out)
    np.testing.assert_allclose(out, x.astype(np.float64) @ weight.T, rtol=1e-4, atol=1e-4)
    for rows in range(1, len(x)):
        few = np.full((rows, channels), np.nan, np.float32)
        linear_rows(x[-rows:], panels, few)
        np.testing.assert_array_equal(few, out[-rows:])


@pytest.mark.parametrize(("inputs", "channels"), SHAPES)
def test_packing_keeps_every_channel(inputs: int, channels: int) -> None:
    weight = normal(channels, inputs)
    panels = stacked([pack_panels(weight)], 1)
    chosen = RNG.permutation(channels)
    np.testing.assert_array_equal(channels_of(panels, chosen), weight[chosen])
    assert panels.panels.size == -(-channels // LANES) * LANES * inputs


def lean(name: str, **settings: Any) -> tuple[LeanRunner, Any]:
    return tiny_lean(name, "fp32", **settings)


VARIANTS: list[dict[str, Any]] = [
    {},
    {"tie_word_embeddings": True},
    {"num_key_value_heads": 1},
    {"num_key_value_heads": 4},
    {"hidden_size": 36, "intermediate_size": 51, "num_attention_heads": 6, "num_key_value_heads": 3},
]


@pytest.mark.parametrize("settings", VARIANTS, ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_logits_are_those_of_transformers(name: str, settings: dict[str, Any]) -> None:
    runner, model = lean(name, **settings)
    tokens = random_tokens(300)
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([tokens])).logits[0]
    got = runner.forward(tokens, runner.new_buffer(), len(tokens))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_logits_and_kv_are_the_same_bits_for_any_grouping_of_rows(name: str) -> None:
    runner, _ = lean(name)
    tokens = random_tokens(400)  # beyond the first capacity of the buffer
    whole = runner.new_buffer()
    expected = runner.forward(tokens, whole, len(tokens))
    for seed in range(3):
        rng, buffer = np.random.default_rng(seed), runner.new_buffer()
        while (start := buffer.length) < len(tokens):
            rows = tokens[start:][: int(rng.integers(1, 10))]
            drafted = random_tokens(int(rng.integers(0, 9)), seed=start)
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


def test_a_tied_embedding_is_held_once() -> None:
    asked: list[str] = []
    model = tiny_model("llama", tie_word_embeddings=True)
    model.tie_weights()
    state = {key: value.detach().numpy() for key, value in model.state_dict().items()}

    def weight(name: str) -> np.ndarray:
        asked.append(name)
        return state[name]

    LeanRunner(model.config, weight, model.model.rotary_emb, "fp32")
    assert asked.count("model.embed_tokens.weight") == 1
    assert "lm_head.weight" not in asked
    assert len(asked) == len(set(asked))


def test_a_tensor_of_another_shape_is_refused() -> None:
    model = tiny_model("llama")
    state = {key: value.detach().numpy() for key, value in model.state_dict().items()}
    name = "model.layers.1.mlp.down_proj.weight"
    state[name] = state[name][:, :-1]
    with pytest.raises(ModelFileError, match=r"model.layers.1.mlp.down_proj.weight is \(32, 47\) and not \(32, 48\)"):
        LeanRunner(model.config, lambda key: state[key], model.model.rotary_emb, "fp32")


def test_fp32_runs_lean_where_it_can_and_plain_where_that_is_asked_for(tmp_path: Path) -> None:
    for name, kind in (("llama", "LeanRunner"), ("qwen2", "LeanRunner"), ("mistral", "HFRunner")):
        folder = str(save_tiny(tmp_path / name, name))
        assert type(load_model(folder).runner).__name__ == kind
        assert type(load_model(folder, packed=False).runner).__name__ == "HFRunner"


def test_partial_acceptance_gives_the_tokens_of_plain_decoding(target_folder: Path) -> None:
    loaded = load_model(str(target_folder))
    prompt = random_tokens(20)
    truth = tiny_decoder(loaded).generate(prompt, 50, ignore_eos=True).tokens
    right = iter(range(10**6))
    drafter = scripted_drafter([*prompt, *truth], right=lambda k: next(right) % (k + 1))
    drafted = tiny_decoder(loaded, [drafter], "fixed:8").generate(prompt, 50, ignore_eos=True)
    assert drafted.tokens == truth
    assert 0 < drafted.counters.num_accepted_tokens < drafted.counters.num_draft_tokens


@pytest.mark.model
def test_the_bundled_model_is_that_of_transformers() -> None:
    ours, theirs = load_model("smollm2-135m").runner, load_model("smollm2-135m", packed=False).runner
    tokens = [int(token) for token in np.random.default_rng(0).integers(0, ours.vocab_size, 40)]
    buffer = ours.new_buffer()
    got = ours.forward(tokens, buffer, 40)
    torch.testing.assert_close(got, theirs.forward(tokens, theirs.new_buffer(), 40), rtol=0, atol=1e-3)
    buffer.truncate(31)
    assert torch.equal(ours.forward(tokens[31:], buffer, 9), got[31:])
    buffer.truncate(39)
    assert torch.equal(ours.forward(tokens[39:], buffer, 1), got[39:])


def test_the_kernels_take_as_many_threads_as_openmp_is_given() -> None:
    """numba would take one a processor, and two processes on two processors would wait for each other."""
    code = "import engine.lean_models, numba, torch; print(numba.get_num_threads(), torch.get_num_threads())"
    environment = {key: value for key, value in os.environ.items() if key != "NUMBA_NUM_THREADS"}
    environment |= {"OMP_NUM_THREADS": "1"}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["1", "1"]
