"""The lines of a workload file, each with its place, and typed access to a line's fields."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.errors import WorkloadError

_JSON_TYPES = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}


def type_name(value: object) -> str:
    """What JSON calls the type of a value, with its article."""
    return _JSON_TYPES.get(type(value), "a number")


@dataclass(frozen=True)
class Line:
    """A line of text and its place, `path:number`, counted from 1."""

    path: str
    number: int
    text: str

    @property
    def where(self) -> str:
        """What errors begin with."""
        return f"{self.path}:{self.number}"

    def error(self, cause: str, mend: str) -> WorkloadError:
        """An error that names this line."""
        return WorkloadError(f"{self.where}: {cause}; {mend}")


@dataclass(frozen=True)
class Row:
    """A line that holds a JSON object. Its accessors raise WorkloadError if a field is missing or wrong."""

    line: Line
    fields: Mapping[str, object]

    def has(self, name: str) -> bool:
        """A field that is null counts as absent, as many exporters write it so."""
        return self.fields.get(name) is not None

    def require(self, name: str) -> object:
        """A field of any type."""
        if not self.has(name):
            raise self.line.error(f"field {name!r} is missing", "add it")
        return self.fields[name]

    def text(self, name: str) -> str:
        """A string that is not blank."""
        return self.check_text(self.require(name), name)

    def identifier(self, name: str) -> str:
        """A string that is not blank, or a whole number, as a string."""
        value = self.require(name)
        return str(value) if type(value) is int else self.check_text(value, name)

    def items(self, name: str) -> list[object]:
        """A list with at least one entry."""
        value = self.require(name)
        if not isinstance(value, list):
            raise self.line.error(f"{name} is {type_name(value)}", "give a list")
        if not value:
            raise self.line.error(f"{name} is an empty list", "add an entry or remove the line")
        return value

    def texts(self, name: str) -> list[str]:
        """A list of strings, at least one, none of them blank."""
        return [self.check_text(item, f"{name}[{i}]") for i, item in enumerate(self.items(name))]

    def check_text(self, value: object, name: str) -> str:
        """`value` if it is text that is not blank; `name` is what an error calls it."""
        if not isinstance(value, str):
            raise self.line.error(f"{name} is {type_name(value)}", "give a string")
        if not value.strip():
            raise self.line.error(f"{name} is empty", "write a text or remove it")
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            cause = f"{name} holds half of a surrogate pair"
            raise self.line.error(cause, "write the whole character") from None
        return value


def read_lines(path: Path) -> Iterator[Line]:
    """The lines of a UTF-8 file that are not blank, without a byte-order mark.

    The carriage return of a CRLF stays: to JSON it is white space, and prompts are stripped.

    Raises:
        WorkloadError: the file is missing, a folder, unreadable or not UTF-8.
    """
    text = _decode(path, _read_bytes(path))
    # Not splitlines(): U+2028 and its like are part of a prompt, not the end of a line.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield Line(str(path), number, line)


def parse_row(line: Line) -> Row:
    """The JSON object of a line.

    Raises:
        WorkloadError: not JSON, or not an object.
    """
    mend = "write one JSON object a line, or name the file .txt to read each line as a prompt"
    try:
        value = json.loads(line.text)
    except json.JSONDecodeError as error:
        raise line.error(f"not valid JSON ({error.msg}, column {error.colno})", mend) from None
    except (ValueError, RecursionError):
        # A number of thousands of digits, or brackets nested too deep.
        raise line.error("JSON that is too large to read", mend) from None
    if not isinstance(value, dict):
        raise line.error(f"{type_name(value)} where an object should be", mend)
    return Row(line, value)


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise WorkloadError(f"{path}: no such file; give a .jsonl or .txt file, or 'bundled'") from None
    except IsADirectoryError:
        raise WorkloadError(f"{path}: a folder; give a file in it") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise WorkloadError(f"{path}: cannot be read ({reason}); check its name and permissions") from None


def _decode(path: Path, data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # `error.object` and not `data`: the positions do not count a byte-order mark.
        line = error.object[: error.start].count(b"\n") + 1
        byte = error.object[error.start]
        raise WorkloadError(f"{path}:{line}: not UTF-8 (byte 0x{byte:02x}); save the file as UTF-8") from None
