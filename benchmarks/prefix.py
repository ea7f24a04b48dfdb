"""What a cached prefix is worth: time to first token of a second question on a document, over a first one's.

Each round uses a document that the cache has not seen (the text under a new heading), asks one question and then
another, with caches on; the ratio is first over second. Runs for the target alone, and with a model drafter.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from statistics import median

from engine import SpeculativeDecoder
from envs.workloads import load_workload


@dataclass(frozen=True)
class Options:
    target: str = "smollm2-135m"
    """The model."""
    drafter: str = "ngram"
    """Who drafts: ngram, model:<name>."""
    controller: str = "fixed:4"
    """Who chooses draft lengths."""
    precision: str = "fp32"
    """fp32, bf16 or fp16."""
    rounds: int = 7
    """How often a new document is asked about."""


def main(options: Options) -> None:
    decoder = SpeculativeDecoder.from_pretrained(
        options.target, options.drafter, controller=options.controller, precision=options.precision
    )
    document, questions = longest_document()
    decoder.generate(document[:200], max_new_tokens=8, salt="warm-up")
    ratios, firsts, seconds = [], [], []
    for round_ in range(options.rounds):
        prompts = [f"Copy {round_} of the document.\n\n{document}\n\nQuestion: {q}" for q in questions[:2]]
        first, second = [
            decoder.generate([{"role": "user", "content": prompt}], max_new_tokens=16).time_to_first_token
            for prompt in prompts
        ]
        firsts.append(first)
        seconds.append(second)
        ratios.append(first / second)
    tokens = len(decoder.encode([{"role": "user", "content": prompts[0]}]))
    result = {
        "drafter": options.drafter,
        "prompt_tokens": tokens,
        "first_question_seconds": round(median(firsts), 4),
        "second_question_seconds": round(median(seconds), 4),
        "ratio": round(median(ratios), 2),
        "ratio_lowest": round(min(ratios), 2),
        "ratio_highest": round(max(ratios), 2),
    }
    print(
        f"{tokens} prompt tokens, drafter {options.drafter}: first token after {result['first_question_seconds']} s, "
        f"on the second question after {result['second_question_seconds']} s: {result['ratio']} times sooner "
        f"({result['ratio_lowest']} to {result['ratio_highest']} in {options.rounds} rounds)"
    )
    print(json.dumps(result))


def longest_document() -> tuple[str, list[str]]:
    """The longest bundled document and the questions on it."""
    by_group: dict[str, list[str]] = {}
    for conversation in load_workload("bundled").conversations:
        if conversation.kind == "documents":
            by_group.setdefault(conversation.group, []).append(conversation.messages[-1].content)
    prompts = max(by_group.values(), key=lambda texts: len(texts[0]))
    marker = "\n\nQuestion: "
    document = prompts[0].rpartition(marker)[0]
    return document, [prompt.rpartition(marker)[2] for prompt in prompts]
