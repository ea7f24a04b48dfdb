"""Back to plain decoding where speculation turns out slower than it.

watch ---- slower than plain, beyond noise ----> pause (plain steps, the pause doubles)
  ^                                                |
  +------------- the pause is over ----------------+
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from engine.controllers import Controller
from engine.costs import CostTable
from engine.menu import Menu
from engine.observation import Observation
from engine.results import StepRecord

WINDOW = 24  # newest steps that a judgement looks at
PROBE = 12  # steps that a probe gets before it is judged
MEMORY = 384  # steps that the usual spread is taken from, and that a slow loss shows in
FIRST_PAUSE, LONGEST_PAUSE = 24, 1536  # plain steps
TOLERANCE = 0.03  # slower than plain by this much is not worth acting on
DEVIATIONS = 2.0  # standard errors that a loss must exceed besides
REFERENCE_EVERY = 64  # decoding steps without a plain one, after which one is taken to learn the machine's drift
DRIFT_WEIGHT = 0.1  # weight of the newest plain step in the estimate of the machine's drift


class Tally:
    """Sums over the newest `size` steps.

    Attributes:
        allowed: seconds that plain decoding would have taken for their tokens.
        lost: seconds beyond that; negative where the steps gained.
    """

    def __init__(self, size: int) -> None:
        self._steps: deque[tuple[float, float]] = deque()  # (lost, allowed)
        self._size = size
        self.allowed = self.lost = self._squares = 0.0

    def add(self, seconds: float, allowed: float) -> None:
        """Count a step, and forget the oldest where there are too many."""
        self._count(seconds - allowed, allowed, 1)
        self._steps.append((seconds - allowed, allowed))
        if len(self._steps) > self._size:
            self._count(*self._steps.popleft(), -1)

    @property
    def count(self) -> int:
        return len(self._steps)

    @property
    def deviation(self) -> float:
        """Standard deviation of one step's loss, seconds; 0 for fewer than two steps."""
        squares = self._squares - self.lost**2 / max(1, self.count)
        return math.sqrt(max(0.0, squares) / max(1, self.count - 1))

    def _count(self, lost: float, allowed: float, sign: int) -> None:
        self.lost += sign * lost
        self.allowed += sign * allowed
        self._squares += sign * lost**2


class Guard:
    """Wraps a controller and watches the realised time per token.

    The reference is the calibrated plain step at the step's context length, bookkeeping included, times how much slower
    or faster the plain steps seen lately were than calibrated: a machine that drifts slows both sides alike. A
    controller that never decodes plainly is made to once in 64 steps, so that drift is seen. First steps carry the
    prefill and are left out.

    A loss counts where it exceeds the tolerance and two standard errors. These come from the controller's own steps
    since it was last resumed, so that acceptance that comes in bursts is no alarm, and are never below what the cost
    table tells of the machine. The newest steps are judged, and all that are remembered: a small loss shows late.
    Pauses grow until a gain exceeds two standard errors.

    Attributes:
        trips: how often the guard fell back.
        plain_steps: steps that it took plain instead of asking the controller.
    """

    def __init__(self, controller: Controller, menu: Menu, costs: CostTable) -> None:
        self.controller = controller
        self.name = controller.name
        self.trips = 0
        self.plain_steps = 0
        self._plain = menu.plain
        self._costs = costs
        self._window, self._memory = Tally(WINDOW), Tally(MEMORY)
        self._due = WINDOW
        self._pause = FIRST_PAUSE
        self._pausing = 0
        self._held_back = False
        self._drift = 1.0
        self._since_plain = 0  # decoding steps

    @property
    def min_confidence(self) -> float:
        return self.controller.min_confidence

    @property
    def needs_observation(self) -> bool:
        """As the controller; False where it will not be asked."""
        return self.controller.needs_observation and not self._holds_back

    def choose(self, observation: Observation | None, mask: Sequence[bool]) -> int:
        self._held_back = self._holds_back
        if not self._held_back:
            return self.controller.choose(observation, mask)
        self._pausing = max(0, self._pausing - 1)
        self.plain_steps += 1
        return self._plain

    def observe(self, record: StepRecord) -> None:
        self.controller.observe(record)
        if record.first:
            return
        plain = self._costs.step_seconds(record.context, 1, observed=False).total
        self._since_plain += 1
        if record.k == 0:
            deciding = 0.0 if self._held_back or not self.controller.needs_observation else self._costs.observe
            self._drift += DRIFT_WEIGHT * ((record.seconds - deciding) / plain - self._drift)
            self._since_plain = 0
        if not self._held_back:
            allowed = plain * self._drift * len(record.tokens)
            for tally in (self._window, self._memory):
                tally.add(record.seconds, allowed)
            self._judge()

    @property
    def _holds_back(self) -> bool:
        return self._pausing > 0 or self._since_plain >= REFERENCE_EVERY

    def _judge(self) -> None:
        if self._memory.count < self._due:
            return
        if self._loses(self._window) or self._loses(self._memory):
            self._fall_back()
        elif self._memory.count >= WINDOW:
            self._due = WINDOW
            if -self._memory.lost > self._noise(self._memory):  # it gains, beyond doubt
                self._pause = FIRST_PAUSE

    def _loses(self, steps: Tally) -> bool:
        """Whether these steps took longer than plain decoding would have, beyond the tolerance and noise."""
        return steps.lost > TOLERANCE * steps.allowed + self._noise(steps)

    def _noise(self, steps: Tally) -> float:
        """How far chance may move what these steps lost, seconds."""
        own = max(self._window.deviation, self._memory.deviation)
        machine = self._costs.deviation * steps.allowed / steps.count
        return DEVIATIONS * max(own, machine) * math.sqrt(steps.count)

    def _fall_back(self) -> None:
        self.trips += 1
        self._pausing, self._pause = self._pause, min(self._pause * 2, LONGEST_PAUSE)
        self._due = PROBE
        self._window, self._memory = Tally(WINDOW), Tally(MEMORY)
