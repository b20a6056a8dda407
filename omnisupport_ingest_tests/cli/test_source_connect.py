"""A person's own session on the source: a client, which ends nothing but itself."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from omnisupport_ingest.cli.source_connect import shown_dsn
from omnisupport_ingest.cli.up import SERVICE
from omnisupport_ingest.home import Home
from omnisupport_ingest.runtime.home_lock import EMBEDDED_SERVER, HomeLock, holder
from omnisupport_ingest.sources.postgres.embedded.server import EmbeddedPostgres
from omnisupport_ingest.windows import WindowSize
from omnisupport_ingest_tests.cli import pgbench
from omnisupport_ingest_tests.waiting import PATIENCE, until

_CONFIGURED = "host=db.example port=5433 dbname=shop user=me password=s3cret-word"


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home.open(tmp_path / "home", WindowSize.parse("hourly"))


@pytest.fixture
def psql(tmp_path: Path) -> Path:
    """A folder with a psql that tells what it was given, and which variable it found."""
    folder = tmp_path / "programs"
    folder.mkdir()
    program = folder / "psql"
    program.write_text('#!/bin/sh\necho "given $*"\necho "password $PGPASSWORD"\ncat\nexit 3\n')
    program.chmod(0o755)
    return folder


def ours(home: Home, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    return pgbench.command(
        *arguments, folder=home.path, variables={"OMNISUPPORT_HOME": str(home.path), **more}, timeout=PATIENCE
    )


def test_psql_gets_the_password_by_the_environment_alone_and_its_exit_code_is_ours(
    home: Home, psql: Path
) -> None:
    path = f"{psql}{os.pathsep}{os.environ['PATH']}"
    done = ours(home, "source", "connect", OMNISUPPORT_SOURCE_DSN=_CONFIGURED, PATH=path)
    given, password = done.stdout.splitlines()[:2]
    assert given == "given user=me dbname=shop host=db.example port=5433"
    assert password == "password s3cret-word"
    assert done.returncode == 3


def test_the_passphrase_of_the_key_is_handed_on_where_no_other_user_can_read_it(
    home: Home, psql: Path
) -> None:
    (psql / "psql").write_text(
        "#!/bin/sh\n"
        'echo "given $*"\n'
        'echo "as $(tr "\\0" " " < /proc/self/cmdline)"\n'
        # Each connection of a session reads it again.
        'cat "$PGSERVICEFILE" "$PGSERVICEFILE"\n'
        'env | grep -c "key-word"\n'
    )
    path = f"{psql}{os.pathsep}{os.environ['PATH']}"
    dsn = f"{_CONFIGURED} sslkey=/keys/me.key sslpassword=key-word"
    done = ours(home, "source", "connect", OMNISUPPORT_SOURCE_DSN=dsn, PATH=path)
    given, command, *file, in_environment = done.stdout.splitlines()
    assert "service=omnisupport_ingest" in given and "sslkey=/keys/me.key" in given
    assert "word" not in given + command
    assert file == ["[omnisupport_ingest]", "sslpassword=key-word"] * 2
    # OMNISUPPORT_SOURCE_DSN, which is where it came from.
    assert in_environment == "1"


@pytest.mark.parametrize("more", ["service=mine", "sslpassword=' key-word'"])
def test_a_passphrase_that_cannot_be_handed_on_is_not_dropped_silently(
    home: Home, psql: Path, more: str
) -> None:
    path = f"{psql}{os.pathsep}{os.environ['PATH']}"
    dsn = f"{_CONFIGURED} sslpassword=key-word {more}"
    done = ours(home, "source", "connect", OMNISUPPORT_SOURCE_DSN=dsn, PATH=path)
    assert done.returncode == 2
    assert "PGSERVICEFILE" in done.stderr and "key-word" not in done.stderr


@pytest.mark.skipif(shutil.which("psql") is None, reason="there is no psql here")
def test_psql_itself_takes_the_passphrase_from_there(home: Home, tmp_path: Path) -> None:
    """It opens the client's key before it looks whether the server wants it."""
    dsn = f"host=127.0.0.1 port=1 dbname=shop user=me sslpassword={'x' * 20} connect_timeout=5"
    done = ours(home, "source", "connect", OMNISUPPORT_SOURCE_DSN=dsn)
    assert "service" not in done.stderr, "psql found the service, and no fault in its file"
    assert "127.0.0.1" in done.stderr and done.returncode == 2


def test_without_a_client_it_says_how_to_connect_and_no_password(home: Home) -> None:
    done = ours(home, "source", "connect", "--print", OMNISUPPORT_SOURCE_DSN=_CONFIGURED)
    assert done.returncode == 0
    assert done.stdout == "user=me dbname=shop host=db.example port=5433\n"
    assert "psycopg2.connect('user=me dbname=shop host=db.example port=5433')" in done.stderr
    assert "OMNISUPPORT_SOURCE_DSN" in done.stderr
    assert "s3cret" not in done.stdout + done.stderr


def test_what_is_shown_of_a_connection_string_is_the_persons_part_of_it() -> None:
    dsn = f"{_CONFIGURED} sslpassword=hidden keepalives_idle=5 tcp_user_timeout=60000 sslmode=require"
    assert shown_dsn(dsn) == "user=me dbname=shop host=db.example port=5433 sslmode=require"


def test_where_no_server_runs_the_way_to_start_it_is_named(home: Home) -> None:
    done = ours(home, "source", "connect")
    assert done.returncode == 4
    assert "omnisupport-ingest up" in done.stderr


def until_kept(home: Home, process: subprocess.Popen[str]) -> None:
    """Wait until the server of ``home`` runs and is kept by ``process``."""
    give_up = time.monotonic() + PATIENCE
    while (found := holder(home, EMBEDDED_SERVER)) is None or not (
        found.pid == process.pid and EmbeddedPostgres(home.postgres).running
    ):
        assert process.poll() is None, "the command ended before its server ran"
        assert time.monotonic() < give_up, f"the server did not run within {PATIENCE:.0f} s"
        time.sleep(0.05)


@contextmanager
def keeping(home: Home, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """``postgres`` of ``home`` in a process of its own."""
    process = subprocess.Popen(
        [sys.executable, "-m", "omnisupport_ingest.cli.main", "postgres", *arguments],
        env=pgbench.environment({"OMNISUPPORT_HOME": str(home.path)}),
        text=True,
        stderr=subprocess.PIPE,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_postgres_on_a_home_in_use_refuses_at_once_and_names_user_and_client(home: Home) -> None:
    with HomeLock(home, "up"):
        began = time.monotonic()
        done = ours(home, "postgres")
    assert done.returncode == 6
    assert f"by `up` (process {os.getpid()}" in done.stderr
    assert "omnisupport-ingest source connect" in done.stderr
    assert time.monotonic() - began < 30
    assert not EmbeddedPostgres(home.postgres).running


def test_a_second_postgres_ends_nothing_of_the_first_and_a_client_is_let_in(home: Home) -> None:
    server = EmbeddedPostgres(home.postgres)
    try:
        with keeping(home) as first:
            until_kept(home, first)
            pid = server.pid
            second = ours(home, "postgres")
            assert second.returncode == 6
            assert f"runs as process {pid}, started by `postgres` (process {first.pid}" in second.stderr
            client = ours(home, "source", "connect", "--print")
            assert client.returncode == 0, client.stderr
            assert client.stdout.startswith("user=postgres dbname=support host=")
            # What it started, it ends.
            assert server.pid == pid
            first.send_signal(signal.SIGINT)
            assert first.wait(PATIENCE) == 0
            assert not server.running
        server.start()
        with keeping(home) as third:
            until_kept(home, third)
            # It has found it running.
            third.send_signal(signal.SIGINT)
            assert third.wait(PATIENCE) == 0
            assert server.running
    finally:
        server.destroy()


def takes_sigterm(pid: int) -> bool:
    """Whether the process handles SIGTERM by itself by now."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (caught,) = (line.split()[1] for line in lines if line.startswith("SigCgt"))
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


def test_a_service_waits_for_the_one_before_it_that_may_be_ending_the_server(home: Home) -> None:
    server = EmbeddedPostgres(home.postgres)
    try:
        before = HomeLock(home, SERVICE, EMBEDDED_SERVER)
        with HomeLock(home, "up"), before, keeping(home, "--service") as service:
            # Once it takes signals it looks at the lock, five times a second; it would end at the first look.
            until(lambda: service.poll() is not None or takes_sigterm(service.pid))
            time.sleep(3)
            assert service.poll() is None
            assert not server.running
            before.release()
            until_kept(home, service)
            service.send_signal(signal.SIGTERM)
            assert service.wait(PATIENCE) == 0
            assert not server.running
    finally:
        server.destroy()
