"""Transactions that the server sends before they commit (protocol 2), passed on when they commit.

A large transaction comes in blocks, between which other transactions come. Its blocks are kept aside. When it
commits, its messages are passed on as protocol 1 would have sent them: Begin, changes without those of
sub-transactions that were rolled back, Commit. So the reader need not know that they came early.

Blocks are kept in a file without a name, which is gone when it is closed, or with the process. Nothing of it
is needed after that, for the server sends such a transaction again from its beginning.
"""

from __future__ import annotations

import struct
import tempfile
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from omnisupport_ingest.sources.postgres.protocol.frames import WAL_DATA, WAL_DATA_HEADER, Rows, Transactions
from omnisupport_ingest.sources.postgres.protocol.pgoutput import (
    NOT_TAKEN_KINDS,
    ROW_KINDS,
    InProgressMessage,
    StreamAbort,
    StreamCommit,
    StreamStart,
    begin_and_commit,
    violation,
)

TAKEN = b"\0"
"""Stands for a message where work was done and none is due yet; no server sends it."""

_XID_AT, _XID_END = WAL_DATA_HEADER + 1, WAL_DATA_HEADER + 5
"""Offset at which a message of a block names its (sub-)transaction; without that it is as in protocol 1."""

_BUFFER_BYTES = 64 * 1024
_SKIPPED_AT_ONCE = 4096
_LENGTH = struct.Struct("!I")


class NotKept(Exception):
    """Raised when a transaction in progress cannot be kept, because the disk is full, say: read it after its
    commit.
    """


@dataclass(frozen=True, slots=True)
class Description:
    """A ``Relation`` message in the form of protocol 1. ``arrival`` counts those of all transactions."""

    arrival: int
    oid: int
    subxid: int
    message: bytes


class KeptTransaction:
    """One transaction in progress, written block by block, then read once.

    Memory does not grow with it, but for 4 bytes for each sub-transaction that was rolled back.
    """

    def __init__(self, xid: int, folder: Path) -> None:
        """``folder``: on the disk that is used. Raises ``NotKept``, as all methods do."""
        self.xid = xid
        self.descriptions: list[Description] = []
        """Its descriptions of tables, without those rolled back, in the order of arrival."""
        self._folder = folder
        self._rolled_back = array("I")
        with self.disk_errors():
            self._file = tempfile.TemporaryFile("w+b", buffering=_BUFFER_BYTES, dir=folder)  # noqa: SIM115
        self._has_message = False
        self.doubtful = False
        """Whether it holds a logical message that may have been rolled back. The server names the whole
        transaction in such a message, never the sub-transaction (``pgoutput_message``)."""

    @contextmanager
    def disk_errors(self) -> Iterator[None]:
        """Turn errors of the disk into ``NotKept``."""
        try:
            yield
        except OSError as error:
            raise NotKept(
                f"Transaction {self.xid}, which is in progress, cannot be kept in {self._folder}: "
                f"{error.strerror}."
            ) from error

    def keep(self, message: bytes) -> None:
        """Keep a message of a block. To be called within ``disk_errors``."""
        self._file.write(_LENGTH.pack(len(message)) + message)

    def keep_message(self, message: bytes) -> None:
        """Keep a logical message. To be called within ``disk_errors``."""
        self.keep(message)
        self._has_message = True

    def describe(self, arrival: int, message: bytes) -> None:
        """Keep a ``Relation`` message of a block."""
        oid = int.from_bytes(message[_XID_END : _XID_END + 4], "big")
        self.descriptions.append(Description(arrival, oid, subxid_of(message), without_subxid(message)))

    def roll_back(self, subxid: int) -> None:
        """Leave a sub-transaction out."""
        self._rolled_back.append(subxid)
        self.doubtful |= self._has_message
        if self.descriptions:
            self.descriptions = [each for each in self.descriptions if each.subxid != subxid]

    def messages(self) -> Iterator[bytes]:
        """Yield what was not rolled back, in the order of arrival, as in protocol 1; ``TAKEN`` at times."""
        rolled_back = np.sort(np.array(self._rolled_back, np.uint32))
        read, length_of = self._file.read, _LENGTH.unpack
        subxid, is_out, skipped = b"", False, 0
        with self.disk_errors():
            self._file.seek(0)
            while length := read(_LENGTH.size):
                message = read(length_of(length)[0])
                if len(rolled_back):
                    if message[_XID_AT:_XID_END] != subxid:
                        subxid = message[_XID_AT:_XID_END]
                        number = np.uint32(int.from_bytes(subxid, "big"))
                        index = int(np.searchsorted(rolled_back, number))
                        is_out = index < len(rolled_back) and bool(rolled_back[index] == number)
                    if is_out:
                        skipped += 1
                        if skipped % _SKIPPED_AT_ONCE == 0:
                            yield TAKEN
                        continue
                yield message[:_XID_AT] + message[_XID_END:]

    def close(self) -> None:
        """Free the disk space."""
        # Closing writes what is buffered, and the disk may be full; nobody needs it any more.
        with suppress(OSError):
            self._file.close()


def subxid_of(message: bytes) -> int:
    """Return the (sub-)transaction of a message of a block."""
    return int.from_bytes(message[_XID_AT:_XID_END], "big")


def without_subxid(message: bytes) -> bytes:
    """Return a message of a block in the form of protocol 1."""
    return message[:_XID_AT] + message[_XID_END:]


_RELATION, _STREAM_STOP = ord("R"), ord("E")
_MESSAGE = ord("M")
_ROWS_AND_TRUNCATES = ROW_KINDS | NOT_TAKEN_KINDS | frozenset(b"T")
_CHANGES = _ROWS_AND_TRUNCATES | frozenset(b"M")
_WITHOUT_MEANING = frozenset(b"OY")
_AT_ONCE = 4096
"""Messages of a block that are kept before the reader checks clock and stop."""


class Doubtful(Exception):
    """Raised when a transaction has committed and what of it was rolled back is unknown: read it after its
    commit.

    The server does not say which sub-transaction a logical message belongs to.
    """

    def __init__(self, transaction: KeptTransaction) -> None:
        super().__init__(
            f"Transaction {transaction.xid} holds a logical message, and a sub-transaction of it was "
            "rolled back after that, perhaps with the message."
        )


class InProgress:
    """What a stream sends, in the order of commits. Every ``StreamStart`` … message must be given back to
    ``take``.
    """

    def __init__(
        self,
        receive: Callable[[], bytes | None],
        folder: Path,
        received_rows: Callable[[], Rows | None] = lambda: None,
        received_transactions: Callable[[], Transactions | None] = lambda: None,
    ) -> None:
        """``receive`` returns the next message, or None if none has arrived yet; ``received_rows`` the row
        changes that come next, as ``WalStream.rows``; ``received_transactions`` whole transactions.
        ``folder``: on the disk that is used.
        """
        self.read = receive
        """Like ``receive``, or returns ``TAKEN``. It is another function after each message that is no row
        change.
        """
        self._receive, self._received_rows, self._folder = receive, received_rows, folder
        self._received_transactions = received_transactions
        self._open: dict[int, KeptTransaction] = {}
        self._block: KeptTransaction | None = None
        self._given_out: Iterator[bytes] | None = None
        self._arrivals = 0
        self._latest: dict[int, Description] = {}

    def take_rows(self) -> Rows | None:
        """Return row changes of committed transactions that come next, many at once; None where ``read`` must
        be asked.
        """
        return self._received_rows() if self.read is self._receive else None

    def take_transactions(self) -> Transactions | None:
        """Return whole committed transactions that come next, of row changes alone; None where ``read`` must
        be asked.
        """
        return self._received_transactions() if self.read is self._receive else None

    def take(self, message: InProgressMessage, received: bytes) -> None:
        """Do what ``message`` asks for, which was ``received`` so.

        Raises ``ProtocolViolation``; ``NotKept`` and ``Doubtful``, as ``read`` may, where the transaction has
        to be read after its commit.
        """
        if isinstance(message, StreamStart):
            self._begin_block(message)
        elif isinstance(message, StreamCommit):
            self._commit(message, received)
        elif isinstance(message, StreamAbort):
            self._roll_back(message)
        else:
            self._block = None
            self.read = self._receive

    def described(self, oid: int, received: bytes) -> None:
        """Record a ``Relation`` message that was passed on."""
        if self._given_out is None and self._open:
            self._arrivals += 1
            self._latest[oid] = Description(self._arrivals, oid, 0, received)

    def close(self) -> None:
        """Discard what has not committed; the server sends it again."""
        for transaction in self._open.values():
            transaction.close()
        self._open.clear()
        self._given_out = None

    def _begin_block(self, start: StreamStart) -> None:
        if start.first:
            self._close(start.xid)
            self._open[start.xid] = KeptTransaction(start.xid, self._folder)
        self._block = self._known(start.xid)
        self.read = self._keep

    def _keep(self) -> bytes | None:
        """Keep what has arrived of the block; return the first message that is not of it, if one came."""
        transaction, receive = self._block, self._receive
        assert transaction is not None, "a block without its start"
        keep = transaction.keep
        with transaction.disk_errors():
            for _ in range(_AT_ONCE):
                message = receive()
                if message is None or message[0] != WAL_DATA:
                    return message
                kind = message[WAL_DATA_HEADER]
                if kind in _ROWS_AND_TRUNCATES:
                    keep(message)
                elif kind == _STREAM_STOP:
                    return message
                elif kind == _RELATION:
                    keep(message)
                    self._arrivals += 1
                    transaction.describe(self._arrivals, message)
                elif kind == _MESSAGE:
                    transaction.keep_message(message)
                elif kind not in _WITHOUT_MEANING:
                    raise violation(f"a message of type {chr(kind)!r} of a transaction in progress")
        return TAKEN

    def _roll_back(self, abort: StreamAbort) -> None:
        if abort.xid == abort.subxid:
            self._close(abort.xid)
        elif abort.xid in self._open:
            self._open[abort.xid].roll_back(abort.subxid)

    def _commit(self, commit: StreamCommit, received: bytes) -> None:
        transaction = self._known(commit.xid)
        if transaction.doubtful:
            raise Doubtful(transaction)
        self._given_out = self._messages(transaction, received)
        self.read = self._given_out.__next__

    def _messages(self, transaction: KeptTransaction, commit: bytes) -> Iterator[bytes]:
        """Yield the messages of a committed transaction; ``TAKEN`` where there is none to yield yet."""
        header = commit[:WAL_DATA_HEADER]
        first, last = begin_and_commit(commit[WAL_DATA_HEADER:])
        kept, before, end = transaction.messages(), [], TAKEN
        for message in kept:
            if message is TAKEN:
                yield TAKEN
                continue
            before.append(message)
            if message[WAL_DATA_HEADER] in _CHANGES:
                # Protocol 1 does not send a transaction without changes at all.
                yield header + first
                yield from before
                yield from kept
                yield from self._newer_descriptions(transaction)
                end = header + last
        self._close(transaction.xid)
        self._given_out, self.read = None, self._receive
        yield end

    def _newer_descriptions(self, transaction: KeptTransaction) -> list[bytes]:
        """Return how other transactions have described the tables since this one has.

        The server counts on the description that it sent last, not on the one that was passed on last.
        """
        newer = []
        for description in {each.oid: each for each in transaction.descriptions}.values():
            latest = self._latest.get(description.oid)
            if latest is not None and latest.arrival > description.arrival:
                newer.append(latest.message)
            else:
                self._latest[description.oid] = description
        return newer

    def _known(self, xid: int) -> KeptTransaction:
        transaction = self._open.get(xid)
        if transaction is None:
            raise violation(f"a part of the transaction in progress {xid} without its beginning")
        return transaction

    def _close(self, xid: int) -> None:
        transaction = self._open.pop(xid, None)
        if transaction is not None:
            transaction.close()
        if not self._open:
            # Descriptions older than every open transaction count for none of them.
            self._latest.clear()
