"""Accept or reject drafted tokens, so that what comes out is what plain decoding would give.

    row of the pass:    0        1        ...   k
    it has read:        pending  draft 1  ...   draft k
    its logits judge:   draft 1  draft 2  ...   (bonus token)

Greedy: a draft is accepted while it equals the argmax. Sampling: the rejection rule of Leviathan et al. 2023
(arXiv 2211.17192, algorithm 1) and Chen et al. 2023 (arXiv 2302.01318): accept x with probability
min(1, p(x) / q(x)), else draw from max(0, p - q), normalised; exact in distribution for any drafter.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.drafters.base import Draft
from engine.errors import NumericalError
from engine.sampling import Sampling, draw, probabilities


@dataclass(frozen=True, slots=True)
class Verdict:
    """`accepted` drafted tokens, then `token`: the bonus token, or the correction of the first rejected one."""

    accepted: int
    token: int


def verify(logits: Tensor, draft: Draft, sampling: Sampling, generator: torch.Generator) -> Verdict:
    """Judge a draft of k tokens by the target's logits `[k + 1, vocab]`.

    Raises `NumericalError` where the logits that matter are not finite.
    """
    if sampling.greedy:
        return verify_greedy(logits, draft.tokens)
    return _verify_sampled(probabilities(_finite(logits), sampling), draft, generator)


def verify_greedy(logits: Tensor, drafted: list[int]) -> Verdict:
    """`verify` for temperature 0. Rows behind the first rejected token may be missing from `logits`."""
    chosen = _best_tokens(logits)
    accepted = 0
    while accepted < len(drafted) and drafted[accepted] == chosen[accepted]:
        accepted += 1
    return Verdict(accepted, chosen[accepted])


def _best_tokens(logits: Tensor) -> list[int]:
    """The argmax of each row. On the CPU numpy takes it: torch would wake its thread pool, which then gets in the way
    of the runner's own threads."""
    if logits.device.type == "cpu":
        rows = logits.numpy()
        chosen = rows.argmax(axis=-1)  # the first NaN, where there is one
        _finite(torch.from_numpy(rows[np.arange(len(rows)), chosen]))
        return [int(token) for token in chosen]
    best, choices = torch.stack([part.double() for part in logits.max(dim=-1)]).cpu()  # waits for the device once
    _finite(best)
    return [int(token) for token in choices.tolist()]


def _verify_sampled(target: Tensor, draft: Draft, generator: torch.Generator) -> Verdict:
    for row, (p_token, q_token) in enumerate(_at_drafted(target, draft)):
        u = float(torch.rand((), generator=generator, dtype=torch.float64))
        if u * q_token >= p_token:
            p = target[row]
            residual = (p - _draft_distribution(draft, row, target)).clamp_(min=0.0).cpu()
            # Nothing is left where q equals p up to rounding.
            return Verdict(row, draw(residual if residual.sum() > 0.0 else p, generator))
    return Verdict(len(draft.tokens), draw(target[len(draft.tokens)], generator))


def _at_drafted(target: Tensor, draft: Draft) -> list[tuple[float, float]]:
    """p and q of each drafted token, fetched at once: on a GPU every look at a value waits for the device."""
    if not draft.tokens:
        return []
    p = [target[row, token] for row, token in enumerate(draft.tokens)]
    if draft.probs is None:
        return [(value, 1.0) for value in torch.stack(p).tolist()]
    q = [_draft_distribution(draft, row, target)[token] for row, token in enumerate(draft.tokens)]
    return list(zip(*torch.stack([*p, *q]).view(2, -1).tolist(), strict=True))


def _draft_distribution(draft: Draft, row: int, target: Tensor) -> Tensor:
    """q of one drafted token over the target's vocabulary, float64; one-hot where the drafter is deterministic."""
    q = torch.zeros_like(target[row])
    if draft.probs is None:
        q[draft.tokens[row]] = 1.0
    else:
        shared = min(draft.probs.shape[-1], q.shape[-1])
        q[:shared] = draft.probs[row, :shared]
        # Half precision sums to 1 only roughly, and part of it may lie outside the shared vocabulary.
        q /= q.sum().clamp_min(torch.finfo(q.dtype).tiny)
    return q


def _finite(values: Tensor) -> Tensor:
    """NaN or +inf anywhere, or a row without a finite value, means a broken model; -inf is a masked token."""
    best = values.amax(dim=-1) if values.ndim > 1 else values
    if torch.isnan(values).any() | ~torch.isfinite(best).all():  # one question, one wait for the device
        raise NumericalError(
            "the target's logits are not finite; load it in a wider precision (precision='fp32') or fetch it again"
        )
    return values
