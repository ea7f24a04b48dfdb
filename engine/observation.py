"""What is known before an action is chosen. The live environment and the deployed controller both read it from
here, so that a policy sees in deployment what it saw in training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from engine.costs import CostTable
from engine.drafters.base import Signal
from engine.menu import Menu

MODEL = "model:"  # what names of drafters begin with that are models
SCHEMA_VERSION = 3

# name, unit, highest value: every feature lies between 0 and it.
_REQUEST_FEATURES = (
    ("prefill_pending", "1 before the first step, which also reads the prompt", 1.0),
    ("prompt_left", "log2(1 + prompt tokens outside the cached prefix)", 24.0),
    ("cached_fraction", "cached tokens over prompt tokens", 1.0),
    ("context", "log2(1 + tokens so far)", 24.0),
    ("generated", "log2(1 + tokens generated)", 24.0),
    ("left", "log2(1 + tokens left to generate)", 24.0),
    ("last_drafted", "tokens drafted in the last step", 64.0),
    ("last_accepted", "drafted tokens accepted in the last step", 64.0),
    ("acceptance_short", "accepted over drafted, moving average over about 3 drafts", 1.0),
    ("acceptance_long", "accepted over drafted, moving average over about 20 drafts", 1.0),
    ("target_top_probability", "the target's top probability where the newest token was chosen, if shown", 1.0),
    ("target_entropy", "entropy of the target there, nats, if shown", 20.0),
)
_SIGNAL_FEATURES = (
    ("match_length", "tokens of the text's end that occur earlier", 64.0),
    ("support", "earlier places that agree on the proposed token", 64.0),
    ("confidence", "the drafter's estimate that its next token is right", 1.0),
)
_COST_HIGHEST = 100.0


@dataclass(frozen=True, slots=True)
class Observation:
    """The state of a request before a step. Lengths in tokens; see `ObservationSchema.names` for the vector."""

    prefill_pending: bool
    prompt_tokens: int
    cached_tokens: int
    context: int
    generated: int
    left: int
    last_drafted: int
    last_accepted: int
    acceptance_short: float
    acceptance_long: float
    target_top_probability: float
    target_entropy: float
    signals: Mapping[str, Signal]


class ObservationSchema:
    """Names, units, bounds and order of the observation vector for a menu.

    The calibrated costs are part of the vector, because one policy serves many machines: v(k) for each draft length
    of the menu and the cost of one drafted token for each drafter, all over one plain step. They are 0 where nothing
    was calibrated.
    """

    def __init__(self, menu: Menu, costs: CostTable | None = None) -> None:
        self.drafters, self.shows_certainty = menu.drafters, shows_certainty(menu)
        fields = list(_REQUEST_FEATURES)
        for drafter in menu.drafters:
            fields += [(f"{drafter}.{name}", unit, high) for name, unit, high in _SIGNAL_FEATURES]
        fields += [(f"verify_cost.{k}", "verify pass over a plain step", _COST_HIGHEST) for k in menu.lengths]
        fields += [(f"draft_cost.{d}", "drafted token over a plain step", _COST_HIGHEST) for d in menu.drafters]
        fields.append(("prefill_cost", "prompt token over a plain step", _COST_HIGHEST))
        self.names = tuple(name for name, _, _ in fields)
        self.units = tuple(unit for _, unit, _ in fields)
        self.high = np.array([high for _, _, high in fields], dtype=np.float32)
        shown = _cost_features(menu, costs)
        self.num_costs = len(shown)  # the last features of the vector
        vector = np.array([0.0] * (len(self) - len(shown)) + shown, dtype=np.float32)
        self._costs = np.clip(vector, 0.0, self.high)

    def __len__(self) -> int:
        return len(self.names)

    def index(self, name: str) -> int:
        return self.names.index(name)

    def cost_vector(self) -> np.ndarray:
        """float32 `[len(self)]`: the costs in their places, and zeros."""
        return self._costs.copy()

    @staticmethod
    def log2(counts: np.ndarray) -> np.ndarray:
        """What the vector shows of counts, `[...]`: looked up, so that no bit differs from `vector`."""
        table = np.array([_log2(count) for count in range(int(counts.max(initial=0)) + 1)])
        shown: np.ndarray = table[np.maximum(0, counts)]
        return shown

    def vector(self, observation: Observation) -> np.ndarray:
        """The observation as float32 `[len(self)]`, clipped to the bounds."""
        o = observation
        values = [
            float(o.prefill_pending),
            _log2(o.prompt_tokens - o.cached_tokens) if o.prefill_pending else 0.0,
            o.cached_tokens / max(1, o.prompt_tokens),
            _log2(o.context),
            _log2(o.generated),
            _log2(o.left),
            o.last_drafted,
            o.last_accepted,
            o.acceptance_short,
            o.acceptance_long,
            o.target_top_probability,
            o.target_entropy,
        ]
        for drafter in self.drafters:
            signal = o.signals.get(drafter) or Signal()
            values += (signal.match_length, signal.support, signal.confidence)
        vector = self._costs.copy()
        vector[: len(values)] = values
        np.minimum(vector, self.high, out=vector)  # both together take half the time of clip
        return np.maximum(vector, 0.0, out=vector)


def shows_certainty(menu: Menu) -> bool:
    """Whether observations show how sure the target was. That takes a look at every logit, and beside a drafter that
    can tell how sure it is before it drafts it has decided nothing; a model cannot tell."""
    return any(drafter.startswith(MODEL) for drafter in menu.drafters)


def _cost_features(menu: Menu, costs: CostTable | None) -> list[float]:
    if costs is None:
        return [0.0] * (len(menu.lengths) + len(menu.drafters) + 1)
    verify = [costs.verify_ratio(k) for k in menu.lengths]
    return [*verify, *(costs.draft_ratio(d) for d in menu.drafters), costs.prefill_ratio]


def _log2(count: int) -> float:
    return math.log2(1 + count) if count > 0 else 0.0
