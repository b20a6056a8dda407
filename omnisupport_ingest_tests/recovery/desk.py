"""A support desk under traffic and the command ``capture`` that follows it, for tests that kill them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from omnisupport_ingest.demo.support_desk import SUPPORT_DESK
from omnisupport_ingest.demo.workload import Workload
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.failpoints import VARIABLE
from omnisupport_ingest.settings import PREFIX
from omnisupport_ingest.sources.postgres.embedded.server import EmbeddedPostgres
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest
from omnisupport_ingest_tests.waiting import until

PASSED_ON = ("home", "window", "source", "slot", "publication", "batch_max_seconds", "contracts_dir")


class Traffic:
    """Transactions on the desk in a thread; a client that comes back when its server was away."""

    def __init__(self, dsn: str) -> None:
        self.broken_off = 0
        """How often the server went away under it."""
        self._workload = Workload(SUPPORT_DESK, dsn, seed=1)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Traffic:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        committed: list[int] = []
        while not self._stop.is_set():
            try:
                # Long rounds: each one moves the same few keys on, and long chains are a known limit.
                self._workload.run(1500, 60.0, committed.append, self._stop)
            except IngestError:
                # Tries that found the server still away have committed nothing.
                self.broken_off += bool(committed)
                committed.clear()
                self._stop.wait(0.1)


@contextmanager
def capture(source: SourceUnderTest, *, failpoint: str = "") -> Iterator[subprocess.Popen[str]]:
    """The command ``capture`` on ``source`` as a process, which follows until it is told to stop.

    It dies by SIGKILL at ``failpoint``. Its standard error goes to ``capture.log`` beside the home.
    """
    settings = source.settings
    assert settings.source_dsn is not None
    given = {f"{PREFIX}{name.upper()}": str(getattr(settings, name)) for name in PASSED_ON}
    given |= {f"{PREFIX}SOURCE_DSN": settings.source_dsn.get_secret_value(), VARIABLE: failpoint}
    with (source.home_folder.parent / "capture.log").open("a") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "omnisupport_ingest.cli.main", "capture"],
            env={**os.environ, **given},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            text=True,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def kill_server(postgres: EmbeddedPostgres) -> None:
    """SIGKILL the postmaster: its sessions end without a word, nothing is written down."""
    pid = postgres.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    until(lambda: postgres.pid != pid)
