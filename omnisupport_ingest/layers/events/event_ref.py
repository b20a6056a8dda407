"""The name of one event, as people read and type it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from omnisupport_ingest.cdc.event_columns import EventId
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.position import Lsn, Position

_TEXT = re.compile(r"(\d{1,9}):([0-9A-Fa-f]{1,8}/[0-9A-Fa-f]{1,8}):(-?\d{1,19})#([0-9A-Fa-f]{16})")
_MODULUS = 1 << 64
_ORDINALS = range(-(1 << 63), 1 << 63)
"""Bounds of the column of ordinals: signed 64-bit. Rows without a cursor have ordinals of 19 digits."""


class EventRefRefused(IngestError):
    """A text is not the id of an event.

    Fix: Copy the id from ``omnisupport-ingest quarantine list``.
    """

    exit_code = 2


@dataclass(frozen=True, order=True, slots=True)
class EventRef:
    """The position and the hash (signed 64-bit) of an event: two events at one position differ in
    the hash.
    """

    position: Position
    event_hash: int

    @classmethod
    def of(cls, epoch: int, commit_lsn: int, ordinal: int, event_hash: int) -> EventRef:
        """From the four columns of an event."""
        return cls(Position(epoch, Lsn(commit_lsn), ordinal), event_hash)

    @classmethod
    def parse(cls, text: str) -> EventRef:
        """Read the form that ``str`` writes; ``EventRefRefused`` for anything else."""
        found = _TEXT.fullmatch(text.strip())
        if found is None or int(found[3]) not in _ORDINALS:
            raise EventRefRefused(
                f"{text!r} is not the id of an event.",
                fix="Copy it from `omnisupport-ingest quarantine list`; it looks like "
                "1:0/16B3748:4#00ab34cd56ef7890.",
            )
        epoch, lsn, ordinal, digits = found.groups()
        number = int(digits, 16)
        signed = number - _MODULUS if number >= _MODULUS // 2 else number
        return cls(Position(int(epoch), Lsn.parse(lsn), int(ordinal)), signed)

    @property
    def key(self) -> EventId:
        """(epoch, commit LSN, ordinal, event hash), as the columns have them."""
        return (
            self.position.epoch,
            self.position.commit_lsn.value,
            self.position.ordinal,
            self.event_hash,
        )

    def __str__(self) -> str:
        """``1:0/16B3748:4#00ab34cd56ef7890``; the hash as 16 hexadecimal digits, two's complement."""
        return f"{self.position}#{self.event_hash % _MODULUS:016x}"
