"""The checksum of rows (``row_checksum``), worked out by the server: no row comes over the wire."""

from __future__ import annotations

from psycopg2.extensions import connection as Connection

from omnisupport_ingest.contracts.model import Column, TableContract
from omnisupport_ingest.contracts.pg_types import ARRAYS
from omnisupport_ingest.contracts.row_checksum import DIGITS, RowChecksum
from omnisupport_ingest.sources.postgres.session.quoting import identifier


def server_checksum(connection: Connection, contract: TableContract, rows: str) -> RowChecksum:
    """That of the contract's columns of ``rows`` (what stands behind FROM), in the open transaction of
    ``connection``. Raises psycopg2's errors."""
    text = " || ".join(_part(column) for column in contract.columns)
    # SHA-256 works on servers that have MD5 forbidden.
    with connection.cursor() as cursor:
        cursor.execute(
            f"SELECT count(*), coalesce(sum({_number(1)}), 0)::text,"
            f" coalesce(sum({_number(1 + DIGITS)}), 0)::text FROM"
            f" (SELECT encode(sha256(convert_to({text}, 'UTF8')), 'hex') AS digest FROM {rows}) AS hashed"
        )
        count, first, second = cursor.fetchone()
    return RowChecksum(count, int(first), int(second))


def _part(column: Column) -> str:
    name = identifier(column.name)
    # concat writes by the type's output function, as the log does.
    text = f"to_json({name})::text" if column.type.kind in ARRAYS else f"concat({name})"
    return f"CASE WHEN {name}::text IS NULL THEN 'N' ELSE length({text}) || ':' || {text} END"


def _number(start: int) -> str:
    padded = f"'x{'0' * (16 - DIGITS)}' || substr(digest, {start}, {DIGITS})"
    return f"({padded})::bit(64)::bigint::numeric"
