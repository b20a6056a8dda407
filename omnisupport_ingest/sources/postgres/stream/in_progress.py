"""Transactions that the server sends before they commit (protocol 2), given out when they have.

A large one comes in blocks, between which other transactions come. Its blocks are kept aside; when it
commits, its messages are given out as version 1 would have sent them then: Begin, changes without those
of sub-transactions that were rolled back, Commit. So who reads here need not know that they were early.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

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
from omnisupport_ingest.sources.postgres.protocol.walstream import WAL_DATA, WAL_DATA_HEADER
from omnisupport_ingest.sources.postgres.stream.kept_transaction import TAKEN, Description, KeptTransaction

_RELATION, _STREAM_STOP = ord("R"), ord("E")
_MESSAGE = ord("M")
_ROWS_AND_TRUNCATES = ROW_KINDS | NOT_TAKEN_KINDS | frozenset(b"T")
_CHANGES = _ROWS_AND_TRUNCATES | frozenset(b"M")
_WITHOUT_MEANING = frozenset(b"OY")
_AT_ONCE = 4096
"""Messages of a block that are kept before the reader may look at clock and stop."""


class Doubtful(Exception):
    """A transaction has committed of which it cannot be told what was rolled back: read it afterwards.

    The server does not say of which sub-transaction a logical message is.
    """

    def __init__(self, transaction: KeptTransaction) -> None:
        super().__init__(
            f"Transaction {transaction.xid} holds a logical message, and a sub-transaction of it was "
            "rolled back after that, perhaps with the message."
        )


class InProgress:
    """What a stream sends, in the order of commits. Every ``StreamStart`` … message is to be given back."""

    def __init__(self, receive: Callable[[], bytes | None], folder: Path) -> None:
        """``receive``: the next message, or none if none has arrived yet. ``folder``: whose disk is used."""
        self.read = receive
        """Like ``receive``, or ``TAKEN``. Another function after each message that is no change of a row."""
        self._receive, self._folder = receive, folder
        self._open: dict[int, KeptTransaction] = {}
        self._block: KeptTransaction | None = None
        self._given_out: Iterator[bytes] | None = None
        self._arrivals = 0
        self._latest: dict[int, Description] = {}

    def take(self, message: InProgressMessage, received: bytes) -> None:
        """Do what ``message`` says, which was ``received`` so.

        Raises ``ProtocolViolation``; ``NotKept`` and ``Doubtful``, as ``read`` may, where the transaction
        has to be read after its commit.
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
        """Take note of a ``Relation`` message that was given out."""
        if self._given_out is None and self._open:
            self._arrivals += 1
            self._latest[oid] = Description(self._arrivals, oid, 0, received)

    def close(self) -> None:
        """Give up what has not committed; the server sends it again."""
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
        """Keep what has arrived of the block; returns the first message that is not of it, if one came."""
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
        """The messages of a transaction that has committed; ``TAKEN`` where there is none to give yet."""
        header = commit[:WAL_DATA_HEADER]
        first, last = begin_and_commit(commit[WAL_DATA_HEADER:])
        kept, before, end = transaction.messages(), [], TAKEN
        for message in kept:
            if message is TAKEN:
                yield TAKEN
                continue
            before.append(message)
            if message[WAL_DATA_HEADER] in _CHANGES:
                # One without changes is not sent by version 1 at all.
                yield header + first
                yield from before
                yield from kept
                yield from self._newer_descriptions(transaction)
                end = header + last
        self._close(transaction.xid)
        self._given_out, self.read = None, self._receive
        yield end

    def _newer_descriptions(self, transaction: KeptTransaction) -> list[bytes]:
        """What other transactions have said since of the tables that this one has described.

        The server counts on the description that it sent last, not on the one that was given out last.
        """
        newer = []
        for mine in {each.oid: each for each in transaction.descriptions}.values():
            latest = self._latest.get(mine.oid)
            if latest is not None and latest.arrival > mine.arrival:
                newer.append(latest.message)
            else:
                self._latest[mine.oid] = mine
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
            # What was said before any that is open counts for none of them.
            self._latest.clear()
