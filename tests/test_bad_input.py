"""Bad input, one kind after the other as the design lists them: the exact error in Python.

The command lines' side is in test_command_line.py; models, policies and workloads have more in their own files.
"""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import (
    WatchedRunner,
    load_tiny,
    make_parts,
    save_tiny,
    scripted_drafter,
    tiny_decoder,
    tiny_tokenizer,
    vocab_size,
)

from engine import errors
from engine.assembly import MOST_CACHE_BYTES
from engine.command_line import run as run_command_line
from engine.controller_names import make_controller
from engine.decoder import SpeculativeDecoder
from engine.drafters import NGramDrafter
from engine.errors import (
    DrafterError,
    DraftgateError,
    MenuError,
    ModelNotFoundError,
    NumericalError,
    PolicyError,
    PromptError,
    SamplingError,
    SettingError,
    WorkloadError,
)
from engine.menu import Action, Menu, parse_menu
from envs.workloads import load_workload

pytestmark = pytest.mark.usefixtures("cache_folder")

PROMPT = list(range(40, 60))
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    return tiny_decoder(load_tiny("llama"), [NGramDrafter()], "fixed:4")


def raised(kind: type[DraftgateError], call: Callable[[], object]) -> str:
    """The message of the error, which is exactly of this kind and one line."""
    with pytest.raises(DraftgateError) as caught:
        call()
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    return str(caught.value)


# -- the errors themselves ----------------------------------------------------------------------------------------

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, DraftgateError)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_prints_its_message_and_can_cross_processes(kind: type[DraftgateError]) -> None:
    error = kind("cause; mend")
    assert str(error) == "cause; mend"
    assert str(pickle.loads(pickle.dumps(error))) == "cause; mend"


def test_first_line() -> None:
    assert errors.first_line(ValueError("\n  a \nb")) == "a "
    assert errors.first_line(ValueError("")) == errors.first_line(ValueError(" \n")) == "ValueError"


# -- unknown model, other tokenizer -------------------------------------------------------------------------------


def test_unknown_model() -> None:
    message = raised(ModelNotFoundError, lambda: SpeculativeDecoder.from_pretrained("/no/such/model"))
    assert message == "no such model file or folder: '/no/such/model'; check the path"


def test_cache_budgets_out_of_range() -> None:
    for size in (-1, MOST_CACHE_BYTES + 1, 10**30, 256e6, "256", None):
        message = raised(
            SettingError, lambda size=size: SpeculativeDecoder.from_pretrained("any", prefix_cache_bytes=size)
        )
        mend = f"give a whole number from 0 (no cache) to {MOST_CACHE_BYTES}, all memory here"
        assert message == f"prefix_cache_bytes is {size!r}; {mend}"


def test_cache_budgets_of_every_size_decode_the_same(target_folder: Path) -> None:
    told = set()
    for size in (0, 1, 20_000, np.int64(1 << 24)):
        decoder = SpeculativeDecoder.from_pretrained(str(target_folder), prefix_cache_bytes=size)
        told |= {tuple(decoder.generate(PROMPT, 8).tokens) for _ in range(2)}
    assert len(told) == 1


# -- prompts ------------------------------------------------------------------------------------------------------

EMPTY = "the prompt is empty; give some text, messages or token ids"
OUTSIDE = f"the prompt holds token ids outside 0..{vocab_size() - 1}; use the model's own tokenizer"
NO_ID = "which is no token id; give text, messages or token ids"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", EMPTY),
        ([], EMPTY),
        ((), EMPTY),
        ({}, "the prompt is of type dict; give text, messages or token ids"),
        (b"abc", "the prompt is of type bytes; give text, messages or token ids"),
        ({3, 4}, "the prompt is of type set; give text, messages or token ids"),
        (np.array([], dtype=int), EMPTY),
        (None, "the prompt is of type NoneType; give text, messages or token ids"),
        (7, "the prompt is of type int; give text, messages or token ids"),
        ([-1], OUTSIDE),
        ([5, vocab_size()], OUTSIDE),
        ([2**70], OUTSIDE),
        ([True, False], f"the prompt holds True, {NO_ID}"),
        ([5, 1.0], f"the prompt holds 1.0, {NO_ID}"),
        ([5, None], f"the prompt holds None, {NO_ID}"),
        ([float("nan")], f"the prompt holds nan, {NO_ID}"),
        (["a", "b"], f"the prompt holds 'a', {NO_ID}"),
        ([[5, 6]], f"the prompt holds [5, 6], {NO_ID}"),
        ({"role": "user", "content": "x"}, "the prompt is of type dict; give text, messages or token ids"),
        ([{"role": "user", "content": "x"}, 5], f"the prompt holds {{'role': 'user', 'content': 'x'}}, {NO_ID}"),
        ("a\ud800", "the prompt is not valid Unicode at character 1; give UTF-8 text"),
    ],
)
def test_prompts_that_are_none(decoder: SpeculativeDecoder, prompt: Any, message: str) -> None:
    assert raised(PromptError, lambda: decoder.generate(prompt, 4)) == message


def test_ids_of_any_whole_kind_are_the_same_prompt(decoder: SpeculativeDecoder) -> None:
    forms: list[Any] = [
        tuple(PROMPT),
        np.array(PROMPT),
        [np.int32(t) for t in PROMPT],
        torch.tensor(PROMPT),
        range(40, 60),
    ]
    expected = decoder.generate(PROMPT, 6).tokens
    assert [decoder.generate(form, 6).tokens for form in forms] == [expected] * len(forms)


def test_odd_text_is_text(decoder: SpeculativeDecoder) -> None:
    for text in (" ", "\n\n\t", "\x00", "\U0010ffff", "<|end|>", "\u202e" * 9):
        assert len(decoder.generate(text, 3, ignore_eos=True).tokens) == 3


def test_a_prompt_beyond_the_context(decoder: SpeculativeDecoder) -> None:
    for count in (512, 513, 5000):
        message = raised(PromptError, lambda count=count: decoder.generate([5] * count, 4))
        assert message == f"the prompt has {count} tokens, the context window 512; shorten the prompt"
    assert len(decoder.generate([5] * 511, 4, ignore_eos=True).tokens) == 1


def test_messages_without_role_or_content(decoder: SpeculativeDecoder) -> None:
    user = {"role": "user", "content": "x"}
    cases: list[tuple[Any, str]] = [
        ([{"role": "user"}], "message 1 has no content; add it"),
        ([user, {"content": "x"}], "message 2 has no role; add it"),
        ([user, user, {}], "message 3 has no role and no content; add it"),
    ]
    for messages, message in cases:
        assert raised(PromptError, lambda messages=messages: decoder.generate(messages, 4)) == message


def with_template(template: str | None) -> SpeculativeDecoder:
    decoder = tiny_decoder(load_tiny("llama"))
    tokenizer = type(tiny_tokenizer())(tokenizer_object=tiny_tokenizer().backend_tokenizer, eos_token="<|end|>")
    tokenizer.chat_template = template
    import dataclasses

    return SpeculativeDecoder(
        decoder.parts, decoder.controller, dataclasses.replace(decoder.target, tokenizer=tokenizer)
    )


def test_roles_that_the_template_refuses() -> None:
    template = "{{ raise_exception('Only user and\\nassistant roles are supported!') }}"
    message = raised(PromptError, lambda: with_template(template).generate([{"role": "wizard", "content": "x"}]))
    what = "the chat template refuses these messages (Only user and); check roles and contents"
    assert message == what


def test_templates_that_are_broken() -> None:
    for template in ("{{ 1 / 0 }}", "{% if %}", "{{ messages[9].content.nothing }}"):
        decoder = with_template(template)
        message = raised(PromptError, lambda decoder=decoder: decoder.generate([{"role": "user", "content": "x"}]))
        assert message.startswith("the chat template refuses these messages (")


def test_no_template() -> None:
    message = raised(PromptError, lambda: with_template(None).generate([{"role": "user", "content": "x"}]))
    assert message == "this model has no chat template; give text instead of messages"


def test_contents_that_are_no_text(decoder: SpeculativeDecoder) -> None:
    message = raised(PromptError, lambda: decoder.generate([{"role": "user", "content": "\ud800"}], 4))
    assert message.startswith("the prompt is not valid Unicode at character ")


# -- settings -----------------------------------------------------------------------------------------------------

TEMPERATURE, TOP_P = "give 0 (greedy) or a positive number", "give a number above 0 and at most 1"
TOP_K, NEW = "give 0 (off) or a positive whole number", "give a whole number, at least 1"
SEED = "give 0 or a positive whole number, or none"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": float("nan")}, f"temperature is nan; {TEMPERATURE}"),
        ({"temperature": float("inf")}, f"temperature is inf; {TEMPERATURE}"),
        ({"temperature": -1}, f"temperature is -1; {TEMPERATURE}"),
        ({"temperature": -1e-300}, f"temperature is -1e-300; {TEMPERATURE}"),
        ({"top_p": 0}, f"top_p is 0; {TOP_P}"),
        ({"top_p": 1.1}, f"top_p is 1.1; {TOP_P}"),
        ({"top_p": -0.5}, f"top_p is -0.5; {TOP_P}"),
        ({"top_p": float("nan")}, f"top_p is nan; {TOP_P}"),
        ({"top_k": -1}, f"top_k is -1; {TOP_K}"),
        ({"top_k": 2.5}, f"top_k is 2.5; {TOP_K}"),
        ({"seed": -1}, f"seed is -1; {SEED}"),
        ({"seed": 0.5}, f"seed is 0.5; {SEED}"),
        ({"max_new_tokens": 0}, f"max_new_tokens is 0; {NEW}"),
        ({"max_new_tokens": -5}, f"max_new_tokens is -5; {NEW}"),
        ({"max_new_tokens": float("nan")}, f"max_new_tokens is nan; {NEW}"),
        ({"max_new_tokens": 2.5}, f"max_new_tokens is 2.5; {NEW}"),
        ({"stop": ""}, "a stop string is empty; give at least one character"),
        ({"stop": ["x", ""]}, "a stop string is empty; give at least one character"),
        ({"stop": [3]}, "stop is [3]; give a string or several"),
        ({"stop": 3}, "stop is 3; give a string or several"),
        ({"stop": False}, "stop is False; give a string or several"),
        ({"temperature": None}, f"temperature is None; {TEMPERATURE}"),
        ({"temperature": "0.7"}, f"temperature is '0.7'; {TEMPERATURE}"),
        ({"temperature": 10**400}, f"temperature is {10**400}; {TEMPERATURE}"),
        ({"top_p": "1"}, f"top_p is '1'; {TOP_P}"),
        ({"top_k": "5"}, f"top_k is '5'; {TOP_K}"),
        ({"top_k": None}, f"top_k is None; {TOP_K}"),
        ({"seed": "5"}, f"seed is '5'; {SEED}"),
        ({"max_new_tokens": None}, f"max_new_tokens is None; {NEW}"),
        ({"max_new_tokens": "64"}, f"max_new_tokens is '64'; {NEW}"),
    ],
)
def test_settings_out_of_range(decoder: SpeculativeDecoder, settings: dict[str, Any], message: str) -> None:
    assert raised(SamplingError, lambda: decoder.generate(PROMPT, **settings)) == message
    assert raised(SamplingError, lambda: next(decoder.stream(PROMPT, **settings))) == message


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 5e-324, "seed": 1},
        {"temperature": 1e-300, "top_p": 0.5, "seed": 2**200},
        {"temperature": 1e308, "seed": 0},
        {"temperature": 1.0, "top_p": 5e-324},
        {"temperature": 1.0, "top_k": 10**30},
        {"max_new_tokens": 10**30},
        {"stop": ["\x00" * 10_000]},
    ],
)
def test_settings_at_the_edge_decode(decoder: SpeculativeDecoder, settings: dict[str, Any]) -> None:
    # The prompt leaves 12 tokens of the context.
    generation = decoder.generate(PROMPT * 25, ignore_eos=True, **settings)
    assert (len(generation.tokens), generation.finish_reason) == (12, "length")
    if settings.get("temperature", 1.0) < 1e-200 or settings.get("top_p", 1.0) < 1e-200:
        assert generation.tokens == decoder.generate(PROMPT * 25, ignore_eos=True).tokens


def test_numbers_of_other_libraries_and_no_stops_are_settings(decoder: SpeculativeDecoder) -> None:
    given = {"max_new_tokens": 7, "temperature": 0.5, "top_p": 0.75, "top_k": 9, "seed": 3}
    kinds: list[Any] = [np.int64, np.float32, np.float16, np.uint8, torch.tensor]
    theirs = {name: kind(value) for kind, (name, value) in zip(kinds, given.items(), strict=True)}
    ours = decoder.request(PROMPT, **given)  # type: ignore[arg-type]
    assert decoder.request(PROMPT, **theirs, stop=None) == ours
    assert [type(value) for value in asdict(ours.sampling).values()] == [float, float, int, int]
    assert decoder.generate(PROMPT, **theirs).tokens == decoder.generate(PROMPT, **given).tokens  # type: ignore[arg-type]
    stops = [decoder.request(PROMPT, stop=stop).stop for stop in (None, (), [], "a", ["a", "b"])]
    assert stops == [(), (), (), ("a",), ("a", "b")]


# -- menu, drafters, controllers ----------------------------------------------------------------------------------


def test_a_draft_length_outside_the_menu(decoder: SpeculativeDecoder) -> None:
    menu = decoder.parts.menu
    message = raised(MenuError, lambda: decoder.with_controller("fixed:5"))
    assert message == f"draft length 5 is not in the menu {menu}; choose one that is, or add it"
    session = decoder.session(PROMPT, 8)
    for action in (-1, len(menu), 10**9):
        message = raised(MenuError, lambda action=action: session.step(action))
        assert message == f"action {action} is outside the menu of {len(menu)} entries: {menu}"
    assert (session.steps, session.tokens) == ([], PROMPT)
    session.close()


def test_a_masked_action_and_a_finished_request(decoder: SpeculativeDecoder) -> None:
    session = decoder.session([99, 98, 97, 96], 1)
    message = raised(MenuError, lambda: session.step(0))
    assert message == "action fresh/0 is masked: no cached prefix can be ignored now; use its reuse form"
    session.step(decoder.parts.menu.plain)
    message = raised(MenuError, lambda: session.step(decoder.parts.menu.plain))
    assert message == "the request has finished; start a new session"
    session.close()


def test_a_menu_of_drafters_that_are_not_there(target_folder: Path) -> None:
    menu = Menu((Action(True, 0), Action(True, 4, "model:x"), Action(True, 4, "ngram")))
    message = raised(DrafterError, lambda: SpeculativeDecoder.from_pretrained(str(target_folder), menu=menu))
    assert message == "the menu uses drafters that the engine lacks: model:x; add them"
    message = raised(MenuError, lambda: SpeculativeDecoder.from_pretrained(str(target_folder), menu=str(menu)))
    assert message == "menu entry 'reuse/model:x/4' names an unknown drafter; known: ngram"


def test_a_misspelt_controller(target_folder: Path) -> None:
    def call() -> object:
        return SpeculativeDecoder.from_pretrained(str(target_folder), controller="heuristik")

    assert raised(errors.ControllerError, call) == "controller 'heuristik' is unknown; did you mean heuristic?"


# -- NaN logits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "seed": 1}])
def test_nan_logits_leave_the_request_and_the_cache_as_they_were(settings: dict[str, Any]) -> None:
    loaded = load_tiny("llama")
    truth = tiny_decoder(loaded).generate(PROMPT, 12, ignore_eos=True, **settings).tokens
    runner = WatchedRunner(loaded.runner)
    parts = make_parts(loaded, [scripted_drafter(PROMPT + truth)], runner=runner)
    # A sampled draft changes which random numbers are drawn, so that case decodes plainly.
    name = "plain" if settings else "fixed:2"
    decoder = SpeculativeDecoder(parts, make_controller(name, parts.menu), loaded)
    session = decoder.session(PROMPT, 12, ignore_eos=True, **settings)
    message = "the target's logits are not finite; load it in a wider precision (precision='fp32') or fetch it again"
    while not session.finished:
        before = (list(session.tokens), len(session.steps))
        runner.poison = 1
        assert raised(NumericalError, lambda: session.step(parts.menu.plain)) == message
        assert (session.tokens, len(session.steps)) == before
        session.step(parts.menu.plain)
    session.close()
    assert session.generated == truth
    runner.poison = 1
    assert raised(NumericalError, lambda: decoder.generate(PROMPT, 12, **settings)) == message
    assert decoder.generate(PROMPT, 12, ignore_eos=True, **settings).tokens == truth
    parts.prefix_cache.check_integrity()


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("settings", [{}, {"precision": "int8"}, {"precision": "bf16"}, {"exact": "off"}])
def test_weights_that_are_not_finite_are_refused(tmp_path: Path, settings: dict[str, str], number: float) -> None:
    folder = save_tiny(tmp_path)
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][7, 3] = number
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    message = raised(errors.ModelFileError, lambda: SpeculativeDecoder.from_pretrained(str(folder), **settings))
    told = "model.layers.1.mlp.up_proj.weight holds numbers that are not finite; fetch the model again"
    assert message == told


# -- policies and workloads ---------------------------------------------------------------------------------------


def test_a_policy_whose_drafters_are_missing(target_folder: Path) -> None:
    from test_policy import make_policy

    def call() -> object:
        return SpeculativeDecoder.from_pretrained(str(target_folder), drafter="ngram:history", controller=make_policy())

    assert raised(PolicyError, call) == "the policy uses drafters that the engine lacks: ngram; add them"


def test_a_workload_line_that_is_not_valid_is_named(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "a"}]}\n\n{"messages": \n')
    message = raised(WorkloadError, lambda: load_workload(str(path)))
    assert message.startswith(f"{path}:3: not valid JSON (")


# -- what the menu parser and the command line make of hostile names ----------------------------------------------


def test_messages_with_line_breaks_stay_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import dataclass

    @dataclass(frozen=True)
    class Options:
        x: int = 0

    def main(options: Options) -> None:
        raise PolicyError("the folder a\nb\r\nc\u2028d \udcff is missing; mend")

    monkeypatch.setattr("sys.argv", ["x"])
    with pytest.raises(SystemExit) as caught:
        run_command_line(Options, main, "")
    assert caught.value.code == 2
    assert capsys.readouterr().err == "draftgate: error: the folder a b c d ? is missing; mend\n"


def test_menus_by_hand_in_from_pretrained(target_folder: Path) -> None:
    for menu in ("reuse/0,reuse/-1", "fresh/0", "reuse/0,reuse/65", "[]", "\x00"):
        raised(MenuError, lambda menu=menu: SpeculativeDecoder.from_pretrained(str(target_folder), menu=menu))
    assert len(parse_menu("reuse/0", ())) == 1


def test_a_copied_folder_is_another_name_for_the_same_model(target_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(target_folder, tmp_path / "with space\nand break")
    decoder = SpeculativeDecoder.from_pretrained(str(folder))
    assert (
        decoder.generate(PROMPT, 4).tokens
        == SpeculativeDecoder.from_pretrained(str(target_folder)).generate(PROMPT, 4).tokens
    )
