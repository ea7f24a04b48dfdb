"""Learning on the live environment: step by step, resumable, with a curve."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple, dataclass, fields
from io import StringIO
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors
from tqdm import tqdm

from agents.base import Learner
from engine.errors import PolicyError, StorageError
from engine.storage import write_atomically, write_json
from envs.live import SpeculativeDecodingEnv

CONFIG_FILE, STATE_FILE, CURVE_FILE = "config.json", "learner.safetensors", "curve.csv"
SAVE_EVERY = 500  # steps


@dataclass(frozen=True)
class CurvePoint:
    """One request of the training: how fast it decoded against the calibrated plain step.

    Attributes:
        step: training steps until the request's end.
        request, kind: which one.
        tokens, steps: what it took.
        seconds: its measured time, prefill included.
        speedup: tokens committed over plain steps that its decoding took (prefill left out); 1 is plain decoding.
        acceptance_rate: accepted over drafted tokens.
    """

    step: int
    request: str
    kind: str
    tokens: int
    steps: int
    seconds: float
    speedup: float
    acceptance_rate: float


class Training:
    """A learner on an environment, kept in a folder: `resume` takes its state up, `run` goes on from there.

    Nothing is written before the run's first step has succeeded.

    Attributes:
        curve: one point a request, this run's and the resumed ones'.
        begun: whether this run has made a step.
    """

    def __init__(
        self,
        env: SpeculativeDecodingEnv,
        learner: Learner,
        folder: Path,
        seed: int,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self.env, self.learner, self.folder, self._seed = env, learner, folder, seed
        self._config = dict(config or {})
        self._resumed = False
        self.steps_done = 0
        self.begun = False
        self.curve: list[CurvePoint] = []

    def resume(self) -> bool:
        """Take up the folder's state, if there is one. Raises `PolicyError` where it is damaged or of another shape."""
        path = self.folder / STATE_FILE
        if not path.is_file():
            return False
        try:
            state = load_tensors(path.read_bytes())
            self.learner.restore(state)
            self.curve = read_curve(self.folder / CURVE_FILE)
        except (SafetensorError, KeyError, TypeError, ValueError, OSError, csv.Error) as error:
            raise PolicyError(f"{path} cannot be resumed ({error}); train anew with --overwrite") from error
        self.steps_done = self.curve[-1].step if self.curve else 0
        self._resumed = True
        return True

    def run(self, steps: int, on_point: Callable[[CurvePoint], object] = lambda point: None) -> None:
        """Train until `steps` steps are done in all; state and curve are saved on the way and at the end.

        An interrupt (Ctrl-C) is raised after what was learned has been saved.
        """
        try:
            with tqdm(total=steps, initial=self.steps_done, unit="step", desc=self.learner.name) as bar:
                for point in self._requests(steps, bar):
                    before = self.curve[-1].step if self.curve else 0
                    self.curve.append(point)
                    on_point(point)
                    if point.step // SAVE_EVERY > before // SAVE_EVERY:
                        self.save()
        finally:
            if self.begun:
                self.save()

    def save(self) -> None:
        tensors = save_tensors(self.learner.state())
        write_atomically(self.folder / STATE_FILE, lambda path: path.write_bytes(tensors))
        write_curve(self.folder / CURVE_FILE, self.curve)

    def _begin(self) -> None:
        """Make the folder this run's. A run anew takes an old state away, lest it be resumed as its own."""
        write_json(self.folder / CONFIG_FILE, self._config)
        self.begun = True
        if not self._resumed:
            _remove(self.folder / STATE_FILE)
        self.save()

    def _requests(self, steps: int, bar: tqdm[Any]) -> Iterator[CurvePoint]:
        # A resumed run meets the workload in another order than the one it has already seen.
        seed: int | None = self._seed + self.steps_done
        while self.steps_done < steps:
            vector, info = self.env.reset(seed=seed)
            seed, plain_steps, finished = None, 0.0, False
            while not finished:
                action = self.learner.choose(vector, list(info["action_mask"].astype(bool)))
                context_vector = vector
                vector, reward, finished, _, info = self.env.step(action)
                figures = (info["drafted"], info["accepted"], info["tokens"])
                self.learner.update(context_vector, action, *figures, -reward)
                plain_steps += -reward if not info["first"] else 0.0
                self.steps_done += 1
                bar.update()
                if not self.begun:
                    self._begin()
            yield self._point(info, plain_steps)

    def _point(self, info: dict[str, object], plain_steps: float) -> CurvePoint:
        generation = self.env.session.result()
        decoded = sum(len(step.tokens) for step in generation.steps if not step.first)
        return CurvePoint(
            step=self.steps_done,
            request=str(info["request"]),
            kind=str(info["kind"]),
            tokens=len(generation.tokens),
            steps=len(generation.steps),
            seconds=round(generation.seconds, 6),
            speedup=round(decoded / plain_steps, 6) if plain_steps else 1.0,
            acceptance_rate=round(generation.counters.acceptance_rate, 6),
        )


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(f"cannot replace {path}: {error.strerror}; choose another place") from error


def write_curve(path: Path, curve: list[CurvePoint]) -> None:
    text = StringIO()
    writer = csv.writer(text)
    writer.writerow(field.name for field in fields(CurvePoint))
    writer.writerows(astuple(point) for point in curve)
    write_atomically(path, lambda temporary: temporary.write_text(text.getvalue(), encoding="utf-8"))


def read_curve(path: Path) -> list[CurvePoint]:
    """The inverse of `write_curve`.

    Raises `KeyError`, `TypeError`, `ValueError` or `csv.Error` on another form, `OSError` where there is none.
    """
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    kinds = {"int": int, "float": float, "str": str}
    return [CurvePoint(**{f.name: kinds[str(f.type)](row[f.name]) for f in fields(CurvePoint)}) for row in rows]
