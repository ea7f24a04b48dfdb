"""What a step and a request leave behind: records, counters, the generation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step: `drafted` tokens proposed, `drafted + 1` rows verified, `len(tokens)` committed.

    Attributes:
        action: index in the menu.
        k: draft length that the action asked for.
        drafter: who drafted; empty for a plain step.
        drafted: tokens that were proposed, at most k.
        accepted: proposed tokens that were committed.
        tokens: what was committed, in order; the last is the target's own unless the request ended in the draft.
        rejected: proposed tokens that were not committed.
        prefilled: prompt tokens that this step's pass read besides its drafted + 1 rows (first step only; 0 where
            all but the last were cached).
        cached: prompt tokens taken from the prefix cache (first step only).
        seconds_draft, seconds_verify: the drafter's time; the target's pass (with prefill) and verdict.
        seconds_overhead: the rest of the step: observing, choosing, committing with the text of its tokens; of a first
            step also setting the request up and copying the cached prefix. What comes between steps is in no figure:
            the controller's learning, storing the prefix at the end, encoding the prompt at the start.
        first: whether this is the request's first step, which also reads the prompt.
        context: tokens of the request before this step, prompt included.
    """

    action: int
    k: int
    drafter: str
    drafted: int
    accepted: int
    tokens: tuple[int, ...]
    rejected: tuple[int, ...]
    prefilled: int
    cached: int
    seconds_draft: float
    seconds_verify: float
    seconds_overhead: float
    first: bool = False
    context: int = 0

    @property
    def seconds(self) -> float:
        return self.seconds_draft + self.seconds_verify + self.seconds_overhead


@dataclass(frozen=True, slots=True)
class Counters:
    """Totals over steps, named as in vLLM's metrics. Rates are NaN-free: 0 where nothing was drafted.

    `num_guard_steps` were taken plain by the guard, for speed. `num_guarded_rows` were computed anew as plain decoding
    would, because their two top logits were nearly tied (exact="guarded").
    """

    num_steps: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_generated_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_drafter_failures: int = 0
    num_guard_steps: int = 0
    num_guarded_rows: int = 0

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted tokens."""
        return self.num_accepted_tokens / max(1, self.num_draft_tokens)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a drafting step commits on average: 1 + accepted / drafts."""
        return 1.0 + self.num_accepted_tokens / max(1, self.num_drafts)


def count_steps(steps: Sequence[StepRecord]) -> Counters:
    """The counters that follow from step records; prompt tokens and failures are the session's to add."""
    return Counters(
        num_steps=len(steps),
        num_drafts=sum(1 for step in steps if step.drafted),
        num_draft_tokens=sum(step.drafted for step in steps),
        num_accepted_tokens=sum(step.accepted for step in steps),
        num_generated_tokens=sum(len(step.tokens) for step in steps),
        num_cached_tokens=sum(step.cached for step in steps),
    )


@dataclass(frozen=True)
class Generation:
    """A finished request.

    Attributes:
        tokens: the new token ids, the end-of-sequence token included where it came.
        text: their text without special tokens, cut before a stop string.
        finish_reason: "stop" (end of sequence or a stop string) or "length" (max_new_tokens or the context limit);
            None while the request is under way.
        steps: one record a step.
        counters: totals of this request.
        time_to_first_token: seconds of the first step; encoding the prompt is not in it.
        seconds: seconds of all steps; what `StepRecord.seconds_overhead` leaves out is not in it.
    """

    tokens: list[int]
    text: str
    finish_reason: FinishReason | None
    steps: list[StepRecord]
    counters: Counters
    time_to_first_token: float
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """New tokens over the seconds of all steps, prefill included."""
        return len(self.tokens) / self.seconds if self.seconds else 0.0
