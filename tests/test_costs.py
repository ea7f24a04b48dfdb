"""The cost table, and how it is measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import FunctionDrafter, load_tiny, tiny_decoder, tiny_model_drafter

from engine import calibration
from engine.calibration import cached_costs, calibrate, calibration_tokens
from engine.costs import CostTable, machine_fingerprint
from engine.drafters import NGramDrafter
from engine.drafters.base import Draft

TABLE = CostTable((100, 300), {0: (1.0, 3.0), 4: (1.5, 6.0)}, 0.1, {"a": 0.5}, 0.25, "m")


def test_seconds_are_interpolated_and_constant_beyond() -> None:
    assert [TABLE.plain_seconds(c) for c in (0, 100, 150, 200, 300, 10**9)] == [1.0, 1.0, 1.5, 2.0, 3.0, 3.0]
    assert [TABLE.verify_seconds(4, c) for c in (100, 200, 400)] == [1.5, 3.75, 6.0]
    with pytest.raises(KeyError):
        TABLE.verify_seconds(5, 100)


def test_ratios() -> None:
    assert TABLE.verify_ratio(0) == 1.0
    assert TABLE.verify_ratio(4) == (1.5 + 2.0) / 2
    assert TABLE.draft_ratio("a") == 0.5 / 2.0
    assert TABLE.prefill_ratio == 0.25 / 2.0


def test_covers() -> None:
    assert TABLE.covers([0, 4], ["a"])
    assert TABLE.covers([], [])
    assert not TABLE.covers([5], ["a"])
    assert not TABLE.covers([4], ["a", "b"])


def test_json_round_trip() -> None:
    text = json.dumps(TABLE.to_json(), allow_nan=False)
    assert CostTable.from_json(json.loads(text)) == TABLE


def change(**fields: Any) -> dict[str, Any]:
    return TABLE.to_json() | fields


BROKEN: list[Any] = [
    [],
    None,
    {},
    change(verify=[]),
    change(verify={}),
    change(verify={"4": [1, 1]}),
    change(verify={"0": [1]}),
    change(verify={"0": [1, 0]}),
    change(verify={"0": [1, -1]}),
    change(verify={"0": [1, float("nan")]}),
    change(verify={"0": [1, float("inf")]}),
    change(verify={"zero": [1, 1]}),
    change(contexts=[]),
    change(contexts=[300, 100]),
    change(contexts=[100, 100]),
    change(spread=float("nan")),
    change(spread=-0.1),
    change(draft={"a": float("inf")}),
    change(draft=3),
    change(prefill=None),
    change(prefill=-1),
]


@pytest.mark.parametrize("document", BROKEN)
def test_a_damaged_document_is_refused(document: Any) -> None:
    with pytest.raises((KeyError, TypeError, ValueError, AttributeError)):
        CostTable.from_json(document)


def test_fingerprint_tells_threads_apart() -> None:
    line = machine_fingerprint()
    assert f"{torch.get_num_threads()} threads" in line
    assert line.endswith(f"torch {torch.__version__}")
    assert "\n" not in line
    assert machine_fingerprint() == line


# -- calibration on a clock of its own ----------------------------------------------------------------------------


class Bench:
    """A runner, a drafter and a clock: each pass takes as long as `seconds(context, rows, turn)` says."""

    vocab_size, max_context = 50, 2000

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.turns: dict[tuple[int, int], int] = {}
        self.passes: list[tuple[int, int, int]] = []  # context, rows, num_logits
        self.synchronized = 0
        self.drafts: list[int] = []
        monkeypatch.setattr(calibration, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def new_buffer(self) -> Any:
        buffer = SimpleNamespace(length=0)
        buffer.truncate = lambda length: setattr(buffer, "length", length)
        return buffer

    def forward(self, tokens: list[int], buffer: Any, num_logits: int) -> torch.Tensor:
        place = (buffer.length, len(tokens))
        turn = self.turns[place] = self.turns.get(place, -1) + 1
        self.passes.append((*place, num_logits))
        self.now += self.seconds(*place, turn)
        buffer.length += len(tokens)
        return torch.zeros(num_logits, self.vocab_size)

    def seconds(self, context: int, rows: int, turn: int) -> float:
        """0.5 a prefill token; rows * context / 64 a step: the first turn far more, the others in steps of 1/64."""
        if context == 0:
            return 0.5 * rows
        return 1e6 if turn == 0 else rows * context / 64 + (turn - 5) / 64

    def synchronize(self) -> None:
        self.synchronized += 1

    def begin(self, tokens: list[int], salt: str = "") -> FunctionDrafter:
        def propose(tokens: list[int], k: int, sampling: Any) -> Draft:
            self.drafts.append(k)
            self.now += 1e6 if len(self.drafts) == 1 else len(self.drafts) / 8
            return Draft([1] * 3, [1.0] * 3)

        return FunctionDrafter(propose)


def test_known_times_give_known_medians(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    costs = calibrate(bench, {"d": bench}, [4, 0, 2, 4], contexts=(128, 64), rounds=9, machine="bench")
    assert costs.contexts == (64, 128)
    # Rounds 1 to 9 have their median at 5; the warm-up of 1e6 seconds is not among them.
    assert costs.verify == {0: (1.0, 2.0), 2: (3.0, 6.0), 4: (5.0, 10.0)}
    assert costs.prefill == 0.5
    assert costs.machine == "bench"
    # Plain times over their median: 1 + (t - 5) / 64 and 1 + (t - 5) / 128; half of what the middle half spans.
    relative = np.array([1 + (t - 5) / 64 / m for m in (1, 2) for t in range(1, 10)])
    low, high = np.percentile(relative, [25, 75])
    assert costs.spread == pytest.approx((high - low) / 2)
    # Calls 2 to 10 take 2/8 to 10/8 seconds for 3 tokens each: the median call is the sixth.
    assert costs.draft == {"d": pytest.approx(6 / 8 / 3)}
    assert bench.drafts == [4] * 10
    assert bench.synchronized > 2 * 2 * 3 * 9


def test_options_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    calibrate(bench, {}, [4, 2], contexts=(64,), rounds=3)
    assert bench.passes[:2] == [(0, 2, 1), (0, 64, 1)]
    assert bench.passes[2:] == [(64, 1, 1), (64, 3, 3), (64, 5, 5)] * 4


def test_drift_of_the_machine_touches_all_options_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slowing(Bench):
        def seconds(self, context: int, rows: int, turn: int) -> float:
            return (1 + turn) * (1 + rows / 10)  # each round slower than the one before

    costs = calibrate(Slowing(monkeypatch), {}, [2, 8], contexts=(64,), rounds=9)
    assert costs.verify_ratio(2) == pytest.approx(1.3 / 1.1)
    assert costs.verify_ratio(8) == pytest.approx(1.9 / 1.1)


def test_contexts_stay_within_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    bench.max_context = 100
    costs = calibrate(bench, {}, [8], contexts=(64, 768, 900), rounds=1)
    assert costs.contexts == (64, 90)
    assert max(context + rows for context, rows, _ in bench.passes) <= 100


def test_without_lengths_only_the_plain_step_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    costs = calibrate(bench, {"d": bench}, [], contexts=(64,), rounds=2)
    assert set(costs.verify) == {0}
    assert costs.draft == {"d": 0.0}


def test_calibration_tokens_are_the_same_everywhere() -> None:
    tokens = calibration_tokens(270, 500)
    assert tokens == calibration_tokens(270, 500)
    assert (min(tokens) >= 0, max(tokens) < 270, len(set(tokens)) > 100) == (True, True, True)


def test_a_tiny_model_has_positive_times_everywhere() -> None:
    loaded = load_tiny("llama")
    drafters = {"ngram": NGramDrafter(), "model": tiny_model_drafter(loaded)}
    costs = calibrate(loaded.runner, drafters, [1, 3, 8], contexts=(16, 9999), rounds=3)
    assert costs.contexts == (16, 502)
    assert set(costs.verify) == {0, 1, 3, 8}
    assert all(len(times) == 2 and min(times) > 0 for times in costs.verify.values())
    assert set(costs.draft) == {"ngram", "model"}
    assert min(*costs.draft.values(), costs.prefill) > 0
    assert costs.spread >= 0
    assert costs.machine == machine_fingerprint()


# -- kept in the cache folder -------------------------------------------------------------------------------------


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, ...]]:
    """Counts measurements instead of making them; each gives another prefill time."""
    calls: list[tuple[str, ...]] = []

    def fake(runner: Any, drafters: Any, lengths: Any, machine: str = "") -> CostTable:
        calls.append(tuple(drafters))
        return replace(TABLE, prefill=float(len(calls)), machine=machine)

    monkeypatch.setenv("DRAFTGATE_CACHE", str(tmp_path))
    monkeypatch.setattr(calibration, "calibrate", fake)
    return calls


def files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "costs").iterdir())


def test_measured_once(measured: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = cached_costs("e", None, {"a": None}, [4, 2])
    assert capsys.readouterr().err == "draftgate: calibrating costs on this machine\n"
    assert cached_costs("e", None, {"a": None}, [2, 4, 2]) == first
    assert capsys.readouterr().err == ""
    assert len(measured) == len(files(tmp_path)) == 1


def test_whatever_costs_depend_on_has_a_file_of_its_own(
    measured: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached_costs("e", None, {"a": None}, [4])
    cached_costs("e bf16", None, {"a": None}, [4])
    cached_costs("e", None, {"b": None}, [4])
    cached_costs("e", None, {"a": None, "b": None}, [4])
    cached_costs("e", None, {"b": None, "a": None}, [4])  # as before
    cached_costs("e", None, {"a": None}, [4, 5])
    monkeypatch.setattr(calibration, "machine_fingerprint", lambda device: "another machine")
    cached_costs("e", None, {"a": None}, [4])
    assert len(measured) == len(files(tmp_path)) == 6


@pytest.mark.parametrize("text", [b"", b"\xff", b"{", b"[" * 100_000, *(json.dumps(d).encode() for d in BROKEN)])
def test_a_damaged_file_is_measured_anew(measured: list[Any], tmp_path: Path, text: bytes) -> None:
    cached_costs("e", None, {"a": None}, [4])
    files(tmp_path)[0].write_bytes(text)
    assert cached_costs("e", None, {"a": None}, [4]).prefill == 2.0
    assert cached_costs("e", None, {"a": None}, [4]).prefill == 2.0
    assert len(measured) == 2


def test_a_decoder_asks_for_its_own_menu_and_drafters(measured: list[Any]) -> None:
    loaded = load_tiny("llama")
    decoder = tiny_decoder(loaded, [NGramDrafter()])
    assert decoder.costs() == decoder.costs()
    assert measured == [("ngram",)]
