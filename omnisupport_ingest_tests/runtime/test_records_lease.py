"""One daemon for Dagster's records in a PostgreSQL: who comes second stands by until the first is gone."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

import psycopg2
import pytest
from pydantic import SecretStr

from omnisupport_ingest.runtime import records_lease
from omnisupport_ingest.runtime.records_lease import RecordsLease, daemon_of
from omnisupport_ingest_tests.waiting import until


@pytest.fixture
def url(records: SecretStr, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(records_lease, "_LOOK_SECONDS", 0.05)
    return records.get_secret_value()


class Standby:
    """A second daemon's wait, on a thread."""

    def __init__(self, url: str) -> None:
        self.said: list[str] = []
        self.lease: RecordsLease | None = None
        threading.Thread(target=self._wait, args=(url,), daemon=True).start()

    def _wait(self, url: str) -> None:
        self.lease = RecordsLease.wait_for(url, self.said.append)


@contextmanager
def asking(url: str) -> Iterator[psycopg2.extensions.cursor]:
    with closing(psycopg2.connect(url)) as connection:
        connection.autocommit = True
        with connection.cursor() as cursor:
            yield cursor


def end_holder(url: str) -> None:
    """End its session, as the server does when its machine is gone."""
    with asking(url) as cursor:
        cursor.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND granted"
        )
        assert cursor.fetchall() == [(True,)]


def test_the_second_stands_by_and_goes_on_when_the_session_of_the_first_has_ended(url: str) -> None:
    assert daemon_of(url) is None
    lost = threading.Event()
    RecordsLease.wait_for(url, lambda _: pytest.fail("nobody else has them")).keep(lost.set)
    assert daemon_of(url) == socket.gethostname()
    second = Standby(url)
    until(lambda: second.said)
    assert f"on {socket.gethostname()} has these records" in second.said[0]
    assert second.lease is None and not lost.is_set()
    end_holder(url)
    # The first hears of it, and the second has it; in whatever order.
    until(lost.is_set)
    until(lambda: second.lease is not None)
    assert len(second.said) == 2, "what it waits for is said once"


def test_who_hangs_gives_no_heartbeat_and_loses_its_session_to_who_stands_by(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session of a process that is stopped lives on: the kernel answers for it."""
    lost, time_passes = threading.Event(), threading.Event()
    RecordsLease.wait_for(url, lambda _: None).keep(lost.set)
    with asking(url) as cursor:
        # As Dagster keeps them: UTC without a zone. These are of the daemon before.
        cursor.execute("CREATE TABLE daemon_heartbeats (timestamp timestamp)")
        cursor.execute("INSERT INTO daemon_heartbeats VALUES ('2026-01-01')")
        second = Standby(url)
        until(lambda: second.said)
        time_passes.wait(1)
        assert second.lease is None, "it has had no time to give one"
        cursor.execute(
            "UPDATE daemon_heartbeats SET timestamp = now() AT TIME ZONE 'UTC' + interval '1 hour'"
        )
        monkeypatch.setattr(records_lease, "HUNG_SECONDS", 1)
        time_passes.wait(2)
        assert second.lease is None and not lost.is_set(), "it gives them"
        cursor.execute("UPDATE daemon_heartbeats SET timestamp = '2026-01-01'")
        until(lambda: second.lease is not None)
        until(lost.is_set)


def test_another_database_of_the_server_has_another_daemon(url: str) -> None:
    lease = RecordsLease.wait_for(url, lambda _: None)
    other = url.replace(url.rpartition("/")[2].partition("?")[0], "postgres")
    assert other != url
    assert (daemon_of(url), daemon_of(other)) == (socket.gethostname(), None)
    assert lease is not None


def test_the_name_of_a_driver_is_sqlalchemys_alone(url: str) -> None:
    assert daemon_of(url.replace("postgresql://", "postgresql+psycopg2://")) is None
