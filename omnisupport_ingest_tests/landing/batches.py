"""Small batches to land: events, spans and whole chains, built from what a test is about."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from omnisupport_ingest.landing.manifest import ArrivalFacts, Manifest, StreamSpan
from omnisupport_ingest.landing.names import epoch_in, stream_batch_id, stream_prefix
from omnisupport_ingest.landing.rows import LandedEvent
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.landing.writer import BatchWriter, WriterLimits
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.windows import WindowGrid, WindowSize

GRID = WindowGrid(WindowSize(60), datetime(2026, 3, 1, tzinfo=UTC))
NOON = datetime(2026, 3, 2, 12, 0, tzinfo=UTC)
SKEW = timedelta(seconds=2)


def event(commit_lsn: int, ordinal: int = 0, at: datetime = NOON, table: str = "tickets") -> LandedEvent:
    """An insert committed at ``at``."""
    text = f'{{"id": "{ordinal}", "subject": "printer on fire"}}'
    return LandedEvent(
        1, commit_lsn, ordinal, "c", at, 7, commit_lsn, "public", table, '["1"]', None, text, None, None, None
    )


def is_stream(batch_id: str) -> bool:
    """Whether ``batch_id`` names a batch of the stream."""
    epoch = epoch_in(batch_id)
    return epoch is not None and batch_id.startswith(stream_prefix(epoch))


def span(previous_end: int, end: int, at: datetime | None = NOON) -> StreamSpan:
    """A span with one transaction at ``at``, or with none (a keepalive)."""
    if at is None:
        return StreamSpan(Lsn(previous_end), Lsn(end), None, None, None, None, None)
    return StreamSpan(Lsn(previous_end), Lsn(end), Lsn(previous_end + 1), Lsn(previous_end + 1), 7, at, at)


def manifest(previous_end: int, end: int, epoch: int = 1) -> Manifest:
    """A stream batch without data files, not landed anywhere."""
    return Manifest(
        batch_id=stream_batch_id(epoch, Lsn(previous_end)),
        source="support_desk",
        epoch=epoch,
        arrival=ArrivalFacts(NOON, None, None, None),
        stream=span(previous_end, end, at=None),
    )


def open_writer(
    store: LandingStore,
    previous_end: int,
    *,
    epoch: int = 1,
    now: datetime = NOON,
    limits: WriterLimits | None = None,
) -> BatchWriter:
    """A writer of the stream batch that continues ``previous_end``, with a clock that stands still."""
    batch_id = stream_batch_id(epoch, Lsn(previous_end))
    return BatchWriter(store, GRID, epoch, batch_id, clock=lambda: now, limits=limits or WriterLimits())


def land(
    store: LandingStore,
    previous_end: int,
    end: int,
    *,
    epoch: int = 1,
    at: datetime | None = NOON,
    now: datetime = NOON,
    confirmed_clock: datetime | None = None,
) -> Manifest:
    """Land a batch of one event committed at ``at``, or a keepalive's empty one."""
    with open_writer(store, previous_end, epoch=epoch, now=now) as writer:
        if at is not None:
            writer.add(event(previous_end + 1, at=at))
        return writer.seal(
            stream=span(previous_end, end, at), confirmed_clock=confirmed_clock, max_clock_skew=SKEW
        )
