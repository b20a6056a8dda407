"""The rows of a source table at an exported snapshot, all or a sample, for comparing them with the lake."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from psycopg2.extensions import connection as Connection

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.sources.postgres.catalog.relations import read_relation
from omnisupport_ingest.sources.postgres.session.connection import connect, source_errors
from omnisupport_ingest.sources.postgres.session.quoting import identifier, literal
from omnisupport_ingest.sources.postgres.snapshot.key_ranges import source_of_rows
from omnisupport_ingest.sources.postgres.snapshot.text_rows import write_text_rows


@dataclass(frozen=True, slots=True)
class RowsAt:
    """What was written: ``written`` rows out of ``rows``, of which ``live`` are not softly deleted.

    ``below``: the sample is the rows whose ``key_hash`` is below it; null if every row was written.
    """

    rows: int
    live: int
    written: int
    below: str | None


def write_rows_at(
    dsn: str,
    publication: str,
    snapshot: str,
    contract: TableContract,
    path: Path,
    *,
    sample: int | None = None,
) -> RowsAt:
    """Write the contract's columns of the rows that ``snapshot`` sees to a Parquet file at ``path``.

    Rows that ``publication`` does not send are not among them. ``sample``: about so many rows, chosen by the
    hash of their key, so the same ones each time; null for every row. The session that exported ``snapshot``
    must still be open. Raises ``SourceUnavailable``, or as ``read_relation``.
    """
    connection = connect(dsn)
    try:
        connection.autocommit = False
        with source_errors(f"reading {contract.full_name}"):
            with connection.cursor() as start:
                start.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
                start.execute(f"SET TRANSACTION SNAPSHOT {literal(snapshot)}")
            relation = read_relation(connection, publication, contract)
            table = source_of_rows(contract.schema, contract.table, relation)
            rows, live = _counts(connection, contract, table)
            below = hash_bound(sample, rows)
            chosen = "" if below is None else f" WHERE {key_hash(contract)} < {literal(below)}"
            written = write_text_rows(connection, contract, f"{table}{chosen}", path)
    finally:
        connection.close()
    return RowsAt(rows, live, written, below)


def hash_bound(sample: int | None, rows: int) -> str | None:
    """The bound below which about ``sample`` of ``rows`` hashes fall; null if that is all of them."""
    if sample is None or rows <= sample:
        return None
    return f"{(sample << 32) // rows:08x}"


def key_hash(contract: TableContract) -> str:
    """SQL: eight hexadecimal digits of the hash of a row's key, in an order that no locale changes."""
    key = ", ".join(identifier(name) for name in contract.key)
    text = f"convert_to(concat_ws(chr(31), {key}), 'UTF8')"
    return f"substr(encode(sha256({text}), 'hex'), 1, 8) COLLATE \"C\""


def _counts(connection: Connection, contract: TableContract, table: str) -> tuple[int, int]:
    mark = contract.soft_delete_column
    alive = "" if mark is None else f" FILTER (WHERE {identifier(mark)} IS NULL)"
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT count(*), count(*){alive} FROM {table}")
        rows, live = cursor.fetchone()
    return rows, live
