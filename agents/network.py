"""A small network on the standardised observation, trained in torch and exported to the head that numpy runs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

from engine.costs import CostTable
from engine.cuts import Cut
from engine.menu import Menu
from engine.policy_heads import HIDDEN, ConstantHead, Head, LinearHead, MLPHead
from envs.trace import TraceSet
from envs.vector import PolicyFunction, Totals, rollout

LEAST_DEVIATION = 1e-4  # a feature that varies less is a constant, and is not looked at


def standardisation(vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Center and scale, float32 `[features]` each, of observations `[N, features]`.

    The scale of a constant feature is 0: what it would mean elsewhere was not learned.
    """
    deviation = vectors.std(axis=0, dtype=np.float64)
    scale = np.where(deviation > LEAST_DEVIATION, 1.0 / np.maximum(deviation, LEAST_DEVIATION), 0.0)
    return vectors.mean(axis=0, dtype=np.float64).astype(np.float32), scale.astype(np.float32)


def standardised(vectors: np.ndarray, center: np.ndarray, scale: np.ndarray) -> Tensor:
    """Float32 observations as a network is fed with them."""
    return torch.from_numpy(((vectors.astype(np.float64) - center) * scale).astype(np.float32))


def network(inputs: int, outputs: int, hidden: Sequence[int] = HIDDEN, seed: int = 0) -> nn.Sequential:
    """Linear layers with tanh between them; the last one begins small, so that at first all outputs are alike."""
    generator = torch.Generator().manual_seed(seed)
    layers: list[nn.Module] = []
    for width, height in pairwise((inputs, *hidden, outputs)):
        layer = nn.Linear(width, height)
        bound = 1.0 / np.sqrt(width)
        with torch.no_grad():
            layer.weight.uniform_(-bound, bound, generator=generator)
            layer.bias.zero_()
        layers += [layer, nn.Tanh()]
    with torch.no_grad():
        layer.weight.mul_(0.01)
    return nn.Sequential(*layers[:-1])


def exported(layers: nn.Sequential, center: np.ndarray, scale: np.ndarray) -> MLPHead:
    """The head of a network of linear layers with tanh between them; weights are taken over bit for bit."""
    linear = [layer for layer in layers if isinstance(layer, nn.Linear)]
    weights = tuple(np.ascontiguousarray(layer.weight.detach().numpy().T).copy() for layer in linear)
    return MLPHead(center, scale, weights, tuple(layer.bias.detach().numpy().copy() for layer in linear))


def run_head(traces: TraceSet, costs: CostTable, menu: Menu, head: Head, min_confidence: Cut = 0.0) -> Totals:
    """A head's own choices over every trace, as `rollout`; one that looks at nothing is not charged for looking."""
    if isinstance(head, ConstantHead):
        return rollout(traces, costs, menu, head.action, observed=False, min_confidence=min_confidence)
    return rollout(traces, costs, menu, greedy(head), min_confidence=min_confidence)


def greedy(head: Head) -> PolicyFunction:
    """A head as `envs.vector.rollout` asks for: observations `[B, F]` and masks `[B, A]` to actions `[B]`.

    Scores are float64 sums: many at once and one at a time differ by rounding that decides nothing.
    """
    if isinstance(head, LinearHead | MLPHead):
        scores = head.scores
        return lambda vectors, masks: np.asarray(np.where(masks, scores(vectors), -np.inf).argmax(axis=1))
    decide = head.decide
    return lambda vectors, masks: np.array([decide(v, m) for v, m in zip(vectors, masks.tolist())])
