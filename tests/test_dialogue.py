"""Conversations turned into requests: what the history holds, and in which order conversations come."""

from __future__ import annotations

from itertools import islice

import numpy as np

from envs.dialogue import Dialogue, endless
from envs.workloads import Conversation, Message, Workload


def conversation(*said: tuple[str, str], name: str = "c", group: str = "") -> Conversation:
    return Conversation(name, "talk", tuple(Message(role, content) for role, content in said), group)


def history(*said: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in said]


def test_a_reply_goes_between_two_turns() -> None:
    dialogue = Dialogue(conversation(("system", "be brief"), ("user", "one"), ("user", "two")))
    first = dialogue.next_turn()
    assert first is not None
    assert (first.id, first.kind) == ("c/1", "talk")
    assert first.messages == history(("system", "be brief"), ("user", "one"))
    dialogue.reply("answer")
    second = dialogue.next_turn()
    assert second is not None
    assert second.id == "c/2"
    assert second.messages == history(("system", "be brief"), ("user", "one"), ("assistant", "answer"), ("user", "two"))
    dialogue.reply("end")
    assert dialogue.next_turn() is None
    assert dialogue.next_turn() is None


def test_a_turn_once_given_out_changes_no_more() -> None:
    dialogue = Dialogue(conversation(("user", "one"), ("user", "two")))
    first = dialogue.next_turn()
    assert first is not None
    dialogue.reply("answer")
    dialogue.next_turn()
    assert first.messages == history(("user", "one"))


def test_an_answer_that_the_data_gives_stands_in_place_of_the_model_s() -> None:
    dialogue = Dialogue(
        conversation(("user", "one"), ("assistant", "given"), ("user", "two"), ("user", "three"), ("assistant", "last"))
    )
    dialogue.next_turn()
    dialogue.reply("ignored")
    second = dialogue.next_turn()
    assert second is not None
    assert second.messages == history(("user", "one"), ("assistant", "given"), ("user", "two"))
    dialogue.reply("kept")
    third = dialogue.next_turn()
    assert third is not None
    assert third.id == "c/3"
    assert third.messages[-2:] == history(("assistant", "kept"), ("user", "three"))
    dialogue.reply("ignored too")
    assert dialogue.next_turn() is None


def test_a_conversation_without_a_reply_goes_on_without_it() -> None:
    dialogue = Dialogue(conversation(("user", "one"), ("user", "two")))
    dialogue.next_turn()
    second = dialogue.next_turn()
    assert second is not None
    assert second.messages == history(("user", "one"), ("user", "two"))


def workload() -> Workload:
    """Two documents of two questions each and three talks."""
    documents = [conversation(("user", f"{d}{q}"), name=f"{d}#{q}", group=d) for d in "ab" for q in (1, 2)]
    return Workload("w", (*documents, *(conversation(("user", n), name=n) for n in "xyz")))


def names(seed: int, passes: int) -> list[list[str]]:
    """The conversations of some passes over the workload."""
    dialogues = endless(workload(), np.random.default_rng(seed))
    taken = []
    for dialogue in islice(dialogues, passes * 7):
        turn = dialogue.next_turn()
        assert turn is not None
        taken.append(turn.id.removesuffix("/1"))
    return [taken[start : start + 7] for start in range(0, len(taken), 7)]


def test_each_pass_takes_every_conversation_once_and_keeps_documents_together() -> None:
    passes = names(seed=0, passes=20)
    for order in passes:
        assert sorted(order) == ["a#1", "a#2", "b#1", "b#2", "x", "y", "z"]
        for document in "ab":
            assert order.index(f"{document}#2") == order.index(f"{document}#1") + 1
    # 5 groups have 120 orders: 20 passes of which fewer than 10 differ do not come up once in 10^9 seeds.
    assert len({tuple(order) for order in passes}) >= 10


def test_the_order_is_the_seed_s() -> None:
    assert names(seed=1, passes=3) == names(seed=1, passes=3)
    assert len({tuple(map(tuple, names(seed, 2))) for seed in range(5)}) > 1
