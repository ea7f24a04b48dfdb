"""Compiling with numba, once for each machine: the result is kept in the cache folder."""

from __future__ import annotations

import fcntl
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba

from engine.storage import cache_folder

config: Any = numba.config


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """`numba.njit`, cached under a name that changes with any source of the kernels.

    numba itself looks at one file only, and would take a stale result where another file that it inlines has changed.
    Division by zero gives infinity or NaN and raises nothing: broken weights show in the logits.
    """

    def compile_function(function: Callable[..., Any]) -> Any:
        before, config.CACHE_DIR = config.CACHE_DIR, str(FOLDER)
        try:
            dispatcher = numba.njit(cache=True, error_model="numpy", **options)(function)
        finally:
            config.CACHE_DIR = before
        cache = dispatcher._cache
        cache.save_overload = _alone(cache.save_overload)
        return dispatcher

    return compile_function


def _alone(save: Callable[..., None]) -> Callable[..., None]:
    """Let one process at a time keep a result. Of two that compile a function for other types at once, both would
    otherwise take the same file, and the next process would run one's code on the other's arrays."""

    def save_alone(*args: Any) -> None:
        FOLDER.mkdir(parents=True, exist_ok=True)
        with (FOLDER / "lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            save(*args)

    return save_alone


def _sources_digest() -> str:
    digest = hashlib.sha256(numba.__version__.encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


FOLDER = cache_folder() / "kernels" / _sources_digest()

# A maximum may be taken in any order. Sums may not: a function is compiled once for each place that it is inlined in,
# and each would use the freedom to reorder or to fuse in its own way. Two processes could then differ in a bit.
EXACT = {"nsz", "nnan", "ninf"}

plain = compiled()
parallel = compiled(parallel=True)
exact = compiled(fastmath=EXACT)
inline = compiled(inline="always")
