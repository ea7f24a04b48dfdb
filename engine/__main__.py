"""`python -m engine "prompt" --policy DIR`: stream one answer to stdout, then one line of statistics to stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated

import tyro
from tyro.conf import UseAppendAction

from engine import command_line
from engine.controller_names import CONTROLLER_NAMES
from engine.decoder import DEFAULT_CACHE_BYTES, Piece, SpeculativeDecoder
from engine.errors import PromptError, SettingError
from engine.policy import load_policy
from engine.render import LEGEND, Painter
from engine.results import Generation

_WHO_CHOOSES = f"Who chooses draft lengths where no policy is given: {', '.join(CONTROLLER_NAMES)}; default: heuristic."

_COLOURS = "Tell accepted drafts, the target's tokens and rejected drafts apart by colour."


@dataclass(frozen=True)
class Options:
    prompt: Annotated[str, tyro.conf.Positional]
    """What to answer; `-` reads it from standard input."""
    policy: str | None = None
    """Folder of an exported policy, for example checkpoints/default."""
    controller: Annotated[str | None, tyro.conf.arg(help=_WHO_CHOOSES)] = None
    target: str | None = None
    """The model: a bundled name, a Hugging Face folder, a .gguf file, or a hub id; default: the policy's, else
    smollm2-135m."""
    drafter: Annotated[list[str], UseAppendAction] = field(default_factory=list)
    """Who drafts: ngram, ngram:history, model:<name>; give it once for each; default: the policy's, else ngram."""
    precision: str | None = None
    """fp32, int8 (on the CPU), bf16 or fp16; default: the policy's, else fp32."""
    device: str = "cpu"
    """cpu or cuda."""
    exact: str | None = None
    """What makes greedy tokens those of plain decoding: bitwise (the arithmetic: a row is the same bits in whatever
    pass), guarded (near-ties are computed anew) or off; default: bitwise where the model and precision have it, else
    guarded in fp32 and off in other precisions, where guarding costs more than drafts gain."""
    prefix_cache_mib: int = DEFAULT_CACHE_BYTES >> 20
    """Memory for cached prefixes, MiB; 0 turns the cache off."""
    max_new_tokens: int = 256
    """New tokens at most."""
    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    """Keep the most likely tokens up to this mass."""
    top_k: int = 0
    """Keep this many most likely tokens; 0 keeps all."""
    seed: int | None = None
    """Seed of sampling."""
    stop: list[str] = field(default_factory=list)
    """End the answer before any of these strings."""
    raw: bool = False
    """Continue the prompt as it is instead of rendering it as a chat message."""
    color: Annotated[bool, tyro.conf.arg(help=_COLOURS, help_behavior_hint="(default: on a terminal)")] = field(
        default_factory=lambda: sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    )


def main(options: Options) -> None:
    prompt = read_standard_input() if options.prompt == "-" else options.prompt
    if not prompt.strip():
        raise PromptError("the prompt is empty; give some text")
    if options.policy and options.controller:
        raise SettingError("--policy and --controller exclude each other; give one of them")
    policy = load_policy(options.policy) if options.policy else None
    decoder = SpeculativeDecoder.from_pretrained(
        options.target,
        drafter=options.drafter or None,
        controller=policy or options.controller or "heuristic",
        precision=options.precision,
        device=options.device,
        prefix_cache_bytes=options.prefix_cache_mib << 20,
        exact=options.exact,
    )
    as_text = options.raw or not getattr(decoder.target.tokenizer, "chat_template", None)
    pieces = decoder.stream(
        prompt if as_text else [{"role": "user", "content": prompt}],
        options.max_new_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        seed=options.seed,
        stop=options.stop,
    )
    painter = Painter(decoder.target.tokenizer, options.stop) if options.color else None
    generation = show(pieces, painter)
    print(statistics_line(generation, decoder.controller.name), file=sys.stderr)


def read_standard_input() -> str:
    """All of standard input. Raises `PromptError` where it is not UTF-8."""
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise PromptError(f"standard input is not UTF-8 (byte {error.start}); give UTF-8 text") from error


def show(pieces: Iterator[Piece], painter: Painter | None) -> Generation:
    """Print a stream as it comes; returns its generation."""
    while True:
        try:
            piece = next(pieces)
        except StopIteration as end:
            print(painter.finish() if painter else "", flush=True)
            if painter:
                print(LEGEND, file=sys.stderr)
            generation: Generation = end.value
            return generation
        print(painter.paint(piece.record) if painter else piece.text, end="", flush=True)


def statistics_line(generation: Generation, controller: str) -> str:
    """One line: tokens, speed, first token, drafting, reuse, controller."""
    counters = generation.counters
    by_guard = f"{counters.num_guard_steps} of them by the guard, " if counters.num_guard_steps else ""
    near_ties = f"{counters.num_guarded_rows} near-ties computed anew, " if counters.num_guarded_rows else ""
    return (
        f"[{len(generation.tokens)} tokens, {generation.tokens_per_second:.1f} tokens/s, "
        f"first after {generation.time_to_first_token * 1e3:.0f} ms, {counters.num_steps} steps, {by_guard}"
        f"{counters.num_accepted_tokens}/{counters.num_draft_tokens} drafts accepted, {near_ties}"
        f"{counters.num_cached_tokens}/{counters.num_prompt_tokens} prompt tokens cached, {controller}]"
    )


if __name__ == "__main__":
    command_line.run(Options, main, "Stream one answer of a speculative decoder, then one line of statistics.")
