"""The prompts of a run: several sources as one workload."""

from __future__ import annotations

from collections.abc import Sequence

from engine.errors import WorkloadError
from envs.workloads import Workload, load_workload


def load_prompts(sources: Sequence[str], split: str | None = None) -> Workload:
    """The workload of one source, or of several in the order given; a source may lack rows of the split.

    Raises:
        WorkloadError: a source cannot be read, two hold the same id, or none has rows of the split.
    """
    wholes = {source: load_workload(source) for source in dict.fromkeys(sources)}
    _check_ids(wholes)
    found = [_part(source, split) if split else whole for source, whole in wholes.items()]
    parts = [part for part in found if part is not None]
    if not parts:
        raise WorkloadError(
            f'{", ".join(wholes)}: no {split} rows; add rows, or give some the field "split": "{split}"'
        )
    if len(wholes) == 1:
        return parts[0]
    names = "+".join(whole.name for whole in wholes.values())
    conversations = tuple(conversation for part in parts for conversation in part.conversations)
    return Workload(f"{names}/{split}" if split else names, conversations)


def _part(source: str, split: str) -> Workload | None:
    try:
        return load_workload(source, split)
    except WorkloadError:
        return None  # the source itself has been read without fault


def _check_ids(wholes: dict[str, Workload]) -> None:
    """Recordings and intervals tell conversations by their ids, and documents by their groups."""
    first: dict[str, str] = {}
    for source, whole in wholes.items():
        for name in {name for talk in whole.conversations for name in (talk.id, talk.group)}:
            if name in first:
                raise WorkloadError(f"id {name!r} stands in {first[name]} and in {source}; give each row its own id")
            first[name] = source
