"""The picture of `python -m benchmarks engine`: arms, the cost of verifying, where a step's time goes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from engine.storage import write_atomically

matplotlib.use("Agg")
from matplotlib import pyplot as plt


def plot_engine(document: Mapping[str, Any], path: Path) -> None:
    """Draw the program's document into a PNG file. Raises `StorageError`."""
    figure, (arms, costs, parts) = plt.subplots(1, 3, figsize=(19, 6), layout="constrained")
    _plot_arms(arms, document["arms"], document["base"])
    _plot_costs(costs, document["verify"])
    _plot_parts(parts, document["breakdown"])
    write_atomically(path, lambda temporary: figure.savefig(temporary, format="png", dpi=110))
    plt.close(figure)


def _plot_arms(axes: Any, arms: Mapping[str, Any], base: str) -> None:
    names = list(arms)[::-1]
    ratios = np.array([arms[name]["ratio"]["value"] for name in names])
    axes.barh(names, ratios, xerr=_errors([arms[name]["ratio"] for name in names]), height=0.65, capsize=3)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set(xlabel=f"tokens per second over {base}'s (95 % interval)", title="Every engine on the same prompts")


def _plot_costs(axes: Any, verify: Mapping[str, Any]) -> None:
    for precision, contexts in verify.items():
        for context, cost in contexts.items():
            lengths = sorted(int(k) for k in cost["v"])
            ratios = [cost["v"][str(k)] for k in lengths]
            values = [ratio["value"] for ratio in ratios]
            label = f"{precision}, {context} tokens"
            axes.errorbar(lengths, values, yerr=_errors(ratios), marker="o", markersize=4, capsize=3, label=label)
    axes.axhline(1.0, color="grey", linewidth=1)
    axes.set(xlabel="drafts verified, k", ylabel="pass over a plain step's, v(k)", title="What verifying costs")
    axes.legend()


def _plot_parts(axes: Any, breakdowns: list[Mapping[str, Any]]) -> None:
    names = [f"{one['precision']}, k = {one['k']}" for one in breakdowns]
    left = np.zeros(len(breakdowns))
    for part in breakdowns[0]["parts_ms"] if breakdowns else []:
        width = np.array([max(0.0, one["parts_ms"][part]) for one in breakdowns])
        axes.barh(names, width, left=left, height=0.6, label=part)
        left += width
    axes.plot([one["whole_ms"] for one in breakdowns], names, "k|", markersize=24, label="a bare step")
    axes.set(xlabel="ms a step", title="Where a step's time goes")
    axes.legend(fontsize="small")


def _errors(ratios: list[Mapping[str, Any]]) -> list[list[float]]:
    """How far the intervals reach below and above their values; nothing where there is none."""
    ends = [(one["value"], one["low"], one["high"]) for one in ratios]
    below = [0.0 if low is None else max(0.0, value - low) for value, low, _ in ends]
    above = [0.0 if high is None else max(0.0, high - value) for value, _, high in ends]
    return [below, above]
