"""Records of Kafka as events. A round of reading becomes one batch, whose manifest has the offsets.

A record is read like a line of a file, but with key and value separate. One line of JSON is kept with its
event (``record_columns``).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache, partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from omnisupport_ingest.contracts.landed_keys import LandedKeyChanged
from omnisupport_ingest.landing.manifest import FileSpan, Manifest, OffsetSpan
from omnisupport_ingest.landing.names import offsets_batch_id
from omnisupport_ingest.landing.rows import LandedEvent
from omnisupport_ingest.landing.writer import BatchWriter
from omnisupport_ingest.sources.contracted_relation import landed_relations
from omnisupport_ingest.sources.debezium.faults import AnotherLife, LineFault, TableParked
from omnisupport_ingest.sources.debezium.handling import BY_ARRIVAL, REFUSE, LineContext
from omnisupport_ingest.sources.debezium.land import Inlet, Part
from omnisupport_ingest.sources.debezium.latest_times import LatestTimes
from omnisupport_ingest.sources.debezium.line_reader import LineReader, RawRecord, Tally
from omnisupport_ingest.sources.debezium.orders import Orders
from omnisupport_ingest.sources.debezium.records import telling_headers
from omnisupport_ingest.sources.debezium.shown_schemas import place_of_record
from omnisupport_ingest.sources.kafka.offsets import Partition, joined
from omnisupport_ingest.sources.kafka.record_columns import Record, Records
from omnisupport_ingest.windows import MAX_AHEAD

_PARTITION_BITS = 20
_BYTES_AT_ONCE = 8 << 20
"""A block of records ends when its keys and values reach this size."""
_LARGE_BYTES = 256 * 1024
"""From this size on a part is hashed on a thread."""
_NAMED = 3
"""Number of topics that the manifest of a batch names for people."""


@dataclass
class Round:
    """What was read of every partition and lands next: ``spans`` and their ``records``, by partition.

    ``landed``: the spans of partitions that have landed before. ``highest``: the highest known commit time of
    each partition. ``at_end``: the partitions that were read to their end. ``stopped``: some partition cannot
    be read. ``parked``: contracts, by name, of whose tables nothing may land, and why.
    """

    spans: dict[Partition, OffsetSpan]
    records: dict[Partition, Records]
    landed: dict[Partition, OffsetSpan]
    at_end: frozenset[Partition]
    stopped: bool
    highest: dict[Partition, datetime] = field(default_factory=dict)
    parked: Mapping[str, LandedKeyChanged] = field(default_factory=dict)

    def complete(self, landed_at: datetime) -> datetime | None:
        """Return up to which time all partitions have landed: the lowest of their highest times; None if
        unknown.

        A partition that was read to its end does not lower the result. A time after ``landed_at`` counts as
        ``landed_at``.
        """
        known = {place: min(time, landed_at) for place, time in self.highest.items()}
        behind = [known.get(place) for place in self.spans if place not in self.at_end]
        if self.stopped or None in behind:
            return None
        return min((each for each in behind if each is not None), default=max(known.values(), default=None))


class StopsHere(Exception):
    """A record that does not land: its partition ends before it. ``fault``: why. ``also``: the same of other
    partitions."""

    def __init__(self, place: Partition, offset: int, fault: LineFault) -> None:
        super().__init__(fault.problem)
        self.place, self.offset, self.fault = place, offset, fault
        self.also: Sequence[StopsHere] = ()


class RoundReading:
    """One reading of a ``Round``. ``first_odd``: place, offset and fault of the first record that cannot be
    read; None if all can."""

    def __init__(self, of: Round, inlet: Inlet, epoch: int) -> None:
        self.offsets = joined(of.landed, of.spans.values())
        self.batch_id = offsets_batch_id(epoch, sum(each.start for each in self.offsets))
        self.tally = Tally()
        self.first_odd: tuple[Partition, int, LineFault] | None = None
        self._round, self._inlet, self._epoch = of, inlet, epoch
        contracts = inlet.contracts.of_source(inlet.store.source)
        orders = Orders.of(inlet.store, epoch)
        self._handling = inlet.handling.with_contracts(contracts)
        self._reader = LineReader(orders, contracts, self._handling, self.tally, parked=of.parked)
        self._content = _ContentHash()
        self._telling = telling_headers(self._handling)

    def parts(self, epoch: int) -> Iterator[Part]:
        """Yield the events, partition by partition. Raises ``StopsHere``."""
        parked = list[StopsHere]()
        try:
            with LatestTimes() as latest:
                for place in sorted(self._round.records):
                    try:
                        yield from self._of_partition(place, epoch, latest)
                    except StopsHere as stop:
                        if not isinstance(stop.fault, TableParked):
                            raise
                        # A table may be in many partitions: all of them are found in one reading.
                        parked.append(stop)
        except StopsHere as stop:
            raise self._first_stop(stop, epoch) from None
        if parked:
            parked[0].also = parked[1:]
            raise parked[0]

    def _first_stop(self, stop: StopsHere, epoch: int) -> StopsHere:
        """Return where reading stops if the records are read one by one.

        Where two lives of a connector meet, the block reader may see a later record first. A new epoch must
        begin exactly at the first record of the second life.
        """
        if isinstance(stop.fault, AnotherLife):
            try:
                for _ in self.again(epoch).events(epoch):
                    pass
            except StopsHere as first:
                return first
        return stop

    def events(self, epoch: int) -> Iterator[LandedEvent]:
        """Yield the same events one by one, in the order of their offsets."""
        with LatestTimes() as latest:
            for place in sorted(self._round.records):
                for record in self._round.records[place]:
                    line = record.line(place)
                    self._content.update(line)
                    yield from self._one(place, record, line, epoch, latest)

    def _of_partition(self, place: Partition, epoch: int, latest: LatestTimes) -> Iterator[Part]:
        for records in self._round.records[place].blocks(_BYTES_AT_ONCE):
            yield from self._many(place, records, epoch, latest)

    def _many(self, place: Partition, records: Records, epoch: int, latest: LatestTimes) -> Iterator[Part]:
        start = 0
        while start < len(records) and self._reader.orders.known is None:
            # The first event decides the order of the source; until it is known, no line is ordinary.
            record = records[start]
            line = record.line(place)
            self._content.update(line)
            yield from self._one(place, record, line, epoch, latest)
            start += 1
        records = records.part(start, len(records))
        if not records:
            return
        block = records.block(place, self._telling)
        assert block.delivered is not None
        tables, others = self._reader.take_ordinary(block, epoch)
        delivered, lines = block.delivered, {i: records[i].line(place) for i in others}
        if lines:
            is_other = np.zeros(len(records), np.bool_)
            is_other[list(lines)] = True
            others_lines = pa.array([lines[i] for i in sorted(lines)], pa.binary())
            delivered = pc.replace_with_mask(delivered, pa.array(is_other), others_lines)
        self._content.update(_content_of(delivered))
        for each in tables:
            self._note_highest(place, each)
            yield each
        for i in others:
            yield from self._one(place, records[i], lines[i], epoch, latest)

    def _one(
        self, place: Partition, record: Record, line: bytes, epoch: int, latest: LatestTimes
    ) -> Iterator[LandedEvent]:
        """Yield the event of one record; nothing if the record is of no row."""
        arrival = self._inlet.handling.order == BY_ARRIVAL
        context = LineContext(place[0], record.moment if arrival else None, record.moment)
        raw = RawRecord(
            line,
            partial(record.read, place, self._handling, context),
            context,
            (record.offset, _number(place)) if arrival else None,
        )
        event = self._event(raw, place, record.offset, epoch)
        if event is None:
            return
        if event.misplaced is not None and latest.comes_after_a_later_one(event):
            self.tally.misplaced += 1
            event = event._replace(misplaced=True)
        yield event

    def _note_highest(self, place: Partition, events: pa.Table) -> None:
        times = events.column("source_ts")
        in_time = times.filter(pc.less_equal(times, pa.scalar(self._inlet.clock() + MAX_AHEAD, times.type)))
        found = pc.max(in_time).as_py()
        if found is not None:
            highest = self._round.highest
            highest[place] = max(found, highest.get(place, found))

    def _event(self, raw: RawRecord, place: Partition, offset: int, epoch: int) -> LandedEvent | None:
        try:
            # No row number: records that follow the last batch are never too late.
            event = self._reader.take(raw, epoch, None)
        except (AnotherLife, TableParked) as fault:
            raise StopsHere(place, offset, fault) from None
        odd = self._reader.odd
        if odd is not None:
            if self._inlet.handling.odd_lines == REFUSE:
                raise StopsHere(place, offset, odd)
            self.first_odd = self.first_odd or (place, offset, odd)
        elif event is not None and event.source_ts <= self._inlet.clock() + MAX_AHEAD:
            highest = self._round.highest
            highest[place] = max(event.source_ts, highest.get(place, event.source_ts))
        return event

    def again(self, epoch: int) -> RoundReading:
        """Return another reading of the same records."""
        return RoundReading(self._round, self._inlet, epoch)

    def seal(self, writer: BatchWriter) -> Manifest:
        """Land what was read and given to ``writer``."""
        self._reader.shown.record(self._inlet.schemas(self._epoch), place_of_record)
        topics = sorted({topic for topic, _ in self._round.records})
        return writer.seal(
            file=FileSpan(
                self._content.hexdigest(),
                ", ".join(topics) if len(topics) <= _NAMED else f"{len(topics)} topics",
                "",
                self._reader.orders.order,
                self.offsets,
            ),
            relations=landed_relations(self._inlet.store.folder, self._reader.contracts()),
            confirmed_clock=self._round.complete(self._inlet.clock()),
            max_clock_skew=self._inlet.max_clock_skew,
        )


class _ContentHash:
    """The SHA-256 of all that it is given.

    A thread hashes large parts while the caller goes on. Hashing is an eighth of what the caller would do.
    """

    def __init__(self) -> None:
        self._hash, self._last = hashlib.sha256(), Future[None]()
        self._last.set_result(None)

    def update(self, part: bytes | memoryview) -> None:
        """Add ``part``, which must not change."""
        self._last.result()
        if len(part) < _LARGE_BYTES:
            self._hash.update(part)
        else:
            self._last = _hashing_thread().submit(self._hash.update, part)

    def hexdigest(self) -> str:
        """Return the hash, of 64 hexadecimal digits."""
        self._last.result()
        return self._hash.hexdigest()


@cache
def _hashing_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="hashes records")


# A forked process has no thread of the process before.
os.register_at_fork(after_in_child=_hashing_thread.cache_clear)


def _content_of(lines: pa.BinaryArray) -> memoryview:
    """Return the bytes of all ``lines``, one after another, without a copy."""
    _, offsets, content = lines.buffers()
    bounds = np.frombuffer(offsets, np.int32, len(lines) + 1, 4 * lines.offset)
    return memoryview(content)[bounds[0] : bounds[-1]]


def _number(place: Partition) -> int:
    """Return a number that is unique to the partition, so that events of two partitions never share a
    position."""
    topic = int.from_bytes(hashlib.sha256(place[0].encode()).digest()[:5])
    return (topic << _PARTITION_BITS) | place[1]
