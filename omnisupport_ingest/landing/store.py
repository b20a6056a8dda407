"""The landed batches of one source: publish, list, read, verify.

A batch exists when its manifest exists. Manifests are immutable, so each is parsed once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from omnisupport_ingest.durable import sync_file, sync_folder
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.landing import integrity
from omnisupport_ingest.landing.encoding import content_of, decode_manifest, encode_manifest, unreadable
from omnisupport_ingest.landing.epochs import (
    EpochFacts,
    EpochRecord,
    epoch_numbers,
    read_epoch,
    write_epoch,
)
from omnisupport_ingest.landing.errors import (
    ChainContested,
    DamagedBatch,
    ManifestFromNewerVersion,
    ManifestUnreadable,
)
from omnisupport_ingest.landing.folder_lock import FolderLock
from omnisupport_ingest.landing.index import SUFFIX, LandingIndex, News
from omnisupport_ingest.landing.landed import Landed
from omnisupport_ingest.landing.manifest import DataFile, Manifest
from omnisupport_ingest.landing.names import stream_batch_id, stream_prefix
from omnisupport_ingest.landing.rows import Division, LandedEvent
from omnisupport_ingest.landing.standing import BatchLine, EpochStanding, LandedPart, further
from omnisupport_ingest.position import Lsn, Position
from omnisupport_ingest.storage import create_exclusively, forget_unread, put_back, storage_of

if TYPE_CHECKING:
    import pyarrow as pa

_REMEMBERED = 256
"""Parsed manifests that a store keeps in memory, about 11 KB each."""

HELD_UP_SECONDS = 1800.0
"""Seconds after which a writer checks that its data is still stored. A sweep spares data younger than an
hour, or than the age that its caller gives."""


@dataclass(frozen=True, slots=True)
class _Since:
    """A moment, by two clocks: one may be set back, the other stands still while the machine sleeps."""

    wall: float
    running: float

    @classmethod
    def now(cls) -> _Since:
        return cls(time.time(), time.monotonic())

    def seconds(self) -> float:
        """How long ago that was."""
        return max(time.time() - self.wall, time.monotonic() - self.running)


class LandingStore:
    """The landing folder of one source: ``manifests/``, ``data/`` and ``epochs/`` below it."""

    def __init__(
        self,
        root: Path,
        source: str,
        *,
        remembered: int = _REMEMBERED,
        as_landed: Callable[[pa.Table], pa.Table] = lambda events: events,
        identity_as_landed: Callable[[LandedEvent], str | None] = lambda event: event.identity,
        divisions_as_landed: Callable[[Sequence[tuple[str, str]]], Sequence[Division | None]] = (
            lambda names: [None] * len(names)
        ),
    ) -> None:
        """Open the landing of ``source``; its folders are made if they are missing.

        Args:
            root: the home's landing folder.
            remembered: number of parsed manifests kept in memory.
            as_landed: converts events (a table with the columns of ``EVENT_SCHEMA``) to the form in which
                they are written; for writers of personal data.
            identity_as_landed: converts the ``identity`` of one event in the same way.
            divisions_as_landed: returns for each table how its row images must be divided for ``as_landed``
                (``DIVIDED_SCHEMA``), if the caller can divide them; None: not at all.
        """
        self.source = source
        self.as_landed, self.identity_as_landed = as_landed, identity_as_landed
        self.divisions_as_landed = divisions_as_landed
        self.folder = root / source
        self._manifests = self.folder / "manifests"
        self._data = self.folder / "data"
        self._epochs = self.folder / "epochs"
        self._parsed: dict[str, tuple[tuple[int, int], Manifest]] = {}
        self._remembered = remembered
        self._storage = storage_of(self._manifests)
        self._index = LandingIndex(self.folder / "index", self._manifests, self._parse, self._bring)
        if not self._epochs.is_dir():
            for folder in (self.folder, self._manifests, self._data, self._epochs):
                # No failpoint: making a folder that exists already does no harm.
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            sync_folder(self.folder)
            sync_folder(root)

    def data_folder(self, batch_id: str) -> Path:
        """Return the folder of a batch's data files."""
        return self._data / batch_id

    def path_of(self, data_file: DataFile | LandedPart) -> Path:
        """Return the absolute path of a data file; an object is copied here first if need be."""
        return self._storage.at_hand(self.folder / data_file.path)

    def exists(self, batch_id: str) -> bool:
        return self._storage.exists(self._manifest_file(batch_id))

    def publish(self, manifest: Manifest) -> None:
        """Land ``manifest``: make its data files durable, then create the manifest, exclusively and durably.

        Raises:
            ChainContested: the batch has landed already, or it is of the stream and does not continue the
                epoch's last batch.
            DamagedBatch: a data file is missing.
        """
        if manifest.source != self.source:
            raise ValueError(f"a batch of {manifest.source} does not belong to {self.source}")
        content = encode_manifest(manifest)
        self._refuse_break(manifest)
        began = _Since.now()
        with failpoint("landing.data", manifest.batch_id):
            self._make_durable(manifest)
        with self._index.adding() as add:
            with failpoint("landing.manifest", manifest.batch_id):
                created = create_exclusively(self._manifest_file(manifest.batch_id), content)
            if created:
                add(manifest)
        if not created:
            raise ChainContested(
                f"Batch {manifest.batch_id} of {self.source} has already landed.",
                fix="Stop this writer: another one captures this source. Run one capture per slot.",
            )
        if not self._storage.is_local and began.seconds() > HELD_UP_SECONDS:
            self._make_whole(manifest)

    def _make_whole(self, manifest: Manifest) -> None:
        """Store the data of the batch again if a sweep took it while this process landed the batch slowly.

        This process or its machine slept, so a sweep on another machine may have taken the data for a dead
        writer's. The data is still on this machine, and nobody has been informed that the batch landed. If
        the data is gone here too, the manifest is removed again.
        """
        try:
            with failpoint("landing.data", manifest.batch_id):
                self._make_durable(manifest)
        except DamagedBatch:
            # No failpoint: a batch whose data is gone is found by every reader of it.
            self._storage.unlink(self._manifest_file(manifest.batch_id))
            raise

    def last_change(self) -> int:
        """Return when a manifest was last added or removed, in nanoseconds. A different number means that
        landing has changed."""
        self._bring()
        return self._manifests.stat().st_mtime_ns

    def batch_ids(self, prefix: str = "") -> list[str]:
        """The names of all landed batches that begin with ``prefix``, sorted. Opens no manifest that the
        index has already."""
        return self._index.names(prefix)

    def names_on_disk(self) -> list[str]:
        """Return the names of all batches from the folder itself, without the index: for complete checks."""
        self._storage.bring(self.folder, afresh=True)
        with os.scandir(self._manifests) as entries:
            names = [entry.name for entry in entries]
        return sorted(
            name.removesuffix(SUFFIX) for name in names if name.endswith(SUFFIX) and not name.startswith(".")
        )

    def newest_first(self, prefix: str) -> Iterator[str]:
        """The names of batches that begin with ``prefix``, the highest first, a few at a time."""
        below: str | None = None
        while names := self._index.highest(prefix, below):
            yield from names
            below = names[-1]

    def read(self, batch_id: str) -> Manifest:
        """Return one manifest, checked. It is parsed once while it is kept in memory and its file does not
        change.

        Raises ``ManifestUnreadable`` or ``ManifestFromNewerVersion``.
        """
        file = self._storage.at_hand(self._manifest_file(batch_id))
        with _naming(file, batch_id):
            written = file.stat()
        parsed = self._parsed.get(batch_id)
        if parsed is not None and parsed[0] == (written.st_mtime_ns, written.st_size):
            return parsed[1]
        manifest = self._parse(batch_id)
        while len(self._parsed) >= self._remembered:
            # Drop the one that was read first. Another thread may drop it, or add one, at any moment.
            with suppress(RuntimeError):
                self._parsed.pop(next(iter(self._parsed), ""), None)
        self._parsed[batch_id] = (written.st_mtime_ns, written.st_size), manifest
        return manifest

    def _parse(self, batch_id: str) -> Manifest:
        file = self._storage.at_hand(self._manifest_file(batch_id))
        with _naming(file, batch_id):
            manifest = decode_manifest(content_of(file), file)
        if manifest.source != self.source:
            raise ManifestUnreadable(
                f"{file} is a manifest of source {manifest.source!r}, not of {self.source!r}.",
                fix="Move the file to the landing folder of its own source.",
            )
        return manifest

    def manifests(self) -> list[Manifest]:
        """All manifests in landing order: by epoch, snapshot chunks, stream, then files as they came."""
        return sorted((self.read(batch_id) for batch_id in self.batch_ids()), key=_landing_order)

    def landed(self) -> Landed:
        """Return the batches that downstream may take: all chunks and files, and the stream up to a gap.

        Each epoch has a chain. It starts at the consistent point in the epoch's record; landed batches are
        not deleted, so a first batch that starts elsewhere is a gap too. Without a record the lowest batch
        starts the chain. A gap holds back the rest of its epoch, and is reported while it exists. Batches of
        later epochs are taken nevertheless, because a new epoch repairs a gap that cannot be filled.
        """
        epochs = self._standings()
        newest = max([*(each.epoch for each in epochs), *epoch_numbers(self._epochs)], default=0)
        gaps = [gap for each in epochs if (gap := each.gap(newest)) is not None]
        return Landed(epochs, gaps[-1] if gaps else None, self)

    def parts(self, window: str) -> list[LandedPart]:
        """The data files in ``window``, by batch, whether or not downstream may take them."""
        return self._index.parts(window)

    def has_just(self, window: str, batches: frozenset[str]) -> bool:
        """Return whether exactly ``batches`` have landed in ``window``.

        Takes the same time for any window.
        """
        return self._index.holds_just(window, batches)

    def windows(self) -> list[str]:
        """Return every window in which anything has landed, in order, held-back batches included."""
        return self._index.windows()

    def reaching(self, epoch: int, first: Position, last: Position) -> list[LandedPart]:
        """The data files of batches of events of ``epoch`` that hold positions from ``first`` to ``last``, in
        landing order."""
        parts = self._index.reaching(epoch, first, last)
        return sorted(parts, key=lambda each: (each.landed_at, each.batch_id, each.window, each.path))

    def news(self, era: str | None, number: int) -> News:
        """Return what landed since the read that ended with ``number`` in ``era``."""
        return self._index.news(era, number)

    def epoch_standings(self) -> tuple[EpochStanding, ...]:
        """Return how far each epoch with a batch has come, in order, held-back batches included."""
        return self._standings()

    def stream_between(self, epoch: int, since: Lsn, below: Lsn) -> list[Manifest]:
        """The stream batches of ``epoch`` with commits from ``since`` (inclusive) to ``below``
        (exclusive)."""
        start, end = stream_batch_id(epoch, since), stream_batch_id(epoch, below)
        before = self._index.highest(stream_prefix(epoch), start, count=1)
        return [self.read(name) for name in before + self._index.between(start, end)]

    def last_stream(self, epoch: int) -> Manifest | None:
        """The newest stream batch of ``epoch``, whether or not a gap lies before it."""
        return self._newest(each.last_stream for each in self._standings() if each.epoch == epoch)

    def last_stream_until(self, epoch: int) -> Manifest | None:
        """The newest stream batch of ``epoch``, else of the nearest epoch before it that has one."""
        return self._newest(each.last_stream for each in self._standings() if each.epoch <= epoch)

    def _newest(self, names: Iterable[str | None]) -> Manifest | None:
        newest = max((name for name in names if name is not None), default=None)
        return self.read(newest) if newest is not None else None

    def last_file(self, epoch: int) -> Manifest | None:
        """The batch of events from a file that the next one of ``epoch`` follows; None before the first.

        It is the last such batch of the epoch, else of the nearest earlier epoch that has one.
        """
        last: BatchLine | None = None
        for each in self._standings():
            if each.epoch <= epoch and each.last_file is not None:
                last = further(last, each.last_file)
        return self.read(last.batch_id) if last is not None else None

    def whole_snapshots(self) -> Mapping[str, datetime]:
        """Return, by table, the latest moment of which a whole snapshot has landed in a source without
        cursors (``FileSpan.snapshots``). Empty for any other source."""
        last = max(
            (
                Position(each.epoch, Lsn(0), each.file_ordinal)
                for each in self._standings()
                if each.file_ordinal is not None
            ),
            default=None,
        )
        # Ordinals rise from delivery to delivery; the times of landing need not.
        newest = [] if last is None else self.reaching(last.epoch, last, last)
        file = self.read(newest[-1].batch_id).file if newest else None
        return (file.snapshots if file is not None else None) or {}

    def watermark_until(self, epoch: int) -> datetime | None:
        """The highest watermark of ``epoch`` and the epochs before it; None if they have none."""
        marks = (each.mark for each in self._standings() if each.epoch <= epoch)
        return max((each for each in marks if each is not None), default=None)

    def newest_epoch_begun(self) -> int:
        """Return the highest epoch of which an event has landed; 0 before the first.

        An epoch that is only recorded, or has only landed idle stretches, has not begun.
        """
        return max((each.epoch for each in self._standings() if each.begun), default=0)

    def _standings(self) -> tuple[EpochStanding, ...]:
        starts = {each.number: each.facts.consistent_point for each in self.epochs() if each.facts}
        return self._index.standings(starts)

    def verify_file(self, data_file: DataFile) -> None:
        """Check existence, size and hash of a data file; ``DamagedBatch`` names it and the fix."""
        integrity.verify(self.folder, data_file)

    def verify(self, manifest: Manifest) -> None:
        """``verify_file`` for every data file of a batch."""
        for data_file in manifest.files:
            self.verify_file(data_file)

    def current_epoch(self) -> EpochRecord | None:
        """The epoch that began last; none before the first."""
        self._bring()
        numbers = epoch_numbers(self._epochs)
        return read_epoch(self._epochs, numbers[-1]) if numbers else None

    def epochs(self) -> tuple[EpochRecord, ...]:
        """Every epoch that has begun, in order."""
        self._bring()
        return tuple(read_epoch(self._epochs, number) for number in epoch_numbers(self._epochs))

    def begin_epoch(
        self,
        reason: str,
        facts: EpochFacts | None,
        *,
        now: datetime | None = None,
        rows_from: datetime | None = None,
    ) -> EpochRecord:
        """Allocate the next epoch, durably. Raises ``EpochContested`` if another process did so first.

        A number that any batch has is never used again, even if its epoch record is lost. ``rows_from``: as
        of ``EpochRecord``.
        """
        used = [each.epoch for each in self._standings()]
        number = max([*used, *epoch_numbers(self._epochs)], default=0) + 1
        record = EpochRecord(number, reason, now or datetime.now(UTC), facts, rows_from)
        write_epoch(self._epochs, record)
        return record

    def close(self) -> None:
        """Close the index; the next read opens it again."""
        self._index.close()

    def look_again(self) -> None:
        """Have the next read compare the index with every manifest, even if the folder did not change."""
        self._storage.bring(self.folder, afresh=True)
        self._index.look_again()

    def make_names_durable(self) -> None:
        """Make the names of landed batches durable; the process that landed them may have died just before.

        Call it before confirming anything in them to a source.
        """
        if self._storage.is_local:
            sync_folder(self._manifests)

    def clear_garbage(self) -> list[str]:
        """Remove data folders that crashed writers left; returns the batch names they had.

        A folder whose writer is alive is left alone.
        """
        with os.scandir(self._data) as entries:
            folders = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        unpublished = sorted(name for name in folders if not self.exists(name))
        cleared = []
        for batch_id in unpublished:
            lock = FolderLock.take(self.data_folder(batch_id))
            if lock is None:
                continue
            # The writer may have published between the listing and the lock.
            if not self.exists(batch_id):
                lock.remove_contents()
                cleared.append(batch_id)
            lock.release()
        return cleared

    def sweep(self, older_than: timedelta) -> list[str]:
        """Delete data in an object store that no manifest names and that is older than ``older_than``; return
        the names of its batches. Local copies that nobody has read since go too. On a local disk this does
        nothing: ``clear_garbage`` cleans up there, by the locks of writers."""
        if self._storage.is_local:
            return []
        self._storage.bring(self.folder, afresh=True)
        before, swept, indexed = datetime.now(UTC) - older_than, set(), self._is_indexed()
        for each in self._storage.listed(self._data):
            if each.written < before and not self._is_named(each.path, indexed=indexed):
                with failpoint("landing.clear", each.path.parent.name):
                    self._storage.unlink(each.path)
                swept.add(each.path.parent.name)
        forget_unread(self.folder, before)
        return sorted(swept)

    def _is_indexed(self) -> bool:
        """Whether the index can be brought up to date: no manifest is unreadable."""
        try:
            self._index.windows()
        except (ManifestUnreadable, ManifestFromNewerVersion):
            return False
        return True

    def _is_named(self, file: Path, *, indexed: bool) -> bool:
        """Whether the manifest of its batch names a data file.

        A batch may have landed with the data of another attempt. No later attempt can land it, so the data of
        the first is nobody's.
        """
        batch_id, path = file.parent.name, file.relative_to(self.folder).as_posix()
        if indexed and path in self._index.files_of(batch_id):
            return True
        # The index may lack a batch that a list of the store left out, so the manifest itself decides.
        if not self.exists(batch_id):
            return False
        try:
            return any(each.path == path for each in self.read(batch_id).files)
        except (ManifestUnreadable, ManifestFromNewerVersion):
            # A manifest that cannot be read now may name it.
            return True

    def _bring(self) -> None:
        self._storage.bring(self.folder)

    def _manifest_file(self, batch_id: str) -> Path:
        return self._manifests / f"{batch_id}{SUFFIX}"

    def _refuse_break(self, manifest: Manifest) -> None:
        if manifest.stream is None:
            return
        last = self.last_stream(manifest.epoch)
        if last is None or last.stream is None:
            return
        if last.stream.end_lsn != manifest.stream.previous_end_lsn:
            raise ChainContested(
                f"Batch {manifest.batch_id} of {self.source} continues "
                f"{manifest.stream.previous_end_lsn}, but the last landed batch, {last.batch_id}, "
                f"ends at {last.stream.end_lsn}.",
                fix="Stop this writer and start capture again: it continues from the last landed batch.",
            )

    def _make_durable(self, manifest: Manifest) -> None:
        folders = set()
        for data_file in manifest.files:
            path = self.folder / data_file.path
            try:
                if self._storage.is_local:
                    sync_file(path)
                else:
                    # No failpoint: landing.data is around the calls of this function.
                    self._storage.upload([path])
            except FileNotFoundError:
                raise DamagedBatch(
                    f"Data file {path} is missing, so batch {manifest.batch_id} does not land.",
                    fix="Run the same command again: the batch is read from its source anew.",
                ) from None
            folders.add(path.parent)
        if not self._storage.is_local:
            return
        for folder in sorted(folders):
            sync_folder(folder)
        if folders:
            sync_folder(self._data)


@contextmanager
def _naming(file: Path, batch_id: str) -> Iterator[None]:
    """Raise ``ManifestUnreadable`` if the block cannot read ``file``, the manifest of ``batch_id``.

    An error of missing rights passes.
    """
    try:
        yield
    except FileNotFoundError:
        raise ManifestUnreadable(
            f"{file} does not exist: batch {batch_id} has not landed or was removed.",
            fix=put_back(file, "Restore the landing folder from a backup if the batch should be there."),
        ) from None
    except PermissionError:
        raise
    except OSError as problem:
        raise unreadable(file, problem.strerror) from problem


def _landing_order(manifest: Manifest) -> tuple[int, int, str, str]:
    if manifest.file is not None:
        return manifest.epoch, 2, manifest.arrival.landed_at.isoformat(), manifest.batch_id
    return manifest.epoch, 0 if manifest.chunk is not None else 1, "", manifest.batch_id
