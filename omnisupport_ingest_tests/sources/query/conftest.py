"""A database with a table of tickets for each test, on the session's server."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from omnisupport_ingest.sources.postgres.embedded.server import EmbeddedPostgres
from omnisupport_ingest.sources.postgres.session.connection import connect
from omnisupport_ingest_tests.sources.query.tickets import INDEX, TABLE, Desk


@pytest.fixture
def desk(postgres: EmbeddedPostgres, tmp_path: Path) -> Iterator[Desk]:
    name = f"desk_{secrets.token_hex(4)}"
    with closing(connect(postgres.dsn())) as admin, admin.cursor() as cursor:
        cursor.execute(f"CREATE DATABASE {name} STRATEGY file_copy")
        (tmp_path / "landing").mkdir()
        with closing(connect(postgres.dsn(name))) as connection:
            desk = Desk(connection, postgres.dsn(name), tmp_path / "landing")
            desk.run(TABLE)
            desk.run(INDEX)
            yield desk
        cursor.execute(f"DROP DATABASE {name} WITH (FORCE)")
