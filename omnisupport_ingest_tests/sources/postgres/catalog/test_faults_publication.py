"""A publication that changed: what was not sent meanwhile is noticed, named, and made good by its repair."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from omnisupport_ingest.settings import SnapshotMode
from omnisupport_ingest.sources.postgres.capture.parked import ParkedTables
from omnisupport_ingest.sources.postgres.catalog.published import _missed
from omnisupport_ingest.sources.postgres.preflight.source_check import published_findings
from omnisupport_ingest.sources.postgres.session.errors import (
    GapInSource,
    PreflightFailed,
    TableMissedChanges,
)
from omnisupport_ingest.sources.postgres.snapshot.requests import SnapshotRequests
from omnisupport_ingest.sources.postgres.stream import follower
from omnisupport_ingest_tests.landing.batches import is_stream
from omnisupport_ingest_tests.sources.postgres.awkward import Shop
from omnisupport_ingest_tests.sources.postgres.shop_facts import status
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest, contract, folded
from omnisupport_ingest_tests.waiting import PATIENCE, until

COLUMNS = ("id", "v")
UNSEEN = (
    "UPDATE tickets SET v = 'unseen' WHERE id = 1",
    "DELETE FROM tickets WHERE id = 2",
    "INSERT INTO tickets VALUES (4, 'unseen')",
)


@pytest.fixture
def tickets(source: SourceUnderTest) -> SourceUnderTest:
    """Two captured tables, ``tickets`` and ``agents``, with changes of both landed."""
    for name in ("tickets", "agents"):
        source.sql(f"CREATE TABLE {name} (id int PRIMARY KEY, v text)")
        source.sql(f"INSERT INTO {name} VALUES (1, 'one'), (2, 'two'), (3, 'three')")
        source.tables.append(contract(name, COLUMNS))
    source.catch_up()
    source.sql("UPDATE tickets SET v = 'seen' WHERE id = 3")
    source.catch_up()
    return source


def publication(source: SourceUnderTest, action: str) -> str:
    return f"ALTER PUBLICATION {source.slot} {action}"


def made_anew(name: str) -> tuple[str, ...]:
    return f"DROP TABLE {name}", f"CREATE TABLE {name} (id int PRIMARY KEY, v text)"


def read_again(source: SourceUnderTest, *names: str) -> None:
    """The repair that the error names: ``source snapshot``, and capture goes on."""
    for name in names:
        SnapshotRequests(source.store.folder).write(name, "a test")
    source.catch_up()


def assert_same_as_source(source: SourceUnderTest) -> None:
    events = source.events()
    for name in ("tickets", "agents"):
        assert folded(events, name) == source.rows(name, COLUMNS)


def goes_on(source: SourceUnderTest, epochs: int = 1) -> None:
    """Capture has nothing to complain of, and takes in what changes from now on."""
    assert_same_as_source(source)
    source.sql("UPDATE tickets SET v = 'later'", "INSERT INTO agents VALUES (9, 'nine')")
    source.catch_up()
    assert_same_as_source(source)
    assert len(source.store.epochs()) == epochs


@contextmanager
def left_out(source: SourceUnderTest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A capture that follows, and looks at the catalogs often. It leaves ``tickets`` out, goes on with
    ``agents``, and stops well; why it was left out is in the list then."""
    monkeypatch.setattr(follower, "IDLE_SECONDS", 0.3)
    stop, failed, why = threading.Event(), list[Exception](), list[str]()

    def run() -> None:
        try:
            source.capture().run(None, stop)
        except Exception as error:
            failed.append(error)

    def followed(value: str) -> None:
        source.sql(f"UPDATE agents SET v = '{value}'")
        until(lambda: folded(source.events(), "agents") == source.rows("agents", COLUMNS) or bool(failed))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        followed("followed")
        yield why
        until(lambda: bool(ParkedTables(source.store.folder, 1).all()) or bool(failed))
        followed("goes on")
        why += [each.reason for each in ParkedTables(source.store.folder, 1).all().values()]
    finally:
        stop.set()
        thread.join()
    assert failed == [] and len(why) == 1


@contextmanager
def following(source: SourceUnderTest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Exception]]:
    """A capture that follows, and looks at the catalogs often; what it failed with is in the list then."""
    monkeypatch.setattr(follower, "IDLE_SECONDS", 0.3)
    stop, failed = threading.Event(), list[Exception]()
    before = len(source.store.batch_ids())

    def run() -> None:
        try:
            source.capture().run(None, stop)
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        source.sql("UPDATE agents SET v = 'followed'")
        until(lambda: any(is_stream(name) for name in source.store.batch_ids()[before:]) or bool(failed))
        until(lambda: bool(source.query("SELECT FROM pg_replication_slots WHERE active")) or bool(failed))
        yield failed
        thread.join(timeout=PATIENCE)
        assert not thread.is_alive(), "it has noticed nothing"
    finally:
        stop.set()
        thread.join()


OUT_AND_BACK = ("DROP TABLE tickets", *UNSEEN, "ADD TABLE tickets")
OTHER_ROWS = ("SET TABLE agents, tickets WHERE (id < 0)", *UNSEEN, "SET TABLE agents, tickets")
OTHER_COLUMNS = ("SET TABLE agents, tickets (id)", *UNSEEN, "SET TABLE agents, tickets")


def statements(source: SourceUnderTest, story: tuple[str, ...]) -> list[str]:
    """A story of changes of the publication (its first and last) and of rows."""
    return [publication(source, story[0]), *story[1:-1], publication(source, story[-1])]


STORIES = {"taken out": OUT_AND_BACK, "row filter": OTHER_ROWS, "column list": OTHER_COLUMNS}


def test_the_reason_of_one_table_is_not_given_to_another() -> None:
    fault = _missed({"orders": "is gone", "tickets": "is not in the publication any more"})
    assert fault.reasons == {
        "orders": "Its changes may not have been sent: orders is gone.",
        "tickets": "Its changes may not have been sent: tickets is not in the publication any more.",
    }


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES.keys())
def test_table_that_was_published_otherwise_while_capture_was_off_is_named_and_read_again(
    tickets: SourceUnderTest, story: tuple[str, ...]
) -> None:
    if story is not OUT_AND_BACK and tickets.server_version() < 150000:
        pytest.skip("row filters and column lists came with PostgreSQL 15")
    tickets.sql(*statements(tickets, story))
    for _ in range(2):
        with pytest.raises(TableMissedChanges, match="tickets was out of the publication") as told:
            tickets.catch_up()
        assert "source snapshot tickets" in told.value.fix and "agents" not in told.value.problem
    read_again(tickets, "tickets")
    goes_on(tickets)


@pytest.mark.parametrize(
    "story",
    [
        pytest.param(OUT_AND_BACK, id="taken out"),
        pytest.param(OTHER_ROWS, id="row filter", marks=pytest.mark.slow),
        pytest.param(OTHER_COLUMNS, id="column list", marks=pytest.mark.slow),
    ],
)
def test_table_that_is_published_otherwise_while_capture_runs_is_left_out_and_the_others_go_on(
    tickets: SourceUnderTest, story: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    if story is not OUT_AND_BACK and tickets.server_version() < 150000:
        pytest.skip("row filters and column lists came with PostgreSQL 15")
    with left_out(tickets, monkeypatch):
        tickets.sql(*statements(tickets, story))
    read_again(tickets, "tickets")
    goes_on(tickets)


def test_row_filter_that_stays_is_that_of_the_lake_once_the_table_is_read_again(
    tickets: SourceUnderTest,
) -> None:
    if tickets.server_version() < 150000:
        pytest.skip("row filters came with PostgreSQL 15")
    tickets.sql(publication(tickets, "SET TABLE agents, tickets WHERE (id > 1)"), *UNSEEN)
    for _ in range(2):
        with pytest.raises(TableMissedChanges, match="published with other columns or rows"):
            tickets.catch_up()
    read_again(tickets, "tickets")
    assert folded(tickets.events(), "tickets") == tickets.rows("tickets WHERE id > 1", COLUMNS)
    tickets.sql("UPDATE tickets SET v = 'later'", "UPDATE tickets SET id = 9 WHERE id = 1")
    tickets.catch_up()
    assert folded(tickets.events(), "tickets") == tickets.rows("tickets WHERE id > 1", COLUMNS)
    tickets.sql(publication(tickets, OTHER_ROWS[-1]))
    with pytest.raises(TableMissedChanges):
        tickets.catch_up()
    read_again(tickets, "tickets")
    goes_on(tickets)


def test_column_list_that_stays_without_a_contracted_column_is_refused_until_it_is_gone(
    tickets: SourceUnderTest,
) -> None:
    if tickets.server_version() < 150000:
        pytest.skip("column lists came with PostgreSQL 15")
    tickets.sql(publication(tickets, OTHER_COLUMNS[0]), *UNSEEN)
    with pytest.raises(PreflightFailed, match=r"public\.tickets") as refused:
        tickets.catch_up()
    tickets.sql(refused.value.fix.strip())
    with pytest.raises(TableMissedChanges):
        tickets.catch_up()
    read_again(tickets, "tickets")
    goes_on(tickets)


def test_table_that_stays_out_of_the_publication_is_put_back_and_read_again(
    tickets: SourceUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    with left_out(tickets, monkeypatch) as why:
        tickets.sql(publication(tickets, "DROP TABLE tickets"), *UNSEEN)
    assert "is not in the publication any more" in why[0]
    with pytest.raises(TableMissedChanges):
        tickets.catch_up()
    read_again(tickets, "tickets")
    goes_on(tickets)


@pytest.mark.parametrize("comes_back", [True, False])
def test_publication_dropped_while_capture_was_off_is_a_gap(
    tickets: SourceUnderTest, comes_back: bool
) -> None:
    tickets.sql(f"DROP PUBLICATION {tickets.slot}", *UNSEEN)
    if comes_back:
        tickets.sql(f"CREATE PUBLICATION {tickets.slot} FOR TABLE tickets, agents")
    for _ in range(2):
        with pytest.raises(GapInSource, match="made anew" if comes_back else "is gone") as gap:
            tickets.catch_up()
        assert "--new-epoch" in gap.value.fix
    # Nothing was changed at the source before a person has decided.
    assert bool(tickets.query("SELECT FROM pg_publication")) == comes_back
    tickets.capture().begin_new_epoch("publication dropped")
    tickets.catch_up()
    goes_on(tickets, epochs=2)


def test_publication_dropped_while_capture_runs_ends_it_and_is_a_gap(
    tickets: SourceUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    with following(tickets, monkeypatch) as failed:
        tickets.sql(f"DROP PUBLICATION {tickets.slot}", *UNSEEN)
    assert len(failed) == 1
    with pytest.raises(GapInSource, match="is gone"):
        tickets.catch_up()
    tickets.capture().begin_new_epoch("publication dropped")
    tickets.catch_up()
    goes_on(tickets, epochs=2)


def test_schema_that_was_out_of_the_publication_for_a_time_interrupts_its_tables(
    source: SourceUnderTest,
) -> None:
    made = _captured(source, "TABLES IN SCHEMA public")
    made.sql(*statements(made, ("DROP TABLES IN SCHEMA public", *UNSEEN, "ADD TABLES IN SCHEMA public")))
    with pytest.raises(TableMissedChanges, match=r"agents was out of .* tickets was out of"):
        made.catch_up()
    read_again(made, "tickets", "agents")
    goes_on(made)


ALTERED = {
    "operations": ("SET (publish = 'insert')", "SET (publish = 'insert, update, delete, truncate')"),
    "name": ("RENAME TO elsewhere", None),
    "owner": ("OWNER TO pg_database_owner", "OWNER TO postgres"),
}


@pytest.mark.parametrize(("first", "last"), ALTERED.values(), ids=ALTERED.keys())
def test_publication_altered_as_a_whole_for_a_time_is_a_gap(
    tickets: SourceUnderTest, first: str, last: str | None
) -> None:
    back = (
        f"ALTER PUBLICATION elsewhere RENAME TO {tickets.slot}"
        if last is None
        else publication(tickets, last)
    )
    tickets.sql(publication(tickets, first), *UNSEEN, back)
    with pytest.raises(GapInSource, match="altered as a whole"):
        tickets.catch_up()
    tickets.capture().begin_new_epoch("publication altered")
    tickets.catch_up()
    goes_on(tickets, epochs=2)


PUBLISHED = ["TABLE tickets, agents", "ALL TABLES", "TABLES IN SCHEMA public"]


@pytest.mark.parametrize("published", PUBLISHED)
def test_table_made_anew_while_capture_was_off_leaves_no_old_row_alive(
    source: SourceUnderTest, published: str
) -> None:
    made = _captured(source, published)
    made.sql(
        "DELETE FROM tickets WHERE id = 1", *made_anew("tickets"), "INSERT INTO tickets VALUES (3, 'new')"
    )
    with pytest.raises(TableMissedChanges, match="tickets was dropped and made anew"):
        made.catch_up()
    read_again(made, "tickets")
    assert folded(made.events(), "tickets") == {'["3"]': {"id": "3", "v": "new"}}
    goes_on(made)


@pytest.mark.parametrize("published", PUBLISHED)
def test_table_made_anew_while_capture_runs_is_left_out_and_the_others_go_on(
    source: SourceUnderTest, published: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = _captured(source, published)
    with left_out(made, monkeypatch):
        made.sql(*made_anew("tickets"), "INSERT INTO tickets VALUES (3, 'new')")
    # Nothing of the new table has landed among the rows of the old one: it has no key.
    new = [event for event in made.changes() if event.after and '"new"' in event.after]
    assert {event.key for event in new} <= {None}
    read_again(made, "tickets")
    goes_on(made)


def test_table_that_is_dropped_for_good_is_named_until_its_contract_is_out(
    tickets: SourceUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    with left_out(tickets, monkeypatch) as why:
        tickets.sql("DROP TABLE tickets")
    assert "tickets is gone" in why[0]
    with pytest.raises(TableMissedChanges, match="tickets is gone"):
        tickets.catch_up()
    del tickets.tables[0]
    tickets.catch_up()
    assert folded(tickets.events(), "agents") == tickets.rows("agents", COLUMNS)


def test_table_that_had_another_name_for_a_time_is_named_and_read_again(tickets: SourceUnderTest) -> None:
    tickets.sql(
        "ALTER TABLE tickets RENAME TO elsewhere",
        "UPDATE elsewhere SET v = 'unseen' WHERE id = 1",
        "ALTER TABLE elsewhere RENAME TO tickets",
    )
    for _ in range(2):
        with pytest.raises(TableMissedChanges, match=r"tickets was called public\.elsewhere for a time"):
            tickets.catch_up()
    read_again(tickets, "tickets")
    goes_on(tickets)


def test_key_that_left_the_replica_identity_for_a_time_is_named_and_read_again_goes_on(
    tickets: SourceUnderTest,
) -> None:
    tickets.sql(
        "ALTER TABLE tickets ALTER v SET NOT NULL",
        "CREATE UNIQUE INDEX by_v ON tickets (v)",
        "ALTER TABLE tickets REPLICA IDENTITY USING INDEX by_v",
        "DELETE FROM tickets WHERE id = 1",
        "ALTER TABLE tickets REPLICA IDENTITY DEFAULT",
        "DROP INDEX by_v",
    )
    for _ in range(2):
        with pytest.raises(TableMissedChanges, match="key column id") as told:
            tickets.catch_up()
        assert "source snapshot tickets" in told.value.fix
    read_again(tickets, "tickets")
    goes_on(tickets)


def test_when_needed_reads_the_table_again_by_itself_and_keeps_the_epoch(tickets: SourceUnderTest) -> None:
    tickets.overrides["snapshot_mode"] = SnapshotMode.WHEN_NEEDED
    tickets.sql(*statements(tickets, OUT_AND_BACK))
    tickets.catch_up()
    goes_on(tickets)


def test_what_changes_nothing_for_the_stream_raises_no_alarm(tickets: SourceUnderTest) -> None:
    tickets.sql(
        "CREATE TABLE other (id int PRIMARY KEY)",
        publication(tickets, "ADD TABLE other"),
        publication(tickets, "DROP TABLE other"),
        "ALTER TABLE tickets ADD COLUMN more text",
        "ALTER TABLE tickets DROP COLUMN more",
        "CREATE INDEX ON tickets (v)",
        "VACUUM FULL tickets",
        "ANALYZE tickets",
        "VACUUM FULL pg_publication",
        "VACUUM (FREEZE) pg_publication_rel",
        "VACUUM FULL pg_publication_rel",
        f"COMMENT ON PUBLICATION {tickets.slot} IS 'ours'",
        "TRUNCATE agents",
    )
    tickets.catch_up()
    goes_on(tickets)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_capture_killed_at_the_record_of_what_is_published_makes_it_at_its_next_start(
    source: SourceUnderTest, moment: str
) -> None:
    source.sql("CREATE TABLE tickets (id int PRIMARY KEY, v text)", "CREATE TABLE agents (LIKE tickets)")
    source.sql("ALTER TABLE agents ADD PRIMARY KEY (id)", "INSERT INTO tickets VALUES (1, 'a'), (2, 'b')")
    source.tables += [contract("tickets", COLUMNS), contract("agents", COLUMNS)]
    source.killed_at(f"source.published.{moment}")
    source.catch_up()
    source.sql(*statements(source, OUT_AND_BACK))
    with pytest.raises(TableMissedChanges):
        source.catch_up()
    SnapshotRequests(source.store.folder).write("tickets", "a test")
    # Of the repair: the first pass is that of the tables that are read.
    source.killed_at(f"source.published.{moment}")
    source.catch_up()
    goes_on(source)


def test_status_and_preflight_name_it_while_nothing_captures(shop: Shop) -> None:
    once = ("capture", "--once")
    assert shop.run(*once).code == 0
    shop.sql(
        f"ALTER PUBLICATION {shop.database} DROP TABLE items",
        "UPDATE items SET v = 'unseen'",
        f"ALTER PUBLICATION {shop.database} ADD TABLE items",
    )
    (warning,) = status(shop, code=1)["warnings"]
    assert "items was out of the publication" in warning["what"]
    checked = shop.run("preflight")
    assert checked.code == 1 and "omnisupport-ingest source snapshot items" in checked.out
    assert shop.run(*once).code == TableMissedChanges.exit_code
    assert shop.run("source", "snapshot", "items", "--reason", "a test").code == 0
    assert shop.run(*once).code == 0
    assert status(shop)["warnings"] == [] and shop.run("preflight").code == 0


def test_home_that_has_no_record_begins_one(tickets: SourceUnderTest) -> None:
    (record,) = tickets.store.folder.glob("published-e*.json")
    record.unlink()
    with tickets.connected() as connection:
        found = published_findings(connection, tickets.store, tickets.slot, tickets.tables)
        assert list(found) == []
    tickets.catch_up()
    assert record.exists()
    goes_on(tickets)


def _captured(source: SourceUnderTest, published: str) -> SourceUnderTest:
    """``tickets`` and ``agents`` captured, by a publication ``FOR`` what is given."""
    if "SCHEMA" in published and source.server_version() < 150000:
        pytest.skip("publications of schemas came with PostgreSQL 15")
    for name in ("tickets", "agents"):
        source.sql(f"CREATE TABLE {name} (id int PRIMARY KEY, v text)")
        source.sql(f"INSERT INTO {name} VALUES (1, 'one'), (2, 'two')")
        source.tables.append(contract(name, COLUMNS))
    source.sql(f"CREATE PUBLICATION {source.slot} FOR {published} WITH (publish_via_partition_root = true)")
    source.catch_up()
    return source
