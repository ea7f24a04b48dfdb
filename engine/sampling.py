"""How tokens are chosen from logits: greedy, or temperature with top-k and top-p."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from numbers import Real

import numpy as np
import torch
from torch import Tensor

from engine.errors import SamplingError


def whole(value: object) -> int:
    """A setting of any integer type as an int; -1, which no setting may be, for what is no whole number."""
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return -1


def _real(value: object) -> float:
    """A setting of any real type as a float; NaN, which is in no range, for what is no number."""
    try:
        return float(value) if isinstance(value, Real) else math.nan
    except OverflowError:
        return math.inf


@dataclass(frozen=True, slots=True)
class Sampling:
    """Temperature 0 is greedy; `top_k` 0 and `top_p` 1 leave the distribution whole; no seed means a new one."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None

    def __post_init__(self) -> None:
        temperature, top_p, top_k = _real(self.temperature), _real(self.top_p), whole(self.top_k)
        seed = None if self.seed is None else whole(self.seed)
        if not 0.0 <= temperature < math.inf:
            raise SamplingError(f"temperature is {self.temperature!r}; give 0 (greedy) or a positive number")
        if not 0.0 < top_p <= 1.0:
            raise SamplingError(f"top_p is {self.top_p!r}; give a number above 0 and at most 1")
        if top_k < 0:
            raise SamplingError(f"top_k is {self.top_k!r}; give 0 (off) or a positive whole number")
        if seed is not None and seed < 0:
            raise SamplingError(f"seed is {self.seed!r}; give 0 or a positive whole number, or none")
        for name, value in zip(self.__slots__, (temperature, top_p, top_k, seed), strict=True):
            object.__setattr__(self, name, value)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


GREEDY = Sampling()


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """The distribution that tokens are drawn from: `[rows, vocab]` logits to float64 probabilities.

    The filters apply in the order that transformers uses: temperature, top-k, top-p. Ties at the edge of top-k
    are kept, and top-p keeps the smallest set that reaches the mass, at least one token.
    """
    scaled = logits.double()
    # From the best logit on: a temperature near 0 must not divide to infinity.
    scaled = (scaled - scaled.amax(dim=-1, keepdim=True)) / sampling.temperature
    if 0 < sampling.top_k < scaled.shape[-1]:
        edge = scaled.topk(sampling.top_k, dim=-1).values[..., -1:]
        scaled = scaled.masked_fill(scaled < edge, float("-inf"))
    probs = scaled.softmax(dim=-1)
    if sampling.top_p < 1.0:
        probs = _nucleus(probs, sampling.top_p)
    return probs


def _nucleus(probs: Tensor, top_p: float) -> Tensor:
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    mass_before = ordered.cumsum(dim=-1) - ordered
    kept = ordered.masked_fill(mass_before >= top_p, 0.0)
    probs = torch.zeros_like(probs).scatter_(-1, order, kept)
    return probs / probs.sum(dim=-1, keepdim=True)


def seeded_generator(seed: int | None, stream: int = 0) -> torch.Generator:
    """A generator for one request. Streams of one seed are independent: verification takes 0, a drafter 1."""
    state = np.random.SeedSequence(seed, spawn_key=(stream,)).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0] >> np.uint64(1)))


def draw(probs: Tensor, generator: torch.Generator) -> int:
    """One token id from a distribution `[vocab]` that need not be normalised."""
    return int(torch.multinomial(probs.cpu(), 1, generator=generator))  # generators live on the CPU


def certainty(logits: Tensor | None) -> tuple[float, float]:
    """Top probability and entropy (nats) of the distribution of logits `[vocab]`; zeros where there are none."""
    if logits is None:
        return 0.0, 0.0
    if logits.device.type != "cpu":  # two numbers come over, not the vocabulary
        log_probs = logits.double().log_softmax(dim=-1)
        entropy = torch.special.entr(log_probs.exp()).sum()
        top_probability, nats = torch.stack([log_probs.max().exp(), entropy]).tolist()
        return top_probability, nats
    from engine.kernels.certainty import certainty as compiled  # brings numba, which takes a second to import

    row = logits.float().numpy()  # not torch: it would wake its thread pool, in the way of the runner's own threads
    top_probability, nats = compiled(row, row.max())
    return float(top_probability), float(nats)
