"""Dagster's SQLite storage with connections that stay open.

Dagster's own storage opens a database for each statement and closes it afterwards. The last process to close
a database writes the log back into it and waits for the disk, and every commit waits too: an event costs
about ten milliseconds, and a run has more than a hundred. Here a process keeps its connections, and a commit
does not wait for the disk. A killed process loses nothing; a power loss loses at most the last records, never
their order. No data depends on them: sensors read from the lake what is missing. Tables, files and paths are
Dagster's own, so existing homes stay readable.

The imports below are private names of Dagster. ``dagster.yaml`` names our classes, so every process that
opens the instance fails with an error if one has moved.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import dagster as dg
from dagster._core.event_api import EventHandlerFn
from dagster._core.storage import sqlite_storage
from dagster._core.storage.asset_check_execution_record import (
    COMPLETED_ASSET_CHECK_EXECUTION_RECORD_STATUSES,
)
from dagster._core.storage.event_log import SqliteEventLogStorage
from dagster._core.storage.event_log.polling_event_watcher import SqlPollingEventWatcher
from dagster._core.storage.event_log.schema import AssetCheckExecutionsTable
from dagster._core.storage.event_log.sql_event_log import SqlEventLogStorage
from dagster._core.storage.runs import SqliteRunStorage
from dagster._core.storage.schedules import SqliteScheduleStorage
from dagster._core.storage.sqlite import create_db_conn_string
from dagster._core.storage.sqlite_storage import DagsterSqliteStorage
from dagster._serdes import ConfigurableClassData
from sqlalchemy import create_engine, event, func, select
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.pool import QueuePool

_BUSY_SECONDS = 30.0
"""How long a statement waits for a database that another process writes to; the same as Dagster's."""

_OPEN_DATABASES = 10
"""Number of databases whose connections stay open, the last used ones. Each run has a database of events."""


class OpenConnections:
    """The connections of an instance: a pool per database; those of the last used databases stay open."""

    def __init__(self) -> None:
        self._engines: dict[str, Engine] = {}
        self._lock = threading.Lock()

    @contextmanager
    def transaction(self, url: str) -> Iterator[Connection]:
        """Yield a connection to the database at ``url``, in a transaction that is committed at the end."""
        with self.engine(url).connect() as connection, connection.begin():
            yield connection

    def engine(self, url: str) -> Engine:
        """Return the pool of the database at ``url``."""
        with self._lock:
            engine = self._engines.pop(url, None)
            if engine is None:
                # One connection for each thread that needs one now; one of them stays open.
                engine = create_engine(
                    url,
                    poolclass=QueuePool,
                    pool_size=1,
                    max_overflow=-1,
                    connect_args={"timeout": _BUSY_SECONDS},
                )
                event.listen(engine, "connect", _commit_without_sync)
            # The last entry of the dictionary is the last used.
            self._engines[url] = engine
            closed = [self._engines.pop(each) for each in list(self._engines)[:-_OPEN_DATABASES]]
        for each in closed:
            each.dispose()
        return engine

    def forget(self, url: str) -> None:
        """Close the connections to the database at ``url``."""
        with self._lock:
            engine = self._engines.pop(url, None)
        if engine is not None:
            engine.dispose()

    def close(self) -> None:
        """Close all connections; the next query opens one again."""
        with self._lock:
            closed, self._engines = list(self._engines.values()), {}
        for each in closed:
            each.dispose()


def _commit_without_sync(connection: Any, _record: object) -> None:
    # SQLite documentation, PRAGMA synchronous: in WAL mode a commit then does not sync the log.
    connection.execute("PRAGMA synchronous=NORMAL")


class KeptRunStorage(SqliteRunStorage):
    """Runs, backfills and heartbeats of daemons."""

    def __init__(self, conn_string: str, kept: OpenConnections) -> None:
        self._kept = kept
        super().__init__(conn_string)

    @contextmanager
    def connect(self) -> Iterator[Connection]:
        with self._kept.transaction(self._conn_string) as connection:
            yield connection

    def dispose(self) -> None:
        super().dispose()
        self._kept.close()


class KeptScheduleStorage(SqliteScheduleStorage):
    """Ticks and cursors of sensors and schedules. Closing an instance does not dispose of this storage."""

    def __init__(self, conn_string: str, kept: OpenConnections) -> None:
        self._kept = kept
        super().__init__(conn_string)

    @contextmanager
    def connect(self) -> Iterator[Connection]:
        with self._kept.transaction(self._conn_string) as connection:
            yield connection


class KeptEventLogStorage(SqliteEventLogStorage):
    """The events of runs: a database per run, and one for all events of assets."""

    def __init__(self, base_dir: str, kept: OpenConnections) -> None:
        self._kept = kept
        self._watcher: SqlPollingEventWatcher | None = None
        super().__init__(base_dir)

    def watch(self, run_id: str, cursor: str | None, callback: EventHandlerFn) -> None:
        """Call ``callback`` with each new event of a run, as the run's page in the UI needs.

        Dagster's own storage watches the database file for changes. While a connection stays open, new events
        are in SQLite's log beside that file, so this storage queries the database instead.
        """
        if self._watcher is None:
            self._watcher = SqlPollingEventWatcher(self)
        self._watcher.watch_run(run_id, cursor, callback)

    def end_watch(self, run_id: str, handler: EventHandlerFn) -> None:
        if self._watcher is not None:
            self._watcher.unwatch_run(run_id, handler)

    def delete_events(self, run_id: str) -> None:
        """Delete the events of a run and the database that held them, which Dagster would leave at its
        size."""
        super().delete_events(run_id)
        file = self.path_for_shard(run_id)
        with self._db_lock:
            self._initialized_dbs.discard(run_id)
            self._kept.forget(self.conn_string_for_shard(run_id))
            _checked.pop(file, None)
            for end in ("-wal", "-shm", ""):
                # No failpoint: the events are gone; an empty file may stay until the next call.
                Path(f"{file}{end}").unlink(missing_ok=True)

    @contextmanager
    def _connect(self, shard: str) -> Iterator[Connection]:
        url = self.conn_string_for_shard(shard)
        with self._db_lock:
            if shard not in self._initialized_dbs:
                self._make(shard, url)
                self._initialized_dbs.add(shard)
            with self._kept.transaction(url) as connection:
                yield connection

    def _make(self, shard: str, url: str) -> None:
        """Let Dagster create or check the database of ``shard``, once per process: it reads its
        migrations."""
        file = self.path_for_shard(shard)
        if file in _checked and _checked[file] == _number(file):
            return
        self._initdb(self._kept.engine(url))
        number = _number(file)
        assert number is not None, "Dagster has created it"
        _checked[file] = number
        while len(_checked) > _CHECKED:
            _checked.pop(next(iter(list(_checked))), None)

    def dispose(self) -> None:
        if self._watcher is not None:
            self._watcher.close()
        super().dispose()
        self._kept.close()


_CHECKED = 100
"""Number of event databases that a process remembers as checked; each run has one."""

_checked: dict[str, int] = {}
"""The checked databases, with the inodes of their files."""


def _number(file: str) -> int | None:
    try:
        return Path(file).stat().st_ino
    except FileNotFoundError:
        return None


_made: dict[str, tuple[int, int]] = {}
"""The folders whose databases this process has checked, with the inodes of two of them."""


def _make(base_dir: str) -> None:
    """Let Dagster's own storage create or check the databases of the instance, once per process.

    It reads all of its migrations for that, 30 ms of processor time, and each tick of a sensor opens an
    instance.
    """
    if base_dir not in _made or _made[base_dir] != _numbers(base_dir):
        DagsterSqliteStorage(base_dir)
        numbers = _numbers(base_dir)
        assert numbers is not None, "Dagster's own storage has created them"
        _made[base_dir] = numbers


def _numbers(base_dir: str) -> tuple[int, int] | None:
    """Return the inodes of the databases of runs and schedules; None if one does not exist."""
    runs = Path(sqlite_storage._runs_directory(base_dir), "runs.db")
    schedules = Path(sqlite_storage._schedule_directory(base_dir), "schedules.db")
    try:
        return runs.stat().st_ino, schedules.stat().st_ino
    except FileNotFoundError:
        return None


class KeptSqliteStorage(DagsterSqliteStorage):
    """The three storages together, in the files where ``DagsterSqliteStorage`` has them."""

    def __init__(self, base_dir: str, inst_data: ConfigurableClassData | None = None) -> None:
        """``base_dir``: the folder of the instance."""
        self.base_dir, self._inst_data, self.kept = base_dir, inst_data, OpenConnections()
        runs, schedules = (
            create_db_conn_string(folder, name)
            for folder, name in (
                (sqlite_storage._runs_directory(base_dir), "runs"),
                (sqlite_storage._schedule_directory(base_dir), "schedules"),
            )
        )
        _make(base_dir)
        self._run_storage = KeptRunStorage(runs, self.kept)
        self._event_log_storage = KeptEventLogStorage(
            sqlite_storage._event_logs_directory(base_dir), self.kept
        )
        self._schedule_storage = KeptScheduleStorage(schedules, self.kept)
        # Skips the constructor of Dagster's class, which would create its own three storages.
        super(DagsterSqliteStorage, self).__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def from_config_value(cls, inst_data: ConfigurableClassData, config_value: Mapping[str, Any]) -> Self:
        return cls.from_local(inst_data=inst_data, **config_value)


def remove_old_checks(instance: dg.DagsterInstance, before: datetime) -> None:
    """Delete the executions of checks that were recorded before ``before``, but the last of each check with
    each outcome. Dagster leaves them when it deletes a run."""
    storage, table = instance.event_log_storage, AssetCheckExecutionsTable
    assert isinstance(storage, SqlEventLogStorage), "each storage that a home may have is one"
    of_check = table.c.asset_key, table.c.check_name, table.c.partition, table.c.execution_status
    last = select(func.max(table.c.id)).group_by(*of_check)
    old = table.c.create_timestamp < before.astimezone(UTC).replace(tzinfo=None)
    with storage.index_connection() as connection:
        connection.execute(table.delete().where(old, table.c.id.not_in(last)))


def has_failed(instance: dg.DagsterInstance, key: dg.AssetCheckKey) -> bool:
    """Return whether the check failed when it last compared anything (its metadata ``compared`` is not 0)."""
    storage, cursor = instance.event_log_storage, None
    while True:
        found = storage.get_asset_check_execution_history(
            key, limit=10, cursor=cursor, status=COMPLETED_ASSET_CHECK_EXECUTION_RECORD_STATUSES
        )
        for each in (record.evaluation for record in found):
            compared = None if each is None else each.metadata.get("compared")
            if each is not None and (compared is None or compared.value):
                return not each.passed
        if not found:
            return False
        cursor = found[-1].id
