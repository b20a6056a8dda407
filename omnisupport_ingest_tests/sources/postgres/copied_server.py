"""Servers that are copies of one another: by their disk, by a base backup, or as a standby."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from psycopg2.extensions import parse_dsn

from omnisupport_ingest.sources.postgres.embedded import binaries
from omnisupport_ingest.sources.postgres.embedded.files import Location
from omnisupport_ingest.sources.postgres.embedded.server import EmbeddedPostgres
from omnisupport_ingest.sources.postgres.session.connection import connect


class CopiedServer:
    """A server of its own, and what is done to its data folder from outside."""

    def __init__(self, folder: Path) -> None:
        """Nothing runs before ``start``."""
        self.server = EmbeddedPostgres(folder)

    @property
    def location(self) -> Location:
        location = Location.read(self.server.folder)
        assert location is not None
        return location

    @property
    def data(self) -> Path:
        return self.location.data

    def start(self) -> None:
        self.server.start()

    def stop(self) -> None:
        self.server.stop()

    def restart(self) -> None:
        self.stop()
        self.start()

    def copy_disk(self, name: str) -> Path:
        """Stop the server, copy its data as they lie, start it again; returns the copy."""
        self.stop()
        copy = self.data.parent / name
        _copy(self.data, copy)
        self.start()
        return copy

    def put_back(self, copy: Path) -> None:
        """Stop the server, and start it again on the data of ``copy``."""
        self.stop()
        _copy(copy, self.data)
        self.start()

    def recover(self, backup: Path, *configuration: str) -> None:
        """Stop the server, have it recover from ``backup`` as ``configuration`` says, and be the primary."""
        self.stop()
        _copy(backup, self.data)
        self.configure(*configuration, "recovery_target_action = 'promote'")
        self.signal("recovery.signal")
        self.start()

    def base_backup(self, name: str, *options: str) -> Path:
        """A base backup, taken while the server runs, beside its data."""
        backup = self.data.parent / name
        facts = self.data.stat()
        version = (self.data / "PG_VERSION").read_text().strip()
        programs = binaries.programs(version, facts.st_uid, self.location.programs)
        other = facts.st_uid != os.geteuid()
        backup.mkdir(mode=0o700)
        os.chown(backup, facts.st_uid, facts.st_gid)
        subprocess.run(
            [
                *(programs / "pg_basebackup", "--pgdata", backup, "--checkpoint", "fast"),
                *("--dbname", self.server.dsn("postgres"), *options),
            ],
            check=True,
            cwd="/",
            env={"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC"},
            user=facts.st_uid if other else None,
            group=facts.st_gid if other else None,
            extra_groups=[] if other else None,
        )
        return backup

    def standby(self, folder: Path) -> CopiedServer:
        """A standby that streams from this server."""
        standby = CopiedServer(folder)
        folder.mkdir(mode=0o700)
        uid = self.data.stat().st_uid
        os.chown(folder, uid, -1)
        location = Location.choose(folder, uid)
        _copy(self.base_backup(f"for_{folder.name}", "--write-recovery-conf"), location.data)
        # The program that took the backup stands in its connection string; slots want a database there.
        host = parse_dsn(self.server.dsn())["host"]
        standby.configure(f"primary_conninfo = 'host={host} port=5432 user=postgres dbname=postgres'")
        standby.start()
        return standby

    def configure(self, *lines: str) -> None:
        """Add ``lines`` to the configuration; for the next start."""
        file = self.data / "postgresql.auto.conf"
        with file.open("a") as appended:
            appended.writelines(f"{line}\n" for line in lines)

    def signal(self, name: str) -> None:
        """Make the file that has the next start do a recovery, as its name says."""
        file = self.data / name
        file.touch(mode=0o600)
        facts = self.data.stat()
        os.chown(file, facts.st_uid, facts.st_gid)

    def sql(self, *statements: str, database: str = "support") -> None:
        connection = connect(self.server.dsn(database), application_name="test")
        with connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)
        connection.close()

    def value(self, query: str, database: str = "support") -> object:
        """The one value of ``query``."""
        connection = connect(self.server.dsn(database), application_name="test")
        with connection.cursor() as cursor:
            cursor.execute(query)
            (found,) = cursor.fetchone()
        connection.close()
        return found

    def destroy(self) -> None:
        if self.server.folder.is_dir():
            for copy in self.data.parent.glob("copy*"):
                shutil.rmtree(copy)
            for backup in self.data.parent.glob("for_*"):
                shutil.rmtree(backup)
            self.server.destroy()


def _copy(data: Path, to: Path) -> None:
    # With owners and times, as a copy of a disk has them.
    if to.exists():
        shutil.rmtree(to)
    subprocess.run(["cp", "-a", str(data), str(to)], check=True)
