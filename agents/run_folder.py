"""The folder of a training run: what it was made with, and whether another run may write into it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agents.training import CONFIG_FILE, STATE_FILE
from engine.errors import PolicyError, SettingError

# What a state was learned with. A run that differs in any of these learns something else.
COMPARED = (
    "agent",
    "target",
    "drafter",
    "workload",
    "workload_fingerprint",
    "menu",
    "precision",
    "device",
    "max_new_tokens",
)


def check_folder(folder: Path, config: Mapping[str, Any], resume: bool, overwrite: bool) -> None:
    """Whether a run of this configuration may go on, or begin, in `folder`. Nothing is written.

    Raises:
        SettingError: the folder holds a run's state and neither resuming nor overwriting was asked for, or both were.
        PolicyError: there is nothing to resume, or it was learned with other settings.
    """
    if resume and overwrite:
        raise SettingError("--resume and --overwrite exclude each other; give one of them")
    held = (folder / STATE_FILE).is_file()
    if resume and not held:
        raise PolicyError(f"{folder} holds no state to resume; train without --resume first")
    if resume:
        _compare(folder, _read_config(folder / CONFIG_FILE), config)
    elif held and not overwrite:
        raise SettingError(
            f"{folder} holds a run's state; go on with --resume, begin anew with --overwrite, or choose another --out"
        )


def _compare(folder: Path, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    for name in COMPARED:
        if theirs.get(name) != ours[name]:
            raise PolicyError(
                f"{folder} was trained with {name} {theirs.get(name)!r}, now it is {ours[name]!r}; "
                "give the same, or begin anew with --overwrite"
            )


def _read_config(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(document, dict):
            raise ValueError("not a JSON object")
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise PolicyError(f"{path} cannot be read ({reason}); begin anew with --overwrite") from error
    return document
