"""How far the grouping of rows into passes moves logits: measured at start, in a second or so on a small model."""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np
import transformers
from torch import Tensor

from engine.costs import machine_fingerprint
from engine.errors import StorageError
from engine.prompts import encode_prompt
from engine.runner import Runner
from engine.stopwatch import calibration_tokens
from engine.storage import cache_folder, write_json

SAFETY = 4.0  # the bound over the largest change seen, which is itself taken over 32 logits and not the top two
CANDIDATES = 32  # highest logits of a row that are compared: what lies below them cannot come out
PROMPT, ROWS = 16, 24  # tokens of a text that are read at once, and those that follow it
FORMAT_VERSION = 1  # of the files kept
TEXTS = (
    "The ferry left at seven, an hour late, because the wind had turned in the night and nobody wanted to be the first "
    "to cross. Anna stood at the rail with her collar up. Behind her two men argued about the price of herring, and a "
    "child asked again and again whether the island was still there. It was, of course; it only hid in the fog.",
    "def moving_average(values, width):\n    total = 0.0\n    averages = []\n"
    "    for index, value in enumerate(values):\n        total += value\n        if index >= width:\n"
    "            total -= values[index - width]\n        averages.append(total / min(index + 1, width))\n"
    "    return averages\n",
)


@dataclass
class Rounding:
    """What grouping does to logits, as far as it was seen. One for all requests of an engine, which add what they see.

    Attributes:
        largest: the largest change that was seen of the distance between two of a row's highest logits.
    """

    largest: float

    @property
    def bound(self) -> float:
        """Two logits nearer than this may change their order."""
        return SAFETY * self.largest

    def learn(self, plain: Tensor, grouped: Tensor) -> None:
        """Take in one row's logits `[vocab]`, computed both ways."""
        self.largest = max(self.largest, change(plain, grouped))


def cached_rounding(runner: Runner, tokenizer: Any, lengths: Sequence[int], device: str = "cpu") -> Rounding:
    """The rounding of a runner for draft lengths `lengths`, from the cache folder, or measured now and kept there.

    What is kept is found by the bits of one pass, so that other weights, another precision or another kernel are
    measured anew. A figure that cannot be kept is used all the same, with a warning.
    """
    texts = [_tokens(runner, encode_prompt(tokenizer, text)) for text in TEXTS]
    texts.append(_tokens(runner, calibration_tokens(runner.vocab_size, PROMPT + ROWS)))
    bits = hashlib.sha256(runner.forward(texts[0], runner.new_buffer(), 1).cpu().numpy().tobytes()).hexdigest()
    most = max(lengths, default=0) + 1
    key = json.dumps([FORMAT_VERSION, bits, most, machine_fingerprint(device), transformers.__version__])
    path = cache_folder() / "rounding" / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
    try:
        largest = float(json.loads(path.read_text(encoding="utf-8"))["largest"])
        if 0.0 <= largest < math.inf:
            return Rounding(largest)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass  # never measured, damaged, or by a version that wrote another form
    rounding = measure_rounding(runner, texts, most)
    try:
        write_json(path, {"largest": rounding.largest})
    except StorageError as error:
        warnings.warn(f"the measured rounding is not kept and will be measured again ({error})", stacklevel=2)
    return rounding


def measure_rounding(runner: Runner, texts: Sequence[Sequence[int]], most_rows: int) -> Rounding:
    """Compare plain decoding's passes over the start of each text with passes of 2 to `most_rows` rows.

    Once the prompt comes in two parts, as behind a cached prefix, and once together with the first rows that follow.
    """
    sizes = range(min(2, most_rows), most_rows + 1)
    rounding = Rounding(0.0)
    for text in texts:
        tokens = text[: PROMPT + ROWS]
        prompt = max(1, min(PROMPT, len(tokens) // 2))
        plain = _logits(runner, tokens, prompt, [prompt, *[1] * ROWS])
        halves = [prompt // 2, prompt - prompt // 2] if prompt > 1 else [prompt]
        for passes in ([*halves, *_repeat(sizes)], [prompt + most_rows - 1, *_repeat(sizes[::-1])]):
            for ours, theirs in zip(plain, _logits(runner, tokens, prompt, passes), strict=True):
                rounding.learn(ours, theirs)
    return rounding


def change(plain: Tensor, grouped: Tensor) -> float:
    """The largest change of the distance between any two of the highest logits of a row `[vocab]`."""
    ours, theirs = plain.cpu().numpy(), grouped.cpu().numpy()
    top = np.argpartition(ours, -CANDIDATES)[-CANDIDATES:] if len(ours) > CANDIDATES else slice(None)
    ours, theirs = ours[top], theirs[top]
    finite = np.isfinite(ours) & np.isfinite(theirs)  # else masked by the model
    moved = theirs[finite] - ours[finite]
    return float(moved.max() - moved.min()) if moved.size else 0.0


def _tokens(runner: Runner, tokens: Sequence[int]) -> list[int]:
    return list(tokens[: min(PROMPT + ROWS, runner.max_context)])


def _repeat(sizes: Sequence[int]) -> Iterator[int]:
    """The sizes over and over, for as many rows as may be wanted."""
    left = PROMPT + ROWS
    for size in cycle(sizes):
        if left <= 0:
            return
        yield size
        left -= size


def _logits(runner: Runner, tokens: Sequence[int], prompt: int, passes: Sequence[int]) -> list[Tensor]:
    """Logits of the prompt's last row and of all that follow it, in passes of these sizes."""
    buffer, start, logits = runner.new_buffer(), 0, []
    for size in passes:
        stop = min(start + size, len(tokens))
        if start == stop:
            break
        wanted = stop - max(start, prompt - 1)
        rows = runner.forward(tokens[start:stop], buffer, max(1, wanted))
        logits += list(rows) if wanted > 0 else []
        start = stop
    return logits
