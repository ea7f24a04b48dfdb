"""Is a row the same bits however many run at once, and in every process?

`compare_rows` holds passes of 1 to 9 rows against single-row passes on top of the same prefix. `process_digests` starts
fresh processes, `python -m benchmarks.row_bits SETTINGS`, each of which prints the digest of one text's logits and KV.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine import SpeculativeDecoder
from engine.errors import SettingError
from engine.kv import KVBuffer
from engine.runner import Runner
from engine.storage import CACHE_VARIABLE, cache_folder
from envs.workloads import load_workload

MOST_ROWS = 9
DIGEST_TOKENS = 192  # of the fixed text; the last MOST_ROWS of them run one at a time


@dataclass
class RowBits:
    """Rows compared with the same row of a single-row pass.

    Attributes:
        positions: places in texts; each yields 1 + 2 + ... + 9 rows.
        logits_differ, kv_differ: rows with any bit changed in their logits, or in their keys and values.
        largest: the largest difference of two logits.
    """

    positions: int = 0
    rows: int = 0
    logits_differ: int = 0
    kv_differ: int = 0
    largest: float = 0.0

    @property
    def equal(self) -> bool:
        return not self.logits_differ and not self.kv_differ

    def show(self) -> None:
        print(
            f"passes of 1 to {MOST_ROWS} rows at {self.positions} positions: {self.rows} rows compared, "
            f"{self.logits_differ} with other logits (by {self.largest:.3g} at most), {self.kv_differ} with other KV"
        )


def compare_rows(
    runner: Runner,
    texts: Sequence[list[int]],
    positions: int,
    seed: int = 0,
    on_position: Callable[[], object] = lambda: None,
) -> RowBits:
    """Compare at random positions of `texts` (token ids); texts of fewer than 1 + MOST_ROWS tokens are left out.

    Raises `SettingError` where no text is long enough.
    """
    long_enough = [text for text in texts if len(text) > MOST_ROWS]
    if not long_enough:
        raise SettingError(f"no text has more than {MOST_ROWS} tokens, which comparing rows takes; give longer prompts")
    rng = np.random.default_rng(seed)
    found = RowBits()
    for _ in range(positions):
        text = long_enough[int(rng.integers(len(long_enough)))]
        start = int(rng.integers(1, len(text) - MOST_ROWS + 1))
        _compare_at(runner, text[:start], text[start : start + MOST_ROWS], found)
        on_position()
    return found


def _compare_at(runner: Runner, prefix: list[int], following: list[int], found: RowBits) -> None:
    buffer = runner.new_buffer()
    runner.forward(prefix, buffer, 1)
    single = [runner.forward([token], buffer, 1)[0].clone() for token in following]
    held = _rows(buffer, len(prefix))
    found.positions += 1
    for count in range(1, len(following) + 1):
        buffer.truncate(len(prefix))
        logits = runner.forward(following[:count], buffer, count)
        kept = _rows(buffer, len(prefix))
        for row in range(count):
            found.rows += 1
            found.logits_differ += not _same_bits(logits[row], single[row])
            found.kv_differ += not _same_bits(kept[row], held[row])
            found.largest = max(found.largest, float((logits[row] - single[row]).abs().max()))


def _rows(buffer: KVBuffer, start: int) -> Tensor:
    """A copy of the keys and values from position `start` on, `[positions, all layers' keys and values]`."""
    parts = [part[0, :, start:].transpose(0, 1).flatten(1) for pair in buffer.views() for part in pair]
    return torch.cat(parts, dim=1)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same bytes: unlike ==, this tells 0 from -0 and takes NaN for itself."""
    return _bytes(one) == _bytes(other)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()


# -- processes ----------------------------------------------------------------------------------------------------


def process_digests(settings: dict[str, Any], count: int, cold: bool = False) -> list[str]:
    """Digests of `count` fresh processes; `settings` are those of `text_digest`.

    With `cold`, one more process goes before them whose kernels are not compiled yet. Raises `SettingError` with the
    last line that a process wrote where it failed.
    """
    digests = []
    if cold:
        with TemporaryDirectory() as folder:
            (cache_folder() / "models").mkdir(parents=True, exist_ok=True)
            (Path(folder) / "models").symlink_to((cache_folder() / "models").resolve())  # spares converting anew
            digests.append(_fresh_digest(settings, {CACHE_VARIABLE: folder}))
    return digests + [_fresh_digest(settings, {}) for _ in range(count)]


def _fresh_digest(settings: dict[str, Any], variables: dict[str, str]) -> str:
    root = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "benchmarks.row_bits", json.dumps(settings)]
    environment = os.environ | {"PYTHONPATH": path} | variables
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2]
        raise SettingError(f"a fresh process ended with code {done.returncode} ({last}); run this command by hand")
    return done.stdout.split()[-1]


def text_digest(**settings: Any) -> str:
    """16 hex digits of the logits, keys and values of a fixed text, read in one pass and then row by row.

    `settings` are those of `SpeculativeDecoder.from_pretrained`.
    """
    decoder = SpeculativeDecoder.from_pretrained(controller="plain", **settings)
    text = " ".join(c.messages[0].content for c in load_workload("bundled").conversations[:4])
    tokens = decoder.encode(text)[:DIGEST_TOKENS]
    runner, digest = decoder.parts.runner, hashlib.sha256()
    buffer = runner.new_buffer()
    head, rest = tokens[:-MOST_ROWS], tokens[-MOST_ROWS:]
    digest.update(_bytes(runner.forward(head, buffer, len(head))))
    for token in rest:
        digest.update(_bytes(runner.forward([token], buffer, 1)))
    digest.update(_bytes(_rows(buffer, 0)))
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    print(text_digest(**json.loads(sys.argv[1])))
