"""Exported policies: they come back as they were, or not at all."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors
from trace_tools import made_up_costs

import engine.policy as policy_module
from engine.cells import Cells
from engine.costs import CostTable
from engine.cuts import Cut, cut_of, described
from engine.drafters.base import Signal
from engine.errors import DraftgateError, PolicyError, StorageError
from engine.menu import default_menu, parse_menu
from engine.observation import Observation, ObservationSchema
from engine.policy import Policy, load_policy
from engine.policy_heads import TableHead
from engine.storage import document_digest

JSON_FILE, TENSOR_FILE = "policy.json", "policy.safetensors"
MENU = default_menu(("ngram",))
SCHEMA = ObservationSchema(MENU)
FEATURES = (
    ("prefill_pending", (0.5,)),
    ("ngram.match_length", (1.0, 2.0, 3.0, 5.0, 9.0)),
    ("acceptance_short", (0.2, 0.5, 0.8)),
)
CELLS = Cells(FEATURES, SCHEMA.names)
COSTS = CostTable(
    (128, 768),
    {k: (0.01 + k / 1000, 0.02 + k / 999) for k in (0, 1, 2, 3, 4, 6, 8)},
    0.05,
    {"ngram": 1e-5},
    0.002,
    "m",
    "e",
)


def make_policy(seed: int = 0, target: str = "tiny") -> Policy:
    values = np.random.default_rng(seed).standard_normal((CELLS.count, len(MENU))).astype(np.float32)
    provenance = {"steps": 3, "git_commit": None}
    return Policy("ucb", MENU, TableHead(CELLS, values), COSTS, target, "fp32", provenance)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    make_policy().save(tmp_path / "p")
    return tmp_path / "p"


def refused(folder: Path) -> str:
    with pytest.raises(PolicyError) as caught:
        load_policy(folder)
    message = str(caught.value)
    assert "\n" not in message
    assert message.partition("; ")[2], "the message names no mend"
    return message


def rewrite(folder: Path, change: Callable[[dict[str, Any]], object], sign: bool = True) -> None:
    """Change the JSON file; with `sign`, as another version of the exporter would have written it."""
    path = folder / JSON_FILE
    document = json.loads(path.read_text())
    change(document)
    if sign:
        document["sha256"] = document_digest(document)
    path.write_text(json.dumps(document))


def observations(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Random vectors within the bounds, a fifth of their entries on a bound or an edge, and random masks."""
    rng = np.random.default_rng(1)
    vectors = (rng.random((count, len(SCHEMA))) * SCHEMA.high).astype(np.float32)
    at = SCHEMA.index("ngram.match_length")
    vectors[:, at] = rng.integers(0, 12, count)
    vectors[rng.random(vectors.shape) < 0.1] = 0.0
    vectors[:, SCHEMA.index("acceptance_short")] = rng.choice([0.0, 0.2, 0.35, 0.5, 0.8, 1.0], count)
    masks = rng.random((count, len(MENU))) < 0.6
    masks[:, MENU.plain] = True
    return vectors, masks


def test_round_trip_decides_the_same_on_10000_observations(saved: Path) -> None:
    policy, loaded = make_policy(), load_policy(saved)
    vectors, masks = observations(10_000)
    ours = [policy.decide(vector, mask) for vector, mask in zip(vectors, masks, strict=True)]
    theirs = [loaded.decide(vector, mask) for vector, mask in zip(vectors, masks, strict=True)]
    assert ours == theirs
    assert all(mask[action] for action, mask in zip(ours, masks, strict=True))
    assert set(ours) == set(range(len(MENU)))


def test_round_trip_keeps_everything(saved: Path) -> None:
    policy, loaded = make_policy(), load_policy(saved)
    assert (loaded.name, loaded.menu, loaded.costs) == (policy.name, policy.menu, policy.costs)
    assert (loaded.target, loaded.precision, loaded.provenance) == ("tiny", "fp32", policy.provenance)
    assert loaded.head.cells == CELLS
    assert np.array_equal(loaded.head.values, policy.head.values)
    loaded.save(saved.parent / "again")
    for file in (JSON_FILE, TENSOR_FILE):
        assert (saved.parent / "again" / file).read_bytes() == (saved / file).read_bytes()


def test_a_table_takes_the_best_allowed_action_of_the_cell() -> None:
    values = np.zeros((CELLS.count, len(MENU)), dtype=np.float32)
    values[:, 3], values[:, 5] = 1.0, 2.0
    head = TableHead(CELLS, values)
    vector, mask = np.zeros(len(SCHEMA), dtype=np.float32), [True] * len(MENU)
    assert head.decide(vector, mask) == 5
    mask[5] = False
    assert head.decide(vector, mask) == 3
    assert head.decide(vector, [i == 0 for i in range(len(MENU))]) == 0


def test_cells_count_and_edges_belong_to_the_bucket_above() -> None:
    assert CELLS.count == 2 * 6 * 4
    vector = np.zeros(len(SCHEMA), dtype=np.float32)
    assert CELLS.index(vector) == 0
    vector[SCHEMA.index("ngram.match_length")] = 3.0
    vector[SCHEMA.index("acceptance_short")] = 0.5
    assert CELLS.index(vector) == 3 * 4 + 2
    vector[SCHEMA.index("prefill_pending")] = 1.0
    assert CELLS.index(vector) == 24 + 3 * 4 + 2
    seen = {CELLS.index(v) for v in observations(5_000)[0]}
    assert seen <= set(range(CELLS.count))


def test_the_controller_sees_the_costs_of_the_machine_it_runs_on() -> None:
    cells = Cells((("verify_cost.8", (1.5,)),), SCHEMA.names)
    values = np.zeros((2, len(MENU)), dtype=np.float32)
    values[0, MENU.find(8)] = values[1, MENU.plain] = 1.0
    cheap = replace(COSTS, verify=dict.fromkeys(COSTS.verify, (0.01, 0.02)))
    dear = replace(cheap, verify=cheap.verify | {8: (0.1, 0.2)})
    policy = Policy("p", MENU, TableHead(cells, values), dear)
    observation = Observation(False, 5, 0, 9, 4, 9, 0, 0, 0.5, 0.5, 0.5, 0.5, {"ngram": Signal()})
    mask = MENU.mask(False)
    assert policy.controller().choose(observation, mask) == MENU.plain
    assert policy.controller(cheap).choose(observation, mask) == MENU.find(8)
    controller = policy.controller()
    assert (controller.name, controller.needs_observation, controller.min_confidence) == ("p", True, 0.0)


def test_the_cut_comes_back_and_is_the_controllers(tmp_path: Path) -> None:
    replace(make_policy(), min_confidence=0.35).save(tmp_path)
    loaded = load_policy(tmp_path)
    assert (loaded.min_confidence, loaded.controller().min_confidence) == (0.35, 0.35)


def test_a_cut_of_each_drafter_holds_for_the_drafts_of_that_one(tmp_path: Path) -> None:
    menu = parse_menu("reuse/0,reuse/a/2,reuse/b/4", ("a", "b"))
    schema, costs = ObservationSchema(menu), made_up_costs(np.random.default_rng(0), ("a", "b"))
    cells = Cells((("context", (8.0,)),), schema.names)
    cut = {"a": 0.25, "b": 0.75}
    for action, least in enumerate((0.0, 0.25, 0.75)):
        values = np.zeros((2, len(menu)), dtype=np.float32)
        values[:, action] = 1.0
        Policy("p", menu, TableHead(cells, values), costs, min_confidence=cut).save(tmp_path)
        loaded = load_policy(tmp_path)
        assert loaded.min_confidence == cut
        controller = loaded.controller()
        observation = Observation(False, 5, 0, 9, 4, 9, 0, 0, 0.5, 0.5, 0.5, 0.5, {"a": Signal(), "b": Signal()})
        assert controller.choose(observation, menu.mask(False)) == action
        assert controller.min_confidence == least


def test_a_policy_from_before_drafters_had_cuts_of_their_own_is_read(saved: Path) -> None:
    rewrite(saved, lambda d: d.update(version=3, min_confidence=0.2))
    assert load_policy(saved).min_confidence == 0.2


def test_a_policy_from_before_drafts_could_be_cut_is_uncut(saved: Path) -> None:
    rewrite(saved, lambda d: (d.update(version=2), d.pop("min_confidence")))
    loaded = load_policy(saved)
    assert (loaded.min_confidence, loaded.menu) == (0.0, MENU)


@pytest.mark.parametrize("wrong", [-0.01, 1.01, float("nan"), "0.3", None, True, [0.3], 10**400, {"ngram": "high"}])
def test_a_cut_that_is_no_share_is_refused(saved: Path, wrong: Any) -> None:
    of, told = (" of ngram", wrong["ngram"]) if isinstance(wrong, dict) else ("", wrong)
    message = f"the policy's min_confidence{of} is {told!r:.40}; give a number from 0 to 1"
    with pytest.raises(PolicyError) as caught:
        replace(make_policy(), min_confidence=wrong)
    assert str(caught.value) == message
    rewrite(saved, lambda d: d.update(min_confidence=wrong))
    assert refused(saved) == message


def test_a_cut_of_a_drafter_that_the_menu_lacks_is_refused(saved: Path) -> None:
    rewrite(saved, lambda d: d.update(min_confidence={"ngrm": 0.5}))
    assert refused(saved) == "the policy's min_confidence names drafter 'ngrm'; the menu has ngram"


@pytest.mark.parametrize("what", ["name", "target", "precision"])
@pytest.mark.parametrize("wrong", [5, None, b"x", "a\ud800"])
def test_what_is_no_text_is_refused_before_it_is_saved(what: str, wrong: Any) -> None:
    with pytest.raises(PolicyError, match=f"^the policy's {what} is .*; give text$"):
        replace(make_policy(), **{what: wrong})


def test_any_number_is_kept_as_a_float(tmp_path: Path) -> None:
    for cut in (np.float32(0.25), Fraction(1, 4), {"ngram": np.float64(0.25)}):
        replace(make_policy(), min_confidence=cut).save(tmp_path)
        assert cut_of(load_policy(tmp_path).min_confidence, "ngram") == 0.25


def test_a_policy_s_cut_is_its_own() -> None:
    cut = {"ngram": 0.5}
    policy = replace(make_policy(), min_confidence=cut)
    cut["ngram"] = 7.0
    assert policy.min_confidence == {"ngram": 0.5}


@pytest.mark.parametrize(("cut", "text"), [(0.1, "0.1"), ({"a": 0.2, "b": 0.0}, "0.2 of a, 0 of b"), ({}, "0")])
def test_a_cut_is_described(cut: Cut, text: str) -> None:
    assert described(cut) == text


def test_a_policy_without_its_cut_is_damaged(saved: Path) -> None:
    rewrite(saved, lambda d: d.pop("min_confidence"))
    assert "is damaged (KeyError: 'min_confidence')" in refused(saved)


# -- damage -------------------------------------------------------------------------------------------------------


def test_missing(tmp_path: Path) -> None:
    message = "cannot be read (No such file or directory); give a folder that train.py exported"
    assert refused(tmp_path / "none") == f"{tmp_path / 'none' / JSON_FILE} {message}"
    make_policy().save(tmp_path)
    (tmp_path / TENSOR_FILE).unlink()
    assert refused(tmp_path) == f"{tmp_path / TENSOR_FILE} {message}"


@pytest.mark.parametrize("file", [JSON_FILE, TENSOR_FILE])
def test_a_folder_in_a_files_place(saved: Path, file: str) -> None:
    (saved / file).unlink()
    (saved / file).mkdir()
    assert refused(saved) == f"{saved / file} cannot be read (Is a directory); give a folder that train.py exported"


def test_odd_folder_names(saved: Path) -> None:
    assert "(Not a directory)" in refused(saved / JSON_FILE)
    assert "(embedded null byte)" in refused(Path("a\0b"))
    assert "(File name too long)" in refused(Path("n" * 5000))


def test_every_truncation_is_refused(saved: Path) -> None:
    text, tensors = (saved / JSON_FILE).read_bytes(), (saved / TENSOR_FILE).read_bytes()
    for end in range(0, len(tensors), 97):
        (saved / TENSOR_FILE).write_bytes(tensors[:end])
        path = saved / TENSOR_FILE
        assert refused(saved) == f"{path} was truncated or altered since its export; export it again"
    (saved / TENSOR_FILE).write_bytes(tensors)
    for end in range(0, len(text.rstrip()), 41):
        (saved / JSON_FILE).write_bytes(text[:end])
        assert refused(saved).startswith(f"{saved / JSON_FILE} is not valid JSON (")
    (saved / JSON_FILE).write_bytes(text)
    load_policy(saved)


def test_every_flipped_bit_of_the_tensors_is_refused(saved: Path) -> None:
    tensors = (saved / TENSOR_FILE).read_bytes()
    for at in range(0, len(tensors), 53):
        damaged = bytearray(tensors)
        damaged[at] ^= 1 << at % 8
        (saved / TENSOR_FILE).write_bytes(damaged)
        assert "was truncated or altered since its export" in refused(saved)


def test_every_altered_number_or_word_of_the_json_is_refused(saved: Path) -> None:
    """One leaf after the other, each by a value of its own type that a check of types and ranges would let pass."""
    document = json.loads((saved / JSON_FILE).read_text())

    def leaves(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else None
        return [path] if items is None else [leaf for key, child in items for leaf in leaves(child, (*path, key))]

    found = leaves(document)
    assert len(found) > 80
    for *path, last in found:

        def change(d: dict[str, Any], path: list[Any] = path, last: Any = last) -> None:
            for key in path:
                d = d[key]
            value = d[last]
            d[last] = value + "x" if isinstance(value, str) else (value or 0) * 1.01 + (value is None)

        if json.loads((saved / JSON_FILE).read_text()) != document:
            (saved / JSON_FILE).write_text(json.dumps(document))
        rewrite(saved, change, sign=False)
        if json.loads((saved / JSON_FILE).read_text()) != document:  # 0 * 1.01 is still 0
            refused(saved)
    (saved / JSON_FILE).write_text(json.dumps(document, indent=7))
    load_policy(saved)  # spacing is no alteration


def test_an_edge_moved_by_hand(saved: Path) -> None:
    rewrite(saved, lambda d: d["head"]["cells"][2]["edges"].__setitem__(0, 0.3), sign=False)
    assert refused(saved) == f"{saved / JSON_FILE} was altered since its export; export it again"


@pytest.mark.parametrize(
    "text",
    [
        b"[]",
        b"null",
        b"3",
        b'"policy"',
        b"NaN",
        b"{}",
        b"\xef\xbb\xbf{}",
        b'{"format": "other"}',
        b'{"format": ["draftgate-policy"]}',
    ],
)
def test_json_of_something_else(saved: Path, text: bytes) -> None:
    (saved / JSON_FILE).write_bytes(text)
    mend = "give a folder that train.py exported"
    assert refused(saved) == f"{saved / JSON_FILE} is no draftgate-policy document; {mend}"


@pytest.mark.parametrize(
    "text",
    [b"", b"\xff\xfe", b"\x00" * 9, b"{", b'{"a": 1}{', b"[" * 200_000, b'{"a":' * 200_000, b"1" * 9000],
)
def test_what_is_no_json(saved: Path, text: bytes) -> None:
    (saved / JSON_FILE).write_bytes(text)
    message = refused(saved)
    assert message.startswith(f"{saved / JSON_FILE} is not valid JSON (")
    assert message.endswith("; export it again")


@pytest.mark.parametrize("version", [0, 1, 5, "2", None, [1], "a\nb"])
def test_another_format_version(saved: Path, version: Any) -> None:
    rewrite(saved, lambda d: d.update(version=version))
    mend = "export it again or update draftgate"
    assert refused(saved) == f"{saved} holds a policy of format {version!r}, this version reads 4; {mend}"


def set_at(*path: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(document: Any) -> None:
        for key in path[:-1]:
            document = document[key]
        document[path[-1]] = to

    return change


NAN = float("nan")


@pytest.mark.parametrize(
    "change",
    [
        set_at("menu", to=3),
        set_at("menu", to="reuse/0,what"),
        set_at("menu", to="fresh/0"),
        set_at("drafters", to=[]),
        set_at("drafters", to=None),
        set_at("schema", to=[]),
        set_at("schema", "names", to=7),
        set_at("schema", "names", to=[1, "a"]),
        set_at("schema", "names", to=[[]]),
        set_at("head", to="table"),
        set_at("head", "kind", to=["table"]),
        set_at("head", "cells", to={}),
        set_at("head", "cells", to=[3]),
        set_at("head", "cells", 0, "edges", to="abc"),
        set_at("head", "cells", 0, "edges", to=[0.1, 0.5]),
        set_at("head", "cells", 0, "edges", to=list(range(10**5))),
        set_at("costs", to=None),
        set_at("costs", to=[]),
        set_at("costs", "verify", to=[]),
        set_at("costs", "verify", to={}),
        set_at("costs", "verify", "0", to=[NAN, 0.1]),
        set_at("costs", "verify", "0", to=[0.0, 0.1]),
        set_at("costs", "verify", "8", to=[-0.1, 0.1]),
        set_at("costs", "verify", "8", to=[0.1]),
        set_at("costs", "verify", "eight", to=[0.1, 0.1]),
        set_at("costs", "contexts", to=[768, 128]),
        set_at("costs", "contexts", to=[]),
        set_at("costs", "spread", to=float("inf")),
        set_at("costs", "draft", to={}),
        set_at("costs", "draft", "ngram", to=NAN),
        set_at("costs", "prefill", to="fast"),
        lambda d: d["costs"].pop("engine"),
        set_at("name", to=3),
        set_at("target", to=None),
        set_at("precision", to=["fp32"]),
        set_at("provenance", to="by hand"),
        set_at("provenance", to=None),
        lambda d: d.pop("name"),
        lambda d: d.pop("costs"),
        lambda d: d.pop("target"),
        lambda d: d.pop("precision"),
        lambda d: d["costs"]["verify"].pop("8"),
    ],
)
def test_damage_inside_is_refused_with_the_folders_name(saved: Path, change: Callable[[dict[str, Any]], None]) -> None:
    rewrite(saved, change)
    message = refused(saved)
    assert message.startswith((f"the policy in {saved} ", "the policy's table has shape "))
    assert message.endswith(("export it again", "; train it again"))


def test_an_unknown_head_is_named(saved: Path) -> None:
    rewrite(saved, set_at("head", "kind", to="quantum"))
    message = refused(saved)
    assert message.startswith(f"the policy in {saved} has an unknown head 'quantum'; known: ")
    assert "table" in message


def test_another_schema_names_what_differs(saved: Path) -> None:
    rewrite(saved, lambda d: d["schema"]["names"].append("moon_phase"))
    what = "was made for another observation schema"
    assert refused(saved) == f"the policy in {saved} {what} (features moon_phase differ); train it again"
    rewrite(saved, lambda d: d["schema"]["names"].pop())
    rewrite(saved, lambda d: d["schema"].update(version=7))
    assert refused(saved) == f"the policy in {saved} {what} (version 7, here 3); train it again"
    rewrite(saved, lambda d: d["schema"].update(version=3, names=d["schema"]["names"][::-1]))
    assert what in refused(saved)


def test_tensors_of_another_menu(saved: Path) -> None:
    rewrite(saved, lambda d: d.update(menu="fresh/0,reuse/0,reuse/ngram/1"))
    assert "features verify_cost." in refused(saved)


def resign(folder: Path, tensors: bytes) -> None:
    (folder / TENSOR_FILE).write_bytes(tensors)
    rewrite(folder, lambda d: d.update(tensors_sha256=hashlib.sha256(tensors).hexdigest()))


def test_tensors_of_another_shape_or_not_finite(saved: Path) -> None:
    values = load_tensors((saved / TENSOR_FILE).read_bytes())["values"]
    broken = values.copy()
    broken[3, 3] = np.nan
    for wrong in (values[:, :-1], values[:-1], values[None], np.zeros(0, np.float32), broken, broken * np.inf):
        resign(saved, save_tensors({"values": np.ascontiguousarray(wrong)}))
        assert refused(saved).endswith("all finite; export it again")
    resign(saved, save_tensors({"weights": values}))
    assert refused(saved) == f"the policy in {saved} is damaged (KeyError: 'values'); export it again"


@pytest.mark.parametrize(
    "tensors",
    [
        b"",
        b"\x00",
        b"\xff" * 8,
        (10**9).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (60).to_bytes(8, "little") + b'{"values":{"dtype":"F32","shape":[2],"data_offsets":[0,80]}}',
        (63).to_bytes(8, "little") + b'{"values":{"dtype":"PICKLE","shape":[2],"data_offsets":[0,80]}}',
    ],
)
def test_headers_that_lie(saved: Path, tensors: bytes) -> None:
    resign(saved, tensors)
    assert refused(saved).startswith(f"{saved / TENSOR_FILE} is damaged (Error while deserializing: ")


def test_a_pickle_is_never_opened(saved: Path, tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    pickled = b"cos\nsystem\n(S'touch " + str(mark).encode() + b"'\ntR."
    resign(saved, pickled)
    refused(saved)
    (saved / JSON_FILE).write_bytes(pickled)
    refused(saved)
    assert not mark.exists()


# -- writing ------------------------------------------------------------------------------------------------------


def test_a_full_disk_keeps_the_old_policy(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = [(saved / file).read_bytes() for file in (JSON_FILE, TENSOR_FILE)]

    def full(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(StorageError) as caught:
        make_policy(1).save(saved)
    mend = "free some space or choose another place"
    assert str(caught.value) == f"cannot write {saved / 'policy.next.safetensors'}: No space left on device; {mend}"
    assert [(saved / file).read_bytes() for file in (JSON_FILE, TENSOR_FILE)] == before
    load_policy(saved)


def test_a_policy_is_a_few_kilobytes_of_two_files(saved: Path) -> None:
    assert sorted(path.name for path in saved.iterdir()) == [JSON_FILE, TENSOR_FILE]
    assert sum(path.stat().st_size for path in saved.iterdir()) < 16 << 10


def test_decisions_need_numpy_alone() -> None:
    """`engine` itself imports torch; the decision functions and their cells, loaded by path, do not."""
    code = """
import importlib.util, sys, types
sys.modules["torch"] = sys.modules["transformers"] = None
package = types.ModuleType("engine"); package.__path__ = [sys.argv[1]]
sys.modules["engine"] = package
import numpy as np
from engine.cells import Cells
from engine.policy_heads import HEADS, TableHead
head = HEADS["table"].load({"cells": [{"feature": "x", "edges": [1]}]}, {"values": np.eye(2)}, ("x",), 2)
print(head.decide(np.array([0.5]), [True, True]), head.decide(np.array([1.0]), [True, True]))
assert not {"gymnasium", "stable_baselines3", "scipy"} & set(sys.modules)
"""
    folder = str(Path(policy_module.__file__).parent)
    done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("0 1\n", "")


def test_the_engine_imports_neither_gymnasium_nor_stable_baselines() -> None:
    code = (
        "import sys; sys.modules['gymnasium'] = sys.modules['stable_baselines3'] = None\n"
        "import engine, engine.policy, engine.guard, engine.calibration, engine.render, engine.__main__\n"
        "print(sorted(m for m in sys.modules if m.partition('.')[0] in ('envs', 'agents')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parent.parent
    )
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


# -- in the engine ------------------------------------------------------------------------------------------------


def test_an_engine_of_another_menu_refuses_by_name() -> None:
    from tiny_models import FunctionDrafter, load_tiny, tiny_decoder

    from engine.drafters.base import EMPTY_DRAFT

    decoder = tiny_decoder(
        load_tiny("llama"), [FunctionDrafter(lambda *_: EMPTY_DRAFT, "ngram")], menu="reuse/0,reuse/2"
    )
    with pytest.raises(DraftgateError) as caught:
        decoder.with_controller(make_policy())
    message = f"the policy was made for menu {MENU}, the engine has reuse/0,reuse/ngram/2; use the policy's"
    assert (type(caught.value), str(caught.value)) == (PolicyError, message)


def test_menus_of_every_order_are_kept(tmp_path: Path) -> None:
    menu = parse_menu("reuse/b/5,reuse/0,fresh/a/2", ("a", "b"))
    schema = ObservationSchema(menu)
    head = TableHead(Cells((("context", (3.0,)),), schema.names), np.zeros((2, 3), np.float32))
    costs = CostTable((1,), {0: (1.0,), 2: (1.0,), 5: (1.0,)}, 0.0, {"a": 0.0, "b": 0.0}, 0.0, "")
    Policy("x", menu, head, costs).save(tmp_path)
    assert load_policy(tmp_path).menu == menu
