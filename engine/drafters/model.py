"""A smaller model as drafter, with its own KV buffer and its own prefix cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from engine.drafters.base import EMPTY_DRAFT, Draft, Signal
from engine.errors import NumericalError
from engine.prefix_cache import PrefixCache
from engine.runner import Runner
from engine.sampling import GREEDY, Sampling, draw, probabilities, seeded_generator


@dataclass
class ModelDrafter:
    """Drafts with any causal LM that shares the target's tokenizer.

    Without the prefix cache it would re-read the whole prompt at each request, which costs more than it ever saves.
    """

    name: str
    runner: Runner
    prefix_cache: PrefixCache
    vocab_size: int  # the target's: ids beyond it are never drafted, so that q lives on what p can judge
    digest: str = ""  # the model's: its cost depends on it
    lagging_signal: ClassVar[bool] = True  # a state's signal tells of the place where it last drafted

    def begin(self, tokens: list[int], salt: str = "") -> ModelDraftState:
        return ModelDraftState(self, salt)


class ModelDraftState:
    """One request: a buffer that may run ahead of the verified tokens by what was drafted last."""

    def __init__(self, drafter: ModelDrafter, salt: str) -> None:
        self._runner = drafter.runner
        self._cache = drafter.prefix_cache
        self._vocab_size = drafter.vocab_size
        self._salt = salt
        self._generator: torch.Generator | None = None
        self._buffer = drafter.runner.new_buffer()
        self._held: list[int] = []  # the tokens whose KV the buffer holds
        self._agreed = 0  # how many of them are known to be verified
        self._confidence = 0.0

    def signal(self, tokens: Sequence[int]) -> Signal:
        """The confidence of the last draft's first token: a new one would cost a pass."""
        return Signal(confidence=self._confidence)

    def propose(
        self, tokens: list[int], k: int, sampling: Sampling | None = None, min_confidence: float = 0.0
    ) -> Draft:
        """Up to `k` tokens, one pass each; greedy, or drawn from q under the request's own sampling.

        A token's confidence is the product of q's top probabilities up to it. It decides whether to go on before
        the token is drawn: a rule that looked at the drawn token would bias what is emitted.

        Raises `NumericalError` where the drafter's logits are not finite.
        """
        if k <= 0 or len(tokens) >= self._runner.max_context:
            return EMPTY_DRAFT
        sampling = sampling or GREEDY
        self._follow(tokens)
        generator = self._generator = self._generator or seeded_generator(sampling.seed, stream=1)
        drafted: list[int] = []
        confidences: list[float] = []
        distributions: list[Tensor] = []
        rows = tokens[self._buffer.length :]
        confidence = 1.0
        for _ in range(min(k, self._runner.max_context - len(tokens))):
            logits = self._runner.forward(rows, self._buffer, 1)[0, : self._vocab_size]
            self._held += rows
            q = _distribution(logits, sampling)
            confidence *= float(q.max())
            if not drafted:
                self._confidence = confidence
            if confidence < min_confidence:
                break
            token = int(q.argmax()) if sampling.greedy else draw(q, generator)
            drafted.append(token)
            confidences.append(confidence)
            distributions.append(q)
            rows = [token]
        return Draft(drafted, confidences, torch.stack(distributions) if drafted and not sampling.greedy else None)

    def close(self, tokens: list[int]) -> None:
        """Store the verified part in the drafter's own prefix cache."""
        if self._buffer.length:
            self._roll_back(tokens)
            self._cache.insert(self._held, self._buffer, self._salt)

    def _follow(self, tokens: list[int]) -> None:
        """Bring the buffer to a beginning of `tokens` that leaves at least one token to read."""
        if not self._held:
            self._reuse_prefix(tokens)
        self._roll_back(tokens)
        if len(self._held) >= len(tokens):
            self._truncate(len(tokens) - 1)

    def _reuse_prefix(self, tokens: list[int]) -> None:
        match = self._cache.match(tokens, self._salt).truncated(len(tokens) - 1)
        if match.length:
            self._cache.restore(match, self._buffer)
            self._held = tokens[: match.length]

    def _roll_back(self, tokens: list[int]) -> None:
        """Forget drafted tokens that were not verified; `_agreed` spares comparing what was compared before."""
        agreed = self._agreed
        limit = min(len(self._held), len(tokens))
        while agreed < limit and self._held[agreed] == tokens[agreed]:
            agreed += 1
        self._truncate(agreed)
        self._agreed = agreed

    def _truncate(self, length: int) -> None:
        self._buffer.truncate(length)
        del self._held[length:]
        self._agreed = min(self._agreed, length)


def _distribution(logits: Tensor, sampling: Sampling) -> Tensor:
    """q from the drafter's logits `[vocab]`, warped as the target's are."""
    q = logits.softmax(dim=-1) if sampling.greedy else probabilities(logits, sampling)
    if not torch.isfinite(q).all():
        raise NumericalError("the drafter's logits are not finite; load it in fp32")
    return q
