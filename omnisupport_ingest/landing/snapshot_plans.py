"""The plan of a snapshot, of a table or of a range of its keys: its chunks, written down before the first is
read.

A chunk exists once its batch has landed, and the plan says which are still to be read; so a snapshot goes
on after a crash where it was. Plans are immutable. Of a table in an epoch the newest plan of all of it
counts, and those of ranges that were made later.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.foreign import Unreadable
from omnisupport_ingest.json_values import read_note
from omnisupport_ingest.key_range import KeyRange
from omnisupport_ingest.landing.encoding import content_of, decode, encode, unreadable
from omnisupport_ingest.landing.manifest import ChunkSpan
from omnisupport_ingest.landing.names import chunk_batch_id
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.storage import create_exclusively, replace

FORMAT_VERSION = 4
_FOLDER = "snapshots"
_SEARCHED = "searched-"

SCHEMA_ONLY = "schema"
"""The snapshot id of a batch that holds the form of a table and none of its rows."""


@dataclass(frozen=True, slots=True)
class SnapshotPlan:
    """``bounds`` between the chunks, each the texts of the columns ``by`` (of ``types``).

    Chunk *n* is above bound *n - 1*, up to and with bound *n*; the first and the last are open.
    ``boundary_ordinal`` was taken before that of any row. ``rows``: about as many are in a chunk.
    ``compared``: what the lake had already was not read (``source repair --mode recovery``). ``scope``: the
    range of keys that is read; None: all. ``storage``: where the table's rows stood, if its chunks are ranges
    of places; these say nothing about rows that stand elsewhere since.
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
        """Start and end of a chunk; None where it is open."""
        start = self.bounds[chunk - 1] if chunk else None
        return start, self.bounds[chunk] if chunk < len(self.bounds) else None

    def batch_id(self, chunk: int) -> str:
        """The name of the batch of a chunk."""
        return chunk_batch_id(self.epoch, self.snapshot_id, self.table, chunk, 1)

    @property
    def boundary_id(self) -> str:
        """The name of the batch that ends the snapshot. As its chunk it has the number of chunks."""
        return chunk_batch_id(self.epoch, self.snapshot_id, self.table, self.chunks, 1, boundary=True)


@dataclass(frozen=True, slots=True)
class Search:
    """The stream was searched up to ``high``, below which ``chunks`` of a snapshot were read, for rows that
    moved while it was read (``parallel_reading``), and none was left to be read again."""

    high: Lsn
    chunks: int

    @classmethod
    def due(cls, chunks: Iterable[ChunkSpan]) -> Search | None:
        """What is to be searched once ``chunks``, of one snapshot, have landed; None if none has."""
        highs = [chunk.high for chunk in chunks if not chunk.boundary]
        return cls(max(highs), len(highs)) if highs else None


class SnapshotPlans:
    """The plans of one source, in its landing folder, and which of them need the stream no more."""

    def __init__(self, folder: Path) -> None:
        """``folder``: the landing folder of the source."""
        self._folder = folder / _FOLDER

    def all(self, epoch: int) -> list[SnapshotPlan]:
        """The plans made in ``epoch``, in the order in which they were made; errors as of a manifest."""
        if not self._folder.is_dir():
            return []
        files = sorted(self._folder.glob(f"e{epoch:06d}-*.json"))
        return sorted(map(_read, files), key=lambda plan: plan.boundary_ordinal)

    def write(self, plan: SnapshotPlan) -> None:
        """Durable when this returns. Two plans never have one boundary's ordinal, so no two one name."""
        # No failpoint: a folder: one that is there already is as good.
        self._folder.mkdir(mode=0o700, exist_ok=True)
        with failpoint("landing.snapshot_plan", plan.table):
            create_exclusively(self._folder / _file_name(plan), encode(plan))

    def searched(self, plan: SnapshotPlan) -> Search | None:
        """The last search that is noted; None if there is none, or its note cannot be read."""
        try:
            return read_note(Search, self._folder / f"{_SEARCHED}{_file_name(plan)}")
        except (FileNotFoundError, Unreadable):
            return None

    def note_searched(self, plan: SnapshotPlan, search: Search) -> None:
        """Durable when this returns: what landed up to there is not read again for ``plan``, and may go."""
        with failpoint("landing.snapshot_plan", plan.table):
            replace(self._folder / f"{_SEARCHED}{_file_name(plan)}", encode(search))


def _file_name(plan: SnapshotPlan) -> str:
    return f"e{plan.epoch:06d}-{plan.boundary_ordinal & 0xFFFFFFFFFFFF:012x}.json"


def _read(file: Path) -> SnapshotPlan:
    try:
        content = content_of(file)
    except FileNotFoundError as problem:
        # Its name is there, and plans are never taken away.
        raise unreadable(file, problem.strerror) from None
    return decode(SnapshotPlan, content, file, newest=FORMAT_VERSION, upgrade=_upgraded)


def _upgraded(document: dict[str, Any]) -> dict[str, Any]:
    """The document of a plan of any known format version, in the form of ``FORMAT_VERSION``."""
    if document["format_version"] < 2:
        document = document | {"compared": False}
    if document["format_version"] < 3:
        document = document | {"scope": None}
    if document["format_version"] < 4:
        document = document | {"storage": None}
    return document | {"format_version": FORMAT_VERSION}


def newest_of_each(plans: Iterable[SnapshotPlan]) -> dict[str, SnapshotPlan]:
    """Return the newest plan of the whole table for each table.

    ``plans``: in the order in which they were made.
    """
    return {plan.table: plan for plan in plans if plan.scope is None}


def that_count(plans: Sequence[SnapshotPlan]) -> list[SnapshotPlan]:
    """Return the ``plans`` (in the order in which they were made) that no later plan of the whole table
    replaces."""
    newest = newest_of_each(plans)
    return [
        plan
        for plan in plans
        if plan.table not in newest or plan.boundary_ordinal >= newest[plan.table].boundary_ordinal
    ]


def is_whole(chunks: Iterable[ChunkSpan]) -> bool:
    """Whether ``chunks``, of one snapshot, are all of it: every chunk, and the boundary.

    A boundary that is numbered 0 was landed before tables were cut: its snapshot has one chunk.
    """
    spans = list(chunks)
    read = {chunk.chunk for chunk in spans if not chunk.boundary}
    return any(chunk.boundary and read >= set(range(max(1, chunk.chunk))) for chunk in spans)
