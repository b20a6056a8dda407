"""A writer that is held up, as on a machine that slept, and wakes up when others have gone on, does no harm.

No lease ends meanwhile, for there is none: what counts is a put that fails if another came first.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import psutil
import pytest

from omnisupport_ingest.home import Home
from omnisupport_ingest.lake.sweep import sweep
from omnisupport_ingest.lake.table import LakeTable
from omnisupport_ingest.landing.errors import ChainContested
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.layers.ledgers import retention_ledger
from omnisupport_ingest_tests.landing.batches import land
from omnisupport_ingest_tests.storage.s3_server import S3Server
from omnisupport_ingest_tests.storage.test_bucket import HOURLY, ledger_row
from omnisupport_ingest_tests.waiting import PATIENCE, until

_STOPS = """
import contextlib, signal, sys, threading
from pathlib import Path
from omnisupport_ingest import failpoints
from omnisupport_ingest.home import Home
from omnisupport_ingest.windows import WindowSize

at, stopped = sys.argv[1], []

@contextlib.contextmanager
def stopping(name, of):
    if name == at and not stopped:
        stopped.append(name)
        # To this thread: of a signal to the process another thread may hear first, and this one goes on.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
    yield

storage = sys.argv[3] if len(sys.argv) > 3 else None
home = Home.open(Path(sys.argv[2]), WindowSize.parse("hourly"), storage=storage)
failpoints.watched_by(stopping)
"""

LANDS = f"""{_STOPS}
from omnisupport_ingest.landing import store
from omnisupport_ingest_tests.landing.batches import land
# As after half an hour.
store.HELD_UP_SECONDS = -1.0
land(store.LandingStore(home.landing, "shop"), 10, 20)
"""

DECIDES = f"""{_STOPS}
from omnisupport_ingest.layers.ledgers import retention_ledger
from omnisupport_ingest_tests.storage.test_bucket import ledger_row
ledger = retention_ledger(home.lake, "shop")
ledger.append(lambda held: ledger_row(ledger))
"""

NOW = timedelta(seconds=-5)
"""Age above which everything is swept that nothing names, as if it were a day old."""


@contextmanager
def stopped(script: str, at: str, home: Path, place: str | None) -> Iterator[Callable[[], tuple[int, str]]]:
    """A process that has stopped just before the effect ``at``. Calling wakes it up, and gives its exit code
    and what it said at its end."""
    process = subprocess.Popen(
        [sys.executable, "-c", script, at, str(home), *([] if place is None else [place])],
        env=dict(os.environ),
        stderr=subprocess.PIPE,
        text=True,
    )

    def wake_up() -> tuple[int, str]:
        process.send_signal(signal.SIGCONT)
        said = process.communicate(timeout=PATIENCE)[1]
        return process.returncode, said

    try:
        until(
            lambda: (
                process.poll() is not None or psutil.Process(process.pid).status() == psutil.STATUS_STOPPED
            )
        )
        assert process.poll() is None, process.communicate()[1]
        yield wake_up
    finally:
        process.kill()
        process.communicate()


def test_a_writer_that_wakes_up_lands_nothing_that_another_machine_has_landed(
    s3: S3Server, tmp_path: Path
) -> None:
    place = s3.place()
    store = LandingStore(Home.open(tmp_path / "other", HOURLY, storage=place).landing, "shop")
    with stopped(LANDS, "landing.manifest", tmp_path / "home", place) as wake_up:
        first = land(store, 10, 20)
        land(store, 20, 30)
        code, said = wake_up()
    assert code != 0 and ChainContested.__name__ in said, said
    store.look_again()
    assert first.batch_id in store.batch_ids()
    assert store.landed().count == 2
    # What has landed stays, whatever goes.
    store.sweep(NOW)
    for each in store.manifests():
        store.verify(each)


def test_data_that_was_swept_while_its_writer_slept_is_put_again_before_anybody_hears_of_the_batch(
    s3: S3Server, tmp_path: Path
) -> None:
    place = s3.place()
    store = LandingStore(Home.open(tmp_path / "other", HOURLY, storage=place).landing, "shop")
    with stopped(LANDS, "landing.manifest", tmp_path / "home", place) as wake_up:
        # A list of the bucket may be a moment behind.
        assert len(until(lambda: store.sweep(NOW))) == 1
        code, said = wake_up()
    assert code == 0, said
    store.look_again()
    [batch] = store.manifests()
    store.verify(batch)


@pytest.mark.full
def test_a_commit_of_files_that_were_swept_meanwhile_is_refused_and_planned_anew(
    kept_in: str | None, tmp_path: Path
) -> None:
    home = Home.open(tmp_path / "home", HOURLY, storage=kept_in)
    ledger = retention_ledger(home.lake, "shop")
    ledger.append(lambda _held: ledger_row(ledger))
    # Folders are shared; in a bucket each machine has a home of its own.
    there = tmp_path / ("home" if kept_in is None else "another")
    with stopped(DECIDES, "lake.commit", there, kept_in) as wake_up:
        assert len(sweep(LakeTable(home.lake, ledger.spec), NOW)) == 1
        code, said = wake_up()
    assert (code, said) == (0, "")
    assert ledger.entries()["sequence"].to_pylist() == [1, 3], "the fence is a version"
    again = Home.open(tmp_path / "third", HOURLY, storage=kept_in) if kept_in else home
    assert retention_ledger(again.lake, "shop").entries().num_rows == 2


def test_what_is_swept_behind_a_fence_costs_no_version_where_nothing_is_swept(
    kept_in: str | None, tmp_path: Path
) -> None:
    home = Home.open(tmp_path / "home", HOURLY, storage=kept_in)
    ledger = retention_ledger(home.lake, "shop")
    ledger.append(lambda _held: ledger_row(ledger))
    table = LakeTable(home.lake, ledger.spec)
    version = table.open().version
    assert sweep(table, NOW) == []
    assert table.open().version == version
