"""transformers' assisted generation against its own plain `generate`: the same comparison, made of its tokens."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.parting import Tally
from engine import SpeculativeDecoder, load_model
from engine.models import LoadedModel
from envs.dialogue import Dialogue
from envs.workloads import Workload

LOOKUP_TOKENS = 8

Generate = Callable[[list[int]], list[int]]


def compare_assisted(
    target: str,
    precision: str,
    workload: Workload,
    max_new_tokens: int,
    assistant: str | None = None,
    on_request: Callable[[], object] = lambda: None,
) -> dict[str, Tally]:
    """Tallies of transformers' prompt lookup, of its `assistant_model` where one is given, and of this engine's plain
    decoding, each against transformers' plain `generate` in the same precision."""
    model = load_model(target, precision, packed=False)
    ours = SpeculativeDecoder.from_pretrained(target, controller="plain", precision=precision, prefix_cache_bytes=0)
    arms: dict[str, Generate] = {
        f"prompt lookup {LOOKUP_TOKENS}": lambda prompt: generate(
            model, prompt, max_new_tokens, prompt_lookup_num_tokens=LOOKUP_TOKENS
        ),
        "this engine, plain": lambda prompt: ours.generate(prompt, max_new_tokens).tokens,
    }
    if assistant:
        helper: Any = load_model(assistant, precision, packed=False).runner.model  # type: ignore[attr-defined]
        arms["assistant model"] = lambda prompt: generate(model, prompt, max_new_tokens, assistant_model=helper)
    tallies = {name: Tally() for name in arms}
    for conversation in workload.conversations:
        dialogue = Dialogue(conversation)
        while turn := dialogue.next_turn():
            prompt = ours.encode(turn.messages)
            reference = generate(model, prompt, max_new_tokens)
            for name, arm in arms.items():
                started = time.perf_counter()
                tokens = arm(prompt)
                tallies[name].seconds += time.perf_counter() - started
                tallies[name].add({"request": turn.id}, prompt, tokens, reference, model)
            dialogue.reply(model.tokenizer.decode(reference, skip_special_tokens=True))
            on_request()
    return tallies


@torch.inference_mode()
def generate(model: LoadedModel, prompt: list[int], max_new_tokens: int, **settings: Any) -> list[int]:
    """Greedy tokens of transformers' `generate`; `settings` are its own."""
    ids = torch.tensor([prompt])
    hf: Any = model.runner.model  # type: ignore[attr-defined]
    output = hf.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=sorted(model.eos_ids),
        pad_token_id=min(model.eos_ids),
        **settings,
    )
    return [int(token) for token in output[0, len(prompt) :]]
