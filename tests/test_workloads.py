"""Workloads: the bundled prompts, every format of a file, every error, and the order of requests."""

from __future__ import annotations

import json
from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.errors import WorkloadError
from envs.workloads import SPLITS, Conversation, Message, Workload, load_workload
from envs.workloads import loaders as loaders_module
from envs.workloads.conversation import content_id
from envs.workloads.splits import hashed_split

KINDS = (
    "chat",
    "code",
    "code-editing",
    "documents",
    "extraction",
    "multi-turn",
    "summary",
    "translation",
)
MEND_JSON = "write one JSON object a line, or name the file .txt to read each line as a prompt"


def write(path: Path, *rows: Any, newline: str = "\n", start: bytes = b"") -> str:
    """Write rows (objects as JSON, strings as they are) and return the path."""
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_bytes(start + "".join(line + newline for line in lines).encode())
    return str(path)


def chat(*roles: str, **more: Any) -> dict[str, Any]:
    """A row of chat JSONL whose messages are `<role> <place>`."""
    return {"messages": [{"role": role, "content": f"{role} {i}"} for i, role in enumerate(roles)], **more}


def spec_bench(number: int, *turns: str, **more: Any) -> dict[str, Any]:
    return {"question_id": number, "category": "writing", "turns": list(turns), **more}


def user(text: str) -> tuple[Message, ...]:
    return (Message("user", text),)


def small_workload() -> Workload:
    """Three kinds: 3 documents with 3 questions each, 6 chats, 2 talks with 3 requests each."""
    talks = [Conversation(f"t{i}", "talk", user(f"a{i}") + user("b") + user("c")) for i in range(2)]
    chats = [Conversation(f"c{i}", "chat", user(f"hello {i}")) for i in range(6)]
    questions = [
        Conversation(f"d{i}#{j}", "docs", user(f"{i} {j}"), group=f"d{i}") for i in range(3) for j in (1, 2, 3)
    ]
    return Workload("small", (*talks, *chats, *questions))


class TestBundled:
    def test_holds_the_promised_kinds_and_counts(self) -> None:
        workload = load_workload("bundled")
        assert workload.name == "bundled"
        assert workload.kinds == KINDS
        assert workload.num_requests >= 160
        assert all(workload.of_kind(kind).num_requests >= 21 for kind in KINDS)

    @pytest.mark.parametrize("split", SPLITS)
    def test_every_split_has_every_kind(self, split: str) -> None:
        workload = load_workload("bundled", split)
        assert workload.name == f"bundled/{split}"
        assert workload.kinds == KINDS
        assert all(workload.of_kind(kind).num_requests >= 3 for kind in KINDS)

    def test_splits_divide_the_whole(self) -> None:
        whole = load_workload("bundled").conversations
        parts = [c for split in SPLITS for c in load_workload("bundled", split).conversations]
        assert sorted(c.id for c in parts) == sorted(c.id for c in whole)
        assert len({c.id for c in whole}) == len(whole)

    def test_every_row_names_its_split_and_its_own_kind(self) -> None:
        for path in loaders_module.BUNDLED_FOLDER.glob("*.jsonl"):
            rows = [json.loads(line) for line in path.read_text("utf-8").split("\n") if line]
            assert {row["split"] for row in rows} == set(SPLITS), path.name
            assert {row["kind"] for row in rows} == {path.stem.replace("_", "-")}
            assert all(row["id"].startswith(row["kind"]) for row in rows)

    def test_no_text_is_shared_between_splits(self) -> None:
        # Paragraphs of 60 characters and more: whole prompts, documents, and pasted texts within prompts.
        home: dict[str, str] = {}
        for split in SPLITS:
            for conversation in load_workload("bundled", split).conversations:
                for paragraph in "\n\n".join(m.content for m in conversation.messages).split("\n\n"):
                    text = " ".join(paragraph.split()).lower()
                    if len(text) >= 60:
                        assert home.setdefault(text, split) == split, paragraph

    def test_no_prompt_stands_twice(self) -> None:
        counts = Counter(c.messages for c in load_workload("bundled").conversations)
        assert max(counts.values()) == 1

    def test_questions_share_their_document_as_prefix(self) -> None:
        documents = load_workload("bundled").of_kind("documents")
        for group, part in groupby(documents.conversations, key=lambda c: c.group):
            prompts = [c.messages[0].content for c in part]
            assert len(prompts) >= 4, group
            heads = {prompt.split("\n\nQuestion: ")[0] for prompt in prompts}
            assert len(heads) == 1
            assert len(heads.pop().split()) >= 250

    def test_conversations_of_several_turns(self) -> None:
        talks = load_workload("bundled").of_kind("multi-turn").conversations
        assert {c.num_requests for c in talks} == {2, 3, 4}

    def test_missing_data_is_told(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(loaders_module, "BUNDLED_FOLDER", tmp_path)
        with pytest.raises(WorkloadError) as caught:
            load_workload("bundled")
        assert str(caught.value) == "bundled: no requests; install the package again, with its data"

    def test_an_id_used_in_two_files_is_told(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(loaders_module, "BUNDLED_FOLDER", tmp_path)
        first = write(tmp_path / "a.jsonl", chat("user", id="x"))
        second = write(tmp_path / "b.jsonl", chat("user", id="y"), chat("user", id="x"))
        with pytest.raises(WorkloadError) as caught:
            load_workload("bundled")
        expected = f"{second}:2: id 'x' stands at {first}:1 too; give each line its own id"
        assert str(caught.value) == expected


class TestFormats:
    def test_chat(self, tmp_path: Path) -> None:
        rows = (
            chat("system", "user", "assistant", "user", id="one", kind="talk"),
            chat("user"),
            chat("user", "user"),
        )
        workload = load_workload(write(tmp_path / "mine.jsonl", *rows))
        first, second, third = workload.conversations
        assert workload.name == "mine"
        assert (first.id, first.kind, first.group, first.num_requests) == ("one", "talk", "one", 2)
        assert [m.as_dict() for m in first.messages] == rows[0]["messages"]
        assert (second.id, second.kind, second.num_requests) == (content_id(second.messages), "chat", 1)
        assert (third.id, third.kind, third.num_requests) == (content_id(third.messages), "multi-turn", 2)
        assert workload.num_requests == 5

    def test_spec_bench(self, tmp_path: Path) -> None:
        workload = load_workload(write(tmp_path / "a.jsonl", spec_bench(81, "First", "Second")))
        expected = Conversation("81", "writing", user("First") + user("Second"), group="81")
        assert workload.conversations == (expected,)

    def test_documents(self, tmp_path: Path) -> None:
        row = {"doc_id": 7, "document": "A text.\n", "questions": ["Who? ", "Where?"]}
        workload = load_workload(write(tmp_path / "a.jsonl", row, {"document": "B", "questions": ["Why?"]}))
        why = user("B\n\nQuestion: Why?")
        assert workload.conversations == (
            Conversation("7#1", "documents", user("A text.\n\nQuestion: Who?"), group="7"),
            Conversation("7#2", "documents", user("A text.\n\nQuestion: Where?"), group="7"),
            Conversation(content_id(why), "documents", why, group=content_id(user("B"))),
        )

    def test_bundled_format(self, tmp_path: Path) -> None:
        rows = (
            {"id": "a", "kind": "code", "split": "test", "turns": ["Sort"]},
            {"id": "d", "kind": "manuals", "split": "train", "document": "B", "questions": ["Why?"]},
        )
        path = write(tmp_path / "a.jsonl", *rows)
        assert load_workload(path, "test").conversations == (Conversation("a", "code", user("Sort")),)
        expected = Conversation("d#1", "manuals", user("B\n\nQuestion: Why?"), group="d")
        assert load_workload(path, "train").conversations == (expected,)

    def test_plain_text(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.TXT", "Hello", "  ", "", '{"not": "read as JSON"} ')
        assert load_workload(path).conversations == (
            Conversation("prompt-1d9f4feaa9db", "chat", user("Hello")),
            Conversation(content_id(user('{"not": "read as JSON"}')), "chat", user('{"not": "read as JSON"}')),
        )

    def test_formats_may_be_mixed(self, tmp_path: Path) -> None:
        document = {"document": "B", "questions": ["Why?"]}
        workload = load_workload(write(tmp_path / "a.jsonl", chat("user"), spec_bench(1, "Hi"), document))
        assert [c.kind for c in workload.conversations] == ["chat", "writing", "documents"]

    @pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
    def test_mark_and_carriage_returns_are_dropped(self, tmp_path: Path, name: str) -> None:
        rows = ("Hello", "World") if name.endswith("txt") else (spec_bench(1, "Hello"), spec_bench(2, "World"))
        path = write(tmp_path / name, *rows, newline="\r\n", start=b"\xef\xbb\xbf")
        assert [c.messages for c in load_workload(path).conversations] == [user("Hello"), user("World")]

    @pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\x85", "\u00a0", "\x7f"])
    def test_other_line_marks_do_not_split_a_line(self, tmp_path: Path, mark: str) -> None:
        path = write(tmp_path / "a.jsonl", spec_bench(1, f"one{mark}two"))
        assert load_workload(path).conversations[0].messages == user(f"one{mark}two")
        path = write(tmp_path / "a.txt", f"one{mark}two")
        assert load_workload(path).conversations[0].messages == user(f"one{mark}two")


class TestSplits:
    def test_unnamed_rows_are_divided_by_a_hash(self, tmp_path: Path) -> None:
        rows = [{"doc_id": i, "document": f"text {i}", "questions": ["a", "b"]} for i in range(400)]
        path = write(tmp_path / "a.jsonl", *rows)
        parts = {split: load_workload(path, split) for split in SPLITS}
        groups = {split: {c.group for c in part.conversations} for split, part in parts.items()}
        assert set.union(*groups.values()) == {str(i) for i in range(400)}
        assert sum(map(len, groups.values())) == 400
        assert all(part.num_requests == 2 * len(groups[split]) for split, part in parts.items())
        # The ids are fixed, so these counts are too; they would lie within 3 deviations of 240, 60, 100.
        assert [len(groups[split]) for split in SPLITS] == pytest.approx([240, 60, 100], abs=30)

    def test_division_does_not_depend_on_the_place_in_the_file(self, tmp_path: Path) -> None:
        rows = [spec_bench(i, f"prompt {i}") for i in range(40)]
        there = load_workload(write(tmp_path / "a.jsonl", *rows), "test")
        back = load_workload(write(tmp_path / "b.jsonl", *rows[::-1]), "test")
        assert there.conversations == back.conversations[::-1]

    def test_known_hashes_stay(self) -> None:
        assert [hashed_split(str(i)) for i in range(6)] == [*["train"] * 5, "test"]

    def test_a_named_split_wins_over_the_hash(self, tmp_path: Path) -> None:
        rows = [spec_bench(i, "x", split="validation") for i in range(20)]
        assert load_workload(write(tmp_path / "a.jsonl", *rows), "validation").num_requests == 20

    def test_an_empty_split_is_told(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.jsonl", spec_bench(1, "x", split="train"))
        with pytest.raises(WorkloadError) as caught:
            load_workload(path, "test")
        assert str(caught.value) == f'{path}: no test rows; add rows, or give some the field "split": "test"'

    @pytest.mark.parametrize(
        ("split", "guess"),
        [("tests", "did you mean 'test'? "), ("Train", "did you mean 'train'? "), ("", "")],
    )
    def test_an_unknown_split_is_told(self, split: str, guess: str) -> None:
        with pytest.raises(WorkloadError) as caught:
            load_workload("bundled", split)
        assert str(caught.value) == f"unknown split {split!r}; {guess}choose one of train, validation, test"


class TestRowsWithoutIds:
    def rows(self, name: str) -> list[Any]:
        texts = [f"prompt {i}" for i in range(60)]
        return texts if name.endswith("txt") else [{"messages": [{"role": "user", "content": t}]} for t in texts]

    @pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
    def test_a_line_that_is_inserted_changes_no_other_split(self, tmp_path: Path, name: str) -> None:
        rows = self.rows(name)
        path = write(tmp_path / name, *rows[1:])
        before = {split: set(load_workload(path, split).conversations) for split in SPLITS}
        write(tmp_path / name, *rows[::-1])
        after = {split: set(load_workload(path, split).conversations) for split in SPLITS}
        assert all(before[split] <= after[split] for split in SPLITS)
        assert sum(len(after[split] - before[split]) for split in SPLITS) == 1

    def test_ids_stay_over_versions_and_hang_on_roles_and_texts(self) -> None:
        assert content_id(user("Hello")) == "prompt-1d9f4feaa9db"
        assert content_id(user("Grüße")) == "prompt-6fecee70231a"
        twice, halves = user("Hello") + user("Hello"), user("Hel") + user("lo")
        others = [user("Hello "), (Message("assistant", "Hello"),), twice, halves]
        assert len({content_id(messages) for messages in (user("Hello"), *others)}) == 5

    def test_what_stands_twice_is_kept_once(self, tmp_path: Path) -> None:
        again = {"messages": [{"role": "user", "content": "Hello"}], "kind": "greeting", "split": "test"}
        text = write(tmp_path / "a.txt", "Hello", "World", " Hello ")
        talks = write(tmp_path / "b.jsonl", again, spec_bench(1, "Hello"))
        assert [c.messages for c in load_workload(text).conversations] == [user("Hello"), user("World")]
        both = load_workload([text, talks]).conversations
        assert [(c.kind, c.messages) for c in both] == [
            ("chat", user("Hello")),
            ("chat", user("World")),
            ("writing", user("Hello")),  # an id was given: it is kept
        ]
        parts = [c.id for split in SPLITS for c in _part([text, talks], split)]
        assert sorted(parts) == sorted(c.id for c in both)

    def test_the_same_beginning_is_in_one_split(self, tmp_path: Path) -> None:
        rows = [chat("user")]
        for i in range(20):
            row = chat("user", "assistant", "user")
            row["messages"][2]["content"] = f"and then {i}?"
            rows.append(row)
        path = write(tmp_path / "a.jsonl", *rows)
        whole = load_workload(path)
        assert len({c.id for c in whole.conversations}) == 21
        assert {c.group for c in whole.conversations} == {content_id(user("user 0"))}
        assert [len(_part([path], split)) for split in SPLITS].count(21) == 1

    def test_rows_of_one_document_are_one_group(self, tmp_path: Path) -> None:
        rows = [{"document": "A text.", "questions": [f"Question {i}?", "Why?"]} for i in range(20)]
        path = write(tmp_path / "a.jsonl", *rows)
        whole = load_workload(path).conversations
        assert len(whole) == len({c.id for c in whole}) == 21  # "Why?" is kept once
        assert {c.group for c in whole} == {content_id(user("A text."))}
        assert [len(_part([path], split)) for split in SPLITS].count(21) == 1

    def test_an_id_that_was_given_meets_no_other(self, tmp_path: Path) -> None:
        name = content_id(user("user 0"))
        for rows in ((chat("user"), chat("user", "user", id=name)), (chat("user", id=name), chat("user"))):
            path = write(tmp_path / "a.jsonl", *rows)
            with pytest.raises(WorkloadError) as caught:
                load_workload(path)
            assert str(caught.value) == f"{path}:2: id {name!r} stands at {path}:1 too; give each line its own id"


def _part(sources: list[str], split: str) -> tuple[Conversation, ...]:
    """The conversations of a split, which may have none."""
    try:
        return load_workload(sources, split).conversations
    except WorkloadError as error:
        if f"no {split} rows" not in str(error):
            raise
        return ()


class TestSources:
    def test_several_are_one_workload(self, tmp_path: Path) -> None:
        one = write(tmp_path / "one.jsonl", spec_bench(1, "x", split="train"), spec_bench(2, "y", split="test"))
        two = write(tmp_path / "two.jsonl", spec_bench(3, "z", split="train"))
        whole = load_workload([one, two, one])
        assert (whole.name, [c.id for c in whole.conversations]) == ("one+two", ["1", "2", "3"])
        train, test = (load_workload([one, two], split) for split in ("train", "test"))
        assert (train.name, [c.id for c in train.conversations]) == ("one+two/train", ["1", "3"])
        assert [c.id for c in test.conversations] == ["2"]  # the second file has none
        assert load_workload([two, "bundled"]).name == "two+bundled"

    def test_each_must_hold_a_line(self, tmp_path: Path) -> None:
        one, empty = write(tmp_path / "one.txt", "Hello"), write(tmp_path / "empty.txt")
        with pytest.raises(WorkloadError) as caught:
            load_workload([one, empty])
        assert str(caught.value) == f"{empty}: no requests; add at least one line"

    def test_an_id_that_two_give_is_told(self, tmp_path: Path) -> None:
        one, two = (write(tmp_path / name, chat("user", id="x")) for name in ("one.jsonl", "two.jsonl"))
        with pytest.raises(WorkloadError) as caught:
            load_workload([one, two])
        assert str(caught.value) == f"{two}:1: id 'x' stands at {one}:1 too; give each line its own id"

    def test_a_split_that_none_has_is_told(self, tmp_path: Path) -> None:
        one, two = (write(tmp_path / f"{i}.jsonl", spec_bench(i, "x", split="train")) for i in (1, 2))
        with pytest.raises(WorkloadError) as caught:
            load_workload([one, two], "validation")
        mend = 'add rows, or give some the field "split": "validation"'
        assert str(caught.value) == f"{one}, {two}: no validation rows; {mend}"


INVALID_ROWS = [
    (
        "{'a': 1}",
        f"not valid JSON (Expecting property name enclosed in double quotes, column 2); {MEND_JSON}",
    ),
    ('{"turns": ["cut', f"not valid JSON (Unterminated string starting at, column 12); {MEND_JSON}"),
    ("plain words", f"not valid JSON (Expecting value, column 1); {MEND_JSON}"),
    ("[" * 200_000, f"JSON that is too large to read; {MEND_JSON}"),
    ("9" * 5_000, f"JSON that is too large to read; {MEND_JSON}"),
    ("[1]", f"a list where an object should be; {MEND_JSON}"),
    ("3", f"a number where an object should be; {MEND_JSON}"),
    ("null", f"null where an object should be; {MEND_JSON}"),
    ({}, "no known format (fields: none); give messages, turns, or a document with questions"),
    (
        {"prompt": "Hi", "answer": "Ho"},
        "no known format (fields: answer, prompt); give messages, turns, or a document with questions",
    ),
    (
        {"messages": None},
        "no known format (fields: messages); give messages, turns, or a document with questions",
    ),
    ({"document": "A"}, "field 'questions' is missing; add it"),
    ({"questions": ["A"]}, "field 'document' is missing; add it"),
    ({"turns": ["A"], "kind": "chat"}, "field 'id' is missing; add it"),
    ({"turns": ["A"], "id": "a"}, "field 'kind' is missing; add it"),
    ({"turns": ["A"], "question_id": 1}, "field 'category' is missing; add it"),
    ({"turns": "A", "id": "a", "kind": "chat"}, "turns is a string; give a list"),
    (spec_bench(1), "turns is an empty list; add an entry or remove the line"),
    ({**spec_bench(1), "turns": ["A", 5]}, "turns[1] is a number; give a string"),
    ({**spec_bench(1), "turns": ["A", True]}, "turns[1] is a boolean; give a string"),
    ({**spec_bench(1), "turns": ["A", None]}, "turns[1] is null; give a string"),
    (spec_bench(1, "A", " \n\t"), "turns[1] is empty; write a text or remove it"),
    (
        '{"question_id": 1, "category": "a", "turns": ["\\ud83d"]}',
        "turns[0] holds half of a surrogate pair; write the whole character",
    ),
    (spec_bench(1, "A", category=["x"]), "category is a list; give a string"),
    ({**spec_bench(1, "A"), "question_id": 1.5}, "question_id is a number; give a string"),
    ({**spec_bench(1, "A"), "question_id": True}, "question_id is a boolean; give a string"),
    ({"document": " ", "questions": ["A"]}, "document is empty; write a text or remove it"),
    ({"document": {}, "questions": ["A"]}, "document is an object; give a string"),
    ({"document": "A", "questions": [""]}, "questions[0] is empty; write a text or remove it"),
    (
        spec_bench(1, "A", split="tset"),
        "unknown split 'tset'; did you mean 'test'? choose one of train, validation, test",
    ),
    ({"messages": {}}, "messages is an object; give a list"),
    ({"messages": ["A"]}, "messages[0] is a string; give an object with role and content"),
    ({"messages": [{"content": "A"}]}, "messages[0].role is missing; add it"),
    ({"messages": [{"role": "user"}]}, "messages[0].content is missing; add it"),
    ({"messages": [{"role": "user", "content": ["A"]}]}, "messages[0].content is a list; give a string"),
    (
        {"messages": [{"role": "user", "content": ""}]},
        "messages[0].content is empty; write a text or remove it",
    ),
    (chat("human"), "unknown role 'human'; choose one of system, user, assistant"),
    (chat("usr"), "unknown role 'usr'; did you mean 'user'? choose one of system, user, assistant"),
    (chat("system"), "no user message; add one"),
    (chat("assistant"), "no user message; add one"),
    (chat("assistant", "user"), "an assistant message before any user message; let the user speak first"),
    (
        chat("system", "assistant", "user"),
        "an assistant message before any user message; let the user speak first",
    ),
    (chat("user", "system"), "a system message after the first message; move it to the front"),
    (chat("user", "assistant", "assistant", "user"), "two assistant messages in a row; merge them into one"),
]


class TestErrors:
    @pytest.mark.parametrize(("row", "message"), INVALID_ROWS, ids=range(len(INVALID_ROWS)))
    def test_an_invalid_line_is_named(self, tmp_path: Path, row: Any, message: str) -> None:
        # The blank line counts: editors number it too.
        path = write(tmp_path / "a.jsonl", spec_bench(99, "fine"), "", row, spec_bench(98, "fine"))
        with pytest.raises(WorkloadError) as caught:
            load_workload(path)
        assert str(caught.value) == f"{path}:3: {message}"

    def test_an_id_used_twice(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.jsonl", spec_bench(1, "x"), spec_bench(2, "x"), chat("user", id="1"))
        with pytest.raises(WorkloadError) as caught:
            load_workload(path)
        assert str(caught.value) == f"{path}:3: id '1' stands at {path}:1 too; give each line its own id"

    def test_an_id_that_meets_the_id_of_a_question(self, tmp_path: Path) -> None:
        document = {"doc_id": "d", "document": "A", "questions": ["B"]}
        path = write(tmp_path / "a.jsonl", document, chat("user", id="d#1"))
        with pytest.raises(WorkloadError) as caught:
            load_workload(path)
        assert str(caught.value) == f"{path}:2: id 'd#1' stands at {path}:1 too; give each line its own id"

    @pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf"])
    def test_not_utf8(self, tmp_path: Path, start: bytes) -> None:
        path = tmp_path / "a.txt"
        path.write_bytes(start + b"fine\nalso fine\ncaf\xe9 noir\n")
        with pytest.raises(WorkloadError) as caught:
            load_workload(str(path))
        assert str(caught.value) == f"{path}:3: not UTF-8 (byte 0xe9); save the file as UTF-8"

    @pytest.mark.parametrize("content", [b"", b"\n \r\n\t\n", b"\xef\xbb\xbf"])
    @pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
    def test_no_requests(self, tmp_path: Path, name: str, content: bytes) -> None:
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(WorkloadError) as caught:
            load_workload(str(path))
        assert str(caught.value) == f"{path}: no requests; add at least one line"

    def test_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(WorkloadError) as caught:
            load_workload(str(tmp_path / "none.jsonl"))
        expected = f"{tmp_path}/none.jsonl: no such file; give a .jsonl or .txt file, or 'bundled'"
        assert str(caught.value) == expected

    def test_folder(self, tmp_path: Path) -> None:
        with pytest.raises(WorkloadError) as caught:
            load_workload(str(tmp_path))
        assert str(caught.value) == f"{tmp_path}: a folder; give a file in it"

    def test_a_path_through_a_file(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.txt", "x") + "/b.txt"
        with pytest.raises(WorkloadError) as caught:
            load_workload(path)
        expected = f"{path}: cannot be read (Not a directory); check its name and permissions"
        assert str(caught.value) == expected

    @settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        content=st.binary(max_size=60)
        | st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.sampled_from(["user", "a"]),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(
                    st.sampled_from(["id", "kind", "turns", "messages", "role", "content", "document", "questions"]),
                    inner,
                    max_size=4,
                )
            ),
            max_leaves=8,
        ).map(lambda value: json.dumps(value).encode())
    )
    def test_whatever_the_file_holds_it_loads_or_tells_one_line(self, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "a.jsonl"
        path.write_bytes(content)
        told, workload = "", None
        try:
            workload = load_workload(str(path))
        except WorkloadError as error:
            told = str(error)
        if workload is None:
            assert told.startswith(f"{path}:")
            assert "\n" not in told
        else:
            assert workload.num_requests >= 1
            assert all(m.content.strip() for c in workload.conversations for m in c.messages)


class TestOrder:
    def test_shuffle_is_a_deterministic_permutation(self) -> None:
        workload = small_workload()
        shuffled = workload.shuffled(3)
        assert shuffled == workload.shuffled(3)
        assert shuffled.conversations != workload.conversations
        assert shuffled.conversations != workload.shuffled(4).conversations
        assert sorted(c.id for c in shuffled.conversations) == sorted(c.id for c in workload.conversations)

    @pytest.mark.parametrize("seed", range(5))
    def test_shuffle_keeps_a_group_together_and_in_order(self, seed: int) -> None:
        shuffled = small_workload().shuffled(seed).conversations
        runs = [(group, [c.id for c in part]) for group, part in groupby(shuffled, key=lambda c: c.group)]
        assert len(runs) == 11
        assert [ids for group, ids in runs if group == "d1"] == [["d1#1", "d1#2", "d1#3"]]

    @pytest.mark.parametrize("seed", range(5))
    @pytest.mark.parametrize("num_requests", range(1, 22))
    def test_sample_is_exact_even_and_deterministic(self, num_requests: int, seed: int) -> None:
        workload = small_workload()
        sample = workload.sample(num_requests, seed)
        assert sample.num_requests == num_requests
        assert sample == workload.sample(num_requests, seed)
        assert len({c.id for c in sample.conversations}) == len(sample.conversations)
        counts = Counter(dict.fromkeys(workload.kinds, 0))
        for conversation in sample.conversations:
            counts[conversation.kind] += conversation.num_requests
        if num_requests <= 18:
            assert max(counts.values()) - min(counts.values()) <= 1
        else:  # The 6 requests of chats and of talks are used up; only questions are left.
            assert counts == {"chat": 6, "talk": 6, "docs": num_requests - 12}

    def test_sample_takes_whole_conversations_that_fit(self) -> None:
        for seed in range(10):
            sample = small_workload().sample(9, seed)
            assert [c.num_requests for c in sample.of_kind("talk").conversations] == [3]
            questions = sample.of_kind("docs").conversations
            assert [c.id[2:] for c in questions] == ["#1", "#2", "#3"]
            assert len({c.group for c in questions}) == 1

    def test_sample_cuts_a_conversation_at_a_request(self) -> None:
        messages = tuple(Message(role, text) for role, text in zip(("user", "assistant") * 2, "abcd", strict=True))
        workload = Workload("w", (Conversation("x", "talk", messages),))
        assert workload.sample(1, 0).conversations == (Conversation("x", "talk", messages[:1]),)
        assert workload.sample(2, 0) == workload

    def test_sample_keeps_the_order_of_the_workload(self) -> None:
        workload = small_workload()
        place = {c.id: i for i, c in enumerate(workload.conversations)}
        places = [place[c.id] for c in workload.sample(12, 1).conversations]
        assert places == sorted(places)

    def test_samples_of_other_seeds_differ(self) -> None:
        workload = small_workload()
        assert len({workload.sample(6, seed).fingerprint for seed in range(10)}) > 5

    @pytest.mark.parametrize("num_requests", [-1, 0, 22])
    def test_sample_beyond_the_workload_is_told(self, num_requests: int) -> None:
        with pytest.raises(WorkloadError) as caught:
            small_workload().sample(num_requests, 0)
        assert str(caught.value) == (
            f"cannot sample {num_requests} requests from 'small'; ask for 1 to 21, which is all it holds"
        )

    def test_at_most(self) -> None:
        workload = small_workload()
        assert all(workload.at_most(n, 3) is workload for n in (0, 21, 22))
        assert workload.at_most(20, 3) == workload.sample(20, 3)
        assert workload.at_most(1, 3) == workload.sample(1, 3) != workload.sample(1, 4)
        with pytest.raises(WorkloadError, match="cannot sample -1 requests"):
            workload.at_most(-1, 0)

    def test_of_kind(self) -> None:
        part = small_workload().of_kind("talk")
        assert (part.name, part.kinds, part.num_requests) == ("small/talk", ("talk",), 6)
        with pytest.raises(WorkloadError) as caught:
            small_workload().of_kind("chats")
        expected = "unknown kind 'chats'; did you mean 'chat'? choose one of chat, docs, talk"
        assert str(caught.value) == expected


class TestFingerprint:
    def test_it_is_16_hex_digits_of_the_content_and_not_of_the_name(self) -> None:
        workload = small_workload()
        renamed = Workload("other", workload.conversations)
        assert len(workload.fingerprint) == 16
        assert int(workload.fingerprint, 16) >= 0
        assert workload.fingerprint == renamed.fingerprint

    def test_it_stays_over_versions(self) -> None:
        workload = Workload("w", (Conversation("a", "chat", user("Grüße\u2028")),))
        assert workload.fingerprint == "92590ed4f90894f7"

    def test_every_part_of_the_content_changes_it(self) -> None:
        variants = [
            Conversation("a", "chat", user("x")),
            Conversation("b", "chat", user("x"), group="a"),
            Conversation("a", "code", user("x")),
            Conversation("a", "chat", user("y")),
            Conversation("a", "chat", (Message("assistant", "x"),)),
            Conversation("a", "chat", user("x"), group="g"),
            Conversation("a", "chat", user("x") + user("x")),
        ]
        assert len({Workload("w", (c,)).fingerprint for c in variants}) == len(variants)
        first, second = variants[0], variants[3]
        assert Workload("w", (first, second)).fingerprint != Workload("w", (second, first)).fingerprint
