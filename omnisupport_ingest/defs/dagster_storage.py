"""Dagster's records in SQLite, by connections that stay open.

Dagster's own storage opens its databases for each statement and closes them after it. The last one that
closes a database writes its log back into it and waits for the disk, and so does every commit: an event
costs some ten milliseconds, and a run has more than a hundred. Here a process keeps its connections, and a
commit waits for no disk: killed processes lose nothing, and a machine that loses power loses at most the last
records, never the order in which they were made. Nothing rests on them: sensors ask the lake what is missing.
Tables, files and their places are Dagster's own, so homes of before are read on.

The classes below are private names of Dagster's; ``dagster.yaml`` names ours, so every process that opens
the instance fails loudly should one have moved.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from dagster._core.event_api import EventHandlerFn
from dagster._core.storage import sqlite_storage
from dagster._core.storage.event_log import SqliteEventLogStorage
from dagster._core.storage.event_log.polling_event_watcher import SqlPollingEventWatcher
from dagster._core.storage.runs import SqliteRunStorage
from dagster._core.storage.schedules import SqliteScheduleStorage
from dagster._core.storage.sqlite import create_db_conn_string
from dagster._core.storage.sqlite_storage import DagsterSqliteStorage
from dagster._serdes import ConfigurableClassData
from sqlalchemy import create_engine, event
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.pool import QueuePool

_BUSY_SECONDS = 30.0
"""How long a statement waits for a database that another process writes to; Dagster waits as long."""

_KEPT = 10
"""Of so many databases connections stay open; the least used close. A run's events have one of their own."""


class Kept:
    """The connections of an instance: a pool per database, of which those last used stay open."""

    def __init__(self) -> None:
        self._engines: dict[str, Engine] = {}
        self._lock = threading.Lock()

    @contextmanager
    def transaction(self, url: str) -> Iterator[Connection]:
        """A connection to the database at ``url``, in a transaction that is committed at the end."""
        with self.engine(url).connect() as connection, connection.begin():
            yield connection

    def engine(self, url: str) -> Engine:
        """The pool of the database at ``url``."""
        with self._lock:
            engine = self._engines.pop(url, None)
            if engine is None:
                # As many as threads ask at once, of which one stays open.
                engine = create_engine(
                    url,
                    poolclass=QueuePool,
                    pool_size=1,
                    max_overflow=-1,
                    connect_args={"timeout": _BUSY_SECONDS},
                )
                event.listen(engine, "connect", _wait_for_no_disk)
            # The last of the dictionary is the last used.
            self._engines[url] = engine
            closed = [self._engines.pop(each) for each in list(self._engines)[:-_KEPT]]
        for each in closed:
            each.dispose()
        return engine

    def close(self) -> None:
        """Close all connections; the next question opens one again."""
        with self._lock:
            closed, self._engines = list(self._engines.values()), {}
        for each in closed:
            each.dispose()


def _wait_for_no_disk(connection: Any, _record: object) -> None:
    # SQLite documentation, PRAGMA synchronous: in WAL mode a commit then does not sync the log.
    connection.execute("PRAGMA synchronous=NORMAL")


class KeptRunStorage(SqliteRunStorage):
    """Runs, backfills and what daemons note of themselves."""

    def __init__(self, conn_string: str, kept: Kept) -> None:
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
    """Ticks and cursors of sensors and schedules. An instance that is closed does not tell it."""

    def __init__(self, conn_string: str, kept: Kept) -> None:
        self._kept = kept
        super().__init__(conn_string)

    @contextmanager
    def connect(self) -> Iterator[Connection]:
        with self._kept.transaction(self._conn_string) as connection:
            yield connection


class KeptEventLogStorage(SqliteEventLogStorage):
    """What runs tell: a database per run, and one of all that concerns assets."""

    def __init__(self, base_dir: str, kept: Kept) -> None:
        self._kept = kept
        self._watcher: SqlPollingEventWatcher | None = None
        super().__init__(base_dir)

    def watch(self, run_id: str, cursor: str | None, callback: EventHandlerFn) -> None:
        """Tell ``callback`` each new event of a run, which the page of a run in the UI lives on.

        Dagster's own looks whether the file of the database changes. While a connection stays open, new
        events are in SQLite's log beside it; so the database is asked.
        """
        if self._watcher is None:
            self._watcher = SqlPollingEventWatcher(self)
        self._watcher.watch_run(run_id, cursor, callback)

    def end_watch(self, run_id: str, handler: EventHandlerFn) -> None:
        if self._watcher is not None:
            self._watcher.unwatch_run(run_id, handler)

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
        """Have Dagster make or check the database of ``shard``, once in a process: it reads migrations."""
        file = self.path_for_shard(shard)
        if file in _checked and _checked[file] == _number(file):
            return
        self._initdb(self._kept.engine(url))
        number = _number(file)
        assert number is not None, "Dagster has made it"
        _checked[file] = number
        while len(_checked) > _CHECKED:
            _checked.pop(next(iter(list(_checked))), None)

    def dispose(self) -> None:
        if self._watcher is not None:
            self._watcher.close()
        super().dispose()
        self._kept.close()


_CHECKED = 100
"""Databases of events that a process knows to be made; each run has one."""

_checked: dict[str, int] = {}
"""These, with the numbers of their files."""


def _number(file: str) -> int | None:
    try:
        return Path(file).stat().st_ino
    except FileNotFoundError:
        return None


_made: dict[str, tuple[int, int]] = {}
"""The folders whose databases this process has had made, with the file numbers of two of them."""


def _make(base_dir: str) -> None:
    """Have Dagster's own storage make or check the databases of the instance, once in a process.

    It reads every one of its migrations for that: 30 ms of processor time, and each tick of a sensor opens
    an instance.
    """
    if base_dir not in _made or _made[base_dir] != _numbers(base_dir):
        DagsterSqliteStorage(base_dir)
        numbers = _numbers(base_dir)
        assert numbers is not None, "Dagster's own storage has made them"
        _made[base_dir] = numbers


def _numbers(base_dir: str) -> tuple[int, int] | None:
    """The file numbers of the databases of runs and schedules; None if one is not there."""
    runs = Path(sqlite_storage._runs_directory(base_dir), "runs.db")
    schedules = Path(sqlite_storage._schedule_directory(base_dir), "schedules.db")
    try:
        return runs.stat().st_ino, schedules.stat().st_ino
    except FileNotFoundError:
        return None


class KeptSqliteStorage(DagsterSqliteStorage):
    """All three, in the files where ``DagsterSqliteStorage`` has them."""

    def __init__(self, base_dir: str, inst_data: ConfigurableClassData | None = None) -> None:
        """``base_dir``: the folder of the instance."""
        self.base_dir, self._inst_data, self.kept = base_dir, inst_data, Kept()
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
        # Of Dagster's class only the constructor is left out, which makes its own three.
        super(DagsterSqliteStorage, self).__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def from_config_value(cls, inst_data: ConfigurableClassData, config_value: Mapping[str, Any]) -> Self:
        return cls.from_local(inst_data=inst_data, **config_value)
