"""Collects what the lake knows of one key, from landing to the dimension: its events, copies and decisions.

Reads files by the key, without Spark. Values are shown as the lake holds them: protected by the contract's
policies for personal data, and absent where a row was erased.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from omnisupport_ingest.cdc.envelope import QUARANTINE_TYPE, RAW_TYPE
from omnisupport_ingest.cdc.erasing import key_hash
from omnisupport_ingest.cdc.fold import table_columns_of
from omnisupport_ingest.cdc.lateness import is_late
from omnisupport_ingest.cdc.stored import STATE
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.lake.checkpoint import Checkpoint
from omnisupport_ingest.lake.file_rows import rows_at
from omnisupport_ingest.lake.layout import WHOLE_TABLE, LakeFile
from omnisupport_ingest.lake.live_rows import live_table
from omnisupport_ingest.lake.schema import arrow_schema
from omnisupport_ingest.lake.table import LakeTable
from omnisupport_ingest.landing.manifest import DataFile, Manifest
from omnisupport_ingest.layers.erasures import Erasure, ErasureLedger
from omnisupport_ingest.layers.events.event_files import EventFiles
from omnisupport_ingest.layers.events.event_ref import EventRef
from omnisupport_ingest.layers.reviews import Review, ReviewLedger
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.position import Lsn, Position
from omnisupport_ingest.read.cell_origins import KeyEvent, Origin, RowOrigins, former_keys, origins_of
from omnisupport_ingest.windows import OUT_OF_RANGE

_FACTS = ("tx_id", "lsn", "event_hash", "file_name", "file_row", "chunk_id", "watermark_before")
_OF_EVENT = (
    *("epoch", "commit_lsn", "ordinal", "op", "key", "source_ts", "batch_id", "landed_at"),
    *("before", "after", "unchanged", "moved_from_key", "identity", "source_schema", "source_table"),
    *_FACTS,
)
_OF_QUARANTINE = ("detector", "rules", "review_state")
_SEARCHED = ("op", "key", "source_schema", "source_table", "commit_lsn")
_IN_RAW = ("epoch", "commit_lsn", "ordinal", "identity", "key", "batch_id", "landed_at")


class NothingToExplain(IngestError):
    """The lake has no event of the key.

    Fix: Write the key as PostgreSQL prints it. What has landed and is not taken in is known after the next
    run.
    """


@dataclass(frozen=True, slots=True)
class Copy:
    """An event of the key in raw that does not count.

    ``duplicate``: it is a copy of the event that is kept at ``position``; otherwise it is not judged yet.
    ``copies``: how many such events the batch has.
    """

    position: tuple[int, int, int]
    window: str
    batch_id: str
    landed_at: datetime
    duplicate: bool
    copies: int = 1


@dataclass(frozen=True, slots=True)
class Landed:
    """What landing has of a batch: its data files (none if landing no longer has it), and the input file
    it came from, if any."""

    batch: str
    files: tuple[DataFile, ...]
    kind: str | None
    origin: str | None

    def file_of(self, event: KeyEvent) -> str | None:
        """Return the data file of an event of the batch; None if landing no longer has it."""
        inside = (each.path for each in self.files if _holds(each, event))
        return next(inside, None)


def _holds(file: DataFile, event: KeyEvent) -> bool:
    epoch, commit_lsn, ordinal = event.position
    return (
        file.window == event.window and file.first <= Position(epoch, Lsn(commit_lsn), ordinal) <= file.last
    )


@dataclass(frozen=True)
class Explanation:
    """Everything known of one key. ``origins``: None if no accepted or withheld event concerns a row.

    ``checkpoints``: of every layer with events of the key, by layer and window, from raw to dimension.
    ``late``: window and position of events that landed in a closed window. ``shown``: the row in the
    dimension, None where it has none. ``waiting``: landed batches with events of the table that are not
    judged yet.
    """

    contract: TableContract
    key: str
    events: tuple[KeyEvent, ...]
    origins: RowOrigins | None
    copies: tuple[Copy, ...]
    late: frozenset[tuple[str, tuple[int, int, int]]]
    reviews: Mapping[EventRef, tuple[Review, ...]]
    erasures: tuple[Erasure, ...]
    landed: Mapping[str, Landed]
    checkpoints: tuple[Checkpoint, ...]
    shown: Mapping[str, Any] | None
    waiting: tuple[str, ...]

    @property
    def up_to_date(self) -> bool:
        """Whether the dimension shows the last event of the row."""
        if self.shown is None or self.origins is None:
            return False
        at = (self.shown[name] for name in ("_cdc_epoch", "_cdc_commit_lsn", "_cdc_ordinal"))
        ended = self.origins.ended_by
        lasts = {self.origins.last.position} | ({ended.position} if ended is not None else set())
        return tuple(at) in lasts

    @property
    def marked(self) -> Origin | None:
        """Origin of the soft-delete column, if the source has set it: then the row counts as deleted, but
        it exists."""
        mark = self.contract.soft_delete_column
        if self.origins is None or mark is None or self.origins.ended_by is not None:
            return None
        origin = self.origins.columns.get(mark)
        return origin if origin is not None and origin.resolved and origin.value is not None else None

    def ref(self, event: KeyEvent) -> EventRef:
        """Return the reference by which `quarantine` names the event."""
        return EventRef.of(*event.position, event.facts["event_hash"])


def explain(workspace: Workspace, contract: TableContract, key: str) -> Explanation:
    """Look up everything that is known of ``key``, as events have it (a JSON array of texts).

    Raises ``NothingToExplain`` if neither raw nor a later layer has an event of it.
    """
    files = EventFiles.newest(workspace, contract.source)
    events = _events(files, contract, key) if files is not None else []
    windows = sorted({each.window for each in events})
    waiting = _waiting(workspace, contract, files)
    raw = _raw_rows(workspace, contract, key, events, {*windows, *waiting})
    copies = copies_of(key, events, raw)
    if not _has_row(events, key) and not copies:
        raise NothingToExplain(
            f"The lake has no event of that key in {contract.full_name} of {contract.source}.",
            fix=f"Write the key ({', '.join(contract.key)}) as PostgreSQL prints it. What has landed and is "
            "not taken in yet is known after the next run (omnisupport-ingest status); what the source sent: "
            f"omnisupport-ingest landing tail --table {shlex.quote(contract.table)}",
        )
    of_row = [each for each in events if each.key is not None]
    reviews = ReviewLedger.open(workspace, contract.source)
    refs = [EventRef.of(*each.position, each.facts["event_hash"]) for each in events]
    keys = {key, *(each.key for each in of_row if each.key is not None)}
    batches = {each.batch_id for each in events} | {each.batch_id for each in copies}
    return Explanation(
        contract=contract,
        key=key,
        events=tuple(sorted(events, key=lambda each: (each.position, each.withheld))),
        origins=origins_of(events, key, table_columns_of(contract)) if _has_row(events, key) else None,
        copies=copies,
        late=frozenset(_late(workspace, contract, events)),
        reviews={ref: history for ref in refs if (history := reviews.history(ref))},
        erasures=tuple(_erasures(workspace, contract, keys)),
        landed={batch: _landed(workspace, contract, batch) for batch in sorted(batches)},
        checkpoints=tuple(_checkpoints(workspace, contract, windows)),
        shown=_shown(workspace, contract, key),
        waiting=tuple(sorted({batch for held in waiting.values() for batch in held})),
    )


def _has_row(events: Iterable[KeyEvent], key: str) -> bool:
    return any(each.key == key for each in events)


def _events(files: EventFiles, contract: TableContract, key: str) -> list[KeyEvent]:
    """Return every event of ``key`` and of the keys its row had before, and the table's truncates and
    ends."""
    events: list[KeyEvent] = []
    wanted, known = {key}, set[str]()
    where: Any = pc.field("op").isin(["t", "b"])
    while wanted:
        where = where | pc.field("key").isin(sorted(wanted))
        known |= wanted
        events += (each for each in _read(files, contract, where) if contract.has_key_at(each.position))
        wanted, where = former_keys(events) - known, pc.scalar(False)
    return events


def _read(files: EventFiles, contract: TableContract, where: Any) -> Iterator[KeyEvent]:
    schema = arrow_schema(RAW_TYPE, without=("window", "source_table"))
    columns = [name for name in _OF_EVENT if name != "source_table"]
    of_schema = pc.field("source_schema") == contract.schema
    for file in files.accepted(contract):
        for row in _rows(file, schema, columns, where & of_schema):
            yield _event(file, row, {})
    schema = arrow_schema(QUARANTINE_TYPE, without=("window", "reason"))
    of_table = of_schema & (pc.field("source_table") == contract.table)
    for file in files.withheld:
        for row in _rows(file, schema, [*_OF_EVENT, *_OF_QUARANTINE], where & of_table):
            reason = dict(file.partition).get("reason") or "unknown"
            yield _event(file, row, {"reason": reason} | {name: row[name] for name in _OF_QUARANTINE})


def _rows(file: LakeFile, schema: Any, columns: Sequence[str], where: Any) -> list[dict[str, Any]]:
    """Return the ``columns`` of the rows for which ``where`` holds, an expression of columns ``_SEARCHED``.

    Most bytes of events are images. Those are read only in row groups that have such a row.
    """
    path, searched = file.uri, [name for name in _SEARCHED if name in schema.names]
    rows = pq.read_table(path, schema=schema, columns=searched, partitioning=None)
    numbers = rows.append_column("number", pa.array(np.arange(rows.num_rows))).filter(where)["number"]
    read = pa.schema([schema.field(name) for name in columns])
    return [row for batch in rows_at(path, read, numbers.to_numpy()) for row in batch.to_pylist()]


def _event(file: LakeFile, row: Mapping[str, Any], quarantine: Mapping[str, Any]) -> KeyEvent:
    facts = {name: row[name] for name in _FACTS} | {"lake_file": file.path} | dict(quarantine)
    return KeyEvent(
        window=file.window,
        position=(row["epoch"], row["commit_lsn"], row["ordinal"]),
        op=row["op"],
        key=row["key"],
        source_ts=row["source_ts"],
        batch_id=row["batch_id"],
        landed_at=row["landed_at"],
        before=row["before"],
        after=row["after"],
        unchanged=tuple(row["unchanged"]) if row["unchanged"] else None,
        moved_from_key=row["moved_from_key"],
        identity=row["identity"],
        withheld=bool(quarantine),
        facts=facts,
    )


def _waiting(
    workspace: Workspace, contract: TableContract, files: EventFiles | None
) -> dict[str, frozenset[str]]:
    """Return the landed batches with events of the table that are not judged yet, by window."""
    store = workspace.landing(contract.source)
    landed, waiting = store.landed(), {}
    for window in store.windows():
        state = files.deduped.state(window) if files is not None else None
        parts = landed.untaken(window, frozenset(state.batches) if state is not None else frozenset())
        batches = frozenset(part.batch_id for part in parts if contract.full_name in part.rows_per_table)
        if batches:
            waiting[window] = batches
    return waiting


def _raw_rows(
    workspace: Workspace,
    contract: TableContract,
    key: str,
    events: Sequence[KeyEvent],
    windows: Iterable[str],
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield window and columns ``_IN_RAW`` of all raw rows of ``key``, or at the positions of ``events``."""
    raw = workspace.raw(contract.source).look()
    # A copy has the position of the accepted event, even if a policy for personal data changed its key.
    where = pc.field("commit_lsn").isin(sorted({each.position[1] for each in events}))
    where = (where | (pc.field("key") == key)) & (pc.field("source_schema") == contract.schema)
    where = where & (pc.field("source_table") == contract.table)
    for window in sorted(set(windows)) if raw is not None else ():
        for file in raw.files(window) if raw is not None else ():
            for row in _rows(file, arrow_schema(RAW_TYPE, without=("window",)), _IN_RAW, where):
                if contract.has_key_at((row["epoch"], row["commit_lsn"], row["ordinal"])):
                    yield window, row


def copies_of(
    key: str, events: Iterable[KeyEvent], raw: Iterable[tuple[str, Mapping[str, Any]]]
) -> tuple[Copy, ...]:
    """Return the rows of ``key`` in raw besides ``events``: copies of them, and events that are not judged
    yet.

    ``raw``: windows and rows with the columns ``_IN_RAW``, in any order.
    """
    kept = Counter((each.window, each.position, each.batch_id) for each in events)
    kept_at = {(window, position) for window, position, _ in kept}
    counted: Counter[tuple[str, tuple[int, int, int], str]] = Counter()
    landed: dict[str, datetime] = {}
    for window, row in raw:
        position = (row["epoch"], row["commit_lsn"], row["ordinal"])
        other = row["identity"] is not None or (window, position) not in kept_at
        if row["key"] != key and other:
            continue
        counted[window, position, row["batch_id"]] += 1
        landed[row["batch_id"]] = row["landed_at"]
    return tuple(
        Copy(position, window, batch, landed[batch], (window, position) in kept_at, extra)
        for (window, position, batch), count in sorted(counted.items())
        if (extra := count - kept[window, position, batch]) > 0
    )


def _late(
    workspace: Workspace, contract: TableContract, events: Iterable[KeyEvent]
) -> Iterator[tuple[str, tuple[int, int, int]]]:
    for each in events:
        if each.window != OUT_OF_RANGE and is_late(
            each.facts["watermark_before"], workspace.grid.end_of(each.window), contract.allowed_lateness
        ):
            yield each.window, each.position


def _erasures(workspace: Workspace, contract: TableContract, keys: Iterable[str]) -> Iterator[Erasure]:
    hashes = {key_hash(each) for each in keys}
    for each in ErasureLedger.open(workspace, contract.source).erasures:
        of_table = (each.source_schema, each.source_table) == contract.table_name
        if of_table and each.key_hash in hashes:
            yield each


def _landed(workspace: Workspace, contract: TableContract, batch_id: str) -> Landed:
    store = workspace.landing(contract.source)
    if not store.exists(batch_id):
        return Landed(batch_id, (), None, None)
    batch = store.read(batch_id)
    files = tuple(each for each in batch.files if contract.full_name in each.rows_per_table)
    return Landed(batch_id, files, batch.kind, _origin(batch))


def _origin(batch: Manifest) -> str | None:
    if batch.stream is not None:
        return f"WAL {batch.stream.previous_end_lsn} to {batch.stream.end_lsn}"
    if batch.chunk is not None:
        return f"snapshot {batch.chunk.snapshot_id}, chunk {batch.chunk.chunk + 1}"
    return batch.file.name if batch.file is not None else None


def _checkpoints(
    workspace: Workspace, contract: TableContract, windows: Sequence[str]
) -> Iterator[Checkpoint]:
    of_windows = (
        workspace.raw(contract.source),
        workspace.deduped(contract.source),
        workspace.net_changes(contract),
    )
    for table in of_windows:
        yield from _of_table(table, windows)
    yield from _of_table(workspace.dimension(contract), (WHOLE_TABLE,))


def _of_table(table: LakeTable, windows: Iterable[str]) -> Iterator[Checkpoint]:
    snapshot = table.look()
    for window in windows if snapshot is not None else ():
        state = snapshot.state(window) if snapshot is not None else None
        if state is not None:
            yield state.checkpoint


def _shown(workspace: Workspace, contract: TableContract, key: str) -> Mapping[str, Any] | None:
    snapshot = workspace.dimension(contract).look()
    for file in snapshot.all_files() if snapshot is not None else ():
        schema = pq.read_schema(file.stored)
        columns = [name for name in schema.names if name != STATE]
        rows = live_table(file, columns=columns, filters=pc.field("_cdc_key") == key)
        if rows.num_rows:
            row: dict[str, Any] = rows.to_pylist(maps_as_pydicts="lossy")[0]
            return row
    return None
