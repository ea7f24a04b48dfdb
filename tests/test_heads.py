"""The linear and network heads: what they compute, how they travel through a file, and what a loader refuses."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load, save

from engine.costs import CostTable
from engine.errors import PolicyError
from engine.menu import default_menu
from engine.observation import ObservationSchema
from engine.policy import Policy, load_policy
from engine.policy_heads import HEADS, Head, LinearHead, MLPHead

MENU = default_menu(("ngram",))
SCHEMA = ObservationSchema(MENU)
FEATURES, ACTIONS = len(SCHEMA), len(MENU)
COSTS = CostTable((128,), {k: (0.01 + k / 1000,) for k in (0, *MENU.lengths)}, 0.05, {"ngram": 1e-5}, 0.002, "m", "e")


def array(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return (rng.standard_normal(shape) / 4).astype(np.float32)


def linear(seed: int = 0) -> LinearHead:
    rng = np.random.default_rng(seed)
    shapes = ((FEATURES,), (FEATURES,), (FEATURES, ACTIONS), (ACTIONS,))
    return LinearHead(*(array(rng, *shape) for shape in shapes))


def mlp(hidden: tuple[int, ...] = (64, 64), activation: str = "tanh", seed: int = 0) -> MLPHead:
    rng = np.random.default_rng(seed)
    widths = (FEATURES, *hidden, ACTIONS)
    weights = tuple(array(rng, *pair) for pair in pairwise(widths))
    biases = tuple(array(rng, width) for width in widths[1:])
    return MLPHead(array(rng, FEATURES), array(rng, FEATURES), weights, biases, activation)


HEAD_CASES: dict[str, Callable[[], LinearHead | MLPHead]] = {
    "linear": linear,
    "tanh": mlp,
    "relu": lambda: mlp(activation="relu"),
    "one hidden layer": lambda: mlp((16,)),
    "no hidden layer": lambda: mlp(()),
}
heads = pytest.mark.parametrize("make", HEAD_CASES.values(), ids=HEAD_CASES.keys())


def observations(count: int, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Random vectors within the bounds and random masks of which each allows something."""
    rng = np.random.default_rng(seed)
    masks = rng.random((count, ACTIONS)) < 0.7
    masks[:, MENU.plain] |= ~masks.any(axis=1)
    return (rng.random((count, FEATURES)) * SCHEMA.high).astype(np.float32), masks


def network(head: MLPHead) -> torch.nn.Sequential:
    """The same network in torch, in float64."""
    layers: list[torch.nn.Module] = []
    for weight, bias in zip(head.weights, head.biases, strict=True):
        layer = torch.nn.Linear(*weight.shape).double()
        with torch.no_grad():
            layer.weight.copy_(torch.from_numpy(weight.T.copy()))
            layer.bias.copy_(torch.from_numpy(bias))
        layers += [layer, torch.nn.Tanh() if head.activation == "tanh" else torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1])


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("hidden", [(), (16,), (64, 64)], ids=str)
def test_the_network_decides_as_torch_does(hidden: tuple[int, ...], activation: str) -> None:
    """10,000 observations, without an exception: in float64 no two scores of a random network come within rounding."""
    head = mlp(hidden, activation, seed=3)
    vectors, masks = observations(10_000)
    standard = (vectors.astype(np.float64) - head.center) * head.scale
    with torch.no_grad():
        scores = network(head)(torch.from_numpy(standard)).numpy()
    expected = np.where(masks, scores, -np.inf).argmax(axis=1)
    assert [head.decide(v, m) for v, m in zip(vectors, masks, strict=True)] == expected.tolist()
    assert len(set(expected.tolist())) > 3
    np.testing.assert_allclose(head.scores(vectors), scores, rtol=1e-10, atol=1e-12)


def test_the_linear_head_scores_the_standardised_observation() -> None:
    head = linear(seed=4)
    vectors, masks = observations(2000)
    standard = (vectors.astype(np.float64) - head.center) * head.scale
    scores = np.einsum("nf,fa->na", standard, head.weight.astype(np.float64)) + head.bias
    expected = np.where(masks, scores, -np.inf).argmax(axis=1)
    assert [head.decide(v, m) for v, m in zip(vectors, masks, strict=True)] == expected.tolist()
    assert len(set(expected.tolist())) > 3


@heads
def test_a_mask_is_obeyed_and_the_first_of_equal_scores_wins(make: Callable[[], LinearHead | MLPHead]) -> None:
    head = make()
    vectors, _ = observations(50)
    for vector in vectors:
        order = np.argsort(-head.scores(vector)).tolist()
        mask = np.ones(ACTIONS, dtype=bool)
        for best in order:
            assert head.decide(vector, mask) == head.decide(vector, mask.tolist()) == best
            mask[best] = False
    level = LinearHead(*(np.zeros(s, np.float32) for s in (FEATURES, FEATURES, (FEATURES, ACTIONS), ACTIONS)))
    assert level.decide(vectors[0], [False, False, *[True] * (ACTIONS - 2)]) == 2


@heads
def test_scores_that_are_no_numbers_leave_the_first_allowed_action(make: Callable[[], LinearHead | MLPHead]) -> None:
    vector = np.full(FEATURES, np.nan, np.float32)
    assert make().decide(vector, [False, True, False, *[True] * (ACTIONS - 3)]) == 1
    assert make().decide(vector, np.ones(ACTIONS, dtype=bool)) == 0


@heads
def test_a_policy_comes_back_from_its_folder_bit_for_bit(
    make: Callable[[], LinearHead | MLPHead], tmp_path: Path
) -> None:
    head = make()
    Policy("x", MENU, head, COSTS).save(tmp_path)
    loaded = load_policy(tmp_path)
    vectors, masks = observations(10_000, seed=2)
    assert type(loaded.head) is type(head)
    assert isinstance(loaded.head, LinearHead | MLPHead)
    np.testing.assert_array_equal(loaded.head.scores(vectors), head.scores(vectors))
    mine = [head.decide(v, m) for v, m in zip(vectors, masks, strict=True)]
    assert [loaded.decide(v, m) for v, m in zip(vectors, masks, strict=True)] == mine


def test_a_head_does_not_change_the_observation() -> None:
    vectors, masks = observations(5)
    before = vectors.copy()
    for make in HEAD_CASES.values():
        for vector, mask in zip(vectors, masks, strict=True):
            make().decide(vector, mask)
    np.testing.assert_array_equal(vectors, before)


# -- what a loader refuses --------------------------------------------------------------------------------------


def reload(head: Head, tensors: Mapping[str, np.ndarray], settings: Mapping[str, Any] | None = None) -> Head:
    kept = json.loads(json.dumps(head.settings() if settings is None else settings))
    return HEADS[head.kind].load(kept, load(save(dict(tensors))), SCHEMA.names, ACTIONS)


@heads
def test_every_malformed_tensor_is_refused(make: Callable[[], LinearHead | MLPHead]) -> None:
    head = make()
    tensors = head.tensors()
    assert reload(head, tensors).tensors().keys() == tensors.keys()
    for name, tensor in tensors.items():
        short = tensor[:-1].copy()
        nan, infinite = tensor.copy(), tensor.copy()
        nan.flat[-1], infinite.flat[0] = np.nan, np.inf
        for wrong in (short, nan, infinite, tensor.astype(np.float64), tensor[None].copy(), tensor.astype(np.int32)):
            with pytest.raises(PolicyError, match=f"{name} is .*export it again"):
                reload(head, {**tensors, name: wrong})
        with pytest.raises(PolicyError, match=f"not those of its head \\({name}\\)"):
            reload(head, {other: t for other, t in tensors.items() if other != name})
    with pytest.raises(PolicyError, match="not those of its head \\(extra\\)"):
        reload(head, {**tensors, "extra": np.zeros(1, np.float32)})
    for transposed in [name for name, tensor in tensors.items() if tensor.ndim == 2]:
        if tensors[transposed].shape[0] != tensors[transposed].shape[1]:
            with pytest.raises(PolicyError, match=transposed):
                reload(head, {**tensors, transposed: np.ascontiguousarray(tensors[transposed].T)})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden": [64, 64], "activation": "gelu"}, "activation is 'gelu'; known: tanh, relu"),
        ({"hidden": [64], "activation": "tanh"}, "not those of its head"),
        ({"hidden": [64, 64, 64], "activation": "tanh"}, "not those of its head"),
        ({"hidden": [64, 32], "activation": "tanh"}, "weight.1 is"),
        ({"hidden": [64, -64], "activation": "tanh"}, "weight.1 is"),
    ],
)
def test_settings_that_do_not_fit_the_tensors_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        reload(mlp(), mlp().tensors(), settings)


@pytest.mark.parametrize(
    "settings", [{}, {"hidden": [64, 64]}, {"activation": "tanh"}, {"hidden": 7, "activation": "tanh"}]
)
def test_a_policy_whose_settings_are_missing_is_damaged(settings: dict[str, Any], tmp_path: Path) -> None:
    class Odd(MLPHead):
        def settings(self) -> dict[str, Any]:
            return settings

    head = mlp()
    Policy("x", MENU, Odd(head.center, head.scale, head.weights, head.biases), COSTS).save(tmp_path)
    with pytest.raises(PolicyError, match=r"is damaged \(.*export it again"):
        load_policy(tmp_path)


def test_an_unknown_activation_is_refused_where_a_head_is_made() -> None:
    with pytest.raises(PolicyError, match="'sigmoid'"):
        replace(mlp(), activation="sigmoid")
