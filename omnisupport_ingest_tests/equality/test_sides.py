"""Server and lake have the same checksums of the same ranges, whatever the type of key and values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import duckdb
import psycopg2
import pyarrow.parquet as pq
import pytest
from psycopg2.extensions import make_dsn

from omnisupport_ingest.contracts.pii_policies import lake_columns
from omnisupport_ingest.contracts.row_checksum import EVERY_KEY, NO_ROWS, KeySpan, RowVersions
from omnisupport_ingest.equality.bisecting import Remaining, differing
from omnisupport_ingest.read.dimension_ranges import DimensionRanges
from omnisupport_ingest.sources.postgres.session.errors import SourceUnavailable
from omnisupport_ingest.sources.postgres.session.server import server_facts
from omnisupport_ingest.sources.postgres.slot.slot import SlotNotMade
from omnisupport_ingest.sources.postgres.snapshot.source_ranges import SourceRanges, source_at
from omnisupport_ingest_tests.sources.postgres.conftest import source as source
from omnisupport_ingest_tests.sources.postgres.snapshot.test_row_checksum import CONTRACT, ROWS, lake_of
from omnisupport_ingest_tests.sources.postgres.snapshot.test_row_checksum import things as things
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest

AT = "TIMESTAMPTZ '2026-02-01 00:00:00+00'"

CHANGED = "SELECT * REPLACE (CASE id WHEN 9 THEN 'other' ELSE title END AS title) FROM rows WHERE id <> 11"


@contextmanager
def sides(
    things: SourceUnderTest, folder: Path, key: str, change: str = "SELECT * FROM rows"
) -> Iterator[tuple[SourceRanges, DimensionRanges]]:
    """Both sides of the table, as if ``key`` were its key."""
    contract = replace(CONTRACT, key=(key,))
    keyed = f"SELECT * REPLACE (to_json([{key}::VARCHAR])::VARCHAR AS _cdc_key) FROM ({change})"
    lake_of(things, folder, keyed).close()
    with (
        source_at(things.dsn, things.slot, 20.0) as source,
        DimensionRanges(contract, [str(folder / "lake.parquet")], folder) as lake,
    ):
        yield source.table(contract), lake


@pytest.mark.parametrize("key", ["id", "title", "day", "code"])
def test_ranges_of_keys_of_any_type_have_one_checksum_on_both_sides(
    things: SourceUnderTest, tmp_path: Path, key: str
) -> None:
    things.sql(f"DELETE FROM things WHERE {key} IS NULL")
    with sides(things, tmp_path, key) as (source, lake):
        cuts = lake.cuts(EVERY_KEY, 7)
        assert len(cuts) > 4
        theirs, ours = source.sums(cuts, [EVERY_KEY]), lake.sums(cuts, [EVERY_KEY])
        assert theirs == ours and sum(each.rows for each in ours) >= ROWS - 1
        some = [KeySpan(None, cuts[1]), KeySpan(cuts[2], cuts[3]), KeySpan(cuts[-1], None)]
        assert source.sums(cuts, some) == lake.sums(cuts, some)
        assert source.numbers(some) == lake.numbers(some)
        found = source.numbers(some)
        assert source.numbers_of(found) == found


def test_what_differs_is_named_and_rows_that_are_equal_value_by_value_are_told(
    things: SourceUnderTest, tmp_path: Path
) -> None:
    with sides(things, tmp_path, "id", CHANGED) as (source, lake):
        found = differing(source, lake, EVERY_KEY, lake.cuts(EVERY_KEY, 5))
        assert (found.rows, found.keys, found.more) == (ROWS, (("11",), ("9",)), False)
        (file,) = source.write_rows([("9",), ("10",), ("11",), ("-3",)], tmp_path)
        assert lake.same_rows(file) == {("10",), ("-3",)}


def test_no_value_that_a_policy_hides_is_fetched_to_compare_rows(
    things: SourceUnderTest, tmp_path: Path
) -> None:
    hidden = {"title": "drop", "doc": "hash", "tags": "drop", "day": "tokenize"}
    at_source = tuple(
        replace(each, pii=hidden.get(each.name, "keep"), personal=each.name in hidden)
        for each in CONTRACT.columns
    )
    contract = replace(CONTRACT, columns=lake_columns(at_source), unprotected=at_source)
    lake_of(things, tmp_path, CHANGED).close()
    with (
        source_at(things.dsn, things.slot, 20.0) as source,
        DimensionRanges(contract, [str(tmp_path / "lake.parquet")], tmp_path) as lake,
    ):
        (file,) = source.table(contract).write_rows([("9",), ("10",), ("11",)], tmp_path)
        assert lake.same_rows(file) == {("9",), ("10",)}, "of 9 only the title is another"
    names = {name.removeprefix("json:") for name in pq.read_schema(file).names}
    assert names == {each.name for each in CONTRACT.columns} - hidden.keys()


def test_rows_that_are_left_out_or_not_known_for_certain_are_in_no_checksum(
    things: SourceUnderTest, tmp_path: Path
) -> None:
    unknown = "SELECT * REPLACE (CASE id WHEN 9 THEN ['title'] ELSE [] END AS _cdc_unresolved) FROM rows"
    with sides(things, tmp_path, "id", unknown) as (source, lake):
        lake.leave_out([("10",), ("12",)])
        assert lake.unresolved_keys(5) == [("9",)]
        (ours,) = lake.sums([], [EVERY_KEY])
        (theirs,) = source.sums([], [EVERY_KEY])
        away = source.numbers_of([("9",), ("10",), ("12",), ("no number",)])
        assert len(away) == 3 and theirs.without(list(away.values())) == ours


def test_unresolved_rows_that_the_source_has_deleted_wait_for_nobody(
    things: SourceUnderTest, tmp_path: Path
) -> None:
    things.sql("UPDATE things SET gone_at = '2026-02-01Z' WHERE id = 12", "DELETE FROM things WHERE id = 9")
    dead = (
        "SELECT * REPLACE (id IN (9, 12) AS _cdc_is_deleted, CASE WHEN id IN (9, 12) THEN ['title'] ELSE []"
        f" END AS _cdc_unresolved, CASE WHEN id IN (9, 12) THEN {AT} END AS _cdc_deleted_at,"
        " CASE id WHEN 9 THEN 'd' ELSE 'u' END AS _cdc_op) FROM (SELECT * FROM rows UNION ALL"
        " SELECT * REPLACE (9 AS id, '[\"9\"]' AS _cdc_key) FROM rows WHERE id = 10)"
    )
    with sides(things, tmp_path, "id", dead) as (_, lake):
        assert lake.unresolved_keys(5) == [("12",)], "a row that is only marked is at the source"


def test_softly_deleted_rows_are_compared_where_the_contract_purges(
    things: SourceUnderTest, tmp_path: Path
) -> None:
    things.sql("UPDATE things SET gone_at = '2026-02-01Z' WHERE id IN (8, 12)")
    marked = (
        "SELECT * REPLACE (id IN (8, 12) AS _cdc_is_deleted, CASE id WHEN 8 THEN 'other' ELSE title END"
        f" AS title, CASE WHEN id IN (8, 12) THEN {AT} END AS _cdc_deleted_at, 'u' AS _cdc_op)"
        " FROM rows WHERE id <> 12"
    )
    lake_of(things, tmp_path, marked).close()
    purges = replace(CONTRACT, purge_deleted_after=timedelta(days=30))
    with (
        source_at(things.dsn, things.slot, 20.0) as at,
        DimensionRanges(purges, [str(tmp_path / "lake.parquet")], tmp_path) as lake,
    ):
        found = differing(at.table(purges), lake, EVERY_KEY, [])
    assert (found.rows, found.keys) == (ROWS, (("12",), ("8",)))


def test_a_transaction_that_stays_open_ends_the_wait_for_an_lsn(things: SourceUnderTest) -> None:
    with things.connected() as writer, writer.cursor() as cursor:
        cursor.execute("BEGIN; UPDATE things SET title = 'open' WHERE id = 1")
        with pytest.raises(SlotNotMade), source_at(things.dsn, things.slot, 0.5):
            pass
        cursor.execute("ROLLBACK")


LARGE = (("9223372036854775807",), ("-9223372036854775808",))


def test_rows_with_keys_of_any_size_can_be_left_out(things: SourceUnderTest, tmp_path: Path) -> None:
    things.sql(*(f"UPDATE things SET id = {key} WHERE id = {row}" for row, (key,) in enumerate(LARGE, 1)))
    with sides(things, tmp_path, "id") as (source, lake):
        lake.leave_out(LARGE)
        away = source.numbers_of([*LARGE, ("9223372036854775808",), ("9" * 40,)])
        assert away.keys() == set(LARGE)
        (file,) = source.write_rows(LARGE, tmp_path)
        assert lake.same_rows(file) == set(LARGE)
        assert differing(Remaining(source, away, True), lake, EVERY_KEY, []).spans == ()


@pytest.mark.parametrize(
    ("deleted_at", "op"),
    [
        pytest.param(AT, "d", id="by a delete in the transaction that marked it"),
        pytest.param(f"{AT} + INTERVAL 1 HOUR", "u", id="with its table"),
    ],
)
def test_a_row_that_was_marked_as_deleted_and_is_gone_since_is_at_neither_side(
    things: SourceUnderTest, tmp_path: Path, deleted_at: str, op: str
) -> None:
    things.sql("UPDATE things SET gone_at = '2026-02-01Z' WHERE id IN (8, 12)")
    marked = (
        f"SELECT * REPLACE (id IN (8, 12) AS _cdc_is_deleted, CASE id WHEN 12 THEN {deleted_at}"
        f" WHEN 8 THEN {AT} END AS _cdc_deleted_at, CASE id WHEN 12 THEN '{op}' ELSE 'u' END AS _cdc_op)"
        " FROM rows"
    )
    with sides(things, tmp_path, "id", marked) as (_, lake):
        (ours,) = lake.sums([], [EVERY_KEY])
    things.sql("DELETE FROM things WHERE id = 12")
    with source_at(things.dsn, things.slot, 20.0) as source:
        assert source.table(CONTRACT).sums([], [EVERY_KEY]) == [ours] and ours.rows == ROWS - 1


def test_a_table_that_was_read_keeps_no_lock_and_its_error_is_not_the_next_ones(
    things: SourceUnderTest,
) -> None:
    broken = replace(CONTRACT, columns=(*CONTRACT.columns[:1], replace(CONTRACT.columns[1], name="nowhere")))
    locks = "SELECT count(*) FROM pg_locks WHERE relation = 'things'::regclass"
    with source_at(things.dsn, things.slot, 20.0) as source:
        for contract in (broken, CONTRACT):
            with suppress(psycopg2.errors.UndefinedColumn), source.savepoint():
                (found,) = source.table(contract).sums([], [EVERY_KEY])
        assert found.rows == ROWS and things.query(locks) == [(0,)]
        # Still the same moment.
        things.sql("DELETE FROM things")
        with source.savepoint():
            assert source.table(CONTRACT).sums([], [EVERY_KEY]) == [found]


def test_a_table_that_stays_locked_is_told_and_the_next_one_is_read(things: SourceUnderTest) -> None:
    things.sql("CREATE TABLE held (LIKE things INCLUDING ALL)")
    held = replace(CONTRACT, table="held")
    with source_at(things.dsn, things.slot, 20.0) as source, things.connected() as other:
        with source.connection.cursor() as ours, other.cursor() as cursor:
            ours.execute("SET LOCAL lock_timeout = '200ms'")
            cursor.execute("BEGIN; LOCK TABLE held IN ACCESS EXCLUSIVE MODE")
        with pytest.raises(SourceUnavailable) as raised, source.savepoint():
            source.table(held).sums([], [EVERY_KEY])
        assert isinstance(raised.value.__cause__, psycopg2.errors.LockNotAvailable)
        with source.savepoint():
            assert source.table(CONTRACT).sums([], [EVERY_KEY])[0].rows == ROWS


def test_files_are_known_by_the_ranges_that_they_hold_and_by_what_they_are_now(
    things: SourceUnderTest, tmp_path: Path
) -> None:
    lake_of(things, tmp_path).close()
    whole, files = tmp_path / "lake.parquet", [str(tmp_path / f"{number}.parquet") for number in range(3)]
    parts = ["id < 0", "id BETWEEN 0 AND 19", "id >= 10"]
    with duckdb.connect() as connection:
        for file, part in zip(files, parts, strict=True):
            connection.execute(f"COPY (FROM '{whole}' WHERE {part}) TO '{file}' (FORMAT parquet)")
    with DimensionRanges(CONTRACT, files, tmp_path) as lake:
        assert lake.files_between(["0", "10", "100"]) == [{0}, {1}, {1, 2}, set()]
        names = [lake.names_of({number}) for number in range(3)]
        assert len({*names, lake.names_of({0, 1}), lake.names_of(())}) == 5
        Path(files[1]).write_bytes(Path(files[1]).read_bytes())
        assert [lake.names_of({number}) == name for number, name in enumerate(names)] == [True, False, True]
        (every,) = lake.sums([], [EVERY_KEY])
        lake.read_only({1})
        (some,) = lake.sums([], [EVERY_KEY])
        assert (every.rows, some.rows) == (19 + 20 + 31, 20)
        lake.read_only(())
        assert lake.sums([], [EVERY_KEY]) == [NO_ROWS]
    with DimensionRanges(CONTRACT, [], tmp_path) as nothing:
        assert nothing.files_between(["0"]) == [set(), set()]


def versions_of(things: SourceUnderTest, *cuts: str) -> list[RowVersions] | None:
    with source_at(things.dsn, things.slot, 20.0) as source:
        return source.table(CONTRACT).versions(cuts, EVERY_KEY)


def test_row_versions_change_with_any_row_of_their_range_and_with_nothing_else(
    things: SourceUnderTest,
) -> None:
    cuts = ("-10", "10")
    before = versions_of(things, *cuts)
    assert before is not None and [each.rows for each in before] == [9, 20, ROWS - 29]
    things.sql("VACUUM (FULL, FREEZE) things", "ANALYZE things", "SELECT * FROM things FOR UPDATE")
    assert versions_of(things, *cuts) == before, "no row has changed"
    things.sql("UPDATE things SET title = title WHERE id = 0")
    updated = versions_of(things, *cuts)
    assert updated is not None and [one == other for one, other in zip(before, updated, strict=True)] == [
        True,
        False,
        True,
    ]
    things.transaction("DELETE FROM things WHERE id = 11", "INSERT INTO things (id) VALUES (11)")
    renewed = versions_of(things, *cuts)
    assert renewed is not None and renewed[:2] == updated[:2] and renewed[2] != updated[2]
    assert renewed[2].rows == updated[2].rows


def test_a_partition_in_the_place_of_another_that_one_transaction_filled_has_other_row_versions(
    things: SourceUnderTest,
) -> None:
    things.transaction(
        "CREATE TABLE parted (id bigint, title text) PARTITION BY RANGE (id)",
        "CREATE TABLE old PARTITION OF parted FOR VALUES FROM (0) TO (10)",
        "CREATE TABLE new (id bigint, title text)",
        "INSERT INTO old SELECT n, 'old' FROM generate_series(1, 5) n",
        "INSERT INTO new SELECT n, 'new' FROM generate_series(1, 5) n",
    )
    seen = []
    for change in (
        "SELECT 1",
        "ALTER TABLE parted DETACH PARTITION old",
        "ALTER TABLE parted ATTACH PARTITION new FOR VALUES FROM (0) TO (10)",
    ):
        things.sql(change)
        with source_at(things.dsn, things.slot, 20.0) as source:
            table = SourceRanges(
                source.connection, replace(CONTRACT, table="parted"), "parted", "id", "bigint"
            )
            seen.append(table.versions((), EVERY_KEY))
    assert [each and each[0].rows for each in seen] == [5, 0, 5]
    assert seen[0] != seen[2]


def test_a_range_within_one_open_transaction_of_the_source_has_the_versions_of_its_lsn(
    things: SourceUnderTest,
) -> None:
    with source_at(things.dsn, things.slot, 20.0) as source:
        table = source.table(CONTRACT)
        before = table.versions((), EVERY_KEY)
        things.sql("UPDATE things SET title = 'later'")
        assert table.versions((), EVERY_KEY) == before
    assert versions_of(things) != before


def test_a_role_that_may_read_single_columns_alone_is_told_no_row_versions(things: SourceUnderTest) -> None:
    role = f"{things.slot}_narrow"
    listed = ", ".join(column.name for column in CONTRACT.columns)
    things.sql(
        f"CREATE ROLE {role} LOGIN REPLICATION",
        f"GRANT USAGE ON SCHEMA public TO {role}",
        f"GRANT SELECT ({listed}) ON things TO {role}",
    )
    try:
        with source_at(make_dsn(things.dsn, user=role), things.slot, 20.0) as source:
            table = source.table(CONTRACT)
            assert table.versions((), EVERY_KEY) is None
            assert table.sums([], [EVERY_KEY])[0].rows == ROWS
    finally:
        things.sql(f"DROP OWNED BY {role}", f"DROP ROLE {role}")


def test_what_a_value_may_change_by_without_its_row_is_in_the_definition(things: SourceUnderTest) -> None:
    things.sql("CREATE TYPE mood AS ENUM ('glad', 'sad')", "ALTER TABLE things ADD COLUMN feels mood")
    seen = []
    for change in (
        "SELECT 1",
        "ALTER TYPE mood RENAME VALUE 'sad' TO 'sorry'",
        "ALTER TABLE things DROP COLUMN code",
        "ALTER TABLE things ADD COLUMN code varchar(5) DEFAULT 'x'",
    ):
        things.sql(change)
        with source_at(things.dsn, things.slot, 20.0) as source:
            seen.append(SourceRanges(source.connection, CONTRACT, "things", "id", "bigint").definition())
    assert len(set(seen)) == 4
    timeline = f"{server_facts(things.dsn).timeline:08X} "
    assert all(each.startswith(timeline) for each in seen), "after a failover nothing is known"


def test_many_ranges_apart_have_the_checksums_that_each_has_alone(things: SourceUnderTest) -> None:
    with source_at(things.dsn, things.slot, 20.0) as source:
        table = source.table(CONTRACT)
        for first in (None, "-19"):
            starts = range(-17, ROWS - 20, 3)
            spans = [KeySpan(first, "-18"), *(KeySpan(str(n), str(n + 2)) for n in starts[:-1])]
            spans.append(KeySpan(str(starts[-1]), None))
            assert len(spans) > 16
            cuts = [bound for span in spans for bound in span if bound is not None]
            found = [each for each in table.sums(cuts, spans) if each.rows]
            assert found == [table.sums([], [span])[0] for span in spans]
