"""What lands, in which order and with which values, for everything a source can do."""

from __future__ import annotations

import json

import pytest

from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest, contract, folded

pytestmark = pytest.mark.quick


@pytest.fixture
def notes(source: SourceUnderTest) -> SourceUnderTest:
    """A source with a table ``notes`` that has a TOASTed column, captured up to now."""
    source.sql("CREATE TABLE notes (id bigint PRIMARY KEY, body text, tag text)")
    source.sql("ALTER TABLE notes ALTER COLUMN body SET STORAGE EXTERNAL")
    source.tables.append(contract("notes", ("id", "body", "tag")))
    source.catch_up()
    return source


LONG = "repeat('long text ', 1000)"


def _short(source: SourceUnderTest) -> list[tuple[int, str, str | None]]:
    return [(event.ordinal, event.op, event.key) for event in source.changes()]


def test_insert_update_and_delete_land_in_order_with_even_ordinals(notes: SourceUnderTest) -> None:
    notes.transaction(
        "INSERT INTO notes VALUES (1, 'one', NULL), (2, 'two', '')",
        "UPDATE notes SET tag = 'x' WHERE id = 1",
        "DELETE FROM notes WHERE id = 2",
    )
    notes.catch_up()
    assert _short(notes) == [(0, "c", '["1"]'), (2, "c", '["2"]'), (4, "u", '["1"]'), (6, "d", '["2"]')]
    first, second, updated, deleted = notes.changes()
    assert json.loads(first.after or "") == {"id": "1", "body": "one", "tag": None}
    assert json.loads(second.after or "") == {"id": "2", "body": "two", "tag": ""}
    assert updated.before is None and updated.unchanged is None
    assert deleted.after is None and json.loads(deleted.before or "") == {"id": "2"}
    assert len({event.commit_lsn for event in notes.changes()}) == 1


def test_toasted_column_that_did_not_change_is_listed_and_not_carried(notes: SourceUnderTest) -> None:
    notes.sql(f"INSERT INTO notes VALUES (1, {LONG}, 'a')", "UPDATE notes SET tag = 'b'")
    notes.catch_up()
    updated = notes.changes()[-1]
    assert updated.unchanged == ["body"]
    assert json.loads(updated.after or "") == {"id": "1", "tag": "b"}


def test_key_change_is_a_delete_and_a_create_that_names_the_old_key(notes: SourceUnderTest) -> None:
    notes.sql(f"INSERT INTO notes VALUES (1, {LONG}, 'a')")
    notes.transaction("UPDATE notes SET tag = 'b' WHERE id = 1", "UPDATE notes SET id = 9 WHERE id = 1")
    notes.catch_up()
    *_, deleted, created = notes.changes()
    assert (deleted.op, deleted.ordinal, deleted.key) == ("d", 2, '["1"]')
    assert (created.op, created.ordinal, created.key) == ("c", 3, '["9"]')
    assert created.moved_from_key == '["1"]' and created.unchanged == ["body"]
    assert folded(notes.events(), "notes") == notes.rows("notes", ("id", "body", "tag"))


def test_two_rows_that_swap_keys_keep_their_toasted_values(notes: SourceUnderTest) -> None:
    notes.sql(f"INSERT INTO notes VALUES (1, 'A' || {LONG}, 'a'), (2, 'B' || {LONG}, 'b')")
    notes.transaction(
        "UPDATE notes SET id = -1 WHERE id = 1",
        "UPDATE notes SET id = 1 WHERE id = 2",
        "UPDATE notes SET id = 2 WHERE id = -1",
    )
    notes.catch_up()
    assert folded(notes.events(), "notes") == notes.rows("notes", ("id", "body", "tag"))


def test_truncate_of_several_tables_is_one_event_each(notes: SourceUnderTest) -> None:
    notes.sql("CREATE TABLE other (id int PRIMARY KEY)")
    notes.tables.append(contract("other", ("id",)))
    notes.catch_up()
    notes.transaction("INSERT INTO notes VALUES (1)", "TRUNCATE notes, other", "INSERT INTO other VALUES (7)")
    notes.catch_up()
    events = [(event.ordinal, event.op, event.source_table) for event in notes.changes()]
    assert sorted(events[1:3]) == [(2, "t", events[1][2]), (4, "t", events[2][2])]
    assert {event[2] for event in events[1:3]} == {"notes", "other"}
    assert events[3] == (6, "c", "other")


def test_rolled_back_savepoints_leave_no_trace_and_no_gap(notes: SourceUnderTest) -> None:
    notes.transaction(
        "INSERT INTO notes VALUES (1)",
        "SAVEPOINT s",
        "INSERT INTO notes SELECT generate_series(100, 200)",
        "ROLLBACK TO s",
        "INSERT INTO notes VALUES (2)",
    )
    notes.sql("BEGIN; INSERT INTO notes VALUES (3); ROLLBACK")
    notes.catch_up()
    assert _short(notes) == [(0, "c", '["1"]'), (2, "c", '["2"]')]


def test_changes_of_a_table_without_contract_count_in_the_ordinals(notes: SourceUnderTest) -> None:
    """Their key is that of the replica identity if it is one column; of several nothing says the order."""
    notes.sql(
        "CREATE TABLE unagreed (a int, b int, PRIMARY KEY (b, a))", "CREATE TABLE one (a int PRIMARY KEY)"
    )
    notes.sql(f"ALTER PUBLICATION {notes.slot} ADD TABLE unagreed, one")
    notes.transaction(
        "INSERT INTO notes VALUES (1)",
        "INSERT INTO unagreed VALUES (5, 6)",
        "DELETE FROM notes",
        "INSERT INTO one VALUES (7)",
    )
    notes.catch_up()
    assert [(event.ordinal, event.source_table, event.key) for event in notes.changes()] == [
        (0, "notes", '["1"]'),
        (2, "unagreed", None),
        (4, "notes", '["1"]'),
        (6, "one", '["7"]'),
    ]


def test_transactional_message_takes_an_ordinal_and_another_one_does_not_land(notes: SourceUnderTest) -> None:
    notes.sql("SELECT pg_logical_emit_message(false, 'audit', 'outside')")
    notes.transaction(
        "INSERT INTO notes VALUES (1)",
        "SELECT pg_logical_emit_message(true, 'audit', 'inside')",
        "INSERT INTO notes VALUES (2)",
    )
    notes.catch_up()
    _, message, _ = notes.changes()
    assert (message.op, message.ordinal, message.key, message.source_table) == ("m", 2, None, "")
    assert json.loads(message.after or "") == {"prefix": "audit", "content": "aW5zaWRl"}


def test_replica_identity_full_carries_the_old_row_and_finds_key_changes(notes: SourceUnderTest) -> None:
    notes.sql("ALTER TABLE notes REPLICA IDENTITY FULL")
    notes.sql(
        f"INSERT INTO notes VALUES (1, {LONG}, 'a')",
        "UPDATE notes SET tag = 'b'",
        "UPDATE notes SET id = 2",
        "DELETE FROM notes",
    )
    notes.catch_up()
    _, updated, gone, moved, deleted = notes.changes()
    assert [event.op for event in (updated, gone, moved, deleted)] == ["u", "d", "c", "d"]
    before = json.loads(updated.before or "")
    assert before["tag"] == "a" and before["body"].startswith("long text")
    assert moved.moved_from_key == '["1"]' and json.loads(moved.before or "")["body"] == before["body"]
    assert json.loads(deleted.before or "")["tag"] == "b"


def test_composite_key_follows_the_contract_not_the_index(source: SourceUnderTest) -> None:
    source.sql("CREATE TABLE pairs (a int, b text, v int, PRIMARY KEY (b, a))")
    source.tables.append(contract("pairs", ("a", "b", "v"), key=("a", "b")))
    source.sql("INSERT INTO pairs VALUES (1, 'x\"y', 1)")
    source.catch_up()
    source.sql("UPDATE pairs SET v = 2", "UPDATE pairs SET b = 'z'", "DELETE FROM pairs")
    source.catch_up()
    keys = [json.loads(event.key or "") for event in source.events("r", "c", "u", "d")]
    assert keys == [["1", 'x"y'], ["1", 'x"y'], ["1", 'x"y'], ["1", "z"], ["1", "z"]]


WEIRD = {
    "tab and newline": r"E'a\tb\nc\\N\r\\'",
    "control characters": r"E'\x01\x02\b\f\v\x7f'",
    "quotes": "'\"''{},'",
    "beyond the basic plane": "'Zürich 你好 🎉'",
    "backslash N alone": r"'\N'",
    "empty": "''",
}


def test_weird_text_and_every_type_read_the_same_by_snapshot_and_by_stream(source: SourceUnderTest) -> None:
    source.sql(
        "CREATE TYPE mood AS ENUM ('sad', 'it''s ok')",
        "CREATE TABLE samples (id int PRIMARY KEY, t text, n numeric, f float8, r real, ts timestamptz,"
        " tz timestamp, d date, i interval, b bytea, j jsonb, a text[], e mood, m money, u uuid, x bool,"
        " p point, h inet, rng int4range)",
    )
    columns = (
        "id",
        "t",
        "n",
        "f",
        "r",
        "ts",
        "tz",
        "d",
        "i",
        "b",
        "j",
        "a",
        "e",
        "m",
        "u",
        "x",
        "p",
        "h",
        "rng",
    )
    source.tables.append(contract("samples", columns))
    values = (
        "'NaN', 0.1::float8 + 0.2, 1e-40::real, '0044-03-15 12:00:00.123456+05:30 BC', 'infinity',"
        " '-infinity', '-1 year 2 days 03:04:05.6', '\\xdeadbeef', '{\"k\": [1, null]}',"
        " ARRAY['a,b', NULL, 'NULL', '\"', '\\'], 'it''s ok', -1234.5, gen_random_uuid(), true,"
        " '(1.5,2)', '10.0.0.0/8', '[1,5)'"
    )

    def insert(base: int) -> list[str]:
        return [
            f"INSERT INTO samples VALUES ({base + i}, {text}, {values})"
            for i, text in enumerate(WEIRD.values())
        ] + [f"INSERT INTO samples (id) VALUES ({base + 90})"]

    source.sql(*insert(0))
    source.catch_up()
    source.sql("UPDATE samples SET id = id + 100")
    source.catch_up()
    rows = [json.loads(event.after or "") for event in source.events("r", "c")]
    snapshot = {int(row["id"]): row for row in rows if int(row["id"]) < 100}
    stream = {int(row["id"]) - 100: row for row in rows if int(row["id"]) >= 100}
    assert len(snapshot) == len(stream) == len(WEIRD) + 1
    for key, row in snapshot.items():
        assert row | {"id": ""} == stream[key] | {"id": ""}
    assert snapshot[0]["t"] == "a\tb\nc\\N\r\\" and snapshot[4]["t"] == "\\N" and snapshot[5]["t"] == ""
    assert (
        snapshot[0]["f"] == "0.30000000000000004" and snapshot[0]["ts"] == "0044-03-15 06:30:00.123456+00 BC"
    )
    assert set(snapshot[90].values()) == {"90", None}


def test_text_does_not_depend_on_the_settings_of_database_and_role(source: SourceUnderTest) -> None:
    source.sql(
        f"ALTER DATABASE {source.slot} SET DateStyle = 'German, DMY'",
        f"ALTER DATABASE {source.slot} SET IntervalStyle = 'iso_8601'",
        f"ALTER DATABASE {source.slot} SET TimeZone = 'Asia/Tokyo'",
        f"ALTER DATABASE {source.slot} SET extra_float_digits = -5",
        f"ALTER DATABASE {source.slot} SET bytea_output = 'escape'",
        "CREATE TABLE samples (id int PRIMARY KEY, ts timestamptz, i interval, f float8, b bytea)",
        "INSERT INTO samples VALUES (1, '2026-01-02 03:04:05+00', '1 day', 0.1::float8 + 0.2, '\\x00ff')",
    )
    source.tables.append(contract("samples", ("id",)))
    source.catch_up()
    source.sql("UPDATE samples SET id = 1")
    source.catch_up()
    snapshot, stream = (json.loads(event.after or "") for event in source.events("r", "u"))
    assert snapshot == stream
    assert list(stream.values()) == [
        "1", "2026-01-02 03:04:05+00", "1 day", "0.30000000000000004", "\\x00ff",
    ]  # fmt: skip


def test_large_transaction_keeps_one_commit_and_rising_ordinals(source: SourceUnderTest) -> None:
    source.sql("CREATE TABLE many (id int PRIMARY KEY, v text)")
    source.tables.append(contract("many", ("id", "v")))
    source.catch_up()
    source.overrides["batch_max_bytes"] = 100_000
    source.sql(
        "INSERT INTO many SELECT g, repeat('v', 50) FROM generate_series(1, 30000) g",
        "DELETE FROM many WHERE id = 1",
    )
    source.catch_up()
    stream = [manifest for manifest in source.manifests() if manifest.stream and manifest.rows]
    assert [manifest.rows for manifest in stream] == [30000, 1]
    big = [event for event in source.changes() if event.op == "c"]
    assert [event.ordinal for event in big] == list(range(0, 60000, 2))
    assert len({event.commit_lsn for event in big}) == 1


def test_small_transactions_read_together_end_a_batch_at_the_commit_that_fills_it(
    source: SourceUnderTest,
) -> None:
    source.sql("CREATE TABLE small (id int PRIMARY KEY, v text)")
    source.tables.append(contract("small", ("id", "v")))
    source.catch_up()
    source.overrides |= {"batch_max_bytes": 10_000, "batch_max_seconds": 3600.0}
    source.sql(
        "DO $$ BEGIN FOR id IN 1000 .. 1499 LOOP INSERT INTO small VALUES (id, 'v'); COMMIT; END LOOP; END $$"
    )
    source.catch_up()
    batches = [manifest for manifest in source.manifests() if manifest.stream and manifest.rows]
    # The header of a message, and an insert of a text of four bytes and of one of one.
    received = 25 + 8 + (5 + 4) + (5 + 1)
    rows = [batch.rows for batch in batches]
    assert sum(rows) == 500 and set(rows[:-1]) == {-(-10_000 // received)}
    assert [event.key for event in source.changes()] == [f'["{number}"]' for number in range(1000, 1500)]
    assert len({event.commit_lsn for event in source.changes()}) == 500
    assert {event.ordinal for event in source.changes()} == {0}


def test_new_column_of_the_source_lands_without_a_contract_change(notes: SourceUnderTest) -> None:
    notes.sql("INSERT INTO notes VALUES (1)", "ALTER TABLE notes ADD COLUMN extra numeric(5,2) DEFAULT 1.5")
    notes.sql("INSERT INTO notes VALUES (2)")
    notes.catch_up()
    assert json.loads(notes.changes()[-1].after or "")["extra"] == "1.50"
    described = next(manifest.relations[0] for manifest in reversed(notes.manifests()) if manifest.relations)
    assert described.columns[-1] == "extra" and described.types[-1] == "numeric(5,2)"
    assert described.key_columns == ("id",) and described.replica_identity == "d"


def test_partitioned_table_is_one_table(source: SourceUnderTest) -> None:
    source.sql(
        "CREATE TABLE logs (id int PRIMARY KEY, v text) PARTITION BY RANGE (id)",
        "CREATE TABLE logs_1 PARTITION OF logs FOR VALUES FROM (0) TO (10)",
        "CREATE TABLE logs_2 PARTITION OF logs FOR VALUES FROM (10) TO (20)",
        "INSERT INTO logs VALUES (1, 'a'), (11, 'b')",
    )
    source.tables.append(contract("logs", ("id", "v")))
    source.catch_up()
    source.sql(
        "UPDATE logs SET id = 12 WHERE id = 1",
        "INSERT INTO logs VALUES (2, 'c')",
        "DELETE FROM logs WHERE id = 11",
    )
    source.catch_up()
    assert {event.source_table for event in source.events()} == {"logs"}
    assert folded(source.events(), "logs") == source.rows("logs", ("id", "v"))
