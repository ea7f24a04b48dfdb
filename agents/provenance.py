"""Where a run comes from: its command, machine, versions and commit, for the reader of its files."""

from __future__ import annotations

import platform
import shlex
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from engine.costs import machine_fingerprint

PACKAGES = ("torch", "transformers", "gymnasium", "stable-baselines3", "numpy")


def provenance(device: str) -> dict[str, Any]:
    """What a run's files tell of its origin; nothing acts on it."""
    return {
        "command": shlex.join(["python", *sys.argv]),
        "machine": machine_fingerprint(device),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in PACKAGES},
        "git_commit": git_commit(),
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def resuming(command: str) -> str:
    """The command that goes on with the run which `command` has begun or resumed."""
    begun = ("--overwrite", "--no-overwrite", "--resume", "--no-resume")
    return shlex.join([*(word for word in shlex.split(command) if word not in begun), "--resume"])


def git_commit() -> str | None:
    """The commit of this source tree; None where it is not in a repository, or git is missing."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
