"""Prompts -> token ids: text, chat messages, or ids as they are."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence, Set
from typing import Any

from engine.errors import PromptError, first_line

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


def encode_prompt(tokenizer: Any, prompt: Prompt) -> list[int]:
    """Token ids of text, chat messages or token ids. Raises `PromptError` where there is nothing to encode."""
    try:
        if isinstance(prompt, bytes | bytearray | Set | Mapping):
            raise TypeError
        parts = list(prompt)
    except TypeError as error:
        kind = type(prompt).__name__
        raise PromptError(f"the prompt is of type {kind}; give text, messages or token ids") from error
    if not parts:
        raise PromptError("the prompt is empty; give some text, messages or token ids")
    if isinstance(prompt, str):
        return _tokenize(tokenizer, prompt)
    if all(isinstance(part, Mapping) for part in parts):
        return render_chat(tokenizer, parts)  # type: ignore[arg-type]
    return [_token_id(part) for part in parts]


def render_chat(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Token ids of chat messages with the cue for the answer. Raises `PromptError` where they cannot be rendered."""
    if not getattr(tokenizer, "chat_template", None):
        raise PromptError("this model has no chat template; give text instead of messages")
    for number, message in enumerate(messages, start=1):
        missing = [name for name in ("role", "content") if name not in message]
        if missing:  # templates differ: some raise, some render nothing
            raise PromptError(f"message {number} has no {' and no '.join(missing)}; add it")
    try:
        text = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
    except Exception as error:  # templates raise whatever their authors wrote
        raise PromptError(
            f"the chat template refuses these messages ({first_line(error)}); check roles and contents"
        ) from error
    return _tokenize(tokenizer, text, add_special_tokens=False)


def _tokenize(tokenizer: Any, text: str, **settings: bool) -> list[int]:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise PromptError(f"the prompt is not valid Unicode at character {error.start}; give UTF-8 text") from error
    return list(tokenizer(text, **settings)["input_ids"])


def _token_id(part: Any) -> int:
    """A token id: any whole number, numpy's and torch's too. Booleans are refused: they come from a mistake."""
    try:
        if not isinstance(part, bool):
            return operator.index(part)
    except TypeError:
        pass
    raise PromptError(f"the prompt holds {part!r}, which is no token id; give text, messages or token ids")
