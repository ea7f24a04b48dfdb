"""What the environments tell of a step besides its observation and reward."""

from __future__ import annotations

from typing import Any

from engine.results import StepRecord


def step_info(record: StepRecord) -> dict[str, Any]:
    """The `info` of a step: its seconds with their parts, its tokens, and whether it was the request's first."""
    return {
        "seconds": record.seconds,
        "seconds_draft": record.seconds_draft,
        "seconds_verify": record.seconds_verify,
        "seconds_overhead": record.seconds_overhead,
        "tokens": len(record.tokens),
        "drafted": record.drafted,
        "accepted": record.accepted,
        "prefilled": record.prefilled,
        "cached": record.cached,
        "first": record.first,
    }
