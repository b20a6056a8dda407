"""Lands a file of Debezium events as one batch, named by the hash of its content.

Files may come hours late, twice, overlapping and in any order. An event has its own position, so the same
event in another file is a duplicate, and an older event still gets its place in the order. A file lands whole
or not at all. The same content again is recognised and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Protocol, Self, TypeAlias

import pyarrow as pa

from omnisupport_ingest.contracts.landed_keys import LandedKeyChanged, LandedKeys
from omnisupport_ingest.contracts.learned import LearnedColumns
from omnisupport_ingest.contracts.load import Contracts
from omnisupport_ingest.foreign import printable
from omnisupport_ingest.landing.first_windows import FirstWindows
from omnisupport_ingest.landing.manifest import CURSOR_ORDER, FileSpan, Manifest
from omnisupport_ingest.landing.names import file_batch_id
from omnisupport_ingest.landing.rows import LandedEvent
from omnisupport_ingest.landing.schema_changes import SchemaChanges
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.landing.writer import BatchWriter
from omnisupport_ingest.locks import locked_folder
from omnisupport_ingest.sources.contracted_relation import landed_relations
from omnisupport_ingest.sources.debezium.faults import (
    AnotherLife,
    FileChanged,
    FileRefused,
    FilesPaused,
    LineFault,
    SourceTakesNoFiles,
    TableParked,
)
from omnisupport_ingest.sources.debezium.handling import BY_ARRIVAL, REFUSE, Handling, LineContext
from omnisupport_ingest.sources.debezium.latest_times import LatestTimes
from omnisupport_ingest.sources.debezium.line_blocks import Block
from omnisupport_ingest.sources.debezium.line_reader import LineReader, Tally, add, add_table, is_unread
from omnisupport_ingest.sources.debezium.lines import Content, Lines, content_of
from omnisupport_ingest.sources.debezium.orders import Orders
from omnisupport_ingest.sources.debezium.shown_schemas import First
from omnisupport_ingest.sources.packed import plain_name
from omnisupport_ingest.sources.postgres.capture.requests import PauseRequest
from omnisupport_ingest.sources.shown_columns import Recorder
from omnisupport_ingest.windows import WindowGrid

FIRST_EPOCH = "first file of events"
"""The reason recorded for the first epoch of a source of files."""


@dataclass(frozen=True, slots=True)
class FileLanding:
    """The batch that holds a file. ``tally``: None if the file had landed before and nothing was done.

    ``began_epoch``: the epoch that began with this file, if one did.
    """

    path: Path
    manifest: Manifest
    tally: Tally | None
    began_epoch: int | None

    @property
    def already_landed(self) -> bool:
        return self.tally is None


@dataclass(frozen=True)
class Inlet:
    """A source into which files of events land.

    ``captured``: the source that capture owns, which accepts no files. ``clock``: the time of landing,
    timezone-aware; the watermark stays ``max_clock_skew`` behind it. ``learned``: columns that additive
    contracts have learned; None: nothing is learned here. ``delivery``: the manifest that describes the
    files; empty: they come alone.
    """

    store: LandingStore
    grid: WindowGrid
    contracts: Contracts
    captured: str
    handling: Handling = field(default_factory=Handling)
    max_clock_skew: timedelta = timedelta(0)
    clock: Callable[[], datetime] = lambda: datetime.now(UTC)
    learned: LearnedColumns | None = None
    delivery: str = ""

    def schemas(self, epoch: int) -> Recorder:
        """Return the recorder of the schemas of rows that land in ``epoch``."""
        partial = self.handling.bare_rows
        changes = SchemaChanges(self.store.folder)
        return Recorder(changes, self.learned, epoch, self.clock(), partial=partial)


def check_source(source: str, captured: str, contracts: Contracts) -> None:
    """Raise ``SourceTakesNoFiles`` for a source that accepts no files of events, before its landing
    exists."""
    if source == captured:
        raise SourceTakesNoFiles(
            f"{source} is the source that capture reads (OMNISUPPORT_SOURCE); files of events are not mixed "
            "into it, as their positions are others.",
            fix="Land them as a source of their own: --source with another name, which contracts give as "
            "x-cdc.source.",
        )
    if not contracts.of_source(source):
        known = ", ".join(name for name in contracts.sources() if name != captured) or "none"
        raise SourceTakesNoFiles(
            f"No contract names the source {source!r}. Those that one does, beside capture's own: {known}.",
            fix="Correct --source, or write a contract with that x-cdc.source (contracts/data).",
        )


def land(
    path: Path, inlet: Inlet, *, new_epoch: str | None = None, examined: str | None = None
) -> FileLanding:
    """Land the events of ``path``.

    ``new_epoch``: why the next epoch of the source begins with this file; a file that has landed before
    begins none. ``examined``: the content name of what was examined before; None if nothing was. Raises
    ``FileRefused`` and ``LandedKeyChanged``, which name the line that cannot land, and ``FilesPaused``; then
    nothing has landed.
    """
    store = inlet.store
    check_source(store.source, inlet.captured, inlet.contracts)
    refuse_paused(store.folder)
    _refuse_name(path)
    content = _content_as(path, examined)
    batch_id = file_batch_id(content.sha256)
    with locked_folder(store.folder):
        refuse_other_deliveries(store)
        if store.exists(batch_id):
            return FileLanding(path, store.read(batch_id), None, None)
        current = store.current_epoch()
        begins = new_epoch if current is not None else new_epoch or FIRST_EPOCH
        now = inlet.clock()
        if begins is not None:
            # Beginning an epoch is final, so a refused file must not begin one.
            for _ in _Reading(path, inlet, None, content, now).parts(0):
                pass
            current = store.begin_epoch(begins, None, now=now)
        assert current is not None
        manifest, tally = land_reading(
            _Reading(path, inlet, current.number, content, now), inlet, current.number
        )
    return FileLanding(path, manifest, tally, current.number if begins is not None else None)


def refuse_paused(folder: Path) -> None:
    """Raise ``FilesPaused`` while the source is paused whose landing is in ``folder``."""
    pause = PauseRequest(folder).read()
    if pause is not None:
        raise FilesPaused(
            f"The source {folder.name} is paused {pause}.",
            fix=f"omnisupport-ingest source resume {folder.name}",
        )


class LookThrough:
    """Reads files to the end without landing them, one after the other, as ``land`` would land them.

    Each file is held against what has landed and against the files before it.
    """

    def __init__(self, inlet: Inlet) -> None:
        store = inlet.store
        check_source(store.source, inlet.captured, inlet.contracts)
        refuse_other_deliveries(store)
        current = store.current_epoch()
        self._inlet, self._epoch = inlet, None if current is None else current.number
        self._orders = Orders.of(store, self._epoch)
        self._read: set[str] = set()

    def read(self, path: Path, examined: str) -> Tally | None:
        """Return a count of the lines of ``path``; None if a file before it has the same content.

        ``examined``: as of ``land``. Raises ``FileRefused`` and ``LandedKeyChanged`` as ``land`` does.
        """
        _refuse_name(path)
        content, store = _content_as(path, examined), self._inlet.store
        batch_id = file_batch_id(content.sha256)
        if batch_id in self._read:
            return None
        self._read.add(batch_id)
        if store.exists(batch_id):
            # It does not land again, so nothing after it is compared with it once more.
            epoch: int | None = store.read(batch_id).epoch
            orders = Orders.of(store, epoch)
        else:
            epoch, orders = self._epoch, replace(self._orders)
        reading = _Reading(path, self._inlet, epoch, content, self._inlet.clock(), orders=orders)
        for _ in reading.parts(0):
            pass
        if not store.exists(batch_id):
            self._orders = orders.as_landed()
        return reading.tally


def _content_as(path: Path, examined: str | None) -> Content:
    """Return the content of ``path``. Raises ``FileChanged`` if it is not the one that was ``examined``."""
    content = content_of(path)
    if examined is not None and content.sha256 != examined:
        raise FileChanged(
            f"{printable(path)} has changed since it was examined.",
            fix="Land it when its writer has finished.",
        )
    return content


Part: TypeAlias = LandedEvent | pa.Table


class Reading(Protocol):
    """One pass over what becomes a batch, from its first event to its last."""

    @property
    def batch_id(self) -> str: ...

    @property
    def tally(self) -> Tally: ...

    def parts(self, epoch: int) -> Iterator[Part]:
        """Yield the events, in no order: one at a time, or many as a table of ``EVENT_SCHEMA``."""

    def events(self, epoch: int) -> Iterator[LandedEvent]:
        """Yield the same events one by one, in order."""

    def again(self, epoch: int) -> Self:
        """Return another pass over the same events."""

    def seal(self, writer: BatchWriter) -> Manifest:
        """Land what was read and given to ``writer``."""


def land_reading(reading: Reading, inlet: Inlet, epoch: int) -> tuple[Manifest, Tally]:
    """Land what ``reading`` reads.

    Only the written data files show whether a position has landed in another window. If so, everything is
    read again, and such events land in their first windows.
    """
    with _writer(reading, inlet, epoch) as writer:
        for part in reading.parts(epoch):
            if isinstance(part, LandedEvent):
                add(writer, part)
            else:
                add_table(writer, part)
        with FirstWindows.of(inlet.store, epoch, writer.finish()) as first_windows:
            if not first_windows:
                return reading.seal(writer), reading.tally
            writer.abandon()
            again = reading.again(epoch)
            with _writer(again, inlet, epoch) as second:
                for event in again.events(epoch):
                    window = first_windows.window_of(event)
                    if window is None or is_unread(event) or window == second.window_of(event.source_ts):
                        add(second, event)
                    else:
                        second.add_to(window, event)
                        again.tally.in_first_window += 1
                return again.seal(second), again.tally


def _writer(reading: Reading, inlet: Inlet, epoch: int) -> BatchWriter:
    return BatchWriter(inlet.store, inlet.grid, epoch, reading.batch_id, clock=inlet.clock)


class _Reading:
    """One pass over a file, from its first line to its last."""

    def __init__(
        self,
        path: Path,
        inlet: Inlet,
        epoch: int | None,
        content: Content,
        landed_at: datetime,
        *,
        orders: Orders | None = None,
    ) -> None:
        self.tally = Tally()
        self.batch_id = file_batch_id(content.sha256)
        self._path, self._inlet, self._content, self._landed_at = path, inlet, content, landed_at
        self._epoch = epoch
        arrival = inlet.handling.order == BY_ARRIVAL
        contracts = inlet.contracts.of_source(inlet.store.source)
        self._reader = LineReader(
            Orders.of(inlet.store, epoch) if orders is None else orders,
            contracts,
            inlet.handling.with_contracts(contracts),
            self.tally,
            next_ordinal=_above_all(inlet.store, epoch) if arrival else None,
            parked=LandedKeys(inlet.store.folder).changed(contracts),
        )
        self._beside = LineContext(plain_name(path), landed_at if arrival else None)

    def parts(self, epoch: int) -> Iterator[Part]:
        """Yield the events of the file. Raises ``FileRefused`` and ``LandedKeyChanged`` for a line that must
        not land."""
        lines = Lines(self._path)
        with LatestTimes() as latest:
            for block in lines.blocks():
                start = 0
                while start < len(block) and self._reader.orders.known is None:
                    # The first change decides the order of the source; until it is known, no line is
                    # ordinary.
                    yield from self._of_block(block, start, epoch, latest)
                    start += 1
                tables, others = self._reader.take_ordinary(block, epoch, start)
                yield from tables
                for i in others:
                    yield from self._of_block(block, i, epoch, latest)
        self._check_end(lines)

    def events(self, epoch: int) -> Iterator[LandedEvent]:
        """Yield the same events one by one, in the order of the file."""
        lines = Lines(self._path)
        with LatestTimes() as latest:
            for number, line in lines:
                yield from self._one(number, line, epoch, latest)
        self._check_end(lines)

    def _of_block(self, block: Block, i: int, epoch: int, latest: LatestTimes) -> Iterator[LandedEvent]:
        assert block.first_row is not None
        if line := block.line(i):
            yield from self._one(block.first_row + i, line, epoch, latest)

    def _one(self, number: int, line: bytes, epoch: int, latest: LatestTimes) -> Iterator[LandedEvent]:
        """Yield the event of one line; nothing if the line is of no row."""
        try:
            event = self._reader.read(line, self._beside, epoch, number)
        except TableParked as fault:
            # The file stays where it is: it lands whole when the contract is right.
            raise LandedKeyChanged(
                f"{printable(self._path)}, line {number}: {fault.problem}",
                fix=f"{fault.fix} Nothing of the file has landed; give it again then.",
            ) from None
        except AnotherLife as fault:
            raise self._refused(number, fault) from None
        odd = self._reader.odd
        if odd is not None and self._inlet.handling.odd_lines == REFUSE:
            raise self._refused(number, odd)
        if event is None:
            return
        if event.misplaced is not None and latest.comes_after_a_later_one(event):
            self.tally.misplaced += 1
            event = event._replace(misplaced=True)
        yield event

    def _check_end(self, lines: Lines) -> None:
        if not lines.is_whole(self._content):
            raise FileChanged(
                f"{printable(self._path)} has changed while it was read.",
                fix="Land it when its writer has finished.",
            )
        if self.tally.odd and not self.tally.read and self.tally.odd == self.tally.no_events:
            # A file without a single line that is recognisably an event is no file of events.
            number, first = self.tally.first_odd
            raise self._refused(number, first)

    def again(self, epoch: int) -> _Reading:
        """Return another pass over the same file."""
        return _Reading(self._path, self._inlet, epoch, self._content, self._landed_at)

    def seal(self, writer: BatchWriter) -> Manifest:
        """Land what was read and given to ``writer``."""
        if self._epoch is not None:
            self._reader.shown.record(self._inlet.schemas(self._epoch), self._place)
        # The relations, by their contracts, of the tables that have events in the file.
        relations = landed_relations(self._inlet.store.folder, self._reader.contracts())
        name, order = self._path.name, self._reader.orders.order
        return writer.seal(
            file=FileSpan(sha256=self._content.sha256, name=name, manifest=self._inlet.delivery, order=order),
            relations=relations,
            max_clock_skew=self._inlet.max_clock_skew,
        )

    def _place(self, row: First) -> str:
        assert isinstance(row, int), "the line of a file"
        return f"{self._path.name}, line {row}"

    def _refused(self, number: int, fault: LineFault) -> FileRefused:
        return FileRefused(f"{printable(self._path)}, line {number}: {fault.problem}.", fix=fault.fix)


def _above_all(store: LandingStore, epoch: int | None) -> int:
    """Return an ordinal above every ordinal that a file of ``epoch`` holds. The manifests make it durable."""
    last = (file.last for each in store.manifests() if each.epoch == epoch for file in each.files)
    return max((position.ordinal + 1 for position in last), default=1)


def _refuse_name(path: Path) -> None:
    """Refuse a file whose name is not UTF-8: the manifest, which is UTF-8, records the name."""
    if printable(path) != str(path):
        raise FileRefused(f"The name of {printable(path)} is not UTF-8.", fix="Rename the file.")


def refuse_other_deliveries(store: LandingStore) -> None:
    """Refuse a source that holds another kind of landing: its positions are not comparable."""
    for each in store.epoch_standings():
        captured = bool(each.chunks or each.last_stream)
        if captured or each.deliveries or each.order == CURSOR_ORDER:
            deliveries = "a captured stream" if captured else "deliveries of a seed manifest"
            names = store.batch_ids(f"e{each.epoch:06d}-" if captured else "f-")
            of_the_way = (name for name in names if captured or _is_of_rows(store.read(name)))
            raise SourceTakesNoFiles(
                f"{store.source} has {deliveries} (batch {next(of_the_way, '?')}); files of events are not "
                "mixed into it, as their positions are others.",
                fix="Land them as a source of their own: --source with another name, which contracts give as "
                "x-cdc.source.",
            )


def _is_of_rows(manifest: Manifest) -> bool:
    return manifest.file is not None and manifest.file.order in (None, CURSOR_ORDER)
