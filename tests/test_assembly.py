"""What `from_pretrained` makes of settings that were left open, and which controllers it guards."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tiny_models import FunctionDrafter

from engine import BaseController, Controller, Policy
from engine.cells import Cells
from engine.costs import CostTable, machine_fingerprint
from engine.decoder import SpeculativeDecoder
from engine.drafters.base import EMPTY_DRAFT
from engine.errors import DrafterError, ModelNotFoundError
from engine.guard import Guard
from engine.menu import parse_menu
from engine.models import load_model, model_digest
from engine.observation import ObservationSchema
from engine.policy_heads import TableHead


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTGATE_CACHE", str(tmp_path / "cache"))


def policy(target: str, precision: str = "fp32", drafters: tuple[str, ...] = ("ngram:history",)) -> Policy:
    menu = parse_menu("reuse/0,reuse/2", drafters)
    head = TableHead(Cells((("context", (5.0,)),), ObservationSchema(menu).names), np.zeros((2, 2), dtype=np.float32))
    costs = CostTable((1,), {0: (1.0,), 2: (1.0,)}, 0.0, dict.fromkeys(drafters, 0.0), 0.0, "elsewhere", "other")
    return Policy("p", menu, head, costs, target, precision)


def make(**settings: Any) -> SpeculativeDecoder:
    return SpeculativeDecoder.from_pretrained(**settings)


# -- what a policy brings -----------------------------------------------------------------------------------------


def test_a_policy_brings_its_target_precision_drafters_and_menu(target_folder: Path) -> None:
    brought = policy(str(target_folder), "bf16")
    decoder = make(controller=brought)
    assert (decoder.target.name, decoder.target.precision) == (str(target_folder), "bf16")
    assert list(decoder.parts.drafters) == ["ngram:history"]
    assert decoder.parts.menu == brought.menu


def test_what_is_given_counts_more_than_what_the_policy_brings(target_folder: Path) -> None:
    given = make(
        target=str(target_folder),
        drafter=["ngram", "ngram:history"],
        precision="fp32",
        controller=policy("/no", "bf16"),
    )
    assert (given.target.name, given.target.precision) == (str(target_folder), "fp32")
    assert list(given.parts.drafters) == ["ngram", "ngram:history"]
    with pytest.raises(ModelNotFoundError, match="'/no'"):
        make(controller=policy("/no"))


def test_without_a_policy_the_drafter_is_ngram_in_fp32(target_folder: Path) -> None:
    decoder = make(target=str(target_folder), controller="plain")
    assert (list(decoder.parts.drafters), decoder.target.precision) == (["ngram"], "fp32")


def test_an_empty_target_is_not_the_default() -> None:
    with pytest.raises(ModelNotFoundError, match="no such model file or folder: ''"):
        make(target="", controller=policy("/no"))


# -- names of drafters --------------------------------------------------------------------------------------------


def test_two_drafters_of_one_name(target_folder: Path) -> None:
    mine = FunctionDrafter(lambda *_: EMPTY_DRAFT, "ngram")
    for drafters in (["ngram", "ngram"], ["ngram", mine]):
        with pytest.raises(DrafterError) as caught:
            make(target=str(target_folder), drafter=drafters)
        assert str(caught.value) == "two drafters are named 'ngram'; name each once"


def test_a_comma_in_a_drafters_name(target_folder: Path) -> None:
    for drafter in (FunctionDrafter(lambda *_: EMPTY_DRAFT, "a,b"), "model:/a,b"):
        name = drafter if isinstance(drafter, str) else drafter.name
        with pytest.raises(DrafterError) as caught:
            make(target=str(target_folder), drafter=drafter)
        assert str(caught.value) == f"drafter {name!r} has a comma in its name, which ends a menu entry; rename it"


def test_an_object_that_is_no_drafter_is_refused_at_once(target_folder: Path) -> None:
    nameless, empty, numbered = (FunctionDrafter(lambda *_: EMPTY_DRAFT, name) for name in ("a", "", 7))  # type: ignore[arg-type]
    del nameless.name
    for drafter, kind in (
        *((one, "FunctionDrafter") for one in (nameless, empty, numbered)),
        (SimpleNamespace(name="a"), "SimpleNamespace"),
        (SimpleNamespace(name="a", begin=None), "SimpleNamespace"),
        (5, "int"),
    ):
        with pytest.raises(DrafterError) as caught:
            make(target=str(target_folder), drafter=drafter, controller="plain")
        assert str(caught.value) == f"{kind} is no drafter; give a name, or define name (some text) and begin"


# -- the guard ----------------------------------------------------------------------------------------------------


class Own(BaseController):
    def choose(self, observation: Any, mask: Any) -> int:
        return 0


@pytest.mark.parametrize(
    ("controller", "guarded"),
    [
        ("plain", False),
        ("fresh", False),
        ("fixed:4", False),
        ("fixed:0", False),
        ("heuristic", True),
        ("threshold:0.5", True),
        (Own(), True),
    ],
)
def test_all_but_the_references_are_guarded(
    target_folder: Path, controller: str | Controller, guarded: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only a guard needs costs: an engine without one is not calibrated."""
    decoder = make(target=str(target_folder), controller=controller)
    assert isinstance(decoder.controller, Guard) == guarded
    assert ("calibrating costs" in capsys.readouterr().err) == guarded
    unguarded = make(target=str(target_folder), controller=controller, guard=False)
    assert not isinstance(unguarded.controller, Guard)


def test_a_policy_is_guarded_with_the_costs_of_this_engine(target_folder: Path) -> None:
    brought = policy(str(target_folder))
    decoder = make(controller=brought)
    assert isinstance(decoder.controller, Guard)
    assert decoder.controller._costs == decoder.costs() != brought.costs
    assert decoder.costs().machine == machine_fingerprint()
    assert not isinstance(decoder.with_controller(brought, guard=False).controller, Guard)


def test_a_guard_is_not_guarded_again(target_folder: Path) -> None:
    decoder = make(target=str(target_folder))
    guard = decoder.controller
    assert decoder.with_controller(guard).controller is guard


# -- telling models apart -----------------------------------------------------------------------------------------


def test_a_digest_follows_the_files_and_not_the_name(target_folder: Path, tmp_path: Path) -> None:
    first = load_model(str(target_folder)).digest
    assert (len(first), int(first, 16) >= 0) == (16, True)
    files = {path.name: path.read_bytes() for path in target_folder.iterdir()}

    def digest(**changed: bytes | None) -> str:
        folder = tmp_path / f"copy {len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        for name, data in (files | changed).items():
            if data is not None:
                (folder / name).write_bytes(data)
        return model_digest(str(folder))

    weights = files["model.safetensors"]
    assert digest() == first
    assert digest(**{"README.md": b"hello"}) == first
    tuned = bytearray(weights)
    tuned[len(tuned) // 2] ^= 1
    told = {
        first,
        digest(**{"config.json": files["config.json"] + b" "}),
        digest(**{"model.safetensors": weights[:-1]}),
        digest(**{"model.safetensors": None, "pytorch_model.bin": weights}),
        digest(**{"model-2.safetensors": weights}),
        digest(**{"model.safetensors": bytes(tuned)}),
        digest(**{"tokenizer.json": files["tokenizer.json"] + b" "}),
        digest(**{"chat_template.jinja": b"another"}),
    }
    assert len(told) == 8


def test_a_large_file_is_looked_at_in_many_places(tmp_path: Path) -> None:
    megabytes = bytearray(8 << 20)
    (tmp_path / "model.safetensors").write_bytes(megabytes)
    before = model_digest(str(tmp_path))
    megabytes[5 << 20 : 6 << 20] = b"\x01" * (1 << 20)
    (tmp_path / "model.safetensors").write_bytes(megabytes)
    assert model_digest(str(tmp_path)) != before


def test_a_hub_ids_digest_is_that_of_what_was_fetched(target_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.models.cached_file", lambda name, file: str(target_folder / file))
    assert model_digest("somebody/model") == model_digest(str(target_folder))
