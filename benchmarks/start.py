"""How soon an engine answers: from the start of a process to a loaded engine and to the first token.

With a warm cache folder (kernels compiled, model converted, costs calibrated), and with `--cold` with an empty one.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from agents.report import aligned
from benchmarks.fresh import Settings, measure
from engine.errors import SettingError
from engine.storage import CACHE_VARIABLE, write_json

TOLD = ("import_seconds", "loaded_seconds", "first_token_seconds")


@dataclass(frozen=True)
class Options:
    target: str = "smollm2-135m"
    """The model."""
    precisions: list[str] = field(default_factory=lambda: ["fp32", "int8"])
    """What is started."""
    controller: str = "heuristic"
    """Who chooses draft lengths; all but plain, fresh and fixed:K need the costs of this machine."""
    rounds: int = 3
    """Processes for each precision; medians are told."""
    cold: bool = False
    """Start with an empty cache folder too, once for each precision."""
    json: Path | None = None
    """Write the result to this file too."""


def main(options: Options) -> None:
    if options.rounds < 1:
        raise SettingError(f"rounds is {options.rounds}; give at least 1")
    found = {precision: warm_start(options, precision) for precision in options.precisions}
    if options.cold:
        found |= {f"{precision}, cold": cold_start(options, precision) for precision in options.precisions}
    rows = [["seconds from the process's start", "libraries imported", "engine loaded", "first token"]]
    rows += [[name, *(f"{one[what]:.2f}" for what in TOLD)] for name, one in found.items()]
    print(aligned(rows))
    document = {"benchmark": "start", "options": json.loads(json.dumps(asdict(options), default=str)), "found": found}
    if options.json:
        write_json(options.json, document)
    print(json.dumps(document))


def warm_start(options: Options, precision: str) -> dict[str, Any]:
    """Medians over processes, after one that fills the cache folder."""
    settings = Settings(options.target, precision, options.controller, 1)
    measure(settings)
    runs = [measure(settings) for _ in range(options.rounds)]
    return {what: median(run[what] for run in runs) for what in TOLD}


def cold_start(options: Options, precision: str) -> dict[str, Any]:
    """One process with an empty cache folder."""
    with tempfile.TemporaryDirectory() as folder:
        run = measure(Settings(options.target, precision, options.controller, 1), {CACHE_VARIABLE: folder})
    return {what: run[what] for what in TOLD}
