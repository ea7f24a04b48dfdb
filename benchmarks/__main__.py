"""`python -m benchmarks NAME [options]`: run one benchmark."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path

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
        listed = "\n".join(f"  {name:12} {_what(name)}" for name in NAMES)
        sys.exit(f"usage: python -m benchmarks NAME [options]; NAME --help lists the options\n{listed}")
    module = importlib.import_module(f"benchmarks.{name}")
    sys.argv = [f"benchmarks {name}", *sys.argv[2:]]
    command_line.run(module.Options, module.main, module.__doc__ or "")


def _what(name: str) -> str:
    """The first line of a benchmark's docstring, without importing it."""
    tree = ast.parse(Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8"))
    return (ast.get_docstring(tree) or "").partition("\n")[0]


if __name__ == "__main__":
    main()
