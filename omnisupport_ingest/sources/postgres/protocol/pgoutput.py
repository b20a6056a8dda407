"""Decodes ``pgoutput`` messages, protocol versions 1 and 2. Values keep the exact text that was sent.

Formats: PostgreSQL manual, "Logical Replication Message Formats". The decoder takes one message after
another. It remembers only the described relations; everything else is a function of the message alone.
Messages of a transaction in progress (protocol 2, between ``StreamStart`` and ``StreamStop``) reach the
decoder only after the commit, through ``in_progress``.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Final, NamedTuple

from omnisupport_ingest.sources.postgres.protocol.frames import Transactions
from omnisupport_ingest.sources.postgres.protocol.walstream import from_microseconds
from omnisupport_ingest.sources.postgres.session.errors import ProtocolViolation


class Unchanged:
    """The type of ``UNCHANGED``."""

    def __repr__(self) -> str:
        return "UNCHANGED"


UNCHANGED: Final = Unchanged()
"""Stands for a TOASTed value that the server did not send because it did not change."""

Value = str | None | Unchanged


class RelationColumn(NamedTuple):
    """A column as the stream describes it: ``type_oid`` and ``type_modifier`` as in ``pg_attribute``."""

    name: str
    type_oid: int
    type_modifier: int
    in_identity: bool


class Relation(NamedTuple):
    """A table as the stream describes it: before the table's first change, and after the table was altered.

    ``replica_identity``: ``d`` default, ``n`` nothing, ``f`` full, ``i`` index.
    """

    oid: int
    schema: str
    table: str
    replica_identity: str
    columns: tuple[RelationColumn, ...]


class Begin(NamedTuple):
    """The start of a transaction. All messages up to ``Commit`` belong to it."""

    commit_lsn: int
    commit_ts: datetime
    xid: int


class Commit(NamedTuple):
    """The end of a transaction. ``end_lsn``: the LSN just after its commit record."""

    commit_lsn: int
    end_lsn: int
    commit_ts: datetime


class RowChange(NamedTuple):
    """The change of one row. ``kind``: ``I`` insert, ``U`` update, ``D`` delete.

    ``old``: the old row; None if not sent. ``old_is_key``: ``old`` carries only the columns of the replica
    identity; its other values are None because they were not sent. ``new``: the new row; None for a delete.
    """

    kind: str
    relation: Relation
    old: list[Value] | None
    old_is_key: bool
    new: list[Value] | None


class OversizedRow(NamedTuple):
    """The change of a row that is too long to read into memory. ``Frames`` makes it, not the server.

    ``kind`` and ``relation`` as in ``RowChange``. ``size``: size of the change's message in bytes.
    """

    kind: str
    relation: Relation
    size: int


class Truncate(NamedTuple):
    """One TRUNCATE of one or more tables, in the order in which the server lists them."""

    relations: tuple[Relation, ...]


class LogicalMessage(NamedTuple):
    """A message of ``pg_logical_emit_message``. If not ``transactional``, it is in no transaction."""

    transactional: bool
    lsn: int
    prefix: str
    content: bytes


class StreamStart(NamedTuple):
    """The start of a block: the messages up to ``StreamStop`` belong to ``xid``, which has not committed.

    ``first``: this is the first block of the transaction.
    """

    xid: int
    first: bool


class StreamStop(NamedTuple):
    """The end of a block. The transaction may have more blocks."""


class StreamCommit(NamedTuple):
    """The commit of a transaction that was sent in blocks. The other fields are those of ``Commit``."""

    xid: int
    commit_lsn: int
    end_lsn: int
    commit_ts: datetime


class StreamAbort(NamedTuple):
    """The rollback of sub-transaction ``subxid`` of ``xid``. If both are the same, the whole transaction."""

    xid: int
    subxid: int


InProgressMessage = StreamStart | StreamStop | StreamCommit | StreamAbort
Message = Begin | Commit | RowChange | OversizedRow | Truncate | LogicalMessage | Relation | InProgressMessage

_BEGIN = struct.Struct("!xQqI")
_COMMIT = struct.Struct("!xxQQq")
_STREAM_START = struct.Struct("!xIB")
_STREAM_COMMIT = struct.Struct("!xIxQQq")
_STREAM_ABORT = struct.Struct("!xII")
_OID = struct.Struct("!xI")
_COLUMN_TYPE = struct.Struct("!Ii")
_COUNT = struct.Struct("!H")
_LENGTH = struct.Struct("!I")
_SIZE = struct.Struct("!Q")
_TRUNCATE = struct.Struct("!xIB")
_LOGICAL_MESSAGE = struct.Struct("!xBQ")
_OLD_KEY, _OLD_ROW = ord("K"), ord("O")
_TEXT, _NULL, _UNCHANGED = ord("t"), ord("n"), ord("u")
_IN_IDENTITY = 1

ROW_KINDS = frozenset(b"IUD")
"""First bytes of the messages that decode to ``RowChange``."""

OVERSIZED_KINDS = frozenset(b"iud")
"""First bytes of the messages that decode to ``OversizedRow``."""


class Decoder:
    """Decodes the messages of one stream, in order."""

    def __init__(self, relations: Iterable[Relation] = ()) -> None:
        """``relations``: tables that the stream has described before."""
        self._relations: dict[int, Relation] = {relation.oid: relation for relation in relations}
        self._readers: dict[int, Callable[[bytes], Message | None]] = {
            ord("I"): self._insert,
            ord("U"): self._update,
            ord("D"): self._delete,
            **dict.fromkeys(OVERSIZED_KINDS, self._oversized_row),
            ord("B"): _begin,
            ord("C"): _commit,
            ord("R"): self._relation,
            ord("T"): self._truncate,
            ord("M"): _logical_message,
            ord("O"): _ignored,
            ord("Y"): _ignored,
            ord("S"): _stream_start,
            ord("E"): _stream_stop,
            ord("c"): _stream_commit,
            ord("A"): _stream_abort,
        }

    def decode(self, message: bytes) -> Message | None:
        """Decode one message; return None for Origin and Type, which contain nothing that lands.

        Raises ``ProtocolViolation`` for a message that protocol version 2 does not have, or that names a
        relation not described before.
        """
        reader = self._readers.get(message[0]) if message else None
        if reader is None:
            raise violation(f"a message of type {message[:1]!r}, unknown in version 2 of its protocol")
        return reader(message)

    def _insert(self, message: bytes) -> RowChange:
        values, _ = _tuple(message, 6)
        return RowChange("I", self._known(message), None, False, values)

    def _update(self, message: bytes) -> RowChange:
        relation = self._known(message)
        kind = message[5]
        old, at = _tuple(message, 6) if kind in (_OLD_KEY, _OLD_ROW) else (None, 5)
        new, _ = _tuple(message, at + 1)
        return RowChange("U", relation, old, kind == _OLD_KEY, new)

    def _delete(self, message: bytes) -> RowChange:
        old, _ = _tuple(message, 6)
        return RowChange("D", self._known(message), old, message[5] == _OLD_KEY, None)

    def _oversized_row(self, message: bytes) -> OversizedRow:
        (size,) = _SIZE.unpack_from(message, len(message) - _SIZE.size)
        return OversizedRow(chr(message[0]).upper(), self._known(message), size)

    def _truncate(self, message: bytes) -> Truncate:
        count, _options = _TRUNCATE.unpack_from(message)
        oids = struct.unpack_from(f"!{count}I", message, _TRUNCATE.size)
        return Truncate(tuple(self._relation_of(oid) for oid in oids))

    def _relation(self, message: bytes) -> Relation:
        (oid,) = _OID.unpack_from(message)
        schema, at = _string(message, _OID.size)
        table, at = _string(message, at)
        identity = chr(message[at])
        (count,) = _COUNT.unpack_from(message, at + 1)
        at += 3
        columns = []
        for _ in range(count):
            flags = message[at]
            name, at = _string(message, at + 1)
            type_oid, modifier = _COLUMN_TYPE.unpack_from(message, at)
            at += _COLUMN_TYPE.size
            columns.append(RelationColumn(name, type_oid, modifier, bool(flags & _IN_IDENTITY)))
        # An empty schema stands for pg_catalog.
        relation = Relation(oid, schema or "pg_catalog", table, identity, tuple(columns))
        self._relations[oid] = relation
        return relation

    def _known(self, message: bytes) -> Relation:
        return self._relation_of(int.from_bytes(message[1:5], "big"))

    def _relation_of(self, oid: int) -> Relation:
        relation = self._relations.get(oid)
        if relation is None:
            raise violation(f"a change of relation {oid} without describing it first")
        return relation


def begin_of(transactions: Transactions, number: int) -> Begin:
    """Return the ``Begin`` of transaction ``number`` of ``transactions``."""
    micros = from_microseconds(int(transactions.commit_micros[number]))
    return Begin(int(transactions.commit_lsns[number]), micros, int(transactions.xids[number]))


def commit_of(transactions: Transactions, number: int) -> Commit:
    """Return the ``Commit`` of transaction ``number`` of ``transactions``."""
    begin = begin_of(transactions, number)
    return Commit(begin.commit_lsn, int(transactions.end_lsns[number]), begin.commit_ts)


def _begin(message: bytes) -> Begin:
    commit_lsn, microseconds, xid = _BEGIN.unpack_from(message)
    return Begin(commit_lsn, from_microseconds(microseconds), xid)


def _commit(message: bytes) -> Commit:
    commit_lsn, end_lsn, microseconds = _COMMIT.unpack_from(message)
    return Commit(commit_lsn, end_lsn, from_microseconds(microseconds))


def _stream_start(message: bytes) -> StreamStart:
    xid, first = _STREAM_START.unpack_from(message)
    return StreamStart(xid, bool(first))


def _stream_stop(_message: bytes) -> StreamStop:
    return StreamStop()


def _stream_commit(message: bytes) -> StreamCommit:
    xid, commit_lsn, end_lsn, microseconds = _STREAM_COMMIT.unpack_from(message)
    return StreamCommit(xid, commit_lsn, end_lsn, from_microseconds(microseconds))


def _stream_abort(message: bytes) -> StreamAbort:
    return StreamAbort(*_STREAM_ABORT.unpack_from(message))


def begin_and_commit(stream_commit: bytes) -> tuple[bytes, bytes]:
    """Return Begin and Commit as protocol version 1 sends them, made from a ``StreamCommit`` message."""
    xid, flags_and_on, commit_lsn, commit_ts = (
        stream_commit[1:5],
        stream_commit[5:],
        stream_commit[6:14],
        stream_commit[22:30],
    )
    return b"B" + commit_lsn + commit_ts + xid, b"C" + flags_and_on


def _logical_message(message: bytes) -> LogicalMessage:
    flags, lsn = _LOGICAL_MESSAGE.unpack_from(message)
    prefix, at = _string(message, _LOGICAL_MESSAGE.size)
    (length,) = _LENGTH.unpack_from(message, at)
    at += _LENGTH.size
    return LogicalMessage(bool(flags & 1), lsn, prefix, message[at : at + length])


def _ignored(_message: bytes) -> None:
    return None


def _tuple(message: bytes, at: int) -> tuple[list[Value], int]:
    """Return the values of the TupleData that starts at ``at``, and where it ends. This is the hot loop."""
    count = message[at] << 8 | message[at + 1]
    at += 2
    values: list[Value] = []
    append = values.append
    length_at = _LENGTH.unpack_from
    for _ in range(count):
        kind = message[at]
        if kind == _TEXT:
            start = at + 5
            at = start + length_at(message, at + 1)[0]
            append(message[start:at].decode())
        elif kind == _NULL:
            append(None)
            at += 1
        elif kind == _UNCHANGED:
            append(UNCHANGED)
            at += 1
        else:
            raise violation(f"a column value of kind {chr(kind)!r}, which was not asked for")
    if at > len(message):
        raise violation("a column value that ends behind its message")
    return values, at


def _string(message: bytes, at: int) -> tuple[str, int]:
    end = message.index(0, at)
    return message[at:end].decode(), end + 1


def violation(problem: str) -> ProtocolViolation:
    """Return the error for something that the protocol does not allow."""
    return ProtocolViolation(
        f"The source sent {problem}.",
        fix="Report this with the server's version. Nothing was confirmed; what has landed is intact.",
    )
