"""The finite list of actions that a controller picks from, written `fresh/0,reuse/0,reuse/4,reuse/ngram/8`."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import SupportsIndex

from engine.errors import MenuError

DEFAULT_LENGTHS = (0, 1, 2, 3, 4, 6, 8)
MAX_LENGTH = 64


@dataclass(frozen=True, slots=True)
class Action:
    """One menu entry. `reuse` (take the cached prefix) matters only in a request's first step."""

    reuse: bool
    k: int
    drafter: str = ""  # empty where k is 0: nobody drafts

    def __str__(self) -> str:
        prefix = "reuse" if self.reuse else "fresh"
        return f"{prefix}/{self.drafter}/{self.k}" if self.drafter else f"{prefix}/{self.k}"


@dataclass(frozen=True)
class Menu:
    """Actions in a fixed order: an action is named by its index, in policies and environments alike."""

    actions: tuple[Action, ...]

    def __post_init__(self) -> None:
        if not self.actions:
            raise MenuError("the menu is empty; give at least reuse/0")
        for action in self.actions:
            _check(action)
        if len(set(self.actions)) < len(self.actions):
            raise MenuError(f"the menu holds an entry twice: {self}; name each once")
        if Action(reuse=True, k=0) not in self.actions:
            raise MenuError(f"the menu {self} lacks reuse/0, the plain step; add it")

    def __len__(self) -> int:
        return len(self.actions)

    def __getitem__(self, index: int) -> Action:
        return self.actions[index]

    def __str__(self) -> str:
        return ",".join(str(action) for action in self.actions)

    @property
    def plain(self) -> int:
        """Index of the plain step: reuse/0."""
        return self.actions.index(Action(reuse=True, k=0))

    @property
    def lengths(self) -> tuple[int, ...]:
        """The draft lengths above 0, ascending."""
        return tuple(sorted({action.k for action in self.actions} - {0}))

    @property
    def drafters(self) -> tuple[str, ...]:
        """Names of the drafters, in order of first appearance."""
        return tuple(dict.fromkeys(action.drafter for action in self.actions if action.drafter))

    def find(self, k: int, drafter: str | None = None) -> int:
        """Index of the reusing entry with draft length `k`, of `drafter` or of the menu's first one.

        Raises `MenuError` where there is none.
        """
        for index, action in enumerate(self.actions):
            if action.reuse and action.k == k and (k == 0 or drafter in (None, action.drafter)):
                return index
        whose = f" of drafter {drafter}" if drafter else ""
        raise MenuError(f"draft length {k}{whose} is not in the menu {self}; choose one that is, or add it")

    def longest(self, drafter: str) -> int:
        """Index of a drafter's longest reusing entry; of the plain step where all of its entries are fresh.

        Raises `MenuError` for a drafter that is not in the menu.
        """
        if drafter not in self.drafters:
            raise MenuError(f"drafter {drafter!r} is not in the menu {self}; choose one that is, or add it")
        lengths = [each.k for each in self.actions if each.reuse and each.drafter == drafter]
        return self.find(max(lengths, default=0), drafter)

    def mask(self, can_reuse: bool) -> list[bool]:
        """Which entries may be chosen now.

        Where no cached prefix is at hand (none was found, or the request is under way), `fresh` and `reuse` do the
        same, so of such a pair only `reuse` is offered.
        """
        if can_reuse:
            return [True] * len(self)
        return [action.reuse or _reusing(action) not in self.actions for action in self.actions]

    def allowed(self, index: SupportsIndex, mask: Sequence[bool]) -> int:
        """`index` itself, or its reusing twin where the mask excludes it.

        Raises `MenuError` for what is no whole number, or outside the menu.
        """
        try:
            index = operator.index(index)
        except TypeError:
            raise MenuError(f"action {index!r:.40} is no index; choose must return that of a menu entry") from None
        if not 0 <= index < len(self):
            raise MenuError(f"action {index} is outside the menu of {len(self)} entries: {self}")
        return index if mask[index] else self.actions.index(_reusing(self.actions[index]))


def default_menu(drafters: Sequence[str], lengths: Iterable[int] = DEFAULT_LENGTHS) -> Menu:
    """fresh/0, reuse/0 and reuse/k for every drafter and length."""
    actions = [Action(reuse=False, k=0), Action(reuse=True, k=0)]
    actions += [Action(True, k, drafter) for drafter in drafters for k in lengths if k > 0]
    return Menu(tuple(actions))


def parse_menu(text: str, drafters: Sequence[str]) -> Menu:
    """Read `fresh/0,reuse/0,reuse/4,reuse/ngram/8`; an entry without a drafter means the first one.

    Raises `MenuError` naming the entry that cannot be read.
    """
    return Menu(tuple(_parse_action(entry.strip(), drafters) for entry in text.split(",")))


def _check(action: Action) -> None:
    if not 0 <= action.k <= MAX_LENGTH:
        raise MenuError(f"menu entry {str(action)!r} has draft length {action.k}; choose one from 0 to {MAX_LENGTH}")
    if bool(action.drafter) != (action.k > 0):
        raise MenuError(f"menu entry {str(action)!r} must name a drafter where it drafts, and only there")


def _parse_action(entry: str, drafters: Sequence[str]) -> Action:
    prefix, _, rest = entry.partition("/")
    drafter, _, length = rest.rpartition("/")
    if prefix not in ("fresh", "reuse") or not length.isdecimal():
        raise MenuError(f"menu entry {entry!r} cannot be read; write fresh/0, reuse/4 or reuse/ngram/4")
    k = int(length[-4300:])  # int() refuses longer ones
    if k > MAX_LENGTH or len(length) > 4300:
        raise MenuError(f"menu entry {entry!r} drafts more than {MAX_LENGTH} tokens; choose a shorter length")
    if k == 0:
        return Action(prefix == "reuse", 0)
    if not drafters:
        raise MenuError(f"menu entry {entry!r} drafts, and there is no drafter; name one or use k = 0")
    if drafter and drafter not in drafters:
        raise MenuError(f"menu entry {entry!r} names an unknown drafter; known: {', '.join(drafters)}")
    return Action(prefix == "reuse", k, drafter or drafters[0])


def _reusing(action: Action) -> Action:
    return Action(True, action.k, action.drafter)
