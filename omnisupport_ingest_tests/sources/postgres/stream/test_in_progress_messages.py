"""Blocks of transactions in progress that a server at hand does not send, and a disk that is full."""

from __future__ import annotations

import resource
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from omnisupport_ingest.sources.postgres.protocol.frames import WAL_DATA_HEADER
from omnisupport_ingest.sources.postgres.protocol.pgoutput import (
    Begin,
    Commit,
    Decoder,
    InProgressMessage,
    LogicalMessage,
    Relation,
    RowChange,
    Truncate,
)
from omnisupport_ingest.sources.postgres.session.errors import ProtocolViolation
from omnisupport_ingest.sources.postgres.stream.in_progress import (
    NO_MESSAGE_YET,
    InProgress,
    RollbackUnclear,
    SpoolFailed,
)

TABLE = 16384


def wal_data(payload: bytes) -> bytes:
    return b"w" + bytes(WAL_DATA_HEADER - 1) + payload


def start(xid: int, *, first: bool = True) -> bytes:
    return wal_data(struct.pack("!cIB", b"S", xid, first))


def stop() -> bytes:
    return wal_data(b"E")


def commit(xid: int, lsn: int = 100) -> bytes:
    return wal_data(struct.pack("!cIBQQq", b"c", xid, 0, lsn, lsn + 8, 0))


def abort(xid: int, subxid: int) -> bytes:
    return wal_data(struct.pack("!cII", b"A", xid, subxid))


def relation(column: str, xid: int | None = None) -> bytes:
    """Table ``t`` with one column; of the transaction ``xid`` in progress, or of one that has committed."""
    of = b"" if xid is None else struct.pack("!I", xid)
    described = b"public\0t\0d" + struct.pack("!H", 1) + b"\1" + column.encode() + b"\0"
    return wal_data(b"R" + of + struct.pack("!I", TABLE) + described + struct.pack("!Ii", 25, -1))


def insert(value: str, xid: int | None = None) -> bytes:
    of = b"" if xid is None else struct.pack("!I", xid)
    row = b"N" + struct.pack("!H", 1) + b"t" + struct.pack("!I", len(value)) + value.encode()
    return wal_data(b"I" + of + struct.pack("!I", TABLE) + row)


def message(xid: int) -> bytes:
    return wal_data(struct.pack("!cIBQ", b"M", xid, 1, 50) + b"audit\0" + struct.pack("!I", 1) + b"x")


def plain(*messages: bytes) -> list[bytes]:
    """A transaction that is sent when it has committed."""
    begin = wal_data(struct.pack("!cQqI", b"B", 90, 0, 5))
    return [begin, *messages, wal_data(struct.pack("!cBQQq", b"C", 0, 90, 98, 0))]


def read(messages: list[bytes], folder: Path) -> list[str]:
    """What comes out, one word each: changes with the column that they are read as."""
    waiting, decoder, words = iter(messages), Decoder(), []
    in_progress = InProgress(lambda: next(waiting, None), folder)
    try:
        while (received := in_progress.read()) is not None:
            if received is NO_MESSAGE_YET:
                continue
            found = decoder.decode(received[WAL_DATA_HEADER:])
            if isinstance(found, Relation):
                in_progress.record_description(found.oid, received)
            elif isinstance(found, InProgressMessage):
                in_progress.take(found, received)
            elif isinstance(found, RowChange):
                words.append(f"{found.relation.columns[0].name}={(found.new or [''])[0]}")
            elif isinstance(found, Begin | Commit):
                words.append(f"{type(found).__name__} {found.commit_lsn}")
            else:
                assert isinstance(found, LogicalMessage | Truncate)
                words.append(type(found).__name__)
    finally:
        in_progress.close()
    return words


def test_transaction_in_blocks_between_others_is_given_out_whole_at_its_commit(tmp_path: Path) -> None:
    messages = [start(7), relation("a", 7), insert("1", 7), stop(), *plain(relation("a"), insert("2"))]
    messages += [start(8), relation("a", 8), insert("3", 8), stop()]
    messages += [start(7, first=False), insert("4", 7), message(7), stop(), commit(8, 100), commit(7, 200)]
    assert read(messages, tmp_path) == [
        *("Begin 90", "a=2", "Commit 90"),
        *("Begin 100", "a=3", "Commit 100"),
        *("Begin 200", "a=1", "a=4", "LogicalMessage", "Commit 200"),
    ]


def test_what_was_rolled_back_is_not_given_out(tmp_path: Path) -> None:
    parts = [start(7), relation("a", 7), insert("1", 7), insert("2", 8), stop(), abort(7, 8)]
    again = [start(7, first=False), relation("a", 7), insert("3", 7), insert("4", 9), stop()]
    assert read([*parts, *again, abort(7, 10), commit(7)], tmp_path) == [
        *("Begin 100", "a=1", "a=3", "a=4", "Commit 100")
    ]
    assert read([*parts, abort(7, 7), *plain(relation("a"), insert("5"))], tmp_path)[1:-1] == ["a=5"]
    assert read([start(7), relation("a", 8), insert("2", 8), stop(), abort(7, 8), commit(7)], tmp_path) == []


def test_description_that_was_sent_last_counts_although_another_is_given_out_later(tmp_path: Path) -> None:
    early = [start(7), relation("old", 7), insert("1", 7), stop()]
    between = plain(relation("new"), insert("2"))
    after = plain(insert("3"))
    assert [word for word in read([*early, *between, commit(7), *after], tmp_path) if "=" in word] == [
        *("new=2", "old=1", "new=3")
    ]
    # Of two that were in progress, too.
    other = [start(8), relation("new", 8), insert("2", 8), stop()]
    assert [
        word for word in read([*early, *other, commit(8), commit(7), *after], tmp_path) if "=" in word
    ] == [*("new=2", "old=1", "new=3")]
    # And what it has said itself after the other counts for itself, and from then on.
    more = [start(7, first=False), relation("newest", 7), insert("4", 7), stop()]
    ended = [*early, *between, *more, commit(7), *after]
    assert [word for word in read(ended, tmp_path) if "=" in word] == [
        *("new=2", "old=1", "newest=4", "newest=3")
    ]
    # But not if that was rolled back.
    undone = [start(7, first=False), relation("never", 8), insert("4", 8), stop(), abort(7, 8)]
    ended = [*early, *between, *undone, commit(7), *after]
    assert [word for word in read(ended, tmp_path) if "=" in word] == ["new=2", "old=1", "new=3"]


def test_message_before_something_that_is_rolled_back_is_doubtful_if_its_transaction_commits(
    tmp_path: Path,
) -> None:
    parts = [start(7), relation("a", 7), message(7), insert("1", 8), stop(), abort(7, 8)]
    with pytest.raises(RollbackUnclear):
        read([*parts, commit(7)], tmp_path)
    assert read([*parts, abort(7, 7)], tmp_path) == []
    # Sent after the end of what was rolled back, it is not of that.
    later = [start(7), relation("a", 7), insert("1", 8), stop(), abort(7, 8)]
    later += [start(7, first=False), message(7), stop(), commit(7)]
    assert read(later, tmp_path) == ["Begin 100", "LogicalMessage", "Commit 100"]


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([commit(7)], "transaction in progress 7 without its beginning"),
        ([start(7, first=False)], "transaction in progress 7 without its beginning"),
        ([start(7), start(8)], "type 'S' of a transaction in progress"),
        ([start(7), *plain()], "type 'B' of a transaction in progress"),
    ],
)
def test_blocks_outside_the_protocol_are_refused(messages: list[bytes], named: str, tmp_path: Path) -> None:
    with pytest.raises(ProtocolViolation, match=named):
        read(messages, tmp_path)


def test_roll_back_of_what_was_never_sent_changes_nothing(tmp_path: Path) -> None:
    assert read([abort(7, 7), abort(7, 8), start(9), stop(), commit(9)], tmp_path) == []


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """The system writes no file larger than that, as if the disk were full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_full_disk_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    rows = [insert("x" * 1000, 7)] * 500
    with files_up_to(100_000), pytest.raises(SpoolFailed) as failed:
        read([start(7), relation("a", 7), *rows, stop(), commit(7)], tmp_path)
    assert str(failed.value).startswith(
        f"Transaction 7, which is in progress, cannot be kept in {tmp_path}: "
    )
    assert list(tmp_path.iterdir()) == []
