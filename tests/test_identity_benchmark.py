"""The benchmarks of identity: they find what they look for, go on where they stopped, and end with the right code."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks import assisted, identity, pair
from benchmarks.parting import Tally
from benchmarks.random_runs import RandomController, whole_menu
from benchmarks.row_bits import MOST_ROWS, RowBits, compare_rows, process_digests, text_digest
from engine import Generation, StepRecord, load_model
from engine.errors import SettingError
from engine.kernels.compile import FOLDER
from engine.kv import KVBuffer
from engine.lean import LeanRunner
from engine.results import count_steps
from engine.runner import HFRunner, Runner
from envs.workloads import load_workload

pytestmark = pytest.mark.usefixtures("cache_folder")

Command = Callable[..., tuple[int, str, str]]

ROWS = [
    {"id": "talk", "kind": "multi-turn", "turns": ["the and the and the", "and then the other", "in the end"]},
    {"id": "book", "document": "thing and then the thing and the other " * 2, "questions": ["the?", "and?"]},
    {"id": "code", "kind": "code", "turns": ["for the in the: and the, and the"]},
    {"id": "chat", "kind": "chat", "turns": ["another one another one"]},
]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    return path


@pytest.fixture
def words(target_folder: Path, prompts: Path) -> list[object]:
    """The options that all runs here share."""
    return ["--target", target_folder, "--workload", prompts, "--max-new-tokens", 12, "--rows", 0]


def last_line(out: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(out.splitlines()[-1])
    return document


def wrong_with_several_rows(monkeypatch: pytest.MonkeyPatch, runner: type[Any]) -> None:
    """Passes that verify drafts get the logits of their first row wrong; plain steps are right."""
    forward = runner.forward

    def wrong(self: Any, tokens: Sequence[int], buffer: KVBuffer, num_logits: int) -> Tensor:
        logits: Tensor = forward(self, tokens, buffer, num_logits)
        if num_logits > 1:
            logits = logits.clone()
            logits[0] = -logits[0]
        return logits

    monkeypatch.setattr(runner, "forward", wrong)


# -- random menus -------------------------------------------------------------------------------------------------


def test_a_sound_engine_passes(command: Command, words: list[object]) -> None:
    code, out, _ = command(identity, *words[:-1], 3, "--precision", "int8", "--tokens", 400)
    found = last_line(out)
    tally = found["random"]["tally"]
    assert code == 0
    assert found["failed"] is False
    assert found["exact"] == "bitwise"
    assert tally["mismatched"] == 0
    assert tally["parted"] == []
    assert tally["tokens"] >= 400
    assert len(tally["passes"]) >= 4
    assert all(1 <= int(rows) <= 9 for rows in tally["passes"])
    assert found["rows"] == {"positions": 3, "rows": 135, "logits_differ": 0, "kv_differ": 0, "largest": 0.0}


def test_a_corrupted_engine_is_caught(command: Command, words: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    wrong_with_several_rows(monkeypatch, LeanRunner)
    code, out, _ = command(identity, *words, "--precision", "int8", "--tokens", 200)
    tally = last_line(out)["random"]["tally"]
    assert code == 1
    assert last_line(out)["failed"] is True
    assert tally["mismatched"] > 0
    assert 0 < len(tally["parted"]) <= tally["runs"]
    assert all(parted["margin"] > 0 and 0 <= parted["position"] < 12 for parted in tally["parted"])


def test_rows_with_other_bits_fail_a_bitwise_engine(
    command: Command, words: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong_with_several_rows(monkeypatch, LeanRunner)
    code, out, _ = command(identity, *words[:-1], 2, "--precision", "int8", "--tokens", 0)
    assert code == 1
    assert last_line(out)["rows"]["logits_differ"] == 2 * (MOST_ROWS - 1)


def test_an_engine_that_promises_nothing_does_not_fail(
    command: Command, words: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong_with_several_rows(monkeypatch, HFRunner)
    code, out, _ = command(identity, *words, "--precision", "fp32", "--exact", "off", "--tokens", 200)
    assert code == 0
    assert last_line(out)["random"]["tally"]["mismatched"] > 0


def test_a_guarded_engine_is_sound_too(command: Command, words: list[object]) -> None:
    code, out, _ = command(identity, *words, "--exact", "guarded", "--tokens", 200)
    assert code == 0
    assert last_line(out)["exact"] == "guarded"
    assert last_line(out)["random"]["tally"]["mismatched"] == 0


def totals(document: dict[str, Any]) -> dict[str, Any]:
    found = document["random"]
    return {**found, "tally": {**found["tally"], "seconds": None}}


def test_a_resumed_run_ends_with_the_same_totals(command: Command, words: list[object], tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    options = [*words, "--precision", "int8", "--json", file]
    _, whole, _ = command(identity, *options, "--tokens", 500)
    command(identity, *options, "--tokens", 100)
    kept = json.loads(file.read_text())["random"]
    assert 100 <= kept["tally"]["tokens"] < 300
    code, resumed, _ = command(identity, *options, "--tokens", 500, "--resume")
    assert code == 0
    assert totals(last_line(resumed)) == totals(last_line(whole))
    assert last_line(resumed)["random"]["units"] > len(ROWS)  # the workload began again, with other choices


def test_an_interrupted_run_keeps_what_it_found(
    command: Command, words: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "state.json"
    options = [*words, "--precision", "int8", "--json", file, "--tokens", 400]
    _, whole, _ = command(identity, *options)
    file.unlink()
    forward, passes = LeanRunner.forward, 0

    def interrupted(self: LeanRunner, tokens: Sequence[int], buffer: KVBuffer, num_logits: int) -> Tensor:
        nonlocal passes
        passes += 1
        if passes == 250:
            raise KeyboardInterrupt
        return forward(self, tokens, buffer, num_logits)

    with monkeypatch.context() as patch:
        patch.setattr(LeanRunner, "forward", interrupted)
        code, _, _ = command(identity, *options)
    assert code == 130
    assert 0 < json.loads(file.read_text())["random"]["tally"]["tokens"] < 400
    _, resumed, _ = command(identity, *options, "--resume")
    assert totals(last_line(resumed)) == totals(last_line(whole))


def test_a_run_with_other_settings_is_not_gone_on_with(command: Command, words: list[object], tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    options = [*words, "--precision", "int8", "--tokens", 50]
    command(identity, *options, "--json", file)
    code, _, err = command(identity, *options, "--json", file, "--resume", "--seed", 1)
    assert code == 2
    assert "other settings (workload, seed)" in err
    code, _, err = command(identity, *options, "--json", tmp_path / "none.json", "--resume")
    assert code == 2
    assert "holds no run to go on from" in err
    code, _, err = command(identity, *options, "--resume")
    assert code == 2
    assert "--json" in err


def test_prompts_that_never_fit_end_the_run(command: Command, words: list[object], tmp_path: Path) -> None:
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"id": "long", "kind": "chat", "turns": ["x" * 600]}) + "\n")
    code, _, err = command(identity, *words, "--workload", long, "--precision", "int8", "--tokens", 50)
    assert code == 2
    assert "no request of long fits" in err


def test_random_choices_cover_the_menu_and_respect_the_mask() -> None:
    menu = whole_menu(["ngram", "model"], [1, 3])
    assert len(menu) == 10
    masks = [menu.mask(can_reuse=True), menu.mask(can_reuse=False)]
    seen: set[int] = set()
    used: set[int] = set()  # how many entries a request's steps use
    for seed in range(100):
        one, other = RandomController(menu, (seed,)), RandomController(menu, (seed,))
        choices = [one.choose(None, masks[step > 0]) for step in range(20)]
        assert choices == [other.choose(None, masks[step > 0]) for step in range(20)]
        assert all(masks[1][choice] for choice in choices[1:])
        seen.update(choices)
        used.add(len(set(choices[1:])))
    assert seen == set(range(len(menu)))
    assert used == {1, 2, 3, 4, 5}


def test_a_tally_counts_and_names_the_first_difference(target_folder: Path) -> None:
    model = load_model(str(target_folder), "fp32", packed=False)
    tally, other = Tally(), Tally()
    tally.add({"request": "a"}, [1, 2], [3, 4, 5], [3, 4, 5], model)
    tally.add({"request": "b"}, [1, 2], [3, 9, 9], [3, 4, 9], model)
    other.add({"request": "c"}, [1, 2], [3, 4], [3, 4, 5], model)
    tally.merge(other)
    assert (tally.runs, tally.tokens, tally.mismatched) == (3, 8, 2)
    assert [(one["request"], one["position"]) for one in tally.parted] == [("b", 1), ("c", 2)]
    logits = model.runner.forward([1, 2, 3], model.runner.new_buffer(), 1)[0].sort(descending=True).values
    assert tally.parted[0]["margin"] == pytest.approx(float(logits[0] - logits[1]))


# -- bits ---------------------------------------------------------------------------------------------------------


class Flipping:
    """Flips the lowest bit of one logit in passes of 5 rows, and of one key in passes of 3."""

    def __init__(self, runner: Runner, logit: bool = False, key: bool = False) -> None:
        self.inner, self.logit, self.key = runner, logit, key

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def forward(self, tokens: Sequence[int], buffer: KVBuffer, num_logits: int) -> Tensor:
        logits = self.inner.forward(tokens, buffer, num_logits)
        if self.logit and len(tokens) == num_logits == 5:
            logits[2, 7:8].view(torch.int32).bitwise_xor_(1)
        if self.key and len(tokens) == num_logits == 3:
            buffer.views()[-1][0][0, 1, -2, 3:4].view(torch.int32).bitwise_xor_(1)
        return logits


@pytest.mark.parametrize(("logit", "key"), [(False, False), (True, False), (False, True)])
def test_one_bit_is_found(target_folder: Path, logit: bool, key: bool) -> None:
    runner: Any = Flipping(load_model(str(target_folder), "int8").runner, logit, key)
    texts = [[int(token) for token in np.random.default_rng(seed).integers(5, 200, 40)] for seed in range(3)]
    found = compare_rows(runner, [[1, 2], *texts], positions=4)
    assert (found.positions, found.rows) == (4, 4 * 45)
    assert (found.logits_differ, found.kv_differ) == (4 * logit, 4 * key)
    assert found.equal is not (logit or key)
    assert (found.largest > 0) is logit


def test_rows_need_a_text_that_is_long_enough(target_folder: Path) -> None:
    with pytest.raises(SettingError, match="longer prompts"):
        compare_rows(load_model(str(target_folder), "int8").runner, [[1] * MOST_ROWS], positions=1)
    assert RowBits().equal


def test_fresh_processes_agree(target_folder: Path, drafter_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTGATE_CACHE", str(FOLDER.parents[1]))  # with the kernels that this process has compiled
    settings = {"target": str(target_folder), "precision": "int8"}
    first, second = process_digests(settings, 2)
    assert first == second
    assert text_digest(**settings) == text_digest(**settings)
    assert text_digest(**settings) != text_digest(**(settings | {"target": str(drafter_folder)}))


def test_a_process_that_fails_is_told_of(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"ended with code 1 \(.*ModelNotFoundError"):
        process_digests({"target": str(tmp_path / "none"), "precision": "int8"}, 1)


def test_processes_that_differ_fail(command: Command, words: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        identity, "process_digests", lambda settings, count, cold: ["a" * 16] * (count - 1) + ["b" * 16]
    )
    code, out, _ = command(identity, *words, "--precision", "int8", "--tokens", 0, "--processes", 3)
    assert code == 1
    assert "3 fresh processes DIFFER" in out


# -- transformers -------------------------------------------------------------------------------------------------


def test_transformers_is_compared_with_itself(
    target_folder: Path, drafter_folder: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = load_workload(str(prompts))
    compare = [str(target_folder), "fp32", workload, 10, str(drafter_folder)]
    found = assisted.compare_assisted(*compare)  # type: ignore[arg-type]
    assert set(found) == {"prompt lookup 8", "this engine, plain", "assistant model"}
    assert all(tally.runs == workload.num_requests and tally.mismatched == 0 for tally in found.values())
    generate = assisted.generate

    def other_with_assistant(*arguments: Any, **settings: Any) -> list[int]:
        tokens = generate(*arguments, **settings)
        return [*tokens[:-1], tokens[-1] + 1] if "assistant_model" in settings else tokens

    monkeypatch.setattr(assisted, "generate", other_with_assistant)
    found = assisted.compare_assisted(*compare)  # type: ignore[arg-type]
    assert found["assistant model"].mismatched == workload.num_requests
    assert found["prompt lookup 8"].mismatched == 0


# -- the pair -----------------------------------------------------------------------------------------------------


@pytest.fixture
def pair_words(target_folder: Path, drafter_folder: Path, prompts: Path) -> list[object]:
    folders = ["--target", target_folder, "--drafter", drafter_folder, "--workload", prompts]
    return [*folders, "--max-new-tokens", 12, "--rounds", 2, "--lengths", 1, 3]


def test_a_pair_from_end_to_end(command: Command, pair_words: list[object], tmp_path: Path) -> None:
    file = tmp_path / "pair.json"
    code, out, _ = command(pair, *pair_words, "--ngram", "--controllers", "heuristic", "--json", file)
    found = last_line(out)
    assert code == 0
    assert found == json.loads(file.read_text())
    assert set(found["arms"]) == {"plain", "heuristic", "model 1", "model 3", "ngram 1", "ngram 3"}
    assert found["requests"] == 7
    assert found["arms"]["plain"]["speedup"]["value"] == pytest.approx(1.0)
    assert all(arm["identity"]["runs"] == 7 and arm["identity"]["mismatched"] == 0 for arm in found["arms"].values())
    assert found["costs"]["v"]["0"] == 1.0
    assert {"1", "3"} < set(found["costs"]["v"])
    assert set(found["costs"]["draft"]) == {"model", "ngram"}
    assert [place["place"] for place in found["acceptance"]["model"]] == [1, 2, 3]


def test_a_target_that_drafts_for_itself_is_always_right(
    command: Command, pair_words: list[object], target_folder: Path
) -> None:
    code, out, _ = command(pair, *pair_words, "--drafter", target_folder)
    places = last_line(out)["acceptance"]["model"]
    assert code == 0
    assert [place["accepted"] for place in places] == [1.0, 1.0, 1.0]
    assert last_line(out)["arms"]["model 3"]["mean_acceptance_length"] > 3


def test_a_pair_that_parts_from_plain_fails(
    command: Command, pair_words: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong_with_several_rows(monkeypatch, LeanRunner)
    code, out, _ = command(pair, *pair_words)
    arms = last_line(out)["arms"]
    assert code == 1
    assert arms["model 3"]["identity"]["mismatched"] > 0
    assert arms["plain"]["identity"]["mismatched"] == 0
    assert "model 3: " in out


def test_acceptance_by_place() -> None:
    steps = [_step(drafted, accepted) for drafted, accepted in ((3, 3), (3, 1), (3, 0), (1, 1), (0, 0), (3, 3))]
    run = Generation([], "", "length", steps, count_steps(steps), 0.0, 0.0)
    places = pair.acceptance([run])  # the last step does not count
    assert [place["drafted"] for place in places] == [4, 3, 3]
    assert [place["accepted"] for place in places] == pytest.approx([3 / 4, 1 / 3, 1 / 3])
    assert [place["given_before"] for place in places] == pytest.approx([3 / 4, 1 / 2, 1.0])
    assert pair.acceptance([]) == []


def _step(drafted: int, accepted: int) -> StepRecord:
    tokens = tuple(range(accepted + 1))
    return StepRecord(1, drafted, "model", drafted, accepted, tokens, (), 0, 0, 0.0, 0.0, 0.0)
