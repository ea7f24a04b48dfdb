"""Cost tables of machines that nobody measured: what a policy is trained under that is to serve many machines.

Each policy input that tells costs is drawn over the range of real machines (domain randomisation: Tobin, Fong, Ray,
Schneider, Zaremba, Abbeel 2017, "Domain randomization for transferring deep neural networks from simulation to the real
world"). A plain step is bound by reading weights; what k more rows add depends on the machine:

- flat, as on a GPU, where rows are almost free;
- linear, as with a kernel that handles each row by itself;
- in steps, as with a kernel that handles tiles of several rows;
- one price for leaving the single-row kernel, as in many CPU libraries, and little for each row after that.

The vectors of `HELD_OUT` are for judging what was learned: no draw is within `MARGIN` of one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from engine.costs import CostTable
from engine.menu import Menu
from engine.observation import MODEL

CONTEXTS = (128, 768)
MARGIN = 0.02  # mean difference over the verify ratios that a draw keeps from every held-out vector
CHEAPEST_DRAFT, DEAREST_DRAFT = 1e-4, 0.5  # plain steps a token: a look-up, a model of half the target's size
CHEAPEST_PREFILL, DEAREST_PREFILL = 2e-3, 0.3  # plain steps a token
Shape = Callable[[np.random.Generator, np.ndarray], np.ndarray]


def random_costs(rng: np.random.Generator, menu: Menu) -> CostTable:
    """A made-up machine for a menu; never one of `HELD_OUT`."""
    k = np.arange(max(menu.lengths, default=0) + 1)
    known = [_ratios(name, k) for name in HELD_OUT]
    while True:
        verify = _SHAPES[int(rng.integers(len(_SHAPES)))](rng, k)
        if all(np.abs(verify - other).mean() >= MARGIN for other in known) or len(k) == 1:
            break
    return _table(
        menu,
        verify,
        plain=float(_log_uniform(rng, 2e-3, 0.2)),
        growth=rng.uniform(1.0, 1.5),
        draft=_log_uniform(rng, CHEAPEST_DRAFT, DEAREST_DRAFT, len(menu.drafters)),
        prefill=float(_log_uniform(rng, CHEAPEST_PREFILL, DEAREST_PREFILL)),
        observe=rng.uniform(0.0, 0.03),
        machine="drawn at random",
    )


def held_out_costs(name: str, menu: Menu) -> CostTable:
    """The table of a vector of `HELD_OUT`, for a menu; a drafter that is a model costs more than one that looks up."""
    figures = HELD_OUT[name]
    draft = np.array([figures["model"] if d.startswith(MODEL) else figures["look-up"] for d in menu.drafters])
    verify = _ratios(name, np.arange(max(menu.lengths, default=0) + 1))
    return _table(menu, verify, 0.02, 1.1, draft, figures["prefill"], figures["observe"], name)


# name -> plain steps: of leaving one row, of each row, of drafted tokens, of a prompt token, of an observation
HELD_OUT: Mapping[str, Mapping[str, float]] = {
    "gpu-like": {"leave": 0.02, "row": 0.01, "look-up": 1e-3, "model": 0.15, "prefill": 4e-3, "observe": 0.01},
    "vllm-like": {"leave": 0.12, "row": 0.025, "look-up": 4e-3, "model": 0.2, "prefill": 8e-3, "observe": 0.005},
}


def _ratios(name: str, k: np.ndarray) -> np.ndarray:
    figures = HELD_OUT[name]
    return 1.0 + (k > 0) * figures["leave"] + k * figures["row"]


def _table(
    menu: Menu,
    verify: np.ndarray,
    plain: float,
    growth: float,
    draft: np.ndarray,
    prefill: float,
    observe: float,
    machine: str,
) -> CostTable:
    """Seconds of ratios: `plain` is the plain step at the shortest context, `growth` times it at the longest one."""
    mean = plain * (1.0 + growth) / 2.0  # what ratios refer to
    return CostTable(
        contexts=CONTEXTS,
        verify={length: (plain * ratio, plain * growth * ratio) for length, ratio in enumerate(verify.tolist())},
        spread=0.0,
        draft={name: mean * each for name, each in zip(menu.drafters, draft.tolist(), strict=True)},
        prefill=mean * prefill,
        machine=machine,
        draft_read={name: mean * min(each, prefill) for name, each in zip(menu.drafters, draft.tolist(), strict=True)},
        observe=mean * observe,
    )


def _flat(rng: np.random.Generator, k: np.ndarray) -> np.ndarray:
    return np.asarray(1.0 + k * rng.uniform(0.0, 0.04))


def _linear(rng: np.random.Generator, k: np.ndarray) -> np.ndarray:
    return np.asarray(1.0 + k * _log_uniform(rng, 0.04, 0.9))


def _steps(rng: np.random.Generator, k: np.ndarray) -> np.ndarray:
    rows = int(rng.integers(2, 9))
    return np.asarray(1.0 + k * rng.uniform(0.0, 0.05) + (k // rows) * rng.uniform(0.05, 0.8))


def _leave(rng: np.random.Generator, k: np.ndarray) -> np.ndarray:
    return np.asarray(1.0 + (k > 0) * rng.uniform(0.05, 1.2) + k * _log_uniform(rng, 0.005, 0.2))


_SHAPES: tuple[Shape, ...] = (_flat, _linear, _steps, _leave)


def _log_uniform(rng: np.random.Generator, low: float, high: float, size: int | None = None) -> np.ndarray:
    return np.asarray(np.exp(rng.uniform(np.log(low), np.log(high), size)))
