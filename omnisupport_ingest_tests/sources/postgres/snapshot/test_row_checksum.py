"""Server and lake have one checksum for rows that are the same, and another one for any difference."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from random import Random

import duckdb
import pytest

from omnisupport_ingest.contracts.model import Column, TableContract
from omnisupport_ingest.contracts.row_checksum import KeySpan, RowChecksum, has_checksum
from omnisupport_ingest.read.dimension_ranges import DimensionRanges
from omnisupport_ingest.read.dimension_rows import DimensionRows
from omnisupport_ingest.sources.postgres.session.connection import connect
from omnisupport_ingest.sources.postgres.snapshot.comparison_rows import server_checksum
from omnisupport_ingest.sources.postgres.snapshot.source_ranges import source_at
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest, contract

TYPES = {
    "id": "bigint",
    "flag": "boolean",
    "small": "smallint",
    "title": "text",
    "code": "varchar(5)",
    "padded": "char(6)",
    "amount": "numeric(8,2)",
    "free": "numeric",
    "day": "date",
    "at": "timestamptz",
    "plain": "timestamp",
    "raw": "bytea",
    "tags": "text[]",
    "numbers": "bigint[]",
    "doc": "jsonb",
    "gone_at": "timestamptz",
}
CONTRACT: TableContract = replace(
    contract("things", ()),
    columns=tuple(Column(name, of_type) for name, of_type in TYPES.items()),
    soft_delete_column="gone_at",
)
LAKE_TYPES = {
    "boolean": "BOOLEAN",
    "smallint": "SMALLINT",
    "bigint": "BIGINT",
    "numeric(8,2)": "DECIMAL(8,2)",
    "date": "DATE",
    "timestamptz": "TIMESTAMPTZ",
    "timestamp": "TIMESTAMPTZ",
    "bytea": "BLOB",
    "text[]": "VARCHAR[]",
    "bigint[]": "BIGINT[]",
}
ROWS = 60


@pytest.fixture
def things(source: SourceUnderTest) -> SourceUnderTest:
    """A table with rows of every kind of value, NULLs among them."""
    listed = ", ".join(f"{name} {of_type}" for name, of_type in TYPES.items())
    source.sql(
        f"CREATE TABLE things ({listed}, PRIMARY KEY (id))",
        "INSERT INTO things SELECT n - 20, n % 2 = 0, n * 300, E'tïtle \U0001f600 ''\"\\\\\\n' || n, n::text,"
        " n::text, n * 1.5 - 40, n / 7.0, date '2026-01-01' + n,"
        " timestamptz '2026-01-01Z' + n * interval '1.0005 s',"
        " timestamp '2026-01-01' + n * interval '36 hours', decode(md5(n::text), 'hex'),"
        " ARRAY[n::text, NULL, 'x,\"y'], ARRAY[n, -n], jsonb_build_object('b', n, 'a', 'z'), NULL"
        f" FROM generate_series(1, {ROWS}) n",
    )
    for number, name in enumerate(list(TYPES)[1:-1]):
        source.sql(f"UPDATE things SET {name} = NULL WHERE id = {number}")
    return source


def lake_of(source: SourceUnderTest, folder: Path, change: str = "SELECT * FROM rows") -> DimensionRows:
    """A lake with the rows of the source, typed, after ``change``."""
    shown = [
        f"{name}::text" if "[]" not in of_type else f"to_json({name})::text"
        for name, of_type in TYPES.items()
    ]
    rows = source.query(f"SELECT {', '.join(shown)} FROM things ORDER BY id")
    columns = []
    for number, (name, of_type) in enumerate(TYPES.items()):
        text = f"column{number}"
        value = {
            "bytea": f"unhex(substr({text}, 3))",
            "timestamp": f"CAST({text} || '+00' AS TIMESTAMPTZ)",
            "text[]": f"CAST({text}::JSON AS VARCHAR[])",
            "bigint[]": f"CAST({text}::JSON AS BIGINT[])",
            "char(6)": f"rpad({text}, 6, ' ')",
        }.get(of_type, f"CAST({text} AS {LAKE_TYPES.get(of_type, 'VARCHAR')})")
        columns.append(f"{value} AS {name}")
    listed = ", ".join(f"column{number} VARCHAR" for number in range(len(TYPES)))
    file = folder / "lake.parquet"
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        connection.execute(f"CREATE TABLE shown ({listed})")
        connection.executemany(f"INSERT INTO shown VALUES ({', '.join('?' * len(TYPES))})", rows)
        connection.execute(
            f"CREATE TABLE rows AS SELECT {', '.join(columns)}, '[\"' || column0 || '\"]' AS _cdc_key,"
            " 'c' AS _cdc_op, false AS _cdc_is_deleted, NULL::TIMESTAMPTZ AS _cdc_deleted_at,"
            " TIMESTAMPTZ '2026-01-01 00:00:00+00' AS _cdc_updated_at, []::VARCHAR[] AS _cdc_unresolved,"
            " MAP {}::MAP(VARCHAR, VARCHAR) AS _cdc_exact FROM shown"
        )
        connection.execute(f"COPY ({change}) TO '{file}' (FORMAT parquet)")
    return DimensionRows(CONTRACT, [str(file)], folder)


def checksum(source: SourceUnderTest, where: str = "true") -> RowChecksum:
    with closing(connect(source.dsn)) as connection:
        return server_checksum(connection, CONTRACT, f"things WHERE {where}")


def has(
    rows: DimensionRows, found: RowChecksum, start: Sequence[str] | None, end: Sequence[str] | None
) -> bool:
    return rows.has(found, ("id",), start, end)


def test_rows_of_every_type_that_are_the_same_have_one_checksum(
    things: SourceUnderTest, tmp_path: Path
) -> None:
    rows = lake_of(things, tmp_path)
    assert checksum(things).rows == ROWS and has(rows, checksum(things), None, None)
    assert rows.unmet() == []


def test_any_difference_in_any_column_is_another_checksum(things: SourceUnderTest, tmp_path: Path) -> None:
    rows, known = lake_of(things, tmp_path), {checksum(things)}
    others = {
        "flag": "NOT flag",
        "tags": "tags || NULL::text",
        "numbers": "numbers || 1::bigint",
        "doc": "doc || '{\"a\": null}'",
        "raw": "raw || '\\x00'",
    }
    steps = {"small": "1", "amount": "0.01", "free": "0", "day": "1", "at": "'1 us'", "plain": "'1 us'"}
    for name, of_type in list(TYPES.items())[1:-1]:
        other = others.get(name, f"{name} + {steps[name]}" if name in steps else f"left({name}, -1)")
        if of_type == "numeric":
            other = "(free::text || '0')::numeric"
        for value in (other, "NULL"):
            things.sql(f"UPDATE things SET {name} = {value} WHERE id = 30")
            found = checksum(things)
            assert found not in known and not has(rows, found, None, None), (name, value)
            known.add(found)
    things.sql("DELETE FROM things WHERE id = 7")
    assert not has(rows, checksum(things), None, None)


def test_values_that_change_places_are_another_checksum(things: SourceUnderTest) -> None:
    things.sql("UPDATE things SET title = '1', code = '23', padded = NULL WHERE id = 5")
    one = checksum(things, "id = 5")
    things.sql("UPDATE things SET title = '12', code = '3' WHERE id = 5")
    assert checksum(things, "id = 5") != one


@pytest.mark.parametrize(
    "change",
    [
        pytest.param("SELECT * REPLACE (id = 9 AS _cdc_is_deleted) FROM rows", id="deleted in the lake"),
        pytest.param("SELECT * FROM rows WHERE id <> 9", id="missing in the lake"),
        pytest.param("SELECT * FROM rows UNION ALL SELECT * FROM rows WHERE id = 9", id="twice in the lake"),
        pytest.param(
            "SELECT * REPLACE (CASE id WHEN 9 THEN ['title'] ELSE [] END AS _cdc_unresolved) FROM rows",
            id="not known for certain",
        ),
        pytest.param(
            "SELECT * REPLACE (CASE id WHEN 9 THEN MAP {'day': 'infinity'} ELSE MAP {} END AS _cdc_exact)"
            " FROM rows",
            id="another exact text",
        ),
    ],
)
def test_row_that_is_not_surely_the_same_in_the_lake_is_told(
    things: SourceUnderTest, tmp_path: Path, change: str
) -> None:
    rows = lake_of(things, tmp_path, change)
    assert not has(rows, checksum(things), None, None)
    assert has(rows, checksum(things, "id > 9"), ["9"], None)


def test_row_that_is_marked_as_deleted_is_still_there(things: SourceUnderTest, tmp_path: Path) -> None:
    things.sql("UPDATE things SET gone_at = '2026-02-01Z' WHERE id = 9")
    marked = "gone_at IS NOT NULL AS _cdc_is_deleted, gone_at AS _cdc_deleted_at"
    rows = lake_of(things, tmp_path, f"SELECT * REPLACE ({marked}) FROM rows")
    assert has(rows, checksum(things), None, None)


def test_value_that_its_type_cannot_hold_is_compared_by_its_exact_text(
    things: SourceUnderTest, tmp_path: Path
) -> None:
    exact = "SELECT * REPLACE (CASE id WHEN 9 THEN NULL ELSE day END AS day,"
    exact += " CASE id WHEN 9 THEN MAP {'day': 'infinity'} ELSE MAP {} END AS _cdc_exact) FROM rows"
    rows = lake_of(things, tmp_path, exact)
    things.sql("UPDATE things SET day = 'infinity' WHERE id = 9")
    assert has(rows, checksum(things), None, None)


def test_ranges_of_keys_are_the_same_rows_on_both_sides_and_count_as_met(
    things: SourceUnderTest, tmp_path: Path
) -> None:
    rng, rows = Random(1), lake_of(things, tmp_path)
    for _ in range(20):
        first, last = sorted(rng.sample(range(-25, 45), 2))
        inside = checksum(things, f"id > {first} AND id <= {last}")
        assert has(rows, inside, [str(first)], [str(last)])
        assert not has(rows, inside, [str(first)], [str(last + 100)]) or last >= ROWS - 20
    (tmp_path / "again").mkdir()
    again = DimensionRows(CONTRACT, [str(tmp_path / "lake.parquet")], tmp_path / "again")
    assert has(again, checksum(things, "id <= 0"), None, ["0"])
    assert len(again.unmet()) == ROWS - 20


def test_arrays_of_json_have_one_checksum_and_are_equal_value_by_value(
    source: SourceUnderTest, tmp_path: Path
) -> None:
    source.sql(
        "CREATE TABLE docs (id bigint PRIMARY KEY, one jsonb[], other json[], padded char(3)[])",
        "INSERT INTO docs VALUES (1, ARRAY['{\"a\": 1}', '\"x\"', NULL]::jsonb[],"
        " ARRAY['{\"a\" :1}']::json[], '{a}'),"
        " (2, ARRAY['null', '[1, 2]', '7']::jsonb[], '{}', '{abc,NULL}')",
    )
    types = {"id": "bigint", "one": "jsonb[]", "other": "json[]", "padded": "char(3)[]"}
    docs = replace(contract("docs", ()), columns=tuple(Column(*each) for each in types.items()))
    file = tmp_path / "docs.parquet"
    with duckdb.connect() as connection:
        connection.execute(
            "COPY (SELECT *, false AS _cdc_is_deleted, []::VARCHAR[] AS _cdc_unresolved,"
            " MAP {}::MAP(VARCHAR, VARCHAR) AS _cdc_exact FROM (VALUES"
            " (1::BIGINT, ['{\"a\": 1}', '\"x\"', NULL], ['{\"a\" :1}'], ['a  '], '[\"1\"]'),"
            " (2, ['null', '[1, 2]', '7'], [], ['abc', NULL], '[\"2\"]'))"
            f" v(id, one, other, padded, _cdc_key)) TO '{file}' (FORMAT parquet)"
        )
    with (
        source_at(source.dsn, source.slot, 20.0) as at,
        DimensionRanges(docs, [str(file)], tmp_path) as lake,
    ):
        rows = at.table(docs)
        assert rows.numbers([KeySpan("1", None)]) == lake.numbers([KeySpan("1", None)])
        (written,) = rows.write_rows([("1",), ("2",)], tmp_path)
        assert lake.same_rows(written) == {("1",), ("2",)}


def test_types_that_hold_those_of_the_source_have_one_checksum(
    source: SourceUnderTest, tmp_path: Path
) -> None:
    source.sql(
        "CREATE TABLE wide (id integer PRIMARY KEY, amount integer, price numeric(6,1), moment timestamp,"
        " plain timestamptz, numbers integer[], total bigint, rate numeric)",
        "INSERT INTO wide VALUES"
        " (1, 5, 1.5, '2026-01-01 00:00:00.5', '2026-01-01 00:00:00.5+00', '{1,NULL}', 7, 2.500),"
        " (2, NULL, 'NaN', NULL, NULL, NULL, 123456789012, 0.125)",
    )
    types = {"id": "bigint", "amount": "numeric(14,2)", "price": "numeric(8,3)", "moment": "timestamptz"}
    # Not every value fits into the last two: the second row has them as exact texts.
    types |= {"plain": "timestamp", "numbers": "text[]", "total": "numeric(12,2)", "rate": "numeric(12,2)"}
    wide = replace(contract("wide", ()), columns=tuple(Column(*each) for each in types.items()))
    file = tmp_path / "wide.parquet"
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        noted = "TIMESTAMPTZ '2026-01-01 00:00:00.5+00'"
        connection.execute(
            "COPY (SELECT *, false AS _cdc_is_deleted, []::VARCHAR[] AS _cdc_unresolved FROM (VALUES"
            f" (1::BIGINT, 5::DECIMAL(14,2), 1.5::DECIMAL(8,3), {noted}, {noted}, ['1', NULL],"
            " 7::DECIMAL(12,2), 2.5::DECIMAL(12,2), MAP {}::MAP(VARCHAR, VARCHAR), '[\"1\"]'),"
            " (2, NULL, NULL, NULL, NULL, NULL, NULL, NULL,"
            " MAP {'price': 'NaN', 'total': '123456789012', 'rate': '0.125'}, '[\"2\"]'))"
            f" v(id, amount, price, moment, plain, numbers, total, rate, _cdc_exact, _cdc_key))"
            f" TO '{file}' (FORMAT parquet)"
        )
    with (
        source_at(source.dsn, source.slot, 20.0) as at,
        DimensionRanges(wide, [str(file)], tmp_path) as lake,
    ):
        rows = at.table(wide)
        assert rows.numbers([KeySpan("1", None)]) == lake.numbers([KeySpan("1", None)])
        (written,) = rows.write_rows([("1",), ("2",)], tmp_path)
        assert lake.same_rows(written) == {("1",), ("2",)}


def test_table_with_floats_has_none(things: SourceUnderTest) -> None:
    assert has_checksum(CONTRACT)
    floats = replace(CONTRACT, columns=(*CONTRACT.columns, Column("ratio", "double precision")))
    assert not has_checksum(floats)


def test_values_that_the_lake_would_write_otherwise_have_one_checksum_all_the_same(
    things: SourceUnderTest, tmp_path: Path
) -> None:
    # A share without room for a digit before its point, arrays that the typed column cannot hold.
    things.sql(
        "CREATE DOMAIN whole AS bigint",
        "CREATE TABLE odd (id whole PRIMARY KEY, share numeric(4,4), numbers bigint[], tags text[])",
        "INSERT INTO odd VALUES (1, 0.25, '{1,NULL}', '{}'), (2, -0.5, '{{1,2},{3,4}}', '[0:1]={a,b}'),"
        " (3, 0, NULL, '{a}')",
    )
    types = {"id": "bigint", "share": "numeric(4,4)", "numbers": "bigint[]", "tags": "text[]"}
    columns = tuple(Column(name, of_type) for name, of_type in types.items())
    odd = replace(contract("odd", ()), columns=columns)
    file = tmp_path / "odd.parquet"
    with duckdb.connect() as connection:
        connection.execute(
            "CREATE TABLE rows AS SELECT * FROM (VALUES"
            " (1::BIGINT, 0.25::DECIMAL(4,4), [1, NULL]::BIGINT[], []::VARCHAR[],"
            "  MAP {}::MAP(VARCHAR, VARCHAR), '[\"1\"]'),"
            " (2, -0.5, NULL, NULL, MAP {'numbers': '{{1,2},{3,4}}', 'tags': '[0:1]={a,b}'}, '[\"2\"]'),"
            " (3, 0, NULL, ['a'], MAP {}, '[\"3\"]')) v(id, share, numbers, tags, _cdc_exact, _cdc_key)"
        )
        connection.execute(
            f"COPY (SELECT *, false AS _cdc_is_deleted, []::VARCHAR[] AS _cdc_unresolved FROM rows)"
            f" TO '{file}' (FORMAT parquet)"
        )
    with (
        source_at(things.dsn, things.slot, 20.0) as source,
        DimensionRanges(odd, [str(file)], tmp_path) as lake,
    ):
        theirs, ours = source.table(odd), lake
        every = [KeySpan("1", None)]
        assert theirs.sums(["2", "3"], every) == ours.sums(["2", "3"], every)
        assert theirs.numbers(every) == ours.numbers(every) and len(ours.numbers(every)) == 3
