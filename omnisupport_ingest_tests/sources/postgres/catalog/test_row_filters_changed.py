"""Row filters that change, and the repair of a gap: what is outside of the filter now is not in the lake."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.landing.manifest import Manifest
from omnisupport_ingest.landing.snapshot_plans import SnapshotPlans
from omnisupport_ingest.settings import SnapshotMode
from omnisupport_ingest.sources.postgres.session.errors import GapInSource, TableMissedChanges
from omnisupport_ingest.sources.postgres.snapshot.compared_reading import Recovered
from omnisupport_ingest_tests.sources.postgres.folded_lake import FoldedLake
from omnisupport_ingest_tests.sources.postgres.published_facts import (
    COLUMNS,
    EU,
    US,
    held,
    make_people,
    publish_otherwise,
    read_again,
    sent,
)
from omnisupport_ingest_tests.sources.postgres.snapshot_facts import capture, chunks, complete
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest, contract


@pytest.fixture
def people(source: SourceUnderTest) -> SourceUnderTest:
    make_people(source)
    return source


OTHERWISE = {
    "another filter": ("TABLE people WHERE (region = 'us')", US),
    "a narrower filter": ("TABLE people WHERE (region = 'eu' AND id > 500)", "region = 'eu' AND id > 500"),
    "no filter": ("TABLE people", "true"),
    "the same filter": (f"TABLE people WHERE ({EU})", EU),
}


@pytest.mark.parametrize(("what", "condition"), OTHERWISE.values(), ids=OTHERWISE.keys())
def test_table_published_by_another_filter_is_named_and_read_again_is_that(
    people: SourceUnderTest, what: str, condition: str
) -> None:
    people.catch_up()
    people.sql(publish_otherwise(people, what), "UPDATE people SET v = 'after' WHERE id < 100")
    if condition != EU:
        for _ in range(2):
            with pytest.raises(TableMissedChanges, match="published with other columns or rows"):
                people.catch_up()
        read_again(people, "people")
    else:
        # PostgreSQL keeps an entry that is set to what it is.
        people.catch_up()
    assert held(people) == sent(people, condition) and complete(people, "people")
    people.sql("UPDATE people SET v = 'later'", "UPDATE people SET region = 'us' WHERE id % 4 = 0")
    people.catch_up()
    assert held(people) == sent(people, condition)


def test_table_that_gets_a_filter_is_read_again_by_itself_where_the_mode_says_so(
    people: SourceUnderTest,
) -> None:
    people.overrides["snapshot_mode"] = SnapshotMode.WHEN_NEEDED
    people.catch_up()
    people.sql(publish_otherwise(people, f"TABLE people WHERE ({US})"))
    people.catch_up()
    assert held(people) == sent(people, US) and complete(people, "people")
    assert len(people.store.epochs()) == 1


def test_snapshot_that_was_begun_is_not_continued_by_another_filter(people: SourceUnderTest) -> None:
    people.overrides["snapshot_threads"] = 1
    people.killed_at("landing.manifest.after@people-000003")
    begun = SnapshotPlans(people.store.folder).all(1)
    people.sql(publish_otherwise(people, f"TABLE people WHERE ({US})"))
    with pytest.raises(TableMissedChanges):
        people.catch_up()
    read_again(people, "people")
    plans = SnapshotPlans(people.store.folder).all(1)
    assert len(begun) == 1 and len(plans) == 2
    assert len([span for span in chunks(people, "people") if span.snapshot_id == begun[0].snapshot_id]) == 4
    assert held(people) == sent(people, US) and complete(people, "people")


def test_filter_that_changes_between_the_chunks_of_a_snapshot_interrupts_the_table(
    people: SourceUnderTest,
) -> None:
    def landed(batch: Manifest) -> None:
        if batch.chunk is not None and (batch.chunk.chunk, batch.chunk.boundary) == (2, False):
            people.sql(publish_otherwise(people, f"TABLE people WHERE ({US})"))

    people.overrides["snapshot_threads"] = 1
    with pytest.raises(TableMissedChanges, match="published with other columns or rows"):
        capture(people, landed)
    assert not complete(people, "people")
    read_again(people, "people")
    assert held(people) == sent(people, US) and complete(people, "people")


def recover(source: SourceUnderTest, scratch: Path) -> Recovered:
    told: list[Recovered] = []
    source.capture().recover("a test", FoldedLake(source, scratch), threading.Event(), told.append)
    (found,) = told
    return found


@pytest.mark.parametrize("by", ["checksums", "rows"])
def test_recovery_compares_the_rows_of_the_filter_with_the_lake(
    people: SourceUnderTest, tmp_path: Path, by: str
) -> None:
    people.catch_up()
    if by == "rows":
        people.tables[0] = contract("people", COLUMNS)
    people.sql(f"SELECT pg_drop_replication_slot('{people.slot}')")
    # Outside of the filter, as before.
    people.sql("UPDATE people SET v = 'another' WHERE id = 4", "DELETE FROM people WHERE id = 5")
    with pytest.raises(GapInSource):
        people.catch_up()
    by_rows = 7 if by == "rows" else 0
    assert recover(people, tmp_path) == Recovered("people", 7, by_rows, 0, 0, 0)
    people.catch_up()
    assert held(people) == sent(people) and complete(people, "people")
    people.sql(f"SELECT pg_drop_replication_slot('{people.slot}')")
    people.sql(
        "UPDATE people SET region = 'us' WHERE id IN (3, 600)",
        "UPDATE people SET region = 'eu' WHERE id = 151",
        "UPDATE people SET v = 'changed' WHERE id = 303",
        "DELETE FROM people WHERE id = 990",
    )
    done = recover(people, tmp_path)
    assert (done.read_again, done.ended) == (2, 3)
    people.catch_up()
    assert held(people) == sent(people) and complete(people, "people")


def test_filter_that_changes_before_its_table_is_compared_interrupts_the_table(
    people: SourceUnderTest, tmp_path: Path
) -> None:
    people.catch_up()
    people.sql(f"SELECT pg_drop_replication_slot('{people.slot}')")

    class Late(FoldedLake):
        def rows(self, table: TableContract) -> object:  # type: ignore[override]
            # Sent as it is inserted, and neither in the lake nor in a chunk.
            people.sql(
                "INSERT INTO people VALUES (5000, 'eu', 'new', '')",
                publish_otherwise(people, "TABLE people WHERE (region = 'eu' AND id < 900)"),
            )
            return super().rows(table)

    with pytest.raises(TableMissedChanges):
        people.capture().recover("a test", Late(people, tmp_path), threading.Event(), lambda _: None)
    with pytest.raises(TableMissedChanges):
        people.catch_up()
    read_again(people, "people")
    assert held(people) == sent(people, "region = 'eu' AND id < 900") and complete(people, "people")


def test_recovery_under_another_filter_ends_the_rows_that_are_outside_of_it(
    people: SourceUnderTest, tmp_path: Path
) -> None:
    people.catch_up()
    people.sql(f"SELECT pg_drop_replication_slot('{people.slot}')")
    people.sql(publish_otherwise(people, "TABLE people WHERE (region = 'eu' AND id % 2 = 0)"))
    assert recover(people, tmp_path).ended == 167
    people.catch_up()
    assert held(people) == sent(people, "region = 'eu' AND id % 2 = 0") and complete(people, "people")
