"""Exports a dimension to one file for other programs, without loss.

DuckDB reads the files of one version of the table; neither Spark nor the source is needed.

A value that the column's type cannot hold (``NaN`` in a numeric, ``infinity`` in a timestamp) is written as
its exact text in CSV and JSON lines. A Parquet column keeps its type and is NULL there; the text is in the
map column ``_cdc_exact``. An unresolved value is NULL in every format, and the column ``_cdc_unresolved``
names its column.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from pathlib import Path

import duckdb

from omnisupport_ingest import progress
from omnisupport_ingest.contracts.model import Column, TableContract
from omnisupport_ingest.contracts.pg_types import ARRAYS, FLOATS, Kind
from omnisupport_ingest.durable import sync_file, sync_folder
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.foreign import Unreadable, printable, require_file
from omnisupport_ingest.lake.layout import WHOLE_TABLE, LakeFile
from omnisupport_ingest.lake.live_rows import live_sql
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.read.export_ledger import note_export
from omnisupport_ingest.read.overview import dimension_overview
from omnisupport_ingest.read.row_equality import named
from omnisupport_ingest.read.row_equality import text as literal


class Format(Enum):
    """The format of the file; the value is the option's text."""

    CSV = "csv"
    PARQUET = "parquet"
    JSON_LINES = "jsonl"


class NoDimension(IngestError):
    """The table has no dimension yet, or none with a column that its contract names since.

    Fix: Let the pipeline run, by ``omnisupport-ingest up`` or ``materialize``; then export again.
    """


class ExportFailed(IngestError):
    """The file of an export cannot be written, or a file of the lake cannot be read.

    Fix: Make room where the export goes; restore a damaged file of the lake from a backup.
    """


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written. ``cursor`` is the last event of the table that is in it.

    ``pending_batches``: batches that had landed before and are not in the file. If there is none, the file is
    complete up to ``complete_to``, the end of the landed WAL (None if everything came as files).
    ``unresolved``: rows that have a value which is not known.
    """

    table: str
    path: str
    rows: int
    bytes: int
    unresolved: int
    cursor: str
    complete_to: str | None
    pending_batches: int
    watermark: datetime | None
    delta_version: int


def export(
    workspace: Workspace, contract: TableContract, path: Path, form: Format, *, deleted: bool = False
) -> Exported:
    """Write the current state of ``contract`` to ``path``, which only its owner can read.

    The file is complete or not there: it is written under another name and renamed, and replaces a file of
    that name. With ``deleted`` it includes the softly deleted rows, marked by ``_cdc_is_deleted``. Raises
    ``NoDimension`` if there is nothing to write.
    """
    # Before the table is opened, so that what is read afterwards is at least as complete.
    behind = _progress(workspace, contract)
    snapshot = workspace.dimension(contract).look()
    state = snapshot.state(WHOLE_TABLE) if snapshot is not None else None
    if snapshot is None or state is None:
        raise NoDimension(
            f"{contract.source}.{contract.name} has no dimension yet.",
            fix="Let the pipeline take in what has landed (omnisupport-ingest up), then export again.",
        )
    home = workspace.home.path
    written = write_file(contract, snapshot.all_files(), path, form, deleted=deleted, home=home)
    return Exported(
        table=f"{contract.source}.{contract.name}",
        path=str(path),
        rows=written.rows,
        bytes=written.bytes,
        unresolved=written.unresolved,
        cursor=state.checkpoint.cursor,
        complete_to=behind.complete_to,
        pending_batches=behind.pending_batches,
        watermark=behind.watermark or state.checkpoint.watermark,
        delta_version=snapshot.version,
    )


@dataclass(frozen=True, slots=True)
class Written:
    """What a file has: ``unresolved`` of its ``rows`` have a value that is not known."""

    rows: int
    bytes: int
    unresolved: int


def write_file(
    contract: TableContract,
    files: Sequence[LakeFile | str],
    path: Path,
    form: Format,
    *,
    deleted: bool,
    home: Path,
) -> Written:
    """Write rows of ``current_type`` in the Parquet ``files`` to ``path``, as ``export`` does.

    The ledger of exports in ``home`` names the file before it is there.
    """
    paths = [file if isinstance(file, str) else file.stored for file in files]
    _require_files(contract, paths)
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    # No failpoint: the draft of an export, before export.file.
    os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    try:
        rows, unresolved = write_rows(contract, files, draft, form, deleted=deleted)
        sync_file(draft)
        size = draft.stat().st_size
        note_export(home, f"{contract.source}.{contract.name}", path, rows, draft=draft)
        with failpoint("export.file"):
            os.replace(draft, path)
            sync_folder(path.parent)
    except duckdb.IOException as error:
        raise ExportFailed(
            f"{contract.source}.{contract.name} could not be written to {path}, or a file of the lake could "
            "not be read.",
            fix=f"Make room in {path.parent}; if there is room, look at the lake's files: "
            f"{Path(paths[0]).parent if paths else 'there are none'}.",
        ) from error
    except duckdb.Error as error:
        # Do not quote DuckDB's message: it may contain a value of a row.
        raise ExportFailed(
            f"{contract.source}.{contract.name} could not be exported: a file of the lake is damaged, or has "
            f"other columns than the table ({type(error).__name__}).",
            fix=f"Restore the files of {Path(paths[0]).parent if paths else 'the table'} from a backup.",
        ) from error
    finally:
        draft.unlink(missing_ok=True)
    return Written(rows, size, unresolved)


def _require_files(contract: TableContract, files: Sequence[str]) -> None:
    """Raise ``ExportFailed`` unless each of ``files`` is a regular file: DuckDB would wait for a pipe."""
    for file in map(Path, files):
        try:
            require_file(file)
        except (OSError, Unreadable) as problem:
            reason = problem.strerror if isinstance(problem, OSError) else problem
            raise ExportFailed(
                f"{contract.source}.{contract.name} could not be exported: {printable(file)} cannot be read: "
                f"{reason}.",
                fix="Restore it from a backup, and check its permissions.",
            ) from None


@dataclass(frozen=True, slots=True)
class _Progress:
    complete_to: str | None
    pending_batches: int
    watermark: datetime | None


def _progress(workspace: Workspace, contract: TableContract) -> _Progress:
    """Return how far the dimension is behind landing."""
    seen = dimension_overview(workspace, contract)
    (dimension,) = seen.tables
    if dimension.pending_batches:
        return _Progress(None, dimension.pending_batches, None)
    end = seen.landing.stream_end
    return _Progress(str(end) if end else None, 0, seen.landing.watermark)


def write_rows(
    contract: TableContract, files: Sequence[LakeFile | str], draft: Path, form: Format, *, deleted: bool
) -> tuple[int, int]:
    """Write the rows of the dimension in ``files`` to ``draft``, which may be there already.

    Returns how many rows it has, and how many of them have a value that is not known.
    """
    kept = "true" if deleted else "NOT _cdc_is_deleted"
    options = {
        Format.CSV: "FORMAT csv, HEADER true",
        Format.PARQUET: "FORMAT parquet, COMPRESSION zstd",
        Format.JSON_LINES: "FORMAT json",
    }[form]
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        # No failpoint: the same draft, written by a database in memory.
        connection.execute(f"CREATE VIEW lake AS {_rows(connection, contract, files)}")
        _require_columns(connection, contract)
        columns = [*(_value(column, form) for column in contract.columns), *_ours(form, deleted=deleted)]
        # DuckDB draws no progress bar of its own; we only read its progress.
        connection.execute("SET enable_progress_bar = true; SET enable_progress_bar_print = false")
        progress.reached(f"writing {contract.name}", lambda: connection.query_progress() / 100)
        # DuckDB's own temporary file would be readable by other users.
        connection.execute(
            f"COPY (SELECT {', '.join(columns)} FROM lake WHERE {kept}) TO {literal(str(draft))} "
            f"({options}, USE_TMP_FILE false)"
        )
        counts = connection.execute(
            f"SELECT count(*), count(*) FILTER (len(_cdc_unresolved) > 0) FROM lake WHERE {kept}"
        ).fetchone()
    assert counts is not None
    return counts[0], counts[1]


def _require_columns(connection: duckdb.DuckDBPyConnection, contract: TableContract) -> None:
    present = {name for name, *_ in connection.execute("DESCRIBE lake").fetchall()}
    missing = [name for name in contract.column_names if name not in present]
    if missing:
        raise NoDimension(
            f"{contract.source}.{contract.name} was last updated before its contract named the column "
            f"{missing[0]!r}.",
            fix="Let the pipeline take in the changed contract (omnisupport-ingest up), then export again.",
        )


def _rows(
    connection: duckdb.DuckDBPyConnection, contract: TableContract, files: Sequence[LakeFile | str]
) -> str:
    if files:
        return f"SELECT * FROM {live_sql(connection, files)}"
    columns = ", ".join(f"NULL::{each.type.in_duckdb} AS {named(each.name)}" for each in contract.columns)
    return (
        f"SELECT {columns}, false AS _cdc_is_deleted, NULL::TIMESTAMPTZ AS _cdc_deleted_at,"
        " []::VARCHAR[] AS _cdc_unresolved, MAP {}::MAP(VARCHAR, VARCHAR) AS _cdc_exact WHERE false"
    )


def _value(column: Column, form: Format) -> str:
    """Return the SQL for the column as the file shows it."""
    name = named(column.name)
    if form is Format.PARQUET:
        return name
    text = f"coalesce(_cdc_exact[{literal(column.name)}], {_as_text(column)})"
    if form is Format.CSV:
        return f"{text} AS {name}"
    return f"{_as_json(column, text)} AS {name}"


def _as_json(column: Column, text: str) -> str:
    """Return SQL for a JSON value: a number or a boolean if that loses nothing, else a text."""
    name, exact = named(column.name), f"_cdc_exact[{literal(column.name)}]"
    either = f"CASE WHEN {exact} IS NULL THEN to_json({name}) ELSE to_json({exact}) END"
    if column.type.kind in (Kind.BOOLEAN, Kind.SHORT, Kind.INTEGER, Kind.LONG):
        return either if column.former_types else name
    if column.type.kind in FLOATS:
        # DuckDB makes a double of a real, with digits that it does not have.
        number = f"{name}::VARCHAR::JSON" if column.type.kind is Kind.FLOAT else f"to_json({name})"
        return f"CASE WHEN isfinite({name}) THEN {number} ELSE to_json({text}) END"
    if column.type.kind in ARRAYS:
        return either
    return text


def _as_text(column: Column) -> str:
    name = named(column.name)
    if column.type.kind is Kind.BINARY:
        return f"'\\x' || lower(hex({name}))"
    if column.type.kind in ARRAYS:
        return f"to_json({name})::VARCHAR"
    if column.type.kind in (Kind.TIMESTAMP, Kind.TIMESTAMPTZ):
        zone = "" if column.type.kind is Kind.TIMESTAMP else "Z"
        return f"strftime({name}, '%Y-%m-%dT%H:%M:%S.%f{zone}')"
    if column.type.kind in FLOATS:
        # As PostgreSQL writes them.
        return (
            f"CASE WHEN isnan({name}) THEN 'NaN' WHEN isinf({name}) AND {name} > 0 THEN 'Infinity'"
            f" WHEN isinf({name}) THEN '-Infinity' ELSE {name}::VARCHAR END"
        )
    return f"{name}::VARCHAR"


def _ours(form: Format, *, deleted: bool) -> list[str]:
    """Return the platform's own columns that the file has besides the contract's."""
    columns = ["_cdc_is_deleted", "_cdc_deleted_at"] if deleted else []
    if form is Format.PARQUET:
        return [*columns, "_cdc_unresolved", "_cdc_exact"]
    if deleted:
        columns = ["_cdc_is_deleted", "strftime(_cdc_deleted_at, '%Y-%m-%dT%H:%M:%S.%fZ') AS _cdc_deleted_at"]
    if form is Format.CSV:
        return [*columns, "array_to_string(_cdc_unresolved, ' ') AS _cdc_unresolved"]
    return [*columns, "_cdc_unresolved"]
