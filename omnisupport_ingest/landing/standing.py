"""How far the landing of an epoch has come: sums over its batches, updated batch by batch.

``BatchLine`` has the facts of one manifest that the sums need; ``EpochStanding`` has the sums. They include
the chain of the stream, so "may downstream take this batch?" is answered without reading earlier batches. If
a batch does not fit at the end (a missing batch came back, the epoch starts elsewhere), the sums are computed
again from all batches. The landing index stores them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache

from omnisupport_ingest.landing.chain import Gap
from omnisupport_ingest.landing.manifest import DataFile, Manifest
from omnisupport_ingest.landing.names import epoch_in
from omnisupport_ingest.position import Lsn, Position
from omnisupport_ingest.windows import OUT_OF_RANGE

CHUNK, STREAM, FILE = 0, 1, 2
"""The kinds of batches, in the order in which they land."""

LandingOrder = tuple[int, int, str, str]
"""Sort key of a batch in landing order; its name is the last part."""

_BY_TIME = "time"
"""Order of files whose positions are not from a log."""

_REMEMBERED = 10_000
"""Parsed data files that a process keeps, about 1 KB each: those of the windows that runs work on."""

_NEVER = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class BatchLine:
    """What ``EpochStanding`` needs of one manifest.

    Attributes:
        out_of_range: rows with an impossible time.
        mark: watermark after the batch.
        highest: highest commit time after the batch.
        ordinal: highest ordinal.
        begins: where a stream batch begins.
        ends: where a stream batch ends.
        recovered: whether it is the first stream batch after capture died.
        order: order of a file of events; the next three are of such a file.
        commit: lowest commit LSN above 0.
        read: highest ordinal at commit LSN 0 of snapshot rows, below 0.
        changed: highest ordinal at commit LSN 0 of changes.
    """

    batch_id: str
    epoch: int
    kind: int
    rows: int
    out_of_range: int
    landed_at: datetime
    mark: datetime | None
    highest: datetime | None
    ordinal: int | None = None
    begins: Lsn | None = None
    ends: Lsn | None = None
    recovered: bool = False
    order: str | None = None
    commit: int | None = None
    read: int | None = None
    changed: int | None = None

    @classmethod
    def of(cls, manifest: Manifest) -> BatchLine:
        arrival, stream, file = manifest.arrival, manifest.stream, manifest.file
        reached = [end for each in manifest.files for end in (each.first, each.last)]
        order = file.order if file is not None else None
        at_zero = [end.ordinal for end in reached if not end.commit_lsn.value] if order is not None else []
        commits = [end.commit_lsn.value for end in reached if end.commit_lsn.value]
        return cls(
            manifest.batch_id,
            manifest.epoch,
            CHUNK if manifest.chunk is not None else STREAM if stream is not None else FILE,
            manifest.rows,
            sum(each.rows for each in manifest.files if each.window == OUT_OF_RANGE),
            arrival.landed_at,
            arrival.watermark,
            arrival.highest_commit_ts,
            max((each.last.ordinal for each in manifest.files), default=None),
            stream.previous_end_lsn if stream is not None else None,
            stream.end_lsn if stream is not None else None,
            stream is not None and stream.recovered_from is not None,
            order,
            min(commits, default=None) if order is not None else None,
            max((each for each in at_zero if each < 0), default=None),
            max((each for each in at_zero if each >= 0), default=None),
        )

    def to_text(self) -> str:
        """Return one line of JSON without the name."""
        facts = [self.epoch, self.kind, self.rows, self.out_of_range, self.landed_at.isoformat()]
        facts += [_text(self.mark), _text(self.highest), self.ordinal]
        facts += [None if each is None else each.value for each in (self.begins, self.ends)]
        facts += [self.recovered, self.order, self.commit, self.read, self.changed]
        return json.dumps(facts, separators=(",", ":"))

    @classmethod
    def from_text(cls, batch_id: str, text: str) -> BatchLine:
        """Parse what ``to_text`` wrote of the batch ``batch_id``."""
        epoch, kind, rows, out_of_range, landed_at, mark, highest, ordinal, begins, ends, *more = json.loads(
            text
        )
        return cls(
            batch_id,
            epoch,
            kind,
            rows,
            out_of_range,
            datetime.fromisoformat(landed_at),
            _moment(mark),
            _moment(highest),
            ordinal,
            None if begins is None else Lsn(begins),
            None if ends is None else Lsn(ends),
            *more,
        )

    @property
    def landing_order(self) -> tuple[int, str, str]:
        """The key that sorts the batches of an epoch in landing order."""
        return self.kind, self.landed_at.isoformat() if self.kind == FILE else "", self.batch_id


@dataclass(frozen=True, slots=True)
class LandedPart:
    """A data file of a landed batch, with facts of its batch.

    ``mark`` is the batch's watermark, ``mark_before`` the one it found; ``begins``: where a stream batch
    begins.
    """

    batch_id: str
    epoch: int
    window: str
    path: str
    rows: int
    first: Position
    last: Position
    ordered: bool
    rows_per_table: dict[str, int]
    landed_at: datetime
    mark: datetime | None
    mark_before: datetime | None
    begins: Lsn | None = None

    @property
    def landing_order(self) -> LandingOrder:
        """The key that sorts the batches of all epochs in landing order."""
        kind = STREAM if self.begins is not None else CHUNK if epoch_in(self.batch_id) is not None else FILE
        return self.epoch, kind, self.landed_at.isoformat() if kind == FILE else "", self.batch_id

    @property
    def is_of_files(self) -> bool:
        """Whether its batch came as a file, from topics or by a cursor, and was not captured from a log."""
        return self.landing_order[1] == FILE

    @classmethod
    def of(cls, manifest: Manifest, file: DataFile) -> LandedPart:
        arrival = manifest.arrival
        return cls(
            manifest.batch_id,
            manifest.epoch,
            *(file.window, file.path, file.rows, file.first, file.last, file.ordered, file.rows_per_table),
            *(arrival.landed_at, arrival.watermark, arrival.watermark_before),
            manifest.stream.previous_end_lsn if manifest.stream is not None else None,
        )

    def to_text(self) -> str:
        """Return one line of JSON without window and batch."""
        facts = [self.epoch, self.path, self.rows, str(self.first), str(self.last), self.ordered]
        times = [self.landed_at.isoformat(), _text(self.mark), _text(self.mark_before)]
        begins = None if self.begins is None else self.begins.value
        return json.dumps([*facts, self.rows_per_table, *times, begins], separators=(",", ":"))

    @staticmethod
    @lru_cache(_REMEMBERED)
    def from_text(window: str, batch_id: str, text: str) -> LandedPart:
        """Parse what ``to_text`` wrote of a file of ``batch_id`` in ``window``.

        The result is cached, because each layer of a run asks for all files of its window.
        """
        epoch, path, rows, first, last, ordered, tables, landed_at, mark, before, begins = json.loads(text)
        return LandedPart(
            *(batch_id, epoch, window, path, rows, Position.parse(first), Position.parse(last), ordered),
            tables,
            datetime.fromisoformat(landed_at),
            _moment(mark),
            _moment(before),
            None if begins is None else Lsn(begins),
        )


@dataclass(frozen=True, slots=True)
class EpochStanding:
    """Sums over the landed batches of one epoch.

    Attributes:
        start: where its stream starts, by the epoch's record.
        chunks: number of chunks.
        files: number of input files.
        begun: whether any batch has an event.
        last_stream: highest name of a stream batch.
        last_file: the file of events that the next one follows.
        chunk_ordinal: highest ordinal of chunks.
        file_ordinal: highest ordinal of files.
        deliveries: number of files without events.
        order: order of the files of events; it, ``commit``, ``read`` and ``changed`` are as in ``BatchLine``.
        batches: number of batches that downstream may take. The next fields, up to ``last``, are of these.
        events: their events.
        out_of_range: their events with an impossible time.
        recoveries: how many of them are the first after capture died.
        streams: how many of them are stream batches.
        mark: their highest watermark.
        stream_mark: watermark of the last stream batch that has one.
        marked: the last of them that has a watermark.
        last: the last batch in landing order.
        end: where the unbroken chain ends.
        end_of: the batch that ends there.
        break_at: where the first batch after a gap begins.
        break_before: the name of that batch.
    """

    epoch: int
    start: Lsn | None = None
    chunks: int = 0
    files: int = 0
    begun: bool = False
    last_stream: str | None = None
    last_file: BatchLine | None = None
    chunk_ordinal: int | None = None
    file_ordinal: int | None = None
    deliveries: int = 0
    order: str | None = None
    commit: int | None = None
    read: int | None = None
    changed: int | None = None
    batches: int = 0
    events: int = 0
    out_of_range: int = 0
    recoveries: int = 0
    streams: int = 0
    landed_at: datetime | None = None
    mark: datetime | None = None
    stream_mark: datetime | None = None
    marked: BatchLine | None = None
    last: BatchLine | None = None
    end: Lsn | None = None
    end_of: str | None = None
    break_at: Lsn | None = None
    break_before: str | None = None

    @classmethod
    def folded(cls, epoch: int, start: Lsn | None, lines: Iterable[BatchLine]) -> EpochStanding:
        """Compute the sums of ``lines``: every batch of ``epoch``, those of the stream in ascending order."""
        standing = cls(epoch, start)
        for line in lines:
            following = standing.with_next(line)
            if following is None:
                raise ValueError(f"{line.batch_id} does not come in the order of the stream")
            standing = following
        return standing

    def with_next(self, line: BatchLine) -> EpochStanding | None:
        """Return the sums with one batch more; None if they must be computed anew."""
        landed = replace(self, begun=self.begun or line.rows > 0)
        if line.kind == CHUNK:
            ordinal = _highest(self.chunk_ordinal, line.ordinal)
            return replace(landed, chunks=self.chunks + 1, chunk_ordinal=ordinal)._taking(line)
        if line.kind == FILE:
            return landed._with_file(line)._taking(line)
        return landed._with_stream(line)

    def _with_file(self, line: BatchLine) -> EpochStanding:
        landed = replace(self, files=self.files + 1, file_ordinal=_highest(self.file_ordinal, line.ordinal))
        if line.order is None:
            return replace(landed, deliveries=self.deliveries + 1)
        landed = replace(landed, last_file=further(self.last_file, line))
        if line.ordinal is not None and line.ordinal >= 0:
            landed = replace(landed, order=self.order or line.order)
        if line.order == _BY_TIME:
            return landed
        return replace(
            landed,
            commit=min((each for each in (self.commit, line.commit) if each is not None), default=None),
            read=_highest(self.read, line.read),
            changed=_highest(self.changed, line.changed),
        )

    def _with_stream(self, line: BatchLine) -> EpochStanding | None:
        assert line.begins is not None, "a batch of the stream"
        landed = replace(self, last_stream=max(self.last_stream or "", line.batch_id))
        if self.break_at is not None:
            return landed if line.begins > self.break_at else None
        expected = self.end if self.streams else self.start
        if expected is None or line.begins == expected:
            taken = landed._taking(line)
            mark = line.mark if line.mark is not None else self.stream_mark
            return replace(
                taken, streams=self.streams + 1, end=line.ends, end_of=line.batch_id, stream_mark=mark
            )
        if line.begins < expected and self.streams:
            # Of overlapping batches the lower one comes first, whichever landed first.
            assert self.end_of is not None
            if line.batch_id < self.end_of:
                return None
        return replace(landed, break_at=line.begins, break_before=line.batch_id)

    def _taking(self, line: BatchLine) -> EpochStanding:
        last = line if self.last is None or line.landing_order > self.last.landing_order else self.last
        marks = [each for each in (self.mark, line.mark) if each is not None]
        marked = self.marked
        if line.mark is not None and (marked is None or line.landing_order > marked.landing_order):
            marked = line
        return replace(
            self,
            batches=self.batches + 1,
            events=self.events + line.rows,
            out_of_range=self.out_of_range + line.out_of_range,
            recoveries=self.recoveries + line.recovered,
            landed_at=max(self.landed_at or line.landed_at, line.landed_at),
            mark=max(marks, default=None),
            marked=marked,
            last=last,
        )

    def takes(self, begins: Lsn | None) -> bool:
        """Whether downstream may take a batch of this epoch. ``begins``: where a stream batch begins; None
        for other batches."""
        return begins is None or self.break_at is None or begins < self.break_at

    def gap(self, newest_epoch: int) -> Gap | None:
        """Return the gap in the chain of the stream; None if there is none."""
        if self.break_at is None or self.break_before is None:
            return None
        expected = self.end if self.streams else self.start
        assert expected is not None, "a break is one from what was expected"
        later = newest_epoch if newest_epoch > self.epoch else None
        return Gap(self.epoch, self.end_of, expected, self.break_before, self.break_at, later)


def _highest(*ordinals: int | None) -> int | None:
    return max((each for each in ordinals if each is not None), default=None)


def _text(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat()


def _moment(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)


def further(one: BatchLine | None, other: BatchLine) -> BatchLine:
    """Return the file of events that the next one follows.

    The landing clock may be set back, so the watermark and the highest commit time decide: they never fall
    within an epoch.
    """
    return other if one is None or _how_far(other) > _how_far(one) else one


def _how_far(line: BatchLine) -> tuple[int, datetime, datetime, datetime, str]:
    return line.epoch, line.mark or _NEVER, line.highest or _NEVER, line.landed_at, line.batch_id
