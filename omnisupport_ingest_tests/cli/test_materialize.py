"""A home of an earlier format: refused with the command that rebuilds it, and rebuilt by that command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import duckdb
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from omnisupport_ingest.lake.layout import WHOLE_TABLE
from omnisupport_ingest_tests.cli.command import command
from omnisupport_ingest_tests.cli.story_home import enter_copy
from omnisupport_ingest_tests.layers import story as stories
from omnisupport_ingest_tests.layers.story import SOURCE, Change, Commit, Story
from omnisupport_ingest_tests.recovery.pipeline import open_workspace, run_layers


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Path:
    """A story that begins ten minutes ago: Dagster counts every window since the first one."""
    folder = tmp_path_factory.mktemp("rebuilt") / "told"
    with pytest.MonkeyPatch.context() as patch:
        start = datetime.now(UTC).replace(second=0, microsecond=0) - timedelta(minutes=10)
        patch.setattr(stories, "START", start)
        batch = Story(folder).land(
            Commit(10, 1, [Change("c", 1, {"title": "one", "body": "b"}), Change("c", 2, {"title": "two"})]),
            Commit(20, 2, [Change("u", 1, {"title": "eins"}, unchanged=("body",)), Change("d", 2)]),
        )
    run_layers(open_workspace(folder), spark, sorted(batch.windows))
    return folder


@pytest.fixture
def lake(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The lake of a home as it was before: net changes in ``dim_notes``, the state in ``published/notes``."""
    environment = dict(os.environ)
    home = enter_copy(whole, tmp_path, monkeypatch) / "home"
    lake = home / "lake" / SOURCE
    (lake / "published").mkdir()
    (lake / "dim_notes").rename(lake / "published" / "notes")
    (lake / "net_changes" / "notes").rename(lake / "dim_notes")
    (lake / "net_changes").rmdir()
    marker = home / "home.json"
    marker.write_text(json.dumps(json.loads(marker.read_text()) | {"format_version": 1}))
    yield lake
    # A command that starts Dagster sets variables for the rest of its process.
    os.environ.clear()
    os.environ.update(environment)


def rows(table: Path) -> list[tuple[object, ...]]:
    files = DeltaTable(str(table)).file_uris()
    shown = "id, title, body, _cdc_is_deleted, _cdc_commit_lsn, _cdc_row_hash"
    return duckdb.sql(f"SELECT {shown} FROM read_parquet({files}) ORDER BY id").fetchall()


@pytest.mark.parametrize("name", ["status", "materialize", "sweep", "windows"])
def test_home_of_an_earlier_format_is_refused_by_every_command_and_left_as_it_is(lake: Path, name: str):
    before = sorted(lake.rglob("*"))
    refused = command(name)
    assert refused.code == 3
    assert "format version 1" in refused.output and "omnisupport-ingest rebuild" in refused.output
    assert sorted(lake.rglob("*")) == before


DEATHS = (
    "lake.earlier.before@dim_",
    "lake.earlier.after@dim_",
    "home.marker.after",
    "lake.earlier.before@published",
    "lake.earlier.after@published",
)


def killed(at: str) -> None:
    """Run the command in a process that ends at the failpoint ``at``."""
    died = subprocess.run(
        [sys.executable, "-m", "omnisupport_ingest.cli.main", "rebuild"],
        env={**os.environ, "OMNISUPPORT_FAILPOINT": at},
        capture_output=True,
        text=True,
    )
    assert died.returncode == -signal.SIGKILL, f"{at}: {died.stdout}{died.stderr}"


@pytest.mark.slow
def test_rebuild_that_is_killed_is_finished_by_the_next_and_the_rows_are_the_same(lake: Path):
    before = rows(lake / "published" / "notes")
    for point in DEATHS[:-1]:
        killed(point)
        assert rows(lake / "published" / "notes") == before, "there for its readers until the end"
    assert command("status").code == 0
    killed(DEATHS[-1])
    assert command("rebuild").code == 0
    assert rows(lake / "dim_notes") == before and not (lake / "published").exists()


@pytest.mark.slow
def test_rebuild_makes_the_dimensions_again_with_the_same_rows_and_removes_the_earlier_folders(lake: Path):
    before = rows(lake / "published" / "notes")
    assert len(before) == 2
    retired = lake / "published" / "retired"
    retired.mkdir()
    refused = command("rebuild")
    assert refused.code == 1 and "no contract names it" in refused.output
    assert rows(lake / "published" / "notes") == before, "nothing is removed while a table has no dimension"
    retired.rmdir()
    done = command("rebuild")
    assert done.code == 0, done.output
    assert "folders of the earlier version are removed" in done.out
    assert rows(lake / "dim_notes") == before
    assert not (lake / "published").exists()
    workspace = open_workspace(lake.parents[2])
    assert [DeltaTable(str(lake / "net_changes" / "notes")).metadata().partition_columns] == [["window"]]
    (notes,) = workspace.contracts.of_source(SOURCE)
    assert workspace.dimension(notes).open().windows() == [WHOLE_TABLE]
    assert command("status").code == 0
    again = command("rebuild")
    assert (again.code, again.out) == (0, "0 runs. Every dimension is there.\n")
