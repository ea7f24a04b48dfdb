"""Tokens to text, a piece at a time: never half a character, never the beginning of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_INCOMPLETE = "\ufffd"  # what tokenizers decode the first bytes of an unfinished character to


class Detokenizer:
    """Grows the text of one answer token by token.

        |  taken by the reader  |  ready to take  |  held back  |
                                                  a stop string's possible beginning, an unfinished character

    A token's text can depend on its left neighbour, so the last piece is decoded together with the one before it.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._tokens: list[int] = []
        self._before = 0  # start of the piece before the last
        self._read = 0  # tokens whose text is in `_text`
        self._text = ""
        self._taken = 0
        self.stopped = False

    def push(self, token: int) -> bool:
        """Add a token; whether a stop string is now complete. The text then ends before it."""
        self._tokens.append(token)
        piece = self._decode(self._before)
        known = self._decode(self._before, self._read)
        if len(piece) > len(known) and not piece.endswith(_INCOMPLETE):
            self._grow(piece[len(known) :])
        return self.stopped

    def finish(self) -> None:
        """No token follows: what was held back becomes text, unfinished characters as U+FFFD."""
        if not self.stopped:
            known = self._decode(self._before, self._read)
            self._grow(self._decode(self._before)[len(known) :])
        self._stop = ()

    @property
    def text(self) -> str:
        """All text so far, held back or not."""
        return self._text

    def take(self) -> str:
        """The text that has become safe to show since the last call."""
        end = len(self._text) if self.stopped else len(self._text) - self._held_back()
        piece, self._taken = self._text[self._taken : end], max(self._taken, end)
        return piece

    def _decode(self, start: int, stop: int | None = None) -> str:
        text: str = self._tokenizer.decode(self._tokens[start:stop], skip_special_tokens=True)
        return text

    def _grow(self, piece: str) -> None:
        longest = max(map(len, self._stop), default=0)
        search_from = max(0, len(self._text) - longest + 1)
        self._text += piece
        self._before, self._read = self._read, len(self._tokens)
        found = [at for stop in self._stop if (at := self._text.find(stop, search_from)) >= 0]
        if found:
            self._text = self._text[: min(found)]
            self.stopped = True

    def _held_back(self) -> int:
        """Characters at the end that could begin a stop string."""
        return max((_overlap(self._text, stop) for stop in self._stop), default=0)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
