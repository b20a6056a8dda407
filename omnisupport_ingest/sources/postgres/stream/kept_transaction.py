"""One transaction that has not committed yet, as far as it was sent: its messages, kept in a file.

The file has no name: it is gone when it is closed, or with the process, however that ends. Nothing of
it is needed after that, for the server sends such a transaction again from its beginning.
"""

from __future__ import annotations

import struct
import tempfile
from array import array
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from omnisupport_ingest.sources.postgres.protocol.walstream import WAL_DATA_HEADER

TAKEN = b"\0"
"""Stands for a message where none is due yet, although something was done; no server sends it."""

_XID_AT, _XID_END = WAL_DATA_HEADER + 1, WAL_DATA_HEADER + 5
"""Where a message of a block names its (sub-)transaction; without that it is as in version 1."""

_BUFFER_BYTES = 64 * 1024
_SKIPPED_AT_ONCE = 4096
_LENGTH = struct.Struct("!I")


class NotKept(Exception):
    """A transaction in progress could not be kept: the disk is full, say. Read it afterwards."""


@dataclass(frozen=True, slots=True)
class Description:
    """A ``Relation`` message in the form of version 1. ``arrival`` counts those of all transactions."""

    arrival: int
    oid: int
    subxid: int
    message: bytes


class KeptTransaction:
    """Written block by block, then read once. Memory does not grow with it.

    (But for 4 bytes for each sub-transaction that was rolled back.)
    """

    def __init__(self, xid: int, folder: Path) -> None:
        """``folder``: whose disk is used. Raises ``NotKept``, as all methods do."""
        self.xid = xid
        self.descriptions: list[Description] = []
        """What it has said of tables, without what was rolled back, in the order of arrival."""
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
        """Take note of a ``Relation`` message of a block."""
        oid = int.from_bytes(message[_XID_END : _XID_END + 4], "big")
        self.descriptions.append(Description(arrival, oid, subxid_of(message), without_subxid(message)))

    def roll_back(self, subxid: int) -> None:
        """Leave a sub-transaction out."""
        self._rolled_back.append(subxid)
        self.doubtful |= self._has_message
        if self.descriptions:
            self.descriptions = [each for each in self.descriptions if each.subxid != subxid]

    def messages(self) -> Iterator[bytes]:
        """What was not rolled back, in the order of arrival, as in version 1; ``TAKEN`` now and then."""
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
                        place = int(np.searchsorted(rolled_back, number))
                        is_out = place < len(rolled_back) and bool(rolled_back[place] == number)
                    if is_out:
                        skipped += 1
                        if skipped % _SKIPPED_AT_ONCE == 0:
                            yield TAKEN
                        continue
                yield message[:_XID_AT] + message[_XID_END:]

    def close(self) -> None:
        """Give the disk's space back."""
        # Closing writes out what is buffered, and the disk may be full; nobody wants it any more.
        with suppress(OSError):
            self._file.close()


def subxid_of(message: bytes) -> int:
    """The (sub-)transaction of a message of a block."""
    return int.from_bytes(message[_XID_AT:_XID_END], "big")


def without_subxid(message: bytes) -> bytes:
    """A message of a block in the form of version 1."""
    return message[:_XID_AT] + message[_XID_END:]
