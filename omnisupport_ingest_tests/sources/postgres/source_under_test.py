"""A database of its own with contracts, a home and a capture: what most tests here start from."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from psycopg2.extensions import connection as Connection
from pydantic import SecretStr

from omnisupport_ingest import failpoints
from omnisupport_ingest.contracts.model import Column, Contracts, TableContract
from omnisupport_ingest.home import Home
from omnisupport_ingest.landing.manifest import Manifest
from omnisupport_ingest.landing.rows import LandedEvent
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.sources.postgres.capture.capture import Capture
from omnisupport_ingest.sources.postgres.session.connection import connect
from omnisupport_ingest.sources.postgres.session.server import current_wal_lsn
from omnisupport_ingest_tests.waiting import PATIENCE, until

SOURCE = "support_desk"

_FORKS = multiprocessing.get_context("forkserver")
"""Of processes that have imported the program already: to start Python for each takes a second of a core."""

_FORKS.set_forkserver_preload(["omnisupport_ingest_tests.sources.postgres.capture_process"])


def contract(table: str, columns: Sequence[str], key: Sequence[str] = ("id",)) -> TableContract:
    """A contract of ``public.<table>`` as far as capture looks at it."""
    return TableContract(
        name=table,
        version="1.0.0",
        source=SOURCE,
        schema="public",
        table=table,
        title=table,
        description=table,
        owner="tests",
        key=tuple(key),
        columns=tuple(Column(name, "text") for name in columns),
        soft_delete_column=None,
        allowed_lateness=timedelta(minutes=5),
        max_lateness=timedelta(days=1),
        path=f"{table}.json",
        fingerprint=table,
    )


@dataclass
class SourceUnderTest:
    """``dsn`` of the database, the ``slot``, and the ``home`` that capture lands in."""

    dsn: str
    slot: str
    home_folder: Path
    tables: list[TableContract] = field(default_factory=list)
    overrides: dict[str, Any] = field(default_factory=dict)

    @property
    def settings(self) -> Settings:
        given = {
            "home": self.home_folder,
            "window": "minutes:1",
            "source": SOURCE,
            "source_dsn": SecretStr(self.dsn),
            "slot": self.slot,
            "publication": self.slot,
            "batch_max_seconds": 0.5,
        }
        return Settings(_env_file=None, **(given | self.overrides))

    @property
    def home(self) -> Home:
        settings = self.settings
        return Home.open(self.home_folder, settings.window_size, storage=settings.storage)

    @property
    def store(self) -> LandingStore:
        return LandingStore(self.home.landing, SOURCE)

    def sql(self, *statements: str) -> None:
        """Run statements, each in a transaction of its own."""
        with self.connected() as connection, connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)

    def transaction(self, *statements: str) -> None:
        """Run statements in one transaction."""
        self.sql("BEGIN; " + "; ".join(statements) + "; COMMIT")

    def query(self, statement: str) -> list[tuple[Any, ...]]:
        with self.connected() as connection, connection.cursor() as cursor:
            cursor.execute(statement)
            return cursor.fetchall()

    def server_version(self) -> int:
        """As ``server_version_num``: 180004."""
        with self.connected() as connection:
            return int(connection.server_version)

    @contextmanager
    def connected(self) -> Iterator[Connection]:
        connection = connect(self.dsn, application_name="test")
        try:
            yield connection
        finally:
            connection.close()

    def capture(self) -> Capture:
        def contracts() -> Contracts:
            return Contracts(tuple(self.tables))

        return Capture(self.settings, self.home, contracts(), contracts_again=contracts)

    def catch_up(self) -> None:
        """Capture everything that has committed by now; raises what a table was left out for."""
        capture = self.capture()
        capture.run(current_wal_lsn(self.dsn), threading.Event())
        capture.raise_left_out()

    def capture_process(
        self,
        *,
        until: Lsn | None = None,
        failpoint: str | None = None,
        overrides: Mapping[str, Any] | None = None,
        program: str | None = None,
    ) -> subprocess.Popen[str]:
        """Start capture as a process of its own; it dies by SIGKILL at ``failpoint``.

        ``program``: in Python, what to run in place of ``capture_process``."""
        environment = os.environ | ({failpoints.VARIABLE: failpoint} if failpoint else {})
        module = "omnisupport_ingest_tests.sources.postgres.capture_process"
        run = ["-m", module] if program is None else ["-c", program]
        return subprocess.Popen(
            [sys.executable, *run, *self._arguments(until, overrides or {})],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )

    def _arguments(self, until: Lsn | None, overrides: Mapping[str, Any]) -> list[str]:
        """What ``capture_process`` is told."""
        tables = [(table.table, table.column_names, table.key) for table in self.tables]
        told = json.dumps(tables), json.dumps(self.overrides | overrides, default=str)
        return [self.dsn, self.slot, str(self.home_folder), str(until or ""), *told]

    def killed_at(self, failpoint: str) -> None:
        """Capture up to now in a process that dies at ``failpoint``."""
        from omnisupport_ingest_tests.sources.postgres.capture_process import in_fork

        errors = self.home_folder.parent / "capture.log"
        environment = os.environ | {failpoints.VARIABLE: failpoint}
        arguments = (self._arguments(current_wal_lsn(self.dsn), {}), environment, errors)
        process = _FORKS.Process(target=in_fork, args=arguments, daemon=True)
        process.start()
        process.join(PATIENCE)
        assert process.exitcode == -signal.SIGKILL, errors.read_text()

    def manifests(self) -> list[Manifest]:
        return landed_batches(self.store)

    def events(self, *ops: str) -> list[LandedEvent]:
        """Every landed event in position order (only those with an op in ``ops``, if given)."""
        return [event for event in landed_events(self.store) if not ops or event.op in ops]

    def changes(self) -> list[LandedEvent]:
        """Landed events of the stream, in position order."""
        return [event for event in self.events() if event.op not in ("r", "b")]

    def confirmed(self) -> Lsn:
        ((text,),) = self.query(
            f"SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = '{self.slot}'"
        )
        return Lsn.parse(text)

    def wait_for_free_slot(self) -> None:
        """Until the server has seen that the last reader of the slot is gone."""
        readers = f"SELECT active_pid FROM pg_replication_slots WHERE slot_name = '{self.slot}' AND active"
        until(lambda: not self.query(readers))

    def rows(self, table: str, columns: Sequence[str]) -> dict[str, dict[str, str | None]]:
        """The rows of ``table`` now, by their key column ``id``, every value as text."""
        listed = ", ".join(f'"{name}"::text' for name in columns)
        rows = self.query(f"SELECT id::text, {listed} FROM {table}")
        return {json.dumps([row[0]]): dict(zip(columns, row[1:], strict=True)) for row in rows}


def landed_batches(store: LandingStore) -> list[Manifest]:
    """Every landed batch; there is no gap, and all are as they were written."""
    landed = store.landed()
    assert landed.gap is None
    for manifest in landed.batches:
        store.verify(manifest)
    return list(landed.batches)


def landed_events(store: LandingStore) -> list[LandedEvent]:
    """Every landed event, in position order."""
    found = []
    for manifest in landed_batches(store):
        for file in manifest.files:
            for row in pq.read_table(store.path_of(file), partitioning=None).to_pylist():
                row.pop("batch_id")
                found.append(LandedEvent(**row))
    return sorted(found, key=lambda event: (event.epoch, event.commit_lsn, event.ordinal))


UNRESOLVED = "a column that nothing has carried"


def folded(events: list[LandedEvent], table: str) -> dict[str, dict[str, str | None]]:
    """The rows that ``events`` (in position order) leave in ``table``: the fold, in its plainest form."""
    rows: dict[str, dict[str, str | None]] = {}
    ended: dict[str, dict[str, str | None]] = {}
    for event in events:
        if event.source_table != table or (event.key is None and event.op not in ("t", "b")):
            # No layer above raw takes what has no key: changes of a table that was left out.
            continue
        if event.op in ("t", "b"):
            for key in [key for key in rows if _reaches(event, key)]:
                del rows[key]
            continue
        assert event.key is not None
        key = json.dumps(json.loads(event.key))
        if event.op == "d":
            ended = {key: rows.pop(key, {})}
            continue
        assert event.after is not None
        sent = json.loads(event.after)
        before = json.loads(event.before) if event.before else {}
        if event.moved_from_key is not None:
            before = ended[json.dumps(json.loads(event.moved_from_key))] | before
        elif event.op == "u":
            before = rows.get(key, {}) | before
        rows[key] = {name: before.get(name, UNRESOLVED) for name in event.unchanged or ()} | sent
    return rows


def _reaches(end: LandedEvent, key: str) -> bool:
    """Whether a truncate or boundary is about ``key``; the ranges of these tests are of whole numbers."""
    if end.after is None:
        return True
    scope = json.loads(end.after)
    numbers = [int(text) for text in json.loads(key)]
    first, last = ([int(text) for text in scope[name] or ()] for name in ("from", "to"))
    return numbers[: len(first)] >= first and (not last or numbers[: len(last)] <= last)
