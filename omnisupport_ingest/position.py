"""Positions of events in the history of their source: ``Lsn`` and ``Position``.

A ``Position`` is the identity of an event, its dedupe key and its order in one. The LSN of a change is none
of these: several rows can share it, and a transaction that began before a snapshot may commit after it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_POSITION_TEXT = re.compile(r"([0-9]{1,9}):([0-9A-Fa-f]{1,8})/([0-9A-Fa-f]{1,8}):(-?[0-9]{1,19})")
_LSN_TEXT = re.compile(r"([0-9A-Fa-f]{1,8})/([0-9A-Fa-f]{1,8})")

LOWEST_ORDINAL = -(1 << 62)
"""Below the ordinal of every event at an LSN, snapshot rows and snapshot ends included."""

ODD, KEPT_OUT = "odd", "kept out"
UNREAD = (f'["{ODD}",', f'["{KEPT_OUT}",')
"""The beginnings of an ``identity`` of events that judging keeps out: what was delivered could not be read,
or a gate of its delivery withholds it. Only the ``envelope`` has all of such an event."""


@dataclass(frozen=True, order=True, slots=True)
class Lsn:
    """A PostgreSQL log sequence number: a byte offset in the WAL (PostgreSQL manual, ``pg_lsn``)."""

    value: int

    def __post_init__(self) -> None:
        if not 0 <= self.value < 1 << 64:
            raise ValueError(f"an LSN is an unsigned 64-bit number, not {self.value}")

    @classmethod
    def parse(cls, text: str) -> Lsn:
        """Read PostgreSQL's own form, ``16/B374D848``. Raises ``ValueError`` for anything else."""
        match = _LSN_TEXT.fullmatch(text)
        if match is None:
            raise ValueError(f"not an LSN: {text[:60]!r} (expected a form like 16/B374D848)")
        high, low = match.groups()
        return cls(int(high, 16) << 32 | int(low, 16))

    def __str__(self) -> str:
        return f"{self.value >> 32:X}/{self.value & 0xFFFFFFFF:X}"


@dataclass(frozen=True, order=True, slots=True)
class Position:
    """``(epoch, commit_lsn, ordinal)``, scoped by source; later events compare greater.

    ``epoch``: the number of the source's history in landing (1, 2, …). ``commit_lsn``: the LSN of the commit
    record. ``ordinal``: twice the index of the change in its transaction (odd: the second half of a
    key-changing update); negative for snapshot rows, which stand below every change that committed at or
    after their low watermark.
    """

    epoch: int
    commit_lsn: Lsn
    ordinal: int

    def __str__(self) -> str:
        return f"{self.epoch}:{self.commit_lsn}:{self.ordinal}"

    @classmethod
    def parse(cls, text: str) -> Position:
        """Read the form that ``str`` writes, ``1:16/B374D848:4``. Raises ``ValueError`` for anything else."""
        match = _POSITION_TEXT.fullmatch(text)
        if match is None:
            raise ValueError(f"not a position: {text[:60]!r} (expected a form like 1:16/B374D848:4)")
        epoch, high, low, ordinal = match.groups()
        return cls(int(epoch), Lsn(int(high, 16) << 32 | int(low, 16)), int(ordinal))
