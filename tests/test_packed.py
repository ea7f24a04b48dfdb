"""Packed linear layers: the same numbers, everywhere, and nothing else touched."""

from __future__ import annotations

import pytest
import torch
from tiny_models import save_tiny, tiny_model
from torch import nn

from engine.kernels.packed import PackedLinear, can_pack, pack_linears
from engine.models import load_model

pytestmark = pytest.mark.skipif(not can_pack(), reason="this torch build has no oneDNN linear")
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}  # sums of up to 192 fp32 products, in another order


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("inside", "outside"), [(1, 1), (7, 5), (64, 48), (192, 576), (33, 1000)])
def test_packed_equals_plain_for_1_to_16_rows(inside: int, outside: int, bias: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(inside, outside, bias=bias)
    packed = PackedLinear(plain)
    with torch.inference_mode():
        for rows in (*range(1, 17), 100):
            x = torch.randn(1, rows, inside)
            torch.testing.assert_close(packed(x), plain(x), **TOLERANCE)
            torch.testing.assert_close(packed(x[0]), plain(x[0]), **TOLERANCE)
    assert (packed.in_features, packed.out_features) == (inside, outside)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    """What verification needs: a row of a pass over 9 says what it would say alone, up to rounding."""
    torch.manual_seed(0)
    packed = PackedLinear(nn.Linear(96, 80))
    x = torch.randn(9, 96)
    with torch.inference_mode():
        torch.testing.assert_close(packed(x), torch.cat([packed(row[None]) for row in x]), **TOLERANCE)


def test_bias_is_added_once() -> None:
    linear = nn.Linear(3, 2)
    with torch.no_grad():
        linear.weight.zero_()
        linear.bias.copy_(torch.tensor([1.0, -2.0]))
    assert PackedLinear(linear)(torch.randn(4, 3)).tolist() == [[1.0, -2.0]] * 4


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen2", "phi"])
def test_nothing_stays_unpacked_and_logits_agree(name: str, tied: bool) -> None:
    model = tiny_model(name, tie_word_embeddings=tied)
    if tied:
        model.tie_weights()
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    ids = torch.arange(40, 53)[None]
    with torch.inference_mode():
        before = model(input_ids=ids).logits
        assert pack_linears(model) == len(linears) > 0
        after = model(input_ids=ids).logits
    assert not any(type(module) is nn.Linear for module in model.modules())
    assert isinstance(model.get_output_embeddings(), PackedLinear)
    torch.testing.assert_close(after, before, rtol=1e-3, atol=1e-3)
    assert (after.argmax(-1) == before.argmax(-1)).all()


def test_a_tied_embedding_keeps_its_rows() -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    model.tie_weights()
    before = model.get_input_embeddings().weight.clone()
    pack_linears(model)
    assert torch.equal(model.get_input_embeddings().weight, before)


def test_packing_again_does_nothing() -> None:
    model = tiny_model("llama")
    assert pack_linears(model) == 15  # 2 layers of 7, and the head
    assert pack_linears(model) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_precisions_are_left_alone(dtype: torch.dtype) -> None:
    model = tiny_model("llama").to(dtype)
    assert pack_linears(model) == 0
    assert sum(type(module) is nn.Linear for module in model.modules()) == 15


def test_subclasses_are_left_alone() -> None:
    class Special(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(2, 2), Special(2, 2))
    assert pack_linears(model) == 1
    assert type(model[1]) is Special


@pytest.mark.parametrize(
    ("precision", "packed", "expected"), [("fp32", True, 15), ("fp32", False, 0), ("bf16", True, 0)]
)
def test_load_model_packs_fp32_only(tmp_path, precision: str, packed: bool, expected: int) -> None:  # type: ignore[no-untyped-def]
    loaded = load_model(str(save_tiny(tmp_path, "mistral")), precision, packed=packed)
    modules = list(loaded.runner.model.modules())  # type: ignore[attr-defined]
    assert sum(isinstance(module, PackedLinear) for module in modules) == expected
    assert sum(type(module) is nn.Linear for module in modules) == 15 - expected
