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

WINDOW = 24  # steps that a judgement looks back on
PROBE = 12  # steps that a probe gets before it is judged
FIRST_PAUSE, LONGEST_PAUSE = 24, 1536  # plain steps
TOLERANCE = 0.03  # slower than plain by this much is not worth acting on
DRIFT_WEIGHT = 0.1  # weight of the newest plain step in the estimate of the machine's drift


class Guard:
    """Wraps a controller and watches the realised time per token.

    The reference is the calibrated plain step at the step's context length, times how much slower or faster the plain
    steps seen lately were than calibrated: a machine that drifts slows both sides alike. First steps carry the
    prefill and are left out.

    Attributes:
        trips: how often the guard fell back.
        plain_steps: steps that it took plain instead of asking the controller.
    """

    needs_observation = True

    def __init__(self, controller: Controller, menu: Menu, costs: CostTable) -> None:
        self.controller = controller
        self.name = controller.name
        self.trips = 0
        self.plain_steps = 0
        self._plain = menu.plain
        self._costs = costs
        self._window: deque[tuple[float, float]] = deque(maxlen=WINDOW)  # (seconds, what plain would have taken)
        self._due = WINDOW
        self._pause = FIRST_PAUSE
        self._pausing = 0
        self._held_back = False
        self._drift = 1.0
        self._context = 0

    @property
    def min_confidence(self) -> float:
        return self.controller.min_confidence

    def choose(self, observation: Observation | None, mask: Sequence[bool]) -> int:
        assert observation is not None
        self._context = observation.context
        self._held_back = self._pausing > 0 and not observation.prefill_pending
        if self._held_back:
            self._pausing -= 1
            self.plain_steps += 1
            return self._plain
        return self.controller.choose(observation, mask)

    def observe(self, record: StepRecord) -> None:
        self.controller.observe(record)
        if record.prefilled:
            return
        plain = self._costs.plain_seconds(self._context)
        if record.k == 0:
            self._drift += DRIFT_WEIGHT * (record.seconds / plain - self._drift)
        if self._pausing == 0 and not self._held_back:
            self._window.append((record.seconds, plain * self._drift * len(record.tokens)))
            self._judge()

    def _judge(self) -> None:
        if len(self._window) < self._due:
            return
        spent = sum(seconds for seconds, _ in self._window)
        allowed = sum(plain for _, plain in self._window)
        noise = 2.0 * self._costs.spread / math.sqrt(len(self._window))
        if spent > allowed * (1.0 + TOLERANCE + noise):
            self._fall_back()
        elif len(self._window) == WINDOW:
            self._pause, self._due = FIRST_PAUSE, WINDOW

    def _fall_back(self) -> None:
        self.trips += 1
        self._pausing, self._pause = self._pause, min(self._pause * 2, LONGEST_PAUSE)
        self._due = PROBE
        self._window.clear()
