"""Publications with a column list: what it leaves out is neither read nor landed, by the snapshot either."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from omnisupport_ingest.contracts.learned import LearnedColumns
from omnisupport_ingest.contracts.model import ADDITIVE
from omnisupport_ingest.landing.manifest import Manifest
from omnisupport_ingest.settings import SnapshotMode
from omnisupport_ingest.sources.postgres.session.errors import PreflightFailed, TableMissedChanges
from omnisupport_ingest_tests.sources.postgres.published_facts import (
    columns_in_manifests,
    held,
    publish,
    publish_otherwise,
    read_again,
    written_in_the_home,
)
from omnisupport_ingest_tests.sources.postgres.range_facts import ask
from omnisupport_ingest_tests.sources.postgres.snapshot_facts import capture, chunks, complete
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest, contract

COLUMNS = ("id", "v")
PUBLISHED = ("id", "v", "more")


@pytest.fixture
def people(source: SourceUnderTest) -> SourceUnderTest:
    """1,000 rows with a column that is not published, and one that is published and not contracted."""
    source.sql(
        "CREATE TABLE people (id int PRIMARY KEY, email text, v text, more text)",
        "INSERT INTO people SELECT n, 'address' || n, 'old', 'more' FROM generate_series(1, 1000) n",
    )
    publish(source, "TABLE people (more, id, v)")
    source.tables.append(contract("people", COLUMNS))
    source.overrides |= {"snapshot_chunk_rows": 100, "snapshot_threads": 2}
    return source


def images(source: SourceUnderTest) -> set[tuple[str, ...]]:
    """The columns of the rows that have landed."""
    return {tuple(json.loads(event.after)) for event in source.events("r", "c", "u") if event.after}


def test_snapshot_and_stream_land_the_columns_of_the_list_alone(people: SourceUnderTest) -> None:
    people.catch_up()
    assert len(chunks(people, "people")) == 11 and complete(people, "people")
    people.sql(
        "UPDATE people SET v = 'new', email = 'address of 7' WHERE id = 7",
        "INSERT INTO people VALUES (2000, 'address of 2000', 'new', 'more')",
        "UPDATE people SET id = 3000 WHERE id = 3",
        "DELETE FROM people WHERE id = 5",
    )
    people.catch_up()
    assert held(people, "people") == people.rows("people", PUBLISHED)
    assert images(people) == {PUBLISHED}
    assert columns_in_manifests(people, "people") == {"snapshot": {PUBLISHED}, "stream": {PUBLISHED}}
    home = written_in_the_home(people)
    assert "address" not in home and "email" not in home and '"more"' in home


def test_column_that_is_not_published_may_filter_the_rows_that_are(people: SourceUnderTest) -> None:
    people.sql(publish_otherwise(people, "TABLE people (id, v) WHERE (email LIKE '%00')"))
    people.catch_up()
    people.sql("INSERT INTO people VALUES (2001, 'address2000', 'sent', ''), (2002, 'other', 'kept', '')")
    people.catch_up()
    assert held(people) == people.rows("people WHERE email LIKE '%00'", COLUMNS)
    assert len(held(people)) == 11 and "address" not in written_in_the_home(people)


def test_range_of_keys_is_read_with_the_columns_of_the_list(people: SourceUnderTest) -> None:
    people.catch_up()
    ask(people, ["100"], ["200"])
    people.catch_up()
    assert len(people.events("r")) == 1101 and images(people) == {PUBLISHED}
    assert held(people) == people.rows("people", PUBLISHED)


def test_table_without_an_index_is_read_with_the_columns_of_the_list(source: SourceUnderTest) -> None:
    source.sql(
        "CREATE TABLE people (id int NOT NULL, email text, v text)",
        "ALTER TABLE people ADD UNIQUE (id) DEFERRABLE, REPLICA IDENTITY FULL",
        "ALTER TABLE people DROP CONSTRAINT people_id_key",
        "INSERT INTO people SELECT n, 'address' || n, 'old' FROM generate_series(1, 1000) n",
    )
    publish(source, "TABLE people (id, v)")
    source.tables.append(contract("people", COLUMNS))
    source.overrides["snapshot_chunk_rows"] = 100
    source.catch_up()
    assert len(chunks(source, "people")) > 1 and held(source) == source.rows("people", COLUMNS)
    assert "address" not in written_in_the_home(source)


def test_partitioned_table_is_read_by_the_list_of_its_root(source: SourceUnderTest) -> None:
    source.sql(
        "CREATE TABLE people (id int PRIMARY KEY, email text, v text) PARTITION BY RANGE (id)",
        "CREATE TABLE people_1 PARTITION OF people FOR VALUES FROM (0) TO (100)",
        "INSERT INTO people SELECT n, 'address' || n, 'old' FROM generate_series(1, 99) n",
    )
    publish(source, "TABLE people (id, v)")
    source.tables.append(contract("people", COLUMNS))
    source.catch_up()
    source.sql(
        "CREATE TABLE people_2 PARTITION OF people FOR VALUES FROM (100) TO (200)",
        "INSERT INTO people VALUES (100, 'address', 'came')",
    )
    source.catch_up()
    assert held(source) == source.rows("people", COLUMNS) and images(source) == {COLUMNS}
    assert "address" not in written_in_the_home(source)


def test_form_of_a_table_that_is_not_read_is_that_of_the_list(people: SourceUnderTest) -> None:
    people.overrides["snapshot_mode"] = SnapshotMode.SCHEMA_ONLY
    people.catch_up()
    assert columns_in_manifests(people, "people")["snapshot"] == {PUBLISHED}


def test_another_list_is_named_and_what_it_has_is_read(people: SourceUnderTest) -> None:
    people.catch_up()
    people.sql(publish_otherwise(people, "TABLE people (id, v, email)"))
    with pytest.raises(TableMissedChanges, match="published with other columns or rows"):
        people.catch_up()
    read_again(people, "people")
    assert held(people) == people.rows("people", ("id", "email", "v")) and complete(people, "people")


def test_no_new_column_is_learned_that_the_list_leaves_out_by_now(people: SourceUnderTest) -> None:
    people.sql(publish_otherwise(people, "TABLE people"))
    people.catch_up()
    people.sql("ALTER TABLE people ADD later text NOT NULL DEFAULT 'x'")
    people.catch_up()
    people.sql(
        publish_otherwise(people, "TABLE people (id, v)"), "ALTER TABLE people ALTER later DROP NOT NULL"
    )
    with pytest.raises(TableMissedChanges):
        people.catch_up()
    read_again(people, "people")
    people.tables[:] = [replace(each, evolution=ADDITIVE) for each in people.tables]
    people.catch_up()
    assert LearnedColumns(people.home.path, people.settings.source).of("people") == {}


def test_snapshot_ends_where_the_list_has_lost_a_contracted_column(people: SourceUnderTest) -> None:
    def landed(batch: Manifest) -> None:
        if batch.chunk is not None and batch.chunk.chunk == 2:
            people.sql(publish_otherwise(people, "TABLE people (id, more)"))

    people.overrides["snapshot_threads"] = 1
    with pytest.raises(PreflightFailed, match=r"does not send v of public\.people"):
        capture(people, landed)
    assert len(chunks(people, "people")) == 3 and not complete(people, "people")
    with pytest.raises(PreflightFailed, match=r"does not send v of public\.people") as refused:
        people.catch_up()
    people.sql(refused.value.fix.strip())
    with pytest.raises(TableMissedChanges):
        people.catch_up()
    read_again(people, "people")
    assert held(people) == people.rows("people", ("id", "email", "v", "more")) and complete(people, "people")


GENERATED = {
    "listed": ("TABLE sums (id, v, twice)", "", ("id", "twice", "v")),
    "all of them": ("TABLE sums", ", publish_generated_columns = stored", ("id", "twice", "v", "w")),
    "not listed": ("TABLE sums (id, v)", ", publish_generated_columns = stored", ("id", "v")),
}


@pytest.mark.parametrize(("what", "options", "columns"), GENERATED.values(), ids=GENERATED.keys())
def test_generated_column_is_read_where_it_is_published(
    source: SourceUnderTest, what: str, options: str, columns: tuple[str, ...]
) -> None:
    if source.server_version() < 180000:
        pytest.skip("generated columns are published since PostgreSQL 18")
    source.sql(
        "CREATE TABLE sums"
        " (id int PRIMARY KEY, twice int GENERATED ALWAYS AS (id * 2) STORED, v text, w text)",
        "INSERT INTO sums VALUES (1, DEFAULT, 'read', '')",
        f"CREATE PUBLICATION {source.slot} FOR {what} WITH (publish_via_partition_root = true{options})",
    )
    source.tables.append(contract("sums", COLUMNS))
    source.catch_up()
    source.sql("INSERT INTO sums VALUES (2, DEFAULT, 'sent', '')")
    source.catch_up()
    assert images(source) == {columns}
    assert held(source, "sums") == source.rows("sums", columns)
