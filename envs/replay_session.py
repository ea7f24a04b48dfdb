"""A recorded request under another controller: the counterpart of `engine.session.Session`, without an engine."""

from __future__ import annotations

from collections.abc import Callable

from engine.controllers import Controller
from engine.costs import CostTable
from engine.drafters.base import Signal
from engine.errors import MenuError
from engine.menu import Menu
from engine.observation import Observation, shows_certainty
from engine.results import StepRecord
from engine.session import LONG_AVERAGE, SHORT_AVERAGE
from envs.trace import TraceSet


def exact_latency() -> float:
    """The factor of a latency that is the calibrated median itself."""
    return 1.0


class ReplaySession:
    """Driven by `step` until `finished`, as a live session is; tokens are the recorded ones and times the costs'.

    Records do not tell which tokens were rejected. A model drafter's catching up is priced as if its prefix cache had
    held the target's hit.

    Args:
        traces, index: the recorded request.
        menu: the actions. Raises `MenuError` where it uses a drafter or a length that was not recorded.
        costs: what steps take.
        noise: gives a factor for each step's time.
    """

    def __init__(
        self,
        traces: TraceSet,
        index: int,
        menu: Menu,
        costs: CostTable,
        noise: Callable[[], float] = exact_latency,
    ) -> None:
        check_recorded(traces, menu)
        self.trace = traces.traces[index]
        self.steps: list[StepRecord] = []
        self._menu, self._costs, self._noise = menu, costs, noise
        self._names = {name: place for place, name in enumerate(traces.drafters)}
        self._lagging = traces.lagging
        self._certain = shows_certainty(menu)
        self._position = 0
        self._acceptance_short = self._acceptance_long = 0.5
        self._last_drafting = (0, 0)
        self._shown = [0.0] * len(traces.drafters)  # what lagging signals tell
        self._read = [self.trace.cached_tokens] * len(traces.drafters)  # tokens that lagging drafters have read

    @property
    def finished(self) -> bool:
        return self._position == self.trace.length

    @property
    def left(self) -> int:
        """New tokens that may still come."""
        return self.trace.limit - self._position

    def mask(self) -> list[bool]:
        """Which menu entries may be chosen now."""
        return self._menu.mask(can_reuse=not self.steps and self.trace.cached_tokens > 0)

    def observe(self) -> Observation:
        """What is known before the next step. Raises `MenuError` where the request has finished."""
        trace, at = self.trace, self._here()
        return Observation(
            prefill_pending=not self.steps,
            prompt_tokens=trace.prompt_tokens,
            cached_tokens=self.steps[0].cached if self.steps else trace.cached_tokens,
            context=trace.prompt_tokens + at,
            generated=at,
            left=self.left,
            last_drafted=self._last_drafting[0],
            last_accepted=self._last_drafting[1],
            acceptance_short=self._acceptance_short,
            acceptance_long=self._acceptance_long,
            target_top_probability=float(trace.top_probability[at]) if self._certain else 0.0,
            target_entropy=float(trace.entropy[at]) if self._certain else 0.0,
            signals={name: self._signal(place, at) for name, place in self._names.items()},
        )

    def step(self, action: int, min_confidence: float = 0.0, observed: bool = True) -> StepRecord:
        """Take one step of the menu; arguments and errors as `Session.step`, and whether an observation was read."""
        at, entry = self._here(), self._menu[action]
        if self._menu.allowed(action, self.mask()) != action:
            raise MenuError(f"action {entry} is masked: no cached prefix can be ignored now; use its reuse form")
        trace, first = self.trace, not self.steps
        asked = min(entry.k, self.left - 1)
        drafted, cut = self._draft(entry.drafter, asked, at, min_confidence)
        accepted = min(drafted, int(trace.matched[self._names[entry.drafter], at])) if drafted else 0
        committed = min(accepted + 1, trace.length - at)
        context = trace.prompt_tokens + at
        cached = trace.cached_tokens if first and entry.reuse else 0
        drafter = entry.drafter if asked > 0 else ""
        read = self._catch_up(drafter, context, drafted + cut, accepted)
        seconds = self._costs.step_seconds(context, committed, drafter, drafted, read, observed)
        extra = self._costs.first_seconds(trace.prompt_tokens, cached) if first else (0.0, 0.0, 0.0)
        factor = self._noise()
        record = StepRecord(
            action=action,
            k=entry.k,
            drafter=entry.drafter,
            drafted=drafted,
            accepted=accepted,
            tokens=tuple(trace.tokens[at : at + committed].tolist()),
            rejected=(),
            prefilled=trace.prompt_tokens - cached - 1 if first else 0,
            cached=cached,
            seconds_draft=factor * (seconds.draft + (self._costs.draft[drafter] if cut else 0.0)),
            seconds_verify=factor * (seconds.verify + extra[1]),
            seconds_overhead=factor * (seconds.overhead + extra[2]),
            first=first,
            context=context,
        )
        self._remember(drafted, accepted)
        self._position += committed
        self.steps.append(record)
        return record

    def run(self, controller: Controller) -> None:
        """Let a controller take every step, as a decoder would."""
        while not self.finished:
            observed = controller.needs_observation
            action = controller.choose(self.observe() if observed else None, self.mask())
            controller.observe(self.step(action, controller.min_confidence, observed))

    def _here(self) -> int:
        if self.finished:
            raise MenuError("the request has finished; start a new session")
        return self._position

    def _signal(self, place: int, at: int) -> Signal:
        trace = self.trace
        confidence = self._shown[place] if self._lagging[place] else float(trace.signal_confidence[place, at])
        return Signal(int(trace.match_length[place, at]), int(trace.support[place, at]), confidence)

    def _draft(self, drafter: str, asked: int, at: int, min_confidence: float) -> tuple[int, bool]:
        """How many tokens come, and whether doubt cut the draft: the doubtful token has been drafted too."""
        if asked <= 0:
            return 0, False
        place = self._names[drafter]
        longest = min(asked, int(self.trace.proposed[place, at]))
        if longest and self._lagging[place]:
            self._shown[place] = float(self.trace.confidences[place, at, 0])
        doubtful = (self.trace.confidences[place, at, :longest] < min_confidence).nonzero()[0]
        return (int(doubtful[0]), True) if len(doubtful) else (longest, False)

    def _catch_up(self, drafter: str, context: int, passes: int, accepted: int) -> int:
        """Tokens that a lagging drafter reads beside the newest, which its first pass reads anyway."""
        if not drafter or not passes or not self._lagging[self._names[drafter]]:
            return 0
        place = self._names[drafter]
        read, self._read[place] = self._read[place], context + min(accepted, passes - 1)
        return max(0, context - 1 - read)

    def _remember(self, drafted: int, accepted: int) -> None:
        self._last_drafting = (drafted, accepted)
        if drafted:
            rate = accepted / drafted
            self._acceptance_short += SHORT_AVERAGE * (rate - self._acceptance_short)
            self._acceptance_long += LONG_AVERAGE * (rate - self._acceptance_long)


def check_recorded(traces: TraceSet, menu: Menu) -> None:
    """Raise `MenuError` for a menu with a drafter or a draft length that was not recorded."""
    missing = [name for name in menu.drafters if name not in traces.drafters]
    if missing:
        raise MenuError(f"the menu uses drafters that were not recorded: {', '.join(missing)}; record them too")
    if max(menu.lengths, default=0) > traces.max_k:
        longest = f"{max(menu.lengths)} tokens, the traces hold {traces.max_k}"
        raise MenuError(f"the menu drafts up to {longest}; record longer drafts")
