"""At which offset each partition continues, from the last manifest and from what the cluster holds.

Every manifest of an epoch has the offsets of all partitions, so the last one alone says where to continue.
The offsets of the consumer group are ignored. A new epoch continues where the one before it ended, except for
topics that were deleted and created again: all their partitions are read from their beginning. Topics whose
records are ordered by arrival continue only where that order is certain (``check_arrival``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import islice

from omnisupport_ingest.contracts.names import TableName
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.landing.manifest import OffsetSpan
from omnisupport_ingest.landing.names import offsets_prefix
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.sources.debezium.handling import Handling
from omnisupport_ingest.sources.kafka.errors import KafkaRefused, RecordsGone, TopicReplaced

Partition = tuple[str, int]
"""A topic and the number of one of its partitions."""

TIMES_SOUGHT = 100
"""Number of the newest batches that are searched for the time of a partition's last record."""


@dataclass(frozen=True, slots=True)
class Held:
    """What the cluster holds of a partition: offsets from ``low``, up to but not including ``end``.

    ``topic_id``: changes when the topic is deleted and created again; None if the cluster gives none (Kafka
    before 2.8).
    """

    topic: str
    partition: int
    low: int
    end: int
    topic_id: str | None = None

    @property
    def place(self) -> Partition:
        return self.topic, self.partition


@dataclass(frozen=True, slots=True)
class Ways:
    """What a person has decided, with the reason; empty: nothing.

    ``accept_gap``: continue after records that were deleted before they were read. ``new_epoch``: begin an
    epoch, because everything that comes now is later than everything that has landed.
    """

    accept_gap: str = ""
    new_epoch: str = ""


UNDECIDED = Ways()
"""No decision: reading stops where there is doubt."""


def landed_offsets(store: LandingStore) -> dict[Partition, OffsetSpan]:
    """Return what landed last of every partition, from the newest epoch that has any."""
    for record in sorted(store.epochs(), key=lambda each: each.number, reverse=True):
        for name in store.newest_first(offsets_prefix(record.number)):
            file = store.read(name).file
            assert file is not None and file.offsets is not None, "its name says so"
            return {(each.topic, each.partition): each for each in file.offsets}
    return {}


def landed_times(store: LandingStore) -> dict[Partition, datetime]:
    """Return when a record of each partition landed last.

    A partition without a record in the newest ``TIMES_SOUGHT`` batches of the epoch is left out.
    """
    current = store.current_epoch()
    found: dict[Partition, datetime] = {}
    if current is None:
        return found
    for name in islice(store.newest_first(offsets_prefix(current.number)), TIMES_SOUGHT):
        manifest = store.read(name)
        assert manifest.file is not None and manifest.file.offsets is not None, "its name says so"
        for each in manifest.file.offsets:
            if each.records:
                found.setdefault((each.topic, each.partition), manifest.arrival.landed_at)
        if len(found) == len(manifest.file.offsets):
            break
    return found


@dataclass
class Continuation:
    """How all partitions of a source continue. ``spans``: the empty span at which each one does. ``faults``:
    why others do not. ``anew``: the topics of which all partitions are read from their beginning."""

    spans: dict[Partition, OffsetSpan] = field(default_factory=dict)
    faults: list[IngestError] = field(default_factory=list)
    anew: frozenset[str] = frozenset()

    def add_fault(self, fault: IngestError) -> None:
        """Add ``fault``; that a topic was replaced is reported once, not for each of its partitions."""
        if str(fault) not in map(str, self.faults):
            self.faults.append(fault)


def all_going_on(
    source: str,
    held: Sequence[Held],
    landed: Mapping[Partition, OffsetSpan],
    ways: Ways,
    declared_anew: Collection[str] = (),
) -> Continuation:
    """Return how the partitions ``held`` continue. A topic that was replaced waits for a new epoch as a
    whole, and begins in it as a whole.

    ``declared_anew``: topics of which a person says that they were made anew, and the cluster cannot.
    """
    others, known = replaced_topics(held, landed), {topic for topic, _ in landed}
    anew = {*others, *declared_anew} if ways.new_epoch else set()
    found = Continuation(anew=frozenset(anew))
    for each in held:
        try:
            if each.topic in anew:
                found.spans[each.place] = _empty(each, each.low)
            elif each.topic in others:
                raise replaced(source, each, others[each.topic])
            elif each.topic in known and each.place not in landed:
                # The partition was added to the topic, so all its records are later than what has landed.
                found.spans[each.place] = going_on(source, each, _empty(each, 0), ways)
            else:
                found.spans[each.place] = going_on(source, each, landed.get(each.place), ways)
        except IngestError as fault:
            found.add_fault(fault)
    return found


def replaced_topics(held: Sequence[Held], landed: Mapping[Partition, OffsetSpan]) -> dict[str, OffsetSpan]:
    """Return the topics of another id than that of which records have landed, each with a span of the
    other."""
    spans: dict[str, list[OffsetSpan]] = {}
    for (topic, _), span in landed.items():
        if span.topic_id:
            spans.setdefault(topic, []).append(span)
    there = {each.place for each in held}
    found: dict[str, OffsetSpan] = {}
    for topic, now in {each.topic: each.topic_id for each in held}.items():
        others = [each for each in spans.get(topic, ()) if now and each.topic_id != now]
        is_known = len(others) < len(spans.get(topic, ()))
        # A partition that is not there any more may be left of a topic before the last one.
        counted = [each for each in others if not is_known or (topic, each.partition) in there]
        if counted:
            found[topic] = counted[0]
    return found


def going_on(source: str, held: Held, landed: OffsetSpan | None, ways: Ways) -> OffsetSpan:
    """Return the empty span at which the partition ``held`` continues; ``landed`` is None if nothing of its
    topic has landed.

    Raises ``RecordsGone`` or ``TopicReplaced`` if it is unknown which records are missing in between.
    """
    if landed is None:
        return _empty(held, held.low)
    start = landed.next
    known = landed.topic_id or held.topic_id
    another = known != (held.topic_id or known)
    if another and not ways.new_epoch:
        raise replaced(source, held, landed)
    if another or (ways.new_epoch and held.end < start):
        return _empty(held, held.low)
    span = replace(_empty(held, start), topic_id=known)
    if held.low <= start:
        return span
    if not ways.accept_gap:
        raise gone(source, held, start)
    return replace(span, next=held.low, gone=held.low - start, accepted=ways.accept_gap)


def _empty(held: Held, start: int) -> OffsetSpan:
    return OffsetSpan(held.topic, held.partition, start, start, 0, held.topic_id)


def out_of_range(source: str, held: Held, span: OffsetSpan) -> IngestError:
    """Return the error for a partition whose cluster does not hold the offset at which ``span`` continues."""
    if held.low > span.next:
        return gone(source, held, span.next)
    return replaced(source, held, span)


def gone(source: str, held: Held, start: int) -> RecordsGone:
    """Return the error for the gap between ``start``, the next offset to read, and the first that is held."""
    landed = f"those below {start} have landed" if start else "nothing of it has landed"
    return RecordsGone(
        f"Partition {held.partition} of the topic {held.topic} begins at offset {held.low}, and of {source} "
        f"{landed}: offsets {start} to {held.low - 1} were deleted (retention) before they were read.",
        fix="Nobody knows what changed in them. Have the connector read its tables again (an incremental "
        f'snapshot), then go on behind the gap: omnisupport-ingest sync {source} --accept-gap "why"',
    )


def replaced(source: str, held: Held, landed: OffsetSpan) -> TopicReplaced:
    """Return the error for a topic that was replaced by another one of the same name."""
    how = (
        f"its id was {landed.topic_id} and is {held.topic_id}"
        if landed.topic_id and held.topic_id and landed.topic_id != held.topic_id
        else f"the cluster has no offset {landed.next} of partition {held.partition}, where reading goes on"
    )
    return TopicReplaced(
        f"The topic {held.topic} of {source} was made anew, or the cluster was put back: {how}.",
        fix="If what it holds now is later than what has landed, begin an epoch with it: omnisupport-ingest "
        f'sync {source} --new-epoch "what happened"',
    )


def joined(landed: Mapping[Partition, OffsetSpan], spans: Iterable[OffsetSpan]) -> tuple[OffsetSpan, ...]:
    """Return ``spans``, and an empty span for every other partition that has landed, in order."""
    unchanged = {
        place: replace(each, start=each.next, records=0, gone=0, accepted="")
        for place, each in landed.items()
    }
    now = unchanged | {(each.topic, each.partition): each for each in spans}
    return tuple(now[place] for place in sorted(now))


def check_arrival(
    source: str,
    held: Sequence[Held],
    landed: Mapping[Partition, OffsetSpan],
    handling: Handling,
    *,
    new_epoch: bool,
) -> set[str]:
    """Refuse topics whose records have no order by arrival; two partitions have none, nor have two topics.

    Raises ``KafkaRefused`` for two topics of one table, or for a new partition, to which a key may have
    moved. Returns the topics whose new partitions a person explains by a new epoch: they were made anew, and
    no id can show it.
    """
    declared_anew: set[str] = set()
    known = {topic for topic, _ in landed}
    with_id = {topic for (topic, _), each in landed.items() if each.topic_id}
    replaced = replaced_topics(held, landed)
    of_table: dict[TableName, str] = {}
    for each in held:
        same = each.topic in known and each.topic not in replaced
        if same and each.place not in landed:
            if not new_epoch or each.topic in with_id:
                raise KafkaRefused(
                    f"The topic {each.topic} has a partition {each.partition} that it did not have, and "
                    "its records are ordered by arrival: a key may have moved there, and nothing says "
                    "which of its records is later.",
                    fix="Land it as a new source whose records carry a position or a commit time "
                    "(events.order position), or make the topic anew with all its partitions, and: "
                    f'omnisupport-ingest sync {source} --new-epoch "partitions added"',
                )
            declared_anew.add(each.topic)
        table = handling.table_of(each.topic)
        if table is None:
            continue
        other = of_table.setdefault((table.schema, table.table), each.topic)
        if other != each.topic:
            raise KafkaRefused(
                f"The topics {other} and {each.topic} are both of {table.schema}.{table.table}, and "
                "their records are ordered by arrival, which two topics have not in common.",
                fix="Take one of them in (kafka.topics), or map them to two tables (events.tables).",
            )
    return declared_anew
