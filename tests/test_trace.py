"""Traces in memory and on disk: the step rule, subsets, files that are whole or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, save
from trace_tools import made_up_traces

from engine import sealed
from engine.errors import StorageError, TraceError
from envs import trace
from envs.trace import Trace, TraceSet, load_traces

JSON, TENSORS = "traces.json", "traces.safetensors"


def same(a: Trace, b: Trace) -> bool:
    told = ("request", "kind", "group", "prompt_tokens", "cached_tokens", "limit")
    arrays = zip(a.arrays().values(), b.arrays().values(), strict=True)
    return all(getattr(a, name) == getattr(b, name) for name in told) and all(
        one.dtype == two.dtype and np.array_equal(one, two) for one, two in arrays
    )


def assert_same(ours: TraceSet, theirs: TraceSet) -> None:
    assert all(same(a, b) for a, b in zip(ours.traces, theirs.traces, strict=True))


@pytest.mark.parametrize("seed", range(3))
def test_what_is_saved_is_loaded(seed: int, tmp_path: Path) -> None:
    traces = made_up_traces(seed)
    traces.save(tmp_path)
    loaded = load_traces(tmp_path)
    assert_same(loaded, traces)
    for name in ("drafters", "max_k", "lagging", "fingerprint", "provenance"):
        assert getattr(loaded, name) == getattr(traces, name)
    assert loaded.num_tokens == traces.num_tokens == sum(len(t.tokens) for t in traces.traces)
    assert sorted(path.name for path in tmp_path.iterdir()) == [JSON, TENSORS]


def test_it_is_compact(tmp_path: Path) -> None:
    """Two drafters and k up to 8: a few hundred bytes a token at most."""
    traces = made_up_traces(0, count=200)
    traces.save(tmp_path)
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert size < 300 * traces.num_tokens


def test_all_positions_in_a_row() -> None:
    traces = made_up_traces(1)
    flat = traces.flat()
    assert flat is traces.flat()
    assert flat.confidences.shape == (2, traces.num_tokens, 8)
    for number, one in enumerate(traces.traces):
        part = slice(flat.offsets[number], flat.offsets[number + 1])
        np.testing.assert_array_equal(flat.tokens[part], one.tokens)
        np.testing.assert_array_equal(flat.matched[:, part], one.matched)
        np.testing.assert_array_equal(flat.confidences[:, part], one.confidences)
        counts = (flat.prompt_tokens[number], flat.cached_tokens[number], flat.limit[number], flat.length[number])
        assert counts == (one.prompt_tokens, one.cached_tokens, one.limit, one.length)
    with pytest.raises(TraceError, match="the set holds no trace"):
        replace(traces, traces=()).flat()


def test_parts_of_a_set() -> None:
    traces = made_up_traces(1)
    part = traces.subset([3, 0])
    assert [one.request for one in part.traces] == [traces.traces[3].request, traces.traces[0].request]
    assert (part.drafters, part.fingerprint, len(part)) == (traces.drafters, traces.fingerprint, 2)
    assert part.flat().length.tolist() == [traces.traces[3].length, traces.traces[0].length]
    chosen = traces.of_conversations(["talk2", "talk0", "unheard of"])
    assert [one.request for one in chosen.traces] == ["talk0/1", "talk0/2", "talk2/1", "talk2/2"]


def broken(**changes: Any) -> Callable[[Trace], Trace]:
    return lambda one: replace(one, **{name: change(one) for name, change in changes.items()})


@pytest.mark.parametrize(
    "change",
    [
        broken(tokens=lambda t: t.tokens.astype(np.int64)),
        broken(proposed=lambda t: t.proposed[:1]),
        broken(proposed=lambda t: t.proposed + np.uint8(9)),
        broken(confidences=lambda t: t.confidences[..., :7]),
        broken(matched=lambda t: t.proposed + np.uint8(1)),
        broken(matched=lambda t: np.full_like(t.matched, 8), proposed=lambda t: np.full_like(t.proposed, 8)),
        broken(limit=lambda t: t.length - 1),
        broken(cached_tokens=lambda t: t.prompt_tokens),
        broken(cached_tokens=lambda t: -1),
    ],
)
def test_traces_that_cannot_be_are_refused(change: Callable[[Trace], Trace]) -> None:
    traces = made_up_traces(2)
    with pytest.raises(ValueError, match=traces.traces[0].request):
        replace(traces, traces=(change(traces.traces[0]),))


def test_sets_that_cannot_be_are_refused() -> None:
    traces = made_up_traces(2)
    for change in ({"lagging": (True,)}, {"drafters": ("a", "a")}):
        with pytest.raises(ValueError, match="one `lagging` a drafter"):
            replace(traces, **change)  # type: ignore[arg-type]


# -- damaged files ------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    made_up_traces(0).save(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", [JSON, TENSORS])
@pytest.mark.parametrize("left", [0.0, 0.5, 0.999])
def test_a_truncated_file_is_refused(saved: Path, name: str, left: float) -> None:
    data = (saved / name).read_bytes()
    (saved / name).write_bytes(data[: int(left * len(data))])
    with pytest.raises(TraceError, match=r"record it again"):
        load_traces(saved)


@pytest.mark.parametrize("place", [8, 0.3, 0.6, -1])
def test_altered_tensors_are_refused(saved: Path, place: float) -> None:
    data = bytearray((saved / TENSORS).read_bytes())
    data[place if isinstance(place, int) else int(place * len(data))] ^= 1
    (saved / TENSORS).write_bytes(data)
    with pytest.raises(TraceError, match=f"{TENSORS} was truncated or altered since its recording; record it again"):
        load_traces(saved)


def rewrite(folder: Path, **changes: Any) -> None:
    document = json.loads((folder / JSON).read_text())
    (folder / JSON).write_text(json.dumps(document | changes))


def test_an_altered_document_is_refused(saved: Path) -> None:
    requests = json.loads((saved / JSON).read_text())["requests"]
    requests[0]["cached_tokens"] += 1
    rewrite(saved, requests=requests)
    with pytest.raises(TraceError, match=f"{JSON} was altered since its recording; record it again"):
        load_traces(saved)


def test_another_version_is_refused(saved: Path) -> None:
    rewrite(saved, version=99)
    with pytest.raises(TraceError, match="holds traces of format 99, this version reads 1; record it again or update"):
        load_traces(saved)
    rewrite(saved, format="something")
    with pytest.raises(TraceError, match="is no draftgate-traces document"):
        load_traces(saved)


@pytest.mark.parametrize("text", ["", "{", "[]", "7", "[" * 100_000])
def test_what_is_no_document_is_refused(saved: Path, text: str) -> None:
    (saved / JSON).write_text(text)
    with pytest.raises(TraceError, match=f"{JSON} "):
        load_traces(saved)


@pytest.mark.parametrize("name", [JSON, TENSORS])
def test_a_missing_file_is_named(saved: Path, name: str) -> None:
    (saved / name).unlink()
    with pytest.raises(TraceError, match=f"{name} cannot be read .No such file or directory."):
        load_traces(saved)


def seal(folder: Path, document: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    trace.FORMAT.write(folder, document, arrays)


def test_contents_that_do_not_fit_together_are_refused_even_if_sealed(saved: Path) -> None:
    document = json.loads((saved / JSON).read_text())
    arrays = load((saved / TENSORS).read_bytes())
    short = {name: array[..., :-1, :] if name == "confidences" else array[..., :-1] for name, array in arrays.items()}
    for wrong_document, wrong_arrays in [
        (document, short),
        (document, {name: array for name, array in arrays.items() if name != "margin"}),
        (document | {"drafters": ["a"]}, arrays),
        (document | {"requests": 3}, arrays),
        (document | {"requests": [{"length": 1}]}, arrays),
        ({name: value for name, value in document.items() if name != "max_k"}, arrays),
    ]:
        seal(saved, wrong_document, wrong_arrays)
        with pytest.raises(TraceError, match=r"are damaged \(.*\); record them again"):
            load_traces(saved)
    seal(saved, document, arrays)
    assert len(load_traces(saved)) == 12


def test_tensors_that_safetensors_refuses(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealed, "save_tensors", lambda arrays: save(arrays)[:-4])
    made_up_traces(0).save(saved)
    with pytest.raises(TraceError, match=f"{TENSORS} is damaged"):
        load_traces(saved)


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot write"):
        made_up_traces(0).save(tmp_path / "file")


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize(("killed_in", "new"), [("write_atomically", False), ("write_json", False), ("move", True)])
def test_a_save_that_is_killed_leaves_the_earlier_set_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool, killed_in: str, new: bool
) -> None:
    earlier, later = made_up_traces(0), made_up_traces(1)
    if there:
        earlier.save(tmp_path)

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(sealed, killed_in, killed)
        with pytest.raises(KeyboardInterrupt):
            later.save(tmp_path)
    if there or new:
        assert_same(load_traces(tmp_path), later if new else earlier)
    later.save(tmp_path)
    assert_same(load_traces(tmp_path), later)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([JSON, TENSORS])


@pytest.mark.parametrize("killed_in", ["write_atomically", "write_json", "move"])
def test_two_saves_that_are_killed_leave_a_whole_set(
    saved: Path, monkeypatch: pytest.MonkeyPatch, killed_in: str
) -> None:
    """The first is killed where its tensors wait to be put in place."""

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    for number, name in ((1, "move"), (2, killed_in)):
        with monkeypatch.context() as patch:
            patch.setattr(sealed, name, killed)
            with pytest.raises(KeyboardInterrupt):
                made_up_traces(number).save(saved)
    assert_same(load_traces(saved), made_up_traces(1))


def test_tensors_of_another_set_are_noticed(saved: Path, tmp_path: Path) -> None:
    made_up_traces(1).save(tmp_path / "other")
    (tmp_path / "other" / TENSORS).replace(saved / TENSORS)
    with pytest.raises(TraceError, match="truncated or altered"):
        load_traces(saved)


def test_no_traces_are_no_set() -> None:
    assert len(TraceSet((), (), 1, ())) == 0
