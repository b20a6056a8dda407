"""Preflight of a source that is read by cursors: findings, each with the SQL that fixes it. Changes nothing.

Without an index on (cursor, key), every page reads and sorts the whole table. Other findings concern missing
columns, the cursor column (NULLs, a type without a time zone), and how deletes are found.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path

from omnisupport_ingest.contracts.landed_keys import APART, LOST, KeysOfTable, LandedKeys
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.contracts.sources import SourceDefinition
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.sources.postgres.preflight.findings import Finding, Severity
from omnisupport_ingest.sources.query.advice import propose, read_anew
from omnisupport_ingest.sources.query.cursor import CursorColumn, CursorKind
from omnisupport_ingest.sources.query.errors import QueryRefused
from omnisupport_ingest.sources.query.landed_key import is_unique
from omnisupport_ingest.sources.query.reader import Reader
from omnisupport_ingest.sources.query.run import open_reader
from omnisupport_ingest.sources.query.state import FILE, CursorsUnreadable, Progress, QueryState
from omnisupport_ingest.sources.query.sync import type_changed


def preflight(
    definition: SourceDefinition, tables: Sequence[TableContract], landing: Path | None = None
) -> tuple[Finding, ...]:
    """Return every finding about the source, the worst first; a single one if it cannot be reached.

    ``landing``: the folder in which its rows have landed, if any have.
    """
    tables = [each.as_captured for each in tables]
    read = _read_so_far(landing, tables)
    landed = {} if landing is None else LandedKeys(landing).all()
    try:
        with closing(open_reader(definition.connection_text())) as reader:
            reader.begin()
            found = [each for table in tables for each in table_findings(reader, definition, table, read)]
            for table in tables:
                if (keys := landed.get(table.full_name)) is not None:
                    found += _key_findings(reader, table, keys)
    except IngestError as error:
        return (Finding("connection", error.problem, error.fix),)
    order = list(Severity)
    return tuple(sorted(found, key=lambda each: order.index(each.severity)))


def table_findings(
    reader: Reader,
    definition: SourceDefinition,
    table: TableContract,
    read: Mapping[str, Progress],
) -> Iterator[Finding]:
    """Yield the findings about one table. ``read``: how far tables have been read, by ``schema.table``."""
    try:
        cursor = CursorColumn.of(table)
        lacks = _lacks(reader, table)
        if lacks:
            yield _without(reader, table, lacks)
            if not cursor.needs(table).isdisjoint(lacks):
                return
            reader.go_on_without(table, frozenset(lacks))
        found = reader.cursor_type(table, cursor)
        indexes = reader.indexes(table)
    except IngestError as error:
        reader.step_over()
        yield Finding("table", error.problem, error.fix, table=table.name)
        return
    progress = read.get(table.full_name)
    if progress is not None and progress.column in (None, cursor.name) and progress.type != found:
        refused = type_changed(table, cursor, progress.type, found)
        yield Finding("cursor_type", refused.problem, refused.fix, table=table.name)
    wanted = (cursor.name, *(each for each in table.key if each != cursor.name))
    if wanted not in {each[: len(wanted)] for each in indexes}:
        yield Finding(
            "cursor_index",
            f"{table.full_name} has no index on ({', '.join(wanted)}): every page reads all of the table.",
            reader.index_sql(table, f"{table.name}_{cursor.name}_cursor", wanted),
            Severity.WARNS,
            table=table.name,
        )
    if cursor.nullable:
        yield Finding(
            "cursor_null",
            f"{cursor.name} of {table.full_name} may be NULL: such rows are read whole in every sync.",
            f"{reader.not_null_fix(table, cursor.name)} then list it in required of the contract.",
            Severity.WARNS,
            table=table.name,
        )
    if cursor.kind is CursorKind.TIME and "without time zone" in found:
        yield Finding(
            "cursor_zone",
            f"{cursor.name} of {table.full_name} has no time zone and is read as UTC: a zone with daylight "
            "saving writes one hour twice, and its clock is not held against the server's.",
            "",
            Severity.NOTES,
            table=table.name,
        )
    if table.soft_delete_column is None and definition.compare_every is None:
        yield Finding(
            "deletes",
            f"Deletes of {table.full_name} leave no trace for a cursor, and nothing compares its keys.",
            "Set schedule.compare_every in the definition, or name x-cdc.events.soft_delete_column.",
            Severity.WARNS,
            table=table.name,
        )


def _key_findings(reader: Reader, table: TableContract, landed: KeysOfTable) -> Iterator[Finding]:
    """Yield a finding if rows of ``table`` have ``landed`` by another key than its contract has, or if that
    no longer tells them apart."""
    live = (reader.schemas([table], {}) or {}).get(table.name)
    if (
        landed.newest == table.key
        and landed.apart in (APART, LOST)
        and live
        and is_unique(table, live) is False
    ):
        key = ", ".join(table.key)
        yield Finding(
            "landed_key",
            f"Nothing unique at the source is within the key ({key}) of {table.full_name} any more, so two "
            "of its rows could share it. It is not read.",
            "Let the contract follow, then read the table anew; this shows how: "
            f"{propose(table)}. Or give the table a unique index over columns of that key, all NOT NULL.",
            table=table.name,
        )
    if landed.newest != table.key:
        now, former = ", ".join(table.key), ", ".join(landed.newest)
        yield Finding(
            "landed_key",
            f"The contract {table.path} gives {table.full_name} the key ({now}), and what has landed of it "
            f"has the key ({former}). So it is not read.",
            f"If the contract is right, read it anew: {read_anew(table.source, 'another key', table)}. "
            "Dimension and history show it by the former key until then, and begin anew with that reading. "
            f"Else give the contract the key ({former}) again.",
            table=table.name,
        )


def _read_so_far(landing: Path | None, tables: Sequence[TableContract]) -> dict[str, Progress]:
    """Return how far each of ``tables`` was read. A table that was not read, or whose state is unknown, is
    left out."""
    if landing is None or not (landing / FILE).exists():
        return {}
    try:
        with QueryState(landing) as state:
            found = {each.full_name: state.progress(each.full_name) for each in tables}
    except CursorsUnreadable:
        # The next sync reports the problem.
        return {}
    return {name: progress for name, progress in found.items() if progress is not None}


def _lacks(reader: Reader, table: TableContract) -> list[str]:
    """Return the columns of the contract that the table lacks; none if there is no such table."""
    schema = (reader.schemas([table], {}) or {}).get(table.name)
    if schema is None:
        return []
    there = {each.name for each in schema.live.columns}
    return [each.name for each in table.source_columns if each.name not in there]


def _without(reader: Reader, table: TableContract, lacks: Sequence[str]) -> Finding:
    """Return the finding that the table lacks the columns ``lacks``."""
    severity = Severity.WARNS
    if not CursorColumn.of(table).needs(table).isdisjoint(lacks):
        severity = Severity.BLOCKS
    try:
        reader.columns(table)
    except QueryRefused:
        # A sync that has never seen the columns would refuse the table as well.
        severity = Severity.BLOCKS
    columns = "column" if len(lacks) == 1 else "columns"
    end = "it cannot be read." if severity is Severity.BLOCKS else "its rows are read without."
    return Finding(
        "columns",
        f"{table.full_name} has no {columns} {', '.join(lacks)}, which {table.path} names: {end}",
        f"Correct the contract, or give the table the {columns}. This shows the corrected contract: "
        + propose(table),
        severity,
        table=table.name,
    )
