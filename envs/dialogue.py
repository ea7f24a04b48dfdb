"""Conversations turned into requests, one after the other, with the replies filled in between."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from envs.workloads import Conversation, Workload


@dataclass(frozen=True)
class Turn:
    """One request of a conversation: the messages up to and including a user's, ready for a chat template.

    `group` is the conversation's: requests of one group share their history or a document.
    """

    id: str
    kind: str
    group: str
    messages: list[dict[str, str]]


class Dialogue:
    """A conversation under way: take `next_turn`, answer it with `reply`, until there is none."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._coming = list(conversation.messages)
        self._history: list[dict[str, str]] = []
        self._turns = 0

    def next_turn(self) -> Turn | None:
        """The next request, or None at the end."""
        while self._coming:
            message = self._coming.pop(0)
            self._history.append(message.as_dict())
            if message.role == "user":
                self._turns += 1
                talk = self._conversation
                return Turn(f"{talk.id}/{self._turns}", talk.kind, talk.group, list(self._history))
        return None

    def reply(self, text: str) -> None:
        """Put the model's answer into the history, unless the data gives the answer itself."""
        given = bool(self._coming) and self._coming[0].role == "assistant"
        if not given:
            self._history.append({"role": "assistant", "content": text})


def endless(workload: Workload, rng: np.random.Generator) -> Iterator[Dialogue]:
    """The workload's conversations in random order, again and again; those of one document stay together."""
    while True:
        shuffled = workload.shuffled(int(rng.integers(2**31)))
        for conversation in shuffled.conversations:
            yield Dialogue(conversation)
