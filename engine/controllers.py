"""Who chooses the next menu entry. Every baseline, bandit and policy is a controller.

A controller of one's own needs `choose`; an engine fills in the other members, or `BaseController` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any, Protocol

from engine.cost_model import CostModel
from engine.costs import CostTable
from engine.errors import ControllerError, MenuError
from engine.menu import Menu
from engine.observation import Observation
from engine.results import StepRecord


class Controller(Protocol):
    """Decides each step of each request.

    Attributes:
        name: how tables and records call it.
        min_confidence: the draft that was chosen last ends before the first token that its drafter trusts less.
        needs_observation: whether `choose` reads its observation; where not, the decoder saves its cost and hands
            over None.
    """

    name: str

    @property
    def needs_observation(self) -> bool: ...

    @property
    def min_confidence(self) -> float: ...

    def choose(self, observation: Observation | None, mask: Sequence[bool]) -> int:
        """Index of a menu entry whose mask is true."""
        ...

    def observe(self, record: StepRecord) -> None:
        """Learn how the step that was chosen turned out."""
        ...


class BaseController:
    """Defaults for a controller that neither learns nor limits its drafts."""

    name: str = "controller"
    min_confidence: float = 0.0
    needs_observation: bool = False

    def observe(self, record: StepRecord) -> None:
        return None


class Foreign(Protocol):
    """Any object that chooses: the least that an engine takes as a controller."""

    def choose(self, observation: Any, mask: Sequence[bool]) -> int: ...


class ForeignController(BaseController):
    """A foreign object as a controller.

    What it lacks is filled in: its type as name, every observation, drafts of any confidence, nothing to learn.
    """

    def __init__(self, inner: Foreign) -> None:
        self.inner = inner
        self.name = str(getattr(inner, "name", type(inner).__name__))

    @property
    def needs_observation(self) -> bool:  # type: ignore[override]
        return bool(getattr(self.inner, "needs_observation", True))

    @property
    def min_confidence(self) -> float:  # type: ignore[override]
        return float(getattr(self.inner, "min_confidence", 0.0))

    def choose(self, observation: Observation | None, mask: Sequence[bool]) -> int:
        return self.inner.choose(observation, mask)

    def observe(self, record: StepRecord) -> None:
        if hasattr(self.inner, "observe"):
            self.inner.observe(record)


def completed(controller: Controller | Foreign) -> Controller:
    """The controller itself where it has all members, else wrapped.

    Raises `ControllerError` where it cannot choose, or where what it has of the other members is of no use.
    """
    if isinstance(controller, type):
        raise ControllerError(f"{controller.__name__} is a class; give an object of it")
    kind = type(controller).__name__
    if not callable(getattr(controller, "choose", None)):
        raise ControllerError(f"{kind} is no controller; give a name, a policy, or define choose")
    if not callable(getattr(controller, "observe", completed)):
        raise ControllerError(f"observe of {kind} cannot be called; make it a method, or leave it out")
    cut = getattr(controller, "min_confidence", 0.0)
    real = isinstance(cut, Real) and not isinstance(cut, bool)
    if not (real and 0.0 <= cut <= 1.0):
        raise ControllerError(f"min_confidence of {kind} is {cut!r:.40}; give a number from 0 to 1")
    members = ("name", "needs_observation", "min_confidence", "observe")
    if all(hasattr(controller, member) for member in members):
        return controller  # type: ignore[return-value]
    return ForeignController(controller)


class FixedController(BaseController):
    """The same draft length at every step; with `reuse=False` the cached prefix is ignored too."""

    def __init__(self, menu: Menu, k: int, drafter: str | None = None, reuse: bool = True) -> None:
        self._action = menu.find(k, drafter)
        self.name = fixed_name(menu, self._action) if reuse else "fresh"
        self._first = self._action if reuse else _fresh(menu)

    def choose(self, observation: Observation | None, mask: Sequence[bool]) -> int:
        return self._first if mask[self._first] else self._action


class HeuristicController(BaseController):
    """The schedule of transformers' assisted generation: two more after full acceptance, else one fewer.

    Source: `num_assistant_tokens_schedule="heuristic"`; the length carries on from request to request.
    """

    name = "heuristic"

    def __init__(self, menu: Menu, start: int = 4) -> None:
        if not menu.lengths:
            raise ControllerError("the heuristic needs draft lengths in the menu; add some, or use plain")
        self._actions = {k: menu.find(k) for k in menu.lengths}
        if start < 1:
            raise ControllerError(f"the heuristic starts at draft length {start}; give at least 1")
        self._length = min(start, max(menu.lengths))

    def choose(self, observation: Observation | None, mask: Sequence[bool]) -> int:
        return self._actions[min(self._actions, key=lambda k: (abs(k - self._length), k))]

    def observe(self, record: StepRecord) -> None:
        if not record.drafted:
            return
        if record.accepted == record.drafted:
            self._length = min(self._length + 2, max(self._actions))
        else:
            self._length = max(1, self._length - 1)


class ThresholdController(BaseController):
    """Drafts on while the drafter is confident: its longest draft in the menu, cut at the first doubtful token.

    Source: the dynamic draft length of transformers (`assistant_confidence_threshold`) and of Kangaroo
    (arXiv 2404.18911).
    """

    def __init__(self, menu: Menu, threshold: float, drafter: str | None = None) -> None:
        if not 0.0 <= threshold <= 1.0:
            raise ControllerError(f"the confidence threshold is {threshold}; give a number from 0 to 1")
        drafter = next(iter(menu.drafters), None) if drafter is None else drafter
        self._action = menu.plain if drafter is None else menu.longest(drafter)
        self.name = threshold_name(menu, self._action, threshold)
        self.min_confidence = threshold

    def choose(self, observation: Observation | None, mask: Sequence[bool]) -> int:
        return self._action


class CostModelController(BaseController):
    """Takes the draft length that the closed form calls best, see `engine.cost_model`.

    What it has learned of each drafter's acceptance carries on from request to request.
    """

    name = "cost-model"

    def __init__(self, menu: Menu, costs: CostTable) -> None:
        self._model = CostModel(menu, costs)

    def choose(self, observation: Observation | None, mask: Sequence[bool]) -> int:
        return self._model.best()

    def observe(self, record: StepRecord) -> None:
        self._model.learn(record.drafter, record.drafted, record.accepted)


def fixed_name(menu: Menu, action: int) -> str:
    """How `make_controller` calls an entry that is taken throughout: with its drafter where the menu has several."""
    entry = menu[action]
    if not entry.k:
        return "plain"
    return f"fixed:{entry.k}" + (f":{entry.drafter}" if len(menu.drafters) > 1 else "")


def threshold_name(menu: Menu, action: int, threshold: float) -> str:
    """The same of an entry whose drafts are cut below a confidence."""
    drafter, number = menu[action].drafter, repr(float(threshold)).removesuffix(".0")
    return f"threshold:{number}" + (f":{drafter}" if drafter and len(menu.drafters) > 1 else "")


def _fresh(menu: Menu) -> int:
    for index, action in enumerate(menu.actions):
        if not action.reuse and action.k == 0:
            return index
    raise MenuError(f"the menu {menu} lacks fresh/0; add it, or use plain")
