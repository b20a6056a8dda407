"""What has landed in a home, in the oracle's words, and what of it may be taken: no more than up to a gap."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from omnisupport_ingest_tests.oracle.judging import OUT_OF_RANGE, Clockwork, Delivery
from omnisupport_ingest_tests.oracle.model import Image, Key
from omnisupport_ingest_tests.proof.delivery import CHUNK, FILE, STREAM, Batch
from omnisupport_ingest_tests.proof.history import START, Told
from omnisupport_ingest_tests.proof.tables import KEY, Terms, readable_at_rest

Subject = tuple[str, str]
"""Whom values are of: the name of its subjects and what the subject's column says, or a table's rows and the
text of a key."""


@dataclass(frozen=True)
class Copy:
    """What a copy has of the batch that brought it.

    ``file_row``: its line, where that was a file. ``readable``: the columns of its images that landed as they
    are; null: all did. ``whose``: the subject of each image that landed encrypted (``before``, ``after``).
    """

    batch_id: str
    landed_at: datetime
    file_row: int | None
    readable: frozenset[str] | None = None
    whose: Mapping[str, Subject] = field(default_factory=dict)


@dataclass(frozen=True)
class _Step:
    """A batch that landed. ``watermark``: as it was frozen then. ``numbers``: of its deliveries."""

    batch: Batch
    batch_id: str
    watermark: datetime | None
    numbers: range


class Landed:
    """The deliveries of a home, numbered as they land, each with the facts of its arrival."""

    def __init__(self) -> None:
        self.deliveries: list[Delivery] = []
        self.copies: dict[int, Copy] = {}
        self._steps: list[_Step] = []
        self._lost: set[str] = set()
        self._times: dict[int, list[datetime]] = {}
        self._clockwork = Clockwork()

    def take(self, batch: Batch, batch_id: str, terms: Mapping[str, Terms] | None = None) -> None:
        """``terms``: by which it landed; null: nothing of it is encrypted."""
        windows = [window_of(told.event.source_ts, batch.landed_at) for told in batch.told]
        times = [
            told.event.source_ts
            for told, window in zip(batch.told, windows, strict=True)
            if window != OUT_OF_RANGE
        ]
        times += [batch.clock] if batch.clock else []
        if batch.kind != CHUNK:
            # What was ahead of the landing clock counts in full once the clock has caught up.
            times = self._times.setdefault(batch.epoch, []) + times
            self._times[batch.epoch] = [max(times)] if times else []
        arrival = self._clockwork.arrive(
            batch.epoch,
            times,
            batch.landed_at,
            moves=batch.kind != CHUNK,
            from_file=batch.kind == FILE,
            begins=bool(batch.told),
        )
        reached = [min(each, batch.landed_at) for each in times]
        mark = arrival.watermark_before if batch.kind == CHUNK else max(reached, default=None)
        first = len(self.deliveries) + 1
        self._steps.append(_Step(batch, batch_id, mark, range(first, first + len(batch.told))))
        for row, (told, window) in enumerate(zip(batch.told, windows, strict=True), start=1):
            number = len(self.deliveries) + 1
            readable = readable_at_rest(terms, told.event.table) if terms is not None else None
            file_row = row if batch.kind == FILE else None
            whose = _whose(told, readable, (terms or {}).get(told.event.table))
            self.copies[number] = Copy(batch_id, batch.landed_at, file_row, readable, whose)
            self.deliveries.append(
                Delivery(
                    number=number,
                    event=told.event,
                    window=window,
                    arrival=arrival,
                    unreadable=told.unreadable,
                    misplaced=told.misplaced,
                    batch=(batch.landed_at, batch_id, file_row or 0),
                )
            )

    def lose(self, batch_id: str) -> None:
        """A batch of the stream is lost, and holds back those of its epoch that continue it."""
        self._lost.add(batch_id)

    def find(self, batch_id: str) -> None:
        """A batch that was lost is back."""
        self._lost.remove(batch_id)

    @property
    def watermark(self) -> datetime | None:
        """The highest commit time that has been brought, of whatever epoch, by the batches with events that
        may be taken. A clock that was behind holds it back."""
        marks = (each.watermark for each in self._taken if each.batch.told)
        return max((mark for mark in marks if mark is not None), default=None)

    @property
    def encrypted(self) -> int:
        """How many copies landed encrypted, where they had a value."""
        return sum(each.readable is not None for each in self.copies.values())

    def encrypted_images(self) -> Iterator[tuple[Delivery, Subject]]:
        """Each image that landed encrypted, of the batches that are not lost, with its subject."""
        for step in self._steps:
            for number in step.numbers if step.batch_id not in self._lost else ():
                for subject in self.copies[number].whose.values():
                    yield self.deliveries[number - 1], subject

    def plain_images(self, terms: Mapping[str, Terms]) -> Iterator[tuple[Delivery, Subject, Image | None]]:
        """Each image that landed plain, of the batches that are not lost, with its subject by today's
        ``terms``, and its columns (None: it cannot be read); none of a table whose contract names none."""
        for step in self._steps:
            for number in step.numbers if step.batch_id not in self._lost else ():
                delivery = self.deliveries[number - 1]
                for name, subject in plain_of(delivery, self.copies[number], terms).items():
                    yield delivery, subject, getattr(delivery.event, name)

    def keys_made(self, subjects: Iterable[Subject]) -> int:
        """How many of ``subjects`` have a key: it was made for what landed, lost batches too."""
        made = {subject for copy in self.copies.values() for subject in copy.whose.values()}
        return len({*subjects} & made)

    @property
    def has_gap(self) -> bool:
        return bool(self._lost)

    @property
    def batches(self) -> list[Batch]:
        """The batches that may be taken."""
        return [each.batch for each in self._taken]

    @property
    def taken(self) -> list[Delivery]:
        """The deliveries of the batches that may be taken."""
        return [self.deliveries[number - 1] for each in self._taken for number in each.numbers]

    @property
    def _taken(self) -> list[_Step]:
        """All but the streams of an epoch from a batch on that is lost: nobody knows what was in it."""
        broken: set[int] = set()
        found = []
        for step in self._steps:
            if step.batch_id in self._lost:
                broken.add(step.batch.epoch)
            if step.batch.kind != STREAM or step.batch.epoch not in broken:
                found.append(step)
        return found


def own_subject(table: str, key: Key | None) -> Subject:
    """Whom a row of ``table`` is of that does not say whose it is."""
    return f"rows of {table}", "" if key is None else json.dumps(list(key), separators=(",", ":"))


def plain_of(delivery: Delivery, copy: Copy, terms: Mapping[str, Terms]) -> dict[str, Subject]:
    """The subject of each image of a delivery that landed plain, by today's ``terms``."""
    event, of_table = delivery.event, terms.get(delivery.event.table)
    if of_table is None or of_table.subject is None or event.op in "tb":
        return {}
    own = own_subject(event.table, event.key)
    found = {}
    for name, image, key in (
        ("before", event.before, event.moved_from or event.key),
        ("after", event.after, event.key),
    ):
        if name in copy.whose:
            continue
        if image is not None:
            row = {**dict(zip(KEY, key or (), strict=False)), **image}
            named = row.get(of_table.subject)
            found[name] = own if named is None else (event.table, named)
        elif name == "after" and delivery.unreadable is not None:
            found[name] = own
    return found


def _whose(told: Told, readable: frozenset[str] | None, terms: Terms | None) -> dict[str, Subject]:
    """The subject of each image of an event that lands encrypted. ``readable``: the columns that do not."""
    event = told.event
    if readable is None or event.op in "tb":
        return {}
    own = own_subject(event.table, event.key)
    found = {}
    for name, image, key in (
        ("before", event.before, event.moved_from or event.key),
        ("after", event.after, event.key),
    ):
        row = None if image is None else {**dict(zip(KEY, key or (), strict=False)), **image}
        if row is not None and not row.keys() <= readable:
            named = row.get(terms.subject or "") if terms is not None else None
            found[name] = own if named is None else (event.table, named)
    if told.unreadable is not None:
        found["after"] = own
    return found


def window_of(moment: datetime, landed_at: datetime) -> str:
    """The hour of a commit time, unless it cannot be right: an hour before the start, a day ahead."""
    if (START - moment).total_seconds() > 3600 or (moment - landed_at).total_seconds() > 86400:
        return OUT_OF_RANGE
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H00")
