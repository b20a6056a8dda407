"""Tasks of Spark that do not see the home: how they read, and how what they write comes to the driver.

One machine, but its tasks are told that they are elsewhere: they keep to copies of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.errors import PythonException
from pyspark.sql import SparkSession
from pyspark.sql.types import StringType, StructField, StructType

from omnisupport_ingest.cdc.contents import Contents
from omnisupport_ingest.cdc.dedupe import judge, mark_copies, mark_distinct
from omnisupport_ingest.cdc.judging import JudgingRules
from omnisupport_ingest.contracts.decision_table import default_decision_table, load_decision_table
from omnisupport_ingest.contracts.pii_policies import KEEP, TOKENIZE
from omnisupport_ingest.contracts.protection import Secrets
from omnisupport_ingest.contracts.subject_keys import SubjectKeys
from omnisupport_ingest.contracts.token_map import TokenMap
from omnisupport_ingest.home import Home
from omnisupport_ingest.lake import layout
from omnisupport_ingest.lake.commit import StagedFileMissing
from omnisupport_ingest.lake.drafts import Drafts
from omnisupport_ingest.lake.file_tasks import Output, made_by_tasks
from omnisupport_ingest.lake.frame_tasks import write_by_tasks
from omnisupport_ingest.lake.layout import WHOLE_TABLE
from omnisupport_ingest.lake.read import read_files
from omnisupport_ingest.lake.staged_frames import stage_frame
from omnisupport_ingest.lake.sweep import sweep
from omnisupport_ingest.lake.table import LakeTable
from omnisupport_ingest.landing.columns import events_table
from omnisupport_ingest.storage import DRAFTS, storage_of
from omnisupport_ingest.visiting import ELSEWHERE, CopiesExposed, Visit, visiting
from omnisupport_ingest.windows import WindowSize
from omnisupport_ingest_tests.cdc.test_contents import PEOPLE, _raw
from omnisupport_ingest_tests.lake.tables import (
    NOON,
    SCHEMA,
    W1,
    W2,
    by_window,
    by_window_and_table,
    change,
    frame_of,
)
from omnisupport_ingest_tests.lake.test_marked_files import first_files, marked_table, put
from omnisupport_ingest_tests.sources.test_encrypting import event
from omnisupport_ingest_tests.storage.s3_server import S3Server

ROWS = [(W1, "a/b é", 1, NOON), (W1, None, 2, None), (W2, "c", 3, NOON), (W2, "c", 4, NOON)]


@pytest.fixture
def home(tmp_path: Path, s3: S3Server) -> Home:
    return Home.open(tmp_path / "home", WindowSize.parse("hourly"), storage=s3.place())


@pytest.fixture
def elsewhere(spark: SparkSession) -> Iterator[SparkSession]:
    """A session whose tasks act as if they were on other machines."""
    spark.conf.set(ELSEWHERE, "true")
    yield spark
    spark.conf.unset(ELSEWHERE)


def hide(table: LakeTable) -> None:
    """Have no file of the table on this machine: who opens one brings it."""
    for file in table.folder.rglob("*.parquet"):
        file.unlink()


def drafts_in(table: LakeTable) -> list[str]:
    folder = table.folder / DRAFTS
    return sorted(each.path.name for each in storage_of(folder).listed(folder))


def test_copies_are_in_a_folder_of_this_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    visit = Visit("/a/home", "s3://bucket/prefix")
    monkeypatch.delenv("SPARK_LOCAL_DIRS", raising=False)
    monkeypatch.setenv("LOCAL_DIRS", f"{tmp_path / 'yarn'},{tmp_path / 'second'}")
    assert visit.make_folder() == visit.folder
    assert visit.folder.parent == tmp_path / "yarn"
    assert visit.folder.stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path / "spark"))
    assert visit.make_folder().parent == tmp_path / "spark"
    visit.folder.rmdir()
    mine = tmp_path / "mine"
    mine.mkdir(mode=0o700)
    visit.folder.symlink_to(mine)
    with pytest.raises(CopiesExposed, match="no folder of this user"):
        visit.begin()
    visit.folder.unlink()
    visit.make_folder()
    monkeypatch.setattr("os.geteuid", lambda: visit.folder.lstat().st_uid + 1)
    with pytest.raises(CopiesExposed, match="no folder of this user"):
        visit.begin()


def test_a_folder_of_copies_that_an_earlier_version_left_open_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    visit = Visit("/a/home", "s3://bucket/prefix")
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path))
    visit.folder.mkdir()
    visit.folder.chmod(0o755)
    assert visit.make_folder().stat().st_mode & 0o777 == 0o700


def test_rows_are_read_without_a_file_of_the_home(home: Home, elsewhere: SparkSession) -> None:
    table = by_window_and_table(home.lake)
    snapshot, frame = table.open(), frame_of(elsewhere, table, ROWS)
    staged = stage_frame(table, frame, unit="u1", generation={W1: 1, W2: 1})
    snapshot.commit([change(window, staged.of(window), ["b1"]) for window in (W1, W2)])
    hide(table)
    found = table.open()
    wider = StructType([*SCHEMA, StructField("more", StringType())])
    rows = found.read(elsewhere, found.all_files())
    assert rows.schema == table.spec.schema.toNullable()
    assert rows.sort("n").collect() == frame.sort("n").collect()
    more = read_files(elsewhere, wider, table.spec.partition_by, found.all_files())
    assert [row["more"] for row in more.collect()] == [None] * len(ROWS)
    assert not list(table.folder.rglob("part-*.parquet")), "tasks have copies of their own"


def test_dead_rows_are_left_out(home: Home, elsewhere: SparkSession) -> None:
    table = marked_table(home.lake)
    files = first_files(table)
    put(table.open(), "b", dead={files[0].path: np.arange(0, 2_000, 3), files[1].path: [7]})
    hide(table)
    snapshot = table.open()
    files = snapshot.files(WHOLE_TABLE)
    assert any(file.vector is not None for file in files)
    rows = snapshot.read(elsewhere, files).collect()
    alive = set(range(6_000)) - set(range(0, 2_000, 3)) - {2_007}
    assert sorted(row["n"] for row in rows) == sorted(alive)


def work(output: Output, numbers: list[int]) -> str:
    rows = pa.table({"window": [W1] * len(numbers), "n": numbers, "at": [None] * len(numbers)})
    output.add(rows)
    output.put_aside(rows.select(["n"]))
    output.put_beside(rows, pa.schema([("window", pa.string()), ("n", pa.int64())]), ("window",))
    return str(len(numbers))


def test_what_tasks_write_comes_by_the_bucket_and_leaves_no_draft(
    home: Home, elsewhere: SparkSession
) -> None:
    table = by_window(home.lake)
    snapshot = table.open()
    works = [partial(work, numbers=[1, 2]), partial(work, numbers=[3])]
    with made_by_tasks(elsewhere, table, works, unit="u1", generation={W1: 1}) as made:
        assert made is not None and made.results == ("2", "1")
        beside = [pq.read_table(file) for each in made.beside for file in Path(each).rglob("*.parquet")]
        assert sorted(n for each in beside for n in each["n"].to_pylist()) == [1, 2, 3]
        # What is put aside is for the next tasks: the driver has no file of it.
        assert len(made.aside) == 2 and not any(Path(each).exists() for each in made.aside)
        aside = [pq.read_table(storage_of(each).at_hand(Path(each))) for each in made.aside]
        assert sorted(n for each in aside for n in each["n"].to_pylist()) == [1, 2, 3]
        placed = made.place()
        assert drafts_in(table), "the bucket has them until the files are in their place"
    snapshot.commit([change(W1, placed.of(W1), ["b1"])])
    assert drafts_in(table) == []
    hide(table)
    found = table.open()
    assert sorted(row["n"] for row in found.read(elsewhere, found.all_files()).collect()) == [1, 2, 3]


def test_a_frame_is_written_in_the_order_of_each_task(home: Home, elsewhere: SparkSession) -> None:
    table = by_window(home.lake)
    table.open()
    drafts = Drafts.of(elsewhere, table.folder / layout.STAGING / "one")
    numbers = elsewhere.range(0, 30_000, 1, 3).orderBy("id", ascending=False)
    sent = write_by_tasks(numbers, drafts, ())
    assert sum(each.rows for each in sent) == 30_000
    drafts.bring([each.name for each in sent])
    for each in sent:
        found = pq.read_table(drafts.folder / each.name)["id"].to_pylist()
        assert len(found) == each.rows and found == sorted(found, reverse=True)
        assert (drafts.folder / each.name).stat().st_size == each.bytes
    drafts.clear()
    assert drafts_in(table) == [] and not drafts.folder.exists()
    # Another machine's sweep took what a driver that was held up wants: no row is left out unseen.
    with pytest.raises(StagedFileMissing, match="is gone from the bucket"):
        drafts.bring([each.name for each in sent])


def test_files_of_a_source_that_is_called_like_the_folder_of_drafts_stay_copies(home: Home) -> None:
    one, other = (
        home.lake / DRAFTS / table / f"window={W1}" / "part.parquet" for table in ("raw", "deduped")
    )
    for file in (one, other):
        file.parent.mkdir(parents=True)
    one.write_bytes(b"rows")
    other.hardlink_to(one)
    storage = storage_of(one)
    storage.upload([one])
    storage.upload([other])
    assert sorted(storage.copies(home.lake)) == sorted([one, other])


def test_drafts_of_the_dead_are_swept(home: Home, elsewhere: SparkSession) -> None:
    table = by_window(home.lake)
    snapshot, frame = table.open(), frame_of(elsewhere, table, ROWS)
    staged = stage_frame(table, frame, unit="u1", generation={W1: 1, W2: 1})
    snapshot.commit([change(window, staged.of(window), ["b1"]) for window in (W1, W2)])
    # Its driver was killed before it could clear them.
    sent = write_by_tasks(frame, Drafts.of(elsewhere, table.folder / layout.STAGING / "two"), ("window",))
    assert sent and len(drafts_in(table)) == len(sent)
    assert sweep(table) == [], "a running driver may be about to bring them"
    swept = sweep(table, timedelta(0))
    assert sorted(swept) == [f"{DRAFTS}/two/{each.name}" for each in sent]
    found = table.open()
    assert found.read(elsewhere, found.all_files()).count() == len(ROWS)


def open_keys(batches: Iterable[pa.RecordBatch], path: Path) -> Iterator[pa.RecordBatch]:
    """What a task does that decrypts."""
    for batch in batches:
        keys = SubjectKeys(path) if path.suffix == ".sqlite" else TokenMap(path)
        keys.digest_key() if isinstance(keys, SubjectKeys) else keys.tokens_of(["a text"])
        yield batch


@pytest.mark.parametrize("name", ["keys/subjects.sqlite", "pii_tokens"])
def test_a_task_makes_no_keys_and_no_tokens_of_its_own(
    home: Home, elsewhere: SparkSession, name: str
) -> None:
    visit = Visit.of(elsewhere, home.lake / "desk" / "raw")
    assert visit is not None
    task = visiting(visit, partial(open_keys, path=home.path / name))
    with pytest.raises(PythonException, match="HomeFileNeeded"):
        elsewhere.range(0, 1, 1, 1).mapInArrow(task, "id long").collect()
    assert not (home.path / name).exists()


def test_tasks_visit_only_where_a_bucket_keeps_the_lake_and_they_are_elsewhere(
    home: Home, elsewhere: SparkSession, tmp_path: Path
) -> None:
    folders = Home.open(tmp_path / "folders", WindowSize.parse("hourly"))
    assert Visit.of(elsewhere, folders.lake / "desk" / "raw") is None
    visit = Visit.of(elsewhere, home.lake / "desk" / "raw")
    assert visit is not None and visit.home == str(home.path) and visit.url.startswith("s3://")
    elsewhere.conf.unset(ELSEWHERE)
    assert Visit.of(elsewhere, home.lake / "desk" / "raw") is None


def test_nor_does_one_that_takes_rows_from_a_frame(home: Home, elsewhere: SparkSession) -> None:
    """Where rows were erased, tasks compare and judge what others have read."""
    visit = Visit.of(elsewhere, home.lake / "desk" / "raw")
    keys, tokens = SubjectKeys(home.path / "keys" / "subjects.sqlite"), TokenMap(home.path / "pii_tokens")
    line = event(9, "people", None, op="u", identity='["odd","0123456789abcdef"]', envelope="half a line")
    raw = elsewhere.createDataFrame(_raw([events_table([line])]))
    with pytest.raises(PythonException, match="HomeFileNeeded"):
        mark_copies(raw, Contents((PEOPLE,), keys), visit).collect()
    assert not keys.path.exists()
    columns = tuple(
        replace(each, pii=TOKENIZE if each.name == "name" else KEEP) for each in PEOPLE.source_columns
    )
    contract = replace(PEOPLE, subject=None, columns=columns, unprotected=())
    decisions = load_decision_table(default_decision_table())
    rules = JudgingRules((contract,), decisions, timedelta(hours=1), secrets=Secrets(tokens=tokens))
    read = events_table([event(1, "people", '{"id":"1","name":"A"}')])
    marked = mark_distinct(elsewhere.createDataFrame(_raw([read])))
    with pytest.raises(PythonException, match="HomeFileNeeded"):
        judge(marked, rules, visit).collect()
    assert not tokens.path.exists()
