"""An answer in colours: accepted drafts, the target's own tokens and rejected drafts told apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.results import StepRecord
from engine.text import Detokenizer

ACCEPTED, TARGET, REJECTED, RESET = "\033[32m", "\033[0m", "\033[2;9;31m", "\033[0m"
LEGEND = f"{ACCEPTED}accepted draft{RESET}  {TARGET}target's token{RESET}  {REJECTED}rejected draft{RESET}"


class Painter:
    """Paints step records as ANSI text, a step at a time; a character is shown once all its tokens are there."""

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, stop)

    def paint(self, record: StepRecord) -> str:
        """The step's committed text, and what was rejected behind it."""
        drafted = self._advance(record.tokens[: record.accepted])
        own = self._advance(record.tokens[record.accepted :])
        rejected = self._tokenizer.decode(list(record.rejected))
        return _colour(ACCEPTED, drafted) + _colour(TARGET, own) + _colour(REJECTED, rejected.replace("\n", "\\n"))

    def finish(self) -> str:
        """What was held back for a character or stop string that never came."""
        self._detokenizer.finish()
        return self._detokenizer.take()

    def _advance(self, tokens: Sequence[int]) -> str:
        for token in tokens:
            self._detokenizer.push(token)
        return self._detokenizer.take()


def _colour(code: str, text: str) -> str:
    if not text or code == RESET:
        return text
    return f"{code}{text}{RESET}"
