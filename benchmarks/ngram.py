"""Microseconds that the n-gram drafter takes a step, on ordinary and on adversarial texts.

A step is what a decoder asks for at k > 0: the text has grown by one token, then `signal`, then `propose`.
The longest step is shown too: debts are settled there, or the interpreter collects garbage. With history, the
whole text is also the text of an earlier request. The last line of stdout is JSON.
"""

from __future__ import annotations

import json
import platform
import random
import statistics
import time
from dataclasses import asdict, dataclass

from engine.drafters.ngram import NGramDrafter

Text = list[int]


def zipf(size: int, rng: random.Random) -> Text:
    """Tokens by rank frequency, a quarter of them in phrases seen before: a stand-in for ordinary text."""
    weights = [1 / rank for rank in range(1, 5001)]
    text = rng.choices(range(5000), weights, k=64)
    while len(text) < size:
        start, phrase = rng.randrange(len(text)), rng.randint(2, 10)
        text += text[start : start + phrase] + rng.choices(range(5000), weights, k=3 * phrase)
    return text[:size]


def runs(size: int, rng: random.Random) -> Text:
    text = Text()
    while len(text) < size:
        text += [0] * rng.randrange(200) + [1 + rng.randrange(2)]
    return text[:size]


def fibonacci(size: int) -> Text:
    short, long = [1], [1, 0]
    while len(long) < size:
        short, long = long, long + short
    return long[:size]


def texts(size: int) -> dict[str, Text]:
    rng = random.Random(0)
    return {
        "ordinary": zipf(size, rng),
        "one token": [7] * size,
        "one token, broken up": [7] * (size - 600) + ([8] + [7] * 99) * 6,
        "alternating": [1, 2] * (size // 2),
        "period of 50": [i % 50 for i in range(size)],
        "runs": runs(size, rng),
        "growing runs": [token for i in range(size) for token in [0] * i + [1]][:size],
        "Fibonacci": fibonacci(size),
        "random bits": [rng.randrange(2) for _ in range(size)],
        "random of 50,000": [rng.randrange(50_000) for _ in range(size)],
    }


def measure(text: Text, context: int, k: int, history_tokens: int) -> dict[str, float]:
    """Begins with the first `context` tokens, then steps through the rest."""
    drafter = NGramDrafter(history_tokens=history_tokens)
    if history_tokens:
        drafter.begin(text[:1]).close(text)
    grown = text[:context]
    started = time.perf_counter()
    state = drafter.begin(grown)
    begun = time.perf_counter()
    steps = []
    for token in text[context:]:
        grown.append(token)
        before = time.perf_counter()
        state.signal(grown)
        state.propose(grown, k)
        steps.append(1e6 * (time.perf_counter() - before))
    steps.sort()
    return {
        "begin_us_per_token": round(1e6 * (begun - started) / context, 2),
        "step_us_median": round(statistics.median(steps), 1),
        "step_us_p99": round(steps[int(0.99 * len(steps))], 1),
        "step_us_max": round(steps[-1], 1),
    }


@dataclass(frozen=True)
class Options:
    context: int = 8192
    """Tokens indexed before the first step."""
    steps: int = 1024
    """Steps measured, one token each."""
    k: int = 8
    """Draft length."""


def main(options: Options) -> None:
    results = {}
    for name, text in texts(options.context + options.steps).items():
        for history in (0, 2 * len(text)):
            label = f"{name}, with history" if history else name
            results[label] = measure(text, options.context, options.k, history)
            print(f"{label:36}", *(f"{key} {value:7.1f}" for key, value in results[label].items()), sep="  ")
    machine = {"python": platform.python_version(), "machine": platform.machine()}
    print(json.dumps({"benchmark": "ngram", **asdict(options), **machine, "results": results}))
