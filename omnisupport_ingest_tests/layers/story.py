"""A source that tests tell: transactions on a small table, landed as real stream batches."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import orjson

from omnisupport_ingest.contracts.load import load_contracts
from omnisupport_ingest.home import Home
from omnisupport_ingest.landing.manifest import ChunkSpan, FileSpan, Manifest, StreamSpan
from omnisupport_ingest.landing.names import chunk_batch_id, file_batch_id, stream_batch_id
from omnisupport_ingest.landing.rows import LandedEvent
from omnisupport_ingest.landing.writer import BatchWriter
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.windows import WindowSize

START = datetime(2026, 1, 1, 12, tzinfo=UTC)
SOURCE = "desk"
FIRST, SECOND, THIRD = "2026-01-01T1200", "2026-01-01T1201", "2026-01-01T1202"

CONTRACT = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "Notes",
    "description": "A table of two columns and a long text.",
    "type": "object",
    "required": ["id"],
    "additionalProperties": True,
    "properties": {
        "id": {"type": "integer", "x-pg-type": "bigint", "description": "Key."},
        "title": {"type": ["string", "null"], "x-pg-type": "text", "maxLength": 20, "description": "Title."},
        "body": {"type": ["string", "null"], "x-pg-type": "text", "description": "Long text."},
    },
    "x-cdc": {
        "version": "1.0.0",
        "source": SOURCE,
        "schema": "public",
        "table": "notes",
        "owner": "team:tests",
        "key": ["id"],
        "events": {"soft_delete_column": None},
        "lateness": {"allowed": "PT1H", "max": "P7D"},
        "pii": {},
    },
}


@dataclass
class Change:
    """One event of a transaction; ``unchanged`` columns are left out of ``after``."""

    op: str
    id: int | None = None
    values: dict[str, str | None] = field(default_factory=dict)
    unchanged: tuple[str, ...] = ()
    moved_from: int | None = None


@dataclass
class Commit:
    """A transaction: its commit LSN, its commit time in seconds after ``START``, its changes."""

    lsn: int
    second: float
    changes: Sequence[Change]


def key(id: int | None) -> str | None:
    return None if id is None else json.dumps([str(id)])


def events(commit: Commit, epoch: int = 1) -> list[LandedEvent]:
    """The landed events of ``commit``, a moved ``c`` standing one ordinal above its ``d``."""
    found = []
    index = -1
    for change in commit.changes:
        index += 0 if change.moved_from is not None else 1
        ordinal = 2 * index + (1 if change.moved_from is not None else 0)
        after = None
        if change.op in "cur":
            after = orjson.dumps({"id": str(change.id), **change.values}).decode()
        found.append(
            LandedEvent(
                epoch=epoch,
                commit_lsn=commit.lsn,
                ordinal=ordinal,
                op=change.op,
                source_ts=START + timedelta(seconds=commit.second),
                tx_id=commit.lsn,
                lsn=commit.lsn,
                source_schema="public",
                source_table="notes",
                key=key(change.id),
                before=None,
                after=after,
                unchanged=list(change.unchanged) or None,
                moved_from_key=key(change.moved_from),
                chunk_id=None,
            )
        )
    return found


class Story:
    """A home, its workspace, and the stream that lands in it."""

    def __init__(self, folder: Path) -> None:
        self.contracts = folder / "contracts"
        self.contracts.mkdir(parents=True)
        self.write_contract(CONTRACT)
        settings = Settings(
            home=folder / "home", window="minutes:1", contracts_dir=self.contracts, _env_file=None
        )
        home = Home.open(settings.home, WindowSize(1), now=START, storage=settings.storage)
        self.workspace = Workspace(settings, home, load_contracts(self.contracts))
        self.store = self.workspace.landing(SOURCE)
        self.clock = START + timedelta(minutes=5)
        self._ends: dict[int, Lsn] = {}

    def copied(self, folder: Path) -> Story:
        """Return a copy of this home and its stream, made in ``folder``, to be gone on with."""
        shutil.copytree(self.contracts.parent, folder)
        other = copy(self)
        other.contracts = folder / "contracts"
        of_folder = {"home": folder / "home", "contracts_dir": other.contracts}
        other.workspace = Workspace.open(self.workspace.settings.model_copy(update=of_folder))
        other.store, other._ends = other.workspace.landing(SOURCE), dict(self._ends)
        return other

    def write_contract(self, contract: object) -> None:
        (self.contracts / "notes.json").write_text(json.dumps(contract))

    @property
    def contract(self):  # type: ignore[no-untyped-def]
        return self.workspace.contracts.of_source(SOURCE)[0]

    @property
    def _end(self) -> Lsn:
        return self._ends.get(1, Lsn(0))

    def land(self, *commits: Commit, epoch: int = 1) -> Manifest:
        """Land ``commits`` as one batch that continues the stream of ``epoch``."""
        end = Lsn(commits[-1].lsn)
        return self._seal(
            [event for commit in commits for event in events(commit, epoch)],
            StreamSpan(
                previous_end_lsn=self._ends.get(epoch, Lsn(0)),
                end_lsn=end,
                start_lsn=Lsn(commits[0].lsn),
                last_commit_lsn=end,
                last_xid=commits[-1].lsn,
                first_commit_ts=START + timedelta(seconds=commits[0].second),
                last_commit_ts=START + timedelta(seconds=commits[-1].second),
            ),
            epoch,
        )

    def land_again(self, *commits: Commit, epoch: int = 1) -> Manifest:
        """Land a copy of ``commits`` in a batch of its own, as a second delivery would."""
        before = self._ends.get(epoch, Lsn(0))
        end = Lsn(before.value + 1)
        copies = [event for commit in commits for event in events(commit, epoch)]
        return self._seal(copies, StreamSpan(before, end, end, end, 1, START, START), epoch)

    def land_file(self, *commits: Commit, order: str = "lsn", misplaced: Sequence[int] = ()) -> Manifest:
        """Land ``commits`` as the lines of one input file of events, as a second way in would.

        ``misplaced``: lines (from 1) that the file has after a later event of the same key.
        """
        found = [
            event._replace(
                ordinal=event.commit_lsn << 14 | event.ordinal,
                commit_lsn=0,
                identity=f"{event.op} {event.key} {event.after}",
                misplaced=row in misplaced or None,
                file_row=row,
                envelope=json.dumps({"op": event.op, "after": event.after}),
            )
            for row, event in enumerate((each for commit in commits for each in events(commit)), start=1)
        ]
        digest = hashlib.sha256(repr(found).encode()).hexdigest()
        span = FileSpan(digest, f"{digest[:8]}.jsonl", "", order)
        return self._writer(found, file_batch_id(digest), 1).seal(file=span)

    def land_idle(self, end: int, epoch: int = 1) -> Manifest:
        """Land an empty batch that moves the stream of ``epoch`` on to ``end``."""
        before = self._ends.get(epoch, Lsn(0))
        return self._seal([], StreamSpan(before, Lsn(end), None, None, None, None, None), epoch)

    def land_keepalive(self, end: int, second: float) -> Manifest:
        """Land an empty batch that ends at ``end``, and by which all until ``second`` has landed."""
        span = StreamSpan(self._end, Lsn(end), None, None, None, None, None)
        writer = self._writer([], stream_batch_id(1, span.previous_end_lsn), 1)
        self._ends[1] = span.end_lsn
        return writer.seal(stream=span, confirmed_clock=START + timedelta(seconds=second))

    def land_chunk(self, read: Commit, high: int | None = None, epoch: int = 1) -> Manifest:
        """Land the rows of ``read`` as what a snapshot found at ``read.lsn``, without its boundary."""
        rows = [
            event._replace(ordinal=number - 100) for number, event in enumerate(events(read, epoch), start=1)
        ]
        return self._seal_chunk(rows, read, high, epoch, boundary=False)

    def land_boundary(self, read: Commit, high: int | None = None, epoch: int = 1) -> Manifest:
        """Land the boundary of the snapshot that ``land_chunk`` has landed the rows of."""
        end = Commit(read.lsn, read.second, [Change("b")])
        rows = [event._replace(ordinal=-100) for event in events(end, epoch)]
        return self._seal_chunk(rows, read, high, epoch, boundary=True)

    def _seal_chunk(
        self, found: list[LandedEvent], read: Commit, high: int | None, epoch: int, *, boundary: bool
    ) -> Manifest:
        span = ChunkSpan(
            snapshot_id=f"{read.lsn:016x}",
            table="notes",
            chunk=0,
            attempt=1,
            low=Lsn(read.lsn),
            high=Lsn(read.lsn if high is None else high),
            clock=START + timedelta(seconds=read.second),
            boundary=boundary,
        )
        return self.land_span(found, span, epoch)

    def land_span(self, found: list[LandedEvent], span: ChunkSpan, epoch: int = 1) -> Manifest:
        """Land the events ``found`` as the batch of a snapshot that ``span`` describes."""
        name = chunk_batch_id(epoch, span.snapshot_id, span.table, span.chunk, 1, boundary=span.boundary)
        return self._writer(found, name, epoch).seal(chunk=span)

    def _seal(self, found: list[LandedEvent], span: StreamSpan, epoch: int = 1) -> Manifest:
        writer = self._writer(found, stream_batch_id(epoch, span.previous_end_lsn), epoch)
        self._ends[epoch] = span.end_lsn
        return writer.seal(stream=span)

    def _writer(self, found: list[LandedEvent], name: str, epoch: int) -> BatchWriter:
        writer = BatchWriter(self.store, self.workspace.grid, epoch, name, clock=lambda: self.clock)
        for event in found:
            writer.add(event)
        return writer
