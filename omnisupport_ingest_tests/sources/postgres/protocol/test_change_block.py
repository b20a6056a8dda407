"""Changes made into columns all at once are what each of them is alone, whatever their values."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import cycle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnisupport_ingest.compiled import compiled_rows
from omnisupport_ingest.landing.columns import events_table
from omnisupport_ingest.landing.rows import LandedEvent
from omnisupport_ingest.sources.postgres.protocol import change_block
from omnisupport_ingest.sources.postgres.protocol import frames as frames_module
from omnisupport_ingest.sources.postgres.protocol.changes import ChangeCollector
from omnisupport_ingest.sources.postgres.protocol.frames import WAL_DATA_HEADER, Frames, Rows, Transactions
from omnisupport_ingest.sources.postgres.protocol.pgoutput import (
    UNCHANGED,
    Begin,
    Decoder,
    LogicalMessage,
    Relation,
    RelationColumn,
    RowChange,
    Unchanged,
    Value,
)
from omnisupport_ingest.sources.postgres.protocol.row_events import EventHeader, RowSchema, row_events
from omnisupport_ingest.sources.postgres.protocol.text_columns import PADDING
from omnisupport_ingest.sources.postgres.protocol.walstream import POSTGRES_EPOCH
from omnisupport_ingest.sources.postgres.session.errors import ProtocolViolation
from omnisupport_ingest.sources.postgres.stream.batches import by_window
from omnisupport_ingest.windows import WindowGrid, WindowSize

NOON = datetime(2026, 3, 2, 12, 0, tzinfo=UTC)
LSN = 7


def relation(oid: int, table: str, identity: str, columns: Sequence[str], key: Sequence[str]) -> Relation:
    described = tuple(RelationColumn(name, 25, -1, name in key or identity == "f") for name in columns)
    return Relation(oid, "public", table, identity, described)


TICKETS = relation(16384, "tickets", "d", ("id", 'a "quoted\\name', "größe"), ("id",))
COMMENTS = relation(16385, "comments", "i", ("no", "ticket", "body"), ("ticket", "no"))
AGENTS = relation(16386, "agents", "f", ("handle", "team", "skills"), ())
NOTES = relation(16387, "notes", "f", ("text",), ())
PARTS = relation(16388, "parts", "d", ("id", "v"), ("id",))
LEDGER = relation(16389, "ledger", "f", ("id", "v", "w"), ())
TABLES = [TICKETS, COMMENTS, AGENTS, NOTES, PARTS, LEDGER]
KEYS = {
    ("public", "comments"): ("ticket", "no"),
    ("public", "agents"): ("handle",),
    ("public", "parts"): ("id",),
    ("public", "ledger"): ("id",),
}
PARTITIONED = {"parts", "ledger"}
"""Their keys are first. An old row without one is refused, and shown to be by real partitions."""


def is_partitioned(relation: Relation) -> bool:
    return relation.table in PARTITIONED


def encoded(kind: bytes, relation: Relation, *tuples: tuple[bytes, Sequence[Value]], lsn: int = LSN) -> bytes:
    """A change as ``WAL_DATA`` message: PostgreSQL manual, "Logical Replication Message Formats"."""
    message = b"w" + struct.pack("!QQQ", lsn, lsn, 0) + kind + struct.pack("!I", relation.oid)
    for marker, values in tuples:
        message += marker + struct.pack("!H", len(values)) + b"".join(map(_encoded_value, values))
    return message


def _encoded_value(value: Value) -> bytes:
    if value is None:
        return b"n"
    if isinstance(value, Unchanged):
        return b"u"
    text = value.encode()
    return b"t" + struct.pack("!I", len(text)) + text


# PostgreSQL's texts have no NUL; lone surrogates are no UTF-8.
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")) | st.text(
    st.sampled_from("\"\\\b\t\n\v\f\r\x01\x1b\x7f\x85\u2028é🐘'/ntu"), max_size=6
)


@dataclass(frozen=True)
class Step:
    """A step of a stream: a change of a row, or one of the other things that take an ordinal."""

    message: bytes | None = None
    truncated: tuple[Relation, ...] = ()
    commits: bool = False


@st.composite
def changes(draw: st.DrawFn) -> Step:
    table = draw(st.sampled_from(TABLES))
    columns = len(table.columns)
    values: st.SearchStrategy[Value] = st.one_of(TEXTS, st.none())
    identity = [column.in_identity for column in table.columns]

    def row(*, unchanged: bool) -> list[Value]:
        return [
            draw(values if in_identity or not unchanged else st.one_of(values, st.just(UNCHANGED)))
            for in_identity in identity
        ]

    def old_row(sent: Sequence[bool]) -> list[Value]:
        found = [draw(values) if each else None for each in sent]
        return [draw(TEXTS), *found[1:]] if table.table in PARTITIONED else found

    whole = table.replica_identity == "f"
    kind = draw(st.sampled_from("IUUUDD"))
    if kind == "I":
        return Step(encoded(b"I", table, (b"N", row(unchanged=False))))
    old = (b"O", old_row([True] * columns)) if whole else (b"K", old_row(identity))
    if kind == "D":
        return Step(encoded(b"D", table, old))
    new = row(unchanged=True)
    if whole:
        # Most updates leave the key alone.
        if draw(st.booleans()):
            new = [new[i] if draw(st.booleans()) else old[1][i] for i in range(columns)]
        new = [UNCHANGED if draw(st.integers(0, 9)) == 0 else value for value in new]
    sends_old = whole or draw(st.integers(0, 3)) == 0
    return Step(encoded(b"U", table, *([old] if sends_old else []), (b"N", new)))


STREAMS = st.lists(
    st.one_of(
        changes(),
        changes(),
        changes(),
        st.just(Step(commits=True)),
        st.sampled_from([Step(truncated=(TICKETS, AGENTS)), Step(truncated=())]),
    ),
    max_size=25,
)


def one_by_one(steps: Sequence[Step]) -> list[LandedEvent]:
    """The events of ``steps``, each made alone and numbered by counting."""
    schemas = {
        each.oid: RowSchema(each, KEYS.get(("public", each.table)), partitioned=is_partitioned(each))
        for each in TABLES
    }
    decoder = Decoder(TABLES)
    events: list[LandedEvent] = []
    number = index = 0
    for step in steps:
        at, xid = NOON + timedelta(seconds=number), 700 + number
        if step.commits:
            number, index = number + 1, 0
        elif step.message is not None:
            change = decoder.decode(step.message[WAL_DATA_HEADER:])
            assert isinstance(change, RowChange)
            place = EventHeader(3, 1000 + number, 2 * index, at, xid, LSN)
            events += row_events(schemas[change.relation.oid], change, place)
            index += 1
        elif step.truncated:
            for each in step.truncated:
                nothing = (None,) * 6
                row = (3, 1000 + number, 2 * index, "t", at, xid, LSN, "public", each.table, *nothing)
                events.append(LandedEvent(*row))
                index += 1
        else:
            content = '{"prefix":"p\\"","content":"AP8="}'
            row = (3, 1000 + number, 2 * index, "m", at, xid, 9, "", "", None, None, content)
            events.append(LandedEvent(*row, None, None, None))
            index += 1
    return events


def all_at_once(steps: Sequence[Step], take: Callable[[int], bool]) -> list[LandedEvent]:
    """The same through blocks, one of which is taken after each step that ``take`` is true for."""
    collector = ChangeCollector(3, KEYS, is_partitioned)
    for table in TABLES:
        collector.describe(table)
    found: list[LandedEvent] = []

    def take_block() -> None:
        block = collector.take()
        if block.rows:
            highest_ts = block.highest_ts
            rows = block.table().to_pylist()
            assert highest_ts == max(row["source_ts"] for row in rows)
            found.extend(LandedEvent(**row) for row in rows)

    number = 0
    collector.begin(Begin(1000, NOON, 700))
    for i, step in enumerate(steps):
        if step.commits:
            number += 1
            collector.begin(Begin(1000 + number, NOON + timedelta(seconds=number), 700 + number))
        elif step.message is not None:
            collector.add_row(step.message)
        elif step.truncated:
            collector.add_truncate([(each.schema, each.table) for each in step.truncated], LSN)
        else:
            collector.add_message(LogicalMessage(True, 9, 'p"', b"\0\xff"))
        if take(i):
            take_block()
    take_block()
    return found


@given(STREAMS, st.sets(st.integers(0, 25)))
def test_a_block_holds_what_its_changes_are_alone(steps: list[Step], taken: set[int]) -> None:
    assert all_at_once(steps, taken.__contains__) == one_by_one(steps)


@given(STREAMS, st.integers(1, 9))
def test_whole_transactions_hold_what_their_changes_are_alone(steps: list[Step], a_block: int) -> None:
    steps = [each for each in steps if each.commits or each.message is not None]
    sent: list[list[bytes]] = [[]]
    for step in steps:
        if step.message is None:
            sent.append([])
        else:
            sent[-1].append(step.message)
    frames = Frames()
    for number, messages in enumerate(sent):
        micros = (NOON + timedelta(seconds=number) - POSTGRES_EPOCH) // timedelta(microseconds=1)
        begin = struct.pack("!cQqI", b"B", 1000 + number, micros, 700 + number)
        commit = struct.pack("!cBQQq", b"C", 0, 1000 + number, 1001 + number, micros)
        for message in (bytes(25) + begin, *messages, bytes(25) + commit):
            frames.add(b"w" + message[1:])
    frames.received(0)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(frames_module, "_MIN_TRANSACTIONS", 1)
        whole = frames.transactions()
    assert whole is not None and whole.total == len(sent)
    collector = ChangeCollector(3, KEYS, is_partitioned)
    for table in TABLES:
        collector.describe(table)
    found: list[LandedEvent] = []
    for first in range(0, len(sent), a_block):
        collector.add_transactions(whole.between(first, min(len(sent), first + a_block)))
        if first % 2 or first + a_block >= len(sent):
            block = collector.take()
            if block.rows:
                found.extend(LandedEvent(**row) for row in block.table().to_pylist())
    assert found == one_by_one(steps)


@given(STREAMS, st.lists(st.integers(0, 4), min_size=1, max_size=5), st.binary(max_size=5))
def test_changes_may_lie_in_several_buffers_among_other_bytes(
    steps: list[Step], sizes: list[int], between: bytes
) -> None:
    """A size of 0 stands for a message that comes alone."""
    messages = [step.message for step in steps if step.message is not None]
    collector = ChangeCollector(3, KEYS, is_partitioned)
    for table in TABLES:
        collector.describe(table)
    collector.begin(Begin(1000, NOON, 700))
    left, take = list(messages), cycle(sizes)
    while left:
        count = next(take)
        some, left = left[: max(1, count)], left[max(1, count) :]
        if not count:
            collector.add_row(some[0])
            continue
        data, starts = between, list[int]()
        for message in some:
            starts.append(len(data))
            data += message + between
        begins = np.array(starts)
        ends = begins + np.array([len(message) for message in some])
        collector.add_rows(Rows(memoryview(data + PADDING), begins, ends))
    block = collector.take()
    found = [LandedEvent(**row) for row in block.table().to_pylist()] if block.rows else []
    assert found == one_by_one([Step(each) for each in messages])


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30))
def test_transactions_are_parted_by_their_windows(minutes: list[int]) -> None:
    numbers = np.arange(len(minutes))
    rows = Rows(b"", numbers, numbers)
    micros = np.array(minutes) * 60_000_000
    whole = Transactions(rows, numbers, numbers, numbers + 1, micros, numbers)

    def window_of(transaction: Begin) -> str:
        return str(transaction.commit_ts.minute // 2)

    found = list(by_window(whole, window_of))
    assert [window for window, some in found for _ in some.firsts] == [str(each // 2) for each in minutes]
    assert [xid for _, some in found for xid in some.xids] == numbers.tolist()


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=30))
def test_times_out_of_range_on_both_sides_take_nothing_between_along(days: list[int]) -> None:
    grid = WindowGrid(WindowSize(60), NOON - timedelta(days=1))
    times = [NOON + timedelta(days=each) for each in days]
    numbers = np.arange(len(days))
    micros = np.array([(each - POSTGRES_EPOCH) // timedelta(microseconds=1) for each in times])
    whole = Transactions(Rows(b"", numbers, numbers), numbers, numbers, numbers + 1, micros, numbers)
    found = by_window(whole, lambda transaction: grid.key_of(transaction.commit_ts, NOON))
    alone = [grid.key_of(each, NOON) for each in times]
    assert [window for window, some in found for _ in some.firsts] == alone


@given(st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=5))
def test_any_text_is_escaped_as_orjson_escapes_it(rows: list[tuple[str, str]]) -> None:
    steps = [Step(encoded(b"I", TICKETS, (b"N", [key, text, None]))) for key, text in rows]
    assert all_at_once(steps, lambda _: False) == one_by_one(steps)


@pytest.mark.skipif(compiled_rows is None, reason="installed without a C compiler")
def test_usual_changes_do_not_go_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> tuple[LandedEvent, ...]:
        raise AssertionError("a usual change went one by one")

    old, new = ["1", "net", "a"], ["1", UNCHANGED, '"b"']
    steps = [
        Step(encoded(b"I", TICKETS, (b"N", ["1", "x", None]))),
        Step(encoded(b"U", TICKETS, (b"N", ["1", "y", UNCHANGED]))),
        Step(encoded(b"D", TICKETS, (b"K", ["1", None, None]))),
        Step(encoded(b"U", AGENTS, (b"O", old), (b"N", new))),
        Step(encoded(b"D", AGENTS, (b"O", old))),
    ]
    expected = one_by_one(steps)
    monkeypatch.setattr(change_block, "row_events", refuse)
    assert all_at_once(steps, lambda _: False) == expected


def block_of(*messages: bytes) -> change_block.ChangeBlock:
    collector = ChangeCollector(1, KEYS)
    collector.describe(TICKETS)
    collector.begin(Begin(1000, NOON, 700))
    for message in messages:
        collector.add_row(message)
    return collector.take()


GOOD = encoded(b"I", TICKETS, (b"N", ["1", "x", "y"]))


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        (encoded(b"I", COMMENTS, (b"N", ["1", "x", "y"])), "relation 16385"),
        (GOOD[:-6] + b"b\x00\x00\x00\x01y", "kind 'b'"),
    ],
)
def test_message_outside_the_protocol_is_refused_among_good_ones(bad: bytes, named: str) -> None:
    with pytest.raises(ProtocolViolation, match=named):
        block_of(GOOD, bad, GOOD).table()


@pytest.mark.parametrize("position", range(len(GOOD) - 12, len(GOOD)))
def test_bytes_that_are_no_text_are_never_landed(position: int) -> None:
    damaged = GOOD[:position] + b"\xff" + GOOD[position + 1 :]
    with pytest.raises((UnicodeDecodeError, ProtocolViolation, IndexError, struct.error)):
        block_of(GOOD, damaged, GOOD).table()


def test_a_table_described_anew_has_its_new_columns_from_there_on() -> None:
    collector = ChangeCollector(1, KEYS)
    collector.describe(TICKETS)
    collector.begin(Begin(1000, NOON, 700))
    collector.add_row(GOOD)
    before = collector.take()
    collector.describe(TICKETS._replace(columns=(*TICKETS.columns, RelationColumn("new", 25, -1, False))))
    collector.add_row(encoded(b"I", TICKETS, (b"N", ["2", "x", "y", "z"])))
    after = collector.take()
    # Made late, as a writer's thread does.
    rows = [row for block in (before, after) for row in block.table().to_pylist()]
    assert ['"new":"z"' in row["after"] for row in rows] == [False, True]
    assert [row["ordinal"] for row in rows] == [0, 2]


def test_events_table_keeps_every_field() -> None:
    (event,) = one_by_one([Step(encoded(b"U", TICKETS, (b"N", ["1", "x", UNCHANGED])))])
    assert [LandedEvent(**row) for row in events_table([event]).to_pylist()] == [event]
