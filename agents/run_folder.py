"""The folder of a training run: what it was made with, and whether another run may write into it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agents.curve import CURVE_FILE
from engine.costs import CostTable
from engine.errors import PolicyError, SettingError, StorageError
from engine.policy import FORMAT as POLICY
from engine.storage import write_json
from envs.replay import read_costs

CONFIG_FILE, COSTS_FILE = "config.json", "costs.json"
VALIDATION_FILE, CHECK_FILE, CARD_FILE = "validation.json", "check.json", "README.md"
SEEDS_FOLDER = "seeds"

# What a run's results depend on. `seeds` is not among it: a resumed run may train more of them.
COMPARED = (
    "agent",
    "target",
    "drafter",
    "workload",
    "workload_fingerprint",
    "menu",
    "precision",
    "exact",
    "device",
    "steps",
    "max_new_tokens",
    "prefix_cache_mib",
    "seed",
    "costs",
)


class RunFolder:
    """Costs, states of seeds and results of one run. Every file is written atomically.

    Attributes:
        path: the folder; what a user looks for lies in it, what resuming needs in `seeds/` and `costs.json`.
        config: what the run is made with, as `config.json` keeps it.
    """

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        self.path, self.config = path, dict(config)

    @property
    def begun(self) -> bool:
        """Whether the folder holds a run, which may be resumed."""
        return (self.path / COSTS_FILE).is_file()

    def check(self, resume: bool, overwrite: bool) -> None:
        """Whether this run may go on, or begin, here. Nothing is written.

        Raises:
            SettingError: the folder holds a run and neither resuming nor overwriting was asked for, or both were.
            PolicyError: there is nothing to resume, or it was made with other settings.
        """
        if resume and overwrite:
            raise SettingError("--resume and --overwrite exclude each other; give one of them")
        if resume and not self.begun:
            raise PolicyError(f"{self.path} holds no run to resume; train without --resume first")
        if resume:
            _compare(self.path, _read_config(self.path / CONFIG_FILE), self.config)
        elif (self.begun or POLICY.is_in(self.path)) and not overwrite:
            mend = "go on with --resume, begin anew with --overwrite, or choose another --out"
            raise SettingError(f"{self.path} holds a run; {mend}")

    def begin(self, costs: CostTable) -> None:
        """Make the folder this run's: what another one left goes, but for its policy, which stays until the export.

        Raises `StorageError`.
        """
        _remove(self.path / COSTS_FILE)  # first: a run without it is none that could be resumed
        for name in (SEEDS_FOLDER, CURVE_FILE, VALIDATION_FILE, CHECK_FILE):
            _remove(self.path / name)
        write_json(self.path / CONFIG_FILE, self.config)
        write_json(self.path / COSTS_FILE, costs.to_json())

    def go_on(self) -> None:
        """Take the folder up again; it may be resumed with more seeds than it was begun with. Raises `StorageError`."""
        write_json(self.path / CONFIG_FILE, self.config)

    def costs(self) -> CostTable:
        """The costs that the run was begun with. Raises `TraceError` where they are damaged."""
        return read_costs(self.path / COSTS_FILE)

    def seed(self, seed: int) -> Path:
        """Where a seed's state and policy are kept."""
        return self.path / SEEDS_FOLDER / str(seed)

    def forget_results(self) -> None:
        """Take away what told of a policy that is now replaced."""
        for name in (VALIDATION_FILE, CHECK_FILE):
            _remove(self.path / name)


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


def _remove(path: Path) -> None:
    try:
        if path.is_dir():
            shutil.rmtree(path)
        elif path.exists():
            path.unlink()
    except OSError as error:
        raise StorageError(f"cannot replace {path}: {error.strerror}; choose another place") from error
