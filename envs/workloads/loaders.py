"""From names or paths to a workload."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from engine.errors import WorkloadError
from envs.workloads.formats import Group, parse_group, parse_prompt
from envs.workloads.rows import parse_row, read_lines
from envs.workloads.splits import SPLITS, unknown_name
from envs.workloads.workload import Workload

BUNDLED = "bundled"
BUNDLED_FOLDER = Path(__file__).parent / "bundled"


def load_workload(source: str | Sequence[str], split: str | None = None) -> Workload:
    """The bundled prompts, or those of a file, or of several of these as one workload.

    What stands twice without an id of its own is kept once.

    Args:
        source: `"bundled"`, or a path (`"./bundled"` for a file of that name), or several. A `.txt` file holds one
            prompt a line; any other file holds one JSON object a line, in a format that `formats.py` lists.
        split: `"train"`, `"validation"`, `"test"`, or None for all. Rows that name no split are divided
            60 : 15 : 25 by a hash of their id, which without one hangs on their content; a document keeps its
            questions. A source may lack rows of the split where another one has some.

    Raises:
        WorkloadError: one line, `path:line: cause; mend`, for the first line that is not valid.
    """
    if split is not None and split not in SPLITS:
        raise WorkloadError("; ".join(unknown_name("split", split, SPLITS)))
    sources = [source] if isinstance(source, str) else list(dict.fromkeys(source))
    groups = _once(group for each in sources for group in _read(each))
    chosen = tuple(c for group in groups if split in (None, group.split) for c in group.conversations)
    if not chosen:
        mend = f'add rows, or give some the field "split": "{split}"'
        raise WorkloadError(f"{', '.join(sources)}: no {split} rows; {mend}")
    name = "+".join(BUNDLED if each == BUNDLED else Path(each).stem for each in sources)
    return Workload(f"{name}/{split}" if split else name, chosen)


def _read(source: str) -> list[Group]:
    paths = sorted(BUNDLED_FOLDER.glob("*.jsonl")) if source == BUNDLED else [Path(source)]
    groups = [group for path in paths for group in _read_groups(path)]
    if not groups:
        mend = "install the package again, with its data" if source == BUNDLED else "add at least one line"
        raise WorkloadError(f"{source}: no requests; {mend}")
    return groups


def _read_groups(path: Path) -> list[Group]:
    if path.suffix.lower() == ".txt":
        return [parse_prompt(line) for line in read_lines(path)]
    return [parse_group(parse_row(line)) for line in read_lines(path)]


def _once(groups: Iterable[Group]) -> list[Group]:
    """The groups without what stood before under an id of its content. No given id stands twice: neither of a group
    nor of a conversation."""
    first: dict[str, Group] = {}
    kept = []
    for group in groups:
        names = [*([group.id] if group.named else []), *(c.id for c in group.conversations)]
        for name in names:
            if name in first and (group.named or first[name].named):
                raise group.line.error(
                    f"id {name!r} stands at {first[name].line.where} too", "give each line its own id"
                )
        new = {c.id: c for c in group.conversations if c.id not in first}
        first.update((name, group) for name in names if name not in first)
        kept.append(replace(group, conversations=tuple(new.values())))
    return kept
