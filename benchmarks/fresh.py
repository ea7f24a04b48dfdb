"""One engine in a process of its own: how soon it answers, how much memory it takes.

`measure(settings)` starts `python -m benchmarks.fresh`, which loads, answers, and prints one JSON document.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine.errors import DraftgateError

PROMPT = "Write a short letter to a friend about a walk along a river in autumn."
STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class Settings:
    """What the process loads and how long it answers."""

    target: str
    precision: str
    controller: str
    max_new_tokens: int


class FreshProcessError(DraftgateError):
    """The process did not come to its end; the message holds its last line."""


def measure(settings: Settings, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Run the settings in a fresh process, with these variables besides ours.

    Returns seconds from its start (`loaded_seconds`, `first_token_seconds`), and peaks of resident memory in bytes
    (`import_bytes`: libraries alone, `load_bytes`, `run_bytes`), with the `weight_bytes` that a step reads.
    """
    words = [sys.executable, "-m", "benchmarks.fresh", json.dumps(asdict(settings) | {"started": time.time()})]
    root = str(Path(__file__).parent.parent)
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    ours = os.environ | {"PYTHONPATH": path} | dict(environment or {})
    ended = subprocess.run(words, capture_output=True, text=True, env=ours, check=False)
    if ended.returncode:
        last = (ended.stderr.strip().splitlines() or ["no message"])[-1]
        raise FreshProcessError(f"a fresh process for {settings.target} in {settings.precision} failed: {last}")
    document: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return document


def peak_bytes() -> int:
    """The most memory that this process has held so far.

    Where the kernel tells, its own figure: `ru_maxrss` of a fresh process begins with what its parent held.
    """
    if STATUS.is_file():
        fields = dict(line.split(":", 1) for line in STATUS.read_text(encoding="utf-8").splitlines() if ":" in line)
        if "VmHWM" in fields:
            return int(fields["VmHWM"].split()[0]) << 10
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most << 10


def main() -> None:
    told = json.loads(sys.argv[1])
    started = told.pop("started")
    settings = Settings(**told)
    import engine.lean_models  # noqa: F401 (so that its libraries count as imported)
    from engine import SpeculativeDecoder

    imported, import_bytes = time.time(), peak_bytes()
    decoder = SpeculativeDecoder.from_pretrained(
        settings.target, controller=settings.controller, precision=settings.precision
    )
    loaded, load_bytes = time.time(), peak_bytes()
    pieces = decoder.stream(PROMPT, settings.max_new_tokens, ignore_eos=True)
    next(pieces)
    first = time.time()
    tokens = 1 + sum(len(piece.record.tokens) for piece in pieces)
    from benchmarks.roofline import weight_bytes

    document = {
        "import_seconds": imported - started,
        "loaded_seconds": loaded - started,
        "first_token_seconds": first - started,
        "import_bytes": import_bytes,
        "load_bytes": load_bytes,
        "run_bytes": peak_bytes(),
        "weight_bytes": weight_bytes(decoder.parts.runner),
        "tokens": tokens,
    }
    print(json.dumps(document), flush=True)


if __name__ == "__main__":
    main()
