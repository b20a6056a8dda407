"""Lands a delivery: its rows become batches, each named by the hash of its content.

A ``full_snapshot`` is one batch: a snapshot end, then one ``r`` event per row. So a later snapshot replaces
an earlier one, including rows that it no longer has. With ``incremental_cursor`` and ``backfill``, each file
is a batch, and the cursor of a row is its position, as in ``sources/query``: whatever the order of the files,
an older version never overwrites a newer one. A snapshot of a table with a cursor stands at its moment, above
earlier changes and below later ones. The same content again changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import pyarrow as pa

from omnisupport_ingest.contracts.learned import LearnedColumns
from omnisupport_ingest.json_values import compact
from omnisupport_ingest.landing.first_windows import FirstWindows
from omnisupport_ingest.landing.manifest import CURSOR_ORDER, FileSpan, Manifest
from omnisupport_ingest.landing.names import file_batch_id
from omnisupport_ingest.landing.rows import LandedEvent
from omnisupport_ingest.landing.schema_changes import SchemaChanges
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.landing.writer import BatchWriter
from omnisupport_ingest.locks import locked_folder
from omnisupport_ingest.position import KEPT_OUT
from omnisupport_ingest.sources.contracted_relation import landed_relations
from omnisupport_ingest.sources.debezium.land import refuse_paused
from omnisupport_ingest.sources.manifests.examine import (
    Examined,
    ExaminedFile,
    RowGates,
    SeedRefused,
    examine,
)
from omnisupport_ingest.sources.manifests.formats import Record, Row, digests, records
from omnisupport_ingest.sources.manifests.landed_before import LandedBefore, Part, sha256_of
from omnisupport_ingest.sources.manifests.landed_snapshots import LandedSnapshots, window_of_snapshot
from omnisupport_ingest.sources.manifests.policies import BACKFILL, FULL_SNAPSHOT
from omnisupport_ingest.sources.manifests.seed_manifest import SeedManifest
from omnisupport_ingest.sources.postgres.protocol.row_events import row_key
from omnisupport_ingest.sources.query.cursor import (
    END_ORDINAL,
    GENERATIONS,
    CursorColumn,
    KeysetPosition,
    micros,
    micros_of,
)
from omnisupport_ingest.sources.query.events import Known, RowEvents, RowWindows, identity_start
from omnisupport_ingest.sources.query.reader import Rows
from omnisupport_ingest.sources.shown_columns import Recorder, ShownColumn, Sighting
from omnisupport_ingest.windows import MAX_AHEAD, OUT_OF_RANGE, WindowGrid

FIRST_ORDINAL = -(1 << 62)
"""Ordinal of the first event of a table without a cursor.

Ordinals rise across all deliveries of a source and stay negative: a row that comes again is a later event,
never a collision.
"""

FIRST_EPOCH = "first delivery"
"""The reason recorded for the first epoch of a source of deliveries."""

_BLOCK_ROWS = 5_000
_BLOCK_CHARACTERS = 8 << 20
"""A block of rows in memory ends when it reaches one of these limits."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """The outcome of a delivery. ``batches``: all that hold it, including ``before``, those that had landed
    before. ``examined``: the result of its examination."""

    batches: tuple[Manifest, ...]
    before: frozenset[str]
    examined: Examined

    @property
    def already_landed(self) -> bool:
        """Whether the delivery contained nothing new."""
        return len(self.before) == len(self.batches)


@dataclass(frozen=True)
class Inlet:
    """Where the deliveries of a source land.

    ``licenses``: those that it accepts; empty: any. ``alone``: the source has one table, so a delivery says
    up to when all of it is complete. ``clock``: timezone-aware. ``learned``: columns that additive contracts
    have learned; None: nothing is learned here. ``tables``: those of the source (``schema.table``); a
    delivered table counts as one in any case.
    """

    store: LandingStore
    grid: WindowGrid
    licenses: Collection[str] = ()
    alone: bool = True
    clock: Callable[[], datetime] = lambda: datetime.now(UTC)
    learned: LearnedColumns | None = None
    tables: Collection[str] = ()


def land(seed: SeedManifest, inlet: Inlet) -> Delivery:
    """Check and land the files of ``seed``, whose mode has files of rows.

    Raises ``SeedRefused`` for a fault that a gate rejects, and ``FilesPaused``; then nothing has landed.
    """
    refuse_paused(inlet.store.folder)
    moment = _moment_of(seed, inlet)
    examined = examine(seed, inlet.licenses)
    examined.refuse_rejected()
    if not examined.files:
        raise SeedRefused(f"No file of {seed.path} is there.", fix="Deliver at least one, or none of it.")
    store = inlet.store
    with locked_folder(store.folder):
        _refuse_other_order(seed, store)
        delivery = LandedBefore.of(seed, store, examined, alone=inlet.alone)
        delivery.note_duplicates(store, examined)
        examined.refuse_rejected()
        missing = [each for each in delivery.parts if each.identity not in delivery.before]
        batches = []
        if missing:
            _record_columns(seed, inlet, examined, moment)
        for part in delivery.parts:
            landed = delivery.before.get(part.identity)
            if landed is None:
                missing.remove(part)
                # The delivery is complete only when its last batch has landed.
                complete = None if missing else delivery.complete
                landed = _Unit(seed, inlet, part, moment, ends=examined.whole, complete=complete).land()
            batches.append(landed)
    return Delivery(tuple(batches), frozenset(each.batch_id for each in delivery.before.values()), examined)


def look_through(seed: SeedManifest, inlet: Inlet) -> Examined:
    """Return what ``land`` would find, for a dry run.

    Raises ``SeedRefused`` as ``land`` does, except for faults that a gate rejects.
    """
    _moment_of(seed, inlet)
    examined = examine(seed, inlet.licenses)
    store = inlet.store
    _refuse_other_order(seed, store)
    LandedBefore.of(seed, store, examined, alone=inlet.alone).note_duplicates(store, examined)
    return examined


def _record_columns(seed: SeedManifest, inlet: Inlet, examined: Examined, moment: datetime) -> None:
    """Record the columns that the files of a delivery have together.

    A backfill, which has past rows, is ignored; so is a file of which all rows wait in quarantine.
    """
    if seed.load_mode == BACKFILL:
        return
    contract, epoch = seed.contract, inlet.store.current_epoch()
    changes = SchemaChanges(inlet.store.folder)
    known = changes.tables().get(contract.name)
    contracted = {each.name for each in contract.source_columns}
    before = contracted if known is None else {each.name for each in known.columns}
    # A file that names no column of the table has no header, or belongs to another table: its names may be
    # values.
    files = [
        each
        for each in examined.files
        if not each.waits
        and (each.columns is None or any(column.name in contracted | before for column in each.columns))
    ]
    if not files:
        return
    own = [each.columns for each in files if each.columns is not None]
    columns = {column.name: column for each in own for column in each}
    if not own and known is None:
        # A row of JSON Lines may leave out any column.
        columns = {name: ShownColumn(name) for name in contracted}
    columns |= {name: columns.get(name, ShownColumn(name)) for each in files for name in each.more}
    recorder = Recorder(
        changes,
        inlet.learned,
        1 if epoch is None else epoch.number,
        inlet.clock(),
        partial=len(own) < len(files),
    )
    new = columns.keys() - before
    first = next((each for each in files if new & _named_by(each)), files[0])
    rows = Sighting(moment, sum(each.rows for each in files), first.file.path.name)
    recorder.take(contract, tuple(columns.values()), rows)


def _named_by(file: ExaminedFile) -> set[str]:
    return {*(each.name for each in file.columns or ()), *file.more}


def _moment_of(seed: SeedManifest, inlet: Inlet) -> datetime:
    """Return the moment of ``seed``. Raises ``SeedRefused`` if no window of the home can hold it."""
    contract, now = seed.contract, inlet.clock()
    if inlet.store.source != contract.source:
        raise ValueError(f"rows of {contract.source} do not belong to the landing of {inlet.store.source}")
    moment = seed.as_of or now
    if moment > now + MAX_AHEAD:
        raise SeedRefused(
            f"{seed.path} at $.as_of: {moment.isoformat()} is more than a day ahead of the clock of this "
            f"machine, where it is {now.isoformat(timespec='seconds')}; every row would be quarantined.",
            fix="Correct as_of, or the clock; or leave as_of out, so that the rows count from the moment "
            "they land.",
        )
    earliest = moment if contract.cursor is None else max(moment, inlet.grid.first)
    if inlet.grid.key_of(earliest, now) == OUT_OF_RANGE:
        raise SeedRefused(
            f"{seed.path} at $.as_of: {moment.isoformat()} is in no window of this home, which begins at "
            f"{inlet.grid.first.isoformat()}; every row would be quarantined.",
            fix="Leave as_of out, so that the rows count from the moment they land.",
        )
    return moment


class _Unit:
    """One batch of a delivery. ``ends``: the snapshot is whole, so rows that it lacks are ended.
    ``complete``: up to when the source is complete with this batch; None if unknown."""

    def __init__(
        self,
        seed: SeedManifest,
        inlet: Inlet,
        part: Part,
        moment: datetime,
        *,
        ends: bool,
        complete: datetime | None,
    ) -> None:
        store = inlet.store
        epoch = store.current_epoch() or store.begin_epoch(FIRST_EPOCH, None, now=inlet.clock())
        self._seed, self._inlet, self._files = seed, inlet, part.files
        self._identity = part.free_name(store)
        self._moment, self._ends, self._epoch = moment, ends, epoch.number
        self._complete = complete
        self._gates = RowGates(seed)
        self._cursor = CursorColumn.of(seed.contract) if seed.contract.cursor is not None else None
        # Each row stands at its own cursor. The rows of a snapshot stand together instead.
        self._by_cursor = self._cursor is not None and seed.load_mode != FULL_SNAPSHOT
        self._snapshots: LandedSnapshots | None = None
        self._window: str | None = None
        if not self._by_cursor:
            self._window = window_of_snapshot(moment, store.watermark_until(self._epoch), inlet.grid)
        if self._cursor is None:
            table, landed = seed.contract.full_name, LandedSnapshots.of(store)
            self._snapshots = landed.with_one(table, moment) if ends else landed
            self._complete = self._snapshots.complete({table, *inlet.tables})

    def land(self) -> Manifest:
        """Write the batch.

        Only the written data files show whether a position of the batch has landed in another window. If so,
        the batch is written a second time, with such events in their first windows.
        """
        with self._writer() as writer:
            for event in self._events():
                self._add(writer, event)
            if self._cursor is None:
                return self._seal(writer)
            with FirstWindows.of(self._inlet.store, self._epoch, writer.finish()) as first_windows:
                if not first_windows:
                    return self._seal(writer)
                writer.abandon()
                with self._writer() as second:
                    for event in self._events():
                        self._add(second, event, first_windows.window_of(event))
                    return self._seal(second)

    def _writer(self) -> BatchWriter:
        inlet = self._inlet
        batch_id = file_batch_id(self._identity)
        return BatchWriter(inlet.store, inlet.grid, self._epoch, batch_id, clock=inlet.clock)

    def _add(self, writer: BatchWriter, event: LandedEvent, window: str | None = None) -> None:
        if self._cursor is not None:
            # As in a reading by cursor: times before the home's first window, or far ahead, go to that
            # window.
            grid, now = self._inlet.grid, self._inlet.clock()
            if window is None and self._by_cursor:
                window = RowWindows(grid, now).of(event.source_ts)
            window = window or self._window or grid.key_of(max(event.source_ts, grid.first), now)
            writer.add_to(window, event)
        elif self._window is not None:
            writer.add_to(self._window, event)
        else:
            writer.add(event)

    def _seal(self, writer: BatchWriter) -> Manifest:
        for each in self._files:
            # The file may have changed since it was examined.
            if digests(each.file.path).content != each.content:
                raise SeedRefused(
                    f"{each.file.path} has changed while it was read.",
                    fix="Deliver it when its writer has finished.",
                )
        seed = self._seed
        return writer.seal(
            file=FileSpan(
                sha256=self._identity,
                name=", ".join(each.file.path.name for each in self._files) or seed.path.name,
                manifest=seed.reference,
                order=CURSOR_ORDER if self._cursor is not None else None,
                snapshots=dict(self._snapshots.moments) if self._snapshots is not None else None,
            ),
            relations=landed_relations(self._inlet.store.folder, [seed.contract]),
            confirmed_clock=self._complete,
        )

    def _events(self) -> Iterator[LandedEvent]:
        ordinal = self._first_ordinal()
        if self._seed.load_mode == FULL_SNAPSHOT and self._ends:
            yield self._event("b", ordinal, None, None)
        before = 0
        for each in self._files:
            block: list[Record] = []
            size = 0
            for record in records(each.file.path, self._seed.contract):
                block.append(record)
                size += len(record.text)
                if len(block) == _BLOCK_ROWS or size >= _BLOCK_CHARACTERS:
                    yield from self._of_block(each, block, before, ordinal)
                    ordinal, block, size = self._after(ordinal, block), [], 0
            yield from self._of_block(each, block, before, ordinal)
            ordinal = self._after(ordinal, block)
            before += each.rows

    def _of_block(
        self, file: ExaminedFile, block: Sequence[Record], before: int, ordinal: int
    ) -> Iterator[LandedEvent]:
        """Yield the events of ``block``. ``before``: number of rows in earlier files, so that row numbers are
        unique in the batch."""
        waits = [file.waits or self._gates.kept_out_by(record) for record in block]
        placed, lacking = self._placed(block), file.lacking(self._seed.contract)
        for number, (record, gate) in enumerate(zip(block, waits, strict=True)):
            event = placed[number]
            if event is None:
                event = self._snapshot_row(record, ordinal + 1 + (0 if self._cursor else number))
            if gate is not None:
                event = event._replace(
                    after=None, envelope=record.text, identity=self._kept_out(gate, record)
                )
                if event.key is None:
                    # An event of no row: only judging looks at it.
                    event = event._replace(op="u")
            elif lacking is not None and event.after is not None:
                event = event._replace(unchanged=lacking)
            yield event._replace(file_row=before + record.number)

    def _placed(self, block: Sequence[Record]) -> list[LandedEvent | None]:
        """Return the event of each row that stands at its cursor, as in ``sources/query``. For a record
        without a position it is an event of no row; None for all records of a snapshot."""
        events: list[LandedEvent | None] = [None] * len(block)
        cursor, contract = self._cursor, self._seed.contract
        if not self._by_cursor or cursor is None:
            return events
        rows = {number: record.row for number, record in enumerate(block) if record.row is not None}
        good = {number: row for number, row in rows.items() if self._gates.has_position(row)}
        if good:
            makes = RowEvents(contract, cursor, self._inlet.grid, self._epoch)
            table = makes.of(_columns(list(good.values()), self._seed, cursor), {}, Known(), 1 << 62)
            for number, values in zip(good, table.to_pylist(), strict=True):
                events[number] = LandedEvent(*values.values())
        return [each if each is not None else self._event("u", END_ORDINAL, None, None) for each in events]

    def _snapshot_row(self, record: Record, ordinal: int) -> LandedEvent:
        row = record.row
        if row is None:
            return self._event("r", ordinal, None, None)
        return self._event("r", ordinal, _key_of(row, self._seed), compact(row))

    def _event(self, op: str, ordinal: int, key: str | None, after: str | None) -> LandedEvent:
        contract = self._seed.contract
        identity = None
        if self._cursor is not None:
            start = identity_start(contract)
            identity = f"{start}{key}]" if key is not None else f"{start[:-1]}]"
        return LandedEvent(
            self._epoch, 0, ordinal, op, self._moment, None, None, contract.schema, contract.table,
            key, None, after, None, None, None, identity,
        )  # fmt: skip

    def _kept_out(self, gate: str, record: Record) -> str:
        digest = sha256_of(f"{self._identity} {record.number} {record.text}")[:16]
        return compact([KEPT_OUT, gate, record.number, digest])

    def _first_ordinal(self) -> int:
        if self._cursor is not None:
            # A row that was changed at the moment of the snapshot stands just below it.
            return micros(self._moment) * GENERATIONS + 1
        used = (
            each.file_ordinal for each in self._inlet.store.epoch_standings() if each.epoch == self._epoch
        )
        return max((each + 1 for each in used if each is not None), default=FIRST_ORDINAL)

    def _after(self, ordinal: int, block: Sequence[Record]) -> int:
        return ordinal if self._cursor is not None else ordinal + len(block)


def _columns(rows: Sequence[Row], seed: SeedManifest, cursor: CursorColumn) -> Rows:
    """Return ``rows``, all with a cursor, in the form of a reading by queries."""
    keys = [_key_of(row, seed) for row in rows]
    images = [compact(row) for row in rows]
    times = pa.nulls(len(rows), pa.int64())
    if cursor.event_time is not None:
        times = micros_of(pa.array([row.get(cursor.event_time) for row in rows], pa.string()))
    return Rows(
        pa.array(keys, pa.string()),
        pa.array(images, pa.string()),
        cursor.numbers(pa.array([row[cursor.name] for row in rows], pa.string())),
        times,
        KeysetPosition(None, ()),
        sum(map(len, images)),
    )


def _key_of(row: Row, seed: SeedManifest) -> str:
    return row_key([row[name] for name in seed.contract.key])


def _refuse_other_order(seed: SeedManifest, store: LandingStore) -> None:
    """Refuse a source that holds another kind of landing: its positions are not comparable."""
    by_cursor = seed.contract.cursor is not None
    for each in store.epoch_standings():
        other_order = None
        if each.chunks or each.last_stream:
            other_order = "a captured stream"
        elif each.order not in (None, CURSOR_ORDER):
            other_order = "events of Debezium"
        elif by_cursor and each.deliveries:
            other_order = "deliveries of a table without a cursor"
        elif not by_cursor and each.files > each.deliveries:
            other_order = "rows that stand by their cursors"
        if other_order is not None:
            raise SeedRefused(
                f"{store.source} has {other_order}; rows of {seed.contract.full_name} are not mixed into it, "
                "as their positions are others.",
                fix="Land them as a source of their own: contracts with another x-cdc.source.",
            )
