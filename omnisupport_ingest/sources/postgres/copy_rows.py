"""Rows of a table as the exact text that the stream would send, by COPY.

COPY's text format (PostgreSQL manual, COPY, "Text Format") writes values with the same output
functions as logical decoding, and tells NULL (``\\N``) from the empty text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from psycopg2.extensions import connection as Connection

from omnisupport_ingest.sources.postgres.connection import source_errors
from omnisupport_ingest.sources.postgres.quoting import identifier, qualified

_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ESCAPED = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}


def parse_row(line: str) -> list[str | None]:
    """The values of one line of COPY's text format, without its line end."""
    values = line.split("\t")
    if "\\" not in line:
        return values  # type: ignore[return-value]  # no NULL among them
    return [None if value == "\\N" else _unescaped(value) for value in values]


def copy_rows(
    connection: Connection,
    schema: str,
    table: str,
    columns: Sequence[str],
    *,
    partitioned: bool,
    row: Callable[[list[str | None]], None],
) -> None:
    """Call ``row`` with the texts of ``columns`` for each row that the open transaction sees.

    What ``row`` raises ends the copy and is raised from here.
    """
    # A partitioned table holds its rows in its partitions; the children of an inheritance parent
    # are tables of their own in the stream.
    only = "" if partitioned else "ONLY "
    listed = ", ".join(identifier(column) for column in columns)
    query = f"COPY (SELECT {listed} FROM {only}{qualified(schema, table)}) TO STDOUT"
    with source_errors(f"reading {schema}.{table}"), connection.cursor() as cursor:
        cursor.copy_expert(query, _Lines(row))


class _Lines:
    """The file that psycopg2 writes to: one call for each line."""

    def __init__(self, row: Callable[[list[str | None]], None]) -> None:
        self._row = row

    def write(self, line: bytes) -> int:
        self._row(parse_row(line.decode()[:-1]))
        return len(line)


def _unescaped(value: str) -> str:
    if "\\" not in value:
        return value
    return _ESCAPE.sub(lambda match: _ESCAPED.get(match[1], match[1]), value)
