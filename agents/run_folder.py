"""The folder of a training run: what it was made with, and whether another run may write into it."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from agents.curve import CURVE_FILE
from engine.costs import CostTable
from engine.errors import PolicyError, SettingError, StorageError, TraceError
from engine.menu import Menu
from engine.policy import FORMAT as POLICY
from engine.storage import write_json
from envs.replay import read_costs

CONFIG_FILE, COSTS_FILE = "config.json", "costs.json"
VALIDATION_FILE, CHECK_FILE, CARD_FILE = "validation.json", "check.json", "README.md"
SEEDS_FOLDER, LOCK_FILE = "seeds", ".lock"

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

    def __init__(self, path: Path, config: Mapping[str, Any], resume: bool = False, overwrite: bool = False) -> None:
        self.path, self.config = path, dict(config)
        self._resume, self._overwrite = resume, overwrite
        self._lock: IO[str] | None = None

    @property
    def begun(self) -> bool:
        """Whether the folder holds a run, which may be resumed."""
        return (self.path / COSTS_FILE).is_file()

    def check(self) -> None:
        """Whether this run may go on, or begin, here. Nothing is written.

        Raises:
            SettingError: the folder holds a run and neither resuming nor overwriting was asked for, or both were; or
                it holds files that no run has made.
            PolicyError: there is nothing to resume, or it was made with other settings.
        """
        if self._resume and self._overwrite:
            raise SettingError("--resume and --overwrite exclude each other; give one of them")
        if self._resume and not self.begun:
            raise PolicyError(f"{self.path} holds no run to resume; train without --resume first")
        if self._resume:
            _compare(self.path, _read_config(self.path / CONFIG_FILE), self.config)
        elif _is_foreign(self.path):
            raise SettingError(
                f"{self.path} holds files that no training made, which would be lost; choose another --out"
            )
        elif (self.begun or POLICY.is_in(self.path)) and not self._overwrite:
            mend = "go on with --resume, begin anew with --overwrite, or choose another --out"
            raise SettingError(f"{self.path} holds a run; {mend}")

    def lock(self) -> None:
        """Keep other trainings out until `release`, or the end of the process, and check again what is there now.

        Raises `SettingError` where another training is at work here, `StorageError`, and what `check` raises.
        """
        path = self.path / LOCK_FILE
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(path)
        except OSError as error:
            raise StorageError(f"cannot write {path}: {error.strerror}; choose another place") from error
        if self._lock is None:
            raise SettingError(f"another training is at work in {self.path}; wait for its end, or choose another --out")
        self.check()

    def release(self) -> None:
        """Let other trainings in again."""
        if self._lock is not None:
            (self.path / LOCK_FILE).unlink(missing_ok=True)  # before others can lock it
            self._lock.close()
            self._lock = None

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

    def costs(self, menu: Menu) -> CostTable:
        """The costs that the run was begun with. Raises `TraceError` where they are damaged."""
        costs = read_costs(self.path / COSTS_FILE)
        if not costs.covers(menu.lengths, menu.drafters):
            raise TraceError(f"{self.path / COSTS_FILE} does not cover the menu {menu}; begin anew with --overwrite")
        return costs

    def seed(self, seed: int) -> Path:
        """Where a seed's state and policy are kept."""
        return self.path / SEEDS_FOLDER / str(seed)

    def forget_seed(self, seed: int) -> None:
        """Take away a seed that does not belong to this run. Raises `StorageError`."""
        _remove(self.seed(seed))

    def forget_results(self) -> None:
        """Take away what told of a policy that is now replaced."""
        for name in (VALIDATION_FILE, CHECK_FILE):
            _remove(self.path / name)


def _compare(folder: Path, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    unlike = [
        f"{name} {theirs.get(name)!r} (now {ours[name]!r})" for name in COMPARED if theirs.get(name) != ours[name]
    ]
    if unlike:
        mend = "give the same, or begin anew with --overwrite"
        raise PolicyError(f"{folder} was trained with {', '.join(unlike)}; {mend}")


def _is_foreign(folder: Path) -> bool:
    """Whether there are files that neither a run nor an export has left.

    Hidden ones and those of wandb do not count: nothing that a run writes could replace them.
    """
    try:
        names = {path.name for path in folder.iterdir() if not path.name.startswith(".")} - {"wandb"}
    except FileNotFoundError:
        return False
    except OSError as error:
        raise StorageError(f"cannot use {folder}: {error.strerror}; choose another --out") from error
    return bool(names) and not _is_ours(folder)


def _is_ours(folder: Path) -> bool:
    """Also where one of a run's files is damaged or gone; never where `config.json` is another program's."""
    try:
        return set(COMPARED) <= set(_read_config(folder / CONFIG_FILE))
    except PolicyError:
        pass  # it is missing or damaged
    if POLICY.is_in(folder):
        return True
    try:
        read_costs(folder / COSTS_FILE)
    except TraceError:
        return False
    return True


def _locked(path: Path) -> IO[str] | None:
    """The file, opened and locked; None where another process has locked it, or has just removed it."""
    file = path.open("w", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if path.exists() and path.stat().st_ino == os.fstat(file.fileno()).st_ino:
            return file
    except BlockingIOError:
        pass
    except OSError:
        file.close()
        raise
    file.close()
    return None


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
