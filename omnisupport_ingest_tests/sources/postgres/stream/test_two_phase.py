"""Prepared transactions: at their COMMIT PREPARED, however much happens before it, and never without one."""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from omnisupport_ingest.position import Lsn
from omnisupport_ingest.sources.postgres.session.server import current_wal_lsn
from omnisupport_ingest_tests.sources.postgres.copied_server import CopiedServer
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest, contract, folded

pytestmark = pytest.mark.full

COLUMNS = ("id", "v")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CopiedServer]:
    made = CopiedServer(tmp_path_factory.mktemp("two_phase") / "server")
    made.start()
    made.sql("ALTER SYSTEM SET max_prepared_transactions = 5")
    made.restart()
    yield made
    made.destroy()


@pytest.fixture
def orders(server: CopiedServer, tmp_path: Path) -> Iterator[SourceUnderTest]:
    """A source with two rows, captured up to now."""
    name = f"two_phase_{secrets.token_hex(4)}"
    server.sql(f"CREATE DATABASE {name}")
    source = SourceUnderTest(server.server.dsn(name), name, tmp_path / "home")
    source.sql(
        "CREATE TABLE orders (id int PRIMARY KEY, v text)", "INSERT INTO orders VALUES (1, 'a'), (2, 'b')"
    )
    source.tables.append(contract("orders", COLUMNS))
    source.catch_up()
    yield source
    server.sql(f"SELECT pg_drop_replication_slot('{name}')", f"DROP DATABASE {name} WITH (FORCE)")


def prepared(name: str, *statements: str) -> str:
    return "BEGIN; " + "; ".join(statements) + f"; PREPARE TRANSACTION '{name}'"


def test_prepared_transaction_lands_once_and_where_it_was_committed(orders: SourceUnderTest) -> None:
    orders.sql(
        prepared("kept", "UPDATE orders SET v = 'kept' WHERE id = 1", "INSERT INTO orders VALUES (3, 'k')")
    )
    orders.catch_up()
    orders.sql("UPDATE orders SET v = 'between' WHERE id = 2")
    orders.catch_up()
    assert [event.key for event in orders.changes()] == ['["2"]']
    before = current_wal_lsn(orders.dsn)
    orders.sql("COMMIT PREPARED 'kept'")
    orders.catch_up()
    orders.catch_up()
    _, *kept = orders.changes()
    assert [(event.op, event.key, event.ordinal) for event in kept] == [("u", '["1"]', 0), ("c", '["3"]', 2)]
    assert all(Lsn(event.commit_lsn) >= before > Lsn(event.lsn or 0) for event in kept)
    assert folded(orders.events(), "orders") == orders.rows("orders", COLUMNS)


def test_prepared_transaction_that_is_rolled_back_never_lands(orders: SourceUnderTest) -> None:
    orders.sql(
        prepared("dropped", "UPDATE orders SET v = 'dropped' WHERE id = 1", "DELETE FROM orders WHERE id = 2")
    )
    orders.catch_up()
    orders.sql("ROLLBACK PREPARED 'dropped'", "INSERT INTO orders VALUES (3, 'c')")
    orders.catch_up()
    assert [event.key for event in orders.changes()] == ['["3"]']
    assert folded(orders.events(), "orders") == orders.rows("orders", COLUMNS)


def test_prepared_transaction_outlives_a_crash_of_the_server_and_a_restart_of_capture(
    orders: SourceUnderTest, server: CopiedServer
) -> None:
    orders.sql(prepared("kept", "UPDATE orders SET v = 'kept' WHERE id = 1"))
    orders.sql(prepared("dropped", "UPDATE orders SET v = 'dropped' WHERE id = 2"))
    orders.sql("INSERT INTO orders VALUES (3, 'c')")
    orders.killed_at("landing.manifest.after")
    pid = server.server.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    server.start()
    orders.catch_up()
    orders.sql("COMMIT PREPARED 'kept'", "ROLLBACK PREPARED 'dropped'", "INSERT INTO orders VALUES (4, 'd')")
    orders.catch_up()
    assert [event.key for event in orders.changes()] == ['["3"]', '["1"]', '["4"]']
    assert folded(orders.events(), "orders") == orders.rows("orders", COLUMNS)


def test_table_that_is_read_while_a_transaction_is_prepared_has_what_it_commits(
    orders: SourceUnderTest,
) -> None:
    """The read does not see it; so it has to stand below the transaction's commit."""
    orders.sql(prepared("kept", "UPDATE orders SET v = 'kept' WHERE id = 1"))
    orders.sql("CREATE TABLE later (id int PRIMARY KEY, v text)", "INSERT INTO later VALUES (1, 'a')")
    orders.sql(prepared("of later", "UPDATE later SET v = 'kept'"))
    orders.tables.append(contract("later", COLUMNS))
    orders.sql("COMMIT PREPARED 'kept'", "COMMIT PREPARED 'of later'")
    orders.catch_up()
    orders.sql("INSERT INTO later VALUES (2, 'b')")
    orders.catch_up()
    for table in ("orders", "later"):
        assert folded(orders.events(), table) == orders.rows(table, COLUMNS)
