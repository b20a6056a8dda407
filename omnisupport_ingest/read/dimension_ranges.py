"""Checksums of key ranges of one version of a dimension, computed by DuckDB from its files.

The server computes the same checksums for the same rows (``row_checksum``). Rows that cannot be compared now
are left out.
"""

from __future__ import annotations

import hashlib
import json
import os
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import duckdb

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.contracts.row_checksum import (
    NO_ROWS,
    Key,
    KeySpan,
    RowChecksum,
    RowNumbers,
    by_number,
    checked_columns,
)
from omnisupport_ingest.lake.layout import LakeFile
from omnisupport_ingest.lake.live_rows import bare_sql
from omnisupport_ingest.read.lake_checksum import first_key, is_at_source, row_digest, row_number
from omnisupport_ingest.read.row_equality import (
    equal,
    key_part,
    not_marked,
    same_key,
    select_lake,
    select_source,
    text,
)

_MEMORY = "1GB"
"""Memory limit of DuckDB; beyond it, DuckDB writes to the scratch folder."""

_FILE = "_cdc_of_file"
"""The column with the path of a row's file; no column of a contract may begin like this."""

ROWS_BETWEEN_CUTS = 8192
"""About so many rows lie between two cuts of ``even_cuts``: a file of a dimension has about twice as many."""


class DimensionRanges:
    """The rows of one dimension that the source has, as far as the lake knows. Use it as a context."""

    def __init__(self, contract: TableContract, files: Sequence[LakeFile | str], scratch: Path) -> None:
        """``files``: of the dimension. ``scratch``: a folder for what does not fit into memory."""
        self._contract, self._files = contract, tuple(files)
        self._connection = duckdb.connect()
        self._connection.execute("SET TimeZone = 'UTC'")
        self._connection.execute(f"SET memory_limit = '{_MEMORY}'")
        self._connection.execute(f"SET temp_directory = {text(str(scratch / 'spill'))}")
        # No failpoint: nothing here outlives the process (a database or buffer in memory).
        self._connection.execute(f"CREATE VIEW lake AS {select_lake(self._connection, contract, files)}")
        parts = ", ".join(f"{part} VARCHAR" for part in self._parts)
        self._connection.execute(f"CREATE TABLE left_out ({parts})")
        self._leaves_out = False

    def __enter__(self) -> DimensionRanges:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def leave_out(self, keys: Iterable[Key]) -> None:
        """Leave out the rows with ``keys`` from now on."""
        rows = list(keys)
        if rows:
            marks = ", ".join("?" * len(self._parts))
            # No failpoint: nothing here outlives the process (a database or buffer in memory).
            self._connection.executemany(f"INSERT INTO left_out VALUES ({marks})", rows)
            self._leaves_out = True

    def unresolved_keys(self, most: int) -> list[Key]:
        """Return the keys of at most ``most`` rows with unresolved values, which wait for a person.

        Such rows are in no checksum. Rows that the source has deleted for certain wait for nobody.
        """
        parts = ", ".join(f"coalesce({part}, '')" for part in self._parts)
        unresolved = f"len(l._cdc_unresolved) > 0 AND {is_at_source(self._contract)}"
        query = f"SELECT {parts} FROM lake l WHERE {unresolved} LIMIT {most}"
        # No failpoint: nothing here outlives the process (a database or buffer in memory).
        return [tuple(each) for each in self._connection.execute(query).fetchall()]

    def even_cuts(self) -> list[str]:
        """Return values of the first key column, ascending, with about ``ROWS_BETWEEN_CUTS`` rows between
        two.

        The files are ordered by key, so this takes every ``ROWS_BETWEEN_CUTS``-th row of each file, even if a
        deletion vector hides the row.
        """
        if not self._files:
            return []
        files = bare_sql([_stored(file) for file in self._files], "file_row_number = true")
        query = (
            f"SELECT DISTINCT {first_key(self._contract)} AS k FROM {files} l"
            f" WHERE file_row_number % {ROWS_BETWEEN_CUTS} = 0 AND k IS NOT NULL ORDER BY k"
        )
        # No failpoint: nothing here outlives the process (a database or buffer in memory).
        return [str(key) for (key,) in self._connection.execute(query).fetchall()]

    def files_between(self, cuts: Sequence[str]) -> list[frozenset[int]]:
        """Return, for each range between the ascending ``cuts``, the numbers of the files that hold rows
        of it. Rows that a deletion vector hides count too."""
        found: list[set[int]] = [set() for _ in range(len(cuts) + 1)]
        if not self._files:
            return [frozenset() for _ in found]
        order: Callable[[str], Any] = int if by_number(self._contract) else str
        edges = [order(cut) for cut in cuts]
        number_of = {_stored(file): number for number, file in enumerate(self._files)}
        files = bare_sql(list(number_of), f"filename = '{_FILE}'")
        rows = self._connection.execute(
            f"SELECT {_FILE}, min(k), max(k), bool_or(k IS NULL) FROM"
            f" (SELECT {_FILE}, {first_key(self._contract)} AS k FROM {files} l) GROUP BY 1"
        ).fetchall()
        for path, first, last, keyless in rows:
            if first is not None:
                reached = range(bisect_right(edges, order(first)), bisect_right(edges, order(last)) + 1)
                for place in reached:
                    found[place].add(number_of[path])
            if keyless:
                # A row without a key counts to the first range.
                found[0].add(number_of[path])
        return [frozenset(each) for each in found]

    def names_of(self, numbers: Collection[int]) -> str:
        """Return a hash that names the files of these numbers as they are now.

        It includes their size and time of change, where the storage has them: we never overwrite a file, but
        somebody else may.
        """
        names = sorted(_name(self._files[number]) for number in numbers)
        return hashlib.sha256("\n".join(names).encode()).hexdigest()

    def read_only(self, numbers: Collection[int]) -> None:
        """Read only the files of these numbers from now on, for the checksums of ranges that lie in them."""
        files = [self._files[number] for number in sorted(numbers)]
        rows = select_lake(self._connection, self._contract, files)
        # No failpoint: nothing here outlives the process (a database or buffer in memory).
        self._connection.execute(f"CREATE OR REPLACE VIEW lake AS {rows}")

    def cuts(self, span: KeySpan, parts: int) -> list[str]:
        """Return values of the first key column that cut ``span`` into about as many even ranges, in
        ascending order."""
        rows = f"SELECT {first_key(self._contract)} AS k FROM lake l WHERE {self._within([span])}"
        placed = f"SELECT k, row_number() OVER (ORDER BY k) AS place, count(*) OVER () AS rows FROM ({rows})"
        keys = self._connection.execute(
            f"SELECT DISTINCT k FROM ({placed}) WHERE place % greatest(rows // {parts}, 1) = 0 ORDER BY k"
        ).fetchall()
        return [str(key) for (key,) in keys if str(key) != span.start]

    def sums(self, cuts: Sequence[str], spans: Sequence[KeySpan]) -> list[RowChecksum]:
        """Return the checksum of each range between the ascending ``cuts``, of rows in one of ``spans``.

        The first range lies below all cuts; each other range begins with its cut.
        """
        # Make the numbers before the join, which sorts: they take a third of the space of digests.
        rows = self._hashed(f"{first_key(self._contract)} AS k", spans)
        numbers = f"{row_number('digest', 1)} AS first, {row_number('digest', 2)} AS second"
        rows = f"SELECT k, {numbers} FROM ({rows})"
        placed = f"SELECT 0 AS place, first, second FROM ({rows})"
        if cuts:
            kind = "BIGINT" if by_number(self._contract) else "VARCHAR"
            values = ", ".join(
                f"({self._literal(cut)}, {number})" for number, cut in enumerate(cuts, start=1)
            )
            cut = f"(SELECT k::{kind} AS k, place FROM (VALUES {values}) AS v(k, place)) c"
            joined = f"({rows}) h ASOF LEFT JOIN {cut} ON h.k >= c.k"
            placed = f"SELECT coalesce(place, 0) AS place, first, second FROM {joined}"
        checksums = [NO_ROWS] * (len(cuts) + 1)
        for number, *sums in self._connection.execute(
            "SELECT place, count(*), sum(first::HUGEINT)::VARCHAR, sum(second::HUGEINT)::VARCHAR"
            f" FROM ({placed}) GROUP BY place"
        ).fetchall():
            checksums[number] = RowChecksum(*map(int, sums))
        return checksums

    def numbers(self, spans: Sequence[KeySpan]) -> dict[Key, RowNumbers]:
        """Return the numbers of every row in ``spans``, by its key."""
        numbers = ", ".join(row_number("digest", number) for number in (1, 2))
        parts = ", ".join(self._parts)
        query = f"SELECT {parts}, {numbers} FROM ({self._hashed(parts, spans)})"
        # No failpoint: nothing here outlives the process (a database or buffer in memory).
        rows = self._connection.execute(query).fetchall()
        return {tuple(key): (first, second) for *key, first, second in rows}

    def same_rows(self, rows: Path) -> set[Key]:
        """Return the keys of rows in the file ``rows`` of the source (``write_text_rows``) that the lake has
        with equal values.

        The lake writes some values with another text than the source, and so has another checksum of equal
        rows.
        """
        contract = self._contract
        parts = ", ".join(f"s.{part}" for part in self._parts)
        alike = [equal(column) for column in checked_columns(contract)]
        is_alive = f"NOT (l._cdc_is_deleted AND {not_marked(contract)})"
        keys = self._connection.execute(
            f"SELECT {parts} FROM ({select_source(contract, rows)}) s"
            f" JOIN lake l ON {same_key(contract, 's', 'l')}"
            f" WHERE {' AND '.join([is_alive, 'len(l._cdc_unresolved) = 0', *alike])}"
            f" GROUP BY ALL HAVING count(*) = 1"
        ).fetchall()
        return {tuple(key) for key in keys}

    def _hashed(self, columns: str, spans: Sequence[KeySpan]) -> str:
        """SQL: ``columns`` of the rows in ``spans``, with their digests."""
        digest = row_digest(checked_columns(self._contract))
        return f"SELECT {columns}, {digest} AS digest FROM lake l WHERE {self._there(spans)}"

    @property
    def _parts(self) -> list[str]:
        return [key_part(number) for number in range(len(self._contract.key))]

    def _there(self, spans: Sequence[KeySpan]) -> str:
        # A row with unresolved values may have no known key by which it could be left out, so it is left out
        # here.
        conditions = [self._within(spans), is_at_source(self._contract), "len(l._cdc_unresolved) = 0"]
        if self._leaves_out:
            same = " AND ".join(f"o.{part} = l.{part}" for part in self._parts)
            conditions.append(f"NOT EXISTS (SELECT 1 FROM left_out o WHERE {same})")
        return " AND ".join(conditions)

    def _within(self, spans: Sequence[KeySpan]) -> str:
        key, ranges = first_key(self._contract), []
        for span in spans:
            bounds = [
                f"{key} {compared} {self._literal(bound)}"
                for bound, compared in ((span.start, ">="), (span.end, "<"))
                if bound is not None
            ]
            if not bounds:
                return "true"
            ranges.append(f"({' AND '.join(bounds)})")
        return f"({' OR '.join(ranges)})" if ranges else "true"

    def _literal(self, bound: str) -> str:
        return f"{int(bound)}" if by_number(self._contract) else text(bound)


def _stored(file: LakeFile | str) -> str:
    return file if isinstance(file, str) else file.stored


def _name(file: LakeFile | str) -> str:
    path = _stored(file)
    try:
        status = os.stat(path)
        seen = f"{status.st_size} {status.st_mtime_ns}"
    except OSError:
        seen = "not on a disk"
    return f"{path} {seen} {'' if isinstance(file, str) else file.vector}"


def keys_of_events(contract: TableContract, events: str, most: int) -> list[Key]:
    """Return the distinct keys of ``events`` (SQL with a column ``key``, JSON arrays), at most ``most``."""
    with duckdb.connect() as connection:
        rows = connection.execute(
            f"SELECT DISTINCT key FROM ({events}) WHERE key IS NOT NULL LIMIT {most}"
        ).fetchall()
    keys: Collection[Key] = {tuple(str(part) for part in json.loads(key)) for (key,) in rows}
    return [key for key in keys if len(key) == len(contract.key)]
