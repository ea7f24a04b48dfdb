"""What is asked for."""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import PromptError, SamplingError
from engine.runner import Runner
from engine.sampling import GREEDY, Sampling


@dataclass(frozen=True)
class Request:
    """Prompt ids, new tokens at most, how to sample, where to stop, whose cache to share."""

    tokens: tuple[int, ...]
    max_new_tokens: int = 128
    sampling: Sampling = GREEDY
    stop: tuple[str, ...] = ()
    salt: str = ""
    ignore_eos: bool = False


def check_request(request: Request, runner: Runner) -> None:
    """Raise `PromptError` or `SamplingError` for a request that cannot be served."""
    if not request.tokens:
        raise PromptError("the prompt is empty; give at least one token")
    if len(request.tokens) >= runner.max_context:
        size = f"{len(request.tokens)} tokens, the context window {runner.max_context}"
        raise PromptError(f"the prompt has {size}; shorten the prompt")
    if not all(0 <= token < runner.vocab_size for token in request.tokens):
        outside = f"token ids outside 0..{runner.vocab_size - 1}"
        raise PromptError(f"the prompt holds {outside}; use the model's own tokenizer")
    if not isinstance(request.max_new_tokens, int) or request.max_new_tokens < 1:
        raise SamplingError(f"max_new_tokens is {request.max_new_tokens}; give a whole number, at least 1")
    if not all(isinstance(stop, str) for stop in request.stop):
        raise SamplingError(f"stop is {request.stop}; give a string or several")
    if any(not stop for stop in request.stop):
        raise SamplingError("a stop string is empty; give at least one character")
