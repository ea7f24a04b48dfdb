"""Recording one request: decoded once, its drafters asked at every position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np
from torch import Tensor

from engine import SpeculativeDecoder
from engine.drafters import Drafter, NGramDrafter, Signal
from engine.drafters.kept import KeptDrafter
from engine.drafters.model import ModelDrafter
from engine.drafters.told import ToldDrafter
from engine.drafting import Drafting
from engine.kv import KVBuffer
from engine.menu import Action, Menu
from engine.request import Request
from engine.runner import Runner
from engine.sampling import certainty
from engine.session import Session
from engine.text import Detokenizer
from envs.dialogue import Turn
from envs.trace import Trace

TRIED = 4  # tokens drafted while decoding, where drafts cannot change a token
DOUBTED = 0.5  # such a draft ends before the first token that its drafter trusts less
REREAD = 32  # tokens read in one pass where an answer is already known
_PLAIN, _TRY, _TELL = range(3)  # the menu's entries


class RequestRecorder:
    """Records one request after the other, with prefix cache and drafters of its own.

    Where a runner is bitwise, drafts cannot change a token, so decoding speculates to save time. Elsewhere it is plain.

    Attributes:
        lagging: one a drafter, as in `TraceSet`.
    """

    def __init__(self, decoder: SpeculativeDecoder, max_k: int) -> None:
        parts = decoder.with_empty_caches().parts
        self._tokenizer, self._max_k = parts.tokenizer, max_k
        self._drafters = {name: _kept(drafter) for name, drafter in parts.drafters.items()}
        self.lagging = tuple(bool(getattr(one, "lagging_signal", False)) for one in parts.drafters.values())
        self._tap, guess, self._told = _Tap(parts.runner), NGramDrafter(), ToldDrafter()
        menu = Menu((Action(True, 0), Action(True, TRIED, guess.name), Action(True, REREAD, self._told.name)))
        drafters: dict[str, Drafter] = {guess.name: guess, self._told.name: self._told}
        self._parts = replace(parts, runner=self._tap, menu=menu, drafters=drafters)

    def record(self, request: Request, turn: Turn) -> tuple[Trace, str]:
        """Decode a request; its trace and the answer's text."""
        text = list(request.tokens)
        drafting = Drafting(self._drafters, text, request, self._parts.runner.vocab_size)
        columns = _Columns(len(self._drafters), self._max_k)
        certain = (0.0, 0.0, 0.0)
        with Session(self._parts, request) as session:
            cached, limit = session.observe().cached_tokens, session.left
            while not session.finished:
                step = session.step(_TRY if self._tap.bitwise else _PLAIN, DOUBTED)
                for row, token in enumerate(step.tokens):
                    columns.add(drafting, tuple(self._drafters), certain)
                    text.append(token)
                    # The session may have computed its newest row anew; the rows before it are the pass's.
                    newest = session.newest_logits if row == step.accepted else self._tap.rows[row]
                    certain = _certainty(newest)
        drafting.close()
        trace = columns.trace(turn, len(request.tokens), cached, limit, session.generated)
        return trace, session.result().text

    def put_back(self, request: Request, turn: Turn, answer: Sequence[int], finished: bool) -> str:
        """Leave caches and histories as `record` left them when it gave this answer; the answer's text.

        `finished`: no later request of the conversation is to be recorded. What other conversations may share is the
        beginning of the prompt, which is read as it was. Else, where rounding matters, the request is recorded again.
        """
        if not (finished or self._tap.bitwise):
            return self.record(request, turn)[1]
        text = list(request.tokens)
        self._told.text = [*request.tokens, *answer]
        drafting = Drafting(self._drafters, text, request, self._parts.runner.vocab_size)
        for name in self._drafters:
            drafting.propose(name, 1, 0.0)
        with Session(self._parts, request) as session:
            session.step(_PLAIN)
            while not session.finished:
                session.step(_TELL)
        text.extend(answer)
        drafting.close()
        return self._text_of(answer)

    def _text_of(self, answer: Sequence[int]) -> str:
        detokenizer = Detokenizer(self._tokenizer)
        for token in answer:
            detokenizer.push(token)
        detokenizer.finish()
        return detokenizer.text


class _Tap:
    """A runner that remembers the logits of its newest pass."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.vocab_size, self.max_context, self.bitwise = runner.vocab_size, runner.max_context, runner.bitwise
        self.rows = Tensor()

    def new_buffer(self) -> KVBuffer:
        return self._runner.new_buffer()

    def forward(self, tokens: Sequence[int], buffer: KVBuffer, num_logits: int) -> Tensor:
        self.rows = self._runner.forward(tokens, buffer, num_logits)
        return self.rows

    def synchronize(self) -> None:
        self._runner.synchronize()


class _Columns:
    """What is recorded at each position, as it comes."""

    def __init__(self, num_drafters: int, max_k: int) -> None:
        self._shape = (num_drafters, max_k)
        self._drafts: list[list[list[int]]] = []  # positions, drafters, tokens
        self._confidences: list[np.ndarray] = []
        self._signals: list[list[tuple[int, int, float]]] = []
        self._certain: list[tuple[float, float, float]] = []

    def add(self, drafting: Drafting, names: Sequence[str], certain: tuple[float, float, float]) -> None:
        """Ask every drafter at the end of the text as it is."""
        signals = drafting.signals()
        confidences = np.zeros(self._shape)
        drafts: list[list[int]] = []
        told: list[tuple[int, int, float]] = []
        for place, name in enumerate(names):
            draft = drafting.propose(name, self._shape[1], 0.0)
            confidences[place, : len(draft.confidences)] = draft.confidences
            drafts.append(draft.tokens)
            signal = signals.get(name) or Signal()
            told.append((signal.match_length, signal.support, signal.confidence))
        self._drafts.append(drafts)
        self._confidences.append(confidences)
        self._signals.append(told)
        self._certain.append(certain)

    def trace(self, turn: Turn, prompt: int, cached: int, limit: int, tokens: list[int]) -> Trace:
        drafters, max_k = self._shape
        proposed = [[len(draft) for draft in drafts] for drafts in self._drafts]
        matched = [[_agreeing(d, tokens[at : at + len(d)]) for d in drafts] for at, drafts in enumerate(self._drafts)]
        count = len(tokens)
        signals = np.array(self._signals, np.float64).reshape(count, drafters, 3)
        certain = np.array(self._certain, np.float64)
        return Trace(
            request=turn.id,
            kind=turn.kind,
            group=turn.group,
            prompt_tokens=prompt,
            cached_tokens=cached,
            limit=limit,
            tokens=np.array(tokens, np.int32),
            proposed=np.array(proposed, np.uint8).reshape(count, drafters).T.copy(),
            matched=np.array(matched, np.uint8).reshape(count, drafters).T.copy(),
            confidences=np.array(self._confidences).reshape(count, drafters, max_k).transpose(1, 0, 2).copy(),
            match_length=signals[..., 0].T.astype(np.int32),
            support=signals[..., 1].T.astype(np.int32),
            signal_confidence=signals[..., 2].T.copy(),
            top_probability=certain[:, 0].copy(),
            entropy=certain[:, 1].copy(),
            margin=certain[:, 2].copy(),
        )


def _kept(drafter: Drafter) -> Drafter:
    """The same, but a model goes on from its last draft."""
    if type(drafter) is not ModelDrafter:
        return drafter
    return KeptDrafter(*(getattr(drafter, each.name) for each in fields(drafter)))


def _agreeing(drafted: Sequence[int], truth: Sequence[int]) -> int:
    """How many tokens at the beginning are the same."""
    return next((i for i, (a, b) in enumerate(zip(drafted, truth)) if a != b), min(len(drafted), len(truth)))


def _certainty(logits: Tensor | None) -> tuple[float, float, float]:
    """Top probability, entropy (nats) and margin of logits `[vocab]`."""
    assert logits is not None
    top_probability, entropy = certainty(logits)
    second, best = np.partition(logits.cpu().numpy(), -2)[-2:]
    return top_probability, entropy, top_probability * (1.0 - float(np.exp(second - best)))
