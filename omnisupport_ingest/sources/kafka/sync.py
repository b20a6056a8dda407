"""One sync of topics: reads every partition from its offset to its end, and lands it in rounds, one batch
each.

A round ends when it is large enough or every partition is at its end. It lands as one batch, so the offsets
of all partitions move in one step: when the manifest exists. If a partition cannot be read (a gap, a replaced
topic, a record that must not land, a row of a parked table), it alone stops; the others continue, and the
report says so. Only where two lives of a connector meet do all of them stop.

While a round lands, the next records are taken from the client.

Memory: the records of one round (``batch_rows``, 64 MiB), as many that wait, and the client's own queue.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING

from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.landing.manifest import Manifest, OffsetSpan
from omnisupport_ingest.locks import locked_folder
from omnisupport_ingest.sources.debezium.faults import AnotherLife, LineFault, TableParked
from omnisupport_ingest.sources.debezium.handling import BY_ARRIVAL
from omnisupport_ingest.sources.debezium.land import Inlet, land_reading
from omnisupport_ingest.sources.kafka.client import Cluster, stops_alone
from omnisupport_ingest.sources.kafka.errors import KafkaRefused, KafkaUnreachable, RecordRefused
from omnisupport_ingest.sources.kafka.offsets import (
    UNDECIDED,
    Held,
    Partition,
    Ways,
    all_going_on,
    check_arrival,
    out_of_range,
)
from omnisupport_ingest.sources.kafka.parked import (
    ParkedPartitions,
    ParkedTables,
    Standing,
    noted_partitions,
    standing_offsets,
)
from omnisupport_ingest.sources.kafka.read_ahead import ReadAhead
from omnisupport_ingest.sources.kafka.record_columns import Records, runs_of
from omnisupport_ingest.sources.kafka.records import Round, RoundReading, StopsHere
from omnisupport_ingest.sources.kafka.two_lives import TwoLives, waits

if TYPE_CHECKING:
    from confluent_kafka import Message

FIRST_EPOCH = "first records of topics"

ROUND_BYTES = 64 * 1024 * 1024
"""Most bytes of records that are held before they land."""

_AT_ONCE = 5_000
_POLL_SECONDS = 0.1


@dataclass
class KafkaReport:
    """The result of a sync. ``spans``: how far each partition was read. ``records``, ``events``: landed.

    ``finished``: every partition was read to its end. ``odd``: number of records that cannot be read and wait
    in quarantine; ``first_odd``: place, offset and fault of the first. ``faults``: why partitions have
    stopped, or a new epoch was not begun. ``missing``: topics that have landed records and that the cluster
    no longer has. ``parked``: the partitions that wait before a row of a parked table, by its full name; its
    fault is among ``faults``, once for the table.
    """

    source: str
    spans: dict[Partition, OffsetSpan] = field(default_factory=dict)
    batches: list[Manifest] = field(default_factory=list)
    records: int = 0
    events: int = 0
    finished: bool = False
    odd: int = 0
    first_odd: tuple[Partition, int, LineFault] | None = None
    faults: list[IngestError] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    parked: dict[Partition, Standing] = field(default_factory=dict)


@dataclass(frozen=True)
class KafkaInlet:
    """Where and how records land. ``landed`` is called with each batch; ``stopped`` is called between rounds.

    ``patience_seconds``: after so many seconds of silence the cluster counts as unreachable.
    """

    inlet: Inlet
    batch_rows: int
    ways: Ways = UNDECIDED
    stopped: Callable[[], bool] = lambda: False
    landed: Callable[[Manifest], None] = lambda _batch: None
    patience_seconds: float = 20.0


def sync_topics(cluster: Cluster, into: KafkaInlet) -> KafkaReport:
    """Land what is new in the topics of ``cluster``. The caller holds the lease of the source.

    Raises ``KafkaUnreachable`` and ``KafkaRefused``. What was read before an error or a fault in the report
    has landed.
    """
    return _Sync(cluster, into).run()


@dataclass
class _Open:
    """A partition that is read: the span that lands next, with its records.

    ``begun``: that span before any of its records were read. ``next``: the offset after what was read.
    ``ended``: this sync has seen its end, or it has ``stopped`` for a fault. ``at_end``: nothing has come
    since its end was seen. ``parked``: full name of the table before whose row it has stopped.
    """

    held: Held
    begun: OffsetSpan
    next: int
    records: Records = field(default_factory=Records)
    ended: bool = False
    at_end: bool = False
    stopped: bool = False
    parked: str = ""

    @property
    def span(self) -> OffsetSpan:
        """The span that lands next."""
        return replace(self.begun, next=self.next, records=len(self.records))

    @property
    def is_new(self) -> bool:
        """Whether the span covers anything."""
        return self.next > self.begun.start


class _Sync:
    def __init__(self, cluster: Cluster, into: KafkaInlet) -> None:
        self._cluster, self._into, self._inlet = cluster, into, into.inlet
        self._source = into.inlet.store.source
        self._report = KafkaReport(self._source)
        self._open: dict[Partition, _Open] = {}
        self._landed = standing_offsets(into.inlet.store)
        self._noted = noted_partitions(into.inlet.store)
        contracts = into.inlet.contracts.of_source(self._source)
        self._parked = ParkedTables.of(into.inlet.store, contracts)
        self._highest: dict[Partition, datetime] = {}
        self._epoch: int | None = None
        self._rows = self._bytes = 0
        self._heard = time.monotonic()
        self._ahead = ReadAhead(self._consume, ROUND_BYTES)

    def run(self) -> KafkaReport:
        held, unread = self._cluster.held_of_readable()
        if not self._into.ways.new_epoch and (waiting := waits(self._inlet.store)) is not None:
            self._report.faults.append(waiting)
            return self._report
        self._leave_out(unread)
        self._assign(held)
        self._heard, read_all = time.monotonic(), False
        try:
            with self._ahead as ahead:
                while not self._into.stopped():
                    self._take(ahead.take())
                    if all(each.ended for each in self._open.values()):
                        read_all = True
                        break
                    if self._rows >= self._into.batch_rows or self._bytes >= ROUND_BYTES:
                        self._land()
                        # The time that landing takes does not count as silence of the cluster.
                        self._heard = time.monotonic()
                    self._check_patience()
        except KafkaUnreachable:
            self._land()
            raise
        self._land()
        self._report_parked()
        self._report.finished = read_all and not self._report.faults
        if self._report.finished and self._into.ways.new_epoch and not self._report.batches:
            self._report.faults.append(self._nothing_begun())
        return self._report

    def _consume(self) -> Sequence[Message]:
        return self._cluster.consume(min(_AT_ONCE, self._into.batch_rows), _POLL_SECONDS)

    def _leave_out(self, unread: Mapping[Partition, IngestError]) -> None:
        """Report why the partitions ``unread`` are not read in this sync.

        Raises the reason if it is not known where such a partition goes on: it is its first offset then, and
        by the next sync records at its beginning may be gone.
        """
        known = {topic for topic, _ in self._landed}
        for (topic, _), fault in unread.items():
            if topic not in known or self._into.ways.new_epoch:
                raise fault
            self._report.faults.append(fault)

    def _assign(self, held: Sequence[Held]) -> None:
        from confluent_kafka import TopicPartition

        self._check_ids(held)
        handling, ways, declared_anew = self._inlet.handling, self._into.ways, set[str]()
        if handling.order == BY_ARRIVAL:
            declared_anew = check_arrival(
                self._source, held, self._landed, handling, new_epoch=bool(ways.new_epoch)
            )
        found = all_going_on(self._source, held, self._landed, ways, declared_anew)
        self._report.faults += found.faults
        # In a new epoch a topic that was made anew may hold other records at the same offsets.
        noted = {} if ways.new_epoch else self._noted
        waiting = self._parked.waiting(noted, {place: span.next for place, span in found.spans.items()})
        for each in held:
            if each.place in found.spans:
                span, table = found.spans[each.place], waiting.get(each.place, "")
                stopped = bool(table)
                # One that waits is not read, and every manifest says where it stands.
                self._open[each.place] = _Open(
                    each, span, span.next, ended=stopped, stopped=stopped, parked=table
                )
        there = {each.topic for each in held}
        self._report.missing = sorted({topic for topic, _ in self._landed} - there)
        # A topic that was replaced may have fewer partitions; the others have nothing to do with it.
        self._landed = {place: span for place, span in self._landed.items() if place[0] not in found.anew}
        self._cluster.consumer.assign(
            [TopicPartition(*place, each.next) for place, each in self._open.items() if not each.stopped]
        )

    def _check_ids(self, held: Sequence[Held]) -> None:
        """Raise ``KafkaUnreachable`` if the id of a topic was known and the cluster no longer gives it:
        another topic of the same name would be taken for the known one."""
        known = {topic: each.topic_id for (topic, _), each in self._landed.items() if each.topic_id}
        for each in held:
            if each.topic in known and each.topic_id is None:
                raise self._cluster.unreachable(
                    f"it does not tell the id of the topic {each.topic}, which was {known[each.topic]}"
                )

    # ---- What comes

    def _take(self, messages: Sequence[Message]) -> None:
        """Take what the client has delivered. Nothing else may take records from the client: an offset that
        is not delivered counts as one without a record."""
        if messages:
            self._heard = time.monotonic()
        for place, errors, run in runs_of(messages):
            of = self._open.get(place)
            if errors:
                for message in run:
                    self._note(message, of)
            elif of is not None and not of.stopped:
                before = len(of.records)
                self._bytes += of.records.add(run, of.next)
                if len(of.records) > before:
                    self._rows += len(of.records) - before
                    of.next = of.records.offsets[-1] + 1
                    of.at_end = False

    def _note(self, message: Message, of: _Open | None) -> None:
        from confluent_kafka import KafkaError as Codes

        error = message.error()
        assert error is not None
        code = error.code()
        if of is None or of.stopped:
            if error.fatal():
                raise self._cluster.unreachable(error)
        elif code == Codes._PARTITION_EOF:
            # After the last record there may be offsets without a record, which nothing will ever fill.
            of.next = max(of.next, message.offset() or 0)
            of.ended = of.at_end = True
        elif code in (Codes._AUTO_OFFSET_RESET, Codes.OFFSET_OUT_OF_RANGE):
            held = self._cluster.now(of.held)
            self._stop(held.place, out_of_range(self._source, held, of.span))
        elif (fault := stops_alone(self._source, of.held.place, error)) is not None:
            self._stop(of.held.place, fault)
        else:
            raise self._cluster.unreachable(f"{of.held.topic}[{of.held.partition}]: {error.str()}")

    def _stop(self, place: Partition, fault: IngestError) -> None:
        """Read no more of ``place``, and report why. What was read of it before still lands."""
        self._report.faults.append(fault)
        self._end(place)

    def _end(self, place: Partition) -> None:
        from confluent_kafka import KafkaException, TopicPartition

        of = self._open[place]
        if of.stopped:
            return
        of.ended, of.stopped, of.at_end = True, True, False

        def pause() -> None:
            # What still comes of it is not taken.
            with suppress(KafkaException):
                self._cluster.consumer.pause([TopicPartition(*place)])

        self._ahead.between(pause)

    def _check_patience(self) -> None:
        waited = time.monotonic() - self._heard
        if waited > self._into.patience_seconds:
            silent = [each.held for each in self._open.values() if not each.ended]
            where = f"{silent[0].topic}[{silent[0].partition}]"
            raise self._cluster.unreachable(f"nothing came of {where} for {waited:.0f} seconds")

    # ---- Landing

    def _land(self) -> None:
        """Land the round, if anything is new; then commit the offsets of the consumer group."""
        if any(each.is_new for each in self._open.values()):
            with locked_folder(self._inlet.store.folder):
                self._land_round()
            self._mirror()
        self._rows = self._bytes = 0

    def _land_round(self) -> None:
        epoch = self._begin()
        while True:
            reading = RoundReading(self._round(), self._inlet, epoch)
            try:
                manifest, tally = land_reading(reading, self._inlet, epoch)
                break
            except StopsHere as stop:
                for each in (stop, *stop.also):
                    self._cut(each)
                if not any(each.is_new for each in self._open.values()):
                    self._note_parked(epoch)
                    return
        assert manifest.file is not None and manifest.file.offsets is not None
        report = self._report
        report.batches.append(manifest)
        report.records += sum(len(each.records) for each in self._open.values())
        report.events += manifest.rows
        report.odd += tally.odd
        report.first_odd = report.first_odd or reading.first_odd
        for span in manifest.file.offsets:
            place = (span.topic, span.partition)
            self._landed[place] = span
            if place in self._open:
                of = self._open[place]
                of.begun = replace(span, start=span.next, records=0, gone=0, accepted="")
                of.records = Records()
                report.spans[place] = span
        self._note_parked(epoch)
        self._into.landed(manifest)

    def _round(self) -> Round:
        return Round(
            {place: each.span for place, each in self._open.items()},
            {place: each.records for place, each in self._open.items() if each.records},
            self._landed,
            frozenset(place for place, each in self._open.items() if each.at_end),
            bool(self._report.faults) or any(each.parked for each in self._open.values()),
            self._highest,
            self._parked.by_contract,
        )

    def _cut(self, stop: StopsHere) -> None:
        """Stop a partition before a record that must not land."""
        of = self._open[stop.place]
        of.records = of.records.below(stop.offset)
        of.next = stop.offset
        topic, partition = stop.place
        problem = f"{topic}[{partition}], offset {stop.offset}: {stop.fault.problem}"
        if isinstance(stop.fault, AnotherLife):
            self._stop(stop.place, TwoLives(self._inlet.store, self._begin()).write(problem))
            if not self._into.ways.new_epoch:
                self._hold_others(stop.place)
        elif isinstance(stop.fault, TableParked):
            of.parked = stop.fault.table
            self._end(stop.place)
        else:
            fix = (
                f"{stop.fault.fix} Or let such records wait in quarantine: events.odd_lines in the "
                "definition. What stands behind it lands then."
            )
            self._stop(stop.place, RecordRefused(f"{problem}.", fix=fix))

    def _hold_others(self, place: Partition) -> None:
        """Land nothing more of the partitions other than ``place``.

        In the sync that begins an epoch they land: a person has decided, and each new epoch gets further
        where records of both lives are left.
        """
        for other, of in self._open.items():
            if other != place:
                if of.next != of.begun.next:
                    # The row of a parked table that it stopped before is not the next to read.
                    of.parked = ""
                of.records, of.next = Records(), of.begun.next
                self._end(other)

    def _note_parked(self, epoch: int) -> None:
        """Note where the partitions stand of topics that wait, when that is where landing stands.

        What is noted of a partition that this sync cannot read stays: no manifest may tell of it yet.
        """
        topics = {place[0] for place, each in self._open.items() if each.parked}
        unread = [each for place, each in self._noted.items() if place not in self._open]
        waiting = [_standing(each) for place, each in self._open.items() if place[0] in topics]
        ParkedPartitions(self._inlet.store, epoch).write([*unread, *waiting])

    def _report_parked(self) -> None:
        report = self._report
        report.parked = {place: _standing(each) for place, each in self._open.items() if each.parked}
        for table in sorted({each.table for each in report.parked.values()}):
            waiting = {place: each.offset for place, each in report.parked.items() if each.table == table}
            report.faults.append(self._parked.fault(table, waiting))

    def _nothing_begun(self) -> KafkaRefused:
        return KafkaRefused(
            f"No epoch was begun: the topics of {self._source} hold no record that has not landed, and an "
            "epoch begins with its first batch.",
            fix="When a record is there, give it again: omnisupport-ingest sync "
            f'{self._source} --new-epoch "what happened"',
        )

    def _begin(self) -> int:
        """Return the epoch to land in. A new epoch begins with its first batch, so none begins if no cluster
        answers."""
        if self._epoch is None:
            store, why = self._inlet.store, self._into.ways.new_epoch
            current = store.current_epoch()
            if current is None or why:
                current = store.begin_epoch(why or FIRST_EPOCH, None, now=self._inlet.clock())
            self._epoch = current.number
        return self._epoch

    def _mirror(self) -> None:
        """Commit the offsets to the consumer group, for tools that show its lag. Nothing depends on it."""
        from confluent_kafka import KafkaException, TopicPartition

        offsets = [TopicPartition(*place, each.next) for place, each in self._open.items()]

        def commit() -> None:
            with suppress(KafkaException):
                self._cluster.consumer.commit(offsets=offsets, asynchronous=True)

        with failpoint("kafka.mirror"):
            self._ahead.between(commit)


def _standing(of: _Open) -> Standing:
    """Return where ``of`` stands, if nothing of it is to land."""
    return Standing(*of.held.place, of.begun.next, of.parked, of.begun.topic_id)
