"""No reader of a dimension shows a row that a deletion vector marks as dead; what looks for values does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from omnisupport_ingest.cli.doctor_home import _size
from omnisupport_ingest.contracts.row_checksum import EVERY_KEY
from omnisupport_ingest.lake import live_rows
from omnisupport_ingest.lake.deletion_vectors import write_vectors
from omnisupport_ingest.lake.layout import WHOLE_TABLE, LakeFile
from omnisupport_ingest.lake.live_rows import bare_sql, live_sql, live_table
from omnisupport_ingest.lake.sweep import sweep_replaced
from omnisupport_ingest.lake.table import LakeTable
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.read.compare import compare
from omnisupport_ingest.read.dimension_changes import _rows_of, changes_of
from omnisupport_ingest.read.dimension_ranges import DimensionRanges
from omnisupport_ingest.read.dimension_rows import DimensionRows
from omnisupport_ingest.read.export import Format, write_rows
from omnisupport_ingest.read.holdings import held_files
from omnisupport_ingest.read.lake_keys import DimensionKeys
from omnisupport_ingest.report.facts import commits_of
from omnisupport_ingest.targets.lake_rows import CurrentState, Difference
from omnisupport_ingest_tests.lake.test_marked_files import first_files, marked_table, put
from omnisupport_ingest_tests.layers.notes import CONTRACT, SOURCE, write_source
from omnisupport_ingest_tests.targets.test_difference import row, written

LIVE, DEAD = (1, 3, 4, 6), (2, 5)


def lake_file(folder: Path, name: str, numbers: Sequence[int], dead: Sequence[int] = ()) -> LakeFile:
    path = Path(written(folder / name, *(row(number, lsn=number) for number in numbers)))
    rows = np.array([place for place, number in enumerate(numbers) if number in dead], np.int64)
    vector = write_vectors(folder, "", {name: rows})[name] if dead else None
    return LakeFile(name, str(path), WHOLE_TABLE, (), len(numbers) - len(rows), path.stat().st_size, vector)


@pytest.fixture
def marked(tmp_path: Path) -> list[LakeFile]:
    """Two files with a row each that is dead, and one without."""
    return [
        lake_file(tmp_path, "one.parquet", (1, 2, 3), DEAD),
        lake_file(tmp_path, "two.parquet", (5, 4), DEAD),
        lake_file(tmp_path, "three.parquet", (6,)),
    ]


@pytest.fixture
def bare(tmp_path: Path) -> list[LakeFile]:
    """The same live rows in a file without a vector."""
    return [lake_file(tmp_path, "bare.parquet", LIVE)]


def exported(files: Sequence[LakeFile], folder: Path) -> Any:
    counts = write_rows(CONTRACT, files, folder / "out.csv", Format.CSV, deleted=True)
    return counts, sorted((folder / "out.csv").read_text().splitlines())


def compared(files: Sequence[LakeFile], folder: Path) -> Any:
    source = write_source(folder / "s.parquet", [SOURCE | {"id": str(number)} for number in LIVE])
    return compare(CONTRACT, source, files)


def unmet(files: Sequence[LakeFile], folder: Path) -> Any:
    (folder / "met").mkdir(exist_ok=True)
    (folder / "met" / "met.duckdb").unlink(missing_ok=True)
    return sorted(DimensionRows(CONTRACT, files, folder / "met").unmet())


def ranges(files: Sequence[LakeFile], folder: Path) -> Any:
    with DimensionRanges(CONTRACT, files, folder) as found:
        return sorted(found._connection.execute("SELECT _cdc_key FROM lake").fetchall())


def keys(files: Sequence[LakeFile], folder: Path) -> Any:
    return DimensionKeys(replace(CONTRACT, soft_delete_column=None), files, folder).checksum(EVERY_KEY)


def told(files: Sequence[LakeFile], folder: Path) -> Any:
    with Difference(CONTRACT, files, [], folder) as found:
        return found.counts(), sorted(b"".join(found.lines()).splitlines())


def known(files: Sequence[LakeFile], folder: Path) -> Any:
    with Difference(CONTRACT, [], files, folder) as found:
        return found.counts(), sorted(b"".join(found.leaving()).splitlines())


def changes(files: Sequence[LakeFile], folder: Path) -> Any:
    return _rows_of(files, [], None)


@pytest.mark.parametrize("read", [exported, compared, unmet, ranges, keys, told, known, changes])
def test_reader_says_the_same_as_of_files_without_dead_rows(
    marked: list[LakeFile], bare: list[LakeFile], tmp_path: Path, read: Callable[[Any, Path], Any]
) -> None:
    assert read(marked, tmp_path) == read(bare, tmp_path)


def test_row_that_died_in_a_file_that_stays_is_a_change(tmp_path: Path) -> None:
    after = lake_file(tmp_path, "part.parquet", (1, 2, 3), DEAD)
    new = lake_file(tmp_path, "fresh.parquet", (2,))
    before = replace(after, rows=3, vector=None)
    assert [sorted(rows) for rows in _rows_of([after], [before], None)] == [[], ['["2"]']]
    with Difference(CONTRACT, [after, new], [before], tmp_path) as found:
        assert found.counts() == (0, 0)
    with Difference(CONTRACT, [after], [before], tmp_path) as found:
        assert found.counts() == (0, 1)


def test_changes_whose_vectors_were_swept_are_not_known(table: LakeTable) -> None:
    version = table.open().version
    first = table.open().files(WHOLE_TABLE)[0]
    put(table.open(), "c", dead={first.path: range(0, 2_000, 2)})
    state = CurrentState(CONTRACT, table.open(), "", "", None)
    workspace = cast(Workspace, SimpleNamespace(dimension=lambda _: table))
    assert state.since(version) is not None
    # The table holds the file with another vector, so the sweep keeps it.
    assert str(first.vector and first.vector.path).partition("/")[0] in sweep_replaced(table)
    assert Path(first.stored).exists()
    assert state.since(version) is None
    assert changes_of(workspace, CONTRACT, version + 1) is None


def test_filter_and_columns_are_of_live_rows(marked: list[LakeFile]) -> None:
    key = pc.field("_cdc_key") == '["2"]'
    assert live_table(marked[0], columns=["id"], filters=key).num_rows == 0
    key = pc.field("_cdc_key") == '["3"]'
    assert live_table(marked[0], columns=["id"], filters=key).to_pylist() == [{"id": 3}]
    assert live_table(marked[2], columns=["id"]).to_pylist() == [{"id": 6}]


def test_name_with_a_quote_is_a_name(tmp_path: Path) -> None:
    folder = tmp_path / "o'brien %41 é"
    folder.mkdir()
    file = lake_file(folder, "it's.parquet", (1, 2, 3), DEAD)
    with duckdb.connect() as connection:
        found = connection.execute(f"SELECT id FROM {live_sql(connection, [file])} ORDER BY id").fetchall()
    assert found == [(1,), (3,)]


def test_duckdb_takes_no_row_of_a_file_whose_vector_it_was_not_sent(
    marked: list[LakeFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_another_name(paths: Sequence[str], *options: str) -> str:
        return bare_sql([path.replace("/one.", "//one.") for path in paths], *options)

    monkeypatch.setattr(live_rows, "bare_sql", by_another_name)
    with (
        duckdb.connect() as connection,
        pytest.raises(duckdb.Error, match=r"no deletion vector.*one\.parquet"),
    ):
        connection.execute(f"SELECT id FROM {live_sql(connection, marked)}").fetchall()


def test_a_dead_row_costs_a_number_and_not_the_path_of_its_file(tmp_path: Path) -> None:
    many = 100_000
    path = tmp_path / "part.parquet"
    pq.write_table(pa.table({"id": range(many)}), path)
    vector = write_vectors(tmp_path, "", {path.name: np.arange(0, many, 2)})[path.name]
    file = LakeFile(path.name, str(path), WHOLE_TABLE, (), many // 2, path.stat().st_size, vector)
    with duckdb.connect() as connection:
        sent = []

        class Counting:
            def __getattr__(self, name: str) -> Any:
                return getattr(connection, name)

            def register(self, name: str, rows: pa.Table) -> None:
                sent.append(rows.nbytes)
                connection.register(name, rows)

        lake = live_sql(cast(duckdb.DuckDBPyConnection, Counting()), [file])
        found = connection.execute(f"SELECT count(*), min(id), sum(id) FROM {lake}").fetchone()
    assert found == (many // 2, 1, (many // 2) ** 2)
    assert sum(sent) < 16 * vector.cardinality + 1_000


@pytest.fixture
def table(tmp_path: Path) -> LakeTable:
    table = marked_table(tmp_path)
    files = first_files(table)
    put(table.open(), "b", dead={files[0].path: range(0, 2_000, 3), files[1].path: [7]})
    return table


def test_who_looks_for_values_sees_dead_rows_too(table: LakeTable) -> None:
    assert sum(pq.read_metadata(path).num_rows for _, path in held_files(table)) == 6_000


def test_marking_writes_the_vector_and_not_the_file(table: LakeTable) -> None:
    snapshot = table.open()
    size = sum(file.bytes for file in snapshot.all_files())
    *_, last = commits_of(table.folder, snapshot.version, size)
    vectors = [file.vector.bytes for file in snapshot.all_files() if file.vector is not None]
    assert (last.written, last.size) == (sum(vectors), size)
    assert _size(Path(snapshot.all_files()[0].stored)) == snapshot.all_files()[0].bytes
