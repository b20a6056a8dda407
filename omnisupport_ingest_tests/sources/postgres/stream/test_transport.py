"""The stream is the same read from the socket and through libpq, which a connection with TLS needs."""

from __future__ import annotations

import ctypes

import pytest
from psycopg2.extensions import connection as Connection

from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.sources.postgres.protocol import transport, walstream
from omnisupport_ingest.sources.postgres.protocol.transport import LibpqTransport
from omnisupport_ingest.sources.postgres.stream.follower import Follower
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest, contract, folded

COLUMNS = ("id", "v")


def through_libpq(connection: Connection) -> LibpqTransport:
    return LibpqTransport(transport._libpq(), ctypes.c_void_p(connection.pgconn_ptr))


def test_changes_come_through_libpq_as_from_the_socket(
    source: SourceUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.sql("CREATE TABLE notes (id int PRIMARY KEY, v text)")
    source.tables.append(contract("notes", COLUMNS))
    source.catch_up()
    for use_libpq in (True, False, True):
        with monkeypatch.context() as patched:
            if use_libpq:
                patched.setattr(walstream, "transport_of", through_libpq)
            source.sql(
                "INSERT INTO notes SELECT coalesce(max(id), 0) + n, repeat('x\"', 40) || n"
                " FROM notes RIGHT JOIN generate_series(1, 300) n ON true GROUP BY n",
                "UPDATE notes SET v = repeat('long', 200000) WHERE id = 7",
                "DELETE FROM notes WHERE id % 5 = 0",
            )
            source.catch_up()
    assert folded(source.events(), "notes") == source.rows("notes", COLUMNS)


def test_a_time_that_is_over_while_changes_flow_is_no_wait(
    source: SourceUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.sql("CREATE TABLE notes (id int PRIMARY KEY, v text)")
    source.tables.append(contract("notes", COLUMNS))
    source.catch_up()
    monkeypatch.setattr(Follower, "_seconds_to_wait", lambda _self: -0.01)
    source.sql("INSERT INTO notes SELECT n, repeat('text', 50) FROM generate_series(1, 20000) n")
    source.catch_up()
    assert folded(source.events(), "notes") == source.rows("notes", COLUMNS)


@pytest.mark.parametrize("use_libpq", [True, False])
def test_server_that_refuses_to_start_says_why(
    source: SourceUnderTest, monkeypatch: pytest.MonkeyPatch, use_libpq: bool
) -> None:
    source.sql("CREATE TABLE notes (id int PRIMARY KEY, v text)")
    source.tables.append(contract("notes", COLUMNS))
    source.catch_up()
    if use_libpq:
        monkeypatch.setattr(walstream, "transport_of", through_libpq)
    monkeypatch.setattr(walstream, "literal", lambda _value: "'9999'")
    source.sql("INSERT INTO notes VALUES (1, 'a')")
    with pytest.raises(IngestError, match=r"refused to start replication: ERROR: streaming requires"):
        source.catch_up()
