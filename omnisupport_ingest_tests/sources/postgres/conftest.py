"""A database of its own for each test, on the session's server."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from omnisupport_ingest.sources.postgres.embedded.server import EmbeddedPostgres
from omnisupport_ingest.sources.postgres.session.connection import connect
from omnisupport_ingest_tests.sources.postgres.awkward import AwkwardServer, Shop
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest
from omnisupport_ingest_tests.sources.postgres.two_readers import TwoReaders, two_readers_of_notes


@pytest.fixture
def source(postgres: EmbeddedPostgres, tmp_path: Path) -> Iterator[SourceUnderTest]:
    """An empty database with a slot name of its own; both are gone after the test."""
    name = f"capture_{secrets.token_hex(4)}"
    admin = connect(postgres.dsn())
    with admin.cursor() as cursor:
        cursor.execute(f"CREATE DATABASE {name} STRATEGY file_copy")
        yield SourceUnderTest(postgres.dsn(name), name, tmp_path / "home")
    admin.close()
    _drop(postgres.dsn(), name)


def _drop(dsn: str, name: str) -> None:
    connection = connect(dsn)
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pg_terminate_backend(active_pid, 5000) FROM pg_replication_slots"
            " WHERE database = %s AND active",
            (name,),
        )
        cursor.execute(
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots"
            " WHERE database = %s AND NOT temporary",
            (name,),
        )
        cursor.execute(f"DROP DATABASE {name} WITH (FORCE)")
    connection.close()


@pytest.fixture
def both(source: SourceUnderTest, tmp_path: Path) -> TwoReaders:
    """Two readers of a table ``notes`` with a TOASTed column, both up to now."""
    return two_readers_of_notes(source, tmp_path)


@pytest.fixture(scope="session")
def awkward(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AwkwardServer]:
    """A server with passwords and rules; a test that changes it changes it back."""
    server = AwkwardServer(tmp_path_factory.mktemp("awkward") / "server")
    yield server
    server.server.destroy()


@pytest.fixture
def shop(awkward: AwkwardServer, tmp_path: Path) -> Iterator[Shop]:
    """A database with two tables, a publication and a home with nothing wrong; no slot is left of it."""
    made = Shop(awkward, tmp_path)
    yield made
    made.sql(
        "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots"
        " WHERE database = current_database() AND NOT active AND NOT temporary"
    )
