"""A run over many windows in a row costs Spark as many jobs as one over few, and reads each state once."""

from __future__ import annotations

import math
import uuid
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from bench.landed import Tickets
from omnisupport_ingest.cdc.event_hashes import event_hashes
from omnisupport_ingest.cdc.fold import table_columns_of
from omnisupport_ingest.cdc.folded import folded_type
from omnisupport_ingest.cdc.stored import stored_type
from omnisupport_ingest.cdc.updating import UpdateRules
from omnisupport_ingest.contracts.load import default_contracts_dir
from omnisupport_ingest.lake import state
from omnisupport_ingest.lake.contenthash import ContentHash
from omnisupport_ingest.lake.file_tasks import FEW_FILES
from omnisupport_ingest.lake.layout import WHOLE_TABLE
from omnisupport_ingest.lake.schema import arrow_schema
from omnisupport_ingest.layers.dimension import dimensions, net_changes
from omnisupport_ingest.layers.dimension.range_update import FilesToUpdate
from omnisupport_ingest.layers.dimension.update_tasks import _Rows
from omnisupport_ingest.layers.events import deduped, raw
from omnisupport_ingest.layers.workspace import Workspace, order_of
from omnisupport_ingest.runtime.spark import session_conf
from omnisupport_ingest.settings import Settings
from omnisupport_ingest_tests.layers.story import SOURCE, START, Change, Commit, Story

FEW, MANY = 3, 40
HUNDREDS = 600
"""Several tasks of at most 256 files, of which the last one has fewer."""

LISTING = "spark.sql.sources.parallelPartitionDiscovery.threshold"


def windows(count: int) -> list[str]:
    return [f"{START + timedelta(minutes=number):%Y-%m-%dT%H%M}" for number in range(count)]


def in_each_window(count: int, lsn: int, title: str, op: str = "c") -> list[Commit]:
    values = {"title": title, "body": None}
    return [
        Commit(lsn + number, 60 * number + 1, [Change(op, number + 1, values)]) for number in range(count)
    ]


class Jobs:
    """The jobs of Spark that some work starts, and their tasks."""

    def __init__(self, spark: SparkSession) -> None:
        self._context, self._group = spark.sparkContext, uuid.uuid4().hex
        self._context.setJobGroup(self._group, "many windows")

    @property
    def _ids(self) -> list[int]:
        return list(self._context.statusTracker().getJobIdsForGroup(self._group))

    @property
    def count(self) -> int:
        return len(self._ids)

    @property
    def tasks(self) -> int:
        tracker = self._context.statusTracker()
        jobs = [tracker.getJobInfo(number) for number in self._ids]
        stages = [tracker.getStageInfo(number) for job in jobs if job for number in job.stageIds]
        return sum(stage.numTasks for stage in stages if stage)


def jobs_of_late_replay(folder: Path, spark: SparkSession, count: int) -> tuple[int, int]:
    """Jobs of Spark that take late events, and copies of others, into ``count`` closed windows in a row,
    through every layer; and the tasks of those that judge them."""
    story = Story(folder)
    story.clock = START + timedelta(days=2)
    newest = Commit(10_000, 24 * 3600, [Change("c", 999, {"title": "newest", "body": None})])
    story.land_file(*in_each_window(count, 100, "first"), newest)
    asked = windows(count)
    for replay in (False, True):
        if replay:
            story.land_file(*in_each_window(count, 100, "first"), *in_each_window(count, 500, "late", "u"))
        of_raw = Jobs(spark)
        done = raw.materialize(story.workspace, spark, SOURCE, asked, "run", replay=replay)
        judging = Jobs(spark)
        judged = deduped.materialize(story.workspace, spark, SOURCE, asked, "run", replay=replay)
        folding = Jobs(spark)
        done += net_changes.materialize(story.workspace, spark, story.contract, asked, "run", replay=replay)
        assert all(each.closed for each in [*done, *judged])
    assert {each.duplicates for each in judged} == {1}
    assert {each.keys_changed for each in done if each.layer == net_changes.LAYER} == {1}
    return of_raw.count + judging.count + folding.count, judging.tasks


@pytest.fixture
def as_the_platform(spark: SparkSession) -> Iterator[SparkSession]:
    """The session with the platform's own rule on when listing files is a job of its own."""
    before = spark.conf.get(LISTING)
    spark.conf.set(LISTING, session_conf(Settings(_env_file=None))[LISTING])
    yield spark
    spark.conf.set(LISTING, before)


@pytest.mark.slow
def test_late_events_in_many_windows_in_a_row_are_as_many_jobs_and_tasks_as_in_few(
    tmp_path: Path, as_the_platform: SparkSession
) -> None:
    few = jobs_of_late_replay(tmp_path / "few", as_the_platform, FEW)
    assert few > (0, 0)
    assert jobs_of_late_replay(tmp_path / "many", as_the_platform, MANY) == few


@pytest.mark.slow
def test_a_run_over_thousands_of_windows_commits_once_and_reads_each_state_once(
    tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(
        home=tmp_path / "home",
        window="minutes:1",
        first_window=START,
        contracts_dir=default_contracts_dir(),
        _env_file=None,
    )
    workspace, source = Workspace.open(settings), "support_desk"
    stream = Tickets(workspace.landing(source), workspace.grid)
    for number in range(0, HUNDREDS, 200):
        stream.land_windows(200, START + timedelta(minutes=number), events=2)
    asked = windows(HUNDREDS)
    [contract] = [each for each in workspace.contracts.of_source(source) if each.name == "tickets"]
    parsed, of_text = Counter[str](), state.WindowState.from_text
    monkeypatch.setattr(state.WindowState, "from_text", lambda text: parsed.update([text]) or of_text(text))
    state._kept.clear()
    done = raw.materialize(workspace, spark, source, asked, "run")
    done += deduped.materialize(workspace, spark, source, asked, "run")
    done += dimensions.materialize(workspace, spark, contract, asked, "run")
    # Those of the dimension and of a table without partitions besides.
    assert 3 * HUNDREDS <= len(parsed) < 3 * HUNDREDS + 10
    assert set(parsed.values()) == {1}
    landed = hashes_of_landed(workspace, source)
    assert len(landed) == HUNDREDS
    # Every event is a new row, so each layer of a window has the hash of its events.
    tables = (workspace.raw(source), workspace.deduped(source), workspace.net_changes(contract))
    for table in tables:
        path = table.spec.path
        assert {each.window: each.content_hash for each in done if each.table == path} == landed, path
        assert table.open().version == 1, "one commit for all windows, after that which made the table"
    dimension = workspace.dimension(contract).open().state(WHOLE_TABLE)
    assert dimension is not None and dimension.checkpoint.rows == 2 * HUNDREDS
    # What a task of that update does, which reads a part of each of these files.
    files, converted = workspace.net_changes(contract).open().all_files(), Counter[str]()
    rows_of = UpdateRules.rows_of
    monkeypatch.setattr(
        UpdateRules, "rows_of", lambda rules, rows: converted.update(["once"]) or rows_of(rules, rows)
    )
    rules = UpdateRules(table_columns_of(contract), arrow_schema(stored_type(contract), without=()))
    sent = _Rows(files, [], arrow_schema(folded_type(contract), without=()))
    target = FilesToUpdate((), order_of(contract), tmp_path, rules)
    assert sent.between(target, None, None).num_rows == 2 * HUNDREDS
    assert converted["once"] == math.ceil(HUNDREDS / FEW_FILES)


def hashes_of_landed(workspace: Workspace, source: str) -> dict[str, str]:
    """The content hash of the events of each window, worked out from what landed, without Spark."""
    store = workspace.landing(source)
    return {
        file.window: str(ContentHash.of(event_hashes(pq.read_table(store.folder / file.path)).to_numpy()))
        for batch in store.manifests()
        for file in batch.files
    }
