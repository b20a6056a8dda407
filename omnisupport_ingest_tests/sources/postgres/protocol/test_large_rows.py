"""A row too large for the memory of capture is refused by name; any other is captured within a bound."""

from __future__ import annotations

import re
from functools import partial

import pytest

from omnisupport_ingest.sources.postgres.protocol.copy_rows import copy_lines
from omnisupport_ingest.sources.postgres.session.errors import RowTooLarge
from omnisupport_ingest.sources.postgres.session.server import current_wal_lsn
from omnisupport_ingest_tests.sources.postgres.protocol.test_copy_socket import into
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest, contract, folded

LIMIT = 1_000_000
MIB = 1024 * 1024


@pytest.fixture
def notes(source: SourceUnderTest) -> SourceUnderTest:
    """A captured table whose rows may have a megabyte."""
    source.overrides["max_row_bytes"] = LIMIT
    source.sql("CREATE TABLE notes (id int PRIMARY KEY, body text)", "INSERT INTO notes VALUES (1, 'small')")
    source.tables.append(contract("notes", ("id", "body")))
    source.catch_up()
    return source


def large(size: int) -> str:
    return f"repeat('x', {size})"


def right(source: SourceUnderTest) -> bool:
    return folded(source.events(), "notes") == source.rows("notes", ("id", "body"))


@pytest.mark.parametrize("in_progress", [True, False])
@pytest.mark.parametrize(
    "change",
    [
        f"INSERT INTO notes VALUES (2, {large(LIMIT + 20_000)})",
        f"UPDATE notes SET body = {large(LIMIT + 20_000)}",
    ],
    ids=["insert", "update"],
)
def test_change_of_a_row_that_is_too_large_is_refused_and_taken_once_the_setting_allows(
    notes: SourceUnderTest, change: str, in_progress: bool
) -> None:
    notes.overrides |= {"stream_transactions": in_progress, "stream_above_bytes": 65536}
    before = notes.confirmed()
    notes.sql(f"INSERT INTO notes VALUES (9, {large(LIMIT - 1000)})", change)
    for _ in range(2):
        with pytest.raises(RowTooLarge, match=r"A row of public\.notes has 1,0\d\d,\d\d\d bytes") as refused:
            notes.catch_up()
        assert "OMNISUPPORT_MAX_ROW_BYTES" in refused.value.problem and "xxxx" not in str(refused.value)
    assert notes.confirmed() >= before and '["2"]' not in {each.key for each in notes.changes()}
    notes.overrides["max_row_bytes"] = refused.value.size
    notes.sql("INSERT INTO notes VALUES (3, 'behind it')")
    notes.catch_up()
    assert right(notes)


def test_row_that_is_too_large_for_a_snapshot_is_refused_and_read_once_the_setting_allows(
    source: SourceUnderTest,
) -> None:
    source.overrides["max_row_bytes"] = LIMIT
    source.sql("CREATE TABLE notes (id int PRIMARY KEY, body text)")
    source.sql(f"INSERT INTO notes VALUES (1, 'a'), (2, {large(LIMIT + 1)}), (3, {large(LIMIT - 1000)})")
    source.tables.append(contract("notes", ("id", "body")))
    with pytest.raises(RowTooLarge, match=r"A row of public\.notes has 1,000,00\d bytes"):
        source.catch_up()
    source.overrides["max_row_bytes"] = 2 * LIMIT
    source.catch_up()
    assert right(source)


@pytest.mark.parametrize("block_bytes", [100, 5_000, 10**6])
def test_longest_line_is_found_however_lines_come(source: SourceUnderTest, block_bytes: int) -> None:
    sizes = "unnest(ARRAY[10, 3000, 20, 900, 2999]) WITH ORDINALITY w (n, place)"
    rows = f"SELECT repeat('y', n) FROM {sizes} ORDER BY place"
    with source.connected() as connection:
        taken: list[bytes] = []
        read = partial(copy_lines, doing="reading", block_bytes=block_bytes, lines=into(taken))
        read(connection, rows, max_row_bytes=3001)
        assert [len(line) for line in b"".join(taken).split(b"\n")] == [10, 3000, 20, 900, 2999, 0]
    with source.connected() as connection:
        with pytest.raises(RowTooLarge) as refused:
            read(connection, rows, max_row_bytes=2500)
        assert refused.value.size in (3000, 3001)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["stream", "snapshot"])
def test_row_of_100_megabytes_is_captured_within_six_times_its_size(
    source: SourceUnderTest, way: str
) -> None:
    size = 100 * MIB
    source.sql("CREATE TABLE notes (id int PRIMARY KEY, body text)")
    source.sql("ALTER TABLE notes ALTER body SET STORAGE EXTERNAL")
    source.tables.append(contract("notes", ("id", "body")))
    insert = f"INSERT INTO notes VALUES (1, {large(size)})"
    if way == "snapshot":
        source.sql(insert)
        idle = 0
    else:
        source.catch_up()
        idle = peak_of_capture(source)
        source.sql(insert)
    used = peak_of_capture(source)
    (event,) = source.events("c", "r")
    assert event.after is not None and len(event.after) > size
    assert size < used - idle < 6 * size + (200 * MIB if way == "snapshot" else 0), f"{used / size:.1f} times"


def peak_of_capture(source: SourceUnderTest) -> int:
    """The most memory that a process needs that captures up to now, in bytes."""
    # Not getrusage: what it tells of a new program begins with the peak of whoever started it.
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from omnisupport_ingest_tests.sources.postgres.capture_process import main\n"
        "code = main(sys.argv[1:])\n"
        "status = Path('/proc/self/status').read_text()\n"
        "print('peak', status.partition('VmHWM:')[2].split()[0], file=sys.stderr)\n"
        "sys.exit(code)\n"
    )
    process = source.capture_process(until=current_wal_lsn(source.dsn), program=program)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    found = re.search(r"peak (\d+)", errors)
    assert found is not None
    return int(found[1]) * 1024
