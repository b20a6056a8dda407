"""What somebody else wrote is read, or refused by one of two errors, and never waited for."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from omnisupport_ingest.durable import LockUnusable, open_lock
from omnisupport_ingest.foreign import (
    MAX_NESTING,
    Unreadable,
    parse_json,
    parse_row,
    printable,
    read_file,
    texts_only,
)
from omnisupport_ingest.json_values import FieldProblem, from_note, from_plain
from omnisupport_ingest.records import read_note
from omnisupport_ingest_tests.examples import examples
from omnisupport_ingest_tests.foreign_bytes import IN_THE_PLACE, in_time, mutated

READERS: list[Callable[[str], Any]] = [parse_json, parse_row, texts_only]
DOCUMENTS: list[Any] = [{"a": [1, 2.5, "x", None, True], "b": {"c": {}}}, [], "text", 5]


@pytest.mark.parametrize("read", READERS)
@settings(max_examples=examples(150))
@given(content=mutated(DOCUMENTS))
def test_any_text_is_a_document_or_refused(read: Callable[[str], Any], content: bytes) -> None:
    with in_time():
        try:
            document = read(content.decode(errors="replace"))
        except Unreadable as why:
            assert "\n" not in str(why)
        else:
            # What was read can be written again, by whatever needs it.
            json.dumps(document, ensure_ascii=False, default=str).encode()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 100_000, "nested deeper than 200 levels"),
        ("[" * (MAX_NESTING + 1) + "]" * (MAX_NESTING + 1), "nested deeper than 200 levels"),
        ('{"name": 1, "name": 2}', "stands twice"),
        ('"\\ud800"', "half of a surrogate pair"),
        ("[NaN]", "NaN is not JSON"),
        ("1" * 5000, "too many digits"),
        ("1e999", "larger than any"),
        ('{"a" 1}', "line 1 column 6"),
        ("", "Expecting value"),
    ],
)
def test_a_document_is_refused_with_the_reason(text: str, words: str) -> None:
    with in_time(), pytest.raises(Unreadable, match=words):
        parse_json(text)
    with pytest.raises(Unreadable, match="byte 3 is not UTF-8"):
        parse_json(b"[]\xff")


def test_the_deepest_document_is_read_wherever_python_stands() -> None:
    deepest = "[" * MAX_NESTING + "]" * MAX_NESTING

    def called_deep(left: int) -> None:
        if left:
            called_deep(left - 1)
        else:
            assert parse_json(deepest) == parse_row(deepest) == texts_only(deepest)

    called_deep(400)


def test_brackets_in_texts_are_no_nesting() -> None:
    for text in ('{"a": "' + "[" * 5000 + '"}', '["\\"' + "{" * 5000 + '"]'):
        assert parse_json(text) == parse_row(text) == texts_only(text) == json.loads(text)


def test_the_values_of_a_row_keep_every_digit() -> None:
    long = "9" * 5000
    assert parse_row(f"[1, 1.10, {long}, 1e5]") == [1, Decimal("1.10"), Decimal(long), Decimal("1e5")]
    assert str(parse_row("1.10")) == "1.10"
    assert texts_only(f"[{long}, 1.10, null, true]") == [long, "1.10", None, True]


def test_a_row_has_no_nul_character_and_json_within_a_text_may_write_one() -> None:
    with pytest.raises(Unreadable, match="NUL"):
        parse_row('{"a": "b\\u0000"}')
    assert parse_row('{"a": "b\\\\u0000"}') == {"a": "b\\u0000"}


def test_of_a_row_no_name_is_told() -> None:
    with pytest.raises(Unreadable) as refused:
        parse_row('{"secret": 1, "secret": 2}')
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("what", IN_THE_PLACE)
def test_whatever_stands_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path, what: str) -> None:
    path = tmp_path / "record.json"
    IN_THE_PLACE[what](path)
    with in_time(), pytest.raises((OSError, Unreadable)):
        parse_json(read_file(path, limit=1_000_000))
    with in_time(), pytest.raises((OSError, Unreadable)):
        read_note(Note, path)


def test_a_file_larger_than_allowed_or_without_a_possible_name_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.write_bytes(b"x" * 11)
    assert len(read_file(path, limit=11)) == 11
    with pytest.raises(Unreadable, match="larger than 10 bytes"):
        read_file(path, limit=10)
    with pytest.raises(Unreadable, match="NUL"):
        read_file(Path("a\0b"))


@pytest.mark.parametrize("what", ["a pipe", "a folder", "a loop of links", "a link to an endless device"])
@pytest.mark.parametrize("create", [True, False])
def test_a_lock_is_a_file_and_what_is_none_is_not_waited_for(tmp_path: Path, what: str, create: bool) -> None:
    path = tmp_path / "a.lock"
    IN_THE_PLACE[what](path)
    with in_time(), pytest.raises(LockUnusable, match=r"a\.lock should be a lock file"):
        open_lock(path, create=create)


def test_a_name_that_is_not_utf_8_can_be_told() -> None:
    assert printable(Path(os.fsdecode(b"day-\xff.jsonl"))) == "day-\\xff.jsonl"


@dataclass(frozen=True)
class Part:
    size: int


@dataclass(frozen=True)
class Note:
    at: datetime
    reason: str
    parts: tuple[Part, ...] = ()
    share: float = 0.0
    about: dict[str, Part | None] = field(default_factory=dict)


NOTE = {
    "at": "2026-11-20T15:00:00+00:00",
    "reason": "why",
    "parts": [{"size": 1}],
    "share": 0.5,
    "about": {"a": {"size": 2}, "b": None},
}


@settings(max_examples=examples(150))
@given(mutated([NOTE]))
def test_a_note_is_what_its_type_says_or_refused(content: bytes) -> None:
    with in_time():
        try:
            note = from_note(Note, parse_json(content))
        except Unreadable:
            return
        assert note.at.astimezone(UTC) == note.at and isinstance(note.reason, str)
        assert all(type(part.size) is int for part in note.parts)
        assert type(note.share) is float


def test_a_note_may_be_of_another_version_and_a_record_may_not() -> None:
    newer = {**NOTE, "new": 1}
    older = {"at": NOTE["at"], "reason": "why"}
    assert from_note(Note, newer) == from_note(Note, NOTE) == from_plain(Note, NOTE)
    assert from_note(Note, older) == Note(datetime(2026, 11, 20, 15, tzinfo=UTC), "why")
    for document in (newer, older):
        with pytest.raises(FieldProblem):
            from_plain(Note, document)
    with pytest.raises(FieldProblem, match="reason is missing"):
        from_note(Note, {"at": NOTE["at"]})


@pytest.mark.parametrize(
    "at", ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00", "2026-01-01", "x" * 500]
)
def test_a_time_beyond_the_calendar_or_without_a_zone_is_no_time(at: str) -> None:
    with pytest.raises(FieldProblem, match="at is ") as refused:
        from_note(Note, {**NOTE, "at": at})
    assert len(str(refused.value)) < 200
