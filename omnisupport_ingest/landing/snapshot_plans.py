"""The plan of a snapshot: its chunks, written down before the first one is read.

A snapshot covers a table or a key range. A chunk exists once its batch has landed, and the plan says which
chunks are still to be read, so a snapshot continues after a crash. Plans are immutable. In an epoch the
newest plan of the whole table counts, and the plans of key ranges that were made after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.foreign import Unreadable
from omnisupport_ingest.key_range import KeyRange
from omnisupport_ingest.landing.encoding import content_of, decode, unreadable
from omnisupport_ingest.landing.manifest import ChunkSpan
from omnisupport_ingest.landing.names import chunk_batch_id
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.records import Format, decode_note, encode, read_note
from omnisupport_ingest.storage import create_exclusively, update

FORMAT_VERSION = 4
_FOLDER = "snapshots"
_SEARCHED = "searched-"

SCHEMA_ONLY = "schema"
"""Snapshot id of a batch that holds the schema of a table and none of its rows."""


@dataclass(frozen=True, slots=True)
class SnapshotPlan:
    """The plan of one snapshot.

    Attributes:
        boundary_ordinal: ordinal of the snapshot end, reserved before that of any row.
        rows: planned rows per chunk.
        by: the columns that divide the chunks.
        bounds: the bounds between chunks, each the texts of the columns ``by``. Chunk *n* begins above bound
            *n - 1* and ends with bound *n*, inclusive; the first and the last chunk are open.
        compared: chunks equal to the lake do not land (``source repair --mode recovery``).
        compared: chunks that equal the lake did not land (``source repair --mode recovery``).
        scope: the key range that is read; None: the whole table.
        storage: the table's storage file, if chunks are ranges of ctids. The ranges mean nothing once the
            rows are stored in another file.
    """

    snapshot_id: str
    epoch: int
    table: str
    reason: str
    planned_at: datetime
    boundary_ordinal: int
    rows: int
    by: tuple[str, ...]
    types: tuple[str, ...]
    bounds: tuple[tuple[str, ...], ...]
    compared: bool = False
    scope: KeyRange | None = None
    storage: str | None = None
    format_version: int = FORMAT_VERSION

    @property
    def chunks(self) -> int:
        return len(self.bounds) + 1

    def range_of(self, chunk: int) -> tuple[tuple[str, ...] | None, tuple[str, ...] | None]:
        """Return start and end of a chunk; None where it is open."""
        start = self.bounds[chunk - 1] if chunk else None
        return start, self.bounds[chunk] if chunk < len(self.bounds) else None

    def batch_id(self, chunk: int) -> str:
        """Return the name of the batch of a chunk."""
        return chunk_batch_id(self.epoch, self.snapshot_id, self.table, chunk, 1)

    @property
    def boundary_id(self) -> str:
        """The name of the batch with the snapshot end. Its chunk number is the number of chunks."""
        return chunk_batch_id(self.epoch, self.snapshot_id, self.table, self.chunks, 1, boundary=True)


FORMAT = Format(
    SnapshotPlan,
    FORMAT_VERSION,
    {
        1: lambda document: document | {"compared": False},
        2: lambda document: document | {"scope": None},
        3: lambda document: document | {"storage": None},
    },
)
"""The format of a plan on disk."""


@dataclass(frozen=True, slots=True)
class Search:
    """A finished search of the stream for rows that moved while a snapshot was read (``parallel_reading``).

    The stream was searched up to ``high``, and no row was left to be read again. ``chunks``: how many chunks
    had been read by then, all below ``high``.
    """

    high: Lsn
    chunks: int

    @classmethod
    def due(cls, chunks: Iterable[ChunkSpan]) -> Search | None:
        """Return the search to make once ``chunks``, of one snapshot, have landed; None if none has."""
        highs = [chunk.high for chunk in chunks if not chunk.boundary]
        return cls(max(highs), len(highs)) if highs else None


class SnapshotPlans:
    """The plans of one source, in its landing folder, and the records of finished searches."""

    def __init__(self, folder: Path) -> None:
        """``folder``: the landing folder of the source."""
        self._folder = folder / _FOLDER
        self._read: dict[Path, SnapshotPlan] = {}

    def all(self, epoch: int) -> list[SnapshotPlan]:
        """Return the plans of ``epoch``, in the order in which they were made. Raises the errors of
        ``encoding.decode``. Each file is read once, as plans never change."""
        if not self._folder.is_dir():
            return []
        files = sorted(self._folder.glob(f"e{epoch:06d}-*.json"))
        self._read = {file: self._read.get(file) or _read(file) for file in files}
        return sorted(self._read.values(), key=lambda plan: plan.boundary_ordinal)

    def write(self, plan: SnapshotPlan) -> None:
        """Write ``plan``; durable when this returns. Each plan has its own ordinal of the snapshot end, and
        so a file name of its own."""
        # No failpoint: making a folder that exists already does no harm.
        self._folder.mkdir(mode=0o700, exist_ok=True)
        with failpoint("landing.snapshot_plan", plan.table):
            create_exclusively(self._folder / _file_name(plan), encode(plan))

    def searched(self, plan: SnapshotPlan) -> Search | None:
        """Return the last recorded search; None if there is none or its record cannot be read."""
        try:
            return read_note(Search, self._folder / f"{_SEARCHED}{_file_name(plan)}")
        except (FileNotFoundError, Unreadable):
            return None

    def note_searched(self, plan: SnapshotPlan, search: Search) -> None:
        """Record ``search``; durable when this returns. ``plan`` does not need the stream batches up to there
        any more, so they may be removed. In a bucket, a search that another machine took further stays."""
        path = self._folder / f"{_SEARCHED}{_file_name(plan)}"
        with failpoint("landing.snapshot_plan", plan.table):
            update(path, lambda content: None if _is_further(content, search) else encode(search))


def _is_further(content: bytes | None, search: Search) -> bool:
    """Whether the search recorded in ``content`` got further than ``search``."""
    if content is None:
        return False
    try:
        return decode_note(Search, content).high > search.high
    except Unreadable:
        return False


def _file_name(plan: SnapshotPlan) -> str:
    return f"e{plan.epoch:06d}-{plan.boundary_ordinal & 0xFFFFFFFFFFFF:012x}.json"


def _read(file: Path) -> SnapshotPlan:
    try:
        content = content_of(file)
    except FileNotFoundError as problem:
        # It was listed, and plans are never removed.
        raise unreadable(file, problem.strerror) from None
    return decode(FORMAT, content, file)


def newest_of_each(plans: Iterable[SnapshotPlan]) -> dict[str, SnapshotPlan]:
    """Return the newest plan of the whole table for each table. ``plans``: in the order in which they were
    made."""
    return {plan.table: plan for plan in plans if plan.scope is None}


def plans_in_force(plans: Sequence[SnapshotPlan]) -> list[SnapshotPlan]:
    """Return the ``plans`` that no later plan of the whole table replaces. ``plans``: in the order in which
    they were made."""
    newest = newest_of_each(plans)
    return [
        plan
        for plan in plans
        if plan.table not in newest or plan.boundary_ordinal >= newest[plan.table].boundary_ordinal
    ]


def is_whole(chunks: Iterable[ChunkSpan]) -> bool:
    """Whether ``chunks``, of one snapshot, are all of it: every chunk, and the snapshot end.

    A snapshot end with the number 0 comes from a version that did not divide tables: its snapshot has a
    single chunk.
    """
    spans = list(chunks)
    read = {chunk.chunk for chunk in spans if not chunk.boundary}
    return any(chunk.boundary and read >= set(range(max(1, chunk.chunk))) for chunk in spans)
