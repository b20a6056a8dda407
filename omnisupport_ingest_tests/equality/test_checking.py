"""Source and lake at one LSN, on the real thing: no alarm under traffic, no fault overlooked."""

from __future__ import annotations

import json
import threading
from datetime import UTC, datetime
from pathlib import Path
from random import Random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from omnisupport_ingest.definitions import build_definitions
from omnisupport_ingest.equality.checking import (
    Checked,
    CheckOptions,
    check_source,
    turn,
)
from omnisupport_ingest.equality.repairing import request_repair
from omnisupport_ingest.layers.scheduling.pending import pending_windows
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.read.verified import (
    DIFFERS,
    EQUAL,
    NOT_COMPARABLE,
    PART_EQUAL,
    Moment,
    Verified,
    verified_of,
)
from omnisupport_ingest_tests.layers.story import CONTRACT
from omnisupport_ingest_tests.recovery.pipeline import run_layers
from omnisupport_ingest_tests.sources.postgres.conftest import source as source
from omnisupport_ingest_tests.sources.postgres.source_under_test import SOURCE, SourceUnderTest


class Story:
    """A table of notes at a source, and its dimension."""

    def __init__(self, source: SourceUnderTest, spark: SparkSession, mark: str | None = None) -> None:
        self.source, self.spark = source, spark
        folder = source.home_folder.parent / "contracts"
        folder.mkdir()
        of_events = {"source": SOURCE, "events": {"soft_delete_column": mark}}
        contract = CONTRACT | {"x-cdc": CONTRACT["x-cdc"] | of_events}
        (folder / "notes.json").write_text(json.dumps(contract))
        source.overrides["contracts_dir"] = folder
        self.workspace = Workspace.open(source.settings)
        (self.notes,) = source.tables = list(self.workspace.contracts.of_source(SOURCE))

    def take_in(self) -> None:
        self.source.catch_up()
        while windows := pending_windows(self.workspace, SOURCE).windows:
            run_layers(self.workspace, self.spark, windows, SOURCE)

    def check(
        self, *meanwhile: str, take_in: bool = True, patience: float = 20.0, rows: int | None = None
    ) -> Checked:
        """Check while the source goes on: ``meanwhile`` commits between the LSN and the look at the lake."""

        def advance() -> None:
            self.source.sql(*meanwhile)
            if take_in:
                self.take_in()

        (checked,) = check_source(self.workspace, CheckOptions((), rows, patience, advance))
        return checked

    def spoil(self, row: int) -> None:
        """Put another text into one row of the dimension."""
        for file in self.workspace.dimension(self.notes).open().all_files():
            table = pq.read_table(file.uri, partitioning=None)
            rows = [each | ({"body": "spoiled"} if each["id"] == row else {}) for each in table.to_pylist()]
            pq.write_table(pa.Table.from_pylist(rows, table.schema), Path(file.uri))


def test_source_and_lake_at_one_lsn_under_traffic(source: SourceUnderTest, spark: SparkSession) -> None:
    source.sql(
        "CREATE TABLE notes (id bigint PRIMARY KEY, title text, body text)",
        "INSERT INTO notes SELECT n, 'one', 'text ' || n FROM generate_series(-200, 20000) n",
    )
    story = Story(source, spark)
    story.take_in()

    equal = story.check(
        "UPDATE notes SET title = 'two' WHERE id % 1000 = 0", "DELETE FROM notes WHERE id = 7"
    )
    assert (equal.note.state, equal.note.left_out, equal.note.rows) == (EQUAL, 22, 20_201 - 22), equal.note
    through = equal.note.through
    assert through is not None and verified_of(source.home, story.notes) == equal.note

    parts = [story.check(rows=10_000).note for _ in range(3)]
    assert [each.state for each in parts] == [PART_EQUAL, PART_EQUAL, EQUAL], parts
    assert [each.rows for each in parts] == sorted(each.rows for each in parts), parts
    assert sum(each.read for each in parts) <= parts[2].rows == 20_200, "no range is read twice"
    assert 0 < min(each.read for each in parts) <= max(each.read for each in parts) < 10_000
    assert [each.through for each in parts[:2]] == [through, through]
    through = parts[2].through
    assert through is not None and through.lsn > parts[0].through.lsn

    again = story.check(rows=10_000).note
    assert (again.state, again.rows, again.read) == (EQUAL, 20_200, 0), again
    through = again.through

    story.spoil(15_001)
    found = story.check("UPDATE notes SET title = 'three' WHERE id % 1000 = 1 AND id < 9000", rows=10_000)
    assert found.note.read < 10_000, "of ranges that have not changed only the one that differs"
    assert (found.note.state, found.note.through) == (DIFFERS, through), found.note
    assert found.differing is not None and found.differing.keys == (("15001",),)

    behind = story.check("UPDATE notes SET title = 'four' WHERE id = 3", take_in=False, patience=1.0)
    assert behind.note.state == NOT_COMPARABLE and "landing is at" in behind.note.why, behind.note
    assert behind.note.through == through and behind.note.waits_since is not None
    assert behind.note.differs and behind.note.differing == 1, "what is known to differ is not forgotten"

    with source.connected() as writer, writer.cursor() as cursor:
        cursor.execute("BEGIN; UPDATE notes SET title = 'open' WHERE id = 4")
        opened = story.check(take_in=False, patience=1.0)
        cursor.execute("ROLLBACK")
    assert opened.note.state == NOT_COMPARABLE and "under way" in opened.note.why, opened.note
    assert opened.note.waits_since == behind.note.waits_since, "it waits since the first time"

    requested = request_repair(story.workspace, story.notes, found.differing, "verify --repair")
    assert [str(each) for each in requested] == ["notes, keys 15001"]
    landed = sum(each.events for each in story.workspace.landing(SOURCE).landed().epochs)
    story.take_in()
    again = sum(each.events for each in story.workspace.landing(SOURCE).landed().epochs)
    assert again - landed <= 3, "the row that differs, the end of its snapshot, and the update above"

    over = threading.Event()

    def keep_up() -> None:
        # Whenever the job takes its LSN, landing comes to it.
        while not over.wait(1.0):
            story.take_in()

    platform = threading.Thread(target=keep_up)
    platform.start()
    try:
        made = build_definitions(story.workspace).resolve_job_def(f"verify_{SOURCE}").execute_in_process()
    finally:
        over.set()
        platform.join()
    (evaluation,) = made.get_asset_check_evaluations()
    assert evaluation.passed and "Equal to the source at LSN" in (evaluation.description or ""), evaluation
    assert evaluation.metadata["rows_compared"].value == 20_200
    assert {"verified_through_lsn", "verified_through"} <= evaluation.metadata.keys()

    after = story.check()
    assert after.note.waits_since is None and not after.note.differs
    assert (after.note.state, after.note.left_out, after.note.rows) == (EQUAL, 0, 20_200), after.note
    assert after.note.through is not None and after.note.through.lsn > through.lsn


def test_rows_that_were_marked_as_deleted_and_are_gone_since_are_no_difference(
    source: SourceUnderTest, spark: SparkSession
) -> None:
    source.sql(
        "CREATE TABLE notes (id bigint PRIMARY KEY, title text, body text)",
        "INSERT INTO notes SELECT n, NULL, 'text ' || n FROM generate_series(1, 9) n",
    )
    story = Story(source, spark, mark="title")
    story.take_in()
    source.sql("UPDATE notes SET title = 'gone' WHERE id < 4", "DELETE FROM notes WHERE id = 1")
    source.transaction("UPDATE notes SET title = 'gone' WHERE id = 7", "DELETE FROM notes WHERE id = 7")
    story.take_in()
    marked = story.check()
    assert (marked.note.state, marked.note.rows) == (EQUAL, 7), marked.note
    source.sql("TRUNCATE notes", "INSERT INTO notes VALUES (10, NULL, 'new'), (11, 'gone', 'new')")
    story.take_in()
    truncated = story.check()
    assert (truncated.note.state, truncated.note.rows) == (EQUAL, 2), truncated.note


def test_a_row_that_was_withheld_and_is_gone_keeps_no_table_from_being_equal(
    source: SourceUnderTest, spark: SparkSession
) -> None:
    source.sql(
        "CREATE TABLE notes (id bigint PRIMARY KEY, title text, body text)",
        "INSERT INTO notes SELECT n, NULL, 'text ' || n FROM generate_series(1, 9) n",
    )
    story = Story(source, spark)
    story.take_in()
    broken = "INSERT INTO notes VALUES (100, repeat('x', 30), 'too long')"
    source.sql(broken)
    story.take_in()
    assert story.check().note.state == NOT_COMPARABLE
    source.sql("DELETE FROM notes WHERE id = 100")
    story.take_in()
    gone = story.check().note
    assert (gone.state, gone.rows) == (EQUAL, 9), gone
    source.sql(broken)
    story.take_in()
    again = story.check().note
    assert again.state == NOT_COMPARABLE and "1 row lacks" in again.why, again


def test_a_table_that_cannot_become_equal_takes_the_budget_from_no_other() -> None:
    def note(state: str, minutes: int) -> Verified:
        at = datetime(2026, 11, 26, 12, minutes, tzinfo=UTC)
        return Verified("notes", state, at, through=Moment(1, Lsn(minutes), at))

    red, waits = note(DIFFERS, 1), note(NOT_COMPARABLE, 2)
    never = [None, Verified("notes", PART_EQUAL, datetime(2026, 11, 26, 12, tzinfo=UTC))]
    others = [*never, note(PART_EQUAL, 3), note(EQUAL, 4)]
    assert sorted([red, *others, waits], key=turn) == [*others, red, waits]


class Traffic(threading.Thread):
    """Somebody who changes rows all the time, a few in a transaction, some of which are rolled back."""

    def __init__(self, source: SourceUnderTest, keys: range) -> None:
        super().__init__(name="traffic")
        self.source, self.keys, self.over = source, keys, threading.Event()
        self.commits = 0

    def run(self) -> None:
        rng = Random(7)
        with self.source.connected() as connection, connection.cursor() as cursor:
            while not self.over.wait(0.01):
                cursor.execute("BEGIN")
                for _ in range(rng.randint(1, 6)):
                    key = rng.choice(self.keys)
                    cursor.execute(
                        rng.choice(
                            (
                                f"UPDATE notes SET title = 'at {self.commits}' WHERE id = {key}",
                                f"DELETE FROM notes WHERE id = {key}",
                                f"INSERT INTO notes VALUES ({key}, 'new', NULL) ON CONFLICT DO NOTHING",
                                f"UPDATE notes SET id = {key} + 100000 WHERE id = {key}"
                                f" AND NOT EXISTS (SELECT 1 FROM notes WHERE id = {key} + 100000)",
                            )
                        )
                    )
                cursor.execute(rng.choice(("COMMIT", "COMMIT", "ROLLBACK")))
                self.commits += 1


@pytest.mark.slow
def test_traffic_is_never_an_alarm_and_hides_none(source: SourceUnderTest, spark: SparkSession) -> None:
    source.sql(
        "CREATE TABLE notes (id bigint PRIMARY KEY, title text, body text)",
        "INSERT INTO notes SELECT n, 'one', 'text ' || n FROM generate_series(1, 40000) n",
    )
    story = Story(source, spark)
    story.take_in()
    traffic = Traffic(source, range(1, 3000))
    traffic.start()
    try:
        notes = [story.check(rows=rows).note for rows in (None, 20_000, 10_000, 10_000, 20_000)]
        story.spoil(39_000)
        spoiled = story.check(rows=20_000)
    finally:
        traffic.over.set()
        traffic.join()
    assert traffic.commits > 100
    assert {each.state for each in notes} <= {EQUAL, PART_EQUAL}, notes
    assert max(each.read for each in notes[1:]) < 20_000, "what nobody changed is not read again"
    assert (spoiled.note.state, spoiled.differing and spoiled.differing.keys) == (DIFFERS, (("39000",),))
    last = story.check(rows=20_000)
    assert last.differing is not None and last.differing.keys == (("39000",),), last.note
