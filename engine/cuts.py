"""How doubtful a drafted token may be: one least confidence for all drafters of a menu, or one for each.

Drafters mean different things by confidence: an n-gram drafter counts, a model multiplies its own probabilities.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real

from engine.errors import SettingError
from engine.menu import Menu

Cut = float | Mapping[str, float]
"""From 0 to 1; a drafter that a mapping does not name is not cut at all."""


def cut_of(cut: Cut, drafter: str) -> float:
    """The least confidence that the tokens of a drafter's drafts may have."""
    return float(cut.get(drafter, 0.0) if isinstance(cut, Mapping) else cut)


def cuts_of_actions(cut: Cut, menu: Menu) -> Sequence[float]:
    """The same for each entry of a menu."""
    return tuple(cut_of(cut, entry.drafter) for entry in menu.actions)


def check_cut(cut: Cut, menu: Menu) -> None:
    """Raise `SettingError` for what is no share, or is a drafter's that the menu does not have."""
    if not isinstance(cut, Mapping):
        return _check_share(cut, "min_confidence")
    for name, value in cut.items():
        if name not in menu.drafters:
            known = ", ".join(menu.drafters) or "none"
            raise SettingError(f"min_confidence names drafter {name!r:.80}; the menu has {known}")
        _check_share(value, f"min_confidence of {name}")


def described(cut: Cut) -> str:
    """For people: `0.1`, or `0.1 of ngram, 0.35 of model:small`."""
    if not isinstance(cut, Mapping):
        return f"{cut:g}"
    return ", ".join(f"{value:g} of {name}" for name, value in cut.items()) or "0"


def _check_share(value: object, what: str) -> None:
    if not isinstance(value, Real) or isinstance(value, bool) or not 0.0 <= value <= 1.0:  # type: ignore[operator]
        raise SettingError(f"{what} is {value!r:.40}; give a number from 0 to 1")
