"""The process between the supervisor and one service: nothing of the service outlives it.

Run as a program, not imported. It ends the service and everything the service started when it is
told to, when the service's main process ends, and when the supervisor is gone for whatever reason
(SIGKILL included): its standard input is a pipe that only the supervisor holds. What the service
prints goes through it into a log file that rotates by size.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import psutil

LOG_BYTES = 10 * 1024 * 1024
LOGS_KEPT = 3

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
"""``prctl`` options (Linux ``prctl(2)``)."""

_POLL_SECONDS = 1.0


class RotatingLog:
    """A file that is renamed to ``.1``, ``.2``, … when it grows over ``limit`` bytes."""

    def __init__(self, path: Path, *, limit: int = LOG_BYTES, kept: int = LOGS_KEPT) -> None:
        self._path, self._limit, self._kept = path, limit, kept
        self._open()

    def write(self, data: bytes) -> None:
        if self._file.tell() + len(data) > self._limit and self._file.tell():
            self._file.close()
            for number in range(self._kept - 1, 0, -1):
                with contextlib.suppress(FileNotFoundError):
                    os.replace(self._numbered(number), self._numbered(number + 1))
            os.replace(self._path, self._numbered(1))
            self._open()
        self._file.write(data)

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")

    def _open(self) -> None:
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._file: IO[bytes] = os.fdopen(descriptor, "ab", buffering=0)


class Guard:
    """Runs one service to its end; see the module."""

    def __init__(self, command: list[str], log: RotatingLog, *, stop_signal: int, grace: float) -> None:
        """``grace``: seconds between ``stop_signal`` and SIGKILL."""
        self._log, self._stop_signal, self._grace = log, stop_signal, grace
        self._supervisor = os.getppid()
        self._deadline: float | None = None
        self._stop_asked = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: setattr(self, "_stop_asked", True))
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._service = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=_die_with_parent(),
        )

    @property
    def pid(self) -> int:
        return self._service.pid

    def run(self) -> int:
        """Until the service ended and nothing of it is left; returns its exit code, as a shell does."""
        wake, wake_writer = os.pipe()
        os.set_blocking(wake_writer, False)
        signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
        assert self._service.stdout is not None
        output = self._service.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            for descriptor in (sys.stdin.fileno(), output, wake):
                selector.register(descriptor, selectors.EVENT_READ)
            while self._service.poll() is None:
                for key, _ in selector.select(timeout=_POLL_SECONDS):
                    data = os.read(key.fd, 65536)
                    if key.fd == output:
                        self._log.write(data)
                    elif key.fd != wake and not data:
                        self._stop_asked = True
                    if not data:
                        selector.unregister(key.fd)
                self._stop_if_asked()
        _end_descendants()
        self._drain(output)
        code = self._service.returncode
        return code if code >= 0 else 128 - code

    def _stop_if_asked(self) -> None:
        if os.getppid() != self._supervisor:
            self._stop_asked = True
        if self._stop_asked and self._deadline is None:
            self._deadline = time.monotonic() + self._grace
            self._service.send_signal(self._stop_signal)
        elif self._deadline is not None and time.monotonic() > self._deadline:
            self._service.kill()

    def _drain(self, output: int) -> None:
        os.set_blocking(output, False)
        with contextlib.suppress(BlockingIOError):
            while data := os.read(output, 65536):
                self._log.write(data)


def _die_with_parent() -> Callable[[], None] | None:
    """What a child runs first, so that the kernel kills it if this process is killed (Linux)."""
    prctl = _prctl()
    if prctl is None:
        return None
    # Orphans of the service become children of this process, where they can be found and ended.
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def die_with_parent() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    return die_with_parent


def _prctl() -> Callable[..., int] | None:
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    function: Callable[..., int] = libc.prctl
    return function


def _end_descendants(*, grace: float = 5.0) -> None:
    """End everything that still runs below this process: SIGTERM, ``grace`` seconds, SIGKILL."""
    left = psutil.Process().children(recursive=True)
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    psutil.wait_procs(left, timeout=grace)
    while left := psutil.Process().children(recursive=True):
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=grace)


def main() -> int:
    parser = argparse.ArgumentParser(description="Run one service under a supervisor.")
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--pid-file", type=Path, required=True)
    parser.add_argument("--stop-signal", type=int, required=True)
    parser.add_argument("--grace", type=float, required=True, help="seconds")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    log = RotatingLog(options.log)
    try:
        guard = Guard(command, log, stop_signal=options.stop_signal, grace=options.grace)
    except OSError as error:
        log.write(f"{command[0]} does not start: {error.strerror}\n".encode())
        return 127
    options.pid_file.write_text(f"{guard.pid}\n")
    try:
        return guard.run()
    finally:
        options.pid_file.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
