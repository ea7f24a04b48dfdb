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
from tiny_models import FunctionDrafter, load_tiny, make_parts, tiny_decoder, tiny_model_drafter

from engine import bookkeeping, calibration, session, stopwatch
from engine.assembly import engine_line
from engine.bookkeeping import Bookkeeping, time_bookkeeping
from engine.calibration import cached_costs, calibrate, noise_warning
from engine.cells import Cells
from engine.controllers import FixedController
from engine.costs import THREADS, CostTable, machine_fingerprint
from engine.drafters import NGramDrafter
from engine.drafters.base import Draft
from engine.menu import default_menu
from engine.observation import ObservationSchema
from engine.policy import Policy
from engine.policy_heads import TableHead
from engine.prefix_cache import PrefixCache
from engine.stopwatch import calibration_tokens, interval, time_draft, time_passes, time_reading

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
    for table in (TABLE, replace(WHOLE, intervals={"overhead": (0.01, 0.02)})):
        text = json.dumps(table.to_json(), allow_nan=False)
        assert CostTable.from_json(json.loads(text)) == table


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
    change(overhead=-1.0),
    change(observe=float("nan")),
    change(draft_call={"a": float("inf")}),
    change(draft_read={"a": -1}),
    change(reading={"20": 1.0, "10": 2.0}),
    change(reading={"0": 1.0}),
    change(reading=[1.0]),
    change(intervals={"prefill": [1.0]}),
]


@pytest.mark.parametrize("document", BROKEN)
def test_a_damaged_document_is_refused(document: Any) -> None:
    with pytest.raises((KeyError, TypeError, ValueError, AttributeError)):
        CostTable.from_json(document)


def test_fingerprint_tells_threads_apart() -> None:
    line = machine_fingerprint()
    assert f"{THREADS} threads" in line
    assert line.endswith(f"torch {torch.__version__}")
    assert "\n" not in line
    assert machine_fingerprint() == line


# -- calibration on a clock of its own ----------------------------------------------------------------------------


class Bench:
    """A runner, a drafter and a clock: each pass takes as long as `seconds(context, rows, turn)` says."""

    vocab_size, max_context, bitwise = 50, 2000, True

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.turns: dict[tuple[int, int], int] = {}
        self.passes: list[tuple[int, int, int]] = []  # context, rows, num_logits
        self.synchronized = 0
        monkeypatch.setattr(stopwatch, "time", SimpleNamespace(perf_counter=lambda: self.now))

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
        """Of prompts 1/8 a row; of steps rows * context / 64 in the median, in steps of 1/64; a first one is slow."""
        if turn == 0:
            return 1e6
        return rows / 8 + (turn - 3.5) / 64 if context == 0 else rows * context / 64 + (turn - 5) / 64

    def synchronize(self) -> None:
        self.synchronized += 1


def test_known_passes_give_known_times(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    times = time_passes(bench, (0, 2, 4), 64, 9)
    # Rounds 1 to 9 have their median at 5; the warm-up of 1e6 seconds is not among them.
    for k, expected in [(0, 1.0), (2, 3.0), (4, 5.0)]:
        np.testing.assert_allclose(times[k], expected + (np.arange(1, 10) - 5) / 64)
    assert bench.passes[0] == (0, 64, 1)
    assert bench.passes[1:] == [(64, 1, 1), (64, 3, 3), (64, 5, 5)] * 10
    assert bench.synchronized > 2 * 3 * 9


def test_drift_of_the_machine_touches_all_options_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slowing(Bench):
        def seconds(self, context: int, rows: int, turn: int) -> float:
            return (1 + turn) * (1 + rows / 10)  # each round slower than the one before

    times = {k: np.median(seconds) for k, seconds in time_passes(Slowing(monkeypatch), (0, 2, 8), 64, 9).items()}
    assert times[2] / times[0] == pytest.approx(1.3 / 1.1)
    assert times[8] / times[0] == pytest.approx(1.9 / 1.1)


def test_prompts_are_timed_from_an_empty_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    times = time_reading(bench, (15, 7), 6)
    np.testing.assert_allclose(times[15], 2.0 + (np.arange(1, 7) - 3.5) / 64)
    np.testing.assert_allclose(times[7], 1.0 + (np.arange(1, 7) - 3.5) / 64)
    assert bench.passes == [(0, 16, 1)] * 7 + [(0, 8, 1)] * 7
    monkeypatch.setattr(stopwatch, "LONGEST_PASS", 1.5)
    assert list(time_reading(Bench(monkeypatch), (7, 15, 31), 2)) == [7, 15]  # 31 would take too long


class TimedDrafter:
    """Takes `call + tokens * each`, reads at `read` a token first, and goes by the bench's clock."""

    name = "timed"

    def __init__(self, bench: Bench, call: float, each: float, read: float, most: int = 99) -> None:
        self.bench, self.call, self.each, self.read, self.most = bench, call, each, read, most
        self.begun = 0

    def begin(self, tokens: list[int], salt: str = "") -> FunctionDrafter:
        assert salt == "calibration"
        self.begun += 1
        known = 0

        def propose(tokens: list[int], k: int, sampling: Any) -> Draft:
            nonlocal known
            count = min(k, self.most)
            self.bench.now += self.call + count * self.each + (self.read * len(tokens) if not known else 0.0)
            known = len(tokens)
            return Draft([1] * count, [1.0] * count)

        return FunctionDrafter(propose)


def test_a_draft_has_a_fixed_part_a_part_a_token_and_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    token, call, read = time_draft(bench, TimedDrafter(bench, 0.5, 0.25, 0.125), 8, 5)
    np.testing.assert_allclose(token, 0.25)
    np.testing.assert_allclose(call, 0.5)
    np.testing.assert_allclose(read, 0.125)
    # Alone, one token cannot be told from the call; nor where a drafter never gives more.
    for k, most in [(1, 99), (8, 1)]:
        bench = Bench(monkeypatch)
        token, call, _ = time_draft(bench, TimedDrafter(bench, 0.5, 0.25, 0.125, most), k, 5)
        np.testing.assert_allclose(token, 0.75)
        np.testing.assert_allclose(call, 0.0)
    assert [times.tolist() for times in time_draft(bench, TimedDrafter(bench, 1, 1, 1), 0, 3)] == [[0.0] * 3] * 3


@pytest.mark.parametrize(
    ("count", "first", "last"), [(1, 0, 0), (5, 0, 4), (6, 0, 5), (8, 0, 7), (9, 1, 7), (20, 5, 14)]
)
def test_intervals_are_order_statistics(count: int, first: int, last: int) -> None:
    """The places that tables of the sign test's intervals give for 95 %."""
    times = np.random.default_rng(0).permutation(count) / 1.0
    assert interval(times) == (first, last)


def test_intervals_cover_the_median_as_often_as_they_say() -> None:
    """4,000 samples of 9: at least 95 % hold the median; three standard errors below that are seen once in 700."""
    samples = np.random.default_rng(0).exponential(size=(4000, 9))
    held = [low <= np.log(2) <= high for low, high in map(interval, samples)]
    assert np.mean(held) > 0.95 - 3 * np.sqrt(0.95 * 0.05 / 4000)
    assert np.mean(held) < 0.985  # and are no wider than they need be


def test_calibration_tokens_are_the_same_everywhere() -> None:
    tokens = calibration_tokens(270, 500)
    assert tokens == calibration_tokens(270, 500)
    assert tokens != calibration_tokens(270, 500, seed=1)
    assert (min(tokens) >= 0, max(tokens) < 270, len(set(tokens)) > 100) == (True, True, True)


# -- a whole table ------------------------------------------------------------------------------------------------


def made_of(monkeypatch: pytest.MonkeyPatch, parts: Any, **settings: Any) -> CostTable:
    """Calibrates with known measurements in place of the clock."""

    def passes(runner: Any, options: Any, context: int, rounds: int) -> dict[int, np.ndarray]:
        return {k: context * (k + 1) * np.array([0.9, 1.0, 1.1]) for k in options}

    def reading(runner: Any, lengths: Any, rounds: int) -> dict[int, np.ndarray]:
        return {n: np.array([n * 1.0, n * 3.0, n * 2.0 + 64]) for n in lengths}

    book = Bookkeeping([1.0, 3.0, 2.0], [0.5], [0.25], [4.0], [0.125], [0.0625])
    monkeypatch.setattr(calibration, "time_passes", passes)
    monkeypatch.setattr(calibration, "time_reading", reading)
    monkeypatch.setattr(calibration, "time_draft", lambda *_: tuple(np.array([x]) for x in (0.3, 0.2, 0.1)))
    monkeypatch.setattr(calibration, "time_bookkeeping", lambda parts, rounds: book)
    monkeypatch.setattr(calibration, "READINGS", (16, 64, 256, 768))
    return calibrate(parts, **settings)


def test_medians_and_intervals_of_every_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = make_parts(load_tiny("llama"), [NGramDrafter()], "reuse/0,reuse/2,reuse/10")
    costs = made_of(monkeypatch, parts, contexts=(128, 64), engine="tiny")
    assert costs.contexts == (64, 128)
    options = (0, *range(1, 9), 10)  # all up to 8, since a drafter may propose fewer than it is asked for
    assert costs.verify == {k: (64.0 * (k + 1), 128.0 * (k + 1)) for k in options}
    assert costs.spread == pytest.approx(0.075)  # the quartiles of 0.9, 0.9, 1, 1, 1.1, 1.1 are 0.925 and 1.075
    assert (costs.machine, costs.engine) == (machine_fingerprint(), "tiny")
    figures = (costs.draft, costs.draft_call, costs.draft_read)
    assert figures == ({"ngram": 0.3}, {"ngram": 0.2}, {"ngram": 0.1})
    book = [getattr(costs, name) for name in ("overhead", "commit", "observe", "setup", "setup_token", "restore")]
    assert book == [2.0, 0.5, 0.25, 4.0, 0.125, 0.0625]
    # What a prompt adds to a plain step at its length: 16, 64, 256 and 510 tokens in a window of 512.
    plain = {16: 64, 64: 64, 256: 128, 510: 128}
    assert costs.reading == {n: max(0.0, min(2 * n + 64, 3 * n) - p) for n, p in plain.items()}
    assert costs.prefill == np.median([seconds / n for n, seconds in costs.reading.items()])
    assert costs.intervals["verify.2.64"] == pytest.approx((3 * 64 * 0.9, 3 * 64 * 1.1))
    assert costs.intervals["overhead"] == (1.0, 3.0)
    assert {"draft.ngram", "draft_call.ngram", "draft_read.ngram", "reading.256", "restore"} <= set(costs.intervals)


def test_contexts_stay_within_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = make_parts(load_tiny("llama"), [NGramDrafter()], "reuse/0,reuse/8")
    assert made_of(monkeypatch, parts, contexts=(64, 9999, 900)).contexts == (64, 502)


def test_without_lengths_only_the_plain_step_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = make_parts(load_tiny("llama"), [], "reuse/0")
    costs = made_of(monkeypatch, parts)
    assert set(costs.verify) == {0}
    assert costs.draft == {}


def test_noise_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "NOISY", 0.15)
    assert noise_warning(replace(TABLE, spread=calibration.NOISY)) is None
    line = noise_warning(replace(TABLE, spread=0.2))
    assert line is not None
    assert line.startswith(
        "the times of a plain step spread by 20% here, beyond 15%: these costs are not to be trusted"
    )


def test_a_tiny_model_has_positive_times_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "READINGS", (16, 64, 256, 768))
    loaded = load_tiny("llama")
    drafters = [NGramDrafter(), tiny_model_drafter(loaded)]
    parts = make_parts(loaded, drafters, "reuse/0,reuse/1,reuse/3,reuse/model/8")
    costs = calibrate(parts, contexts=(16, 9999), rounds=3)
    assert costs.contexts == (16, 502)
    assert set(costs.verify) == set(range(9))
    assert all(len(times) == 2 and min(times) > 0 for times in costs.verify.values())
    assert set(costs.draft) == {"ngram", "model"}
    assert costs.draft["model"] > costs.draft["ngram"]
    assert costs.draft_read["model"] > costs.draft_read["ngram"]
    assert min(costs.prefill, costs.overhead, costs.observe) > 0
    assert costs.machine == machine_fingerprint()
    assert CostTable.from_json(json.loads(json.dumps(costs.to_json(), allow_nan=False))) == costs
    assert parts.prefix_cache.statistics.stored_tokens == 0  # a cache of its own


class Clocked:
    """Parts around a tiny model whose sessions go by a clock that stands still but for what is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        clock = SimpleNamespace(perf_counter=lambda: self.now)
        monkeypatch.setattr(session, "time", clock)
        monkeypatch.setattr(bookkeeping, "time", clock)
        for owner, name, seconds in [
            (session.Session, "_commit", lambda this, tokens: 1.0 + 0.25 * len(tokens)),
            (session.Session, "observe", lambda this: 0.5),
            (PrefixCache, "match", lambda this, tokens, salt: 2.0 + 0.125 * len(tokens)),
            (PrefixCache, "restore", lambda this, match, buffer: 0.0625 * match.length),
        ]:
            monkeypatch.setattr(owner, name, self._slow(getattr(owner, name), seconds))

    def _slow(self, real: Any, seconds: Any) -> Any:
        def slow(this: Any, *arguments: Any) -> Any:
            self.now += seconds(this, *arguments)
            return real(this, *arguments)

        return slow


def test_bookkeeping_is_told_apart_on_real_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    Clocked(monkeypatch)
    book = time_bookkeeping(make_parts(load_tiny("llama"), [NGramDrafter()], "reuse/0,reuse/8"), rounds=2)
    figures = {name: np.median(getattr(book, name)) for name in vars(book)}
    assert figures == pytest.approx(
        {"overhead": 1.25, "commit": 0.25, "observe": 0.5, "setup": 2.0, "setup_token": 0.125, "restore": 0.0625}
    )
    assert [len(getattr(book, name)) for name in vars(book) if name != "observe"] == [2] * 5


# -- a whole step -------------------------------------------------------------------------------------------------

WHOLE = CostTable(
    (100, 300),
    {0: (1.0, 3.0), 2: (2.0, 4.0), 4: (4.0, 6.0)},
    0.1,
    {"a": 0.5},
    0.25,
    "m",
    draft_call={"a": 0.125},
    draft_read={"a": 0.01},
    reading={10: 1.0, 20: 3.0},
    overhead=0.03,
    commit=0.002,
    observe=0.0005,
    setup=7.0,
    setup_token=0.1,
    restore=0.2,
)


def test_a_step_is_its_pass_its_draft_and_its_bookkeeping() -> None:
    step = WHOLE.step_seconds(200, 3, "a", drafted=2, read=5)
    assert step.draft == pytest.approx(0.125 + 2 * 0.5 + 5 * 0.01)
    assert step.verify == 3.0
    assert step.overhead == pytest.approx(0.03 + 2 * 0.002 + 0.0005)
    assert step.total == sum(step)
    assert WHOLE.step_seconds(100, 1, observed=False) == (0.0, 1.0, pytest.approx(0.03))
    assert WHOLE.step_seconds(100, 1, "a", drafted=0).draft == 0.125  # asked in vain


def test_rows_between_those_measured_are_interpolated() -> None:
    assert [WHOLE.rows_seconds(k, 100) for k in range(5)] == [1.0, 1.5, 2.0, 3.0, 4.0]
    assert WHOLE.rows_seconds(3, 200) == 4.0
    with pytest.raises(KeyError):
        WHOLE.rows_seconds(5, 100)


def test_reading_is_interpolated_and_grows_on_beyond() -> None:
    assert [WHOLE.reading_seconds(n) for n in (0, 5, 10, 15, 20, 30)] == [0.0, 0.5, 1.0, 2.0, 3.0, 5.0]
    assert replace(WHOLE, reading={}).reading_seconds(40) == 10.0
    assert replace(WHOLE, reading={10: 2.0, 20: 2.0}).reading_seconds(99) == 2.0


def test_a_first_step_reads_what_was_not_cached() -> None:
    assert WHOLE.first_seconds(21, 0) == (0.0, 3.0, pytest.approx(7.0 + 2.1))
    assert WHOLE.first_seconds(21, 10) == (0.0, 2.0, pytest.approx(7.0 + 2.1 + 2.0))
    assert WHOLE.first_seconds(21, 20).verify == 0.0


def test_old_documents_are_read_with_nothing_besides() -> None:
    new = ("draft_call", "draft_read", "reading", "overhead", "commit", "observe", "setup", "setup_token", "restore")
    document = {name: value for name, value in WHOLE.to_json().items() if name not in (*new, "intervals")}
    old = CostTable.from_json(document)
    assert old == CostTable(WHOLE.contexts, WHOLE.verify, 0.1, WHOLE.draft, 0.25, "m")
    assert old.step_seconds(100, 3, "a", 2).total == 2.0 + 2 * 0.5
    assert old.first_seconds(21, 10).total == 2.5


# -- kept in the cache folder -------------------------------------------------------------------------------------


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, ...]]:
    """Counts measurements instead of making them; each gives another prefill time."""
    calls: list[tuple[str, ...]] = []

    def fake(parts: Any, contexts: Any, rounds: int, device: str, engine: str) -> CostTable:
        calls.append(tuple(parts.drafters))
        return replace(
            TABLE,
            prefill=float(len(calls)),
            machine=calibration.machine_fingerprint(device),
            engine=engine,
            verify=dict.fromkeys((0, *parts.menu.lengths), TABLE.verify[0]),
            draft=dict.fromkeys(parts.drafters, 0.5),
        )

    monkeypatch.setattr(calibration, "NOISY", 0.15)
    monkeypatch.setenv("DRAFTGATE_CACHE", str(tmp_path))
    monkeypatch.setattr(calibration, "calibrate", fake)
    return calls


def files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "costs").iterdir())


def some(drafters: str = "a", lengths: str = "24") -> Any:
    """As much of an engine's parts as a key depends on."""
    named = dict.fromkeys(drafters)
    return SimpleNamespace(drafters=named, menu=default_menu(tuple(named), [int(k) for k in lengths]))


def test_measured_once(measured: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = cached_costs("e", some(lengths="42"))
    assert capsys.readouterr().err == "draftgate: calibrating costs on this machine, once; up to a minute\n"
    assert cached_costs("e", some(lengths="24")) == first
    assert capsys.readouterr().err == ""
    assert len(measured) == len(files(tmp_path)) == 1


def test_whatever_costs_depend_on_has_a_file_of_its_own(
    measured: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached_costs("e", some())
    cached_costs("e bf16", some())
    cached_costs("e", some("b"))
    cached_costs("e", some("ab"))
    cached_costs("e", some("ba"))  # as before
    cached_costs("e", some(lengths="245"))
    for name, value in [
        ("machine_fingerprint", lambda device: "another machine"),
        ("CONTEXTS", (128, 700)),
        ("READINGS", (16, 700)),
        ("ROUNDS", 5),
        ("FORMAT_VERSION", 99),
    ]:
        monkeypatch.setattr(calibration, name, value)
        cached_costs("e", some())
    assert len(measured) == len(files(tmp_path)) == 10


def test_costs_that_cannot_be_kept_are_used_all_the_same(
    measured: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "costs").write_text("a file where a folder should be")
    for count in (1, 2):
        with pytest.warns(UserWarning, match="the measured costs are not kept .*cannot write .*costs"):
            assert cached_costs("e", some()).prefill == count
    assert len(measured) == 2


def test_costs_of_a_busy_machine_are_used_and_not_kept(
    measured: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calibration, "NOISY", TABLE.spread / 2)
    assert [cached_costs("e", some()).prefill for _ in range(2)] == [1.0, 4.0]  # each the first of three alike
    told = capsys.readouterr().err
    assert (told.count("are not to be trusted and not kept"), told.count("calibrating again")) == (2, 4)
    assert not (tmp_path / "costs").exists()


@pytest.mark.parametrize(
    ("spreads", "taken", "kept"), [([0.3, 0.1], 0.1, True), ([0.3, 0.2, 0.4], 0.2, False), ([0.1], 0.1, True)]
)
def test_a_busy_machine_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spreads: list[float], taken: float, kept: bool
) -> None:
    waiting = [replace(TABLE, spread=spread) for spread in spreads]
    monkeypatch.setenv("DRAFTGATE_CACHE", str(tmp_path))
    monkeypatch.setattr(calibration, "NOISY", 0.15)
    monkeypatch.setattr(calibration, "calibrate", lambda *_: waiting.pop(0))
    assert cached_costs("e", some()).spread == taken
    assert waiting == []
    assert (tmp_path / "costs").exists() == kept


@pytest.mark.parametrize("changed", [{"engine": "another"}, {"machine": "another"}, {"verify": {"0": [1.0, 1.0]}}])
def test_kept_costs_of_something_else_are_measured_anew(
    measured: list[Any], tmp_path: Path, changed: dict[str, Any]
) -> None:
    cached_costs("e", some())
    (file,) = files(tmp_path)
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    assert [cached_costs("e", some()).prefill for _ in range(2)] == [2.0, 2.0]


@pytest.mark.parametrize("text", [b"", b"\xff", b"{", b"[" * 100_000, *(json.dumps(d).encode() for d in BROKEN)])
def test_a_damaged_file_is_measured_anew(measured: list[Any], tmp_path: Path, text: bytes) -> None:
    cached_costs("e", some())
    files(tmp_path)[0].write_bytes(text)
    assert cached_costs("e", some()).prefill == 2.0
    assert cached_costs("e", some()).prefill == 2.0
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
