"""The manifest of a landed batch: what the batch holds and what it continues.

A batch exists when its manifest exists. The manifest's name follows from what the batch continues, and it is
created exclusively, so two writers cannot both continue the same chain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime

from omnisupport_ingest.json_values import FieldProblem
from omnisupport_ingest.key_range import KeyRange
from omnisupport_ingest.position import Lsn, Position
from omnisupport_ingest.records import Document, Format

CURSOR_ORDER = "cursor"
"""``FileSpan.order`` of rows that were read by a cursor column."""

FORMAT_VERSION = 6
"""Format version of a manifest; raised when older code cannot read a newer manifest.

Version 2 added ``arrival.newest_epoch_before``, version 3 ``file.order`` and ``stream.recovered_from``,
version 4 ``chunk.scope``, version 5 ``file.offsets``, version 6 ``file.snapshots``.
"""


@dataclass(frozen=True, slots=True)
class DataFile:
    """One data file of a batch. All its events belong to one window.

    Attributes:
        path: relative to the source's landing folder.
        window: the window of the commit times. An event whose position landed in another window before is in
            a file of that window (``first_windows``). It never changes.
        first: lowest position in the file.
        last: highest position in the file.
        ordered: positions rise strictly from row to row, so they are unique in the file.
        rows_per_table: by ``schema.table``.
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
    """The part of the WAL stream that a batch covers: ``previous_end_lsn`` → ``end_lsn``.

    Attributes:
        start_lsn: commit LSN of its first transaction. This and the next four are None if the batch covers
            only an idle stretch (a keepalive).
        last_commit_lsn: commit LSN of its last transaction.
        last_xid: of its last transaction.
        first_commit_ts: of its first transaction.
        last_commit_ts: of its last transaction.
        recovered_from: on the first batch after a crash of capture, the slot's confirmed position, if durable
            batches lay above it: what lay between was sent again and dropped. None on other batches.
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
    """One chunk of a table's snapshot: the rows of one read, between two log positions.

    Attributes:
        low: every transaction that committed below was visible to the read.
        high: the log position after the read.
        clock: the server's clock, read together with ``low``.
        start: lower end of the key range; None: open.
        end: upper end of the key range; None: open.
        boundary: the batch is the snapshot end.
        scope: the key range that the snapshot covers; None: the whole table.
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

    @property
    def id(self) -> str:
        """What its events have as ``chunk_id``."""
        return f"{self.snapshot_id}-{self.table}-{self.chunk:06d}"


@dataclass(frozen=True, slots=True)
class OffsetSpan:
    """The offsets of one Kafka partition that a batch covers: from ``start`` on, below ``next``.

    Attributes:
        next: where the next batch continues.
        records: how many of the offsets held a record. Compaction and transaction ends leave offsets without
            one.
        topic_id: identifies the topic among topics of this name; None if the cluster does not give it.
        gone: how many offsets from ``start`` on were deleted before they were read.
        accepted: why a person accepted that loss.
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
    """An input file that landed as a whole, named by its content.

    Attributes:
        manifest: the delivery that described it; empty for a file that came alone.
        order: what orders its events: ``transaction`` (log position and order in the transaction), ``lsn``
            (log position alone), ``time`` (commit time alone) or ``CURSOR_ORDER`` (rows read by a cursor;
            ``name`` is their table). None for a delivery of rows. A source has one order.
        offsets: for Kafka records, which land as a file but are named by their offsets: every partition of
            the epoch, by topic and number, also those without records in the batch. None for other files.
        snapshots: for a delivery of rows without a cursor: by table (``schema.table``), the latest moment of
            which a whole snapshot had landed, with this batch. None for other files.
    """

    sha256: str
    name: str
    manifest: str
    order: str | None = None
    offsets: tuple[OffsetSpan, ...] | None = None
    snapshots: dict[str, datetime] | None = None


@dataclass(frozen=True, slots=True)
class ArrivalFacts:
    """Facts that depend on when the batch arrived, frozen so that a rebuild reaches the same verdicts.

    ``…_before`` is the state that the batch found; the other field is the state that it left.

    Attributes:
        highest_commit_ts: the highest commit time of the epoch's stream that is not impossibly far ahead.
        newest_epoch_before: the highest epoch of which an event had landed; 0 if none had. None in batches of
            format version 1: these count as landed before any newer epoch began.
    """

    landed_at: datetime
    watermark_before: datetime | None
    watermark: datetime | None
    highest_commit_ts_before: datetime | None
    highest_commit_ts: datetime | None = None
    newest_epoch_before: int | None = None


@dataclass(frozen=True, slots=True)
class RelationVersion:
    """The schema of a table as the source described it when the batch was written."""

    schema: str
    table: str
    columns: tuple[str, ...]
    types: tuple[str, ...]
    key_columns: tuple[str, ...]
    replica_identity: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """A landed batch. Exactly one of ``stream``, ``chunk`` and ``file`` is set; it says the kind of the
    batch."""

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
    def kind(self) -> str:
        """The kind of the batch in one or two words."""
        if self.chunk is not None:
            return "snapshot end" if self.chunk.boundary else "snapshot"
        if self.file is not None:
            return "file" if self.file.offsets is None else "kafka"
        return "stream"

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)

    @property
    def windows(self) -> tuple[str, ...]:
        """The windows in which the batch has events, sorted, each once."""
        return tuple(sorted({file.window for file in self.files}))


def _with_new_fields(*fields: tuple[str, str]) -> Callable[[Document], Document]:
    """Return a function that adds ``fields``, each a part and a name, to a document of an older version.

    The fields become null. Raises ``FieldProblem`` if one is there already.
    """

    def upgraded(document: Document) -> Document:
        for part, name in fields:
            member = document.get(part)
            if not isinstance(member, dict):
                continue
            if name in member:
                raise FieldProblem(f"{part}.{name}", "is not a field of this format version")
            document = document | {part: member | {name: None}}
        return document

    return upgraded


FORMAT = Format(
    Manifest,
    FORMAT_VERSION,
    {
        1: _with_new_fields(("arrival", "newest_epoch_before")),
        2: _with_new_fields(("file", "order"), ("stream", "recovered_from")),
        3: _with_new_fields(("chunk", "scope")),
        4: _with_new_fields(("file", "offsets")),
        5: _with_new_fields(("file", "snapshots")),
    },
)
"""The format of a manifest on disk."""
