"""The stages of a run as its user sees them: what is being done, and how long it took."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def stage(name: str, what: str) -> Iterator[None]:
    """Say on standard error what begins, and when it has ended well, how long it took."""
    say(f"{name}: {what}")
    started = time.perf_counter()
    yield
    say(f"{name}: done in {time.perf_counter() - started:.1f} s")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
