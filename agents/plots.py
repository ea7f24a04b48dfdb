"""Pictures of a training and of a judgement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np

from agents.curve import CurvePoint
from agents.evaluation import PLAIN, Judgement
from engine.storage import write_atomically

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.figure import Figure


def plot_curves(curves: Mapping[int, Sequence[CurvePoint]], path: Path) -> None:
    """The replayed speed-up of each seed's policy over the steps of its training."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for seed, curve in curves.items():
        axes.plot([point.step for point in curve], [point.speedup for point in curve], ".-", label=f"seed {seed}")
    axes.axhline(1.0, color="grey", linewidth=1, label="plain decoding")
    axes.set(xlabel="training steps", ylabel="speed-up over plain decoding", title="Validation requests, replayed")
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


def _save(figure: Figure, path: Path) -> None:
    write_atomically(path, lambda temporary: figure.savefig(temporary, format="png", dpi=120))
    plt.close(figure)
