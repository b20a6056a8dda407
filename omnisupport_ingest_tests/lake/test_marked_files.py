"""Commits that mark rows as dead: all readers, ours and others, show the same live rows at every version."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import duckdb
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, QueryBuilder, TableFeatures
from pyspark.sql import SparkSession
from pyspark.sql.types import DoubleType, StructField, StructType, TimestampType

from omnisupport_ingest.failpoints import VARIABLE
from omnisupport_ingest.lake import layout, log_entry
from omnisupport_ingest.lake import table as lake_table
from omnisupport_ingest.lake.commit import CommitConflict, StagedFileMissing, WindowChange
from omnisupport_ingest.lake.deletion_vectors import DeadRows, dead_rows_of, write_vectors
from omnisupport_ingest.lake.file_rows import rows_of
from omnisupport_ingest.lake.key_files import KeyOrder, files_by_kind, read_file
from omnisupport_ingest.lake.layout import WHOLE_TABLE, LakeFile, StagedFile
from omnisupport_ingest.lake.listing import Listing
from omnisupport_ingest.lake.live_rows import live_sql, live_table
from omnisupport_ingest.lake.log import files_since
from omnisupport_ingest.lake.log_entry import WriterDemands
from omnisupport_ingest.lake.log_files import LogUnreadable, files_in_log
from omnisupport_ingest.lake.snapshot import TableSnapshot
from omnisupport_ingest.lake.stats import delta_stats
from omnisupport_ingest.lake.sweep import sweep, sweep_replaced, sweepable
from omnisupport_ingest.lake.table import LakeTable
from omnisupport_ingest.storage import StorageUnreachable
from omnisupport_ingest_tests.lake.tables import state, unpartitioned
from omnisupport_ingest_tests.lake.test_sweep import age

ROWS = 2_000
DAY = timedelta(days=1)
ORDER = KeyOrder("n", whole_numbers=True)
KIND = pa.schema([("n", pa.int64()), ("at", pa.timestamp("us", "UTC"))])


def marked_table(root: Path) -> LakeTable:
    plain = unpartitioned(root)
    return LakeTable(plain.root, replace(plain.spec, deletion_vectors=True))


@pytest.fixture
def table(tmp_path: Path) -> LakeTable:
    return marked_table(tmp_path)


@pytest.fixture(autouse=True)
def _nothing_is_open() -> Iterator[None]:
    lake_table._opened.clear()
    yield
    lake_table._opened.clear()


def placed(
    table: LakeTable, unit: str, numbers: Sequence[float], name: str = "part-0", kind: pa.Schema = KIND
) -> StagedFile:
    path = f"{layout.unit_folder(WHOLE_TABLE, 1, unit)}/{name}.parquet"
    file = table.folder / path
    file.parent.mkdir(parents=True, exist_ok=True)
    content = pa.table({"n": numbers, "at": [None] * len(numbers)}, kind)
    pq.write_table(content, file, row_group_size=700)
    rows, stats = delta_stats(file)
    return StagedFile(path, WHOLE_TABLE, (), rows, file.stat().st_size, stats)


def put(
    snapshot: TableSnapshot,
    unit: str,
    add: Sequence[StagedFile] = (),
    dead: Mapping[str, Sequence[int]] | None = None,
    remove: Sequence[LakeFile] = (),
    *,
    replaces: bool = False,
) -> int:
    folder, within = snapshot.table.folder, layout.unit_folder(WHOLE_TABLE, snapshot.version, unit)
    arrays = {path: np.unique(np.array(rows, np.int64)) for path, rows in (dead or {}).items()}
    new = state(WHOLE_TABLE, [unit], generation=snapshot.version + 1)
    change = WindowChange(
        WHOLE_TABLE, tuple(add), tuple(remove), new, replaces, marked=write_vectors(folder, within, arrays)
    )
    return snapshot.commit([change])


def first_files(table: LakeTable) -> tuple[LakeFile, ...]:
    files = [placed(table, "a", range(k * ROWS, (k + 1) * ROWS), f"part-{k}") for k in range(3)]
    put(table.open(), "a", files)
    return table.open().files(WHOLE_TABLE)


def by_others(table: LakeTable, version: int | None = None) -> list[int]:
    """The rows as delta-rs and Polars read them, which must agree."""
    handle = DeltaTable(str(table.folder), version=version)
    found = pa.table(QueryBuilder().register("t", handle).execute("SELECT n FROM t ORDER BY n").read_all())
    polars = pl.scan_delta(str(table.folder), version=version).select("n").collect()["n"].sort().to_list()
    assert found["n"].to_pylist() == polars
    return polars


def by_arrow(files: Sequence[LakeFile]) -> list[int]:
    return sorted(n for file in files for n in live_table(file, columns=["n"])["n"].to_pylist())


def by_duckdb(files: Sequence[LakeFile]) -> list[int]:
    if not files:
        return []
    with duckdb.connect() as connection:
        query = f"SELECT n FROM {live_sql(connection, files)} ORDER BY n"
        return [n for (n,) in connection.execute(query).fetchall()]


def by_ours(snapshot: TableSnapshot) -> list[int]:
    """The rows as each of our readers without Spark reads them, which must agree."""
    files = snapshot.files(WHOLE_TABLE)
    found = by_arrow(files)
    assert sum(file.rows for file in files) == len(found)
    assert by_duckdb(files) == found
    assert sorted(rows_of(files, KIND)["n"].to_pylist()) == found
    by_key = files_by_kind(snapshot, ORDER).ordered
    assert by_key is not None
    assert [n for file in by_key for n in read_file(file, KIND)["n"].to_pylist()] == found
    return found


def without_index(snapshot: TableSnapshot) -> tuple[LakeFile, ...]:
    listing = Listing(snapshot.table.log, (), lambda: snapshot.handle)
    return tuple(file for file in listing.all_files() if not layout.is_state(file.path))


def test_new_table_has_the_feature_and_no_other(table: LakeTable) -> None:
    snapshot = table.open()
    protocol = DeltaTable(str(table.folder)).protocol()
    assert (protocol.min_reader_version, protocol.min_writer_version) == (3, 7)
    assert protocol.reader_features == ["deletionVectors"]
    assert set(protocol.writer_features or ()) == {"appendOnly", "deletionVectors", "invariants"}
    assert DeltaTable(str(table.folder)).metadata().configuration == {"delta.enableDeletionVectors": "true"}
    assert snapshot.has_vectors and snapshot._indexed is not None
    assert table.open().version == snapshot.version == 1


def test_table_made_before_gets_the_feature_and_keeps_what_it_is(tmp_path: Path) -> None:
    before = unpartitioned(tmp_path)
    put(before.open(), "a", [placed(before, "a", [1, 2])])
    was = DeltaTable(str(before.folder))
    after = marked_table(tmp_path)
    snapshot = after.open()
    now = DeltaTable(str(before.folder))
    assert now.metadata().id == was.metadata().id and now.schema() == was.schema()
    assert (now.metadata().name, now.metadata().created_time) == (
        was.metadata().name,
        was.metadata().created_time,
    )
    put(snapshot, "b", dead={snapshot.files(WHOLE_TABLE)[0].path: [0]})
    assert by_ours(after.open()) == by_others(after) == [2]
    # The contract no longer asks for it: the table keeps its vectors.
    lake_table._opened.clear()
    again = before.open()
    assert again.has_vectors and by_ours(again) == [2]


@pytest.mark.parametrize("seed", range(4))
def test_every_reader_shows_the_same_live_rows_at_every_version(table: LakeTable, seed: int) -> None:
    chance = random.Random(seed)
    held = {file.path: (file, set[int]()) for file in first_files(table)}
    expected: dict[int, list[int]] = {}
    kept = []
    for number in range(8):
        snapshot = table.open()
        files = {file.path: file for file in snapshot.files(WHOLE_TABLE)}
        chosen = chance.sample(sorted(held), chance.randint(1, min(3, len(held))))
        for path in chosen:
            stored = files[path].stored_rows
            held[path][1].update(chance.sample(range(stored), min(stored, chance.choice([1, 20, 700]))))
        gone = [files[path] for path in held if path not in chosen][: chance.randint(0, 1)]
        for file in gone:
            del held[file.path]
        first = 100_000 * (number + 1)
        new = placed(table, f"u{number}", range(first, first + 300))
        version = put(snapshot, f"u{number}", [new], {path: sorted(held[path][1]) for path in chosen}, gone)
        held[new.path] = (new.in_table(table.folder), set())
        live = []
        for path, (_, dead) in held.items():
            numbers = pq.read_table(table.folder / path)["n"].to_pylist()
            live += [n for row, n in enumerate(numbers) if row not in dead]
        expected[version] = sorted(live)
        if chance.random() < 0.3:
            lake_table._opened.clear()
        if chance.random() < 0.2:
            table.index.close()
            (table.root / "desk" / "noted" / "files.sqlite").unlink()
        if chance.random() < 0.3:
            DeltaTable(str(table.folder)).create_checkpoint()
        kept.append(table.open())
        assert by_ours(kept[-1]) == by_others(table) == expected[version]
        assert without_index(kept[-1]) == kept[-1].files(WHOLE_TABLE)
    for snapshot in kept:
        assert by_ours(snapshot) == by_others(table, snapshot.version) == expected[snapshot.version]


def test_spark_shows_the_same_live_rows(tmp_path: Path, spark: SparkSession) -> None:
    table = marked_table(tmp_path / "a home+ é")
    files = first_files(table)
    snapshot = table.open()
    last = placed(table, "b", [7_000_000])
    put(snapshot, "b", [last], {files[0].path: [0, 63, 64, 1_999], files[2].path: range(0, ROWS, 2)})
    snapshot = table.open()
    found = snapshot.read(spark, snapshot.files(WHOLE_TABLE))
    assert found.columns == ["n", "at"]
    # Polars does not open a table in such a folder.
    assert sorted(row["n"] for row in found.collect()) == by_ours(snapshot)
    only_marked = [file for file in snapshot.files(WHOLE_TABLE) if file.vector is not None]
    assert snapshot.read(spark, only_marked).count() == sum(file.rows for file in only_marked) == 2_996


def test_statistics_stay_and_say_that_bounds_are_not_tight(table: LakeTable) -> None:
    files = first_files(table)
    before = table.open().stats(WHOLE_TABLE)
    put(table.open(), "b", dead={files[1].path: [5]})
    after = table.open().stats(WHOLE_TABLE)
    was, now = (json.loads(stats[files[1].path] or "") for stats in (before, after))
    assert now == was | {"tightBounds": False}
    assert after[files[0].path] == before[files[0].path]
    snapshot = table.open()
    found = files_by_kind(snapshot, ORDER).ordered
    assert found is not None and [file.lowest for file in found] == [0, ROWS, 2 * ROWS]
    # Thousands of files are placed by the index alone.
    assert "handle" not in vars(snapshot)


def test_file_with_a_vector_is_removed_and_replaced(table: LakeTable) -> None:
    files = first_files(table)
    put(table.open(), "b", dead={files[0].path: range(900), files[1].path: [3]})
    marked = {file.path: file for file in table.open().files(WHOLE_TABLE)}
    put(table.open(), "c", [placed(table, "c", [1])], remove=[marked[files[0].path]])
    assert by_ours(table.open()) == by_others(table)
    put(table.open(), "d", [placed(table, "d", [5, 6])], replaces=True)
    assert by_ours(table.open()) == by_others(table) == [5, 6]


def test_commit_without_an_index_names_vectors_too(table: LakeTable) -> None:
    files = first_files(table)
    put(table.open(), "b", dead={files[0].path: range(900)})
    lake_table._opened.clear()
    snapshot = TableSnapshot(table, DeltaTable(str(table.folder)))
    assert snapshot._indexed is None
    first = snapshot.files(WHOLE_TABLE)[0]
    put(snapshot, "c", dead={first.path: range(1_000), files[1].path: [0]})
    lake_table._opened.clear()
    snapshot = TableSnapshot(table, DeltaTable(str(table.folder)))
    put(snapshot, "d", remove=[file for file in snapshot.files(WHOLE_TABLE) if file.path == files[1].path])
    assert by_ours(table.open()) == by_others(table) == [*range(1_000, ROWS), *range(2 * ROWS, 3 * ROWS)]


def test_file_that_gets_the_vector_that_it_has_stays(table: LakeTable) -> None:
    files = first_files(table)
    put(table.open(), "b", dead={files[0].path: [1]})
    put(table.open(), "c", [placed(table, "c", [9_000])], dead={files[0].path: [1], files[1].path: [2]})
    expected = [n for n in (*range(3 * ROWS), 9_000) if n not in (1, ROWS + 2)]
    assert by_ours(table.open()) == by_others(table) == expected


def test_second_of_two_writers_is_refused(table: LakeTable) -> None:
    files = first_files(table)
    one, other = table.open(), table.open()
    put(one, "b", dead={files[0].path: [1]})
    with pytest.raises(CommitConflict):
        put(other, "c", dead={files[0].path: [2]})
    assert by_others(table) == [0, *range(2, 3 * ROWS)]


def test_only_a_file_that_stays_can_be_marked(table: LakeTable, tmp_path: Path) -> None:
    files = first_files(table)
    with pytest.raises(ValueError, match="does not stay"):
        put(table.open(), "b", dead={files[0].path: [1]}, remove=[files[0]])
    with pytest.raises(ValueError, match="does not stay"):
        put(table.open(), "b", dead={"unknown.parquet": [1]})
    plain = unpartitioned(tmp_path / "plain")
    put(plain.open(), "a", [placed(plain, "a", [1])])
    with pytest.raises(ValueError, match="may have no deletion vectors"):
        put(plain.open(), "b", dead={plain.open().files(WHOLE_TABLE)[0].path: [0]})


def test_file_of_vectors_that_is_gone_is_not_committed(table: LakeTable) -> None:
    files = first_files(table)
    vectors = write_vectors(table.folder, "g0009-0123456789abcdef", {files[0].path: np.arange(0, ROWS, 3)})
    (table.folder / str(vectors[files[0].path].path)).unlink()
    new = state(WHOLE_TABLE, ["b"], generation=2)
    with pytest.raises(StagedFileMissing, match=r"deletion_vector_.*; it is gone"):
        table.open().commit([WindowChange(WHOLE_TABLE, (), (), new, False, marked=vectors)])


def test_log_of_many_marks_has_a_checkpoint_that_keeps_them(table: LakeTable) -> None:
    files, dead = first_files(table), set[int]()
    for number in range(101):
        dead |= {number, 1_000 + number}
        put(table.open(), f"u{number}", dead={files[0].path: sorted(dead)})
    last = json.loads((table.folder / "_delta_log" / "_last_checkpoint").read_text())
    assert last["version"] == 99
    assert by_ours(table.open()) == by_others(table)
    for version in range(50):
        (table.folder / "_delta_log" / f"{version:020d}.json").unlink()
    lake_table._opened.clear()
    (table.root / "desk" / "noted" / "files.sqlite").unlink()
    assert by_ours(table.open()) == by_others(table)
    (table.folder / "_delta_log" / f"{101:020d}.json").unlink()
    with pytest.raises(LogUnreadable, match="is gone"):
        files_in_log(table.folder, 102)


def test_checkpoint_that_describes_no_vector_is_named(table: LakeTable) -> None:
    files = first_files(table)
    put(table.open(), "b", dead={files[0].path: [1]})
    DeltaTable(str(table.folder)).create_checkpoint()
    [checkpoint] = (table.folder / "_delta_log").glob("*.checkpoint.parquet")
    rows, schema = pq.read_table(checkpoint).to_pylist(), pq.read_schema(checkpoint)
    [add] = [row["add"] for row in rows if row["add"] and row["add"]["deletionVector"]]
    add["deletionVector"]["cardinality"] = -1
    pq.write_table(pa.Table.from_pylist(rows, schema), checkpoint)
    with pytest.raises(LogUnreadable, match=rf"its checkpoint {checkpoint.name} cannot be read"):
        files_in_log(table.folder, table.open().version)


def test_commit_whose_checkpoint_found_no_store_is_done(
    table: LakeTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = first_files(table)
    DeltaTable(str(table.folder)).alter.set_table_properties({"delta.checkpointInterval": "1"})

    def no_store(*_: object) -> DeltaTable:
        raise StorageUnreachable("The object store does not answer.", fix="Try again.")

    snapshot = table.open()
    monkeypatch.setattr(log_entry, "open_delta", no_store)
    assert put(snapshot, "b", dead={files[0].path: [1]}) == snapshot.version + 1
    assert by_ours(table.open()) == by_others(table) == [0, *range(2, 3 * ROWS)]


def foreign(table: LakeTable, lines: Sequence[object]) -> None:
    version = DeltaTable(str(table.folder)).version() + 1
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (table.folder / "_delta_log" / f"{version:020d}.json").write_text(text)


def foreign_mark(table: LakeTable, file: LakeFile, dead: Sequence[int]) -> list[dict[str, object]]:
    """What another program's DELETE writes: the vector in the table's own folder."""
    vector = write_vectors(table.folder, "", {file.path: np.array(dead, np.int64)})[file.path]
    fields = {"path": file.path, "partitionValues": {}, "size": file.bytes, "dataChange": True}
    _, stats = delta_stats(Path(file.stored))
    removed = {**fields, "deletionTimestamp": 1, "extendedFileMetadata": True}
    if file.vector is not None:
        removed["deletionVector"] = file.vector.in_log()
    return [
        {"add": {**fields, "modificationTime": 1, "stats": stats, "deletionVector": vector.in_log()}},
        {"remove": removed},
    ]


def test_vectors_of_another_program_are_read_in_a_table_that_asks_for_none(tmp_path: Path) -> None:
    plain = unpartitioned(tmp_path)
    (first, *_) = first_files(plain)
    features = {"readerFeatures": ["deletionVectors"], "writerFeatures": ["deletionVectors", "appendOnly"]}
    upgrade = {"protocol": {"minReaderVersion": 3, "minWriterVersion": 7, **features}}
    foreign(plain, [upgrade, *foreign_mark(plain, first, range(0, ROWS, 3))])
    snapshot = plain.open()
    assert snapshot._indexed is not None
    assert by_ours(snapshot) == by_others(plain)
    file = snapshot.files(WHOLE_TABLE)[0]
    with pytest.raises(DeadRows, match="If another program deleted rows"):
        _ = file.uri
    foreign(plain, foreign_mark(plain, file, range(0, ROWS, 2)))
    assert by_ours(plain.open()) == by_others(plain)
    assert without_index(plain.open()) == plain.open().files(WHOLE_TABLE)
    put(plain.open(), "b", [placed(plain, "b", [9])], remove=[plain.open().files(WHOLE_TABLE)[0]])
    assert by_ours(plain.open()) == by_others(plain) == [9, *range(ROWS, 3 * ROWS)]


def test_removal_that_names_no_vector_removes_nothing(table: LakeTable) -> None:
    (first, *_) = first_files(table)
    put(table.open(), "b", dead={first.path: [1]})
    fields = {"path": first.path, "partitionValues": {}, "size": first.bytes, "dataChange": True}
    foreign(table, [{"remove": {**fields, "deletionTimestamp": 1, "extendedFileMetadata": True}}])
    assert by_ours(table.open()) == by_others(table) == [0, *range(2, 3 * ROWS)]


def test_property_that_we_cannot_keep_is_named(table: LakeTable) -> None:
    first_files(table)
    DeltaTable(str(table.folder)).alter.set_table_properties({"delta.appendOnly": "false"})
    with pytest.raises(WriterDemands, match=r"delta\.appendOnly"):
        put(table.open(), "b", [placed(table, "b", [1])])


@pytest.mark.parametrize("what", ["property delta.appendOnly", "feature rowTracking", "protocol 1/4"])
def test_table_that_we_could_not_commit_to_gets_no_vectors(tmp_path: Path, what: str) -> None:
    plain = unpartitioned(tmp_path)
    first_files(plain)
    handle = DeltaTable(str(plain.folder))
    if what.startswith("property"):
        handle.alter.set_table_properties({"delta.appendOnly": "false"})
    elif what.startswith("feature"):
        handle.alter.add_feature(TableFeatures.RowTracking, allow_protocol_versions_increase=True)
    else:
        foreign(plain, [{"protocol": {"minReaderVersion": 1, "minWriterVersion": 4}}])
    version = DeltaTable(str(plain.folder)).version()
    with pytest.raises(
        WriterDemands, match=f"it has {what},(.|\\n)*Take deletion_vectors out of the contract"
    ):
        marked_table(tmp_path).open()
    assert DeltaTable(str(plain.folder)).version() == version
    assert by_ours(plain.open()) == list(range(3 * ROWS))


def test_feature_that_we_do_not_know_is_named(table: LakeTable) -> None:
    first_files(table)
    handle = DeltaTable(str(table.folder))
    handle.alter.add_feature(TableFeatures.RowTracking, allow_protocol_versions_increase=True)
    snapshot = table.open()
    assert by_ours(snapshot) == list(range(3 * ROWS))
    with pytest.raises(WriterDemands, match="its feature rowTracking"):
        put(snapshot, "b", [placed(table, "b", [1])])


def test_table_that_is_made_again_under_another_type_loses_its_vectors(table: LakeTable) -> None:
    files = first_files(table)
    put(table.open(), "b", dead={files[0].path: [1], files[1].path: range(0, ROWS, 3)})
    double = StructType([StructField("n", DoubleType()), StructField("at", TimestampType())])
    other = LakeTable(table.root, replace(table.spec, schema=double))
    snapshot = other.open()
    assert [each.column for each in snapshot.retyped] == ["n"]
    again = placed(table, "c", [1.5], kind=pa.schema([("n", pa.float64()), KIND.field("at")]))
    put(snapshot, "c", [again], replaces=True)
    snapshot = other.open()
    assert by_others(other) == by_arrow(snapshot.files(WHOLE_TABLE)) == [1.5]
    assert snapshot.has_vectors and without_index(snapshot) == snapshot.files(WHOLE_TABLE)


def test_changes_between_versions_name_both_vectors_of_a_file(table: LakeTable) -> None:
    files = first_files(table)
    version = table.open().version
    put(table.open(), "b", dead={files[0].path: [1]})
    put(table.open(), "c", dead={files[0].path: [1, 2], files[1].path: [0]})
    changes = files_since(table.open(), version)
    assert changes is not None
    assert by_arrow(changes.gone) == list(range(2 * ROWS))
    assert by_arrow(changes.added) == [0, *range(3, ROWS), *range(ROWS + 1, 2 * ROWS)]
    between = files_since(table.open(), version + 1)
    assert between is not None and by_arrow(between.gone) == [0, *range(2, 2 * ROWS)]


def test_sweep_keeps_the_vectors_that_the_table_needs(table: LakeTable) -> None:
    files = first_files(table)
    put(table.open(), "b", dead={files[0].path: range(0, ROWS, 3)})
    put(table.open(), "c", dead={files[1].path: range(0, ROWS, 3)})
    orphan = write_vectors(table.folder, "g0099-0123456789abcdef", {files[2].path: np.arange(0, ROWS, 5)})
    age(table.folder, 2 * DAY)
    expected = by_others(table)
    assert sweepable(table, DAY) == (1, orphan[files[2].path].bytes + 9)
    assert sweep(table, DAY) == ["g0099-0123456789abcdef"]
    assert by_ours(table.open()) == by_others(table) == expected
    # A version that a reader may still have open needs the vector before.
    old = table.open()
    put(table.open(), "d", dead={files[0].path: range(0, ROWS, 2)})
    age(table.folder, 2 * DAY)
    assert sweep(table, DAY) == []
    assert by_ours(old) == expected
    vectors = {file.vector.path for file in old.files(WHOLE_TABLE) if file.vector is not None}
    now = {file.vector.path for file in table.open().files(WHOLE_TABLE) if file.vector is not None}
    gone = sweep_replaced(table)
    assert {path for path in gone if path.endswith(".bin")} | {
        path for path in gone if "/" not in path and not path.endswith(".parquet")
    } == {str(Path(str(path)).parent) for path in vectors - now}
    assert by_ours(table.open()) == by_others(table)


@pytest.mark.parametrize("make", [unpartitioned, marked_table])
def test_sweep_keeps_what_left_a_table_within_a_long_time(
    tmp_path: Path, make: Callable[[Path], LakeTable]
) -> None:
    table = make(tmp_path)
    files = first_files(table)
    put(table.open(), "b", [placed(table, "b", [1])], remove=[files[0]])
    entry = table.folder / "_delta_log" / f"{table.open().version:020d}.json"
    lines = [json.loads(line) for line in entry.read_text().splitlines()]
    for line in lines:
        if "remove" in line:
            line["remove"]["deletionTimestamp"] -= int(10 * DAY / timedelta(milliseconds=1))
    entry.write_text("".join(json.dumps(line) + "\n" for line in lines))
    lake_table._opened.clear()
    # It forgets what left more than a week ago.
    DeltaTable(str(table.folder)).create_checkpoint()
    age(table.folder, 40 * DAY)
    assert sweep(table, 30 * DAY) == []
    assert Path(files[0].stored).exists()
    assert files[0].path in sweep(table, 9 * DAY)


def test_sweep_keeps_a_file_that_left_just_now_though_it_was_marked_long_ago(table: LakeTable) -> None:
    files = first_files(table)
    put(table.open(), "b", dead={files[0].path: [1]})
    entry = table.folder / "_delta_log" / f"{table.open().version:020d}.json"
    lines = [json.loads(line) for line in entry.read_text().splitlines()]
    for line in lines:
        if "remove" in line:
            line["remove"]["deletionTimestamp"] -= int(10 * DAY / timedelta(milliseconds=1))
    entry.write_text("".join(json.dumps(line) + "\n" for line in lines))
    lake_table._opened.clear()
    old = table.open()
    leaving = [file for file in old.files(WHOLE_TABLE) if file.path == files[0].path]
    put(old, "c", remove=leaving)
    age(table.folder, 2 * DAY)
    sweep(table, DAY)
    assert Path(leaving[0].stored).exists()


PROGRAM = """
import sys
from pathlib import Path
from omnisupport_ingest_tests.lake import test_marked_files as here
table = here.marked_table(Path(sys.argv[1]))
files = here.first_files(table)
here.put(table.open(), "b", dead={file.path: range(0, here.ROWS, 3) for file in files})
"""


@pytest.mark.crash
@pytest.mark.parametrize(
    "point",
    [
        *(f"lake.feature.{when}" for when in ("before", "after")),
        *(f"lake.vectors.{when}" for when in ("before", "after")),
        *(f"lake.commit.{when}:2" for when in ("before", "after")),
    ],
)
def test_killed_commit_is_done_whole_or_not_at_all(tmp_path: Path, point: str) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    killed = subprocess.run(command, env={**os.environ, VARIABLE: point}, check=False)
    assert killed.returncode == -9
    table = marked_table(tmp_path)
    found = by_ours(table.open())
    assert found == by_others(table)
    whole = list(range(3 * ROWS))
    live = [n for n in whole if n % ROWS % 3]
    expected = {"lake.feature": [], "lake.vectors": whole, "lake.commit": live if "after" in point else whole}
    assert found == expected[point.rsplit(".", 1)[0]]
    done = subprocess.run(command, check=False)
    assert done.returncode == 0
    assert by_ours(table.open()) == by_others(table) == live
    assert all(len(dead_rows_of(file)) for file in table.open().files(WHOLE_TABLE))
