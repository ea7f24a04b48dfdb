"""What int8 costs in quality: perplexity against fp32 on the same text, in windows of 512 tokens."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from engine import load_model
from engine.runner import Runner
from envs.workloads import load_workload

WINDOW = 512


@dataclass(frozen=True)
class Options:
    target: str = "smollm2-135m"
    """The model."""
    precision: str = "int8"
    """What is compared with fp32."""
    text: Path | None = None
    """A UTF-8 text file; default: the bundled prompts."""
    tokens: int = 20_000
    """Tokens of the text at most."""


def main(options: Options) -> None:
    plain, other = load_model(options.target), load_model(options.target, options.precision)
    text = options.text.read_text(encoding="utf-8") if options.text else bundled_text()
    tokens = plain.tokenizer(text)["input_ids"][: options.tokens]
    losses = {"fp32": 0.0, options.precision: 0.0}
    count = same = 0
    for start in tqdm(range(0, len(tokens) - 1, WINDOW), unit="window"):
        window = tokens[start : start + WINDOW + 1]
        ours, theirs = (window_logits(model.runner, window) for model in (plain, other))
        losses["fp32"] += total_loss(ours, window)
        losses[options.precision] += total_loss(theirs, window)
        same += int((ours.argmax(dim=-1) == theirs.argmax(dim=-1)).sum())
        count += len(window) - 1
    perplexity = {name: math.exp(loss / count) for name, loss in losses.items()}
    change = perplexity[options.precision] / perplexity["fp32"] - 1
    print(
        f"perplexity on {count} tokens: fp32 {perplexity['fp32']:.3f}, {options.precision} "
        f"{perplexity[options.precision]:.3f} ({change:+.2%}); the same top token at {same / count:.2%} of the places"
    )
    print(json.dumps({"tokens": count, "perplexity": perplexity, "change": change, "same_top_token": same / count}))


def window_logits(runner: Runner, window: list[int]) -> torch.Tensor:
    """Logits `[len(window) - 1, vocab]` of every place but the last."""
    return runner.forward(window[:-1], runner.new_buffer(), len(window) - 1)


def total_loss(logits: torch.Tensor, window: list[int]) -> float:
    """Sum of the negative log-likelihoods of the tokens that follow, nats."""
    return float(torch.nn.functional.cross_entropy(logits, torch.tensor(window[1:]), reduction="sum"))


def bundled_text() -> str:
    """Every bundled user message, a blank line between them."""
    conversations = load_workload("bundled").conversations
    return "\n\n".join(message.content for talk in conversations for message in talk.messages)
