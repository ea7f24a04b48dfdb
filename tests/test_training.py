"""Training a bandit on replay: what it is told, stretches, resuming to the bit, damaged states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load, save
from trace_tools import made_up_costs, made_up_traces

from agents import EXP3, UCB, LinUCB, Thompson, training
from agents.base import Learner
from agents.curve import CurvePoint, read_curves, write_curves
from agents.material import Material
from agents.training import LANES, STATE_FILE, STRETCHES, Training
from engine.cells import Cells
from engine.errors import PolicyError
from engine.menu import Menu, parse_menu
from engine.policy_heads import TableHead
from envs.vector import ReplayBatch

DRAFTERS = ("a", "b")
MENU = parse_menu("fresh/0,reuse/0,reuse/a/2,reuse/a/8,reuse/b/4", DRAFTERS)
STEPS = 400


def material(menu: Menu = MENU, machines: int = 1) -> Material:
    tables = [made_up_costs(np.random.default_rng(9 + i), DRAFTERS) for i in range(machines)]
    return Material(made_up_traces(1), made_up_traces(2, count=5), menu, tables[0], tables)


@dataclass
class CountingLearner:
    """Keeps what it was told; its state is how often, and the sum of all plain steps."""

    name: str = "counting"
    count: np.ndarray = field(default_factory=lambda: np.zeros(2))
    told: list[tuple[np.ndarray, int, int, int, int, float]] = field(default_factory=list)
    masks: list[Sequence[bool]] = field(default_factory=list)

    def choose(self, vector: np.ndarray, mask: Sequence[bool]) -> int:
        self.masks.append(mask)
        return [action for action, allowed in enumerate(mask) if allowed][int(vector.sum() * 1e4) % sum(mask)]

    def update(
        self, vector: np.ndarray, action: int, drafted: int, accepted: int, tokens: int, plain_steps: float
    ) -> None:
        self.told.append((vector, action, drafted, accepted, tokens, plain_steps))
        self.count += (1, plain_steps)

    def head(self) -> TableHead:
        return TableHead(Cells((), ()), np.zeros((1, len(MENU)), dtype=np.float32))

    def state(self) -> dict[str, np.ndarray]:
        return {"count": self.count}

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        if state["count"].shape != self.count.shape:
            raise ValueError("count has another shape")
        self.count[...] = state["count"]


def saved_count(folder: Path) -> float:
    return float(load((folder / STATE_FILE).read_bytes())["learner.count"][0])


def test_the_learner_is_told_of_every_step_as_it_was_before_it(tmp_path: Path) -> None:
    """Each of a stretch's steps is repeated by hand on a batch of the same order."""
    learner, batch = CountingLearner(), ReplayBatch(material().train, material().costs, MENU, LANES)
    Training(learner, material(), LANES * STRETCHES * 4, 5, tmp_path).run()
    assert len(learner.told) == LANES * STRETCHES * 4
    again = CountingLearner()
    for stretch in range(3):
        vectors = batch.reset(seed=training._mixed(5, stretch))
        for _ in range(4):
            masks = batch.masks()
            actions = np.array([again.choose(vector, mask.tolist()) for vector, mask in zip(vectors, masks)])
            following, rewards, _, steps = batch.step(actions)
            for lane in range(LANES):
                figures = (int(steps[name][lane]) for name in ("drafted", "accepted", "tokens"))
                again.update(vectors[lane], int(actions[lane]), *figures, -float(rewards[lane]))
            vectors = following
    for (vector, *figures), (expected, *others) in zip(learner.told, again.told):
        assert vector.tolist() == expected.tolist()
        assert figures == others
    assert learner.masks[: len(again.masks)] == again.masks
    assert any(sum(mask) == len(MENU) for mask in again.masks)
    assert any(sum(mask) == len(MENU) - 1 for mask in again.masks)


@pytest.mark.parametrize(("steps", "points", "done"), [(1, 1, 8), (8, 1, 8), (160, 20, 160), (401, 17, 408)])
def test_a_stretch_ends_with_a_point_and_a_state(tmp_path: Path, steps: int, points: int, done: int) -> None:
    """Lanes make stretches a little longer than a twentieth, so that there may be fewer of them."""
    on_disk: list[float] = []
    subject = Training(CountingLearner(), material(), steps, 0, tmp_path)
    subject.run(lambda point: on_disk.append(saved_count(tmp_path)))
    assert subject.steps_done == done
    assert on_disk == [point.step for point in subject.curve]
    assert len(on_disk) == points


def test_the_curve_is_the_speed_up_of_what_was_learned(tmp_path: Path) -> None:
    subject = Training(CountingLearner(), material(), 8, 0, tmp_path)
    subject.run()
    ours = material()
    expected = ours.plain_seconds() / ours.replay(CountingLearner().head()).sum()
    assert subject.curve == [CurvePoint(8, float(expected))]
    assert expected != 1.0


LEARNERS = {"ucb": UCB, "thompson": Thompson, "exp3": EXP3, "linucb": LinUCB}


def learner(name: str, seed: int = 3) -> Learner:
    return LEARNERS[name](MENU, material().schema, seed=seed)


@pytest.mark.parametrize("name", LEARNERS)
@pytest.mark.parametrize("machines", [1, 4])
def test_a_killed_training_goes_on_as_if_nothing_had_happened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, machines: int
) -> None:
    ours = material(machines=machines)
    whole = Training(learner(name), ours, STEPS, 3, tmp_path / "whole")
    whole.run()
    original, calls = ReplayBatch.step, 0

    def step(self: ReplayBatch, actions: np.ndarray) -> object:
        nonlocal calls
        calls += 1
        if calls in (2, 21):  # within the first stretch, and after some
            raise KeyboardInterrupt
        return original(self, actions)

    monkeypatch.setattr(ReplayBatch, "step", step)
    for _ in range(2):
        killed = Training(learner(name), ours, STEPS, 3, tmp_path / "killed")
        killed.resume()
        with pytest.raises(KeyboardInterrupt):
            killed.run()
    last = Training(learner(name), ours, STEPS, 3, tmp_path / "killed")
    last.resume()
    assert last.steps_done >= 24
    last.run()
    assert last.curve == whole.curve
    assert (tmp_path / "killed" / STATE_FILE).read_bytes() == (tmp_path / "whole" / STATE_FILE).read_bytes()
    for key, tensor in whole.head().tensors().items():
        assert np.array_equal(tensor, last.head().tensors()[key])


def test_seeds_and_stretches_meet_the_requests_in_orders_of_their_own() -> None:
    seeds = {training._mixed(seed, stretch) for seed in range(30) for stretch in range(30)}
    assert len(seeds) == 900


def test_there_is_nothing_to_resume_in_an_empty_folder(tmp_path: Path) -> None:
    subject = Training(CountingLearner(), material(), 8, 0, tmp_path / "nowhere")
    subject.resume()
    assert (subject.steps_done, subject.curve) == (0, [])


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"garbage" * 20,
        save({"learner.count": np.zeros(2), "curve": np.ones((1, 2))})[:-3],
        save({"learner.count": np.zeros(2)}),
        save({"curve": np.ones((1, 2))}),
        save({"learner.count": np.zeros(3), "curve": np.ones((1, 2))}),
        save({"learner.count": np.zeros(2), "curve": np.ones((1, 3))}),
        save({"learner.count": np.zeros(2), "curve": np.ones((0, 2))}),
    ],
    ids=["empty", "garbage", "truncated", "no curve", "no learner", "another shape", "another curve", "no points"],
)
def test_a_damaged_state_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / STATE_FILE).write_bytes(content)
    with pytest.raises(PolicyError, match=r"learner\.safetensors cannot be resumed \(.*\)"):
        Training(CountingLearner(), material(), 8, 0, tmp_path).resume()


# -- the curve's file ---------------------------------------------------------------------------------------------


def test_curves_survive_their_file(tmp_path: Path) -> None:
    path = tmp_path / "deeper" / "curve.csv"
    curves = {4: [CurvePoint(8, 1 / 3), CurvePoint(16, 1e-17)], 5: [CurvePoint(8, 2.0)]}
    write_curves(path, curves)
    assert read_curves(path) == curves
    assert path.read_text(encoding="utf-8").splitlines()[0] == "seed,step,speedup"


@pytest.mark.parametrize("content", [None, b"\xff\xfe", b"seed,step\n1,2\n", b"seed,step,speedup\n1,2,fast\n"])
def test_a_damaged_curve_is_one_line(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "curve.csv"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(PolicyError, match=r"curve\.csv holds no learning curve \(.*\); train anew"):
        read_curves(path)
