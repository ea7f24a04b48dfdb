"""The menu: what it holds, what it masks, and what it refuses to read."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import MenuError
from engine.menu import DEFAULT_LENGTHS, MAX_LENGTH, Action, Menu, default_menu, parse_menu

FRESH, PLAIN = Action(False, 0), Action(True, 0)
FORMS = "write fresh/0, reuse/4 or reuse/ngram/4"


def test_default_menu_lists_every_drafter_and_length_in_order() -> None:
    menu = default_menu(("a", "b"))
    assert DEFAULT_LENGTHS == (0, 1, 2, 3, 4, 6, 8)
    assert menu.actions[:2] == (FRESH, PLAIN)
    assert menu.actions[2:] == tuple(Action(True, k, d) for d in ("a", "b") for k in (1, 2, 3, 4, 6, 8))
    assert (len(menu), menu.plain, menu.lengths, menu.drafters) == (14, 1, (1, 2, 3, 4, 6, 8), ("a", "b"))


def test_default_menu_without_drafters_only_decodes() -> None:
    assert str(default_menu(())) == "fresh/0,reuse/0"


def test_text_form_reads_back() -> None:
    text = "fresh/0,reuse/0,fresh/model:x/y/3,reuse/ngram:history/64"
    menu = parse_menu(text, ("model:x/y", "ngram:history"))
    assert menu.actions == (FRESH, PLAIN, Action(False, 3, "model:x/y"), Action(True, 64, "ngram:history"))
    assert str(menu) == text
    assert parse_menu(str(menu), menu.drafters) == menu


@given(
    lengths=st.lists(st.integers(0, MAX_LENGTH), unique=True, max_size=8),
    drafters=st.lists(st.sampled_from(["ngram", "ngram:history", "model:a/b", "m"]), unique=True, min_size=1),
)
def test_any_menu_reads_back(lengths: list[int], drafters: list[str]) -> None:
    menu = default_menu(drafters, lengths)
    assert parse_menu(str(menu), drafters) == menu
    assert menu.lengths == tuple(sorted(set(lengths) - {0}))


def test_entry_without_drafter_means_the_first() -> None:
    assert parse_menu(" reuse/0 , reuse/4", ("b", "a"))[1] == Action(True, 4, "b")
    assert parse_menu("reuse/b/0", ("b",)).actions == (PLAIN,)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", f"menu entry '' cannot be read; {FORMS}"),
        ("reuse/0,", f"menu entry '' cannot be read; {FORMS}"),
        ("reuse", f"menu entry 'reuse' cannot be read; {FORMS}"),
        ("reuse/-1", f"menu entry 'reuse/-1' cannot be read; {FORMS}"),
        ("reuse/1.5", f"menu entry 'reuse/1.5' cannot be read; {FORMS}"),
        ("reuse/²", f"menu entry 'reuse/²' cannot be read; {FORMS}"),
        ("Reuse/1", f"menu entry 'Reuse/1' cannot be read; {FORMS}"),
        ("reuse/\x001", f"menu entry 'reuse/\\x001' cannot be read; {FORMS}"),
        ("reuse/65", "menu entry 'reuse/65' drafts more than 64 tokens; choose a shorter length"),
        ("reuse/gram/2", "menu entry 'reuse/gram/2' names an unknown drafter; known: ngram"),
        ("fresh/0", "the menu fresh/0 lacks reuse/0, the plain step; add it"),
        ("reuse/0,reuse/2,reuse/ngram/2", None),
    ],
)
def test_what_cannot_be_read_is_named(text: str, message: str | None) -> None:
    message = message or "the menu holds an entry twice: reuse/0,reuse/ngram/2,reuse/ngram/2; name each once"
    with pytest.raises(MenuError) as caught:
        parse_menu(text, ("ngram",))
    assert str(caught.value) == message


def test_a_length_of_thousands_of_digits_is_too_long() -> None:
    for digits in ("9" * 5000, "1" + "0" * 5000):
        with pytest.raises(MenuError, match=r"drafts more than 64 tokens; choose a shorter length$"):
            parse_menu(f"reuse/0,reuse/{digits}", ("ngram",))


def test_drafting_needs_a_drafter() -> None:
    with pytest.raises(MenuError) as caught:
        parse_menu("reuse/0,reuse/4", ())
    assert str(caught.value) == "menu entry 'reuse/4' drafts, and there is no drafter; name one or use k = 0"


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (Action(True, -1, "n"), "menu entry 'reuse/n/-1' has draft length -1; choose one from 0 to 64"),
        (Action(True, 65, "n"), "menu entry 'reuse/n/65' has draft length 65; choose one from 0 to 64"),
        (Action(True, 4), "menu entry 'reuse/4' must name a drafter where it drafts, and only there"),
        (Action(True, 0, "n"), "menu entry 'reuse/n/0' must name a drafter where it drafts, and only there"),
    ],
)
def test_actions_made_by_hand_are_checked(action: Action, message: str) -> None:
    with pytest.raises(MenuError) as caught:
        Menu((PLAIN, action))
    assert str(caught.value) == message


def test_an_empty_menu_is_refused() -> None:
    with pytest.raises(MenuError) as caught:
        Menu(())
    assert str(caught.value) == "the menu is empty; give at least reuse/0"


def test_ten_thousand_entries_are_read_and_masked() -> None:
    drafters = [f"d{i}" for i in range(157)]
    text = ",".join(["fresh/0", "reuse/0", *(f"reuse/{d}/{k}" for d in drafters for k in range(1, 65))])
    menu = parse_menu(text, drafters)
    assert len(menu) == 2 + 157 * 64
    assert menu.find(64, "d156") == len(menu) - 1
    assert menu.mask(can_reuse=False).count(False) == 1
    with pytest.raises(MenuError, match="the menu holds an entry twice"):
        parse_menu(text + ",reuse/d0/1", drafters)


def test_find() -> None:
    menu = parse_menu("fresh/0,fresh/a/4,reuse/0,reuse/a/4,reuse/b/4,reuse/b/6", ("a", "b"))
    assert [menu.find(0), menu.find(0, "b"), menu.find(4), menu.find(4, "b"), menu.find(6)] == [2, 2, 3, 4, 5]
    for k, drafter, words in [(5, None, "5"), (-1, None, "-1"), (6, "a", "6 of drafter a"), (4, "c", "4 of drafter c")]:
        with pytest.raises(MenuError) as caught:
            menu.find(k, drafter)
        assert str(caught.value) == f"draft length {words} is not in the menu {menu}; choose one that is, or add it"


def test_mask_leaves_one_of_each_pair_that_does_the_same() -> None:
    menu = parse_menu("fresh/0,reuse/0,fresh/n/2,reuse/n/2,fresh/n/4", ("n",))
    assert menu.mask(can_reuse=True) == [True] * 5
    assert menu.mask(can_reuse=False) == [False, True, False, True, True]


def test_allowed_takes_the_twin_of_a_masked_entry() -> None:
    menu = parse_menu("fresh/0,reuse/0,fresh/n/2,reuse/n/2,fresh/n/4", ("n",))
    assert [menu.allowed(i, menu.mask(False)) for i in range(5)] == [1, 1, 3, 3, 4]
    assert [menu.allowed(i, menu.mask(True)) for i in range(5)] == [0, 1, 2, 3, 4]
    for index in (-1, 5, 10**30):
        with pytest.raises(MenuError) as caught:
            menu.allowed(index, menu.mask(True))
        assert str(caught.value) == f"action {index} is outside the menu of 5 entries: {menu}"


class Indexed:
    def __index__(self) -> int:
        return 2


def test_allowed_takes_whatever_is_an_index() -> None:
    menu = parse_menu("fresh/0,reuse/0,reuse/n/2", ("n",))
    for index in (np.int64(2), np.array(2), Indexed()):
        action = menu.allowed(index, menu.mask(False))
        assert (action, type(action)) == (2, int)


@pytest.mark.parametrize(
    ("index", "told"),
    [(None, "None"), ("2", "'2'"), (2.0, "2.0"), ([2], "[2]"), ("x" * 99, "'" + "x" * 39)],
)
def test_what_is_no_index_is_told(index: object, told: str) -> None:
    menu = parse_menu("fresh/0,reuse/0,reuse/n/2", ("n",))
    with pytest.raises(MenuError) as caught:
        menu.allowed(index, menu.mask(True))  # type: ignore[arg-type]
    assert str(caught.value) == f"action {told} is no index; choose must return that of a menu entry"
