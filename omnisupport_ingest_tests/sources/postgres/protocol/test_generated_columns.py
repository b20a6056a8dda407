"""Columns that the server generates: neither the snapshot nor, as a rule, the stream has them."""

from __future__ import annotations

import json

import pytest

from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest, contract, folded

COLUMNS = ("id", "v")


def is_older_than(source: SourceUnderTest, version: int) -> bool:
    return int(source.query("SELECT current_setting('server_version_num')::int")[0][0]) < version


@pytest.mark.parametrize("kind", ["STORED", "VIRTUAL"])
def test_snapshot_and_stream_carry_the_same_columns(source: SourceUnderTest, kind: str) -> None:
    if kind == "VIRTUAL" and is_older_than(source, 180000):
        pytest.skip("virtual ones came with PostgreSQL 18")
    source.sql(
        f"CREATE TABLE sums (id int PRIMARY KEY, twice int GENERATED ALWAYS AS (id * 2) {kind}, v text)",
        "INSERT INTO sums VALUES (1, DEFAULT, 'read')",
    )
    source.tables.append(contract("sums", COLUMNS))
    source.catch_up()
    source.sql("INSERT INTO sums VALUES (2, DEFAULT, 'sent')", "UPDATE sums SET v = 'changed'")
    source.catch_up()
    images = [json.loads(event.after) for event in source.events("r", "c", "u") if event.after]
    assert len(images) == 4 and all(tuple(image) == COLUMNS for image in images)
    assert folded(source.events(), "sums") == source.rows("sums", COLUMNS)


def test_publication_that_sends_them_changes_nothing_in_the_columns_of_the_contract(
    source: SourceUnderTest,
) -> None:
    if is_older_than(source, 180000):
        pytest.skip("publish_generated_columns came with PostgreSQL 18")
    source.sql(
        "CREATE TABLE sums (id int PRIMARY KEY, twice int GENERATED ALWAYS AS (id * 2) STORED, v text)",
        f"CREATE PUBLICATION {source.slot} FOR TABLE sums"
        " WITH (publish_via_partition_root = true, publish_generated_columns = stored)",
        "INSERT INTO sums VALUES (1, DEFAULT, 'read')",
    )
    source.tables.append(contract("sums", COLUMNS))
    source.catch_up()
    source.sql(
        "INSERT INTO sums VALUES (2, DEFAULT, 'sent')",
        "UPDATE sums SET v = 'changed'",
        "DELETE FROM sums WHERE id = 2",
    )
    source.catch_up()
    (updated, *_) = source.events("u")
    assert json.loads(updated.after or "") == {"id": "1", "twice": "2", "v": "changed"}
    rows = {
        key: {name: row[name] for name in COLUMNS} for key, row in folded(source.events(), "sums").items()
    }
    assert rows == source.rows("sums", COLUMNS)
