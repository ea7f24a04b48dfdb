"""Where runs part from their references, and how near the target's two top logits are there.

Rounding can only turn a near-tie: a parting with a wide margin is an error of another kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from agents.evaluation import count_mismatches
from engine import Generation
from engine.models import LoadedModel

SHOWN = 20  # partings that are printed; the JSON holds all


@dataclass
class Tally:
    """Runs compared with their references.

    Attributes:
        runs, tokens: requests decoded, and their tokens.
        mismatched: positions whose token differs, a missing or surplus token counted as one.
        guarded_rows: rows that the engine computed again because two logits were near.
        seconds: of the runs, without the references.
        passes: rows of a target pass behind its prefill -> how many there were.
        parted: one entry for each run that differs: where first, and the margin of the two top logits there.
    """

    runs: int = 0
    tokens: int = 0
    mismatched: int = 0
    guarded_rows: int = 0
    seconds: float = 0.0
    passes: dict[str, int] = field(default_factory=dict)
    parted: list[dict[str, Any]] = field(default_factory=list)

    def add(
        self, run: Mapping[str, Any], prompt: list[int], tokens: list[int], reference: list[int], model: LoadedModel
    ) -> None:
        """Count one run; `run` names it, `model` tells the margin where it parts from the reference."""
        self.runs += 1
        self.tokens += len(tokens)
        self.mismatched += count_mismatches(tokens, reference)
        if tokens != reference:
            shorter = min(len(tokens), len(reference))
            at = next((i for i in range(shorter) if tokens[i] != reference[i]), shorter)
            self.parted.append({**run, "position": at, "margin": margin(model, prompt + reference[:at])})

    def count(self, run: Generation) -> None:
        """Add what the engine itself counted."""
        self.seconds += run.seconds
        self.guarded_rows += run.counters.num_guarded_rows
        for step in run.steps:
            rows = str(step.drafted + 1)
            self.passes[rows] = self.passes.get(rows, 0) + 1

    def merge(self, other: Tally) -> None:
        self.runs += other.runs
        self.tokens += other.tokens
        self.mismatched += other.mismatched
        self.guarded_rows += other.guarded_rows
        self.seconds += other.seconds
        for rows, count in other.passes.items():
            self.passes[rows] = self.passes.get(rows, 0) + count
        self.parted += other.parted

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def show(self, name: str) -> None:
        """Print a line, and one for each of the first partings."""
        parted = f"{len(self.parted)} of {self.runs} runs part"
        rate = f", {self.tokens / self.seconds:.1f} tokens/s" if self.seconds else ""
        guarded = f", {self.guarded_rows} guarded rows" if self.guarded_rows else ""
        print(f"{name}: {self.tokens} tokens, {self.mismatched} mismatched, {parted}{guarded}{rate}")
        for parting in self.parted[:SHOWN]:
            print("    " + ", ".join(f"{key} {value}" for key, value in parting.items()))
        if len(self.parted) > SHOWN:
            print(f"    and {len(self.parted) - SHOWN} more")


def margin(model: LoadedModel, context: list[int]) -> float:
    """Distance of the two top logits after `context`."""
    logits = model.runner.forward(context, model.runner.new_buffer(), 1)[0]
    first, second = logits.topk(2).values
    return float(first - second)
