"""Faster forms of what models are made of, put in place of the plain ones."""

from __future__ import annotations

import os

# numba takes all processors unless it is told otherwise before it is imported, and makes torch take them too. Two
# threads on one processor wait for each other's time slices: a pass of a small model then takes fifty times as long.
if os.environ.get("OMP_NUM_THREADS", "").isdecimal():
    os.environ.setdefault("NUMBA_NUM_THREADS", str(max(1, int(os.environ["OMP_NUM_THREADS"]))))
