"""Where the values of a subject are: encrypted images in landing and raw, and cells in the tables above.

An encrypted image names its key, so the images of a subject are found in every table of the source without
reading one of them. They say which rows are the subject's, and by their keys those are found in the tables
that hold values readable. Every file of the source is read once, however little is found in it.
"""

from __future__ import annotations

import binascii
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from omnisupport_ingest.cdc.images import read_image
from omnisupport_ingest.contracts.at_rest import encrypted_columns
from omnisupport_ingest.contracts.encrypted_images import MARK, key_id
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.lake.table import LakeTable
from omnisupport_ingest.landing.integrity import sha256_of
from omnisupport_ingest.layers.looking import look
from omnisupport_ingest.layers.workspace import Workspace

LANDING, RAW = "landing", "raw_cdc_staging"

_IMAGES = ("before", "after")
_READ = ["source_schema", "source_table", "key", *_IMAGES]

Row = tuple[str, str, str]
"""Schema, table, and the text of a row's key."""


@dataclass(frozen=True, slots=True)
class Holding:
    """A file of ``place`` (landing, raw, or a table's path in the lake) that holds something of a subject:
    ``count`` images in landing and raw, cells in a table. ``path`` is relative to the home."""

    place: str
    path: str
    sha256: str
    count: int


@dataclass
class Traced:
    """What landing and raw hold of a subject.

    ``encrypted``: files with images that its key encrypted; ``plain``: with images of its rows that landed
    before the contract said encrypted. ``windows`` and ``rows`` are those of the encrypted ones.
    """

    encrypted: list[Holding] = field(default_factory=list)
    plain: list[Holding] = field(default_factory=list)
    windows: dict[bytes, set[str]] = field(default_factory=dict)
    rows: set[Row] = field(default_factory=set)


def key_ids_of_row(workspace: Workspace, contract: TableContract, key: str) -> set[bytes]:
    """The ids of the keys that encrypted images of the row with ``key`` in the table."""
    found = set()
    for _, _, _, batch in _landed(workspace, contract.source):
        of_row = batch.filter(_of_rows(batch, {(contract.schema, contract.table, key)}))
        for name in _IMAGES:
            images = of_row.column(name)
            for image in images.filter(pc.match_substring(images, MARK)).to_pylist():
                found.add(key_id(image))
    return {each for each in found if each is not None}


def traced(workspace: Workspace, source: str, ids: Collection[bytes]) -> Traced:
    """What landing and raw of ``source`` hold that the keys ``ids`` encrypted, and plain of the same rows."""
    found, marks = Traced(), {each: MARK + binascii.b2a_base64(each, newline=False).decode() for each in ids}
    counts: dict[tuple[str, Path], int] = {}
    for place, path, window, batch in _landed(workspace, source):
        for each, mark in marks.items():
            for name in _IMAGES:
                here = pc.fill_null(pc.match_substring(batch.column(name), mark), False)
                if here.true_count:
                    counts[place, path] = counts.get((place, path), 0) + here.true_count
                    found.windows.setdefault(each, set()).add(window)
                    found.rows |= set(_rows(batch.filter(here)))
    found.encrypted = _holdings(workspace, counts)
    found.plain = _holdings(workspace, _plain(workspace, source, found.rows))
    return found


def cells_above_raw(workspace: Workspace, source: str, rows: Collection[Row]) -> list[Holding]:
    """The files of the newest versions of the tables above raw that hold personal values of ``rows``."""
    found = []
    for contract in workspace.contracts.of_source(source):
        keys = {key for schema, table, key in rows if (schema, table) == (contract.schema, contract.table)}
        columns = encrypted_columns(contract)
        if not keys or not columns:
            continue
        for table in (workspace.deduped(source), workspace.quarantine(source)):
            found += _cells(workspace, table, contract, keys, of_events=True)
        for table in tables_of(workspace, contract):
            found += _cells(workspace, table, contract, keys, of_events=False)
    return found


def tables_of(workspace: Workspace, contract: TableContract) -> tuple[LakeTable, ...]:
    """The tables that hold rows of ``contract`` alone."""
    return workspace.net_changes(contract), workspace.dimension(contract), workspace.history(contract)


def _cells(
    workspace: Workspace, table: LakeTable, contract: TableContract, keys: Collection[str], *, of_events: bool
) -> list[Holding]:
    snapshot = look(table)
    counts: dict[tuple[str, Path], int] = {}
    for file in snapshot.all_files() if snapshot is not None else ():
        partition = dict(file.partition)
        if partition.get("source_table", contract.table) != contract.table:
            continue
        count = _event_cells(file.uri, contract, keys) if of_events else _row_cells(file.uri, contract, keys)
        if count:
            counts[table.spec.path, Path(file.uri)] = count
    return _holdings(workspace, counts)


def _event_cells(path: str, contract: TableContract, keys: Collection[str]) -> int:
    columns = frozenset(encrypted_columns(contract))
    names = pq.read_schema(path).names
    rows = pq.read_table(path, columns=[each for each in _READ if each in names], partitioning=None)
    wanted = pc.and_(
        pc.is_in(rows["key"], pa.array(sorted(keys))), pc.equal(rows["source_schema"], contract.schema)
    )
    if "source_table" in names:
        wanted = pc.and_(wanted, pc.equal(rows["source_table"], contract.table))
    images = rows.filter(wanted)
    return sum(
        value is not None
        for name in _IMAGES
        for text in images[name].to_pylist()
        for column, value in (read_image(text) or {}).items()
        if column in columns
    )


def _row_cells(path: str, contract: TableContract, keys: Collection[str]) -> int:
    there = frozenset(pq.read_schema(path).names)
    columns = [name for name in encrypted_columns(contract) if name in there]
    rows = pq.read_table(path, columns=["_cdc_key", *columns], partitioning=None)
    rows = rows.filter(pc.is_in(rows["_cdc_key"], pa.array(sorted(keys))))
    return sum(rows.num_rows - rows[name].null_count for name in columns)


def _landed(workspace: Workspace, source: str) -> Iterator[tuple[str, Path, str, pa.RecordBatch]]:
    """Events of landing and raw with their place, file and window; of files that are there."""
    store, raw = workspace.landing(source), look(workspace.raw(source))
    files = [
        (LANDING, store.path_of(file), file.window) for each in store.manifests() for file in each.files
    ] + [(RAW, Path(file.uri), file.window) for file in (raw.all_files() if raw is not None else ())]
    for place, path, window in files:
        if path.exists():
            with pq.ParquetFile(path) as parquet:
                for batch in parquet.iter_batches(columns=_READ):
                    yield place, path, window, batch


def _plain(workspace: Workspace, source: str, rows: Collection[Row]) -> dict[tuple[str, Path], int]:
    """How many images of ``rows`` landed with personal values readable, by place and file."""
    columns: Mapping[tuple[str, str], frozenset[str]] = {
        (each.schema, each.table): frozenset(encrypted_columns(each))
        for each in workspace.contracts.of_source(source)
    }
    counts: dict[tuple[str, Path], int] = {}
    for place, path, _, batch in _landed(workspace, source):
        here = batch.filter(_of_rows(batch, rows))
        for row in here.to_pylist():
            personal = columns.get((row["source_schema"], row["source_table"]), frozenset())
            for name in _IMAGES:
                image = read_image(row[name]) or {}
                if any(value is not None and column in personal for column, value in image.items()):
                    counts[place, path] = counts.get((place, path), 0) + 1
    return counts


def _rows(events: pa.RecordBatch) -> Iterator[Row]:
    columns = (events.column(name).to_pylist() for name in _READ[:3])
    for schema, table, key in zip(*columns, strict=True):
        if key is not None:
            yield schema, table, key


def _of_rows(events: pa.RecordBatch, rows: Collection[Row]) -> pa.BooleanArray:
    """Which of ``events`` are of ``rows``."""
    keys = pc.is_in(events.column("key"), pa.array(sorted({key for *_, key in rows}), pa.string()))
    if not keys.true_count:
        return keys
    wanted = set(rows)
    columns = (events.column(name).to_pylist() for name in _READ[:3])
    return pa.array([each in wanted for each in zip(*columns, strict=True)], pa.bool_())


def _holdings(workspace: Workspace, counts: Mapping[tuple[str, Path], int]) -> list[Holding]:
    home = workspace.home.path
    return [
        Holding(place, path.relative_to(home).as_posix(), sha256_of(path), count)
        for (place, path), count in sorted(counts.items())
    ]
