"""A table that cannot be followed is left out, the others go on, and its repair brings it back exact."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import replace

import pytest
from psycopg2.extensions import make_dsn

from omnisupport_ingest.contracts.model import Column
from omnisupport_ingest.landing.lost_changes import LostChanges
from omnisupport_ingest.landing.manifest import Manifest
from omnisupport_ingest.settings import SnapshotMode
from omnisupport_ingest.sources.postgres.capture import added_tables
from omnisupport_ingest.sources.postgres.capture.parked import ParkedTables
from omnisupport_ingest.sources.postgres.capture.status import source_status
from omnisupport_ingest.sources.postgres.session.connection import connect
from omnisupport_ingest.sources.postgres.session.errors import PreflightFailed, TableMissedChanges
from omnisupport_ingest.sources.postgres.snapshot.requests import SnapshotRequests
from omnisupport_ingest.sources.postgres.stream import follower
from omnisupport_ingest_tests.sources.postgres.snapshot_facts import capture, complete, following
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest, contract, folded
from omnisupport_ingest_tests.waiting import until

COLUMNS = ("id", "v")
NAMES = ("tickets", "agents", "orders")


def make_three(source: SourceUnderTest) -> None:
    for name in NAMES:
        source.sql(f"CREATE TABLE {name} (id int PRIMARY KEY, v text NOT NULL)")
        source.sql(f"INSERT INTO {name} VALUES (1, 'one'), (2, 'two'), (3, 'three')")
        source.tables.append(contract(name, COLUMNS))


@pytest.fixture
def three(source: SourceUnderTest) -> SourceUnderTest:
    """Three captured tables."""
    make_three(source)
    source.catch_up()
    source.sql("UPDATE tickets SET v = 'seen' WHERE id = 3")
    source.catch_up()
    return source


def parked(source: SourceUnderTest) -> set[str]:
    return set(ParkedTables(source.store.folder, 1).all())


def same(source: SourceUnderTest, *names: str) -> bool:
    return all(
        folded([each for each in source.events() if each.source_table == name], name)
        == source.rows(name, COLUMNS)
        for name in names
    )


def written(source: SourceUnderTest, what: str) -> None:
    source.sql(*(f"UPDATE {name} SET v = '{what} ' || id" for name in NAMES))


OTHER_IDENTITY = (
    "CREATE UNIQUE INDEX by_v ON tickets (v)",
    "ALTER TABLE tickets REPLICA IDENTITY USING INDEX by_v",
    "DELETE FROM tickets WHERE id = 1",
)
IDENTITY_BACK = ("ALTER TABLE tickets REPLICA IDENTITY DEFAULT",)

STORIES = {
    "replica identity": (OTHER_IDENTITY, IDENTITY_BACK),
    "replica identity for a time": ((*OTHER_IDENTITY, *IDENTITY_BACK), ()),
    "table gone": (
        ("ALTER TABLE tickets RENAME TO elsewhere", "UPDATE elsewhere SET v = 'unseen'"),
        ("ALTER TABLE elsewhere RENAME TO tickets",),
    ),
    "deferrable": (
        (
            "ALTER TABLE tickets DROP CONSTRAINT tickets_pkey, ADD PRIMARY KEY (id) DEFERRABLE",
            "INSERT INTO tickets VALUES (8, 'unseen')",
        ),
        ("ALTER TABLE tickets DROP CONSTRAINT tickets_pkey, ADD PRIMARY KEY (id)",),
    ),
}


@pytest.mark.parametrize(("breaks", "mends"), STORIES.values(), ids=STORIES.keys())
def test_table_that_cannot_be_followed_is_left_out_by_name_and_comes_back_exact(
    three: SourceUnderTest, breaks: tuple[str, ...], mends: tuple[str, ...]
) -> None:
    three.sql(*breaks, "UPDATE agents SET v = 'beside'", "UPDATE orders SET v = 'beside'")
    for round_ in range(2):
        with pytest.raises((PreflightFailed, TableMissedChanges), match="tickets") as told:
            three.catch_up()
        assert "agents" not in str(told.value), "one table alone is to blame"
        assert parked(three) == {"tickets"}
        assert same(three, "agents", "orders"), "the others have gone on"
        assert complete(three, "agents") and not complete(three, "tickets")
        warnings = source_status(three.dsn, three.settings, three.home, three.tables).warnings
        assert any("tickets is left out" in each.problem for each in warnings), warnings
        assert any("source snapshot tickets" in each.fix for each in warnings)
        three.sql(f"UPDATE agents SET v = 'round {round_}'")
    three.sql(*mends)
    with pytest.raises(TableMissedChanges, match="source snapshot tickets"):
        # That it fits again is no proof of what was missed.
        three.catch_up()
    SnapshotRequests(three.store.folder).write("tickets", "a test")
    three.catch_up()
    assert parked(three) == set() and complete(three, "tickets")
    three.sql("DELETE FROM tickets WHERE id = 2", "UPDATE orders SET v = 'later'")
    three.catch_up()
    last = [each for each in three.manifests() if each.chunk and each.chunk.table == "tickets"][-1]
    assert last.chunk is not None and last.chunk.boundary
    above = [
        each
        for each in three.events()
        if each.source_table == "tickets" and each.commit_lsn >= last.chunk.low.value
    ]
    assert folded(above, "tickets") == three.rows("tickets", COLUMNS)
    assert same(three, "agents", "orders") and complete(three, "tickets")


@pytest.mark.parametrize(
    "change",
    ["RENAME v TO w", "DROP v", "ALTER v TYPE timestamp USING now()", "ALTER v DROP NOT NULL, ADD w int"],
)
def test_table_whose_columns_change_while_it_is_captured_is_followed_by_every_start(
    three: SourceUnderTest, change: str
) -> None:
    three.tables[0] = replace(three.tables[0], columns=(Column("id", "text"), Column("v", "date")))
    three.sql("ALTER TABLE tickets ALTER v TYPE date USING now()", "DELETE FROM tickets WHERE id = 3")
    three.catch_up()
    three.sql(f"ALTER TABLE tickets {change}", "UPDATE tickets SET id = id WHERE id = 1")
    for number in (4, 5):
        three.catch_up()
        three.sql(f"UPDATE agents SET v = '{number}'", "DELETE FROM tickets WHERE id = 2")
    three.catch_up()
    assert parked(three) == set() and complete(three, "tickets") and same(three, "agents")
    rows = folded([each for each in three.events() if each.source_table == "tickets"], "tickets")
    assert rows.keys() == {'["1"]'}


@pytest.mark.parametrize(
    ("change", "goes_on"), [("TYPE bigint", True), ("TYPE text USING 'no. ' || id", False)]
)
def test_table_whose_rows_have_other_keys_now_is_left_out(
    three: SourceUnderTest, change: str, goes_on: bool
) -> None:
    three.tables[0] = replace(three.tables[0], columns=(Column("id", "integer"), Column("v", "text")))
    three.catch_up()
    three.sql(f"ALTER TABLE tickets ALTER id {change}", "UPDATE tickets SET v = 'by its key'")
    for _ in range(2):
        with nullcontext() if goes_on else pytest.raises((PreflightFailed, TableMissedChanges)):
            three.catch_up()
        assert parked(three) == (set() if goes_on else {"tickets"})
    # Once the contract follows, a read ends the rows of the former keys.
    three.tables[0] = contract("tickets", COLUMNS)
    SnapshotRequests(three.store.folder).write("tickets", "their keys are others")
    three.catch_up()
    assert same(three, *NAMES) and parked(three) == set()


def test_contract_that_names_what_the_table_never_had_is_not_excused_by_another_change(
    three: SourceUnderTest,
) -> None:
    three.sql("ALTER TABLE tickets ADD w int", "UPDATE tickets SET w = 1")
    three.catch_up()
    three.tables[0] = contract("tickets", ("id", "vv"))
    with pytest.raises((PreflightFailed, TableMissedChanges), match="tickets has no column vv"):
        three.catch_up()
    assert parked(three) == {"tickets"}


def test_table_whose_contract_never_fitted_is_left_out(three: SourceUnderTest) -> None:
    three.tables[0] = replace(three.tables[0], columns=(Column("id", "text"), Column("v", "date")))
    with pytest.raises(PreflightFailed, match="tickets"):
        three.catch_up()
    assert parked(three) == {"tickets"}


@pytest.fixture
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capture looks at the catalogs several times a second."""
    monkeypatch.setattr(follower, "IDLE_SECONDS", 0.3)
    monkeypatch.setattr(added_tables, "_RETRY_SECONDS", 0.3)


@pytest.mark.parametrize(
    ("breaks", "mends"),
    [
        pytest.param(OTHER_IDENTITY, IDENTITY_BACK, id="replica identity"),
        pytest.param(
            (
                "ALTER PUBLICATION {slot} DROP TABLE tickets",
                "UPDATE tickets SET v = 'unseen'",
                "ALTER PUBLICATION {slot} ADD TABLE tickets",
            ),
            (),
            id="out of the publication",
        ),
        pytest.param(
            ("DROP TABLE tickets", "CREATE TABLE tickets (id int PRIMARY KEY, v text NOT NULL)"),
            ("INSERT INTO tickets VALUES (1, 'new')",),
            id="made anew",
        ),
    ],
)
@pytest.mark.usefixtures("looks_often")
def test_capture_that_follows_leaves_the_table_out_goes_on_and_takes_it_back(
    three: SourceUnderTest, breaks: tuple[str, ...], mends: tuple[str, ...]
) -> None:
    with following(three) as thread:
        three.sql("UPDATE agents SET v = 'followed'")
        until(lambda: same(three, "agents") or not thread.is_alive())
        three.sql(*(each.format(slot=three.slot) for each in breaks))
        until(lambda: parked(three) == {"tickets"} or not thread.is_alive())
        for number, value in enumerate(("beside", "and on"), 100):
            three.sql(f"UPDATE agents SET v = '{value}'", f"INSERT INTO orders VALUES ({number}, 'x')")
            until(lambda: same(three, "agents", "orders") or not thread.is_alive())
        assert thread.is_alive() and not complete(three, "tickets") and complete(three, "agents")
        three.sql(*mends)
        SnapshotRequests(three.store.folder).write("tickets", "a test")
        three.sql("INSERT INTO tickets VALUES (77, 'while it comes back')")
        until(lambda: parked(three) == set() or not thread.is_alive())
        three.sql("INSERT INTO tickets VALUES (78, 'after')")
        until(lambda: complete(three, "tickets") or not thread.is_alive())
        three.sql("UPDATE tickets SET v = 'at the end' WHERE id = 78")
        three.sql("UPDATE agents SET v = 'at the end'")
        until(lambda: same(three, "agents") or not thread.is_alive())
        assert thread.is_alive()
    keyed = [each for each in three.events() if each.source_table != "tickets" or each.key or each.op == "b"]
    assert folded(keyed, "tickets") == three.rows("tickets", COLUMNS)


@pytest.mark.usefixtures("looks_often")
def test_capture_goes_on_while_a_table_is_dropped_and_made_again_and_again(
    three: SourceUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The looks at the catalogs meet the table at every moment of its end."""
    monkeypatch.setattr(follower, "IDLE_SECONDS", 0.005)
    with following(three) as thread:
        for number in range(60):
            three.sql("DROP TABLE tickets", f"UPDATE agents SET v = '{number}'")
            time.sleep(number % 5 / 100)
            three.sql("CREATE TABLE tickets (id int PRIMARY KEY, v text NOT NULL)")
            SnapshotRequests(three.store.folder).write("tickets", "a test")
            time.sleep(number % 4 / 20)
            assert thread.is_alive()
        until(lambda: same(three, "agents") or not thread.is_alive())


def test_mode_when_needed_brings_the_table_back_by_itself(three: SourceUnderTest) -> None:
    three.overrides["snapshot_mode"] = SnapshotMode.WHEN_NEEDED
    three.sql(*OTHER_IDENTITY, "UPDATE agents SET v = 'beside'")
    with pytest.raises(PreflightFailed, match="tickets"):
        three.catch_up()
    assert same(three, "agents") and parked(three) == {"tickets"}
    three.sql(*IDENTITY_BACK, "UPDATE tickets SET v = 'mended' WHERE id = 2")
    three.catch_up()
    assert parked(three) == set() and complete(three, "tickets")


def test_table_that_does_not_fit_at_the_very_first_start_stops_no_other(source: SourceUnderTest) -> None:
    source.sql("CREATE TABLE tickets (id int, v text)", "CREATE TABLE agents (id int PRIMARY KEY, v text)")
    source.sql("INSERT INTO tickets VALUES (1, 'a')", "INSERT INTO agents VALUES (1, 'a')")
    source.tables += [contract("tickets", COLUMNS), contract("agents", COLUMNS)]
    with pytest.raises(PreflightFailed, match="tickets"):
        source.catch_up()
    assert same(source, "agents") and complete(source, "agents") and not complete(source, "tickets")
    source.sql("ALTER TABLE tickets ADD PRIMARY KEY (id)", "INSERT INTO tickets VALUES (2, 'b')")
    source.catch_up()
    assert same(source, "agents", "tickets") and complete(source, "tickets")


KILLED_AT = (
    "landing.lost_changes.before",
    "landing.lost_changes.after",
    "source.parked.before",
    "source.parked.after",
)


@pytest.mark.drawn(1)
@pytest.mark.slow
@pytest.mark.parametrize("point", KILLED_AT)
def test_capture_killed_while_it_parks_a_table_parks_it_at_its_next_start(
    three: SourceUnderTest, point: str
) -> None:
    three.sql(*OTHER_IDENTITY, *IDENTITY_BACK, "UPDATE agents SET v = 'beside'")
    three.killed_at(point)
    with pytest.raises(TableMissedChanges, match="tickets"):
        three.catch_up()
    assert parked(three) == {"tickets"} and not complete(three, "tickets") and same(three, "agents")


LIMIT = 1_000_000
LARGE = f"repeat('x', {LIMIT + 20_000})"

UNREADABLE = {
    "row too large": (
        (f"UPDATE tickets SET v = {LARGE} WHERE id = 2",),
        ("UPDATE tickets SET v = 'small' WHERE id = 2",),
        r"A row of public\.tickets has 1,0\d\d,\d\d\d bytes",
    ),
    "value that cannot be written as text": (
        (
            "CREATE TYPE mood AS ENUM ('calm', 'cross')",
            "ALTER TABLE tickets ADD mood mood",
            "UPDATE tickets SET mood = 'cross' WHERE id = 2",
            "CREATE TABLE labels AS SELECT * FROM pg_enum",
            "DELETE FROM pg_enum WHERE enumlabel = 'cross'",
        ),
        ("INSERT INTO pg_enum SELECT * FROM labels WHERE enumlabel = 'cross'",),
        r"public\.tickets cannot be read: InvalidBinaryRepresentation, SQLSTATE 22P03",
    ),
}


@pytest.mark.parametrize(("breaks", "mends", "why"), UNREADABLE.values(), ids=UNREADABLE.keys())
@pytest.mark.parametrize("mode", [SnapshotMode.INITIAL, SnapshotMode.WHEN_NEEDED])
def test_table_with_a_row_that_cannot_be_read_waits_and_the_others_are_read(
    source: SourceUnderTest, breaks: Sequence[str], mends: Sequence[str], why: str, mode: SnapshotMode
) -> None:
    source.overrides |= {"max_row_bytes": LIMIT, "snapshot_threads": 1, "snapshot_mode": mode}
    make_three(source)
    source.sql(*breaks)
    for _ in range(2):
        with pytest.raises(TableMissedChanges, match=why) as told:
            source.catch_up()
        assert "source snapshot tickets" in told.value.fix and "xxx" not in str(told.value)
        assert parked(source) == {"tickets"} and not complete(source, "tickets")
        assert same(source, "agents", "orders") and complete(source, "agents") and complete(source, "orders")
        source.sql("UPDATE agents SET v = v || '+'")
    warnings = source_status(source.dsn, source.settings, source.home, source.tables).warnings
    assert any("tickets is left out" in each.problem for each in warnings), warnings
    # Asked for before it is mended: it waits again, and nothing goes round.
    SnapshotRequests(source.store.folder).write("tickets", "too early")
    with pytest.raises(TableMissedChanges, match=why):
        source.catch_up()
    assert parked(source) == {"tickets"} and SnapshotRequests(source.store.folder).read() == []
    source.sql(*mends)
    SnapshotRequests(source.store.folder).write("tickets", "mended")
    source.catch_up()
    assert parked(source) == set() and complete(source, "tickets")
    assert same(source, "agents", "orders") and came_back(source)


@pytest.mark.drawn(2)
@pytest.mark.slow
@pytest.mark.parametrize("point", KILLED_AT)
@pytest.mark.parametrize(("breaks", "mends", "why"), UNREADABLE.values(), ids=UNREADABLE.keys())
def test_capture_killed_while_it_parks_a_table_that_cannot_be_read_parks_it_at_its_next_start(
    source: SourceUnderTest, breaks: Sequence[str], mends: Sequence[str], why: str, point: str
) -> None:
    source.overrides |= {"max_row_bytes": LIMIT, "snapshot_threads": 1}
    make_three(source)
    source.sql(*breaks)
    source.killed_at(point)
    _waits_till_it_is_mended(source, mends, why)


@pytest.mark.drawn(2)
@pytest.mark.slow
@pytest.mark.parametrize("point", KILLED_AT)
@pytest.mark.parametrize("in_progress", [True, False])
def test_capture_killed_while_it_parks_the_table_of_a_change_that_is_too_large_parks_it_at_its_next_start(
    three: SourceUnderTest, in_progress: bool, point: str
) -> None:
    three.overrides |= {
        "max_row_bytes": LIMIT,
        "stream_transactions": in_progress,
        "stream_above_bytes": 65536,
    }
    three.sql(f"INSERT INTO tickets VALUES (4, {LARGE})", "UPDATE agents SET v = 'beside'")
    three.killed_at(point)
    large = r"A row of public\.tickets has 1,0\d\d,\d\d\d bytes"
    _waits_till_it_is_mended(three, ("DELETE FROM tickets WHERE id = 4",), large)


def _waits_till_it_is_mended(source: SourceUnderTest, mends: Sequence[str], why: str) -> None:
    """Capture starts again, and again: ``tickets`` waits, the others do not; mended, it is read again."""
    for _ in range(2):
        # A table is complete once the stream has passed its reading, and a silent server has nothing beyond.
        source.sql("UPDATE agents SET v = v || '+'")
        with pytest.raises(TableMissedChanges, match=why):
            source.catch_up()
        assert parked(source) == {"tickets"} and not complete(source, "tickets")
        assert same(source, "agents", "orders") and complete(source, "agents") and complete(source, "orders")
    source.sql(*mends)
    SnapshotRequests(source.store.folder).write("tickets", "mended")
    source.catch_up()
    assert parked(source) == set() and complete(source, "tickets") and came_back(source)


MIDDLE = {
    "dropped": (("DROP TABLE tickets",), None),
    "altered": (("ALTER TABLE tickets RENAME id TO number",), None),
    "revoked": ((), None),
    "altered as the contract lets it": (("ALTER TABLE tickets ADD w text",), "goes on"),
}


def came_back(source: SourceUnderTest) -> bool:
    """Whether ``tickets`` is as at the source by what came from its last snapshot on."""
    last = [each.chunk for each in source.manifests() if each.chunk and each.chunk.table == "tickets"][-1]
    assert last.boundary
    events = [each for each in source.events() if each.commit_lsn >= last.low.value]
    rows = folded(events, "tickets")
    return {key: {name: row[name] for name in COLUMNS} for key, row in rows.items()} == source.rows(
        "tickets", COLUMNS
    )


@pytest.mark.parametrize("change", MIDDLE)
def test_table_that_changes_while_it_is_read_stops_no_other(
    source: SourceUnderTest, change: str, request: pytest.FixtureRequest
) -> None:
    breaks, goes_on = MIDDLE[change]
    make_three(source)
    source.overrides |= {"snapshot_chunk_rows": 1, "snapshot_threads": 1}
    if change == "revoked":
        source.catch_up()
        role = f"reader_{source.slot}"
        source.sql(
            f"CREATE ROLE {role} LOGIN REPLICATION",
            f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {role}",
        )
        request.addfinalizer(lambda: as_owner(f"DROP OWNED BY {role}", f"DROP ROLE {role}"))
        breaks = (f"REVOKE SELECT ON tickets FROM {role}",)
        owner, source.dsn = source.dsn, make_dsn(source.dsn, user=role)
        SnapshotRequests(source.store.folder).write("tickets", "a test")
    else:
        owner = source.dsn

    def as_owner(*statements: str) -> None:
        with closing(connect(owner)) as connection, connection.cursor() as cursor:
            for each in statements:
                cursor.execute(each)

    done: list[str] = []

    def landed(batch: Manifest) -> None:
        if batch.chunk is not None and batch.chunk.table == "tickets" and not done:
            done.append(batch.batch_id)
            as_owner(*breaks)

    capture(source, landed)
    source.dsn = owner
    assert (
        done
        and same(source, "agents", "orders")
        and complete(source, "agents")
        and complete(source, "orders")
    )
    assert parked(source) == (set() if goes_on else {"tickets"})
    assert complete(source, "tickets") == bool(goes_on)


@pytest.mark.parametrize("in_progress", [True, False])
@pytest.mark.parametrize(
    ("change", "op"),
    [
        pytest.param(f"INSERT INTO tickets VALUES (4, {LARGE})", "c", id="insert"),
        pytest.param(f"UPDATE tickets SET v = {LARGE} WHERE id = 2", "u", id="update"),
    ],
)
def test_change_of_a_row_that_is_too_large_parks_its_table_and_lands_by_name_alone(
    three: SourceUnderTest, change: str, op: str, in_progress: bool
) -> None:
    three.overrides |= {
        "max_row_bytes": LIMIT,
        "stream_transactions": in_progress,
        "stream_above_bytes": 65536,
    }
    three.transaction(
        "UPDATE agents SET v = 'before it'",
        "SAVEPOINT s",
        f"INSERT INTO orders VALUES (5, {LARGE})",
        "ROLLBACK TO s",
        change,
        "UPDATE orders SET v = 'behind it'",
    )
    three.sql("UPDATE tickets SET v = 'later' WHERE id = 1", "UPDATE agents SET v = 'later'")
    for _ in range(2):
        with pytest.raises(
            TableMissedChanges, match=r"A row of public\.tickets has 1,0\d\d,\d\d\d bytes"
        ) as told:
            three.catch_up()
        assert "OMNISUPPORT_MAX_ROW_BYTES" in told.value.problem and "xxx" not in str(told.value)
        assert parked(three) == {"tickets"} and not complete(three, "tickets")
        assert same(three, "agents", "orders") and complete(three, "agents") and complete(three, "orders")
    refused, later = [each for each in three.changes() if each.source_table == "tickets"][-2:]
    assert (refused.op, refused.key, refused.before, refused.after) == (op, None, None, None)
    assert later.key is None and "later" in str(later.after)
    of_it = [each.ordinal for each in three.changes() if each.commit_lsn == refused.commit_lsn]
    assert of_it == list(range(0, 14, 2)), "three before it, it, three behind it; nothing rolled back"
    three.overrides["max_row_bytes"] = 2 * LIMIT
    SnapshotRequests(three.store.folder).write("tickets", "the setting was raised")
    three.catch_up()
    assert parked(three) == set() and complete(three, "tickets") and came_back(three)


def test_row_too_large_that_is_gone_when_its_table_is_read_again_stops_nothing(
    three: SourceUnderTest,
) -> None:
    three.overrides["max_row_bytes"] = LIMIT
    three.sql(f"INSERT INTO tickets VALUES (4, {LARGE})", "DELETE FROM tickets WHERE id = 4")
    SnapshotRequests(three.store.folder).write("tickets", "the row is gone")
    three.catch_up()
    assert parked(three) == set() and complete(three, "tickets") and came_back(three)
    stretches = LostChanges(three.store.folder, 1).all()
    assert [each.table for each in stretches] == ["tickets"] and not stretches[0].open


@pytest.mark.usefixtures("looks_often")
def test_capture_that_follows_parks_the_table_of_a_row_that_is_too_large(three: SourceUnderTest) -> None:
    three.overrides["max_row_bytes"] = LIMIT
    with following(three) as thread:
        three.sql(f"INSERT INTO tickets VALUES (4, {LARGE})", "UPDATE agents SET v = 'beside'")
        until(lambda: parked(three) == {"tickets"} or not thread.is_alive())
        until(lambda: same(three, "agents") or not thread.is_alive())
        three.sql("DELETE FROM tickets WHERE id = 4", "UPDATE orders SET v = 'beside'")
        SnapshotRequests(three.store.folder).write("tickets", "the row is gone")
        until(lambda: complete(three, "tickets") or not thread.is_alive())
        until(lambda: same(three, "orders") or not thread.is_alive())
        assert thread.is_alive() and parked(three) == set()
    assert came_back(three)
