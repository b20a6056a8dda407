"""The keys of a dimension at a fixed version, to compare them with those of the source.

Keys are compared as the texts that the source sent: whole numbers by value, all others by their bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import duckdb

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.contracts.pg_types import INTEGERS
from omnisupport_ingest.contracts.row_checksum import DIGITS, RowChecksum
from omnisupport_ingest.lake.layout import LakeFile
from omnisupport_ingest.layers.scheduling.pending import pending_windows
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.processes import scratch_folder
from omnisupport_ingest.read.dimension_rows import require_all_taken
from omnisupport_ingest.read.lake_checksum import is_at_source
from omnisupport_ingest.read.row_equality import key_part, select_lake, text

_MEMORY = "512MB"
"""Memory limit of DuckDB; beyond it, DuckDB writes to the scratch folder."""

_SCRATCH = "keys-"


class Bounds(Protocol):
    """Keys above ``start`` and not above ``end``, each as the texts of the key's columns; None: open."""

    @property
    def start(self) -> tuple[str, ...] | None: ...

    @property
    def end(self) -> tuple[str, ...] | None: ...


class DimensionKeys:
    """The keys of the rows of one dimension that the source has, as far as the lake knows."""

    def __init__(self, contract: TableContract, files: Sequence[LakeFile | str], parent: Path) -> None:
        """``files``: of the dimension. The first query reads them. ``parent``: the folder in which the keys
        are kept until ``close``, or until the next use if this process is killed."""
        self._contract, self._files = contract, files
        self._scratch = ExitStack()
        self._folder = self._scratch.enter_context(scratch_folder(parent, _SCRATCH))
        self._order = f"({', '.join(_part(i) for i in self._range)})"

    @property
    def key(self) -> tuple[str, ...]:
        """The key columns by which the dimension shows its rows."""
        return self._contract.key

    @cached_property
    def _connection(self) -> duckdb.DuckDBPyConnection:
        """A database with the keys in the table ``alive``."""
        connection = duckdb.connect(f"{self._folder}/keys.duckdb")
        connection.execute(f"SET memory_limit = '{_MEMORY}'")
        # Hashed once: the checksum of a range is then a sum of numbers, however often it is halved.
        texts = " || ".join(f"strlen({key_part(i)}) || ':' || {key_part(i)}" for i in self._range)
        parts = [
            f"{f'CAST({key_part(i)} AS BIGINT)' if self._counts(i) else key_part(i)} AS {_part(i)}"
            for i in self._range
        ]
        numbers = [
            f"('0x' || substr(digest, {start}, {DIGITS}))::BIGINT AS number_{n}"
            for n, start in enumerate((1, 1 + DIGITS))
        ]
        dimension = select_lake(connection, self._contract, self._files)
        rows = f"SELECT *, sha256({texts}) AS digest FROM ({dimension}) l"
        # No failpoint: scratch files, which the next call removes if this process is killed.
        connection.execute(
            f"CREATE TABLE alive AS SELECT _cdc_key, _cdc_ordinal, {', '.join(parts + numbers)}"
            f" FROM ({rows}) l WHERE {is_at_source(self._contract)}"
        )
        return connection

    def checksum(self, bounds: Bounds, /) -> RowChecksum:
        """Return the checksum of the keys in ``bounds``."""
        sums = (f"coalesce(sum(number_{n}::HUGEINT), 0)::VARCHAR" for n in range(2))
        row = self._one(f"SELECT count(*), {', '.join(sums)} FROM alive WHERE {self._within(bounds)}")
        return RowChecksum(*map(int, row))

    def cuts(self, bounds: Bounds, parts: int, /) -> list[tuple[str, ...]]:
        """Return keys that cut ``bounds`` into about ``parts`` even ranges, ascending; empty if there are few
        keys."""
        within = self._within(bounds)
        (count,) = self._one(f"SELECT count(*) FROM alive WHERE {within}")
        step = count // parts
        if not step:
            return []
        texts = ", ".join(f"{_part(i)}::VARCHAR" for i in self._range)
        rows = self._connection.execute(
            f"SELECT {texts} FROM (SELECT *, row_number() OVER (ORDER BY {self._order}) AS place FROM alive"
            f" WHERE {within}) WHERE place % {step} = 0 AND place < {count} ORDER BY place"
        ).fetchall()
        return [tuple(each) for each in rows]

    def ordinals(self, bounds: Bounds, /) -> Mapping[str, int]:
        """Return the keys in ``bounds`` (JSON), each with the ordinal of the last event of its row."""
        query = f"SELECT _cdc_key, _cdc_ordinal FROM alive WHERE {self._within(bounds)}"
        # No failpoint: nothing here outlives the process (a database or buffer in memory).
        return dict(self._connection.execute(query).fetchall())

    def close(self) -> None:
        if "_connection" in self.__dict__:
            self._connection.close()
        self._scratch.close()

    @property
    def _range(self) -> range:
        return range(len(self._contract.key))

    def _counts(self, number: int) -> bool:
        return self._contract.column(self._contract.key[number]).type.kind in INTEGERS

    def _within(self, bounds: Bounds) -> str:
        conditions = ["true"]
        for bound, compared in ((bounds.start, ">"), (bounds.end, "<=")):
            if bound is not None:
                values = (
                    f"CAST({text(value)} AS BIGINT)" if self._counts(i) else text(value)
                    for i, value in enumerate(bound)
                )
                conditions.append(f"{self._order} {compared} ({', '.join(values)})")
        return " AND ".join(conditions)

    def _one(self, query: str) -> tuple[Any, ...]:
        # No failpoint: nothing here outlives the process (a database or buffer in memory).
        row = self._connection.execute(query).fetchone()
        assert row is not None
        return row


def _part(number: int) -> str:
    return f"part_{number}"


def dimension_keys(workspace: Workspace, source: str) -> dict[str, DimensionKeys]:
    """Return the keys of every table of ``source``, by ``schema.table``. Raises ``LakeBehind`` if the lake is
    behind.

    Call it while nothing lands.
    """
    require_all_taken(pending_windows(workspace.merging_at_once(), source), source)
    keys_of = {}
    for contract in workspace.contracts.of_source(source):
        table = workspace.dimension(contract)
        files = table.open().all_files() if table.exists else ()
        keys_of[contract.full_name] = DimensionKeys(contract, files, workspace.home.run)
    return keys_of
