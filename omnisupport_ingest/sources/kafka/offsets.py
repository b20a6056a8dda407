"""At which offset each partition continues, from the last manifest and from what the cluster holds.

Every manifest of an epoch has the offsets of all partitions, so the last one alone says where to continue.
The offsets of the consumer group are ignored. A new epoch continues where the one before it ended, except for
topics that were deleted and created again: these are read from their beginning.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice

from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.landing.manifest import OffsetSpan
from omnisupport_ingest.landing.names import offsets_prefix
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.sources.kafka.errors import RecordsGone, TopicReplaced

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


def going_on(source: str, held: Held, landed: OffsetSpan | None, ways: Ways) -> OffsetSpan:
    """Return the empty span at which the partition ``held`` continues; ``landed`` is None if nothing of it
    has landed.

    Raises ``RecordsGone`` or ``TopicReplaced`` if it is unknown which records are missing in between.
    """
    start = held.low if landed is None else landed.next
    span = OffsetSpan(held.topic, held.partition, start, start, 0, held.topic_id)
    if landed is None:
        return span
    known = landed.topic_id or held.topic_id
    another = known != (held.topic_id or known)
    if another and not ways.new_epoch:
        raise replaced(source, held, landed)
    if another or (ways.new_epoch and held.end < start):
        return replace(span, start=held.low, next=held.low)
    span = replace(span, topic_id=known)
    if held.low <= start:
        return span
    if not ways.accept_gap:
        raise gone(source, held, start)
    return replace(span, next=held.low, gone=held.low - start, accepted=ways.accept_gap)


def out_of_range(source: str, held: Held, span: OffsetSpan) -> IngestError:
    """Return the error for a partition whose cluster does not hold the offset at which ``span`` continues."""
    if held.low > span.next:
        return gone(source, held, span.next)
    return replaced(source, held, span)


def gone(source: str, held: Held, start: int) -> RecordsGone:
    """Return the error for the gap between ``start``, the next offset to read, and the first that is held."""
    return RecordsGone(
        f"Partition {held.partition} of the topic {held.topic} begins at offset {held.low}, and of {source} "
        f"those below {start} have landed: offsets {start} to {held.low - 1} were deleted (retention) before "
        "they were read.",
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
