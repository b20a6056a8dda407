"""Records of Kafka as events. A round of reading becomes one batch, whose manifest has the offsets.

A record is read like a line of a file, but with key and value separate. One line of JSON is kept with its
event: topic, partition, offset, timestamp, key, value and headers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from omnisupport_ingest.foreign import Unreadable, parse_row
from omnisupport_ingest.landing.manifest import FileSpan, Manifest, OffsetSpan
from omnisupport_ingest.landing.names import offsets_batch_id
from omnisupport_ingest.landing.rows import LandedEvent
from omnisupport_ingest.landing.writer import BatchWriter
from omnisupport_ingest.sources.contracted_relation import contracted_relation
from omnisupport_ingest.sources.debezium.changes import Change, Passed
from omnisupport_ingest.sources.debezium.faults import AnotherLife, LineFault
from omnisupport_ingest.sources.debezium.handling import BY_ARRIVAL, REFUSE, Handling, LineContext
from omnisupport_ingest.sources.debezium.land import Inlet, Part
from omnisupport_ingest.sources.debezium.latest_times import LatestTimes
from omnisupport_ingest.sources.debezium.line_blocks import Block
from omnisupport_ingest.sources.debezium.line_reader import LineReader, RawRecord, Tally
from omnisupport_ingest.sources.debezium.orders import Orders
from omnisupport_ingest.sources.debezium.records import read_record, record_of, telling_headers, unwrapped
from omnisupport_ingest.sources.debezium.shown_schemas import place_of_record
from omnisupport_ingest.sources.kafka.offsets import Partition, joined
from omnisupport_ingest.windows import MAX_AHEAD

if TYPE_CHECKING:
    from confluent_kafka import Message

_START = datetime(1970, 1, 1, tzinfo=UTC)
_PARTITION_BITS = 20
_AT_ONCE = 10_000
_BYTES_AT_ONCE = 8 << 20
"""A block of records of a partition ends when it reaches one of these limits."""
_NAMED = 3
"""Number of topics that the manifest of a batch names for people."""


class Record(NamedTuple):
    """A record of a partition. ``millis``: the timestamp of the cluster or the producer, in milliseconds
    since 1970; None if there is none."""

    offset: int
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes | str | None]]
    millis: int | None

    @classmethod
    def of(cls, message: Message) -> Record:
        """Return the record in ``message``, which has no error."""
        millis = message.timestamp()[1]
        headers: Any = message.headers() or ()
        known = millis if 0 <= millis < 1 << 47 else None
        return cls(message.offset() or 0, message.key(), message.value(), headers, known)

    @property
    def moment(self) -> datetime | None:
        """The timestamp of the record; None if it has none."""
        return None if self.millis is None else _START + timedelta(milliseconds=self.millis)

    def tells_by(self, names: frozenset[str]) -> bool:
        """Whether it has one of the headers ``names``: then its value alone does not say everything."""
        return any(name in names for name, _ in self.headers)

    @property
    def size(self) -> int:
        return len(self.key or b"") + len(self.value or b"")

    @property
    def headers_json(self) -> bytes:
        """Return the headers as JSON."""
        if not self.headers:
            return b"[]"
        return json.dumps([{"key": name, "value": _text(held)} for name, held in self.headers]).encode()

    def line(self, place: Partition) -> bytes:
        """Return the record as one line of JSON. Key and value stay as they are; if they are no JSON, each
        becomes a JSON string."""
        millis = b"null" if self.millis is None else b"%d" % self.millis
        members = (self.offset, millis, _as_json(self.key), _as_json(self.value), self.headers_json)
        return _line_start(place) + b'%d,"timestamp":%s,"key":%s,"value":%s,"headers":%s}' % members

    def read(self, place: Partition, handling: Handling, context: LineContext) -> Change | Passed:
        """Return the change in the record. Raises ``LineFault`` if it cannot be read."""
        headers = {name: _header(held) for name, held in self.headers}
        return read_record(record_of(place[0], self.key, self.value, headers), handling, context)


@dataclass
class Round:
    """What was read of every partition and lands next: ``spans`` and their ``records``, by partition.

    ``landed``: the spans of partitions that have landed before. ``highest``: the highest known commit time of
    each partition. ``at_end``: the partitions that were read to their end. ``stopped``: some partition cannot
    be read.
    """

    spans: dict[Partition, OffsetSpan]
    records: dict[Partition, Sequence[Record]]
    landed: dict[Partition, OffsetSpan]
    at_end: frozenset[Partition]
    stopped: bool
    highest: dict[Partition, datetime] = field(default_factory=dict)

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
    """A record that does not land: its partition ends before it. ``fault``: why."""

    def __init__(self, place: Partition, offset: int, fault: LineFault) -> None:
        super().__init__(fault.problem)
        self.place, self.offset, self.fault = place, offset, fault


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
        self._reader = LineReader(orders, contracts, self._handling, self.tally)
        self._content = hashlib.sha256()
        self._telling = telling_headers(self._handling)

    def parts(self, epoch: int) -> Iterator[Part]:
        """Yield the events, partition by partition. Raises ``StopsHere``."""
        try:
            with LatestTimes() as latest:
                for place in sorted(self._round.records):
                    for records in _blocks(self._round.records[place]):
                        yield from self._many(place, records, epoch, latest)
        except StopsHere as stop:
            raise self._first_stop(stop, epoch) from None

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

    def _many(
        self, place: Partition, records: Sequence[Record], epoch: int, latest: LatestTimes
    ) -> Iterator[Part]:
        start = 0
        while start < len(records) and self._reader.orders.known is None:
            # The first event decides the order of the source; until it is known, no line is ordinary.
            line = records[start].line(place)
            self._content.update(line)
            yield from self._one(place, records[start], line, epoch, latest)
            start += 1
        records = records[start:]
        if not records:
            return
        delivered = _lines_of(place, records)
        values = [
            b"" if each.headers and each.tells_by(self._telling) else each.value or b"" for each in records
        ]
        tables, others = self._reader.take_ordinary(Block.of_values(values, delivered, place[0]), epoch)
        lines = {i: records[i].line(place) for i in others}
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
        except AnotherLife as fault:
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
            relations=tuple(contracted_relation(each) for each in self._reader.contracts()),
            confirmed_clock=self._round.complete(self._inlet.clock()),
            max_clock_skew=self._inlet.max_clock_skew,
        )


def _blocks(records: Sequence[Record]) -> Iterator[Sequence[Record]]:
    start = size = 0
    for i, each in enumerate(records, 1):
        size += each.size
        if i - start == _AT_ONCE or size >= _BYTES_AT_ONCE:
            yield records[start:i]
            start, size = i, 0
    if start < len(records):
        yield records[start:]


def _line_start(place: Partition) -> bytes:
    """Return the beginning of the line of each record of a partition; the offset follows."""
    return b'{"topic":%s,"partition":%d,"offset":' % (json.dumps(place[0]).encode(), place[1])


def _lines_of(place: Partition, records: Sequence[Record]) -> pa.BinaryArray:
    """Return the lines of ``records``, which can be read in a block, with their values unchanged."""
    offsets = pa.array([each.offset for each in records], pa.int64())
    millis = pa.array([each.millis for each in records], pa.int64())
    keys, values, headers = (
        pa.array(texts, pa.binary())
        for texts in (
            [_as_json(each.key) for each in records],
            [each.value or b"" for each in records],
            [each.headers_json for each in records],
        )
    )
    parts = (
        _line_start(place), _written(offsets), b',"timestamp":', pc.fill_null(_written(millis), b"null"),
        b',"key":', keys, b',"value":', values, b',"headers":', headers, b"}",
    )  # fmt: skip
    return pc.binary_join_element_wise(*parts, b"")


def _written(numbers: pa.Int64Array) -> pa.BinaryArray:
    return numbers.cast(pa.string()).cast(pa.binary())


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


def _text(value: bytes | str | None) -> str | None:
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else value


def _header(value: bytes | str | None) -> Any:
    """Return the value of a header, parsed if it is a JSON object or string, as the JSON converter writes."""
    text = _text(value)
    if text is not None and text[:1] in ("{", '"'):
        try:
            return unwrapped(parse_row(text))[0]
        except Unreadable:
            pass
    return text


def _as_json(value: bytes | None) -> bytes:
    if not value:
        return b"null" if value is None else b'""'
    try:
        orjson.loads(value)
    except orjson.JSONDecodeError:
        return json.dumps(_text(value)).encode()
    return value.replace(b"\n", b" ").replace(b"\r", b" ")
