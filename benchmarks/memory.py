"""What an engine takes in memory: peaks while it loads and over a run, in int8 against fp32, in fresh processes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from agents.report import aligned
from benchmarks.fresh import Settings, measure
from engine.errors import SettingError
from engine.storage import write_json

PEAKS = ("load_bytes", "run_bytes")


@dataclass(frozen=True)
class Options:
    target: str = "smollm2-135m"
    """The model."""
    precisions: list[str] = field(default_factory=lambda: ["int8", "fp32"])
    """What is measured; ratios are to the last one."""
    controller: str = "fixed:4"
    """Who chooses draft lengths."""
    max_new_tokens: int = 128
    """New tokens of the run."""
    json: Path | None = None
    """Write the result to this file too."""


def main(options: Options) -> None:
    if not options.precisions:
        raise SettingError("no precision is given; name at least one")
    found: dict[str, dict[str, Any]] = {}
    for precision in options.precisions:
        measure(settings(options, precision, 1))  # so that converting and compiling are outside of what is measured
        found[precision] = measure(settings(options, precision, options.max_new_tokens))
    print(table(found))
    ratios = {peak: found[options.precisions[0]][peak] / found[options.precisions[-1]][peak] for peak in PEAKS}
    first, last = options.precisions[0], options.precisions[-1]
    print(f"{first} over {last}: {ratios['load_bytes']:.2f} at load, {ratios['run_bytes']:.2f} after the run")
    document = {"benchmark": "memory", "options": json.loads(json.dumps(asdict(options), default=str))}
    document |= {"found": found, "ratios": ratios}
    if options.json:
        write_json(options.json, document)
    print(json.dumps(document))


def settings(options: Options, precision: str, max_new_tokens: int) -> Settings:
    return Settings(options.target, precision, options.controller, max_new_tokens)


def table(found: dict[str, dict[str, Any]]) -> str:
    """Peaks in MB: of the libraries alone, at load, after the run; and the weights that a step reads."""
    columns = ("import_bytes", "load_bytes", "run_bytes", "weight_bytes")
    rows = [["MB", "libraries alone", "peak at load", "peak after the run", "weights of a step"]]
    rows += [[name, *(f"{one[column] / 1e6:.0f}" for column in columns)] for name, one in found.items()]
    return aligned(rows)
