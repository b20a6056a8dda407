"""Spools transactions that the server sends before they commit (protocol 2), and passes them on after that.

A large transaction arrives in blocks, with other transactions between them. Its blocks are spooled to disk.
When it commits, its messages are passed on as protocol 1 would have sent them: Begin, the changes without
those of rolled back sub-transactions, Commit. So the reader cannot tell the difference.

The spool is a file without a name, which disappears when it is closed or when the process ends. That loses
nothing, because the server sends such a transaction again from its beginning.
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
    OVERSIZED_KINDS,
    ROW_KINDS,
    InProgressMessage,
    StreamAbort,
    StreamCommit,
    StreamStart,
    begin_and_commit,
    violation,
)

NO_MESSAGE_YET = b"\0"
"""Returned instead of a message: work was done, but no message can be returned yet. No server sends it."""

_XID_AT, _XID_END = WAL_DATA_HEADER + 1, WAL_DATA_HEADER + 5
"""Where a message of a block holds the id of its (sub-)transaction; without these bytes it equals the message
of protocol 1."""

_BUFFER_BYTES = 64 * 1024
_SKIPPED_AT_ONCE = 4096
_LENGTH = struct.Struct("!I")


class SpoolFailed(Exception):
    """Raised when a transaction in progress cannot be spooled, for example because the disk is full.

    Read the transaction after its commit instead.
    """


@dataclass(frozen=True, slots=True)
class Description:
    """A ``Relation`` message as protocol 1 sends it. ``number``: its number among those of all transactions,
    in the order of arrival."""

    number: int
    oid: int
    subxid: int
    message: bytes


class SpooledTransaction:
    """One transaction in progress, on disk: written block by block, then read once.

    It needs little memory: 4 bytes for each sub-transaction that was rolled back.
    """

    def __init__(self, xid: int, folder: Path) -> None:
        """``folder``: on the disk to use. Raises ``SpoolFailed``; so do ``messages`` and the context
        ``disk_errors``."""
        self.xid = xid
        self.descriptions: list[Description] = []
        """Its descriptions of tables in the order of arrival, without those that were rolled back."""
        self._folder = folder
        self._rolled_back = array("I")
        with self.disk_errors():
            self._file = tempfile.TemporaryFile("w+b", buffering=_BUFFER_BYTES, dir=folder)  # noqa: SIM115
        self._has_message = False
        self.rollback_unclear = False
        """Whether it contains a logical message that may have been rolled back. In such a message the server
        names the whole transaction, never the sub-transaction (``pgoutput_message``)."""

    @contextmanager
    def disk_errors(self) -> Iterator[None]:
        """Turn errors of the disk into ``SpoolFailed``."""
        try:
            yield
        except OSError as error:
            raise SpoolFailed(
                f"Transaction {self.xid}, which is in progress, cannot be kept in {self._folder}: "
                f"{error.strerror}."
            ) from error

    def spool(self, message: bytes) -> None:
        """Spool a message of a block. Call it within ``disk_errors``."""
        self._file.write(_LENGTH.pack(len(message)) + message)

    def spool_message(self, message: bytes) -> None:
        """Spool a logical message. Call it within ``disk_errors``."""
        self.spool(message)
        self._has_message = True

    def describe(self, number: int, message: bytes) -> None:
        """Record a ``Relation`` message of a block."""
        oid = int.from_bytes(message[_XID_END : _XID_END + 4], "big")
        self.descriptions.append(Description(number, oid, subxid_of(message), without_subxid(message)))

    def roll_back(self, subxid: int) -> None:
        """Leave the changes of sub-transaction ``subxid`` out."""
        self._rolled_back.append(subxid)
        self.rollback_unclear |= self._has_message
        if self.descriptions:
            self.descriptions = [each for each in self.descriptions if each.subxid != subxid]

    def messages(self) -> Iterator[bytes]:
        """Yield the messages that were not rolled back, as protocol 1 sends them; or ``NO_MESSAGE_YET``."""
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
                            yield NO_MESSAGE_YET
                        continue
                yield message[:_XID_AT] + message[_XID_END:]

    def close(self) -> None:
        """Free the disk space."""
        # Closing writes what is still buffered. The disk may be full, but nobody needs the content any more.
        with suppress(OSError):
            self._file.close()


def subxid_of(message: bytes) -> int:
    """Return the id of the (sub-)transaction of a message of a block."""
    return int.from_bytes(message[_XID_AT:_XID_END], "big")


def without_subxid(message: bytes) -> bytes:
    """Return a message of a block as protocol 1 sends it."""
    return message[:_XID_AT] + message[_XID_END:]


_RELATION, _STREAM_STOP = ord("R"), ord("E")
_MESSAGE = ord("M")
_CHANGE_KINDS = ROW_KINDS | OVERSIZED_KINDS | frozenset(b"T")
_CHANGES = _CHANGE_KINDS | frozenset(b"M")
_IGNORED_KINDS = frozenset(b"OY")
_MESSAGES_AT_ONCE = 4096
"""Messages of a block that are spooled before the reader checks the clock and the stop."""


class RollbackUnclear(Exception):
    """Raised when it is unknown whether a logical message was rolled back with a sub-transaction.

    The server does not say which sub-transaction the message belongs to. Read the transaction after its
    commit instead.
    """

    def __init__(self, transaction: SpooledTransaction) -> None:
        super().__init__(
            f"Transaction {transaction.xid} holds a logical message, and a sub-transaction of it was "
            "rolled back after that, perhaps with the message."
        )


class InProgress:
    """The messages of a stream, in the order of commits.

    The caller must pass every ``InProgressMessage`` back to ``take``.
    """

    def __init__(
        self,
        receive: Callable[[], bytes | None],
        folder: Path,
        received_rows: Callable[[], Rows | None] = lambda: None,
        received_transactions: Callable[[], Transactions | None] = lambda: None,
    ) -> None:
        """``receive``, ``received_rows`` and ``received_transactions``: the methods ``read``, ``rows`` and
        ``transactions`` of ``WalStream``. ``folder``: where transactions are spooled."""
        self.read = receive
        """Returns the next message, None, or ``NO_MESSAGE_YET``. This attribute changes: look it up again
        after each message that is no row change."""
        self._receive, self._received_rows, self._folder = receive, received_rows, folder
        self._received_transactions = received_transactions
        self._open: dict[int, SpooledTransaction] = {}
        self._block: SpooledTransaction | None = None
        self._passing_on: Iterator[bytes] | None = None
        self._description_count = 0
        self._newest_description: dict[int, Description] = {}

    def take_rows(self) -> Rows | None:
        """Return the next row changes of a committed transaction, many at once. If None, call ``read``."""
        return self._received_rows() if self.read is self._receive else None

    def take_transactions(self) -> Transactions | None:
        """Return the next whole committed transactions of row changes alone; if None, call ``read``."""
        return self._received_transactions() if self.read is self._receive else None

    def take(self, message: InProgressMessage, received: bytes) -> None:
        """Handle ``message``, which was decoded from ``received``.

        Raises ``ProtocolViolation``. Raises ``SpoolFailed`` and ``RollbackUnclear``, as ``read`` may, if the
        transaction must be read after its commit instead.
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

    def record_description(self, oid: int, received: bytes) -> None:
        """Record a ``Relation`` message that ``read`` has returned."""
        if self._passing_on is None and self._open:
            self._description_count += 1
            self._newest_description[oid] = Description(self._description_count, oid, 0, received)

    def close(self) -> None:
        """Discard everything that has not committed; the server sends it again."""
        for transaction in self._open.values():
            transaction.close()
        self._open.clear()
        self._passing_on = None

    def _begin_block(self, start: StreamStart) -> None:
        if start.first:
            self._close(start.xid)
            self._open[start.xid] = SpooledTransaction(start.xid, self._folder)
        self._block = self._known(start.xid)
        self.read = self._spool_block

    def _spool_block(self) -> bytes | None:
        """Spool what has arrived of the block; return the first message that is no part of it."""
        transaction, receive = self._block, self._receive
        assert transaction is not None, "a block without its start"
        spool = transaction.spool
        with transaction.disk_errors():
            for _ in range(_MESSAGES_AT_ONCE):
                message = receive()
                if message is None or message[0] != WAL_DATA:
                    return message
                kind = message[WAL_DATA_HEADER]
                if kind in _CHANGE_KINDS:
                    spool(message)
                elif kind == _STREAM_STOP:
                    return message
                elif kind == _RELATION:
                    spool(message)
                    self._description_count += 1
                    transaction.describe(self._description_count, message)
                elif kind == _MESSAGE:
                    transaction.spool_message(message)
                elif kind not in _IGNORED_KINDS:
                    raise violation(f"a message of type {chr(kind)!r} of a transaction in progress")
        return NO_MESSAGE_YET

    def _roll_back(self, abort: StreamAbort) -> None:
        if abort.xid == abort.subxid:
            self._close(abort.xid)
        elif abort.xid in self._open:
            self._open[abort.xid].roll_back(abort.subxid)

    def _commit(self, commit: StreamCommit, received: bytes) -> None:
        transaction = self._known(commit.xid)
        if transaction.rollback_unclear:
            raise RollbackUnclear(transaction)
        self._passing_on = self._messages(transaction, received)
        self.read = self._passing_on.__next__

    def _messages(self, transaction: SpooledTransaction, commit: bytes) -> Iterator[bytes]:
        """Yield the messages of a committed transaction, or ``NO_MESSAGE_YET``."""
        header = commit[:WAL_DATA_HEADER]
        first, last = begin_and_commit(commit[WAL_DATA_HEADER:])
        kept, before, end = transaction.messages(), [], NO_MESSAGE_YET
        for message in kept:
            if message is NO_MESSAGE_YET:
                yield NO_MESSAGE_YET
                continue
            before.append(message)
            if message[WAL_DATA_HEADER] in _CHANGES:
                # Protocol 1 does not send transactions without changes.
                yield header + first
                yield from before
                yield from kept
                yield from self._newer_descriptions(transaction)
                end = header + last
        self._close(transaction.xid)
        self._passing_on, self.read = None, self._receive
        yield end

    def _newer_descriptions(self, transaction: SpooledTransaction) -> list[bytes]:
        """Return newer descriptions of this transaction's tables, which other transactions sent meanwhile.

        The server assumes the description that it sent last, not the one that was passed on last.
        """
        newer = []
        for description in {each.oid: each for each in transaction.descriptions}.values():
            latest = self._newest_description.get(description.oid)
            if latest is not None and latest.number > description.number:
                newer.append(latest.message)
            else:
                self._newest_description[description.oid] = description
        return newer

    def _known(self, xid: int) -> SpooledTransaction:
        transaction = self._open.get(xid)
        if transaction is None:
            raise violation(f"a part of the transaction in progress {xid} without its beginning")
        return transaction

    def _close(self, xid: int) -> None:
        transaction = self._open.pop(xid, None)
        if transaction is not None:
            transaction.close()
        if not self._open:
            # No open transaction is older than these descriptions, so none needs them.
            self._newest_description.clear()
