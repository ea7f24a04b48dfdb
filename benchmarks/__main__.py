"""`python -m benchmarks NAME [options]`: run one benchmark."""

from __future__ import annotations

import importlib
import sys

from engine import command_line

NAMES = (
    "controllers",
    "decide",
    "engine",
    "identity",
    "memory",
    "ngram",
    "pair",
    "prefix",
    "quality",
    "replay",
    "start",
    "transfer",
)


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in NAMES:
        sys.exit(f"usage: python -m benchmarks {{{','.join(NAMES)}}} [options]")
    module = importlib.import_module(f"benchmarks.{name}")
    sys.argv = [f"benchmarks {name}", *sys.argv[2:]]
    command_line.run(module.Options, module.main, module.__doc__ or "")


if __name__ == "__main__":
    main()
