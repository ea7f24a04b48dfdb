"""Where the time of a pass goes inside of a lean runner: a clock read around each compiled loop, while it runs.

The runner's compiled functions call others by name: products, attention, what lies between. For the measurement each
is compiled once more from its own source, with those names bound to forms that read the processor's cycle counter
before and after. Nothing else changes, so the parts are those of the real pass on the real arrays.
"""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import numpy as np

PRODUCTS, ATTENTION, SMALL = PARTS = ("matrix products", "attention", "small operators")
_OVERLOADED = ("linear", "swiglu")  # of `engine.kernels.linear`: the compiler picks their form by the weight
WARM_UP_SECONDS = 0.05  # over which the counter is held against the clock


def part_of(name: str) -> str:
    """The part that a compiled loop belongs to, by its name. SwiGLU and int8's quantising are within their products."""
    if name.startswith(("multiply", "linear", "swiglu", "dot", "product")):
        return PRODUCTS
    return ATTENTION if name.startswith("attend") else SMALL


class CycleLedger:
    """Cycles by part, which compiled code adds to."""

    def __init__(self) -> None:
        self.cycles = np.zeros(len(PARTS), np.int64)

    def address(self, part: str) -> int:
        return int(self.cycles.ctypes.data) + self.cycles.itemsize * PARTS.index(part)

    def seconds(self, cycles_per_second: float) -> dict[str, float]:
        return {part: float(count) / cycles_per_second for part, count in zip(PARTS, self.cycles, strict=True)}


def can_look_inside(runner: Any) -> bool:
    """Whether the runner's module holds compiled loops, on a processor whose counter anybody may read."""
    return platform.machine() in {"x86_64", "AMD64"} and bool(_compiled_names(sys.modules[type(runner).__module__]))


class InsideLook:
    """The compiled functions of a runner's module with clocks in them, made once: the first passes compile.

    Attributes:
        ledger: what passes add to while the look lasts.
    """

    def __init__(self, runner: Any) -> None:
        self._module: Any = sys.modules[type(runner).__module__]
        self._plain = {name: getattr(self._module, name) for name in _compiled_names(self._module)}
        self.ledger = CycleLedger()
        self._timed = {name: _with_clocks(function, self.ledger) for name, function in self._plain.items()}

    @contextmanager
    def looking(self) -> Iterator[CycleLedger]:
        """While this lasts, passes of the runner's kind are counted by part."""
        try:
            self._bind(self._timed)
            yield self.ledger
        finally:
            self._bind(self._plain)

    def _bind(self, functions: dict[str, Any]) -> None:
        for name, function in functions.items():
            setattr(self._module, name, function)


def cycles_per_second() -> float:
    """How fast the counter runs."""
    import numba

    counter, _ = _intrinsics()

    @numba.njit  # type: ignore[untyped-decorator, unused-ignore]
    def read() -> Any:
        return counter()

    read()
    started, before = time.perf_counter(), read()
    while time.perf_counter() - started < WARM_UP_SECONDS:
        pass
    cycles, seconds = read() - before, time.perf_counter() - started
    return float(cycles / seconds)


def _compiled_names(module: Any) -> list[str]:
    if "numba" not in sys.modules:
        return []
    from numba.core.dispatcher import Dispatcher

    return [name for name, value in vars(module).items() if isinstance(value, Dispatcher)]


def _with_clocks(function: Any, ledger: CycleLedger) -> Any:
    """A compiled function once more, with the compiled functions that it calls timed."""
    import numba
    from numba.core.dispatcher import Dispatcher

    plain = function.py_func
    names = dict(plain.__globals__)
    for name in plain.__code__.co_names:
        if isinstance(names.get(name), Dispatcher) or name in _OVERLOADED:
            names[name] = _timed(names[name], ledger.address(part_of(name)))
    return numba.njit(FunctionType(plain.__code__, names, plain.__name__, plain.__defaults__))


def _timed(function: Any, address: int) -> Any:
    import numba

    read, add = _intrinsics()

    @numba.njit  # type: ignore[untyped-decorator, unused-ignore]
    def timed(*args: Any) -> Any:
        started = read()
        result = function(*args)
        add(address, read() - started)
        return result

    return timed


def _intrinsics() -> tuple[Any, Any]:
    """`read()`: the cycle counter; `add(address, amount)`: to an int64 in memory."""
    from llvmlite import ir
    from numba import types
    from numba.extending import intrinsic

    integer = ir.IntType(64)

    @intrinsic  # type: ignore[untyped-decorator, unused-ignore]
    def read(context: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            kind = ir.FunctionType(integer, [])
            return builder.call(builder.module.declare_intrinsic("llvm.readcyclecounter", fnty=kind), [])

        return types.int64(), generate

    @intrinsic  # type: ignore[untyped-decorator, unused-ignore]
    def add(context: Any, address: Any, amount: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            place = builder.inttoptr(args[0], integer.as_pointer())
            builder.store(builder.add(builder.load(place), args[1]), place)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), generate

    return read, add
