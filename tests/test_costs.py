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
from engine.assembly import engine_line
from engine.calibration import cached_costs, calibrate, calibration_tokens
from engine.cells import Cells
from engine.controllers import FixedController
from engine.costs import CostTable, machine_fingerprint
from engine.drafters import NGramDrafter
from engine.drafters.base import Draft
from engine.observation import ObservationSchema
from engine.policy import Policy
from engine.policy_heads import TableHead

TABLE = CostTable((100, 300), {0: (1.0, 3.0), 4: (1.5, 6.0)}, 0.1, {"a": 0.5}, 0.25, "m", "e")


def test_seconds_are_interpolated_and_grow_on_beyond() -> None:
    assert [TABLE.plain_seconds(c) for c in (0, 100, 150, 200, 300, 400, 2300)] == [1.0, 1.0, 1.5, 2.0, 3.0, 4.0, 23.0]
    assert [TABLE.verify_seconds(4, c) for c in (100, 200, 300, 400)] == [1.5, 3.75, 6.0, 8.25]
    three = CostTable((100, 300, 400), {0: (1.0, 3.0, 3.5)}, 0.1, {}, 0.25, "m")
    assert three.plain_seconds(600) == 4.5  # the last segment's slope, not the whole table's
    with pytest.raises(KeyError):
        TABLE.verify_seconds(5, 100)


def test_seconds_never_fall_beyond_the_last_context() -> None:
    falling = CostTable((100, 300), {0: (3.0, 1.0)}, 0.1, {}, 0.25, "m")
    assert [falling.plain_seconds(c) for c in (200, 300, 10**9)] == [2.0, 1.0, 1.0]
    alone = CostTable((100,), {0: (3.0,)}, 0.1, {}, 0.25, "m")
    assert [alone.plain_seconds(c) for c in (1, 100, 10**9)] == [3.0] * 3


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
    {name: value for name, value in TABLE.to_json().items() if name != "engine"},
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
        """0.5 a prefill token in the median; rows * context / 64 a step, in steps of 1/64, but for a slow first."""
        if context == 0:
            return (1e6, 0.5, 9.0, 0.25)[turn] * rows
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
    costs = calibrate(bench, {"d": bench}, [4, 0, 2, 4], contexts=(128, 64), rounds=9, machine="bench", engine="tiny")
    assert costs.contexts == (64, 128)
    # Rounds 1 to 9 have their median at 5; the warm-up of 1e6 seconds is not among them.
    assert costs.verify == {0: (1.0, 2.0), 2: (3.0, 6.0), 4: (5.0, 10.0)}
    assert costs.prefill == 0.5
    assert (costs.machine, costs.engine) == ("bench", "tiny")
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
    assert bench.passes[:4] == [(0, 64, 1)] * 4
    assert bench.passes[4:] == [(64, 1, 1), (64, 3, 3), (64, 5, 5)] * 4


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

    def fake(runner: Any, drafters: Any, lengths: Any, machine: str = "", engine: str = "") -> CostTable:
        calls.append(tuple(drafters))
        return replace(TABLE, prefill=float(len(calls)), machine=machine, engine=engine)

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
    for name, value in [
        ("machine_fingerprint", lambda device: "another machine"),
        ("CONTEXTS", (128, 700)),
        ("ROUNDS", 5),
        ("FORMAT_VERSION", 99),
    ]:
        monkeypatch.setattr(calibration, name, value)
        cached_costs("e", None, {"a": None}, [4])
    assert len(measured) == len(files(tmp_path)) == 9


def test_costs_that_cannot_be_kept_are_used_all_the_same(
    measured: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "costs").write_text("a file where a folder should be")
    for count in (1, 2):
        with pytest.warns(UserWarning, match="the measured costs are not kept .*cannot write .*costs"):
            assert cached_costs("e", None, {"a": None}, [4]).prefill == count
    assert len(measured) == 2


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


def test_the_engine_line_tells_targets_precisions_and_drafters_apart() -> None:
    loaded = load_tiny("llama")
    ngram, model = NGramDrafter(), tiny_model_drafter(loaded)
    lines = {
        engine_line(loaded, {}),
        engine_line(replace(loaded, digest="other"), {}),
        engine_line(replace(loaded, precision="bf16"), {}),
        engine_line(loaded, {"ngram": ngram}),
        engine_line(loaded, {"model": model}),
        engine_line(loaded, {"model": replace(model, digest="other")}),
        engine_line(loaded, {"ngram": ngram, "model": model}),
    }
    assert len(lines) == 7
    assert engine_line(loaded, {"ngram": ngram, "model": model}) == engine_line(
        loaded, {"model": model, "ngram": ngram}
    )
    assert engine_line(replace(loaded, name="copy"), {}) == engine_line(loaded, {})


@pytest.mark.parametrize("ours", [True, False])
def test_a_policys_costs_serve_only_the_engine_that_they_were_measured_on(measured: list[Any], ours: bool) -> None:
    """On the same machine, a policy of another target is calibrated anew."""
    loaded = load_tiny("llama")
    decoder = tiny_decoder(loaded, [NGramDrafter()], menu="reuse/0,reuse/4")
    engine = engine_line(loaded if ours else replace(loaded, digest="other"), decoder.parts.drafters)
    told = CostTable((1,), {0: (1.0,), 4: (2.0,)}, 0.0, {"ngram": 0.5}, 0.5, machine_fingerprint(), engine)
    used: list[CostTable] = []

    class Spy(Policy):
        def controller(self, costs: CostTable | None = None) -> Any:
            used.append(costs or self.costs)
            return FixedController(self.menu, 4)

    cells = Cells((("context", (5.0,)),), ObservationSchema(decoder.parts.menu).names)
    head = TableHead(cells, np.zeros((2, 2), dtype=np.float32))
    decoder.with_controller(Spy("p", decoder.parts.menu, head, told))
    assert used == [told if ours else decoder.costs()]
    assert len(measured) == (0 if ours else 1)
