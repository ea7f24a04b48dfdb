"""Compiling with numba, once for each machine: the result is kept in the cache folder."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba

from engine.storage import cache_folder


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """`numba.njit`, cached under a name that changes with any source of the kernels.

    numba itself looks at one file only, and would take a stale result where another file that it inlines has changed.
    """
    return numba.njit(cache=True, **options)  # type: ignore[no-any-return]


def _sources_digest() -> str:
    digest = hashlib.sha256(numba.__version__.encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


numba.config.CACHE_DIR = str(cache_folder() / "kernels" / _sources_digest())  # type: ignore[attr-defined]

# Vector sums in one fixed order for a given length, fused multiply-add, no infinities.
FAST = {"contract", "reassoc", "nsz", "arcp", "nnan", "ninf"}
# A maximum may be taken in any order; nothing else changes.
EXACT = {"nsz", "nnan", "ninf"}

plain = compiled()
parallel = compiled(parallel=True)
fast = compiled(fastmath=FAST)
exact = compiled(fastmath=EXACT)
inline = compiled(inline="always")
