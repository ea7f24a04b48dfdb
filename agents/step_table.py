"""What every action would bring at every position of recorded requests: tokens and time, whatever was done before.

Greedy traces make this a table, from which the clairvoyant optimum and the improvement of a policy follow by dynamic
programming, without a rollout. The steps and their prices are those of `envs.lanes`, where a rollout takes them one by
one; a test holds both equal.

One price depends on the past: a drafter that lags, as a model does, reads what it has missed before it drafts. As every
token missed costs the same, this is kept as a debt that each step runs up, due only if the drafter drafts again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.costs import CostTable
from engine.cuts import Cut
from engine.menu import Action, Menu
from envs.lanes import trusted
from envs.prices import Prices
from envs.replay_session import check_recorded
from envs.trace import TraceSet


@dataclass(frozen=True, eq=False)
class StepTable:
    """Outcomes of R requests of at most T positions under a menu of A actions, with L drafters that lag.

    Attributes:
        tokens: int64 `[R, T, A]`, committed by a step; 1 behind a request's end.
        seconds: float64 `[R, T, A]`, of that step without reading debts; 0 behind a request's end.
        lags: int64 `[R, T, A]`, the number of the lagging drafter that a step lets draft, from 0; -1 where none does.
        debt: float64 `[R, T, A, L]`, seconds by which a step delays each lagging drafter's next draft.
        first_debt: float64 `[R, L]`, the same of the prompt.
        length: int64 `[R]`, positions of each request.
        allowed: bool `[R, T, A]`, what the menu's mask leaves.
    """

    tokens: np.ndarray
    seconds: np.ndarray
    lags: np.ndarray
    debt: np.ndarray
    first_debt: np.ndarray
    length: np.ndarray
    allowed: np.ndarray


def step_table(
    traces: TraceSet,
    menu: Menu,
    costs: CostTable | Sequence[CostTable],
    observed: bool = True,
    min_confidence: Cut = 0.0,
) -> StepTable:
    """The table of a set of traces.

    Args:
        traces: the recorded requests.
        menu: the actions. Raises `MenuError` where it uses a drafter or a length that was not recorded.
        costs: what steps take: one table for all requests, or one for each.
        observed: whether each step's time holds that of observing.
        min_confidence: drafts end before the first token that their drafter trusts less.
    """
    check_recorded(traces, menu)
    flat = traces.flat()
    request = np.repeat(np.arange(len(traces)), flat.length)
    position = np.arange(len(request)) - flat.offsets[request]
    numbers = {name: 1 + place for place, name in enumerate(traces.drafters)}
    k = np.array([entry.k for entry in menu.actions])
    drafters = np.array([numbers.get(entry.drafter, 0) for entry in menu.actions])
    asked = np.minimum(k, (flat.limit[request] - position - 1)[:, None])
    drafter = np.where(asked > 0, drafters, 0)
    longest = np.minimum(asked, _by_drafter(flat.proposed)[drafters].T) * (drafter > 0)
    drafted = np.minimum(longest, _by_drafter(trusted(traces, min_confidence))[drafters].T)
    doubted = drafted < longest  # one more was drafted, and cut off
    accepted = np.minimum(drafted, _by_drafter(flat.matched)[drafters].T)
    tokens = np.minimum(accepted + 1, (flat.length[request] - position)[:, None])
    tables = [costs] if isinstance(costs, CostTable) else list(costs)
    prices, slot = _priced(tables, traces, menu), request * (len(tables) > 1)
    context = flat.prompt_tokens[request] + position
    seconds = prices.step(slot[:, None], context[:, None], tokens, drafter, drafted, 0, doubted, observed)
    begin = position == 0
    reused = np.array([entry.reuse for entry in menu.actions]) * flat.cached_tokens[:, None]
    seconds[begin] += prices.first(slot[begin][:, None], flat.prompt_tokens[:, None], reused)
    allowed = (begin & (flat.cached_tokens[request] > 0))[:, None] | np.array(menu.mask(can_reuse=False))
    shape = (len(traces), int(flat.length.max()))
    lags, debt, first_debt = _debts(traces, tables, drafter, drafted + doubted, accepted, tokens)
    return StepTable(
        tokens=_padded(tokens, shape, request, position, 1),
        seconds=_padded(seconds, shape, request, position, 0.0),
        lags=_padded(lags, shape, request, position, -1),
        debt=_padded(debt, shape, request, position, 0.0),
        first_debt=first_debt,
        length=flat.length,
        allowed=_padded(allowed, shape, request, position, True),
    )


def with_every_length(menu: Menu) -> Menu:
    """A menu with all shorter drafts besides: what any cut of its drafts can come to.

    The oracle over it bounds every controller, whatever its `min_confidence`: a cut draft costs one more drafted token
    than the shorter one, and saves a lagging drafter at most the reading of that token, which is no dearer.
    """
    shorter = [
        Action(entry.reuse, k, entry.drafter if k else "") for entry in menu.actions for k in reversed(range(entry.k))
    ]
    return Menu(tuple(dict.fromkeys([*menu.actions, *shorter])))


def _priced(tables: Sequence[CostTable], traces: TraceSet, menu: Menu) -> Prices:
    prices = Prices(len(tables), traces.drafters, max(menu.lengths, default=0))
    for slot, table in enumerate(tables):
        prices.put(slot, table)
    return prices


def _debts(
    traces: TraceSet,
    tables: Sequence[CostTable],
    drafter: np.ndarray,
    passes: np.ndarray,
    accepted: np.ndarray,
    tokens: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Who of the lagging drafters drafts in each step, and the debts of steps `[N, A, L]` and prompts `[R, L]`.

    A drafter that drafted has read its own draft but the last token; of one fully accepted that one is missing.
    """
    flat = traces.flat()
    lagging = [1 + place for place, lags in enumerate(traces.lagging) if lags]
    rates = np.array([[table.draft_read.get(traces.drafters[n - 1], 0.0) for n in lagging] for table in tables])
    rates = np.broadcast_to(rates, (len(traces), len(lagging)))
    lags = np.full(passes.shape, -1)
    debt = np.zeros((*passes.shape, len(lagging)))
    for place, number in enumerate(lagging):
        drafts = (drafter == number) & (passes > 0)
        lags[drafts] = place
        missed = np.where(drafts, accepted == passes, tokens)
        debt[..., place] = missed * np.repeat(rates[:, place], flat.length)[:, None]
    return lags, debt, rates * (flat.prompt_tokens - 1 - flat.cached_tokens)[:, None]


def _by_drafter(counts: np.ndarray) -> np.ndarray:
    """int64 `[1 + drafters, N]`: counts of nobody, and of each drafter."""
    return np.concatenate([np.zeros((1, counts.shape[1])), counts]).astype(np.int64)


def _padded(
    rows: np.ndarray, shape: tuple[int, int], request: np.ndarray, position: np.ndarray, filler: float
) -> np.ndarray:
    """`[N, ...]` of all positions in a row as `[R, T, ...]`."""
    out = np.full((*shape, *rows.shape[1:]), filler, dtype=rows.dtype)
    out[request, position] = rows
    return out
