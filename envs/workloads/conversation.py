"""A conversation: messages of which each one from the user is a request."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace

ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Message:
    """One message: who speaks (`system`, `user` or `assistant`) and what."""

    role: str
    content: str

    def as_dict(self) -> dict[str, str]:
        """The form that chat templates of tokenizers take."""
        return {"role": self.role, "content": self.content}


@dataclass(frozen=True)
class Conversation:
    """Messages in order; each user message is one request.

    An assistant message that the data gives stands in the history word for word. Where none follows a user
    message, the caller puts the model's own reply there.

    `group` names what must stay together: the document or the first prompt that several conversations share, or else
    the conversation's own id.
    """

    id: str
    kind: str
    messages: tuple[Message, ...]
    group: str = ""

    def __post_init__(self) -> None:
        if not self.group:
            object.__setattr__(self, "group", self.id)

    @property
    def num_requests(self) -> int:
        """How many messages the user sends."""
        return sum(message.role == "user" for message in self.messages)

    def first(self, num_requests: int) -> Conversation:
        """The beginning of the conversation, up to and including its user message number `num_requests`."""
        ends = [end for end, message in enumerate(self.messages, 1) if message.role == "user"]
        if num_requests >= len(ends):
            return self
        return replace(self, messages=self.messages[: ends[num_requests - 1]])


def content_id(messages: Iterable[Message]) -> str:
    """A name that hangs on roles and texts alone: `prompt-` and 12 hex digits of their SHA-256."""
    content = [[message.role, message.content] for message in messages]
    return f"prompt-{hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]}"
