"""From a name to its controller."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable

from engine.controllers import (
    Controller,
    CostModelController,
    FixedController,
    HeuristicController,
    ThresholdController,
)
from engine.costs import CostTable
from engine.errors import ControllerError, MenuError
from engine.menu import Menu

Costs = Callable[[], CostTable]


def make_controller(name: str, menu: Menu, costs: Costs | None = None) -> Controller:
    """A controller by name, one of `CONTROLLER_NAMES`; `heuristic` alone starts at draft length 4.

    `costs` gives the calibrated costs to a controller that reckons with them; no other one calls it.
    Raises `ControllerError` for an unknown name or a wrong argument, `MenuError` for a k outside the menu.
    """
    kind, _, argument = name.partition(":")
    if kind not in _MAKERS:
        raise ControllerError(f"controller {name!r} is {_mistake(name, kind)}")
    if argument and kind in CONTROLLER_NAMES:
        raise ControllerError(f"controller {name!r} takes no argument; write {kind}")
    try:
        return _MAKERS[kind](menu, argument, costs)
    except (MenuError, ControllerError):
        raise
    except ValueError as error:
        raise ControllerError(f"controller {name!r} cannot be read; write {_form(kind)}") from error


CONTROLLER_NAMES = (
    "plain",
    "fresh",
    "fixed:K",
    "fixed:K:DRAFTER",
    "heuristic:START",
    "threshold:T",
    "threshold:T:DRAFTER",
    "cost-model",
)

_MAKERS: dict[str, Callable[[Menu, str, Costs | None], Controller]] = {
    "plain": lambda menu, *_: FixedController(menu, 0),
    "fresh": lambda menu, *_: FixedController(menu, 0, reuse=False),
    "fixed": lambda menu, argument, _: _fixed(menu, *argument.split(":", 1)),
    "heuristic": lambda menu, argument, _: HeuristicController(menu, int(argument or 4)),
    "threshold": lambda menu, argument, _: _threshold(menu, *argument.split(":", 1)),
    "cost-model": lambda menu, _, costs: _cost_model(menu, costs),
}


def _fixed(menu: Menu, k: str, drafter: str | None = None) -> Controller:
    return FixedController(menu, int(k), drafter)


def _threshold(menu: Menu, threshold: str, drafter: str | None = None) -> Controller:
    return ThresholdController(menu, float(threshold), drafter)


def _cost_model(menu: Menu, costs: Costs | None) -> Controller:
    if costs is None:
        raise ControllerError("the cost-model controller needs calibrated costs, and has none here; give an engine's")
    return CostModelController(menu, costs())


def _mistake(name: str, kind: str) -> str:
    """What is wrong with a name that no controller has."""
    if os.path.isfile(os.path.join(name, "policy.json")):
        return "the folder of a policy; give load_policy(...) of it, or --policy on a command line"
    close = difflib.get_close_matches(kind, _MAKERS, n=1)
    return "unknown; " + (f"did you mean {close[0]}?" if close else f"known: {', '.join(CONTROLLER_NAMES)}")


def _form(kind: str) -> str:
    return next((form for form in CONTROLLER_NAMES if form.partition(":")[0] == kind), kind)
