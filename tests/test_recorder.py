"""Recording: what plain decoding gives, what drafters say at every position, and recordings that were interrupted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import (
    FunctionDrafter,
    TableRunner,
    WatchedRunner,
    load_table,
    load_tiny,
    tiny_decoder,
    tiny_model_drafter,
)
from trace_tools import TALKS, talk

from engine import SpeculativeDecoder
from engine.drafters import NGramDrafter
from engine.drafters.base import Draft
from engine.errors import SettingError, TraceError
from envs import recorder
from envs.dialogue import Dialogue
from envs.recorder import record, recording_key
from envs.request_recorder import RequestRecorder
from envs.trace import TraceSet
from envs.workloads import Workload

NEW, K = 10, 6
MakeEngine = Callable[[], SpeculativeDecoder]


@pytest.fixture(scope="module")
def bitwise(target_folder: Path, drafter_folder: Path) -> SpeculativeDecoder:
    """An int8 engine: decoding may speculate while it records."""
    drafters = ["ngram:history", f"model:{drafter_folder}"]
    return SpeculativeDecoder.from_pretrained(str(target_folder), drafters, controller="plain", precision="int8")


@pytest.fixture(scope="module")
def rounding() -> SpeculativeDecoder:
    """An engine whose passes of several rows round differently: decoding is plain while it records."""
    loaded = load_tiny("llama")
    drafters = [NGramDrafter(), NGramDrafter(name="ngram:history", history_tokens=4096)]
    return tiny_decoder(loaded, [*drafters, tiny_model_drafter(loaded)])


@pytest.fixture(params=["bitwise", "rounding"])
def engine(request: pytest.FixtureRequest) -> SpeculativeDecoder:
    decoder: SpeculativeDecoder = request.getfixturevalue(request.param)
    return decoder


def recorded(decoder: SpeculativeDecoder, folder: Path, workload: Workload = TALKS) -> TraceSet:
    return record(decoder, workload, NEW, K, folder, progress=False)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# -- what is recorded ---------------------------------------------------------------------------------------------


def test_tokens_hits_and_limits_are_those_of_plain_decoding(engine: SpeculativeDecoder, tmp_path: Path) -> None:
    traces = recorded(engine, tmp_path)
    plain, count = engine.with_empty_caches(), 0
    for conversation in TALKS.conversations:
        dialogue = Dialogue(conversation)
        while turn := dialogue.next_turn():
            trace, generation = traces.traces[count], plain.generate(turn.messages, NEW)
            assert trace.tokens.tolist() == generation.tokens
            assert trace.cached_tokens == generation.counters.num_cached_tokens
            assert trace.prompt_tokens == generation.counters.num_prompt_tokens
            assert (trace.request, trace.kind, trace.group) == (turn.id, turn.kind, turn.group)
            assert trace.limit == NEW
            dialogue.reply(generation.text)
            count += 1
    assert count == len(traces) == TALKS.num_requests
    assert any(trace.cached_tokens for trace in traces.traces)
    assert traces.drafters == tuple(engine.parts.drafters)
    assert traces.lagging == tuple(name.startswith("model") for name in traces.drafters)


def test_drafts_and_signals_are_those_of_the_drafter_at_each_position(
    rounding: SpeculativeDecoder, tmp_path: Path
) -> None:
    for conversation, trace in zip(TALKS.conversations, recorded(rounding, tmp_path, first_turns()).traces):
        prompt = rounding.encode([message.as_dict() for message in conversation.messages[:1]])
        answer = trace.tokens.tolist()
        for at in range(trace.length):
            text = prompt + answer[:at]
            state = NGramDrafter().begin(text)
            draft, signal = state.propose(text, K), state.signal(text)
            count = len(draft.tokens)
            assert trace.proposed[0, at] == count
            assert trace.confidences[0, at].tolist() == draft.confidences + [0.0] * (K - count)
            found = (trace.match_length[0, at], trace.support[0, at], trace.signal_confidence[0, at])
            assert found == (signal.match_length, signal.support, signal.confidence)
            same = [a == b for a, b in zip(draft.tokens, answer[at:])]
            assert trace.matched[0, at] == (same.index(False) if False in same else len(same))


def test_a_model_s_drafts_are_those_that_it_makes_anew_at_each_position(tmp_path: Path) -> None:
    """And where the text goes on as drafted, they take fewer passes."""
    loaded = load_tiny("llama")
    for copies, drafter in ((True, load_tiny("llama").runner), (False, load_tiny("drafter").runner)):
        runner = WatchedRunner(drafter)
        model = tiny_model_drafter(loaded, runner=runner)
        decoder = tiny_decoder(loaded, [model])
        request = decoder.request([1, 2, 3, 1, 2], NEW)
        runner.passes.clear()
        trace, _ = RequestRecorder(decoder, K).record(request, TURN)
        passes, state = len(runner.passes), model.begin(list(request.tokens))
        for at in range(trace.length):
            text = [*request.tokens, *trace.tokens[:at].tolist()]
            assert trace.signal_confidence[0, at] == state.signal(text).confidence
            draft = state.propose(text, K)
            assert (trace.proposed[0, at], trace.confidences[0, at].tolist()) == (K, draft.confidences)
        assert (passes == K + trace.length - 1) if copies else (K + trace.length - 1 <= passes <= K * trace.length)


def first_turns() -> Workload:
    return Workload("first", tuple(conversation.first(1) for conversation in TALKS.conversations))


def test_the_targets_certainty_is_known_before_each_step(tmp_path: Path) -> None:
    runner = TableRunner(vocab=16, seed=3)
    decoder = tiny_decoder(load_table(runner), [NGramDrafter()])
    request = decoder.request([1, 2, 3, 1, 2], NEW)
    trace, _ = RequestRecorder(decoder, K).record(request, TURN)
    assert (trace.top_probability[0], trace.entropy[0], trace.margin[0]) == (0.0, 0.0, 0.0)
    for at in range(1, trace.length):
        text = [*request.tokens, *trace.tokens[:at].tolist()]
        probs = runner.logits_after(text[:-1]).double().softmax(dim=-1).numpy()
        ordered = np.sort(probs)
        assert trace.top_probability[at] == pytest.approx(ordered[-1], rel=1e-5)
        assert trace.margin[at] == pytest.approx(ordered[-1] - ordered[-2], abs=1e-6)
        assert trace.entropy[at] == pytest.approx(-(probs * np.log(probs)).sum(), rel=1e-4)


TURN: Any = type("Turn", (), {"id": "t/1", "kind": "talk", "group": "t"})


def test_certainty_is_the_same_where_decoding_speculates(bitwise: SpeculativeDecoder, tmp_path: Path) -> None:
    """Rows of one pass, and rows of passes of their own."""
    request = bitwise.request(bitwise.encode("the in and the in and the in and the in"), 24)
    guessed, _ = RequestRecorder(bitwise, K).record(request, TURN)
    alone = RequestRecorder(bitwise, K)
    alone._tap.bitwise = False
    plain, _ = alone.record(request, TURN)
    for name, array in guessed.arrays().items():
        np.testing.assert_array_equal(array, plain.arrays()[name], err_msg=name)


def test_a_drafter_that_fails_proposes_nothing(tmp_path: Path) -> None:
    def fail(tokens: list[int], k: int, sampling: Any) -> Draft:
        raise RuntimeError("broken")

    decoder = tiny_decoder(load_tiny("llama"), [FunctionDrafter(fail, "broken")])
    with pytest.warns(RuntimeWarning, match="drafter broken failed"):
        traces = recorded(decoder, tmp_path, Workload("one", (talk("a", "the"),)))
    assert not traces.flat().proposed.any()


def test_requests_that_do_not_fit_are_left_out(rounding: SpeculativeDecoder, tmp_path: Path) -> None:
    long = talk("long", "the", "in " * 600, "and")
    with pytest.warns(UserWarning, match="request long/2 is left out: .* shorten the prompt"):
        traces = recorded(rounding, tmp_path / "some", Workload("w", (long, talk("short", "the"))))
    assert [trace.request for trace in traces.traces] == ["long/1", "short/1"]
    with (
        pytest.warns(UserWarning, match="is left out"),
        pytest.raises(TraceError, match="no request of w fits the model; give shorter prompts"),
    ):
        recorded(rounding, tmp_path / "none", Workload("w", (talk("long", "in " * 600),)))


@pytest.mark.parametrize("max_k", [0, 256])
def test_a_length_out_of_range_is_refused(rounding: SpeculativeDecoder, max_k: int, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=f"max_k is {max_k}; give 1 to 255"):
        record(rounding, TALKS, NEW, max_k, tmp_path)


# -- recordings that are there, or were interrupted ---------------------------------------------------------------


class Counted:
    """Counts requests that are recorded, and interrupts where it is told to: before a request or within it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.stop_at, self.within = 0, -1, False
        self._putting_back = False
        real, put_back = RequestRecorder.record, RequestRecorder.put_back

        def known(this: RequestRecorder, *arguments: Any) -> Any:
            self._putting_back = True
            result = put_back(this, *arguments)
            self._putting_back = False
            return result

        def counted(this: RequestRecorder, *arguments: Any) -> Any:
            if self._putting_back:
                return real(this, *arguments)
            if self.count == self.stop_at and not self.within:
                raise KeyboardInterrupt
            result = real(this, *arguments)
            if self.count == self.stop_at:
                raise KeyboardInterrupt
            self.count += 1
            return result

        monkeypatch.setattr(RequestRecorder, "record", counted)
        monkeypatch.setattr(RequestRecorder, "put_back", known)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


def test_what_is_there_is_not_recorded_again(
    engine: SpeculativeDecoder, counted: Counted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTGATE_CACHE", str(tmp_path))
    first = record(engine, TALKS, NEW, K, progress=False)
    key = recording_key(engine, TALKS, NEW, K)
    assert counted.count == TALKS.num_requests
    assert set(files(tmp_path / "traces" / key)) == {"traces.json", "traces.safetensors"}
    again = record(engine, TALKS, NEW, K, progress=False)
    assert counted.count == TALKS.num_requests
    assert again.fingerprint == first.fingerprint == key
    assert [trace.tokens.tolist() for trace in again.traces] == [trace.tokens.tolist() for trace in first.traces]


@pytest.mark.parametrize("within", [False, True])
def test_an_interrupted_recording_goes_on_to_what_an_undisturbed_one_gives(
    engine: SpeculativeDecoder, within: bool, counted: Counted, tmp_path: Path
) -> None:
    """Interrupted at every request in turn: prefix hits, history and later turns depend on what went before."""
    recorded(engine, tmp_path / "whole")
    counted.count, counted.within = 0, within
    for stop in range(1, TALKS.num_requests):
        counted.stop_at = stop
        with pytest.raises(KeyboardInterrupt):
            recorded(engine, tmp_path / "parts")
        assert len(list((tmp_path / "parts" / "requests").iterdir())) == stop
        assert counted.count == stop
    counted.stop_at = -1
    recorded(engine, tmp_path / "parts")
    assert counted.count == TALKS.num_requests
    assert files(tmp_path / "parts") == files(tmp_path / "whole")


def test_a_damaged_request_is_recorded_anew(engine: SpeculativeDecoder, counted: Counted, tmp_path: Path) -> None:
    recorded(engine, tmp_path / "whole")
    counted.count, counted.stop_at = 0, 5
    with pytest.raises(KeyboardInterrupt):
        recorded(engine, tmp_path / "parts")
    part = tmp_path / "parts" / "requests" / "00002" / "traces.safetensors"
    part.write_bytes(part.read_bytes()[:-1])
    counted.stop_at = -1
    with pytest.warns(UserWarning, match="00002/traces.safetensors was truncated or altered .* recorded anew now"):
        recorded(engine, tmp_path / "parts")
    assert counted.count == TALKS.num_requests + 1
    assert files(tmp_path / "parts") == files(tmp_path / "whole")


def test_a_damaged_recording_is_made_anew(rounding: SpeculativeDecoder, counted: Counted, tmp_path: Path) -> None:
    recorded(rounding, tmp_path)
    before = files(tmp_path)
    (tmp_path / "traces.json").write_text("{")
    with pytest.warns(UserWarning, match=r"traces.json is not valid JSON .* recorded anew now"):
        recorded(rounding, tmp_path)
    assert counted.count == 2 * TALKS.num_requests
    assert files(tmp_path) == before


def test_another_recordings_folder_is_left_alone(rounding: SpeculativeDecoder, tmp_path: Path) -> None:
    recorded(rounding, tmp_path)
    before = files(tmp_path)
    with pytest.raises(TraceError, match="holds a recording of another engine, workload or length; choose another"):
        record(rounding, TALKS, NEW + 1, K, tmp_path, progress=False)
    assert files(tmp_path) == before


def test_the_key_depends_on_all_that_a_recording_depends_on(
    rounding: SpeculativeDecoder, bitwise: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, ngram = load_tiny("llama"), NGramDrafter()
    engines = [
        rounding,
        bitwise,
        tiny_decoder(loaded, [ngram]),
        tiny_decoder(loaded, [ngram], cache_tokens=64),
        tiny_decoder(load_tiny("llama", seed=1), [ngram]),
        tiny_decoder(loaded, [NGramDrafter(name="other")]),
        tiny_decoder(loaded, [ngram, NGramDrafter(name="other")]),
        tiny_decoder(loaded, [NGramDrafter(name="other"), ngram]),
        tiny_decoder(replace(loaded, precision="bf16"), [ngram]),
    ]
    keys = [recording_key(engine, TALKS, NEW, K) for engine in engines]
    keys += [recording_key(rounding, first_turns(), NEW, K), recording_key(rounding, TALKS, NEW + 1, K)]
    keys.append(recording_key(rounding, TALKS, NEW, K + 1))
    monkeypatch.setattr(recorder, "RECORDING_VERSION", 99)
    keys.append(recording_key(rounding, TALKS, NEW, K))
    assert len(set(keys)) == len(keys)
    renamed = replace(TALKS, name="elsewhere")
    monkeypatch.undo()
    assert recording_key(rounding, renamed, NEW, K) == keys[0]


def test_the_engines_own_caches_stay_as_they_are(rounding: SpeculativeDecoder, tmp_path: Path) -> None:
    before = rounding.parts.prefix_cache.statistics
    recorded(rounding, tmp_path)
    assert rounding.parts.prefix_cache.statistics == before
