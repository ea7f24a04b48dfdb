"""Each baseline's behaviour, and the names that make them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import get_type_hints

import pytest
from test_policy import make_policy
from tiny_models import FunctionDrafter, load_tiny, scripted_drafter, tiny_decoder

from engine.__main__ import Options
from engine.controller_names import CONTROLLER_NAMES, make_controller
from engine.controllers import BaseController, FixedController, HeuristicController, ThresholdController, fixed_name
from engine.decoder import SpeculativeDecoder
from engine.drafters.base import EMPTY_DRAFT
from engine.errors import ControllerError, DraftgateError, MenuError
from engine.menu import default_menu, parse_menu
from engine.results import StepRecord

MENU = default_menu(("ngram",))
TWO = parse_menu("fresh/0,reuse/0,reuse/a/4,reuse/b/4,reuse/b/6", ("a", "b"))
PROMPT = list(range(40, 60))


def record(drafted: int, accepted: int, k: int | None = None) -> StepRecord:
    tokens = tuple(range(accepted + 1))
    return StepRecord(0, drafted if k is None else k, "ngram", drafted, accepted, tokens, (), 0, 0, 0.0, 0.0, 0.0)


def chosen(controller: object, menu: object = MENU, can_reuse: bool = False) -> str:
    return str(menu[controller.choose(None, menu.mask(can_reuse))])  # type: ignore[attr-defined, index]


@pytest.mark.parametrize("k", [0, 1, 2, 3, 4, 6, 8])
def test_fixed_takes_the_same_length_always(k: int) -> None:
    controller = make_controller(f"fixed:{k}", MENU)
    expected = f"reuse/ngram/{k}" if k else "reuse/0"
    for can_reuse in (True, False):
        assert chosen(controller, can_reuse=can_reuse) == expected
        controller.observe(record(k, 0))
    assert controller.name == (f"fixed:{k}" if k else "plain")
    assert (controller.min_confidence, controller.needs_observation) == (0.0, False)


def test_plain_is_reuse_0() -> None:
    controller = make_controller("plain", MENU)
    assert controller.name == "plain"
    assert chosen(controller, can_reuse=True) == chosen(controller) == "reuse/0"


def test_fixed_with_several_drafters() -> None:
    names = ["plain", "fixed:4", "fixed:4:b", "fixed:6"]
    told = [make_controller(name, TWO).name for name in names]
    assert told == ["plain", "fixed:4:a", "fixed:4:b", "fixed:6:b"]
    assert told == [fixed_name(TWO, TWO.find(*find)) for find in ((0, None), (4, "a"), (4, "b"), (6, "b"))]
    assert fixed_name(MENU, MENU.find(4)) == make_controller("fixed:4:ngram", MENU).name == "fixed:4"
    assert chosen(make_controller("fixed:4", TWO), TWO) == "reuse/a/4"
    assert chosen(make_controller("fixed:4:b", TWO), TWO) == "reuse/b/4"
    assert chosen(make_controller("fixed:6", TWO), TWO) == "reuse/b/6"
    history = parse_menu("reuse/0,reuse/ngram/4,reuse/ngram:history/4", ("ngram", "ngram:history"))
    assert chosen(make_controller("fixed:4:ngram:history", history), history) == "reuse/ngram:history/4"


def test_fresh_ignores_the_cached_prefix_and_then_decodes_plainly() -> None:
    controller = make_controller("fresh", MENU)
    assert controller.name == "fresh"
    assert chosen(controller, can_reuse=True) == "fresh/0"
    assert chosen(controller, can_reuse=False) == "reuse/0"


def test_heuristic_grows_by_two_and_shrinks_by_one() -> None:
    controller = HeuristicController(MENU)
    assert chosen(controller) == "reuse/ngram/4"
    for drafted, accepted, then in [(4, 4, 6), (6, 6, 8), (8, 8, 8), (8, 7, 6), (8, 0, 6), (6, 5, 4), (5, 4, 4)]:
        controller.observe(record(drafted, accepted))
        assert chosen(controller) == f"reuse/ngram/{then}", (drafted, accepted)


def test_heuristic_is_the_schedule_of_transformers() -> None:
    """Against a reference of three lines, on 2,000 random outcomes; the menu holds every length it can ask for."""
    menu = default_menu(("ngram",), range(65))
    controller, length, rng = HeuristicController(menu, start=5), 5.0, random.Random(0)
    for _ in range(2000):
        assert chosen(controller, menu) == f"reuse/ngram/{int(length)}"
        accepted = int(length) if rng.random() < 0.35 else rng.randrange(int(length))
        controller.observe(record(int(length), accepted))
        length = min(64.0, length + 2.0) if accepted == int(length) else max(1.0, length - 1.0)


def test_heuristic_full_acceptance_of_a_short_draft_counts_and_an_empty_one_does_not() -> None:
    controller = HeuristicController(MENU)
    controller.observe(record(0, 0, k=4))
    assert chosen(controller) == "reuse/ngram/4"
    controller.observe(record(2, 2, k=4))
    assert chosen(controller) == "reuse/ngram/6"


def test_heuristic_takes_the_nearest_length_the_shorter_of_two() -> None:
    menu = parse_menu("reuse/0,reuse/n/1,reuse/n/5", ("n",))
    controller = HeuristicController(menu, start=3)
    assert chosen(controller, menu) == "reuse/n/1"
    controller.observe(record(1, 1))
    assert chosen(controller, menu) == "reuse/n/5"
    for _ in range(9):
        controller.observe(record(5, 0))
    assert chosen(controller, menu) == "reuse/n/1"
    assert chosen(HeuristicController(menu, start=99), menu) == "reuse/n/5"


def test_threshold_takes_the_longest_draft_and_passes_its_confidence_on() -> None:
    controller = make_controller("threshold:0.35", MENU)
    assert chosen(controller) == "reuse/ngram/8"
    assert (controller.min_confidence, controller.name) == (0.35, "threshold:0.35")
    assert [ThresholdController(MENU, t).min_confidence for t in (0.0, 1.0)] == [0.0, 1.0]
    assert chosen(make_controller("threshold:0.5", default_menu(())), default_menu(())) == "reuse/0"


def test_threshold_takes_the_first_drafter_or_the_one_that_is_named() -> None:
    menu = parse_menu("reuse/0,reuse/a/2,reuse/a/6,reuse/b/4", ("a", "b"))
    for name, longest, full in (
        ("threshold:0.3", "reuse/a/6", "threshold:0.3:a"),
        ("threshold:0.3:b", "reuse/b/4", "threshold:0.3:b"),
    ):
        controller = make_controller(name, menu)
        assert (chosen(controller, menu), controller.name) == (longest, full)
    for name in ("c", ""):
        with pytest.raises(MenuError, match=f"^drafter '{name}' is not in the menu"):
            make_controller(f"threshold:0.3:{name}", menu)


def test_a_drafter_without_reusing_entries_has_the_plain_step_for_its_longest() -> None:
    menu = parse_menu("reuse/0,fresh/a/8,reuse/b/4,fresh/b/8", ("a", "b"))
    assert [menu.longest(drafter) for drafter in ("a", "b")] == [menu.plain, menu.find(4, "b")]


def test_a_threshold_s_name_holds_every_digit() -> None:
    for threshold in (0.0, 0.1, 1 / 3, 1.0):
        name = ThresholdController(MENU, threshold).name
        assert make_controller(name, MENU).min_confidence == threshold
    assert ThresholdController(MENU, 1.0).name == "threshold:1"


def test_the_decoder_hands_the_confidence_to_the_drafter() -> None:
    asked: list[tuple[int, float]] = []

    class Recorder(FunctionDrafter):
        def propose(self, tokens, k, sampling=None, min_confidence=0.0):  # type: ignore[no-untyped-def]
            asked.append((k, min_confidence))
            return EMPTY_DRAFT

    decoder = tiny_decoder(load_tiny("llama"), [Recorder(lambda *_: EMPTY_DRAFT, "r")], "threshold:0.25")
    decoder.generate(PROMPT, 5, ignore_eos=True)
    assert asked == [(4, 0.25), (3, 0.25), (2, 0.25), (1, 0.25)]


def test_the_decoder_tells_controllers_what_came_of_their_steps() -> None:
    loaded = load_tiny("llama")
    text = PROMPT + tiny_decoder(loaded).generate(PROMPT, 40, ignore_eos=True).tokens
    decoder = tiny_decoder(loaded, [scripted_drafter(text)], "heuristic", cache_tokens=0)
    steps = decoder.generate(PROMPT, 25, ignore_eos=True).steps
    assert [step.k for step in steps] == [4, 6, 8, 8]


def test_a_controller_that_does_not_ask_gets_no_observation() -> None:
    seen: list[bool] = []

    class Mine(BaseController):
        def choose(self, observation, mask):  # type: ignore[no-untyped-def]
            seen.append(observation is None)
            return 1

    quiet, curious = Mine(), Mine()
    curious.needs_observation = True
    loaded = load_tiny("llama")
    tiny_decoder(loaded, controller=quiet).generate(PROMPT, 2, ignore_eos=True)
    tiny_decoder(loaded, controller=curious).generate(PROMPT, 2, ignore_eos=True)
    assert seen == [True, True, False, False]


KNOWN = "plain, fresh, fixed:K, fixed:K:DRAFTER, heuristic:START, threshold:T, threshold:T:DRAFTER, cost-model"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("heurstic", "controller 'heurstic' is unknown; did you mean heuristic?"),
        ("fixd:4", "controller 'fixd:4' is unknown; did you mean fixed?"),
        ("treshold:0.5", "controller 'treshold:0.5' is unknown; did you mean threshold?"),
        ("Plain", "controller 'Plain' is unknown; did you mean plain?"),
        ("", f"controller '' is unknown; known: {KNOWN}"),
        ("\x00", f"controller '\\x00' is unknown; known: {KNOWN}"),
        ("42", f"controller '42' is unknown; known: {KNOWN}"),
        ("fixed", "controller 'fixed' cannot be read; write fixed:K"),
        ("fixed:four", "controller 'fixed:four' cannot be read; write fixed:K"),
        ("fixed:4.0", "controller 'fixed:4.0' cannot be read; write fixed:K"),
        ("threshold", "controller 'threshold' cannot be read; write threshold:T"),
        ("threshold:", "controller 'threshold:' cannot be read; write threshold:T"),
        ("heuristic:x", "controller 'heuristic:x' cannot be read; write heuristic:START"),
        ("heuristic:0", "the heuristic starts at draft length 0; give at least 1"),
        ("heuristic:-3", "the heuristic starts at draft length -3; give at least 1"),
        ("threshold:nan", "the confidence threshold is nan; give a number from 0 to 1"),
        ("threshold:inf", "the confidence threshold is inf; give a number from 0 to 1"),
        ("threshold:-0.1", "the confidence threshold is -0.1; give a number from 0 to 1"),
        ("threshold:1.01", "the confidence threshold is 1.01; give a number from 0 to 1"),
        ("plain:4", "controller 'plain:4' takes no argument; write plain"),
        ("fresh:x", "controller 'fresh:x' takes no argument; write fresh"),
    ],
)
def test_names_that_cannot_be_read(name: str, message: str) -> None:
    with pytest.raises(ControllerError) as caught:
        make_controller(name, MENU)
    assert str(caught.value) == message


def test_the_folder_of_a_policy_is_no_name(tmp_path: Path) -> None:
    folder = str(tmp_path / "default")
    told = "the folder of a policy; give load_policy(...) of it, or --policy on a command line"
    for made, what in ((False, f"unknown; known: {KNOWN}"), (True, told)):
        if made:
            make_policy().save(folder)
        with pytest.raises(ControllerError) as caught:
            make_controller(folder, MENU)
        assert str(caught.value) == f"controller {folder!r} is {what}"


def test_whoever_lists_the_names_lists_all() -> None:
    line = get_type_hints(Options, include_extras=True)["controller"]
    for text in (SpeculativeDecoder.from_pretrained.__doc__, str(line)):
        assert [name for name in CONTROLLER_NAMES if name not in str(text)] == []
    assert ", ".join(CONTROLLER_NAMES) == KNOWN


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("fixed:5", "5"),
        ("fixed:-1", "-1"),
        ("fixed:4:b", "4 of drafter b"),
        ("fixed:99999999999999999999", "99999999999999999999"),
    ],
)
def test_lengths_outside_the_menu(name: str, what: str) -> None:
    with pytest.raises(MenuError) as caught:
        make_controller(name, MENU)
    assert str(caught.value) == f"draft length {what} is not in the menu {MENU}; choose one that is, or add it"


def test_what_a_menu_cannot_serve() -> None:
    bare = parse_menu("reuse/0", ())
    cases: list[tuple[str, type[DraftgateError], str]] = [
        ("fresh", MenuError, "the menu reuse/0 lacks fresh/0; add it, or use plain"),
        ("heuristic", ControllerError, "the heuristic needs draft lengths in the menu; add some, or use plain"),
    ]
    for name, kind, message in cases:
        with pytest.raises(kind) as caught:
            make_controller(name, bare)
        assert str(caught.value) == message


def test_fixed_0_by_class() -> None:
    assert FixedController(MENU, 0, reuse=False).name == "fresh"
    assert HeuristicController(MENU, start=1).choose(None, MENU.mask(False)) == MENU.find(1)
