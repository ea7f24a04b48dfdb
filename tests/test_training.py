"""Training on a scripted environment: what the learner is told, the curve, saving, interruption and resuming."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save

from agents import training as training_module
from agents.training import CONFIG_FILE, CURVE_FILE, STATE_FILE, CurvePoint, Training, read_curve, write_curve
from engine.cells import Cells
from engine.errors import PolicyError, StorageError
from engine.policy_heads import TableHead
from engine.results import Generation, StepRecord, count_steps


def record(drafted: int, accepted: int, seconds: float, prefilled: int = 0, first: bool = False) -> StepRecord:
    return StepRecord(
        action=1,
        k=drafted,
        drafter="ngram" if drafted else "",
        drafted=drafted,
        accepted=accepted,
        tokens=tuple(range(accepted + 1)),
        rejected=tuple(range(drafted - accepted)),
        prefilled=prefilled,
        cached=0,
        seconds_draft=0.0,
        seconds_verify=seconds,
        seconds_overhead=0.0,
        first=first,
    )


PLAIN_SECONDS = 0.5
# A prefill of 3.0 s, then 0.5 s for 1 token, 0.75 s for 3, 0.6 s for 2: 6 tokens in 3.7 plain steps.
REQUEST = (record(0, 0, 3.0, prefilled=9, first=True), record(0, 0, 0.5), record(4, 2, 0.75), record(2, 1, 0.6))


class ScriptedSession:
    def __init__(self, steps: Sequence[StepRecord]) -> None:
        self.steps = list(steps)

    def result(self) -> Generation:
        tokens = [token for step in self.steps for token in step.tokens]
        seconds = sum(step.seconds for step in self.steps)
        return Generation(tokens, "", "length", self.steps, count_steps(self.steps), 0.0, seconds)


class ScriptedEnv:
    """Every request takes the steps of `REQUEST`; `interrupt_at` counts steps over all requests."""

    def __init__(self, interrupt_at: int | None = None, script: Sequence[StepRecord] = REQUEST) -> None:
        self.script, self.interrupt_at = script, interrupt_at
        self.seeds: list[int | None] = []
        self.actions: list[int] = []
        self._at = 0

    @property
    def session(self) -> ScriptedSession:
        return ScriptedSession(self.script[: self._at])

    def reset(self, *, seed: int | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        self.seeds.append(seed)
        self._at = 0
        return self._vector(), self._info()

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        if len(self.actions) == self.interrupt_at:
            raise KeyboardInterrupt
        self.actions.append(action)
        step = self.script[self._at]
        self._at += 1
        figures = {
            "drafted": step.drafted,
            "accepted": step.accepted,
            "tokens": len(step.tokens),
            "prefilled": step.prefilled,
            "first": step.first,
        }
        reward, finished = -step.seconds / PLAIN_SECONDS, self._at == len(self.script)
        return self._vector(), reward, finished, False, self._info() | figures

    def _vector(self) -> np.ndarray:
        return np.array([len(self.seeds), self._at], dtype=np.float32)

    def _info(self) -> dict[str, Any]:
        mask = np.array([self._at == 0, 1], dtype=np.int8)
        return {"action_mask": mask, "request": f"r{len(self.seeds)}", "kind": "talk"}


@dataclass
class CountingLearner:
    """Keeps what it was told; its state is how often."""

    name: str = "counting"
    count: np.ndarray = field(default_factory=lambda: np.zeros(2))
    told: list[tuple[list[float], int, int, int, int, float]] = field(default_factory=list)
    masks: list[Sequence[bool]] = field(default_factory=list)

    def choose(self, vector: np.ndarray, mask: Sequence[bool]) -> int:
        self.masks.append(mask)
        return 0 if mask[0] else 1

    def update(
        self, vector: np.ndarray, action: int, drafted: int, accepted: int, tokens: int, plain_steps: float
    ) -> None:
        self.told.append((vector.tolist(), action, drafted, accepted, tokens, plain_steps))
        self.count += (1, plain_steps)

    def head(self) -> TableHead:
        return TableHead(Cells((), ()), np.zeros((1, 2), dtype=np.float32))

    def state(self) -> dict[str, np.ndarray]:
        return {"count": self.count}

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        if state["count"].shape != self.count.shape:
            raise ValueError("count has another shape")
        self.count[...] = state["count"]


def make_training(
    folder: Path, env: ScriptedEnv | None = None, learner: CountingLearner | None = None, seed: int = 5
) -> Training:
    return Training(env or ScriptedEnv(), learner or CountingLearner(), folder, seed)  # type: ignore[arg-type]


def saved_count(folder: Path) -> list[float]:
    return load((folder / STATE_FILE).read_bytes())["count"].tolist()  # type: ignore[no-any-return]


# -- what a run does ----------------------------------------------------------------------------------------------


def test_the_learner_is_told_of_every_step_as_it_was_before_it(tmp_path: Path) -> None:
    learner, env = CountingLearner(), ScriptedEnv()
    make_training(tmp_path, env, learner).run(5)
    assert learner.told == [
        ([1.0, 0.0], 0, 0, 0, 1, 6.0),
        ([1.0, 1.0], 1, 0, 0, 1, 1.0),
        ([1.0, 2.0], 1, 4, 2, 3, 1.5),
        ([1.0, 3.0], 1, 2, 1, 2, 1.2),
        ([2.0, 0.0], 0, 0, 0, 1, 6.0),
        ([2.0, 1.0], 1, 0, 0, 1, 1.0),
        ([2.0, 2.0], 1, 4, 2, 3, 1.5),
        ([2.0, 3.0], 1, 2, 1, 2, 1.2),
    ]
    assert learner.masks == [[True, True], *[[False, True]] * 3] * 2
    assert all(type(allowed) is bool or isinstance(allowed, np.bool_) for mask in learner.masks for allowed in mask)
    assert env.actions == [0, 1, 1, 1] * 2


def test_the_learner_is_told_what_a_step_committed_where_the_request_ended_within_the_draft(tmp_path: Path) -> None:
    learner = CountingLearner()
    make_training(tmp_path, ScriptedEnv(script=(replace(record(4, 3, 1.0), tokens=(1, 2, 3)),)), learner).run(1)
    assert learner.told == [([1.0, 0.0], 0, 4, 3, 3, 2.0)]


@pytest.mark.parametrize(("steps", "requests"), [(1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_it_ends_with_the_request_that_reaches_the_number_of_steps(tmp_path: Path, steps: int, requests: int) -> None:
    env = ScriptedEnv()
    training = make_training(tmp_path, env)
    training.run(steps)
    assert training.steps_done == len(env.actions) == 4 * requests
    assert [point.step for point in training.curve] == [4 * (i + 1) for i in range(requests)]
    assert env.seeds == [5, *[None] * (requests - 1)]


def test_the_curve_leaves_the_prefill_out_of_the_speed_up(tmp_path: Path) -> None:
    points: list[CurvePoint] = []
    training = make_training(tmp_path)
    training.run(4, points.append)
    assert points == training.curve
    expected = CurvePoint(4, "r1", "talk", 7, 4, 4.85, round(6 / 3.7, 6), round(3 / 6, 6))
    assert points == [expected]


def test_a_request_of_a_prefill_alone_counts_as_plain(tmp_path: Path) -> None:
    training = make_training(tmp_path, ScriptedEnv(script=REQUEST[:1]))
    training.run(1)
    assert [point.speedup for point in training.curve] == [1.0]


@pytest.mark.parametrize("prefilled", [0, 9])
def test_the_first_step_is_left_out_whether_it_read_a_prompt_or_found_it_cached(tmp_path: Path, prefilled: int) -> None:
    script = (record(4, 3, 1.0, prefilled, first=True), record(0, 0, 0.5), record(4, 3, 1.0))
    training = make_training(tmp_path, ScriptedEnv(script=script))
    training.run(1)
    assert training.curve[0].speedup == pytest.approx(5 / 3)


def test_it_saves_on_the_way_and_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_module, "SAVE_EVERY", 10)
    on_disk: list[float] = []
    make_training(tmp_path).run(26, lambda point: on_disk.append(saved_count(tmp_path)[0]))
    # The first step, then points at 4, 8, 12 (saved after it), 16, 20 (saved), 24, 28.
    assert on_disk == [1.0, 1.0, 1.0, 12.0, 12.0, 20.0, 20.0]
    assert saved_count(tmp_path)[0] == 28.0
    assert [point.step for point in read_curve(tmp_path / CURVE_FILE)] == [4, 8, 12, 16, 20, 24, 28]


# -- interruption and resuming ------------------------------------------------------------------------------------


CONFIG = {"target": "here", "steps": 40}


def test_nothing_is_written_before_the_first_step(tmp_path: Path) -> None:
    training = make_training(tmp_path / "run", ScriptedEnv(interrupt_at=0))
    with pytest.raises(KeyboardInterrupt):
        training.run(40)
    assert not (tmp_path / "run").exists()
    assert not training.begun


def test_after_the_first_step_a_run_can_be_resumed(tmp_path: Path) -> None:
    """State, curve and configuration are there as soon as the step is done, without anything that a crash skips."""
    env = ScriptedEnv()
    training = Training(env, CountingLearner(), tmp_path, 5, CONFIG)  # type: ignore[arg-type]
    seen: list[tuple[float, list[CurvePoint], object]] = []
    original = env.step

    def step(action: int) -> Any:
        if env.actions:
            config = json.loads((tmp_path / CONFIG_FILE).read_text())
            seen.append((saved_count(tmp_path)[0], read_curve(tmp_path / CURVE_FILE), config))
        return original(action)

    env.step = step  # type: ignore[method-assign]
    training.run(2)
    assert seen[0] == (1.0, [], CONFIG)


def fail(*_: object) -> None:
    raise StorageError("the disk is gone")


@pytest.mark.parametrize("resumed", [False, True])
def test_a_run_whose_configuration_cannot_be_written_leaves_the_old_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resumed: bool
) -> None:
    make_training(tmp_path).run(8)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    again = make_training(tmp_path)
    assert not resumed or again.resume()
    with monkeypatch.context() as patch:
        patch.setattr(training_module, "write_json", fail)
        with pytest.raises(StorageError, match="the disk is gone"):
            again.run(16)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("resumed", [False, True])
def test_an_old_state_is_never_taken_for_a_new_run_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resumed: bool
) -> None:
    """Where the new run's own state cannot be written; a resumed run's old state is its own."""
    make_training(tmp_path).run(8)
    again = make_training(tmp_path)
    assert not resumed or again.resume()
    with monkeypatch.context() as patch:
        patch.setattr(training_module, "save_tensors", fail)
        with pytest.raises(StorageError, match="the disk is gone"):
            again.run(16)
    assert make_training(tmp_path).resume() == resumed


@pytest.mark.parametrize("at", [1, 2, 4, 7, 9])
def test_an_interrupted_run_keeps_what_was_learned_and_goes_on(tmp_path: Path, at: int) -> None:
    training = make_training(tmp_path, ScriptedEnv(interrupt_at=at))
    with pytest.raises(KeyboardInterrupt):
        training.run(40)
    assert saved_count(tmp_path)[0] == at
    whole = at // 4  # requests

    env, learner = ScriptedEnv(), CountingLearner()
    again = make_training(tmp_path, env, learner)
    assert again.resume()
    assert learner.count[0] == at
    assert again.steps_done == 4 * whole
    assert again.curve == training.curve
    again.run(16)
    assert env.seeds[0] == 5 + 4 * whole  # another order than the one already seen
    assert [point.step for point in again.curve] == [4, 8, 12, 16]
    assert read_curve(tmp_path / CURVE_FILE) == again.curve
    assert saved_count(tmp_path)[0] == at + 16 - 4 * whole


def test_a_run_that_is_complete_does_nothing_more(tmp_path: Path) -> None:
    make_training(tmp_path).run(8)
    env = ScriptedEnv()
    again = make_training(tmp_path, env)
    assert again.resume()
    again.run(8)
    assert env.seeds == []
    assert len(again.curve) == 2


def test_there_is_nothing_to_resume_in_an_empty_folder(tmp_path: Path) -> None:
    training = make_training(tmp_path)
    assert not training.resume()
    assert not make_training(tmp_path / "nowhere").resume()
    assert (training.steps_done, training.curve) == (0, [])


def damage_state(content: bytes) -> Any:
    return lambda folder: (folder / STATE_FILE).write_bytes(content)


def damage_curve(change: Any) -> Any:
    return lambda folder: (folder / CURVE_FILE).write_bytes(change((folder / CURVE_FILE).read_bytes()))


@pytest.mark.parametrize(
    "damage",
    [
        damage_state(b""),
        damage_state(b"garbage" * 20),
        damage_state(save({"count": np.zeros(2)})[:-3]),
        damage_state(save({"other": np.zeros(2)})),
        damage_state(save({"count": np.zeros(3)})),
        damage_curve(lambda text: text.replace(b"step,", b"pets,")),
        damage_curve(lambda text: text.replace(b"talk,7", b"talk,seven")),
        damage_curve(lambda text: text[: text.rindex(b",") - 12]),
        damage_curve(lambda text: b"\xff\xfe" + text),
        lambda folder: (folder / CURVE_FILE).unlink(),
    ],
    ids=[
        "empty",
        "garbage",
        "truncated",
        "a tensor is missing",
        "another shape",
        "curve: a column is missing",
        "curve: not a number",
        "curve: truncated",
        "curve: not UTF-8",
        "curve: missing",
    ],
)
def test_a_damaged_state_is_refused(tmp_path: Path, damage: Any) -> None:
    make_training(tmp_path).run(8)
    damage(tmp_path)
    with pytest.raises(PolicyError, match=r"learner\.safetensors cannot be resumed .*; train anew with --overwrite"):
        make_training(tmp_path).resume()


def test_saving_that_fails_leaves_the_old_files_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_training(tmp_path).run(4)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(self: Path, data: Any, *args: Any, **settings: Any) -> int:
        with self.open("wb") as file:
            file.write(b"half of it")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    again = make_training(tmp_path)
    assert again.resume()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(StorageError, match="No space left on device; free some space"):
            again.run(8)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(StorageError, match=CURVE_FILE):
            write_curve(tmp_path / CURVE_FILE, [])
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


# -- the curve's file ---------------------------------------------------------------------------------------------

POINTS = st.builds(
    CurvePoint,
    step=st.integers(0, 10**9),
    request=st.text(st.characters(exclude_categories=("Cs",))),
    kind=st.text(st.characters(exclude_categories=("Cs",))),
    tokens=st.integers(0, 10**6),
    steps=st.integers(0, 10**6),
    seconds=st.floats(0, 1e6),
    speedup=st.floats(0, 1e6),
    acceptance_rate=st.floats(0, 1),
)


@settings(deadline=None, max_examples=50)
@given(st.lists(POINTS, max_size=5))
def test_a_curve_survives_its_file(tmp_path_factory: pytest.TempPathFactory, curve: list[CurvePoint]) -> None:
    path = tmp_path_factory.mktemp("curve") / "deeper" / CURVE_FILE
    write_curve(path, curve)
    assert read_curve(path) == curve
    header = path.read_text(encoding="utf-8").splitlines()[0]
    assert header == "step,request,kind,tokens,steps,seconds,speedup,acceptance_rate"
