"""Landing a seed delivery: its rows become one file batch, named by the hash of their content.

The rows are a finished snapshot of their table: a boundary event, then one ``r`` event per row. So a
later delivery replaces an earlier one, rows that are gone from it included. The same content again
is found to have landed and changes nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.foreign import Unreadable, open_file, printable
from omnisupport_ingest.landing.folder_lock import one_at_a_time
from omnisupport_ingest.landing.manifest import FileSpan, Manifest
from omnisupport_ingest.landing.names import file_batch_id
from omnisupport_ingest.landing.rows import LandedEvent
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.landing.writer import BatchWriter
from omnisupport_ingest.sources.contracted_relation import contracted_relation
from omnisupport_ingest.sources.manifests.row_text import RowFault, read_row
from omnisupport_ingest.sources.manifests.seed_manifest import SeedFile, SeedManifest
from omnisupport_ingest.windows import OUT_OF_RANGE, WindowGrid

FIRST_ORDINAL = -(1 << 62)
"""Ordinal of the first event that a file lands. Each further one is higher, across all deliveries
of a source, and all stay negative: a row that comes again is a later event, never a collision."""

MAX_LINE_BYTES = 256 * 1024 * 1024
"""A row as large as this is taken for a file that is not one row per line."""

_BLOCK = 1 << 20


class SeedRefused(IngestError):
    """A delivery that is not what its manifest says, or not fit to land. Nothing of it landed."""


@dataclass(frozen=True, slots=True)
class SeedLanding:
    """The batch that holds a delivery; ``already_landed``: it was there before and nothing was done."""

    manifest: Manifest
    already_landed: bool


def land(
    seed: SeedManifest,
    store: LandingStore,
    grid: WindowGrid,
    epoch: int,
    clock: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> SeedLanding:
    """Check the files of ``seed`` and land their rows in ``store`` as one batch of ``epoch``.

    ``clock`` gives the landing clock's time, timezone-aware; it is the events' time where ``seed``
    has no ``as_of``. ``SeedRefused`` for a fault that the gates reject: then nothing has landed.
    """
    contract = seed.contract
    if store.source != contract.source:
        raise ValueError(f"rows of {contract.source} do not belong to the landing of {store.source}")
    content = _content_hash(seed)
    batch_id = file_batch_id(content)
    moment = seed.as_of or clock()
    if grid.key_of(moment, clock()) == OUT_OF_RANGE:
        raise SeedRefused(
            f"{seed.path} at $.as_of: {moment.isoformat()} is in no window of this home, which begins at "
            f"{grid.first.isoformat()}; every row would be quarantined.",
            fix="Leave as_of out, so that the rows count from the moment they land.",
        )
    with one_at_a_time(store.folder):
        if store.exists(batch_id):
            return SeedLanding(_of_same_table(store.read(batch_id), seed), already_landed=True)
        with BatchWriter(store, grid, epoch, batch_id, clock=clock) as writer:
            for event in _events(seed, epoch, moment, _next_ordinal(store, epoch)):
                writer.add(event)
            landed = writer.seal(
                file=FileSpan(sha256=content, name=seed.files[0].path.name, manifest=seed.path.name),
                relations=(contracted_relation(contract),),
            )
    return SeedLanding(landed, already_landed=False)


def _content_hash(seed: SeedManifest) -> str:
    """SHA-256 of the files' bytes, one after the other; ``SeedRefused`` if one is not as described."""
    together = hashlib.sha256()
    for file in seed.files:
        alone = hashlib.sha256()
        try:
            with os.fdopen(open_file(file.path), "rb") as source:
                while block := source.read(_BLOCK):
                    alone.update(block)
                    together.update(block)
        except (OSError, Unreadable) as problem:
            told = problem.strerror if isinstance(problem, OSError) else problem
            raise SeedRefused(
                f"{printable(file.path)}, named by {seed.path}, cannot be read: {told}.",
                fix="Put the file there, or correct the path; it is relative to the manifest.",
            ) from None
        _check_hash(seed, file, alone.hexdigest())
    return together.hexdigest()


def _events(seed: SeedManifest, epoch: int, moment: datetime, ordinal: int) -> Iterator[LandedEvent]:
    contract = seed.contract

    def event(op: str, key: str | None, after: str | None) -> LandedEvent:
        return LandedEvent(
            epoch=epoch,
            commit_lsn=0,
            ordinal=ordinal,
            op=op,
            source_ts=moment,
            tx_id=None,
            lsn=None,
            source_schema=contract.schema,
            source_table=contract.table,
            key=key,
            before=None,
            after=after,
            unchanged=None,
            moved_from_key=None,
            chunk_id=None,
        )

    yield event("b", None, None)
    for file in seed.files:
        for row in _rows(seed, file):
            ordinal += 1
            yield event("r", _compact([row[name] for name in contract.key]), _compact(row))


def _rows(seed: SeedManifest, file: SeedFile) -> Iterator[dict[str, str | None]]:
    known = set(seed.contract.column_names)
    read = hashlib.sha256()
    count = 0
    with os.fdopen(open_file(file.path), "rb") as lines:
        while line := lines.readline(MAX_LINE_BYTES + 1):
            count += 1
            if len(line) > MAX_LINE_BYTES:
                raise SeedRefused(
                    f"{file.path}, line {count} is longer than {MAX_LINE_BYTES >> 20} MiB "
                    f"(gate schema: {seed.gates.schema}).",
                    fix="Write one row per line.",
                )
            read.update(line)
            try:
                row = read_row(line, seed.contract)
            except RowFault as fault:
                raise SeedRefused(
                    f"{file.path}, line {count}: {fault} (gate schema: {seed.gates.schema}).",
                    fix="Correct the line, then sha256 in the manifest.",
                ) from None
            if seed.gates.unknown_column == "reject" and not known.issuperset(row):
                raise SeedRefused(
                    f"{file.path}, line {count}: {seed.contract.path} does not name the column "
                    f"{sorted(row.keys() - known)[0]!r} (gate unknown_column: reject).",
                    fix="Add the column to the contract, or accept unknown columns.",
                )
            yield row
    # The file may have changed since it was hashed.
    _check_hash(seed, file, read.hexdigest())
    if count != file.rows:
        raise SeedRefused(
            f"{file.path} has {count} rows; {seed.path} says {file.rows} "
            f"(gate row_count: {seed.gates.row_count}).",
            fix="Ask the owner which is right, then correct the file or the manifest.",
        )


def _check_hash(seed: SeedManifest, file: SeedFile, found: str) -> None:
    if found != file.sha256:
        raise SeedRefused(
            f"{file.path} is not the file that {seed.path} describes: its SHA-256 is {found}, not "
            f"{file.sha256} (gate checksum: {seed.gates.checksum}).",
            fix="Get the file again from its owner, or correct sha256 if the new file is meant.",
        )


def _next_ordinal(store: LandingStore, epoch: int) -> int:
    """Above every ordinal that a file batch of the epoch holds; manifests make it durable."""
    used = (each.file_ordinal for each in store.epoch_standings() if each.epoch == epoch)
    return max((each + 1 for each in used if each is not None), default=FIRST_ORDINAL)


def _of_same_table(landed: Manifest, seed: SeedManifest) -> Manifest:
    table = (seed.contract.schema, seed.contract.table)
    if any((relation.schema, relation.table) != table for relation in landed.relations):
        raise SeedRefused(
            f"The content of {seed.path} has landed as batch {landed.batch_id}, for another table.",
            fix="One content is one batch of one table: correct the contract that the manifest names.",
        )
    return landed


def _compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
