"""Ratios with 95 % intervals by the percentile bootstrap (Efron 1979): of passes timed in rounds, of requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 2000
ENDS = (2.5, 97.5)  # percentiles


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
    names, place = np.unique(np.asarray(groups), return_inverse=True)
    sums = [np.zeros((len(names), 2)) for _ in range(2)]
    for total, measured in zip(sums, (ours, base), strict=True):
        np.add.at(total, place, measured)
    chosen = np.random.default_rng(seed).integers(0, len(names), (RESAMPLES, len(names)))
    ratios = rate(sums[0][chosen]) / rate(sums[1][chosen])
    return _estimate(float(rate(ours) / rate(base)), ratios, len(names))


def rate(measured: np.ndarray) -> np.ndarray:
    """Tokens over seconds of requests `[..., requests, 2]`."""
    sums = measured.sum(axis=-2)
    quotient: np.ndarray = sums[..., 0] / sums[..., 1]
    return quotient


def _estimate(value: float, resampled: np.ndarray, count: int) -> Estimate:
    if count < 2:
        return Estimate(value, None, None)
    low, high = np.percentile(resampled, ENDS)
    return Estimate(value, float(low), float(high))
