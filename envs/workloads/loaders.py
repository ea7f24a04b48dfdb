"""From a name or a path to a workload."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from engine.errors import WorkloadError
from envs.workloads.formats import Group, parse_group, parse_prompt
from envs.workloads.rows import parse_row, read_lines
from envs.workloads.splits import SPLITS, unknown_name
from envs.workloads.workload import Workload

BUNDLED = "bundled"
BUNDLED_FOLDER = Path(__file__).parent / "bundled"


def load_workload(source: str, split: str | None = None) -> Workload:
    """The bundled prompts, or those of a file.

    Args:
        source: `"bundled"`, or a path (`"./bundled"` for a file of that name). A `.txt` file holds one prompt
            a line; any other file holds one JSON object a line, in a format that `formats.py` lists.
        split: `"train"`, `"validation"`, `"test"`, or None for all. Rows that name no split are divided
            60 : 15 : 25 by a hash of their id; a document keeps its questions.

    Raises:
        WorkloadError: one line, `path:line: cause; mend`, for the first line that is not valid.
    """
    if split is not None and split not in SPLITS:
        raise WorkloadError("; ".join(unknown_name("split", split, SPLITS)))
    bundled = source == BUNDLED
    paths = sorted(BUNDLED_FOLDER.glob("*.jsonl")) if bundled else [Path(source)]
    groups = [group for path in paths for group in _read_groups(path)]
    _check_ids(groups)
    name = BUNDLED if bundled else Path(source).stem
    return _select(groups, source, name, split)


def _read_groups(path: Path) -> list[Group]:
    if path.suffix.lower() == ".txt":
        return [parse_prompt(line) for line in read_lines(path)]
    return [parse_group(parse_row(line)) for line in read_lines(path)]


def _check_ids(groups: Iterable[Group]) -> None:
    """No id twice: neither of a group nor of a conversation."""
    first: dict[str, Group] = {}
    for group in groups:
        for name in {group.id: None, **{c.id: None for c in group.conversations}}:
            if name in first:
                raise group.line.error(
                    f"id {name!r} stands at {first[name].line.where} too", "give each line its own id"
                )
            first[name] = group


def _select(groups: list[Group], source: str, name: str, split: str | None) -> Workload:
    if not groups:
        mend = "install the package again, with its data" if source == BUNDLED else "add at least one line"
        raise WorkloadError(f"{source}: no requests; {mend}")
    if split is None:
        return Workload(name, tuple(c for group in groups for c in group.conversations))
    chosen = tuple(c for group in groups if group.split == split for c in group.conversations)
    if not chosen:
        raise WorkloadError(
            f"{source}: none of {len(groups)} lines belongs to the split {split!r}; "
            f'add lines, give some the field "split": "{split}", or ask for no split'
        )
    return Workload(f"{name}/{split}", chosen)
