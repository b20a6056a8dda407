"""A lake as the plainest fold leaves it of the landed events, in the form of dimensions."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.contracts.pg_types import Kind
from omnisupport_ingest.read.dimension_rows import DimensionRows
from omnisupport_ingest_tests.sources.postgres.source_under_test import UNRESOLVED, SourceUnderTest, folded


def _typed(values: Sequence[str | None], kind: Kind) -> pa.Array:
    """Texts, or whole numbers where the contract says so."""
    array = pa.array(values, pa.string())
    return array.cast(pa.int32()) if kind is Kind.INTEGER else array


class FoldedLake:
    """The tables of a lake that has taken in all that landed when it was pinned."""

    def __init__(self, source: SourceUnderTest, scratch: Path) -> None:
        self._source, self._scratch = source, scratch

    def pin(self) -> None:
        events = self._source.events()
        for table in self._source.tables:
            rows = folded(events, table.table)
            columns = {
                name: [None if row[name] is UNRESOLVED else row[name] for row in rows.values()]
                for name in table.column_names
            }
            types = {column.name: column.type.kind for column in table.columns}
            unresolved = [[name for name in row if row[name] is UNRESOLVED] for row in rows.values()]
            made = {
                **{name: _typed(values, types[name]) for name, values in columns.items()},
                "_cdc_key": pa.array(list(rows), pa.string()),
                "_cdc_is_deleted": pa.array([False] * len(rows), pa.bool_()),
                "_cdc_unresolved": pa.array(unresolved, pa.list_(pa.string())),
                "_cdc_exact": pa.array([[]] * len(rows), pa.map_(pa.string(), pa.string())),
            }
            pq.write_table(pa.table(made), self._file(table))

    @contextmanager
    def rows(self, table: TableContract) -> Iterator[DimensionRows]:
        scratch = self._scratch / f"{table.name}-{random.random()}"
        scratch.mkdir()
        rows = DimensionRows(table, [str(self._file(table))], scratch)
        yield rows
        rows.close()

    def _file(self, table: TableContract) -> Path:
        return self._scratch / f"{table.name}.parquet"
