"""Controllers judged on the live engine: paired over requests, interleaved, token by token against plain decoding."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from engine import Generation, Policy, SpeculativeDecoder
from engine.controller_names import make_controller
from engine.controllers import Controller
from engine.errors import PromptError
from engine.results import Counters
from envs.dialogue import Dialogue, Turn
from envs.workloads import Workload

RESAMPLES = 2000
ENDS = (2.5, 97.5)  # percentiles of an interval
PLAIN = "plain"


@dataclass(frozen=True)
class Outcome:
    """One arm's run of one request.

    Attributes:
        group: the conversation or document whose requests stay together when intervals are drawn.
        steps, guard_steps: all steps, and those that a guard took plain.
        mismatched: positions whose token differs from plain decoding's, a missing or surplus token counted as one.
        guarded_rows: rows that were computed anew because their two top logits were nearly tied (exact="guarded").
    """

    request: str
    kind: str
    group: str
    tokens: int
    seconds: float
    first_token: float
    steps: int
    guard_steps: int
    drafts: int
    drafted: int
    accepted: int
    cached: int
    mismatched: int
    guarded_rows: int = 0


@dataclass(frozen=True)
class ArmSummary:
    """An arm over all requests; intervals are 95 % bootstrap intervals over groups, paired between arms.

    Attributes:
        speedup: plain's seconds for the same requests over the arm's, with the interval's ends.
        tokens_per_second: new tokens over seconds, prefill included.
        time_to_first_token: median seconds.
        guarded: share of the steps that a guard took plain.
        guarded_rows: rows that were computed anew because their two top logits were nearly tied.
    """

    arm: str
    tokens: int
    seconds: float
    tokens_per_second: float
    speedup: float
    speedup_low: float
    speedup_high: float
    time_to_first_token: float
    acceptance_rate: float
    mean_acceptance_length: float
    guarded: float
    mismatched_tokens: int
    guarded_rows: int = 0


@dataclass(frozen=True)
class Judgement:
    """Every arm on every request."""

    workload: str
    outcomes: Mapping[str, list[Outcome]]

    def summaries(self, kind: str | None = None) -> list[ArmSummary]:
        """One summary an arm, in the order that they were given; of one kind of request, or of all."""
        kept = self._of_kind(kind)
        return [_summary(arm, outcomes, kept[PLAIN]) for arm, outcomes in kept.items()]

    def speedups(self, kind: str) -> dict[str, float]:
        """Every arm's speed-up on one kind of request."""
        seconds = {arm: sum(o.seconds for o in outcomes) for arm, outcomes in self._of_kind(kind).items()}
        return {arm: seconds[PLAIN] / spent for arm, spent in seconds.items()}

    @property
    def kinds(self) -> list[str]:
        return list(dict.fromkeys(outcome.kind for outcome in self.outcomes[PLAIN]))

    @property
    def num_groups(self) -> int:
        """Conversations, or documents with all their questions: what intervals resample."""
        return len({outcome.group for outcome in self.outcomes[PLAIN]})

    def to_json(self) -> dict[str, Any]:
        return {
            "workload": self.workload,
            "requests": len(self.outcomes[PLAIN]),
            "groups": self.num_groups,
            "arms": [asdict(summary) for summary in self.summaries()],
            "kinds": {kind: self.speedups(kind) for kind in self.kinds},
            "outcomes": {arm: [asdict(o) for o in outcomes] for arm, outcomes in self.outcomes.items()},
        }

    def _of_kind(self, kind: str | None) -> dict[str, list[Outcome]]:
        return {arm: [o for o in outcomes if kind in (None, o.kind)] for arm, outcomes in self.outcomes.items()}


def judge(
    decoder: SpeculativeDecoder,
    arms: Mapping[str, str | Policy],
    workload: Workload,
    max_new_tokens: int,
    on_request: Callable[[], object] = lambda: None,
    guard: bool = True,
) -> Judgement:
    """Run every arm on every request, greedily, and compare with the arm named "plain".

    Each arm keeps its own caches, so that it meets each request with what a server of its kind would hold. The arms
    take turns on each request, in an order that rotates, so that drift of the machine touches all alike. The history
    of a conversation is plain decoding's, for every arm. `guard` lets policies fall back to plain decoding as they
    would when deployed; named controllers are baselines and run as they are.
    """
    if PLAIN not in arms:
        raise ValueError(f"the arms {', '.join(arms)} lack {PLAIN!r}, which the others are compared with")
    engines = {
        name: decoder.with_empty_caches().with_controller(_made(arm, decoder), guard=guard and isinstance(arm, Policy))
        for name, arm in arms.items()
    }
    _warm_up(engines)
    outcomes: dict[str, list[Outcome]] = {name: [] for name in engines}
    order = list(engines)
    for conversation in workload.conversations:
        dialogue = Dialogue(conversation)
        while turn := dialogue.next_turn():
            on_request()
            if not _fits(decoder, turn, max_new_tokens):
                break
            done = {name: engines[name].generate(turn.messages, max_new_tokens) for name in order}
            order = order[1:] + order[:1]
            for name in engines:
                outcomes[name].append(_outcome(turn, done[name], done[PLAIN]))
            dialogue.reply(done[PLAIN].text)
    if not outcomes[PLAIN]:
        raise PromptError(f"no request of {workload.name} fits the model; give shorter prompts")
    return Judgement(workload.name, outcomes)


def _made(arm: str | Policy, decoder: SpeculativeDecoder) -> Controller | Policy:
    """Named controllers may reckon with the engine's costs, as cost-model does."""
    return make_controller(arm, decoder.parts.menu, decoder.costs) if isinstance(arm, str) else arm


def _fits(decoder: SpeculativeDecoder, turn: Turn, max_new_tokens: int) -> bool:
    """Whether the model can take a request; where not, it and what follows in its conversation are left out."""
    try:
        decoder.request(turn.messages, max_new_tokens)
    except PromptError as error:
        warnings.warn(f"request {turn.id} is left out: {error}", stacklevel=3)
        return False
    return True


def _warm_up(engines: Mapping[str, SpeculativeDecoder]) -> None:
    """A short request for each arm that shares no prefix with what is measured, so that first-use costs are paid."""
    for decoder in engines.values():
        decoder.generate([3, 4, 5, 3, 4, 5, 3, 4], max_new_tokens=8, salt="warm-up", ignore_eos=True)


def _outcome(turn: Turn, generation: Generation, plain: Generation) -> Outcome:
    counters = generation.counters
    return Outcome(
        request=turn.id,
        kind=turn.kind,
        group=turn.group,
        tokens=len(generation.tokens),
        seconds=generation.seconds,
        first_token=generation.time_to_first_token,
        steps=counters.num_steps,
        guard_steps=counters.num_guard_steps,
        drafts=counters.num_drafts,
        drafted=counters.num_draft_tokens,
        accepted=counters.num_accepted_tokens,
        cached=counters.num_cached_tokens,
        mismatched=count_mismatches(generation.tokens, plain.tokens),
        guarded_rows=counters.num_guarded_rows,
    )


def count_mismatches(tokens: list[int], reference: list[int]) -> int:
    """Positions at which two token lists differ; what one has beyond the other counts too."""
    differing = sum(ours != theirs for ours, theirs in zip(tokens, reference, strict=False))
    return differing + abs(len(tokens) - len(reference))


def _summary(arm: str, outcomes: list[Outcome], plain: list[Outcome]) -> ArmSummary:
    seconds = np.array([o.seconds for o in outcomes])
    reference = np.array([o.seconds for o in plain])
    low, high = ratio_interval(reference, seconds, [o.group for o in outcomes])
    tokens = sum(o.tokens for o in outcomes)
    drafting = Counters(
        num_drafts=sum(o.drafts for o in outcomes),
        num_draft_tokens=sum(o.drafted for o in outcomes),
        num_accepted_tokens=sum(o.accepted for o in outcomes),
    )
    return ArmSummary(
        arm=arm,
        tokens=tokens,
        seconds=float(seconds.sum()),
        tokens_per_second=tokens / float(seconds.sum()),
        speedup=float(reference.sum() / seconds.sum()),
        speedup_low=low,
        speedup_high=high,
        time_to_first_token=float(np.median([o.first_token for o in outcomes])),
        acceptance_rate=drafting.acceptance_rate,
        mean_acceptance_length=drafting.mean_acceptance_length,
        guarded=sum(o.guard_steps for o in outcomes) / max(1, sum(o.steps for o in outcomes)),
        mismatched_tokens=sum(o.mismatched for o in outcomes),
        guarded_rows=sum(o.guarded_rows for o in outcomes),
    )


def ratio_interval(reference: np.ndarray, seconds: np.ndarray, groups: Sequence[str]) -> tuple[float, float]:
    """95 % bootstrap interval of the ratio of two arms' sums of seconds, resampling groups with both times together.

    One group alone leaves nothing to resample: both ends are then the ratio, and tables show no interval.
    """
    sums = resampled_sums(np.column_stack([reference, seconds]), groups)
    low, high = np.percentile(sums[:, 0] / sums[:, 1], ENDS)
    return float(low), float(high)


def resampled_sums(measured: np.ndarray, groups: Sequence[str], seed: int = 0) -> np.ndarray:
    """Sums `[RESAMPLES, figures]` of what was measured of requests, `[requests, figures]`: the bootstrap (Efron 1979).

    Whole groups are drawn: requests of one conversation or document are alike, and no independent samples.
    """
    names, member = np.unique(np.asarray(groups), return_inverse=True)
    chosen = np.random.default_rng(seed).integers(0, len(names), (RESAMPLES, len(names)))
    return np.stack([np.bincount(member, figure)[chosen].sum(axis=1) for figure in measured.T], axis=1)
