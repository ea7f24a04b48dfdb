"""Figures of a run to Weights & Biases, where it is wanted and there."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


class Tracker:
    """Logs figures in groups; a run goes on where wandb is missing or cannot be reached."""

    def __init__(self, mode: str, config: Mapping[str, Any], folder: Path) -> None:
        self._run: Any = None
        if mode == "off":
            return
        try:
            import wandb

            folder.mkdir(parents=True, exist_ok=True)
            self._run = wandb.init(project="draftgate", mode=mode, config=dict(config), dir=str(folder))  # type: ignore[arg-type]
        except Exception as error:  # whatever goes wrong there must not cost the training
            print(f"wandb is not available ({error}); training goes on without it", file=sys.stderr)

    def log(self, group: str, figures: Mapping[str, float]) -> None:
        """Figures at one moment, as `group/name`. Steps are figures like others, as each seed counts its own."""
        if self._run is not None:
            named = {f"{group}/{name}": value for name, value in figures.items()}
            self._tell(lambda run: run.log(named))

    def close(self) -> None:
        if self._run is not None:
            self._tell(lambda run: run.finish())

    def _tell(self, say: Callable[[Any], object]) -> None:
        try:
            say(self._run)
        except Exception as error:
            print(f"wandb has failed ({error}); training goes on without it", file=sys.stderr)
            self._run = None
