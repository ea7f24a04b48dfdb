"""Training figures to Weights & Biases, where it is wanted and there."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from agents.training import CurvePoint


class Tracker:
    """Logs curve points under `train/`; a run goes on where wandb is missing or cannot be reached."""

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

    def log(self, point: CurvePoint) -> None:
        if self._run is not None:
            figures = {f"train/{name}": value for name, value in asdict(point).items() if name != "step"}
            self._tell(lambda run: run.log(figures, step=point.step))

    def close(self) -> None:
        if self._run is not None:
            self._tell(lambda run: run.finish())

    def _tell(self, say: Callable[[Any], object]) -> None:
        try:
            say(self._run)
        except Exception as error:
            print(f"wandb has failed ({error}); training goes on without it", file=sys.stderr)
            self._run = None
