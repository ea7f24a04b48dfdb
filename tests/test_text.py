"""Text that streams: whole characters only, nothing of a stop string, and in the end exactly the tokenizer's text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_models import byte_tokens, eos_id, tiny_tokenizer, vocab_size

from engine.text import Detokenizer

TEXTS = (
    "plain text",
    "é",
    "日本語のテキスト",
    "🙂👍🏽 emoji 👩‍👩‍👧‍👦 and 🇫🇷",
    "mixed: naïve 漢字 🙂, the end",
    " leading and trailing ",
    "line\nline\n\n\ttab",
    "עברית العربية हिन्दी",
)
INCOMPLETE = "\ufffd"

any_tokens = st.lists(st.integers(0, vocab_size() - 1), max_size=40)
letters = st.text("ab🙂é", max_size=24)
stops = st.lists(st.text("ab🙂é", min_size=1, max_size=4), max_size=3)


class Words:
    """A tokenizer whose tokens are given strings, the empty one among them."""

    def __init__(self, *words: str) -> None:
        self.words = words

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(self.words[token] for token in tokens)


def stream(tokens: Sequence[int], stop: Sequence[str] = (), tokenizer: Any = None, every: int = 1) -> tuple[Any, ...]:
    """(pieces, final text, tokens read, stopped): tokens are pushed up to a stop string, taken every so many."""
    detokenizer = Detokenizer(tokenizer or tiny_tokenizer(), stop)
    pieces, read = [], 0
    for token in tokens:
        read += 1
        if detokenizer.push(token):
            break
        if read % every == 0:
            pieces.append(detokenizer.take())
    stopped = detokenizer.stopped
    detokenizer.finish()
    pieces.append(detokenizer.take())
    assert detokenizer.take() == ""
    return pieces, detokenizer.text, read, stopped


def cut(text: str, stop: Sequence[str]) -> str:
    """`text` before the earliest of the stop strings that are completed first."""
    for end in range(len(text) + 1):
        found = [text[:end].index(one) for one in stop if one in text[:end]]
        if found:
            return text[: min(found)]
    return text


# -- characters ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS)
def test_characters_come_whole_and_as_soon_as_they_are(text: str) -> None:
    tokens = byte_tokens(text)
    assert len(tokens) == len(text.encode())
    pieces, final, _, _ = stream(tokens)
    assert final == text == "".join(pieces)
    assert all(INCOMPLETE not in piece for piece in pieces)
    # One byte a token: a character shows with its last byte, and not before.
    shown = "".join(pieces[:-1])
    assert shown == text
    at = 0
    for character in text:
        size = len(character.encode())
        assert pieces[at : at + size] == [""] * (size - 1) + [character]
        at += size


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_of_several_characters(text: str) -> None:
    tokens = tiny_tokenizer()(f"the and {text} in the")["input_ids"]
    pieces, final, _, _ = stream(tokens)
    assert final == f"the and {text} in the" == "".join(pieces)


@settings(max_examples=300, deadline=None)
@given(any_tokens, st.integers(1, 5))
@example(byte_tokens("🙂")[:3], 1)
@example([*byte_tokens("🙂")[:2], *byte_tokens("a")], 1)
@example([eos_id(), *byte_tokens("é"), eos_id()], 1)
def test_any_tokens_end_as_the_tokenizers_own_text(tokens: list[int], every: int) -> None:
    pieces, final, read, stopped = stream(tokens, every=every)
    assert (read, stopped) == (len(tokens), False)
    assert "".join(pieces) == final == tiny_tokenizer().decode(tokens, skip_special_tokens=True)
    for piece in pieces[:-1]:
        assert not piece.endswith(INCOMPLETE)


def test_an_unfinished_character_becomes_visible_at_the_end_only() -> None:
    detokenizer = Detokenizer(tiny_tokenizer())
    for token in byte_tokens("a🙂")[:-1]:
        detokenizer.push(token)
    assert (detokenizer.text, detokenizer.take(), detokenizer.take()) == ("a", "a", "")
    detokenizer.finish()
    assert detokenizer.take() == INCOMPLETE
    detokenizer.finish()
    assert detokenizer.text == "a" + INCOMPLETE


def test_special_tokens_have_no_text() -> None:
    pieces, final, _, _ = stream([*byte_tokens("a"), eos_id(), *byte_tokens("b")])
    assert (pieces, final) == (["a", "", "b", ""], "ab")


def test_tokens_whose_text_hangs_on_their_left_neighbour() -> None:
    """As in SentencePiece tokenizers, where the first token of a text loses its space."""

    class Spaced:
        def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
            return "".join(f" {token}" for token in tokens).lstrip()

    pieces, final, _, _ = stream([1, 2, 3], tokenizer=Spaced())
    assert (pieces, final) == (["1", " 2", " 3", ""], "1 2 3")


# -- stop strings -------------------------------------------------------------------------------------------------


@settings(max_examples=400, deadline=None)
@given(letters, stops, st.integers(1, 4))
@example("aab", ["ab"], 1)
@example("aaab", ["aab", "b"], 2)
@example("abab", ["babb", "aba"], 1)
@example("🙂🙂é", ["🙂é"], 1)
def test_stop_strings_over_single_bytes(text: str, stop: list[str], every: int) -> None:
    pieces, final, read, stopped = stream(byte_tokens(text), stop, every=every)
    assert final == cut(text, stop) == "".join(pieces)
    assert stopped == any(one in text for one in stop)
    if stopped:  # by the very token that completed it
        assert any(one in text.encode()[:read].decode(errors="ignore") for one in stop)
        assert not any(one in text.encode()[: read - 1].decode(errors="ignore") for one in stop)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 5), max_size=16), stops)
def test_nothing_shown_is_ever_taken_back(tokens: list[int], stop: list[str]) -> None:
    """Tokens of zero to three characters: a stop string may begin and end anywhere in them."""
    words = Words("", "a", "b", "ab🙂", "ba", "éa")
    pieces, final, read, stopped = stream(tokens, stop, words)
    assert "".join(pieces) == final
    text = words.decode(tokens[:read])
    assert text.startswith(final)
    assert not any(one in final for one in stop)
    if stopped:
        assert any(text[len(final) :].startswith(one) for one in stop)
        assert not any(one in words.decode(tokens[: read - 1]) for one in stop)
    else:
        assert final == text


def test_what_could_begin_a_stop_string_is_held_back_and_no_more() -> None:
    detokenizer = Detokenizer(Words("x", "E", "N", "D", "."), ["END", "NN"])
    shown = []
    for token in (0, 1, 1, 2, 4, 2, 0, 1, 2):
        assert not detokenizer.push(token)
        shown.append(detokenizer.take())
    assert shown == ["x", "", "E", "", "EN.", "", "Nx", "", ""]
    assert detokenizer.push(3)
    assert (detokenizer.take(), detokenizer.text) == ("", "xEEN.Nx")


def test_held_back_text_comes_at_the_end_where_no_stop_string_did() -> None:
    pieces, final, _, stopped = stream(byte_tokens("a EN"), ["END"])
    assert (pieces[-1], final, stopped) == ("EN", "a EN", False)


def test_of_overlapping_stop_strings_the_first_completed_cuts() -> None:
    assert stream(byte_tokens("xabcd"), ["abcd", "bc"])[1:] == ("xa", 4, True)
    # Completed by one token: the one that begins first.
    assert stream([0], ["bc", "abcd"], Words("xabcd"))[1:] == ("x", 1, True)
    assert stream([0, 1], ["aa", "aab"], Words("xa", "ab"))[1:] == ("x", 2, True)


def test_a_stop_string_at_the_very_beginning() -> None:
    assert stream(byte_tokens("ENDless"), ["END"]) == (["", "", ""], "", 3, True)


def test_empty_pieces_complete_nothing() -> None:
    detokenizer = Detokenizer(Words("", "a", "b"), ["ab"])
    assert [detokenizer.push(token) for token in (0, 1, 0, 0)] == [False] * 4
    assert detokenizer.take() == ""
    assert detokenizer.push(2)
    assert detokenizer.text == ""


def test_no_tokens() -> None:
    assert stream([], ["x"]) == ([""], "", 0, False)
