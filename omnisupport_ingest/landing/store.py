"""The landed batches of one source: publish, list, read, verify.

A batch exists when its manifest exists. Manifests are immutable, so each is parsed once.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from omnisupport_ingest.durable import create_exclusively, sync_file, sync_folder
from omnisupport_ingest.failpoints import gate
from omnisupport_ingest.landing import integrity
from omnisupport_ingest.landing.chain import Hole, unbroken
from omnisupport_ingest.landing.encoding import content_of, decode_manifest, encode_manifest, unreadable
from omnisupport_ingest.landing.epochs import (
    EpochFacts,
    EpochRecord,
    epoch_numbers,
    read_epoch,
    write_epoch,
)
from omnisupport_ingest.landing.errors import ChainContested, DamagedBatch, ManifestUnreadable
from omnisupport_ingest.landing.folder_lock import FolderLock
from omnisupport_ingest.landing.manifest import DataFile, Manifest
from omnisupport_ingest.landing.names import epoch_in, is_stream, stream_batch_id, stream_prefix

_SUFFIX = ".json"


@dataclass(frozen=True, slots=True)
class Landed:
    """What downstream may take, in landing order, and the hole that holds back the rest of an epoch.

    If several epochs have one, it is that of the newest of them: the one that may still be repaired.
    """

    batches: tuple[Manifest, ...]
    hole: Hole | None


class LandingStore:
    """The landing folder of one source: ``manifests/``, ``data/`` and ``epochs/`` below it."""

    def __init__(self, root: Path, source: str, *, remembered: int | None = None) -> None:
        """``root`` is the home's landing folder; the source's folders are made if they are missing.

        ``remembered``: how many parsed manifests are kept; null: all that are read.
        """
        self.source = source
        self.folder = root / source
        self._manifests = self.folder / "manifests"
        self._data = self.folder / "data"
        self._epochs = self.folder / "epochs"
        self._parsed: dict[str, tuple[tuple[int, int], Manifest]] = {}
        self._remembered = remembered
        self._newest_stream: dict[int, str] = {}
        self._epoch_begun = 0
        if not self._epochs.is_dir():
            for folder in (self.folder, self._manifests, self._data, self._epochs):
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            sync_folder(self.folder)
            sync_folder(root)

    def data_folder(self, batch_id: str) -> Path:
        """Where the data files of a batch are written."""
        return self._data / batch_id

    def path_of(self, data_file: DataFile) -> Path:
        """The absolute path of a data file."""
        return self.folder / data_file.path

    def exists(self, batch_id: str) -> bool:
        return self._manifest_file(batch_id).exists()

    def publish(self, manifest: Manifest) -> None:
        """Land ``manifest``: make its data files durable, then create it, exclusively and durable.

        Raises ``ChainContested`` if the batch has landed already, or if it is of the stream and
        does not continue the epoch's last batch; ``DamagedBatch`` if a data file is missing.
        """
        if manifest.source != self.source:
            raise ValueError(f"a batch of {manifest.source} does not belong to {self.source}")
        content = encode_manifest(manifest)
        self._refuse_break(manifest)
        with gate("landing.data", manifest.batch_id):
            self._make_durable(manifest)
        with gate("landing.manifest", manifest.batch_id):
            created = create_exclusively(self._manifest_file(manifest.batch_id), content)
        if not created:
            raise ChainContested(
                f"Batch {manifest.batch_id} of {self.source} has already landed.",
                fix="Stop this writer: another one captures this source. Run one capture per slot.",
            )
        if manifest.rows:
            self._epoch_begun = max(self._epoch_begun, manifest.epoch)

    def last_change(self) -> int:
        """When a manifest was last added or taken away, in nanoseconds: another number, another landing."""
        return self._manifests.stat().st_mtime_ns

    def batch_ids(self) -> list[str]:
        """The names of all landed batches, sorted; opens no file."""
        with os.scandir(self._manifests) as entries:
            names = [entry.name for entry in entries]
        return sorted(
            name.removesuffix(_SUFFIX)
            for name in names
            if name.endswith(_SUFFIX) and not name.startswith(".")
        )

    def read(self, batch_id: str) -> Manifest:
        """One manifest, checked; ``ManifestUnreadable`` or ``ManifestFromNewerVersion`` otherwise.

        Parsed once, unless the file has become another one.
        """
        file = self._manifest_file(batch_id)
        try:
            written = file.stat()
            parsed = self._parsed.get(batch_id)
            if parsed is not None and parsed[0] == (written.st_mtime_ns, written.st_size):
                return parsed[1]
            manifest = decode_manifest(content_of(file), file)
        except FileNotFoundError:
            raise ManifestUnreadable(
                f"{file} does not exist: batch {batch_id} has not landed or was removed.",
                fix="Restore the landing folder from a backup if the batch should be there.",
            ) from None
        except PermissionError:
            raise
        except OSError as problem:
            raise unreadable(file, problem.strerror) from problem
        if manifest.source != self.source:
            raise ManifestUnreadable(
                f"{file} is a manifest of source {manifest.source!r}, not of {self.source!r}.",
                fix="Move the file to the landing folder of its own source.",
            )
        while self._remembered is not None and len(self._parsed) >= self._remembered:
            # The one that was read first. Another thread may have taken it away.
            self._parsed.pop(next(iter(self._parsed), ""), None)
        self._parsed[batch_id] = (written.st_mtime_ns, written.st_size), manifest
        return manifest

    def manifests(self) -> list[Manifest]:
        """All manifests in landing order: by epoch, snapshot chunks, stream, then files as they came."""
        return sorted((self.read(batch_id) for batch_id in self.batch_ids()), key=_landing_order)

    def landed(self) -> Landed:
        """The batches that downstream may take: all chunks and files, the stream up to a hole.

        Chains are per epoch. A chain starts at the consistent point that the epoch's record names;
        nothing deletes landed batches in this version, so a first batch that starts elsewhere is a
        hole too. Without such a record the lowest batch starts it. A hole holds back the rest of
        its epoch and is reported for as long as it is there; a later epoch is taken all the same,
        as a new epoch is the repair of a hole that cannot be filled.
        """
        manifests = self.manifests()
        starts = {each.number: each.facts.consistent_point for each in self.epochs() if each.facts}
        epochs = sorted({manifest.epoch for manifest in manifests})
        newest = max([*epochs, *epoch_numbers(self._epochs)], default=0)
        held_back: set[str] = set()
        found: Hole | None = None
        for epoch in epochs:
            stream = [each for each in manifests if each.epoch == epoch and each.stream is not None]
            accepted, hole = unbroken(stream, starts.get(epoch))
            held_back |= {each.batch_id for each in stream} - {each.batch_id for each in accepted}
            if hole is not None:
                found = replace(hole, later_epoch=newest if newest > epoch else None)
        return Landed(tuple(each for each in manifests if each.batch_id not in held_back), found)

    def last_stream(self, epoch: int) -> Manifest | None:
        """The newest stream batch of ``epoch``, whether or not a hole lies before it.

        All names are listed once. From then on the chain is followed: what a batch continues names it.
        """
        known = self._newest_stream.get(epoch)
        if known is None or not self.exists(known):
            prefix = stream_prefix(epoch)
            known = max((name for name in self.batch_ids() if name.startswith(prefix)), default=None)
            if known is None:
                return None
        newest = self.read(known)
        while (after := _name_of_next(newest)) != newest.batch_id and self.exists(after):
            newest = self.read(after)
        self._newest_stream[epoch] = newest.batch_id
        return newest

    def last_stream_until(self, epoch: int) -> Manifest | None:
        """The newest stream batch of ``epoch``, else of the nearest epoch before it that has one."""
        if (of_epoch := self.last_stream(epoch)) is not None:
            return of_epoch
        streams = (name for name in self.batch_ids() if is_stream(name))
        newest = max((name for name in streams if (epoch_in(name) or 0) <= epoch), default=None)
        return self.read(newest) if newest is not None else None

    def last_file(self, epoch: int) -> Manifest | None:
        """The batch of an input file of events that the next one of ``epoch`` follows: the last of the
        epoch, else of the nearest before it that has one; none before the first.

        The landing clock may be set back, so the last one is told by what never falls within an epoch:
        the watermark and the highest commit time.
        """
        files = (self.read(batch_id) for batch_id in self.batch_ids() if epoch_in(batch_id) is None)
        events = [
            each
            for each in files
            if each.file is not None and each.file.order is not None and each.epoch <= epoch
        ]
        return max(events, key=_how_far, default=None)

    def newest_epoch_begun(self) -> int:
        """The highest epoch of which an event has landed; 0 before the first.

        An epoch that is recorded only, or that has landed idle stretches alone, has not begun. All names are
        listed as long as the newest recorded epoch has not; one that has begun is remembered.
        """
        recorded = epoch_numbers(self._epochs)
        if not recorded or self._epoch_begun < max(recorded):
            self._epoch_begun = self._newest_epoch_with_events()
        return self._epoch_begun

    def _newest_epoch_with_events(self) -> int:
        of_epoch: dict[int | None, list[str]] = {}
        for batch_id in self.batch_ids():
            of_epoch.setdefault(epoch_in(batch_id), []).append(batch_id)
        deliveries = (self.read(batch_id) for batch_id in of_epoch.pop(None, ()))
        begun = max((each.epoch for each in deliveries if each.rows), default=0)
        for epoch in sorted((each for each in of_epoch if each is not None), reverse=True):
            # Names of chunks sort first, so as a rule the first manifest settles it.
            if epoch > begun and any(self.read(batch_id).rows for batch_id in of_epoch[epoch]):
                return epoch
        return begun

    def verify_file(self, data_file: DataFile) -> None:
        """Check existence, size and hash of a data file; ``DamagedBatch`` names it and the fix."""
        integrity.verify(self.folder, data_file)

    def verify(self, manifest: Manifest) -> None:
        """``verify_file`` for every data file of a batch."""
        for data_file in manifest.files:
            self.verify_file(data_file)

    def current_epoch(self) -> EpochRecord | None:
        """The epoch that began last; none before the first."""
        numbers = epoch_numbers(self._epochs)
        return read_epoch(self._epochs, numbers[-1]) if numbers else None

    def epochs(self) -> tuple[EpochRecord, ...]:
        """Every epoch that has begun, in order."""
        return tuple(read_epoch(self._epochs, number) for number in epoch_numbers(self._epochs))

    def begin_epoch(
        self, reason: str, facts: EpochFacts | None, *, now: datetime | None = None
    ) -> EpochRecord:
        """Allocate the next epoch, durably; ``EpochContested`` if another process did so first.

        A number that any batch bears is never given again, even if its epoch record is lost.
        """
        used = [epoch_in(batch_id) or 0 for batch_id in self.batch_ids()]
        number = max([*used, *epoch_numbers(self._epochs)], default=0) + 1
        record = EpochRecord(number, reason, now or datetime.now(UTC), facts)
        write_epoch(self._epochs, record)
        return record

    def make_names_durable(self) -> None:
        """Make durable that what has landed is there: who landed it may have died just before that.

        To be called before anything of it is confirmed to a source.
        """
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

    def _manifest_file(self, batch_id: str) -> Path:
        return self._manifests / f"{batch_id}{_SUFFIX}"

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
            path = self.path_of(data_file)
            try:
                sync_file(path)
            except FileNotFoundError:
                raise DamagedBatch(
                    f"Data file {path} is missing, so batch {manifest.batch_id} does not land.",
                    fix="Run the same command again: the batch is read from its source anew.",
                ) from None
            folders.add(path.parent)
        for folder in sorted(folders):
            sync_folder(folder)
        if folders:
            sync_folder(self._data)


def _name_of_next(manifest: Manifest) -> str:
    """The name of the stream batch that continues ``manifest``."""
    if manifest.stream is None:
        raise ValueError(f"{manifest.batch_id} is not a batch of the stream")
    return stream_batch_id(manifest.epoch, manifest.stream.end_lsn)


def _how_far(manifest: Manifest) -> tuple[int, datetime, datetime, datetime, str]:
    arrival, never = manifest.arrival, datetime.min.replace(tzinfo=UTC)
    return (
        manifest.epoch,
        arrival.watermark or never,
        arrival.highest_commit_ts or never,
        arrival.landed_at,
        manifest.batch_id,
    )


def _landing_order(manifest: Manifest) -> tuple[int, int, str, str]:
    if manifest.file is not None:
        return manifest.epoch, 2, manifest.arrival.landed_at.isoformat(), manifest.batch_id
    return manifest.epoch, 0 if manifest.chunk is not None else 1, "", manifest.batch_id
