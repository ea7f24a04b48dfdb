"""A picture of a cost table: what every draft length costs on this machine, with intervals."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np

from engine.costs import CostTable
from engine.storage import write_atomically

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes


def plot_costs(costs: CostTable, path: Path) -> None:
    """Milliseconds of a verify pass for each draft length and context, and of reading a prompt, as PNG."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
    lengths = sorted(costs.verify)
    for place, context in enumerate(costs.contexts):
        times = [costs.verify[k][place] for k in lengths]
        _draw(left, costs, lengths, times, [f"verify.{k}.{context}" for k in lengths], f"{context} tokens of context")
    left.set(xlabel="draft length k (0: plain step)", ylabel="milliseconds", ylim=(0, None), title="verify pass")
    left.legend()
    prompts = list(costs.reading) or [1, 512]
    times = [costs.reading_seconds(tokens) for tokens in prompts]
    _draw(right, costs, prompts, times, [f"reading.{tokens}" for tokens in prompts], "beyond a plain step")
    right.set(xlabel="prompt tokens", ylabel="milliseconds", ylim=(0, None), title="reading a prompt")
    right.legend()
    drafts = ", ".join(f"{name} {costs.draft_ratio(name):.2g}" for name in costs.draft)
    figure.suptitle(f"{costs.machine}\na drafted token over a plain step: {drafts or 'nobody drafts'}", fontsize=9)
    write_atomically(path, lambda temporary: figure.savefig(temporary, format="png", dpi=120))
    plt.close(figure)


def _draw(axes: Axes, costs: CostTable, places: list[int], times: list[float], names: list[str], label: str) -> None:
    """Medians as a line, their 95 % intervals as bars."""
    middle = 1e3 * np.array(times)
    ends = 1e3 * np.array([costs.intervals.get(name, (time, time)) for name, time in zip(names, times)])
    bars = np.maximum(0.0, [middle - ends[:, 0], ends[:, 1] - middle])
    axes.errorbar(places, middle, yerr=bars, marker="o", markersize=3, capsize=3, label=label)
