"""The keys of a published table, held as they are, for comparing them with those of the source.

Keys are compared as the texts that the source sent: whole numbers in their order, everything else in that
of the bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import duckdb

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.contracts.pg_types import INTEGERS
from omnisupport_ingest.contracts.row_checksum import DIGITS, RowChecksum
from omnisupport_ingest.stages.lake_checksum import is_at_source
from omnisupport_ingest.stages.pending import pending_windows
from omnisupport_ingest.stages.published_rows import LakeBehind
from omnisupport_ingest.stages.row_equality import key_part, select_lake, text
from omnisupport_ingest.stages.workspace import Workspace


class Bounds(Protocol):
    """Keys above ``start``, up to and with ``end``: the texts of the key's columns, null: open."""

    @property
    def start(self) -> tuple[str, ...] | None: ...

    @property
    def end(self) -> tuple[str, ...] | None: ...


class PublishedKeys:
    """The keys of the rows of one published table that the source has, by what the lake knows."""

    def __init__(self, contract: TableContract, files: Sequence[str]) -> None:
        """``files``: of the published table."""
        self._contract = contract
        self._connection = duckdb.connect()
        parts = [f"CAST({key_part(i)} AS BIGINT)" if self._counts(i) else key_part(i) for i in self._range]
        self._order = f"({', '.join(parts)})"
        rows = f"SELECT * FROM ({select_lake(contract, files)}) l WHERE {is_at_source(contract)}"
        self._connection.execute(f"CREATE VIEW alive AS {rows}")

    def checksum(self, bounds: Bounds, /) -> RowChecksum:
        """That of the keys in ``bounds``."""
        row = " || ".join(f"length({key_part(i)}) || ':' || {key_part(i)}" for i in self._range)
        sums = (
            f"coalesce(sum(('0x' || substr(sha256({row}), {start}, {DIGITS}))::BIGINT::HUGEINT), 0)::VARCHAR"
            for start in (1, 1 + DIGITS)
        )
        found = self._one(f"SELECT count(*), {', '.join(sums)} FROM alive WHERE {self._within(bounds)}")
        return RowChecksum(*map(int, found))

    def middle(self, bounds: Bounds, /) -> tuple[str, ...] | None:
        """The key in the middle of those in ``bounds``; null if there are fewer than two."""
        within = self._within(bounds)
        (count,) = self._one(f"SELECT count(*) FROM alive WHERE {within}")
        if count < 2:
            return None
        texts = ", ".join(key_part(i) for i in self._range)
        return tuple(
            self._one(
                f"SELECT {texts} FROM alive WHERE {within} ORDER BY {self._order} LIMIT 1"
                f" OFFSET {(count - 1) // 2}"
            )
        )

    def places(self, bounds: Bounds, /) -> Mapping[str, int]:
        """The keys in ``bounds`` (JSON), each with the ordinal of the last event of its row."""
        query = f"SELECT _cdc_key, _cdc_ordinal FROM alive WHERE {self._within(bounds)}"
        return dict(self._connection.execute(query).fetchall())

    def close(self) -> None:
        self._connection.close()

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
        found = self._connection.execute(query).fetchone()
        assert found is not None
        return found


def published_keys(workspace: Workspace, source: str) -> dict[str, PublishedKeys]:
    """The keys of every table of ``source``, by ``schema.table``; ``LakeBehind`` if the lake is behind.

    To be called where nothing lands meanwhile.
    """
    pending = pending_windows(workspace, source)
    if not pending.nothing:
        raise LakeBehind(
            f"The lake has not taken in all that has landed from {source}: "
            f"{len(pending.windows) + len(pending.late_windows)} windows are waiting.",
            fix="Let the pipeline run (omnisupport-ingest up, or materialize), and try again.",
        )
    found = {}
    for contract in workspace.contracts.of_source(source):
        table = workspace.published(contract)
        files = table.open().all_files() if table.exists else ()
        found[contract.full_name] = PublishedKeys(contract, tuple(file.uri for file in files))
    return found
