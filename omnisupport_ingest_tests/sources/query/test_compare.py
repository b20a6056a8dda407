"""Comparing keys finds what no cursor shows: deleted rows, and rows that a lookback was too short for."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from omnisupport_ingest.contracts.row_checksum import EVERY_KEY
from omnisupport_ingest.read.lake_keys import DimensionKeys
from omnisupport_ingest.sources.postgres.embedded.server import EmbeddedPostgres
from omnisupport_ingest.sources.postgres.session.connection import connect
from omnisupport_ingest.sources.query import compare as comparing
from omnisupport_ingest.sources.query.compare import compare
from omnisupport_ingest.sources.query.cursor import GENERATIONS, corrected
from omnisupport_ingest.sources.query.errors import AnotherDatabase, QueryRefused
from omnisupport_ingest.sources.query.postgres import PostgresReader
from omnisupport_ingest.sources.query.reader import Reader
from omnisupport_ingest.sources.query.state import FILE, QueryState
from omnisupport_ingest_tests.sources.query.tickets import TABLE, Desk, contract
from omnisupport_ingest_tests.waiting import until

TEXT_KEY = {"id": {"type": "string", "x-pg-type": "text", "description": "Key."}}


def lake(desk: Desk, folder: Path) -> DimensionKeys:
    """The dimension of what has landed, by position: its newest versions, deletes left out."""
    latest: dict[str, tuple[int, bool]] = {}
    for event in sorted(desk.events(), key=lambda each: (each["epoch"], each["ordinal"])):
        if event["key"] is not None:
            latest[event["key"]] = event["ordinal"], event["op"] == "d"
    rows = len(latest)
    table = pa.table(
        {
            "id": pa.array([json.loads(key)[0] for key in latest]),
            "subject": pa.nulls(rows, pa.string()),
            "updated_at": pa.nulls(rows, pa.timestamp("us", "UTC")),
            "_cdc_key": pa.array(list(latest)),
            "_cdc_is_deleted": pa.array([gone for _, gone in latest.values()]),
            "_cdc_unresolved": pa.array([[] for _ in latest], pa.list_(pa.string())),
            "_cdc_exact": pa.array([{} for _ in latest], pa.map_(pa.string(), pa.string())),
            "_cdc_ordinal": pa.array([ordinal for ordinal, _ in latest.values()]),
        }
    )
    pq.write_table(table, folder / "dimension.parquet")
    return DimensionKeys(desk.table, [str(folder / "dimension.parquet")], folder)


def test_keys_that_a_killed_process_left_are_removed_by_the_next(desk: Desk, tmp_path: Path) -> None:
    left = tmp_path / "keys-999999999.1.boot-left"
    left.mkdir()
    keys = lake(desk, tmp_path)
    keys.ordinals(EVERY_KEY)
    (folder,) = tmp_path.glob("keys-*")
    assert folder != left and (folder / "keys.duckdb").exists()
    keys.close()
    assert not list(tmp_path.glob("keys-*"))


def compared_by(desk: Desk, reader: Reader, lake: Mapping[str, DimensionKeys]) -> comparing.Comparison:
    with QueryState(desk.store.folder) as state:
        found = compare(desk.inlet(), reader, state, lake)
    if found.faults:
        raise found.faults[0]
    return found


def compared(desk: Desk, folder: Path) -> comparing.TableComparison:
    reader = PostgresReader(desk.dsn)
    try:
        (found,) = compared_by(desk, reader, {"public.tickets": lake(desk, folder)}).tables
    finally:
        reader.close()
    return found


def alive(desk: Desk) -> set[str]:
    last: dict[str, str] = {}
    for event in sorted(desk.events(), key=lambda each: (each["epoch"], each["ordinal"])):
        if event["key"] is not None:
            last[json.loads(event["key"])[0]] = event["op"]
    return {key for key, op in last.items() if op != "d"}


def test_keys_that_are_the_same_are_settled_by_one_checksum(desk: Desk, tmp_path: Path):
    desk.run("INSERT INTO tickets SELECT n, 'x' FROM generate_series(1, 500) AS n")
    desk.sync()
    found = compared(desk, tmp_path)
    assert (found.checksums, found.keys_read, found.deleted, found.missed) == (1, 0, 0, 0)


@pytest.mark.parametrize("by_text", [False, True])
def test_deletes_are_noticed_and_only_ranges_that_differ_are_read(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_text: bool
):
    monkeypatch.setattr(comparing, "LEAF_ROWS", 50)
    if by_text:
        # In another order than that of its bytes, as a collation has it.
        desk.run("ALTER TABLE tickets ALTER id TYPE text USING chr(96 + (id % 26)::int) || id")
        desk.table = contract(**TEXT_KEY)
    name = "CASE n % 2 WHEN 0 THEN 'a' ELSE 'B' END || n" if by_text else "n"
    desk.run(f"INSERT INTO tickets SELECT {name}, 'x' FROM generate_series(1, 2000) AS n")
    desk.sync()
    desk.run("DELETE FROM tickets WHERE id::text IN (SELECT id::text FROM tickets ORDER BY id LIMIT 3)")
    found = compared(desk, tmp_path)
    assert (found.deleted, found.missed) == (3, 0)
    assert found.keys_read < 400
    assert found.checksums < 60
    assert len(alive(desk)) == 1997
    # Compared again, with what landed in the lake, nothing differs any more.
    assert compared(desk, tmp_path).deleted == 0


def test_a_row_that_was_missed_is_read_and_stands_where_its_cursor_says(desk: Desk, tmp_path: Path):
    desk.table = contract({"field": "updated_at", "lookback": "PT0S"})
    desk.run("INSERT INTO tickets VALUES (2, 'two')")
    desk.sync()
    desk.run("INSERT INTO tickets VALUES (1, 'committed late', now() - interval '1 hour')")
    desk.sync()
    assert alive(desk) == {"2"}
    assert compared(desk, tmp_path).missed == 1
    assert alive(desk) == {"1", "2"}


def test_a_row_that_comes_again_after_its_delete_was_noticed_is_alive(desk: Desk, tmp_path: Path):
    desk.run("INSERT INTO tickets VALUES (1, 'one')")
    desk.sync()
    desk.run("DELETE FROM tickets")
    assert compared(desk, tmp_path).deleted == 1
    assert alive(desk) == set()
    desk.run("INSERT INTO tickets VALUES (1, 'again')")
    desk.sync()
    assert alive(desk) == {"1"}


def test_a_row_made_again_with_the_cursor_that_it_had_is_alive_by_a_full_refresh_alone(
    desk: Desk, tmp_path: Path
):
    row = "INSERT INTO tickets VALUES (1, 'one', '2026-11-20 10:00+00')"
    desk.run(row)
    desk.sync()
    desk.run("DELETE FROM tickets")
    assert compared(desk, tmp_path).deleted == 1
    desk.run(row)
    desk.sync()
    assert compared(desk, tmp_path).missed == 1
    # Its version stands where it stood before the delete.
    assert alive(desk) == set()
    desk.refresh("made again with its old cursor")
    desk.sync()
    assert alive(desk) == {"1"}


def test_a_missed_row_stands_where_a_sync_has_it_after_its_table_was_altered(desk: Desk, tmp_path: Path):
    desk.run("INSERT INTO tickets VALUES (1, 'one')")
    desk.sync()
    desk.run("ALTER TABLE tickets ADD priority text; INSERT INTO tickets VALUES (2, 'two')")
    assert compared(desk, tmp_path).missed == 1
    desk.sync()
    of_two = [(each["ordinal"], each["after"]) for each in desk.events() if each["key"] == '["2"]']
    assert len(of_two) == 2 and len(set(of_two)) == 1


def test_a_row_made_again_with_the_cursor_that_it_had_is_alive_after_its_table_was_altered(
    desk: Desk, tmp_path: Path
):
    row = "INSERT INTO tickets (id, subject, updated_at) VALUES (1, 'one', '2026-11-20 10:00+00')"
    desk.run(row)
    desk.sync()
    desk.run("DELETE FROM tickets")
    assert compared(desk, tmp_path).deleted == 1
    desk.run(f"ALTER TABLE tickets ADD priority text; {row}")
    assert compared(desk, tmp_path).missed == 1
    events = sorted((each["ordinal"], each["op"]) for each in desk.events() if each["key"] is not None)
    # One position for each: two contents at one would wait for a person.
    assert [op for _, op in events] == ["r", "d", "r"] and len({ordinal for ordinal, _ in events}) == 3


def test_a_row_without_a_cursor_that_is_made_again_as_it_was_is_alive_by_the_next_sync(
    desk: Desk, tmp_path: Path
):
    row = "INSERT INTO tickets VALUES (1, 'one', NULL)"
    desk.run(row)
    desk.sync()
    desk.run("DELETE FROM tickets")
    assert compared(desk, tmp_path).deleted == 1
    desk.run(row)
    assert desk.sync().tables[0].landed == 1
    assert alive(desk) == {"1"}
    assert desk.sync().tables[0].landed == 0


def test_a_row_that_had_a_cursor_and_is_made_again_without_one_lands_once(desk: Desk, tmp_path: Path):
    desk.run("INSERT INTO tickets VALUES (1, 'one', now())")
    desk.sync()
    desk.run("DELETE FROM tickets")
    assert compared(desk, tmp_path).deleted == 1
    desk.run("INSERT INTO tickets VALUES (1, 'one', NULL)")
    desk.sync()
    landed = len(desk.events())
    # It stands below its delete; what lands above itself would change nothing.
    for _ in range(2):
        assert compared(desk, tmp_path).missed == 1
    assert len(desk.events()) == landed


REWRITE = "ALTER TABLE {} ALTER subject TYPE text USING subject || ''"
RELOAD = "CREATE TABLE kept AS TABLE {0}; TRUNCATE {0}; INSERT INTO {0} TABLE kept; DROP TABLE kept"
VIEW = "ALTER TABLE tickets RENAME TO base; CREATE VIEW tickets AS SELECT * FROM base"
PARTITIONED = (
    "ALTER TABLE tickets RENAME TO part; CREATE TABLE tickets (LIKE part) PARTITION BY RANGE (id);"
    "ALTER TABLE tickets ATTACH PARTITION part FOR VALUES FROM (1) TO (100)"
)


@pytest.mark.parametrize(
    ("made", "change", "of"),
    [
        ("", REWRITE, "tickets"),
        ("", RELOAD, "tickets"),
        (VIEW, RELOAD, "base"),
        (PARTITIONED, RELOAD, "part"),
    ],
)
def test_a_table_that_is_rewritten_just_when_it_is_looked_at_is_not_taken_for_an_empty_one(
    desk: Desk, tmp_path: Path, made: str, change: str, of: str
):
    desk.run(f"INSERT INTO tickets SELECT n, 'x' FROM generate_series(1, 20) AS n; {made}")
    desk.sync()
    for look in (lambda: compared(desk, tmp_path), desk.sync):
        with ThreadPoolExecutor(1) as beside, closing(connect(desk.dsn)) as other:
            other.autocommit = False
            with other.cursor() as cursor:
                cursor.execute(change.format(of))
            looking = beside.submit(look)
            until(lambda: waits_for_a_lock(desk))
            other.commit()
            with pytest.raises(QueryRefused, match="was truncated or rewritten"):
                looking.result()
    assert desk.sync().finished
    assert compared(desk, tmp_path).deleted == 0
    assert alive(desk) == {str(number) for number in range(1, 21)}


def waits_for_a_lock(desk: Desk) -> bool:
    assert desk.connection is not None
    with desk.connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(*) > 0 FROM pg_stat_activity"
            " WHERE datname = current_database() AND wait_event_type = 'Lock'"
        )
        return bool(cursor.fetchone()[0])


def test_the_keys_of_another_database_are_not_compared(
    desk: Desk, tmp_path: Path, postgres: EmbeddedPostgres
):
    desk.run("INSERT INTO tickets VALUES (1, 'one')")
    desk.sync()
    desk.run("CREATE DATABASE empty TEMPLATE template0")
    try:
        with closing(connect(postgres.dsn("empty"))) as connection, connection.cursor() as cursor:
            cursor.execute(TABLE)
        with pytest.raises(AnotherDatabase, match="leads to the database"):
            compared(replace(desk, dsn=postgres.dsn("empty")), tmp_path)
    finally:
        desk.run("DROP DATABASE empty WITH (FORCE)")
    assert alive(desk) == {"1"}


def test_a_server_that_lags_behind_what_was_read_is_not_compared(desk: Desk, tmp_path: Path):
    desk.run("INSERT INTO tickets VALUES (1, 'one'), (2, 'two')")
    desk.sync()
    # As another standby had it, which is further on.
    with closing(sqlite3.connect(desk.store.folder / FILE)) as base, base:
        assert base.execute("UPDATE reached SET lsn = lsn + (1 << 40)").rowcount == 1
    desk.run("DELETE FROM tickets WHERE id = 2")
    desk.sync()
    with pytest.raises(QueryRefused, match="shows an earlier state"):
        compared(desk, tmp_path)
    assert alive(desk) == {"1", "2"}
    desk.refresh("restored from a backup")
    desk.sync()
    assert compared(desk, tmp_path).deleted == 1


def test_a_text_that_is_not_utf8_is_refused_by_the_name_of_its_table(desk: Desk, postgres: EmbeddedPostgres):
    desk.run("CREATE DATABASE ascii ENCODING 'SQL_ASCII' LOCALE 'C' TEMPLATE template0")
    try:
        with closing(connect(postgres.dsn("ascii"))) as connection:
            elsewhere = replace(desk, connection=connection, dsn=postgres.dsn("ascii"))
            elsewhere.run(
                f"{TABLE}; INSERT INTO tickets VALUES (1, convert_from('\\x67726ffc', 'SQL_ASCII'))"
            )
            with pytest.raises(
                QueryRefused, match=r"public\.tickets has a text that cannot be written as UTF-8"
            ) as refused:
                elsewhere.sync()
        assert refused.value.__suppress_context__ and "gro" not in str(refused.value)
    finally:
        desk.run("DROP DATABASE ascii WITH (FORCE)")


def test_nothing_is_compared_before_anything_has_landed(desk: Desk):
    reader = PostgresReader(desk.dsn)
    with pytest.raises(QueryRefused, match="nothing to compare"):
        compared_by(desk, reader, {})
    reader.close()


def test_a_version_can_be_corrected_a_number_of_times():
    ordinal = 7 * GENERATIONS
    for _ in range(GENERATIONS - 1):
        ordinal = corrected(ordinal, contract())
    assert ordinal < 8 * GENERATIONS
    with pytest.raises(QueryRefused, match="corrected"):
        corrected(ordinal, contract())


def test_a_composite_key_is_compared_by_all_its_columns(desk: Desk, tmp_path: Path):
    desk.run("ALTER TABLE tickets ADD part text NOT NULL DEFAULT 'p', DROP CONSTRAINT tickets_pkey")
    desk.run("ALTER TABLE tickets ADD PRIMARY KEY (id, part)")
    part = {"type": ["string", "null"], "x-pg-type": "text", "description": "Part."}
    table = contract(part=part)
    columns = tuple(replace(each, nullable=False) if each.name == "part" else each for each in table.columns)
    desk.table = replace(table, key=("id", "part"), columns=columns)
    desk.run("INSERT INTO tickets (id, part) SELECT n % 5, 'p' || n FROM generate_series(1, 40) AS n")
    desk.run("INSERT INTO tickets (id, part) VALUES (1, 'größer 😀')")
    desk.sync()
    reader = PostgresReader(desk.dsn)
    keys = lake(desk, tmp_path)
    (same,) = compared_by(desk, reader, {"public.tickets": keys}).tables
    assert (same.checksums, same.keys_read) == (1, 0), "one checksum is enough where nothing differs"
    desk.run("DELETE FROM tickets WHERE part = 'p7'")
    (found,) = compared_by(desk, reader, {"public.tickets": keys}).tables
    reader.close()
    assert found.deleted == 1
    assert [each["key"] for each in desk.events() if each["op"] == "d"] == ['["2","p7"]']
