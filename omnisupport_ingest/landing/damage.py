"""Check all of landing: every manifest, every data file, every chain (``landing verify``). Changes nothing.

One damaged batch hides no other: the check goes on to the end and reports all damage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from omnisupport_ingest import progress
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.landing.chain import unbroken
from omnisupport_ingest.landing.epochs import EpochRecord
from omnisupport_ingest.landing.integrity import RECORDS_AGAIN
from omnisupport_ingest.landing.kept_positions import kept_file
from omnisupport_ingest.landing.manifest import DataFile, Manifest
from omnisupport_ingest.landing.standing import LandedPart
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.storage import at_hand, put_back

_RESTORE = "Restore the file from a backup of the landing folder."


@dataclass(frozen=True, slots=True)
class Damage:
    """A file or record that differs from what landed.

    ``kind`` is ``manifest``, ``file``, ``rows``, ``positions``, ``epoch`` or ``chain``.
    """

    kind: str
    batch_id: str | None
    problem: str
    fix: str


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check of one source's landing read, and all damage.

    ``files`` and ``bytes`` count the data files that are there; ``removed`` counts those that retention
    removed.
    """

    source: str
    batches: int
    files: int
    bytes: int
    removed: int
    damage: tuple[Damage, ...]


def check_landing(store: LandingStore, expected: Callable[[LandedPart], bool] = lambda _: True) -> Finding:
    """Read every manifest, hash every data file, count its rows, and follow every chain.

    ``expected``: whether a data file should be there; False for files that retention removed.
    """
    damage: list[Damage] = []
    manifests: list[Manifest] = []
    names = store.names_on_disk()
    for batch_id in progress.each(names, lambda _: f"reading the manifests of {store.source}"):
        try:
            manifests.append(store.read(batch_id))
        except IngestError as error:
            damage.append(Damage("manifest", batch_id, error.problem, error.fix))
    files, removed = [], 0
    for manifest in progress.each(manifests, lambda _: f"reading the files of {store.source}"):
        for file in manifest.files:
            part = LandedPart.of(manifest, file)
            if not expected(part):
                removed += 1
                damage += _damage_of_positions(store, part) if part.is_of_files else ()
                continue
            files.append(file)
            damage += _damage_of(store, manifest, file)
    epochs = _epochs(store, manifests, damage)
    for epoch in sorted({manifest.epoch for manifest in manifests if manifest.stream is not None}):
        damage += _gaps(epoch, manifests, epochs)
    damage += _offset_gaps(manifests)
    store.look_again()
    return Finding(
        source=store.source,
        batches=len(names),
        files=len(files),
        bytes=sum(file.bytes for file in files),
        removed=removed,
        damage=tuple(damage),
    )


def _damage_of(store: LandingStore, manifest: Manifest, file: DataFile) -> Iterator[Damage]:
    path = store.path_of(file)
    try:
        store.verify_file(file)
        rows = pq.read_metadata(path).num_rows
    except IngestError as error:
        yield Damage("file", manifest.batch_id, error.problem, error.fix)
    except (OSError, pa.ArrowException) as error:
        problem = f"{path} cannot be read: {type(error).__name__}."
        yield Damage("file", manifest.batch_id, problem, put_back(path, _RESTORE))
    else:
        if rows != file.rows:
            problem = f"{path} has {rows} rows; the manifest of {manifest.batch_id} says {file.rows}."
            record = store.folder / "manifests" / f"{manifest.batch_id}.json"
            fix = put_back(record, "Restore the manifest from a backup.")
            yield Damage("rows", manifest.batch_id, problem, fix)


def _damage_of_positions(store: LandingStore, part: LandedPart) -> Iterator[Damage]:
    """Yield what is wrong with the positions that are kept of a data file that retention removed."""
    path = at_hand(kept_file(store.folder, part.path))
    try:
        rows = pq.read_metadata(path).num_rows
    except (OSError, pa.ArrowException) as error:
        problem = f"{path} cannot be read: {type(error).__name__}."
    else:
        if rows == part.rows:
            return
        problem = f"{path} has {rows} rows; the manifest of {part.batch_id} says {part.rows}."
    fix = f"{_RESTORE} Until then nothing lands that may share positions with it."
    yield Damage("positions", part.batch_id, problem, put_back(path, fix))


def _epochs(store: LandingStore, manifests: list[Manifest], damage: list[Damage]) -> dict[int, EpochRecord]:
    """Return the epoch records by number, and add what is wrong with them to ``damage``."""
    try:
        records = {record.number: record for record in store.epochs()}
    except IngestError as error:
        damage.append(Damage("epoch", None, error.problem, error.fix))
        return {}
    for number in sorted({manifest.epoch for manifest in manifests} - records.keys()):
        problem = f"Epoch {number} of {store.source} has batches, and no record in {store.folder / 'epochs'}."
        record = store.folder / "epochs" / f"{number:06d}.json"
        damage.append(Damage("epoch", None, problem, put_back(record, _RESTORE)))
    return records


def _gaps(epoch: int, manifests: list[Manifest], records: dict[int, EpochRecord]) -> Iterator[Damage]:
    """Yield every break in the chain of ``epoch``, not only the first."""
    remaining = [each for each in manifests if each.epoch == epoch and each.stream is not None]
    remaining.sort(key=_previous_end)
    facts = records[epoch].facts if epoch in records else None
    start = facts.consistent_point if facts else None
    while True:
        accepted, gap = unbroken(remaining, start)
        if gap is None:
            return
        yield Damage("chain", gap.before, str(gap), gap.fix)
        remaining, start = remaining[len(accepted) :], None


def _offset_gaps(manifests: list[Manifest]) -> Iterator[Damage]:
    """Yield all offsets of Kafka partitions that lie between two batches and landed in none."""
    following: dict[tuple[int, str, int], int] = {}
    for manifest in sorted(manifests, key=lambda each: each.batch_id):
        for span in (manifest.file.offsets if manifest.file is not None else None) or ():
            place = manifest.epoch, span.topic, span.partition
            due = following.get(place, span.start)
            if span.start > due:
                problem = (
                    f"Offsets {due} to {span.start - 1} of partition {span.partition} of the topic "
                    f"{span.topic} landed in no batch: one before {manifest.batch_id} is missing."
                )
                yield Damage("chain", manifest.batch_id, problem, f"{_RESTORE} {RECORDS_AGAIN}")
            following[place] = span.next


def _previous_end(manifest: Manifest) -> int:
    return manifest.stream.previous_end_lsn.value if manifest.stream is not None else 0
