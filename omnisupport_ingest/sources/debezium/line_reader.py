"""Makes events from lines: the part that the readers of files and of topics share.

A line that cannot be read is **odd**: its event still lands, and judging keeps it out. The event keeps what
can be read of its position, row and time. So nothing is lost or guessed, and the lines around it land.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from omnisupport_ingest.contracts.landed_keys import LandedKeyChanged
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.landing.rows import LandedEvent
from omnisupport_ingest.landing.writer import BatchWriter, EventBlock
from omnisupport_ingest.sources.debezium.changes import TOMBSTONE, Change, Passed
from omnisupport_ingest.sources.debezium.events import Events
from omnisupport_ingest.sources.debezium.faults import AnotherLife, LineFault, NoEvent, TableParked
from omnisupport_ingest.sources.debezium.handling import Handling, LineContext
from omnisupport_ingest.sources.debezium.line_blocks import Block
from omnisupport_ingest.sources.debezium.orders import Orders
from omnisupport_ingest.sources.debezium.ordinary_lines import OrdinaryLines
from omnisupport_ingest.sources.debezium.positions import ARRIVAL
from omnisupport_ingest.sources.debezium.records import read_line
from omnisupport_ingest.sources.debezium.shown_schemas import ShownSchemas
from omnisupport_ingest.windows import OUT_OF_RANGE

_NO_TIME = datetime(1970, 1, 1, tzinfo=UTC)
_MINUTE = 60_000_000
"""In microseconds."""

LEAST_OF_WINDOW = 1_000
"""From so many events of one window on, they are written at once; fewer wait for others of the window."""

FEW_OF_WINDOW = 32
"""Fewer events of one window are written one by one: a table of their own would take far more memory."""


@dataclass
class Tally:
    """Counts of the lines of a file, beside its events.

    ``read``: lines that could be read. ``passed``: kind → lines that are no change of a row.
    ``uncontracted``: ``schema.table`` → events of a table without a contract. ``misplaced``: events that come
    after one of the same key with a later time. ``in_first_window``: events that landed in the window of
    another content of their position, not in that of their time. ``odd``: lines that could not be read.
    ``no_events``: those of them that are not recognisably events. ``first_odd``: the number of the first odd
    line (0 for a record, which has none), and its fault.
    """

    read: int = 0
    tombstones: int = 0
    passed: Counter[str] = field(default_factory=Counter)
    uncontracted: Counter[str] = field(default_factory=Counter)
    misplaced: int = 0
    in_first_window: int = 0
    odd: int = 0
    no_events: int = 0
    first_odd: tuple[int, LineFault] = field(default=(0, LineFault("", "")), repr=False)


@dataclass(frozen=True, slots=True)
class RawRecord:
    """A line or a record that is not read yet. ``text``: what was delivered; it is kept with the event.

    ``change``: reads it, as ``read_line`` does. ``position``: commit and ordinal, if events are ordered by
    arrival and the caller knows them.
    """

    text: bytes
    change: Callable[[], Change | Passed]
    context: LineContext
    position: tuple[int, int] | None = None


class LineReader:
    """Reads the lines of one source.

    ``odd``: the fault of the last line; None if it was read. ``shown``: the schemas of the rows that were
    read. ``next_ordinal``: ordinal of the next event of a source ordered by arrival; None if events have
    their own positions. ``parked``: contracts, by name, of whose tables no event may land, and why.
    """

    def __init__(
        self,
        orders: Orders,
        contracts: Sequence[TableContract],
        handling: Handling,
        tally: Tally,
        *,
        next_ordinal: int | None = None,
        parked: Mapping[str, LandedKeyChanged] | None = None,
    ) -> None:
        self.orders, self.tally = orders, tally
        self.odd: LineFault | None = None
        self._handling, self._next = handling, next_ordinal
        self._events = Events(contracts, handling)
        self._contracts: dict[str, TableContract] = {}
        self.shown = ShownSchemas()
        self._parked = parked or {}
        # No line of a parked table is ordinary, so that ``take`` meets the first one.
        going_on = [each for each in contracts if each.name not in self._parked]
        self._ordinary = OrdinaryLines(going_on, handling, orders, self.shown)

    def read(self, line: bytes, context: LineContext, epoch: int, row: int) -> LandedEvent | None:
        """Return the event in ``line``; None if it is of no row. Raises ``AnotherLife``, as no source may mix
        two lives, and ``TableParked``."""
        return self.take(
            RawRecord(line, lambda: read_line(line, self._handling, context), context), epoch, row
        )

    def take(self, record: RawRecord, epoch: int, row: int | None) -> LandedEvent | None:
        """Return the event in ``record``, as ``read`` does. ``row``: None if the record is of no file."""
        event = self._take(record, epoch, row)
        contract = None if event is None else self._events.contract_of(event)
        if contract is not None and (why := self._parked.get(contract.name)) is not None:
            raise TableParked(contract.full_name, why)
        return event

    def _take(self, record: RawRecord, epoch: int, row: int | None) -> LandedEvent | None:
        self.odd, change = None, None
        try:
            content = record.change()
            if isinstance(content, Passed):
                self._pass(content)
                return None
            change = self._positioned(content, record.position)
            self.orders.take(change)
            event = self._events.event(change, epoch, row, record.text.decode())
        except AnotherLife:
            raise
        except LineFault as fault:
            return self._odd(fault, change, record, epoch, row)
        self.tally.read += 1
        contract = self._events.contract_of(event)
        if contract is None:
            self.tally.uncontracted[f"{event.source_schema}.{event.source_table}"] += 1
        else:
            self._contracts[contract.name] = contract
            self.shown.add_row(contract, change, record.text if row is None else row, event.source_ts)
        return event

    def take_ordinary(self, block: Block, epoch: int, start: int = 0) -> tuple[list[pa.Table], Sequence[int]]:
        """Return the events of the ordinary lines of ``block`` from line ``start`` on, as tables of
        ``EVENT_SCHEMA`` (none or one), and the numbers of the other lines, which the caller gives to ``read``
        or ``take``."""
        tables, others = self._ordinary.read(block, epoch, start)
        self.tally.read += sum(each.num_rows for each in tables)
        return tables, others

    def contracts(self) -> list[TableContract]:
        """Return the contracts of the tables whose events were read, by name."""
        return [contract for _, contract in sorted((self._contracts | self._ordinary.tables).items())]

    def _pass(self, passed: Passed) -> None:
        self.tally.read += 1
        if passed is TOMBSTONE:
            self.tally.tombstones += 1
        else:
            self.tally.passed[passed.kind] += 1

    def _positioned(self, change: Change, position: tuple[int, int] | None) -> Change:
        if position is None and self._next is not None:
            position, self._next = (0, self._next), self._next + 1
        return (
            change if position is None else replace(change, position=position, ordered_by=ARRIVAL, lsn=None)
        )

    def _odd(
        self, fault: LineFault, change: Change | None, record: RawRecord, epoch: int, row: int | None
    ) -> LandedEvent:
        self.odd = fault
        if not self.tally.odd:
            self.tally.first_odd = row or 0, fault
        self.tally.odd += 1
        self.tally.no_events += isinstance(fault, NoEvent)
        text = record.text.decode(errors="backslashreplace").replace("\0", "\\0")
        # If the order of the line is what is odd about it, its position would be a guess.
        if change is not None and self.orders.fits(change):
            try:
                return self._events.odd_event(change, epoch, row, text)
            except LineFault:
                pass
        known = record.context.moment or record.context.noted
        return self._events.unread_event(
            change.ts if change is not None else known, record.context, epoch, row, text
        )


def add(writer: BatchWriter, event: LandedEvent) -> None:
    """Give ``event`` to ``writer``; an event without a known time is in no window."""
    if is_unread(event):
        writer.add_to(OUT_OF_RANGE, event)
    else:
        writer.add(event)


def add_table(writer: BatchWriter, events: pa.Table) -> None:
    """Give ``events``, a table of ``EVENT_SCHEMA`` with at least one row, to ``writer``, each in the window
    of its time."""
    few = []
    for window, rows in _by_window(writer, events):
        if len(rows) < FEW_OF_WINDOW < events.num_rows:
            few.append(rows)
            continue
        in_window = events if len(rows) == events.num_rows else events.take(pa.array(rows))
        highest = pc.max(in_window.column("source_ts")).as_py()
        if in_window.num_rows < LEAST_OF_WINDOW:
            # These wait for others of their window, so that a file with many windows gets no row groups of a
            # few rows.
            writer.add_table(window, in_window, highest)
            continue
        writer.add_block(
            EventBlock(window, in_window.num_rows, in_window.nbytes, highest, partial(_same, in_window))
        )
    if few:
        columns = events.take(pa.array(np.sort(np.concatenate(few)))).columns
        for row in zip(*(column.to_pylist() for column in columns), strict=True):
            writer.add(LandedEvent._make(row))


def _by_window(writer: BatchWriter, events: pa.Table) -> Iterator[tuple[str, npt.NDArray[np.int64]]]:
    """Yield the windows of ``events``, each with its row numbers in ascending order."""
    ends = pc.min_max(events.column("source_ts"))
    first, last = (writer.window_of(ends[each].as_py()) for each in ("min", "max"))
    if first == last != OUT_OF_RANGE:
        # So are all between them: a window is a stretch of time.
        return iter([(first, np.arange(events.num_rows))])
    minutes = np.asarray(pc.divide(events.column("source_ts").combine_chunks().cast(pa.int64()), _MINUTE))
    distinct, minute_of_row = np.unique(minutes, return_inverse=True)
    numbers: dict[str, int] = {}
    number_of_minute = [
        numbers.setdefault(writer.window_of(_NO_TIME + timedelta(minutes=minute)), len(numbers))
        for minute in distinct.tolist()
    ]
    number_of_row = np.array(number_of_minute)[minute_of_row]
    by_window = np.argsort(number_of_row, kind="stable")
    stops = np.cumsum(np.bincount(number_of_row))
    return zip(numbers, np.split(by_window, stops[:-1]), strict=True)


def _same(events: pa.Table) -> pa.Table:
    return events


def is_unread(event: LandedEvent) -> bool:
    """Whether ``event`` is of a line without a known time."""
    return event.source_ts == _NO_TIME
