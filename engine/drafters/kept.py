"""A model drafter for whoever drafts at every token, as a recorder does: what is left of a draft is not made anew."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from engine.drafters.base import EMPTY_DRAFT, Draft, Signal
from engine.drafters.model import ModelDrafter, ModelDraftState
from engine.sampling import Sampling


class KeptDrafter(ModelDrafter):
    """Drafts what the model drafter does, greedily, in fewer passes where the text goes on as drafted.

    A decoder gains nothing by it: it commits whole drafts, or another token than the drafted one.
    """

    def begin(self, tokens: list[int], salt: str = "") -> ModelDraftState:
        return _KeptState(self, salt)


class _KeptState(ModelDraftState):
    def __init__(self, drafter: ModelDrafter, salt: str) -> None:
        super().__init__(drafter, salt)
        self._place = 0  # length of the text that the last draft followed
        self._drafted: list[int] = []
        self._tops: list[float] = []  # q's top probability for each
        self._shown = 0.0  # of the first token of the last draft that had one

    def signal(self, tokens: Sequence[int]) -> Signal:
        return Signal(confidence=self._shown)

    def propose(
        self, tokens: list[int], k: int, sampling: Sampling | None = None, min_confidence: float = 0.0
    ) -> Draft:
        """As the model drafter's, but greedy and whole whatever is asked."""
        if k <= 0:
            return EMPTY_DRAFT
        grown = len(tokens) - self._place
        kept = grown if self._drafted[:grown] == tokens[self._place :] else len(self._drafted)
        drafted, tops = self._drafted[kept:], self._tops[kept:]
        self._place, self._drafted, self._tops = len(tokens), drafted, tops
        self._shown = tops[0] if tops else self._shown
        while len(drafted) < k:
            one = super().propose([*tokens, *drafted], 1)
            if not one.tokens:
                break
            drafted += one.tokens
            tops += one.confidences
            self._shown = tops[0]
        return Draft(drafted[:k], list(accumulate(tops[:k], mul)))

    def _follow(self, tokens: list[int]) -> None:
        super()._follow(tokens)
        self._agreed = min(self._agreed, self._place)  # behind it are drafts, which nobody has verified
