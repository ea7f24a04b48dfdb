"""What is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.errors import PromptError, SamplingError
from engine.runner import Runner
from engine.sampling import GREEDY, Sampling, whole


@dataclass(frozen=True)
class Request:
    """Prompt ids, new tokens at most, how to sample, where to stop, whose cache to share."""

    tokens: tuple[int, ...]
    max_new_tokens: int = 128
    sampling: Sampling = GREEDY
    stop: tuple[str, ...] = ()
    salt: str = ""
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        count = whole(self.max_new_tokens)
        if count < 1:
            raise SamplingError(f"max_new_tokens is {self.max_new_tokens!r}; give a whole number, at least 1")
        object.__setattr__(self, "max_new_tokens", count)


def stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """None, one or several of them as a tuple. Raises `SamplingError` for anything else, and for an empty string."""
    try:
        strings = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    except TypeError:
        strings = (stop,)  # type: ignore[assignment]
    if not all(isinstance(string, str) for string in strings):
        raise SamplingError(f"stop is {stop!r}; give a string or several")
    if not all(strings):
        raise SamplingError("a stop string is empty; give at least one character")
    return strings


def check_request(request: Request, runner: Runner) -> None:
    """Raise `PromptError` for a prompt that a model cannot read."""
    if not request.tokens:
        raise PromptError("the prompt is empty; give at least one token")
    if len(request.tokens) >= runner.max_context:
        size = f"{len(request.tokens)} tokens, the context window {runner.max_context}"
        raise PromptError(f"the prompt has {size}; shorten the prompt")
    if not all(0 <= token < runner.vocab_size for token in request.tokens):
        outside = f"token ids outside 0..{runner.vocab_size - 1}"
        raise PromptError(f"the prompt holds {outside}; use the model's own tokenizer")
