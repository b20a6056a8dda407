"""The embedded server through its life: started, killed, restarted, moved, removed."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import psycopg2
import pytest

from omnisupport_ingest.sources.postgres.embedded import binaries, files
from omnisupport_ingest.sources.postgres.embedded import server as embedded
from omnisupport_ingest.sources.postgres.embedded.files import Location, LocationUnusable, ServerLog
from omnisupport_ingest.sources.postgres.embedded.server import EmbeddedPostgres, EmbeddedPostgresError
from omnisupport_ingest_tests.small_disk import small_disk
from omnisupport_ingest_tests.waiting import PATIENCE

pytestmark = pytest.mark.full

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root has to step down")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedPostgres]:
    """One server that the tests below start, kill and stop; each begins with ``start`` or ``stop``."""
    home = tmp_path_factory.mktemp("home")
    server = EmbeddedPostgres(home / "postgres", logs=home / "logs")
    yield server
    server.destroy()


def ask(server: EmbeddedPostgres, statement: str) -> object:
    with closing(psycopg2.connect(server.dsn())) as connection, connection, connection.cursor() as cursor:
        cursor.execute(statement)
        return cursor.fetchone()[0] if cursor.description else None


def test_a_new_server_is_ready_for_logical_decoding_in_utc(postgres: EmbeddedPostgres) -> None:
    assert ask(postgres, "SELECT current_database()") == "support"
    assert ask(postgres, "SHOW wal_level") == "logical"
    assert ask(postgres, "SHOW TimeZone") == "UTC"
    assert ask(postgres, "SHOW listen_addresses") == ""
    # Of the file that a server is made with: the one of the tests is told otherwise.
    made_with = "FROM pg_file_settings WHERE name = 'fsync' AND sourcefile NOT LIKE '%%.auto.conf'"
    assert ask(postgres, f"SELECT string_agg(setting, '') {made_with}") == "on"
    assert ask(postgres, "SHOW server_encoding") == "UTF8"


def test_a_committed_row_comes_out_of_a_replication_slot(postgres: EmbeddedPostgres) -> None:
    ask(postgres, "CREATE TABLE decoded (id int PRIMARY KEY); CREATE PUBLICATION decoded FOR TABLE decoded")
    ask(postgres, "SELECT pg_create_logical_replication_slot('decoded', 'pgoutput')")
    ask(postgres, "INSERT INTO decoded VALUES (1)")
    kinds = ask(
        postgres,
        "SELECT string_agg(chr(get_byte(data, 0)), '') FROM pg_logical_slot_peek_binary_changes("
        "'decoded', NULL, NULL, 'proto_version', '1', 'publication_names', 'decoded')",
    )
    assert kinds == "BRIC"
    ask(postgres, "SELECT pg_drop_replication_slot('decoded')")


def test_start_and_stop_may_be_repeated_and_the_dsn_stays(server: EmbeddedPostgres) -> None:
    server.stop()
    server.start()
    pid, dsn = server.pid, server.dsn()
    server.start()
    assert EmbeddedPostgres(server.folder).pid == pid
    assert server.pid == pid
    server.stop()
    server.stop()
    assert not server.running
    assert server.dsn() == dsn
    server.start()
    assert ask(server, "SELECT 1") == 1


def test_committed_rows_survive_a_kill_and_open_sessions_do_not_block_the_restart(
    server: EmbeddedPostgres,
) -> None:
    server.start()
    ask(server, "CREATE TABLE kept AS SELECT generate_series(1, 1000) AS id")
    with closing(psycopg2.connect(server.dsn())) as open_session:
        open_session.cursor().execute("INSERT INTO kept VALUES (0)")
        killed = server.pid
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        server.start()
    assert server.pid != killed
    assert ask(server, "SELECT count(*) FROM kept") == 1000


def test_a_pid_file_that_names_a_stranger_is_not_believed(server: EmbeddedPostgres) -> None:
    """After a restart of a container the pid of the dead server belongs to some other program."""
    server.start()
    location = Location.read(server.folder)
    assert location is not None
    pid_file = location.data / "postmaster.pid"
    lines = pid_file.read_text()
    server.stop()
    owner = location.data.stat()
    stranger = subprocess.Popen(
        ["/bin/sleep", "60"], cwd="/", user=owner.st_uid if os.geteuid() == 0 else None
    )
    try:
        pid_file.write_text("\n".join([str(stranger.pid), *lines.split("\n")[1:]]))
        os.chown(pid_file, owner.st_uid, -1)
        assert not EmbeddedPostgres(server.folder).running
        server.start()
        assert server.pid not in (None, stranger.pid)
        server.stop()
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_the_server_outlives_its_starter_and_has_none_of_its_files(
    server: EmbeddedPostgres, tmp_path: Path
) -> None:
    server.stop()
    server.folder.mkdir(exist_ok=True)
    secret = tmp_path / "secret"
    script = (
        "import os, sys; from pathlib import Path\n"
        "from omnisupport_ingest.sources.postgres.embedded.server import EmbeddedPostgres\n"
        "file = open(sys.argv[2], 'w'); os.set_inheritable(file.fileno(), True)\n"
        "EmbeddedPostgres(Path(sys.argv[1])).start()\n"
    )
    subprocess.run(
        [sys.executable, "-c", script, str(server.folder), str(secret)], check=True, timeout=PATIENCE
    )
    assert server.pid is not None
    assert os.getsid(server.pid) != os.getsid(0)
    assert str(secret) not in {file.path for file in psutil.Process(server.pid).open_files()}


def test_a_server_that_was_never_started_is_told_with_the_commands_that_start_it(tmp_path: Path) -> None:
    with pytest.raises(EmbeddedPostgresError, match="There is no embedded PostgreSQL") as raised:
        EmbeddedPostgres(tmp_path / "postgres").dsn()
    assert "omnisupport-ingest up" in raised.value.fix


def test_destroy_leaves_nothing(tmp_path: Path) -> None:
    server = EmbeddedPostgres(tmp_path / "postgres", version="16")
    server.start()
    assert str(ask(server, "SHOW server_version")).startswith("16.")
    location = Location.read(server.folder)
    assert location is not None
    postmaster = psutil.Process(server.pid)
    processes = [postmaster, *postmaster.children()]
    server.destroy()
    for path in (server.folder, location.data, location.socket):
        assert not path.exists()
    assert location.base == server.folder or not location.base.exists()
    assert not location.shared.exists()
    gone, _ = psutil.wait_procs(processes, timeout=PATIENCE)
    assert len(gone) == len(processes)
    server.destroy()


def test_only_the_servers_user_and_root_can_reach_data_and_socket(postgres: EmbeddedPostgres) -> None:
    location = Location.read(postgres.folder)
    assert location is not None
    for folder in (location.data, location.socket):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_folder_with_a_long_path_gets_its_socket_elsewhere(tmp_path: Path) -> None:
    folder = tmp_path / ("long-" * 20) / "postgres"
    folder.mkdir(parents=True)
    location = Location.choose(folder, os.geteuid())
    assert location.base == folder
    assert len(str(location.socket / ".s.PGSQL.5432")) < 104
    assert Location.read(folder) == location


def test_somebody_elses_socket_folder_is_not_used(server: EmbeddedPostgres) -> None:
    server.start()
    server.stop()
    location = Location.read(server.folder)
    assert location is not None
    location.socket.chmod(0o777)
    with pytest.raises(LocationUnusable, match="only user id"):
        server.start()
    location.socket.chmod(0o700)


def test_a_start_that_fails_shows_the_end_of_the_log(server: EmbeddedPostgres) -> None:
    server.start()
    server.stop()
    location = Location.read(server.folder)
    assert location is not None
    control = location.data / "global" / "pg_control"
    lost = control.rename(control.with_suffix(".lost"))
    with pytest.raises(EmbeddedPostgresError, match="pg_control"):
        server.start()
    lost.rename(control)


def test_a_full_disk_is_said_before_anything_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "_SPACE_FOR_A_NEW_SERVER", 1 << 60)
    server = EmbeddedPostgres(tmp_path / "postgres")
    with pytest.raises(embedded.NotEnoughSpace, match="MiB free"):
        server.start()
    server.destroy()


def test_a_version_that_is_not_bundled_is_named(tmp_path: Path) -> None:
    server = EmbeddedPostgres(tmp_path / "postgres", version="11")
    with pytest.raises(binaries.PostgresNotBundled, match="no PostgreSQL 11"):
        server.start()
    server.destroy()


def test_a_large_log_is_moved_aside_while_the_server_appends(tmp_path: Path) -> None:
    log = ServerLog(tmp_path / "postgres.log")
    with log.open() as file:
        file.write(b"x" * (10 * 1024 * 1024 + 1))
        file.flush()
        log.rotate()
        file.write(b"next")
        file.flush()
    assert log.tail() == "next"
    assert (tmp_path / "postgres.log.1").stat().st_size == 10 * 1024 * 1024 + 1


@as_root
def test_root_uses_the_folder_itself_where_the_servers_user_can_enter_it() -> None:
    folder = Path("/tmp") / f"omnisupport-open-{os.getpid()}" / "postgres"
    folder.mkdir(parents=True)
    server = EmbeddedPostgres(folder)
    try:
        server.start()
        assert (folder / "data" / "PG_VERSION").is_file()
    finally:
        server.destroy()
        folder.parent.rmdir()


@as_root
def test_programs_that_the_user_cannot_reach_are_copied_once(tmp_path: Path) -> None:
    shared = Path("/tmp") / f"omnisupport-shared-{os.getpid()}"
    source = binaries.bundled()
    copied = shared / "copy"
    try:
        binaries._copy(source, copied)
        binaries._copy(source, copied)
        assert [path.name for path in shared.iterdir()] == ["copy"]
        for program in ("initdb", "pg_ctl", "postgres"):
            ran = subprocess.run(
                [copied / source.parent.name / source.name / "bin" / program, "--version"],
                user="nobody",
                cwd="/",
                capture_output=True,
                check=True,
            )
            assert b"PostgreSQL" in ran.stdout
    finally:
        subprocess.run(["rm", "-r", str(shared)], check=True)


@as_root
def test_a_copy_of_the_programs_is_the_servers_own_and_goes_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = Path("/tmp") / f"omnisupport-copies-{os.getpid()}"
    monkeypatch.setattr(files, "SHARED_FOLDER", shared)
    monkeypatch.setattr(binaries, "reachable", lambda path, uid: False)
    first, second = EmbeddedPostgres(tmp_path / "first"), EmbeddedPostgres(tmp_path / "second")
    before = os.umask(0o077)
    try:
        for server in (first, second):
            server.start()
            assert ask(server, "SELECT 1") == 1
        kept = Location.read(second.folder)
        assert kept is not None and kept.programs.is_dir()
        first.destroy()
        assert [path.name for path in shared.iterdir()] == [kept.shared.name]
        assert ask(second, "SELECT 1") == 1
        second.destroy()
        assert not shared.exists()
    finally:
        os.umask(before)
        first.destroy()
        second.destroy()


@as_root
def test_a_user_who_is_not_root_keeps_everything_in_the_folder() -> None:
    """In a forked child that becomes ``nobody``: the interpreter itself may lie below /root."""
    home = Path("/tmp") / f"omnisupport-user-{os.getpid()}"
    home.mkdir(mode=0o700)
    os.chown(home, 65534, 65534)
    folder = home / ("too-long-for-a-socket-" * 4) / "postgres"
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            server = EmbeddedPostgres(folder)
            server.start()
            inside = (folder / "data" / "PG_VERSION").is_file()
            answered = ask(server, "SELECT 1") == 1
            os.kill(server.pid or 0, signal.SIGKILL)
            server.start()
            server.stop()
            server.destroy()
            status = 0 if inside and answered and not folder.exists() else 2
        finally:
            os._exit(status)
    deadline = time.monotonic() + PATIENCE
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert ended == (child, 0)
    folder.parent.rmdir()
    home.rmdir()


def test_a_log_that_cannot_be_moved_aside_on_a_full_disk_keeps_no_server_from_starting(
    tmp_path: Path,
) -> None:
    with small_disk(tmp_path / "disk", 24) as disk:
        log = ServerLog(disk.path / "postgres.log")
        with log.open() as file:
            file.write(b"x" * (11 * 1024 * 1024))
        with disk.full(but=1024 * 1024):
            log.rotate()
            assert [path.name for path in sorted(disk.path.glob("postgres.log*"))] == ["postgres.log"]
        log.rotate()
        assert log.path.stat().st_size == 0
        assert (disk.path / "postgres.log.1").stat().st_size == 11 * 1024 * 1024
