"""What the command lines share: errors as one line, exit codes, options from a dataclass."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar

from engine.errors import DraftgateError

Options = TypeVar("Options")


def run(options: type[Options], main: Callable[[Options], None], description: str) -> None:
    """Read `options` (a dataclass whose field docstrings are the help) from the command line and run `main`.

    Exits with 0 on success, 2 on bad input (one line on stderr), 130 when interrupted.
    """
    import tyro

    try:
        main(tyro.cli(options, description=description))
    except DraftgateError as error:
        sys.exit(_report(f"error: {error}", 2))
    except KeyboardInterrupt:
        sys.exit(_report("interrupted", 130))
    except BrokenPipeError:
        sys.exit(0)  # the reader of our output has had enough


def _report(message: str, code: int) -> int:
    line = " ".join(message.splitlines())  # names that the user gave may hold line breaks
    print(f"draftgate: {line}".encode("utf-8", "replace").decode(), file=sys.stderr)
    return code
