"""An online learner on replayed requests: step by step, resumable to the bit, with a curve."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors
from tqdm import tqdm

from agents.base import Learner
from agents.curve import CurvePoint
from agents.material import Material
from engine.errors import PolicyError
from engine.policy_heads import Head
from engine.storage import write_atomically
from envs.vector import ReplayBatch

STATE_FILE = "learner.safetensors"
STRETCHES = 20  # a seed's training is cut into so many; between two of them it can be resumed
LANES = 8  # requests under way at once
_OWN = "learner."  # what the learner's tensors are named with in the file

OnPoint = Callable[[CurvePoint], object]


class Training:
    """One seed of a learner that is taught step by step.

    Each stretch begins with fresh requests in an order that only the seed and the stretch's number decide. Hence a
    training that was killed goes on, from its last stretch's end, as if nothing had happened.

    Attributes:
        steps_done: decoding steps learned from.
        curve: one point a stretch.
    """

    def __init__(self, learner: Learner, material: Material, steps: int, seed: int, folder: Path) -> None:
        self.name = learner.name
        self.steps_done = 0
        self.curve: list[CurvePoint] = []
        self._learner, self._material, self._steps, self._seed = learner, material, steps, seed
        self._stretch = -(-steps // STRETCHES)
        self._path = folder / STATE_FILE
        self._plain = material.plain_seconds()
        self._batch = ReplayBatch(
            material.train, material.tables, material.menu, LANES, min_confidence=material.min_confidence
        )

    def resume(self) -> None:
        """Take up the state that a killed training has left, if any. Raises `PolicyError` where it is damaged."""
        if not self._path.is_file():
            return
        try:
            state = load_tensors(self._path.read_bytes())
            points = [CurvePoint(int(step), float(speed)) for step, speed in state.pop("curve")]
            done = points[-1].step
            self._learner.restore({name.removeprefix(_OWN): tensor for name, tensor in state.items()})
        except (SafetensorError, KeyError, TypeError, ValueError, IndexError, OverflowError, OSError) as error:
            raise PolicyError(f"{self._path} cannot be resumed ({type(error).__name__}: {error})") from error
        self.curve, self.steps_done = points, done

    def run(self, on_point: OnPoint = lambda point: None) -> None:
        """Train to the end; the state is saved after each stretch."""
        with tqdm(
            total=self._steps, initial=self.steps_done, unit="step", desc=f"{self.name} seed {self._seed}"
        ) as bar:
            while self.steps_done < self._steps:
                point = self._run_stretch(bar)
                self.curve.append(point)
                self._save()
                on_point(point)

    def head(self) -> Head:
        """The decision function learned so far."""
        return self._learner.head()

    def _run_stretch(self, bar: tqdm[Any]) -> CurvePoint:
        learner, batch = self._learner, self._batch
        vectors = batch.reset(seed=_mixed(self._seed, len(self.curve)))
        end = min(self._steps, self.steps_done + self._stretch)
        while self.steps_done < end:
            masks = batch.masks().tolist()
            actions = np.array([learner.choose(vector, mask) for vector, mask in zip(vectors, masks)])
            following, rewards, _, steps = batch.step(actions)
            figures = (steps["drafted"], steps["accepted"], steps["tokens"], -rewards)
            for vector, action, *outcome in zip(vectors, actions.tolist(), *(array.tolist() for array in figures)):
                learner.update(vector, action, *outcome)
            vectors = following
            self.steps_done += LANES
            bar.update(LANES)
        learned = self._material.replay(learner.head()).sum()
        return CurvePoint(self.steps_done, self._plain / float(learned))

    def _save(self) -> None:
        state = {_OWN + name: tensor for name, tensor in self._learner.state().items()}
        curve = np.array([(point.step, point.speedup) for point in self.curve])
        tensors = save_tensors(state | {"curve": curve})
        write_atomically(self._path, lambda path: path.write_bytes(tensors))


def _mixed(seed: int, stretch: int) -> int:
    """A seed for a stretch of a seed's training, unlike any other's."""
    return int(np.random.SeedSequence((seed, stretch)).generate_state(1, np.uint64)[0])
