"""Many recorded requests stepped at once: what `ReplaySession` does for one, in numpy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.costs import CostTable
from engine.cuts import Cut, check_cut, cut_of
from engine.errors import MenuError
from engine.menu import Menu
from engine.observation import ObservationSchema
from engine.session import LONG_AVERAGE, SHORT_AVERAGE
from envs.prices import MOST_LAYOUTS, Prices
from envs.replay_session import check_recorded
from envs.trace import FlatTraces, TraceSet


@dataclass(frozen=True, eq=False)
class Steps:
    """What a step of every lane did; all arrays `[B]`, named as in `StepRecord`. `plain` is the calibrated plain step's
    seconds at the context, `done` whether the request has ended."""

    request: np.ndarray
    seconds: np.ndarray
    plain: np.ndarray
    tokens: np.ndarray
    drafted: np.ndarray
    accepted: np.ndarray
    prefilled: np.ndarray
    cached: np.ndarray
    first: np.ndarray
    done: np.ndarray


class Lanes:
    """`size` requests under way at once. `begin` puts a request into a lane; `step` moves every lane.

    Drafts end before the first token that their drafter trusts less than `min_confidence`.
    """

    def __init__(self, traces: TraceSet, menu: Menu, size: int, min_confidence: Cut = 0.0) -> None:
        check_recorded(traces, menu)
        check_cut(min_confidence, menu)
        self.menu, self.schema, self.size = menu, ObservationSchema(menu), size
        self._flat, self._lagging = traces.flat(), np.array([False, *traces.lagging])
        self._prices = Prices(size, traces.drafters, max(menu.lengths, default=0))
        self._lanes = np.arange(size)
        self._menu_tables(traces)
        self._rows = _request_rows(self._flat, self.schema, traces)
        nobody = np.zeros((1, len(self._flat.tokens)), np.uint8)
        self._proposed = np.concatenate([nobody, self._flat.proposed]).astype(np.int64)
        self._matched = np.concatenate([nobody, self._flat.matched]).astype(np.int64)
        self._trusted = np.concatenate([nobody, trusted(traces, min_confidence)])
        first = self._flat.confidences[..., :1].sum(axis=-1)
        self._first_confidence = np.concatenate([nobody.astype(np.float64), first])
        self.request, self.position = np.zeros(size, np.int64), np.zeros(size, np.int64)
        self._cached = np.zeros(size, np.int64)  # found, and after the first step: taken
        self._last = np.zeros((2, size), np.int64)  # drafted, accepted
        self._acceptance = np.zeros((2, size))  # short and long average
        self._shown = np.zeros((size, 1 + len(traces.drafters)))
        self._read = np.zeros((size, 1 + len(traces.drafters)), np.int64)
        self._costs = np.zeros((size, len(self.schema)), np.float32)
        self._cost_vectors: dict[int, tuple[CostTable, np.ndarray]] = {}  # by identity, as in `Prices`

    def begin(self, lane: int, request: int, costs: CostTable) -> None:
        """Put a request into a lane, with what steps cost there."""
        self.request[lane], self.position[lane] = request, 0
        self._cached[lane] = self._read[lane] = self._flat.cached_tokens[request]
        self._last[:, lane], self._acceptance[:, lane], self._shown[lane] = 0, 0.5, 0.0
        self._prices.put(lane, costs)
        self._costs[lane] = self._cost_vector(costs)

    def masks(self) -> np.ndarray:
        """bool `[B, actions]`: which entries may be chosen now."""
        can_reuse = (self.position == 0) & (self._cached > 0)
        masks: np.ndarray = can_reuse[:, None] | self._offered
        return masks

    def observations(self) -> np.ndarray:
        """float32 `[B, features]`, equal to the live ones to the bit; zeros where the request has ended."""
        at = np.minimum(self.position, self._flat.length[self.request] - 1)
        vectors: np.ndarray = self._rows[self._flat.offsets[self.request] + at]
        place = self._places
        vectors[:, place["cached_fraction"]] = self._cached / np.maximum(1, self._flat.prompt_tokens[self.request])
        vectors[:, place["last_drafted"]], vectors[:, place["last_accepted"]] = self._last
        vectors[:, place["acceptance_short"]], vectors[:, place["acceptance_long"]] = self._acceptance
        for drafter, column in self._shown_in:
            vectors[:, column] = self._shown[:, drafter]
        vectors = np.clip(vectors, 0.0, self.schema.high, out=vectors)
        vectors[:, self._cost_columns] = self._costs[:, self._cost_columns]
        vectors[self.position >= self._flat.length[self.request]] = 0.0
        return vectors

    def step(self, actions: np.ndarray, rng: np.random.Generator | None = None, observed: bool = True) -> Steps:
        """One step of every lane that has not ended; the others stay as they are, with zeros to show.

        A masked action acts as its reusing twin. Latencies are medians, or drawn by `rng`. Raises `MenuError` for an
        action outside the menu.
        """
        actions = self._allowed(np.asarray(actions))
        flat, request, position, lanes = self._flat, self.request, self.position, self._lanes
        prompt, length = flat.prompt_tokens[request], flat.length[request]
        running, first, context = position < length, position == 0, prompt + position
        here = flat.offsets[request] + np.minimum(position, length - 1)
        asked = np.minimum(self._k[actions], flat.limit[request] - position - 1)
        drafter = np.where(running & (asked > 0), self._drafter[actions], 0)
        longest = np.minimum(asked, self._proposed[drafter, here]) * (drafter > 0)
        drafted = np.minimum(longest, self._trusted[drafter, here])
        doubted = drafted < longest  # one more was drafted, and cut off
        accepted = np.minimum(drafted, self._matched[drafter, here])
        committed = np.minimum(accepted + 1, length - position)
        cached = np.where(first & self._reuse[actions], self._cached, 0)
        read = self._catch_up(drafter, here, context, drafted + doubted, accepted)
        seconds = self._prices.step(lanes, context, committed, drafter, drafted, read, doubted, observed)
        seconds = seconds + first * self._prices.first(lanes, prompt, cached)
        if rng is not None:
            seconds = seconds * self._prices.noise(lanes, rng)
        self._remember(running, first, drafted, accepted, cached)
        position += committed
        return Steps(
            request=request.copy(),
            seconds=seconds * running,
            plain=self._prices.plain(lanes, context),
            tokens=committed,
            drafted=drafted,
            accepted=accepted,
            prefilled=np.where(first, prompt - cached - 1, 0),
            cached=cached,
            first=first,
            done=position >= length,
        )

    def _cost_vector(self, costs: CostTable) -> np.ndarray:
        known = self._cost_vectors.get(id(costs))
        if known is None:
            if len(self._cost_vectors) >= MOST_LAYOUTS:
                self._cost_vectors.clear()
            known = self._cost_vectors[id(costs)] = (costs, ObservationSchema(self.menu, costs).cost_vector())
        return known[1]

    def _menu_tables(self, traces: TraceSet) -> None:
        actions, numbers = self.menu.actions, {name: 1 + i for i, name in enumerate(traces.drafters)}
        self._k = np.array([action.k for action in actions])
        self._reuse = np.array([action.reuse for action in actions])
        self._drafter = np.array([numbers.get(action.drafter, 0) for action in actions])
        self._offered = np.array(self.menu.mask(can_reuse=False))
        self._twin = np.array([self.menu.allowed(i, self._offered.tolist()) for i in range(len(actions))])
        names = self.schema.names
        self._places = {name: place for place, name in enumerate(names)}
        self._shown_in = [
            (numbers[name], self._places[f"{name}.confidence"])
            for name in self.menu.drafters
            if traces.lagging[numbers[name] - 1]
        ]
        self._cost_columns = slice(len(names) - self.schema.num_costs, len(names))

    def _allowed(self, actions: np.ndarray) -> np.ndarray:
        if actions.dtype.kind not in "iu":
            raise MenuError(f"actions are of type {actions.dtype}; give indices of the menu")
        if actions.shape != (self.size,) or (actions < 0).any() or (actions >= len(self.menu)).any():
            raise MenuError(f"actions {actions} are not {self.size} indices of the menu of {len(self.menu)} entries")
        can_reuse = (self.position == 0) & (self._cached > 0)
        return np.where(can_reuse, actions, self._twin[actions])

    def _catch_up(
        self, drafter: np.ndarray, here: np.ndarray, context: np.ndarray, passes: np.ndarray, accepted: np.ndarray
    ) -> np.ndarray:
        """Tokens that lagging drafters read beside the newest; what they show and have read is brought up to date."""
        lanes = self._lanes
        drafts = self._lagging[drafter] & (passes > 0)
        behind = np.where(drafts, np.maximum(0, context - 1 - self._read[lanes, drafter]), 0)
        self._read[lanes[drafts], drafter[drafts]] = (context + np.minimum(accepted, passes - 1))[drafts]
        self._shown[lanes[drafts], drafter[drafts]] = self._first_confidence[drafter, here][drafts]
        return behind

    def _remember(
        self, running: np.ndarray, first: np.ndarray, drafted: np.ndarray, accepted: np.ndarray, cached: np.ndarray
    ) -> None:
        self._cached = np.where(first, cached, self._cached)
        self._last = np.where(running, [drafted, accepted], self._last)
        rate = accepted / np.maximum(1, drafted)
        for average, weight in zip(self._acceptance, (SHORT_AVERAGE, LONG_AVERAGE)):
            average += np.where(drafted > 0, weight * (rate - average), 0.0)


def trusted(traces: TraceSet, min_confidence: Cut) -> np.ndarray:
    """int64 `[D, N]`: how many tokens each drafter proposes before the first that it trusts less."""
    flat, least = traces.flat(), np.array([cut_of(min_confidence, name) for name in traces.drafters])
    doubtful = flat.confidences < least[:, None, None]
    return np.where(doubtful.any(axis=-1), doubtful.argmax(axis=-1), flat.proposed.astype(np.int64))


def _request_rows(flat: FlatTraces, schema: ObservationSchema, traces: TraceSet) -> np.ndarray:
    """float32 `[N, features]`: what observations show of a position whatever was done before; zeros elsewhere."""
    place = {name: column for column, name in enumerate(schema.names)}
    request = np.repeat(np.arange(len(flat.length)), flat.length)
    position = np.arange(len(request)) - flat.offsets[request]
    prompt = flat.prompt_tokens[request]
    first = position == 0
    rows = np.zeros((len(request), len(schema)), np.float32)
    rows[:, place["prefill_pending"]] = first
    rows[:, place["prompt_left"]] = schema.log2(prompt - flat.cached_tokens[request]) * first
    rows[:, place["context"]] = schema.log2(prompt + position)
    rows[:, place["generated"]] = schema.log2(position)
    rows[:, place["left"]] = schema.log2(flat.limit[request] - position)
    if schema.shows_certainty:
        rows[:, place["target_top_probability"]] = flat.top_probability
        rows[:, place["target_entropy"]] = flat.entropy
    for name in schema.drafters:
        drafter = traces.drafters.index(name)
        rows[:, place[f"{name}.match_length"]] = flat.match_length[drafter]
        rows[:, place[f"{name}.support"]] = flat.support[drafter]
        rows[:, place[f"{name}.confidence"]] = flat.signal_confidence[drafter]
    return rows
