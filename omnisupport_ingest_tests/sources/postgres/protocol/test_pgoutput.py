"""The decoder on messages that a healthy server never sends, and COPY's escapes."""

from __future__ import annotations

import gc

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnisupport_ingest.compiled import compiled_rows
from omnisupport_ingest.sources.postgres.protocol import copy_rows
from omnisupport_ingest.sources.postgres.protocol.copy_rows import copied_rows, copy_lines, parse_row
from omnisupport_ingest.sources.postgres.protocol.copy_socket import Lines
from omnisupport_ingest.sources.postgres.protocol.pgoutput import Decoder
from omnisupport_ingest.sources.postgres.protocol.row_events import row_image, row_key
from omnisupport_ingest.sources.postgres.session.errors import ProtocolViolation
from omnisupport_ingest_tests.sources.postgres.protocol.test_copy_socket import into
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest

COMPILED = pytest.mark.skipif(compiled_rows is None, reason="installed without a C compiler")


QUERY = "SELECT id, word FROM words"


@pytest.mark.parametrize(
    ("message", "named"),
    [
        (b"", "type b''"),
        (b"P\x00\x00\x00\x01", "type b'P'"),
        (b"I\x00\x00\x40\x00N\x00\x00", "relation 16384"),
        (b"I\x00\x00\x40\x00N\x00\x01b\x00\x00\x00\x01x", "kind 'b'"),
    ],
)
def test_message_outside_the_protocol_is_refused(message: bytes, named: str) -> None:
    with pytest.raises(ProtocolViolation, match=named):
        Decoder().decode(message)


def test_copy_text_tells_null_from_empty_and_undoes_escapes() -> None:
    assert parse_row(r'a""\N"\\N"x\ty\nz"say \"no\" \\') == [
        "a",
        "",
        None,
        "\\N",
        "x\ty\nz",
        'say "no" \\',
    ]
    assert parse_row('a"') == ["a", ""]


def copied(value: str | None) -> str:
    """``value`` as COPY's text format writes it (PostgreSQL manual, COPY, "Text Format")."""
    if value is None:
        return "\\N"
    for plain, escape in zip('\\\b\f\n\r\t\v"', '\\bfnrtv"', strict=True):
        value = value.replace(plain, "\\" + escape)
    return value


COPIED = (
    st.none()
    | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)
    | st.lists(st.sampled_from('"\\\b\t\n\v\f\r\x01\x1b\x7fvNaé'), max_size=8).map("".join)
    | st.lists(st.sampled_from('"\\N'), max_size=8).map("".join)
)


@COMPILED
@given(
    st.lists(st.tuples(COPIED, COPIED, COPIED), min_size=1, max_size=8), st.none() | st.integers(1000, 1030)
)
def test_copied_lines_all_at_once_are_what_each_is_alone(
    rows: list[tuple[str | None, ...]], long: int | None
) -> None:
    names = ("id", 'a "b"', "größe")
    if long is not None:
        # Escapes lie across what is read at a time.
        rows = [(*row[:2], "x" * long + (row[2] or "")) for row in rows]
    lines = ['"'.join(map(copied, row)).encode() + b"\n" for row in rows]
    assert [tuple(parse_row(line.decode()[:-1])) for line in lines] == rows
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(copy_rows, "one_by_one")
        found = copied_rows(Lines.of(b"".join(lines)), names, [2, 0], range(3))
    keys, images = found.keys, found.images
    assert keys.to_pylist() == [row_key([row[2], row[0]]) for row in rows]
    assert images.to_pylist() == [row_image(names, list(row)) for row in rows]
    alone = copy_rows.one_by_one(b"".join(lines), names, [2, 0])
    assert (alone.keys, alone.images) == (keys, images)
    for column in range(3):
        assert [escape(value) for value in alone.texts(column).to_pylist()] == found.texts(column).to_pylist()


@COMPILED
@pytest.mark.parametrize("count", [1, 2, 3, 31, 500, 1024])
def test_backslashes_before_a_quote_say_whether_it_ends_a_value(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines, names, row = rows_with_backslashes(count)
    with monkeypatch.context() as patch:
        patch.delattr(copy_rows, "one_by_one")
        found = copied_rows(Lines.of(lines), names, [1])
    assert found.images.to_pylist() == [row_image(names, row)] * 2
    assert found.keys.to_pylist() == [row_key(row[1:2])] * 2


def rows_with_backslashes(count: int) -> tuple[bytes, tuple[str, ...], list[str | None]]:
    """Two lines of the same row, the names of its columns, and the row."""
    many = "\\" * count
    row: list[str | None] = [many, f'{many}"', f'"{many}', None, f'{many}"{many}N']
    return ('"'.join(map(copied, row)).encode() + b"\n") * 2, ("a", "b", "c", "d", "e"), row


def escape(value: str | None) -> str | None:
    return None if value is None else orjson.dumps(value)[1:-1].decode()


@COMPILED
@pytest.mark.parametrize("column", [0, 1, 2])
def test_long_values_are_read_all_at_once(column: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[list[str | None]] = [[f'{n}\n"\v', None, "\x01"] for n in range(7)]
    for n, row in enumerate(rows):
        row[column] = chr(ord("a") + n) * (100_000 + n)
    lines = b"".join('"'.join(map(copied, row)).encode() + b"\n" for row in rows)
    with monkeypatch.context() as patch:
        patch.delattr(copy_rows, "one_by_one")
        found = copied_rows(Lines.of(lines), ("a", "b", "c"), [0])
    assert found.images.to_pylist() == [row_image(("a", "b", "c"), row) for row in rows]
    assert found.keys.to_pylist() == [row_key(row[:1]) for row in rows]


@pytest.mark.parametrize("lines", [b'a"b\nc\n', b'a\nb"c"d\n', b'a"b"c"d\n'])
def test_lines_of_other_columns_are_not_taken_all_at_once(lines: bytes) -> None:
    with pytest.raises(ValueError, match=r"zip|index|columns"):
        copied_rows(Lines.of(lines), ("a", "b"), [0])


def test_a_table_of_one_column_is_copied_too() -> None:
    found = copied_rows(Lines.of(b"\n\\N\nx\n"), ("id",), [0])
    keys, images = found.keys, found.images
    assert keys.to_pylist() == ['[""]', "[null]", '["x"]']
    assert images.to_pylist() == ['{"id":""}', '{"id":null}', '{"id":"x"}']


def test_a_copy_that_is_given_up_hands_on_nothing_more(
    source: SourceUnderTest,
) -> None:
    source.sql(
        "CREATE TABLE words (id int, word text)",
        "INSERT INTO words SELECT i, 'x' FROM generate_series(1, 99) i",
    )
    seen: list[bytes] = []

    def give_up(lines: Lines) -> None:
        seen.append(lines.joined())
        raise KeyError("stop")

    with source.connected() as connection, pytest.raises(KeyError, match="stop"):
        copy_lines(connection, QUERY, doing="reading words", block_bytes=100, lines=give_up)
    gc.collect()
    (only,) = seen
    assert only.startswith(b'1"x\n') and only.endswith(b"\n")


def test_copied_lines_are_handed_on_whole_and_all_of_them(
    source: SourceUnderTest,
) -> None:
    source.sql(
        "CREATE TABLE words (id int, word text)",
        "INSERT INTO words SELECT i, repeat('x', i * 7 % 250) FROM generate_series(1, 300) i",
    )
    seen: list[bytes] = []
    with source.connected() as connection:
        copy_lines(connection, QUERY, doing="reading words", block_bytes=100, lines=into(seen))
    assert len(seen) > 10
    assert all(block.endswith(b"\n") for block in seen)
    rows = [line.split('"') for line in b"".join(seen).decode().splitlines()]
    expected = [(i, i * 7 % 250) for i in range(1, 301)]
    assert sorted((int(number), len(word)) for number, word in rows) == expected
