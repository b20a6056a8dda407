"""One landed event: the columns of a batch's data files.

Values are the exact text that PostgreSQL sent. A row image (``before``, ``after``) is one JSON object, column
name → text or null; landing does not look into it.
"""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple

import pyarrow as pa

LANDED_SCHEMA = pa.schema(
    [
        pa.field("epoch", pa.int32(), nullable=False),
        pa.field("commit_lsn", pa.int64(), nullable=False),
        pa.field("ordinal", pa.int64(), nullable=False),
        pa.field("op", pa.string(), nullable=False),
        pa.field("source_ts", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("tx_id", pa.int64()),
        pa.field("lsn", pa.int64()),
        pa.field("source_schema", pa.string(), nullable=False),
        pa.field("source_table", pa.string(), nullable=False),
        pa.field("key", pa.string()),
        pa.field("before", pa.string()),
        pa.field("after", pa.string()),
        pa.field("unchanged", pa.list_(pa.field("element", pa.string()))),
        pa.field("moved_from_key", pa.string()),
        pa.field("chunk_id", pa.string()),
        pa.field("identity", pa.string()),
        pa.field("misplaced", pa.bool_()),
        pa.field("file_row", pa.int64()),
        pa.field("envelope", pa.string()),
        pa.field("batch_id", pa.string(), nullable=False),
    ]
)
"""Arrow schema of a landed data file. LSNs are signed 64-bit (PostgreSQL stays far below 2^63)."""

EARLIER_IDENTITY = r'(",\"[cud]\"|null,\"t\"),\"[0-9a-f]{16}\"\]$'
"""Matches the end of an ``identity`` that an earlier version landed for changes from a Debezium without
transaction metadata. After group 1 it has a hash of the content, so two contents of one position never
collided. The hash is removed wherever identities are compared. Works in Java and in RE2."""

EVENT_SCHEMA = LANDED_SCHEMA.remove(LANDED_SCHEMA.get_field_index("batch_id"))
"""``LANDED_SCHEMA`` without the batch, which the writer adds. Its fields are those of ``LandedEvent``."""

DIVIDED_SCHEMA = pa.schema(
    [
        *EVENT_SCHEMA,
        *(
            pa.field(f"{image}_{part}", pa.string())
            for image in ("before", "after")
            for part in ("hidden", "subject")
        ),
    ]
)
"""Events on their way to an ``as_landed`` that encrypts; the row images of some are divided (``Division``).

If ``after_hidden`` is not null, the image ``after`` is divided: ``after_hidden`` is a JSON object of the
hidden columns, ``after`` one of the readable columns, and ``after_subject`` the subject's value as within the
quotes of JSON (null if the image does not have it). The same holds for ``before``."""


class Division(NamedTuple):
    """How the row images of a table are divided: the ``readable`` columns, all others being hidden, and the
    readable column of the ``subject``."""

    readable: frozenset[str]
    subject: str


class LandedEvent(NamedTuple):
    """One event as a source gives it to the batch writer, which adds the batch.

    Attributes:
        op: ``c`` insert, ``u`` update, ``d`` delete, ``r`` snapshot row, ``t`` truncate of one table, ``m``
            logical message, ``b`` snapshot end of one table.
        source_ts: commit time, timezone-aware.
        lsn: LSN of the change itself, never an identity.
        key: JSON array of the key columns' texts in the contract's order (``["1"]``); None for ``t``, ``m``
            and ``b``.
        after: the row after the change. In a ``b``: the key range of the snapshot (``KeyRange``), None for
            the whole table.
        unchanged: columns that were not sent (TOAST).
        moved_from_key: old key, on the ``c`` of a key-changing update; its ``d`` stands at ``ordinal - 1``.
        identity: where positions are not unique, what distinguishes the event from others at its position.
            Capture leaves this and the next three None.
        misplaced: the source gives no certain order, and the event comes in its file after one of the same
            key with a later time.
        file_row: line of the input file, from 1.
        envelope: the text that was delivered.
    """

    epoch: int
    commit_lsn: int
    ordinal: int
    op: str
    source_ts: datetime
    tx_id: int | None
    lsn: int | None
    source_schema: str
    source_table: str
    key: str | None
    before: str | None
    after: str | None
    unchanged: list[str] | None
    moved_from_key: str | None
    chunk_id: str | None
    identity: str | None = None
    misplaced: bool | None = None
    file_row: int | None = None
    envelope: str | None = None
