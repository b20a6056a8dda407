"""Another server or another database behind the connection string: noticed before anything is captured."""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from psycopg2.extensions import make_dsn, parse_dsn

from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.sources.postgres.embedded.server import EmbeddedPostgres
from omnisupport_ingest.sources.postgres.session.connection import connect
from omnisupport_ingest.sources.postgres.session.errors import AnotherSource, GapInSource
from omnisupport_ingest.sources.postgres.snapshot.requests import SnapshotRequests
from omnisupport_ingest_tests.sources.postgres.awkward import SOURCE, Shop
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest, contract, folded
from omnisupport_ingest_tests.waiting import PATIENCE, until

COLUMNS = ("id", "v")
HERE, THERE = {'["1"]': {"id": "1", "v": "here"}}, {'["2"]': {"id": "2", "v": "there"}}


def with_row(source: SourceUnderTest, key: int, value: str) -> None:
    source.sql(
        "CREATE TABLE things (id int PRIMARY KEY, v text)", f"INSERT INTO things VALUES ({key}, '{value}')"
    )


@pytest.fixture
def things(source: SourceUnderTest) -> SourceUnderTest:
    """A source with one row in its table, captured up to now."""
    with_row(source, 1, "here")
    source.tables.append(contract("things", COLUMNS))
    source.catch_up()
    return source


@pytest.fixture
def other_database(things: SourceUnderTest, postgres: EmbeddedPostgres) -> Iterator[str]:
    """The connection string of another database of the same server, with a table of the same name."""
    name = f"other_{secrets.token_hex(4)}"
    things.sql(f"CREATE DATABASE {name}")
    with_row(SourceUnderTest(postgres.dsn(name), things.slot, things.home_folder), 2, "there")
    yield postgres.dsn(name)
    admin = connect(postgres.dsn())
    with admin.cursor() as cursor:
        cursor.execute(
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE database = %s",
            (name,),
        )
        cursor.execute(f"DROP DATABASE {name} WITH (FORCE)")
    admin.close()


@pytest.fixture
def other_server(things: SourceUnderTest, tmp_path: Path) -> Iterator[str]:
    """The connection string of another server, with a database and a table of the same names."""
    server = EmbeddedPostgres(tmp_path / "other")
    server.start()
    name = things.slot
    SourceUnderTest(server.dsn(), name, things.home_folder).sql(f"CREATE DATABASE {name}")
    with_row(SourceUnderTest(server.dsn(name), name, things.home_folder), 2, "there")
    yield server.dsn(name)
    server.destroy()


def refused_until_a_person_decides(things: SourceUnderTest, elsewhere: str, problem: str) -> None:
    """Capture stops before it changes anything there, goes on when it is led back, and can be led over."""
    here = things.dsn
    SnapshotRequests(things.store.folder).write("things", "a test")
    landed, confirmed = things.store.batch_ids(), things.confirmed()
    things.dsn = elsewhere
    for mode in ("initial", "when_needed"):
        things.overrides["snapshot_mode"] = mode
        with pytest.raises(AnotherSource, match=problem) as refused:
            things.catch_up()
        assert refused.value.exit_code == GapInSource.exit_code == 7
        assert "OMNISUPPORT_SOURCE_DSN" in refused.value.fix and "--new-epoch" in refused.value.fix
    assert things.query("SELECT FROM pg_publication") == []
    things.dsn = here
    assert (things.store.batch_ids(), things.confirmed()) == (landed, confirmed)
    things.catch_up()
    assert folded(things.events(), "things") == HERE
    things.dsn = elsewhere
    things.capture().begin_new_epoch("the source has moved")
    things.catch_up()
    assert [epoch.number for epoch in things.store.epochs()] == [1, 2]
    assert folded(things.events(), "things") == THERE


def test_another_database_of_the_server_is_not_captured(things: SourceUnderTest, other_database: str) -> None:
    refused_until_a_person_decides(things, other_database, "another database: other_.*, landed from capture_")


def test_another_server_with_the_same_names_is_not_captured(
    things: SourceUnderTest, other_server: str
) -> None:
    refused_until_a_person_decides(things, other_server, "another database server: system identifier")


@pytest.mark.slow
def test_another_server_that_has_nothing_of_ours_is_named_before_what_it_lacks(
    things: SourceUnderTest, other_server: str
) -> None:
    elsewhere = SourceUnderTest(other_server, things.slot, things.home_folder)
    elsewhere.sql("DROP TABLE things")
    things.dsn = other_server
    with pytest.raises(AnotherSource, match="another database server"):
        things.catch_up()


@pytest.mark.slow
def test_connection_that_leads_elsewhere_while_the_stream_is_open_reads_no_rows(
    things: SourceUnderTest, other_server: str, tmp_path: Path
) -> None:
    """As after a fail-over by name or address, with the old server still alive and sending."""
    here = parse_dsn(things.dsn)
    name = Path(tempfile.mkdtemp()) / "name"
    name.symlink_to(here["host"])
    things.dsn = make_dsn(**(here | {"host": str(name)}))
    process = things.capture_process()
    try:
        things.sql("UPDATE things SET v = 'sent' WHERE id = 1")
        until(lambda: [event.op for event in things.changes()] == ["u"])
        name.unlink()
        name.symlink_to(parse_dsn(other_server)["host"])
        landed = things.store.batch_ids()
        SnapshotRequests(things.store.folder).write("things", "a test")
        _, errors = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
        shutil.rmtree(name.parent)
    assert process.returncode == AnotherSource.exit_code, errors
    assert [each for each in things.store.batch_ids() if each not in landed and "-r-" in each] == []
    # Led back it goes on; what is there is taken in as what it is, another source.
    things.dsn = make_dsn(**here)
    things.catch_up()
    things.sql("INSERT INTO things VALUES (3, 'later')")
    things.catch_up()
    assert folded(things.events(), "things") == things.rows("things", COLUMNS)
    things.dsn = other_server
    things.capture().begin_new_epoch("the source has moved")
    things.catch_up()
    assert folded(things.events(), "things") == things.rows("things", COLUMNS) == THERE


def test_commands_tell_of_another_database_and_change_nothing(shop: Shop) -> None:
    assert shop.run("capture", "--once").code == 0
    name = f"other_{secrets.token_hex(4)}"
    shop.sql(f"CREATE DATABASE {name}")
    try:
        elsewhere = shop.dsn(dbname=name)
        landed = LandingStore(shop.home / "landing", SOURCE).batch_ids()
        done = shop.run("capture", "--once", dsn=elsewhere)
        assert done.code == 7 and f"This is another database: {name}" in done.err
        assert "OMNISUPPORT_SOURCE_DSN" in done.err
        checked = shop.run("preflight", dsn=elsewhere)
        assert checked.code == 1 and "This is another database" in checked.output
        assert shop.run("source", "status", dsn=elsewhere).code == 1
        assert LandingStore(shop.home / "landing", SOURCE).batch_ids() == landed
        assert shop.run("capture", "--once").code == 0
    finally:
        shop.sql(f"DROP DATABASE {name}")
