"""Which split a conversation belongs to, and names for what was mistyped."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Sequence

SPLITS = ("train", "validation", "test")
# Upper bounds in percent of the hash's range: 60 % train, 15 % validation, 25 % test.
_BOUNDS = (60, 75, 100)


def hashed_split(group: str) -> str:
    """The split of a group whose row names none.

    It depends on the group's id alone, and that of a row without one on its content: when rows are added or moved, no
    other one changes its split.
    """
    digest = hashlib.sha256(group.encode("utf-8")).digest()
    percent = int.from_bytes(digest[:8], "big") % 100
    return next(split for split, bound in zip(SPLITS, _BOUNDS, strict=True) if percent < bound)


def unknown_name(what: str, name: str, known: Sequence[str]) -> tuple[str, str]:
    """Cause and mend of an error about a name that is not among `known`."""
    close = difflib.get_close_matches(name, known, n=1)
    guess = f"did you mean {close[0]!r}? " if close else ""
    return f"unknown {what} {name[:40]!r}", f"{guess}choose one of {', '.join(known)}"
