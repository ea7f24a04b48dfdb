"""The contract between a decoder and whoever proposes tokens to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from engine.sampling import Sampling


@dataclass(frozen=True, slots=True)
class Draft:
    """A proposal of at most k tokens. It is read only: `EMPTY_DRAFT` is shared by everyone."""

    tokens: list[int]
    """The proposed tokens, in order."""
    confidences: list[float]
    """One a token, in [0, 1]: the estimate that the draft holds up to and including it."""
    probs: torch.Tensor | None = None
    """[len(tokens), vocab] float: the distribution q that each token was drawn from; None: q is one-hot."""


EMPTY_DRAFT = Draft([], [])


@dataclass(frozen=True, slots=True)
class Signal:
    """What a drafter knows at a position before anything is chosen, at no cost worth counting."""

    match_length: int = 0
    """Tokens of the suffix that recurs earlier; 0: none, or not applicable."""
    support: int = 0
    """Earlier places where that suffix is followed by the proposed token."""
    confidence: float = 0.0
    """Estimate in [0, 1] that the next token is the proposed one."""


class DraftState(Protocol):
    """The drafting state of one request.

    `tokens` is the request's verified text so far (prompt and output). It only ever grows between calls, so
    a state remembers how much it has read. No method changes it.
    """

    def signal(self, tokens: Sequence[int]) -> Signal:
        """What is known at the end of `tokens`; cheap enough for every step."""
        ...

    def propose(
        self, tokens: list[int], k: int, sampling: Sampling | None = None, min_confidence: float = 0.0
    ) -> Draft:
        """At most k tokens to follow `tokens`.

        The draft stops before the first token whose confidence is below `min_confidence`; k <= 0 gives
        an empty one.
        """
        ...

    def close(self, tokens: list[int]) -> None:
        """The request ended with these verified tokens."""
        ...


class Drafter(Protocol):
    """Proposes tokens for many requests; whatever belongs to one request lives in its `DraftState`.

    Attributes:
        name: what menus and records call it; some text without a comma, another for each drafter of an engine.

    Two members are optional. `digest`, some text, tells drafters of one name apart whose cost differs, so that costs
    are calibrated for each. `lagging_signal`, true where `DraftState.signal` tells of the place where the state last
    drafted and not of the end of the text, lets recorded requests replay that.
    """

    name: str

    def begin(self, tokens: list[int], salt: str = "") -> DraftState:
        """Starts a request whose prompt is `tokens`. Requests of different salts share nothing."""
        ...
