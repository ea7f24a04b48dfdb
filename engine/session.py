"""One request under way. `Session.step` is the one place where a step happens: generate, stream and the environments
all call it."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from torch import Tensor

from engine.drafters.base import Drafter
from engine.drafting import Drafting
from engine.errors import MenuError, first_line
from engine.exactness import NearTies
from engine.menu import Action, Menu
from engine.observation import Observation, shows_certainty
from engine.prefix_cache import PrefixCache
from engine.request import Request
from engine.results import Counters, FinishReason, Generation, StepRecord, count_steps
from engine.rounding import Rounding
from engine.runner import Runner
from engine.sampling import certainty, seeded_generator
from engine.text import Detokenizer
from engine.verify import verify

SHORT_AVERAGE, LONG_AVERAGE = 0.3, 0.05  # weight of the newest draft


@dataclass(frozen=True)
class Parts:
    """What sessions share: the model and what stands around it."""

    runner: Runner
    tokenizer: Any
    eos_ids: frozenset[int]
    menu: Menu
    drafters: Mapping[str, Drafter]
    prefix_cache: PrefixCache
    rounding: Rounding | None = None  # None: near-ties need no care (bitwise), or get none (off)


class Session:
    """The state of one checked request, driven by `step` until `finished`, then closed (`with` does that).

    Between steps the buffer holds every token but the newest, which is the first row of the next pass; drafted rows
    follow it. A request that ends within its draft has the newest token in the buffer too. `tokens` is one list, which
    `Drafting` and `NearTies` read as it grows::

        |  prompt  |  generated  | pending |  draft 1 ... draft k  |
        0                  buffer.length                 rows of the pass
    """

    def __init__(self, parts: Parts, request: Request) -> None:
        started = time.perf_counter()
        self._parts, self._request = parts, request
        self._certain = shows_certainty(parts.menu)
        self.tokens: list[int] = list(request.tokens)
        self.steps: list[StepRecord] = []
        self.finish_reason: FinishReason | None = None
        self.guard_steps = 0  # counted by whoever drives the request under a guard
        self._limit = min(request.max_new_tokens, parts.runner.max_context - len(request.tokens))
        self._buffer = parts.runner.new_buffer()
        self._generator = seeded_generator(request.sampling.seed)
        self._detokenizer = Detokenizer(parts.tokenizer, request.stop)
        self._match = parts.prefix_cache.match(request.tokens, request.salt).truncated(len(request.tokens) - 1)
        parts.prefix_cache.lock(self._match)
        self._locked = True
        self.newest_logits: Tensor | None = None  # [vocab], which the newest token was chosen from
        self._acceptance_short = self._acceptance_long = 0.5
        self._last_drafting: tuple[int, int] = (0, 0)
        self._drafting = Drafting(parts.drafters, self.tokens, request, parts.runner.vocab_size)
        rounding = parts.rounding if request.sampling.greedy else None
        self._near_ties = NearTies(rounding, parts.runner, self._buffer, self.tokens)
        self._setup_seconds = time.perf_counter() - started

    # -- before a step ------------------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def generated(self) -> list[int]:
        """The new tokens so far."""
        return self.tokens[len(self._request.tokens) :]

    @property
    def left(self) -> int:
        """New tokens that may still come."""
        return self._limit - (len(self.tokens) - len(self._request.tokens))

    def mask(self) -> list[bool]:
        """Which menu entries may be chosen now."""
        return self._parts.menu.mask(can_reuse=not self.steps and self._match.length > 0)

    def observe(self) -> Observation:
        """What is known before the next step. Asking changes nothing that a later observation or step depends on."""
        top_probability, entropy = certainty(self.newest_logits) if self._certain else (0.0, 0.0)
        return Observation(
            prefill_pending=not self.steps,
            prompt_tokens=len(self._request.tokens),
            cached_tokens=self.steps[0].cached if self.steps else self._match.length,
            context=len(self.tokens),
            generated=len(self.tokens) - len(self._request.tokens),
            left=self.left,
            last_drafted=self._last_drafting[0],
            last_accepted=self._last_drafting[1],
            acceptance_short=self._acceptance_short,
            acceptance_long=self._acceptance_long,
            target_top_probability=top_probability,
            target_entropy=entropy,
            signals=self._drafting.signals(),
        )

    # -- a step -------------------------------------------------------------------------------------------------

    def step(self, action: int, min_confidence: float = 0.0, started: float | None = None) -> StepRecord:
        """Take one step of the menu and return its record.

        Args:
            action: index in the menu.
            min_confidence: the draft ends before the first token that its drafter trusts less.
            started: `time.perf_counter()` when choosing this action began, so that its time counts as overhead.

        Raises:
            MenuError: the action is not in the menu, or is masked now; or the request has finished.
            NumericalError: the target's logits are not finite. The request stays as it was.
        """
        started = time.perf_counter() if started is None else started
        entry = self._entry(action)
        first, context = not self.steps, len(self.tokens)
        cached = self._restore(entry.reuse) if first else 0
        before_draft = time.perf_counter()
        draft = self._drafting.propose(entry.drafter, min(entry.k, self.left - 1), min_confidence)
        before_verify = time.perf_counter()
        held = self._buffer.length
        rows = self.tokens[held:] + draft.tokens
        logits = self._parts.runner.forward(rows, self._buffer, len(draft.tokens) + 1)
        try:
            verdict = verify(logits, draft, self._request.sampling, self._generator)
            logits, verdict = self._near_ties.settle(len(rows), draft, logits, verdict)
        except BaseException:
            self._buffer.truncate(held)
            raise
        self._parts.runner.synchronize()
        after_verify = time.perf_counter()
        valid = len(self.tokens) + verdict.accepted  # KV rows that stay; counted before `tokens` grows
        committed = self._commit([*draft.tokens[: verdict.accepted], verdict.token])
        self._buffer.truncate(min(valid, len(self.tokens)))
        self.newest_logits = logits[verdict.accepted]
        accepted = min(verdict.accepted, len(committed))
        self._remember(len(draft.tokens), accepted)
        setup = self._setup_seconds if first else 0.0
        record = StepRecord(
            action=action,
            k=entry.k,
            drafter=entry.drafter,
            drafted=len(draft.tokens),
            accepted=accepted,
            tokens=committed,
            rejected=tuple(draft.tokens[accepted:]),
            prefilled=len(rows) - len(draft.tokens) - 1,
            cached=cached,
            seconds_draft=before_verify - before_draft,
            seconds_verify=after_verify - before_verify,
            seconds_overhead=setup + before_draft - started + time.perf_counter() - after_verify,
            first=first,
            context=context,
        )
        self.steps.append(record)
        return record

    def take_text(self) -> str:
        """The text that has become safe to show since the last call."""
        return self._detokenizer.take()

    def close(self) -> None:
        """End the request: unlock, store its verified tokens in the prefix cache, tell the drafters. Idempotent.

        Tokens that cannot be stored, for instance for want of memory, are warned of: the answer is not lost with them.
        """
        if not self._locked:
            return
        self._locked = False
        try:
            self._parts.prefix_cache.unlock(self._match)
            # Not the newest token, which is held only where it was drafted: what is kept must not depend on drafts.
            held = min(self._buffer.length, len(self.tokens) - 1)
            self._parts.prefix_cache.insert(self.tokens[:held], self._buffer, self._request.salt)
        except Exception as error:
            warnings.warn(f"the prefix was not kept ({first_line(error)})", RuntimeWarning, stacklevel=2)
        finally:
            self._drafting.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def result(self) -> Generation:
        """The generation so far, with its counters."""
        return Generation(
            tokens=self.generated,
            text=self._detokenizer.text,
            finish_reason=self.finish_reason,
            steps=self.steps,
            counters=self.counters(),
            time_to_first_token=self.steps[0].seconds if self.steps else 0.0,
            seconds=sum(step.seconds for step in self.steps),
        )

    def counters(self) -> Counters:
        return replace(
            count_steps(self.steps),
            num_prompt_tokens=len(self._request.tokens),
            num_drafter_failures=self._drafting.failures,
            num_guard_steps=self.guard_steps,
            num_guarded_rows=self._near_ties.count,
        )

    # -- parts of a step ----------------------------------------------------------------------------------------

    def _entry(self, action: int) -> Action:
        menu = self._parts.menu
        if self.finished:
            raise MenuError("the request has finished; start a new session")
        if menu.allowed(action, self.mask()) != action:
            raise MenuError(f"action {menu[action]} is masked: no cached prefix can be ignored now; use its reuse form")
        return menu[action]

    def _restore(self, reuse: bool) -> int:
        self._buffer.truncate(0)
        if reuse and self._match.length:
            self._parts.prefix_cache.restore(self._match, self._buffer)
        return self._buffer.length

    def _commit(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Append tokens until the request ends; returns those appended."""
        for count, token in enumerate(tokens, start=1):
            self.tokens.append(token)
            stopped = self._detokenizer.push(token)
            if stopped or (token in self._parts.eos_ids and not self._request.ignore_eos):
                self.finish_reason = "stop"
            elif self.left <= 0:
                self.finish_reason = "length"
            if self.finished:
                self._detokenizer.finish()
                return tuple(tokens[:count])
        return tuple(tokens)

    def _remember(self, drafted: int, accepted: int) -> None:
        self._last_drafting = (drafted, accepted)
        if drafted:
            rate = accepted / drafted
            self._acceptance_short += SHORT_AVERAGE * (rate - self._acceptance_short)
            self._acceptance_long += LONG_AVERAGE * (rate - self._acceptance_long)
