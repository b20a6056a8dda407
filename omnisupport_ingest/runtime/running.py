"""Which processes of the platform run now, according to their pid files."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from omnisupport_ingest.durable import replace
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.foreign import read_file
from omnisupport_ingest.processes import ProcessIdentity
from omnisupport_ingest.runtime.ports import answers

_PORT_FILE = "dagster-webserver.port"
_BEAT_FILE = "up.beat"
_BEAT_SECONDS = 5.0
_RECORD_BYTES = 256

_LARGEST_PORT = 65_535


def running_services(run_folder: Path) -> dict[str, int]:
    """Return the process ids of the supervised services that are alive, by name."""
    pids = {}
    for path in sorted(run_folder.glob("*.pid")):
        try:
            service = ProcessIdentity.parse(read_file(path, limit=_RECORD_BYTES).decode())
        except (OSError, ValueError):
            # The file is just being written or removed.
            continue
        if service is not None and service.lives():
            pids[path.stem] = service.pid
    return pids


def record_service(run_folder: Path, name: str) -> None:
    """Record that this process is the service ``name``, as its guard would under a supervisor."""
    me = ProcessIdentity.of(os.getpid())
    assert me is not None
    with failpoint("runtime.file"):
        replace(run_folder / f"{name}.pid", f"{me.text}\n".encode())


def note_stopping(run_folder: Path, name: str) -> None:
    """Record that this process, the service ``name``, is stopping and waits for work that others do for
    it."""
    # If the note cannot be written, a tick that waits for news waits for its whole time.
    with contextlib.suppress(OSError), failpoint("runtime.file"):
        replace(run_folder / f"{name}.stopping", f"{ProcessIdentity.current().text}\n".encode())


def is_stopping(run_folder: Path, name: str) -> bool:
    """Whether the service ``name`` is stopping: then its workers must not wait for news any more."""
    try:
        text = read_file(run_folder / f"{name}.stopping", limit=_RECORD_BYTES).decode()
        service = ProcessIdentity.parse(text)
    except (OSError, ValueError):
        return False
    return service is not None and service.lives()


class Beat:
    """Records every few seconds that the loop which calls it still runs, for processes that watch it."""

    def __init__(self, run_folder: Path) -> None:
        self._file, self._due = run_folder / _BEAT_FILE, 0.0

    def __call__(self) -> None:
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + _BEAT_SECONDS
            # A full disk is reported elsewhere.
            with contextlib.suppress(OSError):
                # No failpoint: a time, which the next beat renews.
                self._file.touch(mode=0o600)


def seconds_since_beat(run_folder: Path) -> float | None:
    """Return the seconds since the loop of `up` last ran; None if it never did."""
    try:
        return max(0.0, time.time() - (run_folder / _BEAT_FILE).stat().st_mtime)
    except OSError:
        return None


def record_ui_port(run_folder: Path, port: int) -> None:
    """Record the port of the Dagster UI, for processes that did not start it."""
    with failpoint("runtime.file"):
        replace(run_folder / _PORT_FILE, str(port).encode())


def ui_port(run_folder: Path) -> int | None:
    """Return the loopback port of the Dagster UI, if it runs and answers; else None."""
    if "dagster-webserver" not in running_services(run_folder):
        return None
    port = _number(run_folder / _PORT_FILE, _LARGEST_PORT)
    return port if port is not None and answers(port) else None


def _number(path: Path, largest: int) -> int | None:
    """Return the number from 1 to ``largest`` that is the whole content of the file; None if it is no such
    number."""
    try:
        text = read_file(path, limit=_RECORD_BYTES).decode().strip()
    except (OSError, ValueError):
        return None
    number = int(text) if text.isascii() and text.isdigit() else 0
    return number if 1 <= number <= largest else None
