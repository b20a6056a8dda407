"""PostgreSQL's own way of reading, by COPY in blocks, lands the batches that a general dialect lands."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg2.extensions import parse_dsn

from omnisupport_ingest.sources.query import postgres
from omnisupport_ingest.sources.query.dialect import DialectReader
from omnisupport_ingest.sources.query.postgres import PostgresReader
from omnisupport_ingest.sources.query.reader import Reader
from omnisupport_ingest_tests.examples import examples
from omnisupport_ingest_tests.sources.query.tickets import Desk, contract

COLUMNS = {
    name: {"type": [kind, "null"], "x-pg-type": pg_type, "description": "Column."}
    for name, kind, pg_type in (
        ("paid", "number", "numeric(12,2)"),
        ("done", "boolean", "boolean"),
        ("due", "string", "date"),
        ("note", "string", "text"),
    )
}
_TIMES = st.datetimes(datetime(2026, 1, 1), datetime(2026, 11, 20)) | st.sampled_from(
    [datetime(2026, 3, 1, 10), datetime(2026, 3, 1, 10, 0, 0, 1)]
)
_TEXTS = st.none() | st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0")
    | st.sampled_from('""\\\\\t\n\r\v\x01\x1f\x7fvnN'),
    max_size=20,
)
_ROWS = st.lists(
    st.tuples(
        _TEXTS,
        st.none() | _TIMES.map(lambda each: each.replace(tzinfo=UTC)),
        st.none() | st.decimals(-(10**9), 10**9, places=2),
        st.none() | st.booleans(),
        st.none() | st.dates(date(1, 1, 1), date(9999, 12, 31)),
        _TEXTS,
    ),
    max_size=12,
)
Row = tuple[str | None, datetime | None, Decimal | None, bool | None, date | None, str | None]


def landed(desk: Desk, reader: Reader) -> tuple[set[str], list[dict[str, Any]]]:
    """The names of the batches of rows, and the rows themselves in order."""
    desk.folder.mkdir(parents=True)
    desk.sync(reader=reader)
    of_rows = [each for each in desk.store.manifests() if each.file and each.file.name == "public.tickets"]
    rows = [
        {name: each[name] for name in ("ordinal", "key", "after", "source_ts", "identity", "window")}
        for each in desk.events()
        if each["op"] == "r"
    ]
    return {each.batch_id for each in of_rows}, sorted(rows, key=lambda row: (row["ordinal"], row["key"]))


@settings(
    max_examples=examples(20), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(rows=_ROWS, page_rows=st.integers(1, 9), block_bytes=st.sampled_from([64, 1 << 20]))
def test_both_ways_land_the_same_batches(
    desk: Desk, tmp_path_factory: pytest.TempPathFactory, rows: list[Row], page_rows: int, block_bytes: int
) -> None:
    folder: Path = tmp_path_factory.mktemp("both")
    desk.run("DROP TABLE tickets")
    desk.run(
        "CREATE TABLE tickets (id bigint PRIMARY KEY, subject text, updated_at timestamptz,"
        " paid numeric(12,2), done boolean, due date, note text)"
    )
    assert desk.connection is not None
    with desk.connection.cursor() as cursor:
        for number, row in enumerate(rows):
            cursor.execute("INSERT INTO tickets VALUES (%s, %s, %s, %s, %s, %s, %s)", (number * 7 % 13, *row))
    table, told = contract(**COLUMNS), parse_dsn(desk.dsn)
    url = f"postgresql+psycopg2://{told['user']}@/{told['dbname']}?host={told['host']}&port={told['port']}"
    found = []
    for name in ("copied", "general"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(postgres, "BLOCK_BYTES", block_bytes)
            reader: Reader = PostgresReader(desk.dsn) if name == "copied" else DialectReader(url)
            at = Desk(desk.connection, desk.dsn, folder / name, table, page_rows)
            found.append(landed(at, reader))
    (copied, copied_rows), (general, general_rows) = found
    assert copied_rows == general_rows and len(copied_rows) == len(rows)
    if block_bytes > 64:
        # In one block the rows of a page are one batch either way.
        assert copied == general
