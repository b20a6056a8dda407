"""The files of one embedded server: its log, and its folders, which are chosen once and recorded."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import stat
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from omnisupport_ingest import durable
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.foreign import Unreadable
from omnisupport_ingest.json_values import FieldProblem
from omnisupport_ingest.records import encode, read_note
from omnisupport_ingest.sources.postgres.embedded.binaries import SHARED_FOLDER, make_shared_folder, reachable

_RECORD = "location.json"
_LONGEST_SOCKET_PATH = 103
"""Largest length of a socket's path in bytes: 107 on Linux, 103 on macOS (``sun_path`` without NUL)."""

PORT = 5432
"""Used only in the socket's name: nothing listens on TCP."""

_SOCKET_NAME = f".s.PGSQL.{PORT}"


class LocationUnusable(IngestError):
    """The folders of the embedded PostgreSQL cannot be read or made, or others may enter them.

    Fix: Restore or remove what the message names, or set ``OMNISUPPORT_HOME`` to another folder.
    """

    exit_code = 4


_NAME = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class _Record:
    name: str
    outside: bool


@dataclass(frozen=True)
class Location:
    """The folders of one server. ``base``: contains the data folder and the configuration. ``socket``: the
    folder of the socket. ``shared``: this server's part of the folder that only root writes to."""

    base: Path
    socket: Path
    shared: Path

    @property
    def data(self) -> Path:
        return self.base / "data"

    @property
    def programs(self) -> Path:
        """The folder for a copy of the programs, used if the server's user cannot reach those of the wheel.

        Never in the home: root makes the copy, and no other user may change anything on its path.
        """
        return self.shared / "programs"

    @classmethod
    def read(cls, folder: Path) -> Location | None:
        """Return the location recorded in ``folder``; None if no server was made there.

        Raises ``LocationUnusable`` if the record cannot be read.
        """
        record = folder / _RECORD
        try:
            content = read_note(_Record, record)
            if _NAME.fullmatch(content.name) is None:
                # It is part of a path below which ``remove`` deletes everything.
                raise FieldProblem("name", "is no name that was given to a server")
            return cls._of(folder, name=content.name, outside=content.outside)
        except FileNotFoundError:
            return None
        except (OSError, Unreadable) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise LocationUnusable(
                f"{record} cannot be read: {reason}.",
                fix=f"Restore it from a backup: it says whether the data is in {folder} or in a folder "
                f"below {SHARED_FOLDER}, and the name of that.",
            ) from error

    @classmethod
    def choose(cls, folder: Path, uid: int) -> Location:
        """Choose and record folders that ``uid`` can reach, in ``folder`` itself if possible.

        A folder outside has a random name, not one derived from ``folder``. So a home that is moved keeps its
        data, and a new home under the old path never finds the data of another. Raises ``LocationUnusable``.
        """
        outside = uid != os.geteuid() and not reachable(folder / "data", uid)
        name = uuid.uuid4().hex[:16]
        location = cls._of(folder, name=name, outside=outside)
        if outside:
            try:
                make_shared_folder(location.base)
            except OSError as error:
                raise LocationUnusable(
                    f"PostgreSQL cannot run as root, its user (id {uid}) cannot enter {folder}, and "
                    f"{location.base} cannot be made: {error.strerror}.",
                    fix="Set OMNISUPPORT_HOME to a folder that another user owns, run as that user, or "
                    "set OMNISUPPORT_SOURCE_DSN to a PostgreSQL server of your own.",
                ) from error
        # No failpoint: the embedded PostgreSQL is a source for trials; its data is made beside its final
        # path, then renamed.
        durable.replace(folder / _RECORD, encode(_Record(name, outside)))
        return location

    @classmethod
    def _of(cls, folder: Path, *, name: str, outside: bool) -> Location:
        shared = SHARED_FOLDER / name
        base = shared if outside else folder
        socket = base / "socket"
        if len(os.fsencode(socket / _SOCKET_NAME)) > _LONGEST_SOCKET_PATH:
            socket = Path("/tmp") / f"omnisupport-{name}"  # noqa: S108 (make_private_folder checks it)
        return cls(base, socket, shared)

    def remove(self) -> None:
        """Remove data, configuration, socket and programs. The folder with the record stays."""
        for path in (self.socket, self.data, self.base / "data.new", self.programs):
            if path.is_dir() and not path.is_symlink():
                # No failpoint: the embedded PostgreSQL is a source for trials; its data is made beside its
                # final path, then renamed.
                shutil.rmtree(path)
        (self.base / "server.conf").unlink(missing_ok=True)
        if self.shared.is_dir():
            self.shared.rmdir()
            # The folder above stays while another home has something in it.
            with suppress(OSError):
                self.shared.parent.rmdir()


def make_private_folder(path: Path, uid: int) -> None:
    """Make ``path``, owned by ``uid`` and closed to others. If it exists already, it must be exactly that.

    Raises ``LocationUnusable`` if it is not: ``/tmp`` is open to everyone, so somebody else may have made a
    folder or link of that name.
    """
    try:
        # No failpoint: the embedded PostgreSQL is a source for trials; its data is made beside its final
        # path, then renamed.
        path.mkdir(mode=0o700)
        if uid != os.geteuid():
            os.chown(path, uid, -1)
    except FileExistsError:
        facts = path.lstat()
        if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != uid or facts.st_mode & 0o077:
            raise LocationUnusable(
                f"{path} is there, but is not a folder that only user id {uid} can enter.",
                fix=f"Find out what made it; then remove it: rm -r {shlex.quote(str(path))}",
            ) from None


_MAX_BYTES = 10 * 1024 * 1024
_OLDER_PARTS = 3
_TAIL_BYTES = 2000


class ServerLog:
    """The server's log, of limited size: the file ``path``, older parts ``path.1`` (newest) to ``path.3``."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def open(self) -> BinaryIO:
        """Open the log for appending, for its owner only. The server keeps it open as long as it runs."""
        # No failpoint: logs.
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.fdopen(os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab")

    def rotate(self) -> None:
        """Copy a log above 10 MiB to ``.1``, then empty it.

        The server still has the file open and appends at the new end. A line written between copying and
        emptying is lost, because the server is not restarted. If the copy fails, for example because the disk
        is full, the log stays as it is: a log must not prevent the server from starting.
        """
        with suppress(OSError):
            self._rotate()

    def _rotate(self) -> None:
        if not self.path.exists() or self.path.stat().st_size <= _MAX_BYTES:
            return
        for number in range(_OLDER_PARTS, 1, -1):
            newer = self._part(number - 1)
            if newer.exists():
                # No failpoint: logs.
                newer.replace(self._part(number))
        try:
            shutil.copy(self.path, self._part(1))
        except OSError:
            # A partial copy would use up disk space, which is what is missing.
            self._part(1).unlink(missing_ok=True)
            raise
        os.truncate(self.path, 0)

    def tail(self) -> str:
        """Return the end of the log, about 2,000 bytes."""
        if not self.path.exists():
            return ""
        content = self.path.read_bytes()[-_TAIL_BYTES:]
        return content.decode(errors="replace").strip()

    def _part(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}")
