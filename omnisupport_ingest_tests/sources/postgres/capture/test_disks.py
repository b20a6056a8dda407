"""Disks: one that takes longer than the server bears with a silent reader, one that may lose a name."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from omnisupport_ingest.landing import store, writer_threads
from omnisupport_ingest.landing.parts import PartFiles
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.sources.postgres.protocol.walstream import WalStream
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest, contract, folded

COLUMNS = ("id", "v")
PATIENCE = 6
"""Seconds after which the server gives a silent reader up."""


@pytest.fixture
def tickets(source: SourceUnderTest) -> SourceUnderTest:
    """A captured, empty table ``tickets``."""
    source.sql("CREATE TABLE tickets (id int PRIMARY KEY, v text)")
    source.tables.append(contract("tickets", COLUMNS))
    source.catch_up()
    source.dsn += f" options='-c wal_sender_timeout={PATIENCE}s'"
    return source


def slow(act: Callable[..., Any], waited: threading.Event) -> Callable[..., Any]:
    """``act``, which is slow the first time."""

    def slowly(*given: Any, **named: Any) -> Any:
        if not waited.is_set():
            time.sleep(2 * PATIENCE)
            waited.set()
        return act(*given, **named)

    return slowly


@pytest.mark.parametrize(
    ("of", "step"),
    [
        pytest.param(PartFiles, "write", id="rows", marks=pytest.mark.slow),
        pytest.param(PartFiles, "finish", id="files", marks=pytest.mark.slow),
        pytest.param(LandingStore, "publish", id="manifest"),
    ],
)
def test_server_hears_of_capture_while_a_batch_is_written(
    tickets: SourceUnderTest, monkeypatch: pytest.MonkeyPatch, of: type, step: str
) -> None:
    reader = f"SELECT active_pid FROM pg_replication_slots WHERE slot_name = '{tickets.slot}' AND active"
    seen: set[object] = set()
    stop, waited = threading.Event(), threading.Event()
    # Six groups of rows, more than wait for the first one without being waited for.
    tickets.sql("INSERT INTO tickets SELECT g, 'new' FROM generate_series(1, 60000) g")
    with monkeypatch.context() as patched:
        patched.setattr(of, step, slow(getattr(of, step), waited))
        patched.setattr(writer_threads, "MEANWHILE_SECONDS", 0.2)
        with ThreadPoolExecutor() as threads:
            following = threads.submit(tickets.capture().run, None, stop)
            while not (tickets.changes() or following.done()):
                seen.update(tickets.query(reader))
                time.sleep(0.1)
            stop.set()
            following.result()
    assert waited.is_set() and len(seen) == 1
    assert folded(tickets.events(), "tickets") == tickets.rows("tickets", COLUMNS)


def test_names_of_what_a_killed_writer_has_landed_are_durable_before_they_are_confirmed(
    tickets: SourceUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have died between giving a manifest its name and having the name written."""
    steps: list[str] = []
    confirm, sync = WalStream.confirm, store.sync_folder

    def confirmed(self: WalStream, durable: Lsn | None, **named: Any) -> None:
        if durable is not None:
            steps.append("confirm")
        confirm(self, durable, **named)

    def synced(folder: Path) -> None:
        steps.append(f"sync {folder.name}")
        sync(folder)

    tickets.sql("INSERT INTO tickets VALUES (1)")
    tickets.killed_at("landing.manifest.after")
    tickets.sql("INSERT INTO tickets VALUES (2)")
    monkeypatch.setattr(WalStream, "confirm", confirmed)
    monkeypatch.setattr(store, "sync_folder", synced)
    tickets.catch_up()
    assert "confirm" in steps
    assert "sync manifests" in steps[: steps.index("confirm")]
