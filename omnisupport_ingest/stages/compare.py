"""Comparing a table of the lake with rows of its source, key by key and column by column.

The comparison shares no code with the pipeline that made the table: DuckDB reads the lake's files
and casts the source's text itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import duckdb

from omnisupport_ingest.contracts.model import Column, TableContract
from omnisupport_ingest.contracts.pg_types import ARRAYS, Kind

_SHOWN = 20
"""Differing keys that are listed; all of them are counted."""

_CASTS = {
    Kind.BOOLEAN: "BOOLEAN",
    Kind.SHORT: "SMALLINT",
    Kind.INTEGER: "INTEGER",
    Kind.LONG: "BIGINT",
    Kind.FLOAT: "FLOAT",
    Kind.DOUBLE: "DOUBLE",
    Kind.DATE: "DATE",
    Kind.TIMESTAMPTZ: "TIMESTAMPTZ",
}


@dataclass(frozen=True, slots=True)
class Difference:
    """A key whose rows differ: ``columns`` that do, or why the row as a whole does."""

    key: str
    columns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """The rows to compare: those whose hashed key is below ``below`` (null: all), but for keys that have
    events at or above ``from_lsn`` (integer) of ``epoch``: they have moved on.

    ``events`` are the files of the table's accepted events, ``quarantined`` those of the source's
    quarantine; of neither, no key is left out.
    """

    below: str | None
    events: tuple[str, ...]
    quarantined: tuple[str, ...]
    epoch: int
    from_lsn: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """The outcome for one table.

    ``source_rows`` of the source were compared, ``current_rows`` and ``deleted_rows`` are those of the
    lake, ``unresolved`` its live rows with a column whose value is not known. ``skipped``: keys that
    were left out because they have changed since. ``miscounted``: live rows of the source less those
    of the lake, null where rows were not counted.
    """

    source_rows: int
    current_rows: int
    deleted_rows: int
    unresolved: int
    differences: int
    examples: tuple[Difference, ...]
    skipped: int = 0
    miscounted: int | None = None

    @property
    def holds(self) -> bool:
        """Whether nothing was found."""
        return not self.differences and not self.unresolved and not self.miscounted


def compare(
    contract: TableContract,
    expected: Path,
    files: Sequence[str],
    *,
    sample: Sample | None = None,
    source_live: int | None = None,
) -> Comparison:
    """Compare the published rows in ``files`` with ``expected``, the source's rows as text.

    ``expected``: a Parquet file with the contract's columns as PostgreSQL's text, arrays also as
    JSON in ``json:<column>``. A row of the source must be in the lake with equal values, deleted
    there only if its soft-delete column says so; a live row of the lake must be in the source. With
    ``sample`` only its rows count, in both; ``source_live`` is the number of rows that the source has
    in all, softly deleted ones excluded.
    """
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        # What does not fit into memory goes beside the rows, not into the working directory.
        connection.execute(f"SET temp_directory = {_text(str(expected.parent / 'spill'))}")
        parts = [f"{_name(name)} AS {_key_part(i)}" for i, name in enumerate(contract.key)]
        connection.execute(
            f"CREATE VIEW source_rows AS SELECT *, {', '.join(parts)}"
            f" FROM read_parquet({_text(str(expected))})"
        )
        state = f"read_parquet({_list(files)}, union_by_name = true)" if files else _nothing(contract)
        connection.execute(
            f"CREATE VIEW lake_rows AS SELECT *, {_parts_of('_cdc_key', contract)} FROM {state}"
        )
        connection.execute(f"CREATE TABLE moved_on AS {_moved_on(contract, sample)}")
        same_key = _same_key(contract, "r", "m")
        stayed = f"NOT EXISTS (SELECT 1 FROM moved_on m WHERE {same_key})"
        connection.execute(f"CREATE VIEW source AS SELECT * FROM source_rows r WHERE {stayed}")
        chosen = f" AND {_key_hash(contract)} < {_text(sample.below)}" if sample and sample.below else ""
        connection.execute(f"CREATE VIEW lake AS SELECT * FROM lake_rows r WHERE {stayed}{chosen}")
        connection.execute(f"CREATE TABLE pairs AS {_pairs(contract)}")
        counts = connection.execute(
            "SELECT (SELECT count(*) FROM source), (SELECT count(*) FROM moved_on),"
            " count(*) FILTER (NOT _cdc_is_deleted), count(*) FILTER (_cdc_is_deleted),"
            " count(*) FILTER (NOT _cdc_is_deleted AND len(_cdc_unresolved) > 0) FROM lake_rows"
        ).fetchone()
        total = connection.execute("SELECT count(*) FROM pairs").fetchone()
        examples = connection.execute(
            f"SELECT key, differing FROM pairs ORDER BY key LIMIT {_SHOWN}"
        ).fetchall()
    assert counts is not None and total is not None
    source_rows, skipped, current_rows, deleted_rows, unresolved = counts
    return Comparison(
        source_rows=source_rows,
        current_rows=current_rows,
        deleted_rows=deleted_rows,
        unresolved=unresolved,
        differences=total[0],
        examples=tuple(Difference(key, tuple(columns)) for key, columns in examples),
        skipped=skipped,
        # Rows that have come or gone since would be counted as differences.
        miscounted=None if source_live is None or skipped else source_live - current_rows,
    )


def changed_since(contract: TableContract, sample: Sample) -> tuple[int, int]:
    """How many events of the table stand at or above the sample's LSN: with a key, and without one.

    One without a key (a truncate, the boundary of a snapshot) is about every row.
    """
    with duckdb.connect() as connection:
        row = connection.execute(
            f"SELECT count(key), count(*) - count(key) FROM ({_later(contract, sample)})"
        ).fetchone()
    assert row is not None
    return row[0], row[1]


def _later(contract: TableContract, sample: Sample | None) -> str:
    """The keys (null: none) of the events that are later than the comparison."""
    found = ["SELECT NULL::VARCHAR AS key WHERE false"]
    if sample is not None:
        since = (
            f"(epoch > {sample.epoch} OR (epoch = {sample.epoch} AND commit_lsn >= {sample.from_lsn}))"
            f" AND source_schema = {_text(contract.schema)}"
        )
        # The accepted events are partitioned by table, so the column is not in their files.
        of_table = f"{since} AND source_table = {_text(contract.table)}"
        for files, where in ((sample.events, since), (sample.quarantined, of_table)):
            if files:
                read = f"read_parquet({_list(files)}, hive_partitioning = false)"
                found.append(f"SELECT key FROM {read} WHERE {where}")
    return " UNION ALL ".join(found)


def _moved_on(contract: TableContract, sample: Sample | None) -> str:
    later = _later(contract, sample)
    return f"SELECT DISTINCT {_parts_of('key', contract)} FROM ({later}) WHERE key IS NOT NULL"


def _key_part(number: int) -> str:
    # No column of a contract may begin like this.
    return f"_cdc_key_{number}"


def _parts_of(key: str, contract: TableContract) -> str:
    """The values in the JSON array ``key``, each as a column of its own."""
    return ", ".join(
        f"json_extract_string({key}, '$[{i}]') AS {_key_part(i)}" for i in range(len(contract.key))
    )


def _same_key(contract: TableContract, one: str, other: str) -> str:
    parts = [_key_part(i) for i in range(len(contract.key))]
    return " AND ".join(f"{one}.{part} = {other}.{part}" for part in parts)


def _key_hash(contract: TableContract) -> str:
    """As ``sources.postgres.rows_at.key_hash`` has it on the server."""
    parts = ", ".join(_key_part(i) for i in range(len(contract.key)))
    return f"substr(sha256(concat_ws(chr(31), {parts})), 1, 8)"


def _pairs(contract: TableContract) -> str:
    """Keys that differ, and in what."""
    in_source, in_lake = f"s.{_key_part(0)} IS NOT NULL", "l._cdc_key IS NOT NULL"
    both = f"{in_source} AND {in_lake}"
    reasons = [
        f"CASE WHEN NOT ({in_lake}) THEN 'missing in the lake' END",
        f"CASE WHEN NOT ({in_source}) AND NOT l._cdc_is_deleted THEN 'not in the source' END",
        f"CASE WHEN {both} AND l._cdc_is_deleted AND {_alive(contract)} THEN 'deleted in the lake' END",
        *(
            f"CASE WHEN {both} AND NOT ({_equal(column)}) THEN {_text(column.name)} END"
            for column in contract.columns
        ),
    ]
    parts = [_key_part(i) for i in range(len(contract.key))]
    key = " || ',' || ".join(f"coalesce(s.{part}, l.{part})" for part in parts)
    return (
        "SELECT * FROM ("
        f"SELECT {key} AS key, list_filter([{', '.join(reasons)}], lambda x: x IS NOT NULL) AS differing"
        f" FROM source s FULL OUTER JOIN lake l ON {_same_key(contract, 's', 'l')}"
        ") WHERE len(differing) > 0"
    )


def _alive(contract: TableContract) -> str:
    mark = contract.soft_delete_column
    return "true" if mark is None else f"s.{_name(mark)} IS NULL"


def _equal(column: Column) -> str:
    text, value = f"s.{_name(column.name)}", f"l.{_name(column.name)}"
    exact = f"l._cdc_exact[{_text(column.name)}]"
    return (
        f"({text} IS NULL) = ({value} IS NULL AND {exact} IS NULL) AND "
        f"CASE WHEN {exact} IS NOT NULL THEN {exact} = {text} "
        f"ELSE {_cast(column)} IS NOT DISTINCT FROM {value} END"
    )


def _cast(column: Column) -> str:
    """The source's text of ``column`` as a value of the type that the lake has for it."""
    kind, text = column.type.kind, f"s.{_name(column.name)}"
    if kind is Kind.DECIMAL:
        return f"TRY_CAST({text} AS DECIMAL({column.type.precision}, {column.type.scale}))"
    if kind is Kind.TIMESTAMP:
        return f"TRY_CAST({text} || '+00' AS TIMESTAMPTZ)"
    if kind is Kind.BINARY:
        return f"unhex(substr({text}, 3))"
    if kind in ARRAYS:
        items = "VARCHAR[]" if kind is Kind.TEXT_ARRAY else "BIGINT[]"
        return f"TRY_CAST(s.{_name('json:' + column.name)}::JSON AS {items})"
    return f"TRY_CAST({text} AS {_CASTS[kind]})" if kind in _CASTS else text


def _nothing(contract: TableContract) -> str:
    """A lake table without rows: no file tells its columns."""
    listed = ", ".join(f"NULL AS {_name(column.name)}" for column in contract.columns)
    return (
        f"(SELECT {listed}, NULL::VARCHAR AS _cdc_key, false AS _cdc_is_deleted,"
        " []::VARCHAR[] AS _cdc_unresolved, MAP {}::MAP(VARCHAR, VARCHAR) AS _cdc_exact WHERE false)"
    )


def _list(files: Sequence[str]) -> str:
    return f"[{', '.join(_text(file) for file in files)}]"


def _name(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _text(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
