"""An index that carries more columns than it is over (``INCLUDE``): only those it is over are its key."""

from __future__ import annotations

import json

import pytest

from omnisupport_ingest.sources.postgres.catalog.live_table import read_live_tables
from omnisupport_ingest.sources.postgres.catalog.new_contract import key_of
from omnisupport_ingest.sources.postgres.preflight.contract_match import contract_findings
from omnisupport_ingest.sources.postgres.session.connection import connect
from omnisupport_ingest.sources.postgres.session.errors import PreflightFailed
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest, contract, folded

COLUMNS = ("id", "v", "w")

WAYS = {
    "primary key": ("CREATE TABLE things (id int, v text, w int, PRIMARY KEY (id) INCLUDE (v, w))",),
    "unique index": (
        "CREATE TABLE things (id int NOT NULL, v text, w int)",
        "CREATE UNIQUE INDEX covering ON things (id) INCLUDE (v, w)",
        "ALTER TABLE things REPLICA IDENTITY USING INDEX covering",
    ),
    "primary key, whole rows": (
        "CREATE TABLE things (id int, v text, w int, PRIMARY KEY (id) INCLUDE (v))",
        "ALTER TABLE things REPLICA IDENTITY FULL",
    ),
    "partitioned": (
        "CREATE TABLE things (id int, v text, w int, PRIMARY KEY (id) INCLUDE (v, w))"
        " PARTITION BY RANGE (id)",
        "CREATE TABLE things_1 PARTITION OF things FOR VALUES FROM (0) TO (10)",
        "CREATE TABLE things_2 PARTITION OF things DEFAULT",
    ),
}
LONG = "repeat('not sent ', 250)"
"""Long enough to be stored apart, and short enough for the index to carry."""


@pytest.mark.parametrize("statements", WAYS.values(), ids=WAYS.keys())
def test_table_with_columns_that_may_be_null_in_its_covering_key_is_followed(
    source: SourceUnderTest, statements: tuple[str, ...]
) -> None:
    source.sql(
        *statements,
        "ALTER TABLE things ALTER COLUMN v SET STORAGE EXTERNAL",
        f"INSERT INTO things VALUES (1, 'a', NULL), (2, {LONG}, 2), (3, NULL, 3)",
        f"INSERT INTO things VALUES (4, {LONG}, 4), (5, 'x', 5)",
    )
    source.tables.append(contract("things", COLUMNS))
    with source.connected() as connection:
        (live,) = read_live_tables(connection, [("public", "things")]).values()
    assert key_of(live).columns == ("id",)
    assert {each.check for each in contract_findings(source.tables[0], live)} == {"type"}, "int, read as text"
    source.catch_up()
    assert len(source.events("r")) == 5
    source.sql(
        f"INSERT INTO things VALUES (6, {LONG}, NULL), (7, NULL, 7)",
        "UPDATE things SET v = NULL WHERE id = 1",
        "UPDATE things SET id = 12 WHERE id = 2",
        "UPDATE things SET id = 9, w = NULL WHERE id = 6",
        "UPDATE things SET w = 40 WHERE id = 4",
        "DELETE FROM things WHERE id IN (3, 7)",
    )
    source.catch_up()
    assert folded(source.events(), "things") == source.rows("things", COLUMNS)
    if "REPLICA IDENTITY FULL" not in " ".join(statements):
        # What the index only carries is not in the old row that the stream sends: nothing, not a NULL.
        assert {before for each in source.changes() if (before := each.before)} == {
            json.dumps({"id": str(key)}, separators=(",", ":")) for key in (2, 3, 6, 7)
        }


def test_partition_whose_index_only_carries_the_key_is_named(source: SourceUnderTest) -> None:
    source.sql(
        "CREATE TABLE things (id int, v text, w int NOT NULL, PRIMARY KEY (id)) PARTITION BY RANGE (id)",
        "CREATE TABLE things_1 PARTITION OF things DEFAULT",
        "CREATE UNIQUE INDEX other ON things_1 (w) INCLUDE (id)",
        "ALTER TABLE things_1 REPLICA IDENTITY USING INDEX other",
    )
    source.tables.append(contract("things", COLUMNS))
    with pytest.raises(
        PreflightFailed, match=r"Key column id .* replica identity of its partition public.things_1"
    ):
        source.catch_up()


def test_index_that_only_carries_the_key_is_no_key_of_it(source: SourceUnderTest) -> None:
    source.sql(
        "CREATE TABLE things (id int PRIMARY KEY, v text, w int NOT NULL)",
        "CREATE UNIQUE INDEX other ON things (w) INCLUDE (id)",
        "ALTER TABLE things REPLICA IDENTITY USING INDEX other",
    )
    connection = connect(source.dsn)
    try:
        (live,) = read_live_tables(connection, [("public", "things")]).values()
    finally:
        connection.close()
    assert live.identity == {"w"} and key_of(live).columns == ("w",)
    source.tables.append(contract("things", COLUMNS))
    with pytest.raises(PreflightFailed, match="is not in its replica identity"):
        source.catch_up()
