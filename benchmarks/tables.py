"""What `python -m benchmarks engine` shows people: its document as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agents.report import aligned
from benchmarks.intervals import Estimate
from benchmarks.roofline import Roofline


def bounds_text(bandwidth: float, threads: int, bounds: Mapping[str, Roofline]) -> str:
    """The roofline, before anything else is measured."""
    lines = [f"memory: {bandwidth / 1e9:.1f} GB/s read by {threads} threads"]
    for name, bound in bounds.items():
        most = f"at most {bound.tokens_per_second:.1f} plain tokens/s"
        lines.append(f"{name}: a step reads {bound.weight_bytes / 1e6:.1f} MB of weights, {most}")
    return "\n".join(lines)


def costs_table(document: Mapping[str, Any]) -> str:
    """The plain step and v(k), for each precision and context."""
    contexts = [(name, context, cost) for name, by in document["verify"].items() for context, cost in by.items()]
    lengths = list(contexts[0][2]["v"])
    rows = [["precision", "context", "plain step", *(f"v({k})" for k in lengths)]]
    for name, context, cost in contexts:
        ratios = [str(Estimate(**cost["v"][k])) for k in lengths]
        rows.append([name, context, f"{cost['plain_ms']:.2f} ms", *ratios])
    return "v(k): a pass that verifies k drafts over a plain step, with 95 % intervals\n" + aligned(rows)


def parts_table(document: Mapping[str, Any]) -> str:
    """Where a step's time goes: one column a precision and k. Parts that were not timed themselves carry a star."""
    taken = document["breakdown"]
    rows = [["ms a step", *(f"{one['precision']} k={one['k']}" for one in taken)]]
    for part in taken[0]["parts_ms"]:
        cells = [f"{one['parts_ms'][part]:.3f}{'*' if part in one['by_difference'] else ' '}" for one in taken]
        rows.append([part, *cells])
    rows.append(["sum", *(f"{one['sum_ms']:.3f} " for one in taken)])
    rows.append(["a bare step", *(f"{one['whole_ms']:.3f} " for one in taken)])
    inside = {one["precision"]: one["inside"] for one in taken}
    notes = [f"{precision}, inside of the pass: {how}" for precision, how in inside.items()]
    return "\n".join([aligned(rows), "* by difference: what is left of the part around it", *notes])


def figures_text(document: Mapping[str, Any]) -> str:
    """The ratios that matter, the shares of the roofline, and what is missing."""
    lines = []
    for name, figure in document["figures"].items():
        estimate = Estimate(figure["value"], figure["low"], figure["high"])
        told = f"{name} ({figure['arm']})" if "best" in name else name
        lines.append(f"{told}: {estimate}")
    for name, bound in document["roofline"].items():
        lines.append(f"{name}: the plain step reads its weights at {bound['share']:.2f} of the bandwidth measured")
    lines.append("The best controller is chosen on these same requests, so its figures are somewhat too good.")
    lines += [f"not measured: {line}" for line in document["missing"]]
    return "\n".join(lines)
