"""Ratios with 95 % intervals by the percentile bootstrap (Efron 1979): of passes timed in rounds, of requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from agents.evaluation import ENDS, RESAMPLES, resampled_sums


@dataclass(frozen=True)
class Estimate:
    """A ratio and its 95 % interval; no interval where there is only one thing to resample."""

    value: float
    low: float | None
    high: float | None

    def __str__(self) -> str:
        return f"{self.value:.2f}" if self.low is None else f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"


def paired_median(ours: np.ndarray, base: np.ndarray, seed: int = 0) -> Estimate:
    """Median over rounds of `ours / base`, both `[rounds]`: what slows a whole round down cancels out."""
    ratios = ours / base
    chosen = np.random.default_rng(seed).integers(0, len(ratios), (RESAMPLES, len(ratios)))
    return _estimate(float(np.median(ratios)), np.median(ratios[chosen], axis=1), len(ratios))


def rate_ratio(ours: np.ndarray, base: np.ndarray, groups: Sequence[str], seed: int = 0) -> Estimate:
    """Ratio of two arms' tokens per second on the same requests; each `[requests, 2]`: tokens, seconds.

    Whole groups are resampled: requests of one conversation or document are not independent.
    """
    tokens, seconds, base_tokens, base_seconds = resampled_sums(np.hstack([ours, base]), groups, seed).T
    ratios = (tokens / seconds) / (base_tokens / base_seconds)
    return _estimate(rate(ours) / rate(base), ratios, len(set(groups)))


def rate(measured: np.ndarray) -> float:
    """Tokens over seconds of requests `[requests, 2]`."""
    tokens, seconds = measured.sum(axis=0)
    return float(tokens / seconds)


def _estimate(value: float, resampled: np.ndarray, count: int) -> Estimate:
    if count < 2:
        return Estimate(value, None, None)
    low, high = np.percentile(resampled, ENDS)
    return Estimate(value, float(low), float(high))
