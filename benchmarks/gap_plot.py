"""Arms' speed-ups with their intervals as bars."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np

from agents.gap import HINDSIGHT, ORACLE, GapArm
from engine.storage import write_atomically

matplotlib.use("Agg")
from matplotlib import pyplot as plt


def plot_gap(arms: Sequence[GapArm], path: Path) -> None:
    """Draw every arm into a PNG file; what knows the test requests is hatched. Raises `StorageError`."""
    figure, axes = plt.subplots(figsize=(9, 0.32 * len(arms) + 1.5), layout="constrained")
    places = np.arange(len(arms))[::-1]
    speeds = np.array([arm.speedup for arm in arms])
    errors = [np.maximum(0.0, speeds - [arm.low for arm in arms]), np.maximum(0.0, [arm.high for arm in arms] - speeds)]
    bars = axes.barh(places, speeds, xerr=errors, height=0.65, capsize=3)
    for bar, arm in zip(bars, arms, strict=True):
        if "hindsight" in arm.arm or arm.arm == ORACLE:
            bar.set(hatch="//", facecolor="lightgrey")
    fixed = next(arm.speedup for arm in arms if arm.arm == HINDSIGHT)
    axes.axvline(fixed, color="grey", linewidth=1, linestyle="--")
    axes.set_yticks(places, [arm.arm for arm in arms])
    axes.margins(y=0.02)
    axes.set(xlabel="speed-up over plain decoding, with 95 % intervals over groups of requests")
    axes.set_title("dashed: best fixed choice; hatched: knows the test requests", fontsize="medium")
    write_atomically(path, lambda temporary: figure.savefig(temporary, format="png", dpi=110))
    plt.close(figure)
