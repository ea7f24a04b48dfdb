"""From a line to conversations. The fields of a row say which format it has.

| fields | format |
|---|---|
| `messages`, optional `id`, `kind` | chat: a list of `{role, content}` |
| `question_id`, `category`, `turns` | Spec-Bench (Xia et al., 2024) |
| `id`, `kind`, `turns` | the bundled format |
| `document`, `questions`, optional `doc_id` or `id`, `kind` | one conversation for each question |

Every format may name the row's `split`. Fields not listed are ignored. Where no id is given, and in plain text,
conversations are named by their content and grouped by their document or first prompt, so that a split hangs on
these alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from envs.workloads.conversation import ROLES, Conversation, Message, content_id
from envs.workloads.rows import Line, Row, type_name
from envs.workloads.splits import SPLITS, hashed_split, unknown_name


@dataclass(frozen=True)
class Group:
    """What one line yields: conversations that belong together, their split, and whether the line gave the id."""

    line: Line
    id: str
    split: str
    conversations: tuple[Conversation, ...]
    named: bool


def parse_prompt(line: Line) -> Group:
    """A line of plain text: one prompt."""
    conversation = _conversation(None, "chat", (Message("user", line.text.strip()),))
    return Group(line, conversation.group, hashed_split(conversation.group), (conversation,), named=False)


def parse_group(row: Row) -> Group:
    """The conversations of a row in any of the formats above.

    Raises:
        WorkloadError: no known format, or a field that is missing or wrong.
    """
    if row.has("messages"):
        given = row.identifier("id") if row.has("id") else None
        conversations = _from_messages(row, given)
    elif row.has("turns"):
        given = row.identifier("question_id" if row.has("question_id") else "id")
        conversations = _from_turns(row, given)
    elif row.has("document") or row.has("questions"):
        field = next((field for field in ("doc_id", "id") if row.has(field)), None)
        given = row.identifier(field) if field else None
        conversations = _from_document(row, given)
    else:
        names = ", ".join(sorted(row.fields)[:8]) or "none"
        mend = "give messages, turns, or a document with questions"
        raise row.line.error(f"no known format (fields: {names:.80})", mend)
    name = conversations[0].group
    return Group(row.line, name, _split(row, name), conversations, named=given is not None)


def _from_messages(row: Row, given: str | None) -> tuple[Conversation, ...]:
    messages = tuple(_message(row, item, f"messages[{i}]") for i, item in enumerate(row.items("messages")))
    _check_order(row, messages)
    asked = sum(message.role == "user" for message in messages)
    kind = row.text("kind") if row.has("kind") else ("chat" if asked == 1 else "multi-turn")
    return (_conversation(given, kind, messages),)


def _from_turns(row: Row, given: str) -> tuple[Conversation, ...]:
    kind = row.text("category" if row.has("question_id") else "kind")
    return (_conversation(given, kind, tuple(Message("user", turn) for turn in row.texts("turns"))),)


def _from_document(row: Row, given: str | None) -> tuple[Conversation, ...]:
    kind = row.text("kind") if row.has("kind") else "documents"
    # The document stands first: all of its questions share it as their prefix.
    document = row.text("document").strip()
    group = given or content_id([Message("user", document)])
    prompts = [(Message("user", f"{document}\n\nQuestion: {question.strip()}"),) for question in row.texts("questions")]
    names = [f"{given}#{i}" if given else content_id(messages) for i, messages in enumerate(prompts, 1)]
    return tuple(Conversation(name, kind, messages, group) for name, messages in zip(names, prompts, strict=True))


def _conversation(given: str | None, kind: str, messages: tuple[Message, ...]) -> Conversation:
    """Under the id that was given, or else under its content's, with all that begin with the same prompt."""
    if given is not None:
        return Conversation(given, kind, messages)
    whole = Conversation(content_id(messages), kind, messages)
    return replace(whole, group=content_id(whole.first(1).messages))


def _message(row: Row, item: object, place: str) -> Message:
    if not isinstance(item, dict):
        raise row.line.error(f"{place} is {type_name(item)}", "give an object with role and content")
    for field in ("role", "content"):
        if field not in item:
            raise row.line.error(f"{place}.{field} is missing", "add it")
    role = row.check_text(item["role"], f"{place}.role")
    if role not in ROLES:
        raise row.line.error(*unknown_name("role", role, ROLES))
    return Message(role, row.check_text(item["content"], f"{place}.content"))


def _check_order(row: Row, messages: tuple[Message, ...]) -> None:
    """One system message at most, in front; then the user; never two replies in a row."""
    roles = [message.role for message in messages]
    if "user" not in roles:
        raise row.line.error("no user message", "add one")
    if "system" in roles[1:]:
        raise row.line.error("a system message after the first message", "move it to the front")
    spoken = [role for role in roles if role != "system"]
    if spoken[0] != "user":
        raise row.line.error("an assistant message before any user message", "let the user speak first")
    if ("assistant", "assistant") in pairwise(spoken):
        raise row.line.error("two assistant messages in a row", "merge them into one")


def _split(row: Row, group: str) -> str:
    if not row.has("split"):
        return hashed_split(group)
    split = row.text("split")
    if split not in SPLITS:
        raise row.line.error(*unknown_name("split", split, SPLITS))
    return split
