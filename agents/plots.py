"""Pictures of a training and of a judgement."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np

from agents.evaluation import PLAIN, Judgement
from agents.training import CurvePoint
from engine.storage import write_atomically

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

SMOOTHING = 12  # requests that the curve's running mean spans


def plot_curve(curve: list[CurvePoint], path: Path) -> None:
    """Speed-up over plain decoding for each training request, and its running mean."""
    if not curve:
        return
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    steps = np.array([point.step for point in curve])
    speedups = np.array([point.speedup for point in curve])
    axes.plot(steps, speedups, ".", alpha=0.4, label="request")
    axes.plot(steps, _running_mean(speedups), label=f"mean of {SMOOTHING} requests")
    axes.axhline(1.0, color="grey", linewidth=1, label="plain decoding")
    axes.set(xlabel="training steps", ylabel="speed-up over plain decoding", title="Learning on the live engine")
    axes.legend()
    _save(figure, path)


def plot_judgement(judgement: Judgement, path: Path) -> None:
    """Speed-up of every arm with its interval."""
    summaries = [summary for summary in judgement.summaries() if summary.arm != PLAIN]
    figure, axes = plt.subplots(figsize=(7, 0.5 * len(summaries) + 1.2), layout="constrained")
    places = np.arange(len(summaries))[::-1]
    speedups = np.array([summary.speedup for summary in summaries])
    low = speedups - [summary.speedup_low for summary in summaries]
    high = [summary.speedup_high for summary in summaries] - speedups
    axes.barh(places, speedups, xerr=[np.maximum(low, 0), np.maximum(high, 0)], height=0.6, capsize=3)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_yticks(places, [summary.arm for summary in summaries])
    axes.set(xlabel="speed-up over plain decoding (95 % interval over groups of requests)")
    _save(figure, path)


def _running_mean(values: np.ndarray) -> np.ndarray:
    sums = np.cumsum(values)
    sums[SMOOTHING:] -= np.cumsum(values)[:-SMOOTHING]
    return sums / np.minimum(np.arange(1, len(values) + 1), SMOOTHING)


def _save(figure: Figure, path: Path) -> None:
    write_atomically(path, lambda temporary: figure.savefig(temporary, format="png", dpi=120))
    plt.close(figure)
