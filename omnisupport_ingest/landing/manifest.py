"""The manifest of a WAL batch: what the batch holds and what it continues.

A batch exists when its manifest exists. The manifest's name is derived from what the batch
continues, and it is created exclusively, so two writers cannot both continue the same chain.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from omnisupport_ingest.json_values import FieldProblem
from omnisupport_ingest.key_range import KeyRange
from omnisupport_ingest.position import Lsn, Position

CURSOR_ORDER = "cursor"
"""``FileSpan.order`` of rows that were read by a cursor column."""

FORMAT_VERSION = 5
"""Version of the manifest's form; raised when older code could not read a newer one.

Version 2 added ``arrival.newest_epoch_before``, version 3 ``file.order`` and
``stream.recovered_from``, version 4 ``chunk.scope``, version 5 ``file.offsets``.
"""


@dataclass(frozen=True, slots=True)
class DataFile:
    """One data file of a batch; all its events belong to one window, which ``window`` says for good: that of
    their commit time, but for events whose position had landed in another one (``first_windows``).

    ``path`` is relative to the source's landing folder. ``first`` and ``last`` are the lowest and
    highest position in it; ``ordered`` says that positions rise strictly from row to row, so they
    are unique in the file. ``rows_per_table`` is keyed by ``schema.table``.
    """

    path: str
    window: str
    rows: int
    bytes: int
    sha256: str
    first: Position
    last: Position
    ordered: bool
    rows_per_table: dict[str, int]


@dataclass(frozen=True, slots=True)
class StreamSpan:
    """The part of the WAL stream a batch covers: ``previous_end_lsn`` → ``end_lsn``.

    ``start_lsn`` is the commit LSN of its first transaction; ``last_commit_lsn``, ``last_xid`` and
    ``last_commit_ts`` are of its last one. All four are None for a batch that only moves the
    chain on through an idle stretch (a keepalive).

    ``recovered_from``: on the first batch after capture died with batches that were durable and not
    yet confirmed, the slot's confirmed position: what lies between it and this batch was sent again,
    and dropped. Null else.
    """

    previous_end_lsn: Lsn
    end_lsn: Lsn
    start_lsn: Lsn | None
    last_commit_lsn: Lsn | None
    last_xid: int | None
    first_commit_ts: datetime | None
    last_commit_ts: datetime | None
    recovered_from: Lsn | None = None


@dataclass(frozen=True, slots=True)
class ChunkSpan:
    """One chunk of a table's snapshot: the rows seen by one read, between two log positions.

    Every transaction that committed below ``low`` was visible to the read. ``start`` and ``end``
    bound the key range (null: open). ``boundary`` marks the batch that ends the snapshot. ``scope``: what
    part of the table the snapshot is of; None: all.
    """

    snapshot_id: str
    table: str
    chunk: int
    attempt: int
    low: Lsn
    high: Lsn
    clock: datetime
    start: str | None = None
    end: str | None = None
    boundary: bool = False
    scope: KeyRange | None = None


@dataclass(frozen=True, slots=True)
class OffsetSpan:
    """What a batch covers of one Kafka partition: the offsets from ``start`` on, below ``next``, where the
    next batch goes on.

    ``records``: how many of them held a record; compaction, and the ends of transactions, leave offsets
    without one. ``topic_id``: which topic of this name it was; None where the cluster does not tell.
    ``gone``: so many offsets from ``start`` on had been deleted before they were read, and ``accepted`` is
    why a person went on behind them.
    """

    topic: str
    partition: int
    start: int
    next: int
    records: int
    topic_id: str | None = None
    gone: int = 0
    accepted: str = ""


@dataclass(frozen=True, slots=True)
class FileSpan:
    """An input file landed as a whole, named by its content.

    ``manifest``: the delivery that described it; empty for a file that came alone. ``order``: what
    orders its events: ``transaction`` (log position and order in the transaction), ``lsn`` (log
    position alone), ``time`` (commit time alone) or ``CURSOR_ORDER`` (rows read by a cursor, ``name`` is
    their table); None for a delivery of rows, not of events.
    A source has one such order.

    ``offsets``: of records of Kafka, which land as a file does, but are named by their offsets: every
    partition of the epoch, by topic and number, also those of which the batch holds nothing. Null else.
    """

    sha256: str
    name: str
    manifest: str
    order: str | None = None
    offsets: tuple[OffsetSpan, ...] | None = None


@dataclass(frozen=True, slots=True)
class ArrivalFacts:
    """What depends on when the batch arrived, frozen so that a rebuild reaches the same verdict.

    ``…_before`` is the state the batch found, the other one the state it left. ``highest_commit_ts``
    is the highest commit time of the epoch's stream that is not impossibly far ahead.
    ``newest_epoch_before`` is the highest epoch that had begun, which means that an event of it had
    landed; 0 if none had. It is None where the batch was landed by format version 1, which did not
    record it; such a batch counts as landed before any newer epoch began.
    """

    landed_at: datetime
    watermark_before: datetime | None
    watermark: datetime | None
    highest_commit_ts_before: datetime | None
    highest_commit_ts: datetime | None = None
    newest_epoch_before: int | None = None


@dataclass(frozen=True, slots=True)
class RelationVersion:
    """The form of a table as the source described it when the batch was written."""

    schema: str
    table: str
    columns: tuple[str, ...]
    types: tuple[str, ...]
    key_columns: tuple[str, ...]
    replica_identity: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """A landed batch. Exactly one of ``stream``, ``chunk`` and ``file`` is set: its kind."""

    batch_id: str
    source: str
    epoch: int
    arrival: ArrivalFacts
    stream: StreamSpan | None = None
    chunk: ChunkSpan | None = None
    file: FileSpan | None = None
    files: tuple[DataFile, ...] = ()
    relations: tuple[RelationVersion, ...] = ()
    written_by: str = ""
    format_version: int = field(default=FORMAT_VERSION)

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)

    @property
    def windows(self) -> tuple[str, ...]:
        """The windows the batch has events in, in order, each once."""
        return tuple(sorted({file.window for file in self.files}))


def upgraded(document: dict[str, Any]) -> dict[str, Any]:
    """The document of a manifest of any known format version, in the form of ``FORMAT_VERSION``.

    What an older version did not record is null. ``FieldProblem`` for a field that the document's
    own version does not have.
    """
    version = document["format_version"]
    if version < 2:
        document = _with_new_field(document, "arrival", "newest_epoch_before")
    if version < 3:
        document = _with_new_field(document, "file", "order")
        document = _with_new_field(document, "stream", "recovered_from")
    if version < 4:
        document = _with_new_field(document, "chunk", "scope")
    if version < 5:
        document = _with_new_field(document, "file", "offsets")
    return document | {"format_version": FORMAT_VERSION}


def _with_new_field(document: dict[str, Any], part: str, name: str) -> dict[str, Any]:
    member = document.get(part)
    if not isinstance(member, dict):
        return document
    if name in member:
        raise FieldProblem(f"{part}.{name}", "is not a field of this format version")
    return document | {part: member | {name: None}}
