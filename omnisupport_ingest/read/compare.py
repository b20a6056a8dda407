"""Comparing a table of the lake with rows of its source, key by key and column by column.

The comparison shares no code with the pipeline that made the table: DuckDB reads the lake's files
and casts the source's text itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import duckdb

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.lake.layout import LakeFile
from omnisupport_ingest.read.row_equality import (
    equal,
    key_part,
    listed,
    not_marked,
    parts_of,
    same_key,
    select_lake,
    select_source,
    text,
)

SHOWN = 20
"""Differing keys that are listed; all of them are counted."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A key whose rows differ: ``columns`` that do, or why the row as a whole does."""

    key: str
    columns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """The rows to compare: those whose hashed key is below ``below`` (None: all).

    Keys with events at or above ``from_lsn`` (integer) of ``epoch`` are left out, because they have changed
    since. ``events``: files of the table's accepted events. ``quarantined``: files of the source's
    quarantine. Without any file no key is left out.
    """

    below: str | None
    events: tuple[str, ...]
    quarantined: tuple[str, ...]
    epoch: int
    from_lsn: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """The outcome for one table.

    Attributes:
        source_rows: rows of the source that were compared.
        current_rows: live rows of the lake.
        deleted_rows: deleted rows of the lake.
        unresolved: live rows of the lake with a column whose value is not known.
        differences: keys whose rows differ.
        examples: the first of these keys.
        skipped: keys that were left out because they have changed since.
        miscounted: live rows of the source minus those of the lake; None if rows were not counted.
        forwarded: keys that have changed since, whose rows were compared after these changes.
    """

    source_rows: int
    current_rows: int
    deleted_rows: int
    unresolved: int
    differences: int
    examples: tuple[Difference, ...]
    skipped: int = 0
    miscounted: int | None = None
    forwarded: int = 0

    @property
    def holds(self) -> bool:
        """Whether no row differs."""
        return not self.differences and not self.unresolved and not self.miscounted


def compare(
    contract: TableContract,
    expected: Path,
    files: Sequence[LakeFile | str],
    *,
    sample: Sample | None = None,
    source_live: int | None = None,
) -> Comparison:
    """Compare the rows of the dimension in ``files`` with ``expected``, the source's rows as text.

    ``expected``: a Parquet file with the contract's columns as PostgreSQL's text, arrays also as
    JSON in ``json:<column>``. A row of the source must be in the lake with equal values, deleted
    there only if its soft-delete column says so; a live row of the lake must be in the source. With
    ``sample`` only its rows count, in both; ``source_live`` is the number of rows that the source has
    in all, softly deleted ones excluded.
    """
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        # DuckDB writes what does not fit into memory beside the rows, not into the working directory.
        connection.execute(f"SET temp_directory = {text(str(expected.parent / 'spill'))}")
        # No failpoint: nothing here outlives the process (a database or buffer in memory).
        connection.execute(f"CREATE VIEW source_rows AS {select_source(contract, expected)}")
        connection.execute(f"CREATE VIEW lake_rows AS {select_lake(connection, contract, files)}")
        connection.execute(f"CREATE TABLE moved_on AS {_moved_on(contract, sample)}")
        of_one_key = same_key(contract, "r", "m")
        stayed = f"NOT EXISTS (SELECT 1 FROM moved_on m WHERE {of_one_key})"
        connection.execute(f"CREATE VIEW source AS SELECT * FROM source_rows r WHERE {stayed}")
        chosen = f" AND {key_hash(contract)} < {text(sample.below)}" if sample and sample.below else ""
        connection.execute(f"CREATE VIEW lake AS SELECT * FROM lake_rows r WHERE {stayed}{chosen}")
        connection.execute(f"CREATE TABLE pairs AS {_pairs(contract)}")
        counts = connection.execute(
            "SELECT (SELECT count(*) FROM source), (SELECT count(*) FROM moved_on),"
            " count(*) FILTER (NOT _cdc_is_deleted), count(*) FILTER (_cdc_is_deleted),"
            f" (SELECT count(*) FROM lake_rows r WHERE {stayed}"
            " AND NOT _cdc_is_deleted AND len(_cdc_unresolved) > 0) FROM lake_rows"
        ).fetchone()
        total = connection.execute("SELECT count(*) FROM pairs").fetchone()
        examples = connection.execute(
            f"SELECT key, differing FROM pairs ORDER BY key LIMIT {SHOWN}"
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
        # Rows that were added or deleted since would be counted as differences.
        miscounted=None if source_live is None or skipped else source_live - current_rows,
    )


def changed_since(contract: TableContract, sample: Sample) -> tuple[int, int]:
    """Return how many events of the table lie at or above the sample's LSN: with a key, and without one.

    An event without a key (a truncate, a snapshot end) may change every row.
    """
    with duckdb.connect() as connection:
        row = connection.execute(
            f"SELECT count(key), count(*) - count(key) FROM ({events_since(contract, sample, 'key')})"
        ).fetchone()
    assert row is not None
    return row[0], row[1]


def events_since(contract: TableContract, sample: Sample, columns: str, *, withheld: bool = False) -> str:
    """SQL: ``columns`` of the table's events at or above the sample's LSN.

    ``withheld``: add a boolean column of this name, which is true for events in quarantine.
    """
    since = (
        f"(epoch > {sample.epoch} OR (epoch = {sample.epoch} AND commit_lsn >= {sample.from_lsn}))"
        f" AND source_schema = {text(contract.schema)}"
    )
    # The accepted events are partitioned by table, so the column is not in their files.
    of_table = f"{since} AND source_table = {text(contract.table)}"
    selects = []
    for files, where, quarantined in (
        (sample.events, since, "false"),
        (sample.quarantined, of_table, "true"),
    ):
        if files:
            more = f", {quarantined} AS withheld" if withheld else ""
            read = f"read_parquet({listed(files)}, hive_partitioning = false, union_by_name = true)"
            selects.append(f"SELECT {columns}{more} FROM {read} WHERE {where}")
    return " UNION ALL ".join(selects) or "SELECT NULL::VARCHAR AS key WHERE false"


def _moved_on(contract: TableContract, sample: Sample | None) -> str:
    later = events_since(contract, sample, "key") if sample is not None else "SELECT NULL::VARCHAR AS key"
    return f"SELECT DISTINCT {parts_of('key', contract)} FROM ({later}) WHERE key IS NOT NULL"


def key_hash(contract: TableContract) -> str:
    """SQL: the hash of a key, equal to that of ``sources.postgres.snapshot.comparison_rows.key_hash``."""
    parts = ", ".join(key_part(i) for i in range(len(contract.key)))
    return f"substr(sha256(concat_ws(chr(31), {parts})), 1, 8)"


def _pairs(contract: TableContract) -> str:
    """Return the keys that differ, and in which columns."""
    in_source, in_lake = f"s.{key_part(0)} IS NOT NULL", "l._cdc_key IS NOT NULL"
    both = f"{in_source} AND {in_lake}"
    reasons = [
        f"CASE WHEN NOT ({in_lake}) THEN 'missing in the lake' END",
        f"CASE WHEN NOT ({in_source}) AND NOT l._cdc_is_deleted THEN 'not in the source' END",
        f"CASE WHEN {both} AND l._cdc_is_deleted AND {not_marked(contract)} THEN 'deleted in the lake' END",
        *(
            f"CASE WHEN {both} AND NOT ({equal(column)}) THEN {text(column.name)} END"
            for column in contract.columns
        ),
    ]
    return named_pairs(contract, reasons, ("source", "s"), "lake")


def named_pairs(contract: TableContract, reasons: Sequence[str], expected: tuple[str, str], lake: str) -> str:
    """SQL: the keys whose rows differ, and the ``reasons`` that apply to them.

    ``expected``: the relation that ``lake`` (``l`` in the reasons) must equal, and its name in the reasons. A
    key that the lake has more than once differs for that reason alone: none of its rows is the row.
    """
    relation, name = expected
    parts = [key_part(i) for i in range(len(contract.key))]
    key = " || ',' || ".join(f"coalesce({name}.{part}, l.{part})" for part in parts)
    key_twice = " || ',' || ".join(parts)
    twice = f"SELECT {', '.join(parts)} FROM {lake} l GROUP BY ALL HAVING count(*) > 1"
    return (
        f"WITH twice AS ({twice}) SELECT * FROM ("
        f"SELECT {key} AS key, list_filter([{', '.join(reasons)}], lambda x: x IS NOT NULL) AS differing"
        f" FROM {relation} {name} FULL OUTER JOIN {lake} l ON {same_key(contract, name, 'l')}"
        f" WHERE NOT EXISTS (SELECT 1 FROM twice t WHERE {same_key(contract, 't', 'l')})"
        ") WHERE len(differing) > 0"
        f" UNION ALL SELECT {key_twice}, ['twice in the lake'] FROM twice"
    )
