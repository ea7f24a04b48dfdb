"""Are the tokens those of plain decoding? Every menu entry on every request, and transformers' `generate` beside it.

Where a run parts from its reference, the margin of the target's two top logits at that place is reported: rounding can
only turn a near-tie.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from agents.evaluation import count_mismatches
from engine import Generation, SpeculativeDecoder, load_model
from engine.models import LoadedModel
from engine.storage import write_json
from envs.dialogue import Dialogue, Turn
from envs.workloads import Workload, load_workload


@dataclass(frozen=True)
class Options:
    target: str = "smollm2-135m"
    """The model."""
    drafter: str = "ngram"
    """Who drafts."""
    precision: str = "fp32"
    """fp32, bf16 or fp16."""
    workload: str = "bundled"
    """Prompts: bundled, or a file."""
    split: str = "test"
    """Which part of the workload."""
    requests: int = 0
    """How many requests; 0 takes all."""
    max_new_tokens: int = 96
    """New tokens of a request at most."""
    transformers: bool = True
    """Compare with transformers' own generate as well, except in int8."""
    json: Path | None = None
    """Write the result to this file too."""


def main(options: Options) -> None:
    workload = load_workload(options.workload, options.split)
    if 0 < options.requests < workload.num_requests:
        workload = workload.sample(options.requests, seed=0)
    decoder = SpeculativeDecoder.from_pretrained(
        options.target, options.drafter, controller="plain", precision=options.precision
    )
    compared = options.transformers and options.precision != "int8"  # transformers does not run these weights
    plain_model = load_model(options.target, options.precision, packed=False) if compared else None
    names = ["plain", "fresh", *(f"fixed:{k}" for k in decoder.parts.menu.lengths)]
    arms = {name: decoder.with_empty_caches().with_controller(name) for name in names}
    tally = {name: Tally() for name in [*names, *(["transformers"] if compared else [])][1:]}
    with tqdm(total=workload.num_requests, unit="request") as bar:
        for turn, done in _runs(workload, arms, options.max_new_tokens):
            prompt = decoder.encode(turn.messages)
            reference = done["plain"].tokens
            for name in names[1:]:
                tally[name].add(turn.id, prompt, done[name].tokens, reference, decoder.target)
            if plain_model:
                tokens = _generate(plain_model, prompt, options.max_new_tokens)
                tally["transformers"].add(turn.id, prompt, tokens, reference, plain_model)
            bar.update()
    document: dict[str, Any] = {"requests": workload.num_requests, "max_new_tokens": options.max_new_tokens}
    document |= {"arms": {name: arm.__dict__ for name, arm in tally.items()}}
    for name, arm in tally.items():
        parted_in = f"{len(arm.parted)} of {arm.requests} requests"
        print(f"{name:>12}: {arm.tokens} tokens, {arm.mismatched} mismatched in {parted_in}")
        for parted in arm.parted:
            print(f"{'':>14}{parted}")
    if options.json:
        write_json(options.json, document)
    print(json.dumps(document))


class Tally:
    """How often one arm's tokens differ from the reference, and where they part."""

    def __init__(self) -> None:
        self.requests = 0
        self.tokens = 0
        self.mismatched = 0
        self.parted: list[dict[str, Any]] = []

    def add(self, request: str, prompt: list[int], tokens: list[int], reference: list[int], model: LoadedModel) -> None:
        self.requests += 1
        self.tokens += len(tokens)
        self.mismatched += count_mismatches(tokens, reference)
        if tokens != reference:
            at = next((i for i, (a, b) in enumerate(zip(tokens, reference, strict=False)) if a != b), None)
            margin = _margin(model, prompt + reference[:at]) if at is not None else None
            self.parted.append({"request": request, "position": at, "margin": margin})


def _runs(
    workload: Workload, arms: dict[str, SpeculativeDecoder], max_new_tokens: int
) -> Iterator[tuple[Turn, dict[str, Generation]]]:
    for conversation in workload.conversations:
        dialogue = Dialogue(conversation)
        while turn := dialogue.next_turn():
            done = {name: arm.generate(turn.messages, max_new_tokens) for name, arm in arms.items()}
            dialogue.reply(done["plain"].text)
            yield turn, done


@torch.inference_mode()
def _generate(model: LoadedModel, prompt: list[int], max_new_tokens: int) -> list[int]:
    """Greedy tokens of transformers' `generate`, without speculation."""
    ids = torch.tensor([prompt])
    hf: Any = model.runner.model  # type: ignore[attr-defined]
    output = hf.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=sorted(model.eos_ids),
        pad_token_id=min(model.eos_ids),
    )
    return [int(token) for token in output[0, len(prompt) :]]


def _margin(model: LoadedModel, context: list[int]) -> float:
    """Distance of the two top logits after `context`."""
    logits = model.runner.forward(context, model.runner.new_buffer(), 1)[0]
    first, second = logits.topk(2).values
    return float(first - second)
