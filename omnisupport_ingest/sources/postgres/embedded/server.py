"""A PostgreSQL server of our own, so that the platform runs where no server is installed.

One folder describes the server, and one lock in that folder serialises starting, stopping and removing it.
Whether the server runs is read from the operating system, never recorded. It listens only on a Unix socket.
Only its own user and root may enter the socket's folder; this is the authentication.

PostgreSQL refuses to run as root. If root starts the server, it runs as the owner of ``folder``, or as
``postgres`` or ``nobody``. If that user cannot enter ``folder`` (the home of root is closed to others), the
data goes to ``/var/lib/omnisupport-ingest/<random>``. If the user cannot reach the programs either, a copy of
them goes there too. ``location.json`` in ``folder`` records this, and ``destroy`` removes it.
"""

from __future__ import annotations

import os
import pwd
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path

import psutil
import psycopg2
from psycopg2.extensions import make_dsn

from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.foreign import read_file
from omnisupport_ingest.locks import locked_folder
from omnisupport_ingest.sources.postgres.embedded import binaries
from omnisupport_ingest.sources.postgres.embedded.files import (
    PORT,
    Location,
    ServerLog,
    make_private_folder,
)
from omnisupport_ingest.sources.postgres.session.quoting import identifier

_PID = re.compile(r"[0-9]{1,9}")


def live_postmaster(data: Path) -> int | None:
    """Return the pid in ``postmaster.pid`` if that process is a server that works in ``data``, else None.

    The pid alone proves nothing: process ids are reused (in a container the same few, at every start), and a
    killed child may stay as a zombie. But the working folder of a server is its data folder.
    """
    try:
        first = read_file(data / "postmaster.pid").decode().split("\n", 1)[0].strip()
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    pid = int(first) if _PID.fullmatch(first) else 0
    return pid if pid and _works_in(pid, data) else None


def _works_in(pid: int, data: Path) -> bool:
    try:
        return Path(psutil.Process(pid).cwd()) == data.resolve()
    except (psutil.Error, OSError):
        return False


def any_at_work(data: Path) -> bool:
    """Whether any process works in ``data``: the server, or one of its sessions that outlived it."""
    return any(_works_in(pid, data) for pid in psutil.pids())


def remove_stale_locks(data: Path, socket: Path) -> None:
    """Remove the lock files of a dead server whose pid now belongs to another process.

    PostgreSQL would take that process for a server. Call it only if no process works in ``data``.
    """
    for lock in (data / "postmaster.pid", *socket.glob(".s.PGSQL.*.lock")):
        # No failpoint: locks of a server that is dead.
        lock.unlink(missing_ok=True)


DATABASE = "support"
"""The default database; ``start`` creates it if it does not exist."""

_OTHER_DATABASES = {"social": "social"}
"""Sources that have their own database."""


def database_of(source: str) -> str:
    """Return the name of the database of ``source`` on an embedded server."""
    return _OTHER_DATABASES.get(source, DATABASE)


SUPERUSER = "postgres"
_UNPRIVILEGED_USERS = ("postgres", "nobody")
_SPACE_FOR_A_NEW_SERVER = 256 * 1024 * 1024
_START_SECONDS = 300
_ANSWER_SECONDS = 60
_STOP_SECONDS = 120
_LINGER_SECONDS = 15

_CONFIGURATION = """\
# Written at every start. Change settings with ALTER SYSTEM, which is kept and wins over this file.
listen_addresses = ''
port = {port}
unix_socket_directories = '{socket_folder}'
unix_socket_permissions = 0700
wal_level = logical
max_wal_senders = 10
max_replication_slots = 10
# A forgotten slot must not fill the disk: past this it is invalidated, which capture reports.
max_slot_wal_keep_size = '4GB'
fsync = on
timezone = 'UTC'
log_timezone = 'UTC'
# Row values stay out of the log: no statements, no DETAIL lines with keys.
log_min_messages = warning
log_min_error_statement = panic
log_error_verbosity = terse
log_checkpoints = off
log_line_prefix = '%m [%p] '
"""


class EmbeddedPostgresError(IngestError):
    """The embedded PostgreSQL could not be made, started, stopped or reached.

    Fix: Correct what the end of its log says, which is in the message, then start again; or set
    ``OMNISUPPORT_SOURCE_DSN`` to a server of your own.
    """

    exit_code = 4


class NotEnoughSpace(EmbeddedPostgresError):
    """The disk has no room for the data of the embedded PostgreSQL.

    Fix: Make room, or set ``OMNISUPPORT_HOME`` to a folder on another disk.
    """


class EmbeddedPostgres:
    """The server whose data belongs to ``folder``. Nothing happens before ``start``.

    ``logs``: folder of ``postgres.log`` and its older parts (default: ``folder``). ``version``: major version
    of a new server; existing data keeps its version. ``database``: created for the source.
    """

    def __init__(
        self,
        folder: Path,
        *,
        logs: Path | None = None,
        version: str | None = None,
        database: str = DATABASE,
    ) -> None:
        self.folder = folder.absolute()
        self._log = ServerLog((logs or self.folder).absolute() / "postgres.log")
        self._version = version or binaries.DEFAULT_VERSION
        self.database = database

    @property
    def pid(self) -> int | None:
        """Process id of the running server (its postmaster); None if it is not running."""
        location = Location.read(self.folder)
        return live_postmaster(location.data) if location else None

    @property
    def running(self) -> bool:
        return self.pid is not None

    def dsn(self, dbname: str | None = None) -> str:
        """Return the libpq connection string of ``dbname`` as superuser; None means ``database``.

        The string stays the same over restarts. Raises ``EmbeddedPostgresError`` if the server was never
        started.
        """
        location = Location.read(self.folder)
        if location is None:
            raise EmbeddedPostgresError(
                f"There is no embedded PostgreSQL in {self.folder} yet.",
                fix="Start it with `omnisupport-ingest up` or `omnisupport-ingest demo`, or set "
                "OMNISUPPORT_SOURCE_DSN to a PostgreSQL server of your own.",
            )
        dsn: str = make_dsn(
            host=str(location.socket), port=PORT, user=SUPERUSER, dbname=dbname or self.database
        )
        return dsn

    def start(self) -> None:
        """Start the server; return when it accepts connections and has its database.

        Creates the data on first use. Does nothing if the server is running. Recovers automatically from a
        server that was killed. Raises ``EmbeddedPostgresError`` with the end of the log if it fails,
        ``NotEnoughSpace``, or ``PostgresNotBundled``.
        """
        # No failpoint: the embedded PostgreSQL is a source for trials; its data is made beside its final
        # path, then renamed.
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked_folder(self.folder):
            self._log.rotate()
            user = _server_user(self.folder)
            location = Location.read(self.folder) or Location.choose(self.folder, user.pw_uid)
            if not location.data.exists():
                self._make_data(location, user)
            # A server that was just killed may still look alive, so only an answer counts.
            deadline = time.monotonic() + _ANSWER_SECONDS
            while True:
                if live_postmaster(location.data) is None:
                    self._launch(location, user)
                try:
                    self._make_database()
                    return
                except psycopg2.OperationalError as error:
                    if time.monotonic() > deadline:
                        raise self._silent(error) from error
                time.sleep(0.1)

    def stop(self) -> None:
        """Shut down fast: end the sessions, flush, and return when the server is gone.

        Waits, as PostgreSQL does, until connected replication readers have confirmed what they received; a
        reader that never confirms is cut off after two minutes. Does nothing if no server is running.
        """
        if not self.folder.is_dir():
            return
        with locked_folder(self.folder):
            self._end(signal.SIGINT)
            self._log.rotate()

    def destroy(self) -> None:
        """Stop immediately, and remove the data, the socket and ``folder``, wherever they are."""
        if not self.folder.is_dir():
            return
        with locked_folder(self.folder):
            self._end(signal.SIGQUIT)
            location = Location.read(self.folder)
            if location is not None:
                location.remove()
            # No failpoint: the embedded PostgreSQL is a source for trials; its data is made beside its final
            # path, then renamed.
            shutil.rmtree(self.folder)

    def _make_data(self, location: Location, user: pwd.struct_passwd) -> None:
        """Run initdb beside the final folder, then rename: so a half-made folder is never started."""
        if not location.base.is_dir():
            raise EmbeddedPostgresError(
                f"{location.base}, which {self.folder} names as the place of its data, is gone.",
                fix=f"Restore it from a backup, or remove {self.folder} to begin with an empty database.",
            )
        free = shutil.disk_usage(location.base).free
        if free < _SPACE_FOR_A_NEW_SERVER:
            raise NotEnoughSpace(
                f"{location.base} has {free >> 20} MiB free; a new embedded PostgreSQL needs "
                f"{_SPACE_FOR_A_NEW_SERVER >> 20} MiB.",
                fix="Free some space, or set OMNISUPPORT_HOME to a folder on another disk.",
            )
        programs = binaries.programs(self._version, user.pw_uid, location.programs)
        draft = location.base / "data.new"
        if draft.exists():
            # No failpoint: the embedded PostgreSQL is a source for trials; its data is made beside its final
            # path, then renamed.
            shutil.rmtree(draft)
        make_private_folder(draft, user.pw_uid)
        status = self._run(
            user,
            [
                *(programs / "initdb", "--pgdata", draft, "--username", SUPERUSER),
                *("--auth", "trust", "--encoding", "UTF8", "--locale", "C", "--no-instructions"),
            ],
        )
        if status != 0:
            shutil.rmtree(draft)
            raise self._failed("initdb could not make the data folder", location.data)
        draft.rename(location.data)

    def _launch(self, location: Location, user: pwd.struct_passwd) -> None:
        version = (location.data / "PG_VERSION").read_text().strip()
        programs = binaries.programs(version, user.pw_uid, location.programs)
        make_private_folder(location.socket, user.pw_uid)
        configuration = location.base / "server.conf"
        # No failpoint: the embedded PostgreSQL is a source for trials; its data is made beside its final
        # path, then renamed.
        configuration.write_text(_CONFIGURATION.format(port=PORT, socket_folder=location.socket))
        configuration.chmod(0o644)
        options = f"-c config_file={shlex.quote(str(configuration))}"
        command: list[str | Path] = [
            *(programs / "pg_ctl", "start", "--silent", "--wait", "--timeout", str(_START_SECONDS)),
            *("--pgdata", location.data, "--options", options),
        ]
        # Sessions of a killed server end by themselves, a moment after it. Until then they use the data, and
        # starting another server would corrupt it.
        _wait_for(lambda: not any_at_work(location.data), _LINGER_SECONDS)
        if not any_at_work(location.data):
            remove_stale_locks(location.data, location.socket)
        if self._run(user, command) != 0:
            raise self._failed("PostgreSQL did not start", location.data)

    def _make_database(self) -> None:
        with closing(psycopg2.connect(self.dsn("postgres"), connect_timeout=10)) as connection:
            connection.autocommit = True
            with connection.cursor() as cursor:
                cursor.execute("SELECT FROM pg_database WHERE datname = %s", (self.database,))
                if cursor.fetchone() is None:
                    # No failpoint: the embedded PostgreSQL is a source for trials; its data is made beside
                    # its final path, then renamed.
                    cursor.execute(f"CREATE DATABASE {identifier(self.database)}")

    def _end(self, how: signal.Signals) -> None:
        """Signal the postmaster (PostgreSQL manual, "Shutting Down the Server") until it is gone."""
        location = Location.read(self.folder)
        if location is None:
            return
        for attempt, seconds in ((how, _STOP_SECONDS), (signal.SIGQUIT, _LINGER_SECONDS)):
            pid = live_postmaster(location.data)
            if pid is None:
                break
            with suppress(ProcessLookupError):
                os.kill(pid, attempt)
            _wait_for(lambda: live_postmaster(location.data) is None, seconds)
        if not _wait_for(lambda: not any_at_work(location.data), _LINGER_SECONDS):
            raise EmbeddedPostgresError(
                f"The embedded PostgreSQL of {self.folder} does not stop.",
                fix=f"Look at {self._log.path}; end its processes by hand if the disk does not answer.",
            )

    def _run(self, user: pwd.struct_passwd, command: Sequence[str | Path]) -> int:
        """Run a PostgreSQL program as ``user``, isolated from this process; return its exit code.

        The log is opened here and passed on, so it may be in a folder that ``user`` cannot enter.
        """
        other = user.pw_uid != os.geteuid()
        with self._log.open() as log:
            return subprocess.run(
                [str(word) for word in command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env={"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC"},
                start_new_session=True,
                umask=0o077,
                check=False,
                user=user.pw_uid if other else None,
                group=user.pw_gid if other else None,
                extra_groups=[] if other else None,
            ).returncode

    def _silent(self, error: Exception) -> EmbeddedPostgresError:
        return EmbeddedPostgresError(
            f"The embedded PostgreSQL of {self.folder} runs, but does not answer on its socket: "
            f"{str(error).strip()}",
            fix=f"Stop and start it again; its log is {self._log.path}.",
        )

    def _failed(self, problem: str, data: Path) -> EmbeddedPostgresError:
        tail = self._log.tail()
        if "No space left on device" in tail:
            return NotEnoughSpace(
                f"{problem} ({data}): the disk is full.",
                fix="Free some space, or set OMNISUPPORT_HOME to a folder on another disk.",
            )
        return EmbeddedPostgresError(
            f"{problem} ({data}). The end of {self._log.path}:\n{tail}",
            fix="Correct what the log names. A PostgreSQL of your own can be used instead: set "
            "OMNISUPPORT_SOURCE_DSN.",
        )


def _server_user(folder: Path) -> pwd.struct_passwd:
    """Return the user that the server runs as: the current user, or, for root, an unprivileged user."""
    uid = os.geteuid()
    if uid == 0:
        uid = _owner_of_data(folder)
    candidates: list[int | str] = [uid] if uid != 0 else list(_UNPRIVILEGED_USERS)
    for candidate in candidates:
        with suppress(KeyError):
            return pwd.getpwuid(candidate) if isinstance(candidate, int) else pwd.getpwnam(candidate)
    wanted = " or ".join(str(candidate) for candidate in candidates)
    raise EmbeddedPostgresError(
        f"PostgreSQL needs a user with a name and other than root; there is no user {wanted} here.",
        fix="Add such a user to /etc/passwd, run as another user, or set OMNISUPPORT_SOURCE_DSN to a "
        "PostgreSQL server of your own.",
    )


def _owner_of_data(folder: Path) -> int:
    location = Location.read(folder)
    path = location.data if location is not None and location.data.exists() else folder
    return path.stat().st_uid


def _wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
