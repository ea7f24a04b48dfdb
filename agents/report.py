"""A judgement as a table for people."""

from __future__ import annotations

from collections.abc import Sequence

from agents.evaluation import ArmSummary, Judgement

_COLUMNS = (
    "arm",
    "tokens/s",
    "speed-up",
    "95 % interval",
    "first token",
    "accepted",
    "length",
    "guarded",
    "mismatched",
)


def table(judgement: Judgement) -> str:
    """One line an arm, plain text.

    Speed-up is plain decoding's time over the arm's, with the interval over groups of requests; first token is the
    median; accepted is the share of drafted tokens; length is the tokens that a drafting step commits; guarded is the
    share of steps that a guard took plain.
    """
    rows = [_row(summary, judgement.num_groups > 1) for summary in judgement.summaries()]
    requests = len(next(iter(judgement.outcomes.values())))
    caption = (
        f"{requests} requests of {judgement.workload}; intervals resample {judgement.num_groups} groups "
        "(conversations, or documents with their questions)"
    )
    return f"{caption}\n{aligned([_COLUMNS, *rows])}"


def kinds_table(judgement: Judgement) -> str:
    """Speed-up of every arm on every kind of request."""
    kinds = judgement.kinds
    by_kind = {kind: judgement.speedups(kind) for kind in kinds}
    rows = [(arm, *(f"{by_kind[kind][arm]:.2f}" for kind in kinds)) for arm in judgement.outcomes]
    return aligned([("speed-up", *kinds), *rows])


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows as columns of even width, the first one to the left."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _row(summary: ArmSummary, spread: bool) -> tuple[str, ...]:
    """`spread`: whether there are groups enough to tell an interval."""
    drafted = summary.mean_acceptance_length > 1.0 or summary.acceptance_rate > 0.0
    return (
        summary.arm,
        f"{summary.tokens_per_second:.1f}",
        f"{summary.speedup:.3f}",
        f"{summary.speedup_low:.3f} to {summary.speedup_high:.3f}" if spread else "-",
        f"{summary.time_to_first_token * 1e3:.0f} ms",
        f"{summary.acceptance_rate:.1%}" if drafted else "-",
        f"{summary.mean_acceptance_length:.2f}" if drafted else "-",
        f"{summary.guarded:.1%}" if summary.guarded else "-",
        str(summary.mismatched_tokens),
    )
