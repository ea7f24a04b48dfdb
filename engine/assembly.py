"""What an engine is made of: settings checked, and those that were left open taken from the policy or the defaults."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from engine.drafters import Drafter
from engine.drafters.factory import DrafterPlan, plan_drafter
from engine.errors import DrafterError, PolicyError, SettingError
from engine.exactness import settle_exact
from engine.menu import Menu, default_menu, parse_menu
from engine.models import LoadedModel
from engine.policy import Policy
from engine.rounding import Rounding, cached_rounding
from engine.sampling import whole

# Physical memory: a budget beyond it could never be allocated.
MOST_CACHE_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 1 << 40

Drafters = str | Drafter | Sequence[str | Drafter]


def checked_cache_bytes(count: object) -> int:
    """The budget as an int. Raises `SettingError` where it is not whole, or more than this machine could hold."""
    budget = whole(count)
    if not 0 <= budget <= MOST_CACHE_BYTES:
        most = f"{MOST_CACHE_BYTES}, all memory here"
        raise SettingError(f"prefix_cache_bytes is {count!r}; give a whole number from 0 (no cache) to {most}")
    return budget


def list_drafters(drafter: Drafters | None, controller: object) -> list[str | Drafter]:
    """The drafters that were given, else the policy's, else `ngram`."""
    if drafter is None:
        return list(controller.menu.drafters) if isinstance(controller, Policy) else ["ngram"]
    if isinstance(drafter, Sequence) and not isinstance(drafter, str):
        return list(drafter)
    return [drafter]


def plan_drafters(drafters: Sequence[str | Drafter], target: LoadedModel) -> dict[str, DrafterPlan]:
    """A plan for each drafter, by name. Raises `DrafterError` for names that a menu could not tell apart, and for an
    object that is no drafter."""
    plans: dict[str, DrafterPlan] = {}
    for drafter in drafters:
        name = drafter if isinstance(drafter, str) else _own_name(drafter)
        if "," in name:
            raise DrafterError(f"drafter {name!r} has a comma in its name, which ends a menu entry; rename it")
        if name in plans:
            raise DrafterError(f"two drafters are named {name!r}; name each once")
        plans[name] = plan_drafter(drafter, target)
    return plans


def _own_name(drafter: object) -> str:
    """The name of an object that drafts."""
    name = getattr(drafter, "name", None)
    if not (isinstance(name, str) and name and callable(getattr(drafter, "begin", None))):
        raise DrafterError(f"{type(drafter).__name__} is no drafter; give a name, or define name (some text) and begin")
    return name


def settle_menu(menu: Menu | str | None, controller: object, drafters: Mapping[str, object]) -> Menu:
    """The menu that was given, else the policy's, else the default one for these drafters."""
    names = tuple(drafters)
    if isinstance(menu, str):
        return parse_menu(menu, names)
    if menu is None and isinstance(controller, Policy):
        missing = [name for name in controller.menu.drafters if name not in names]
        if missing:
            raise PolicyError(f"the policy uses drafters that the engine lacks: {', '.join(missing)}; add them")
        return controller.menu
    missing = [name for name in menu.drafters if name not in names] if menu else []
    if missing:
        raise DrafterError(f"the menu uses drafters that the engine lacks: {', '.join(missing)}; add them")
    return menu or default_menu(names)


def settle_rounding(exact: str | None, target: LoadedModel, menu: Menu) -> Rounding | None:
    """The rounding of this engine where its mode is guarded. Raises `SettingError` for a mode that it lacks."""
    if settle_exact(exact, target.runner, target.precision) != "guarded":
        return None
    return cached_rounding(target.runner, target.tokenizer, menu.lengths, target.device)


def engine_line(target: LoadedModel, drafters: Mapping[str, Drafter]) -> str:
    """What costs depend on besides the machine, in one line: target, precision, kind of runner, drafters.

    The exactness mode changes the cost of a pass only where it changes the runner.
    """
    named = [" ".join(filter(None, (name, getattr(one, "digest", "")))) for name, one in drafters.items()]
    precision = f"{target.precision} bitwise" if target.runner.bitwise else target.precision
    return f"target {target.digest}, {precision}, drafters {', '.join(sorted(named)) or 'none'}"
