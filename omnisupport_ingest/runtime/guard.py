"""The process between the supervisor and one service. It makes sure that no process of the service is left.

Run as a program, not imported. It is two processes, each of which ends the service and everything the service
started if the other is gone:

- the *guard* starts the service and writes its output to a log that rotates by size. It ends the service on
  a signal, when the service's main process ends, and when the supervisor is gone for whatever reason (SIGKILL
  included): its standard input is a pipe that only the supervisor holds.
- its parent, the *keeper*, does nothing but wait for the guard.

If the guard is killed, the kernel kills the service's main process. What that process had started, including
daemons in sessions of their own, becomes a child of the keeper, which kills it. If the keeper is killed, the
kernel signals the guard, which kills the same processes. Only if both are killed at the same time may a
daemon be left. This needs Linux (``prctl``); elsewhere the death of the guard ends the processes in its
session, and daemons that left the session stay.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import platform
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import psutil

from omnisupport_ingest.processes import ProcessIdentity
from omnisupport_ingest.runtime.rotating_log import RotatingLog

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
"""``prctl`` options (Linux ``prctl(2)``)."""

_KEEPER_IS_GONE = signal.SIGUSR1
_NOT_STARTED = 127
_FAILED = 70
_POLL_SECONDS = 1.0
_WAIT_SECONDS = 5.0
_GIVE_UP_SECONDS = 10.0
"""For how many seconds SIGKILL is repeated. A process of another user never takes it. A process that waits in
the kernel (for example for a disk that does not answer) takes it only when the kernel returns."""


class PidFile:
    """The file with the process identity of the service; it exists as long as the service runs.

    A full disk does not end the service: the write is tried again later.
    """

    def __init__(self, path: Path, service: int) -> None:
        self._path, self._service = path, service
        self._written = False

    def write(self) -> None:
        """Write the file, if it is not written yet; if that fails, try again later."""
        identity = None if self._written else ProcessIdentity.of(self._service)
        if identity is None:
            return
        # In one step: a partly written file would name another process.
        draft = self._path.with_name(f".{self._path.name}.new")
        with contextlib.suppress(OSError):
            # No failpoint: tells what runs now; nothing in it outlives a restart.
            draft.write_text(f"{identity.text}\n")
            os.replace(draft, self._path)
            self._written = True

    def remove(self) -> None:
        for path in (self._path, self._path.with_name(f".{self._path.name}.new")):
            with contextlib.suppress(OSError):
                # No failpoint: tells what runs now; nothing in it outlives a restart.
                path.unlink()


class Guard:
    """Runs one service to its end; see the module."""

    def __init__(self, options: argparse.Namespace, log: RotatingLog, keeper: int) -> None:
        """``options``: those of the program. ``keeper``: the process that waits for this one."""
        self._log, self._stop_signal, self._grace = log, options.stop_signal, options.grace
        self._keeper = keeper
        self._deadline: float | None = None
        self._killing_since: float | None = None
        self._stop_asked = self._keeper_gone = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: setattr(self, "_stop_asked", True))
        signal.signal(_KEEPER_IS_GONE, lambda *_: setattr(self, "_keeper_gone", True))
        signal.signal(signal.SIGCHLD, lambda *_: None)
        _die_with_parent(keeper, _KEEPER_IS_GONE)
        guard = os.getpid()
        self._service = subprocess.Popen(
            options.command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: _die_with_parent(guard, signal.SIGKILL),
        )
        self._pid_file = PidFile(options.pid_file, self._service.pid)

    def run(self) -> int:
        """Run until the service and everything that it started have ended. Returns the service's exit code,
        as a shell does."""
        wake, wake_writer = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(wake_writer, False)
        signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
        assert self._service.stdout is not None
        output = self._service.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            for descriptor in (sys.stdin.fileno(), output, wake):
                selector.register(descriptor, selectors.EVENT_READ)
            while self._service.poll() is None and not self._cannot_be_killed():
                self._pid_file.write()
                self._log.catch_up()
                for key, _ in selector.select(timeout=_POLL_SECONDS):
                    data = os.read(key.fd, 65536)
                    if key.fd == output:
                        self._log.write(data)
                    elif key.fd != wake and not data:
                        self._stop_asked = True
                    if not data:
                        selector.unregister(key.fd)
                _reap_orphans(self._service.pid)
                self._stop_if_asked()
        survivors = end_descendants(grace=0.0 if self._keeper_gone else _WAIT_SECONDS)
        self._drain(output)
        if survivors:
            self._log.write(f"{_survivors_line(survivors)}\n".encode())
        if self._service.returncode is None:
            return _as_a_shell_has_it(-signal.SIGKILL)
        self._pid_file.remove()
        return _as_a_shell_has_it(self._service.returncode)

    def _cannot_be_killed(self) -> bool:
        since = self._killing_since
        return since is not None and time.monotonic() > since + _GIVE_UP_SECONDS

    def _kill(self) -> None:
        self._killing_since = self._killing_since or time.monotonic()
        self._service.kill()

    def _stop_if_asked(self) -> None:
        if self._keeper_gone or os.getppid() != self._keeper:
            # From now on the supervisor regards the service as ended, and may start it again at any moment.
            self._keeper_gone = True
            self._kill()
        elif self._stop_asked and self._deadline is None:
            self._deadline = time.monotonic() + self._grace
            self._service.send_signal(self._stop_signal)
        elif self._deadline is not None and time.monotonic() > self._deadline:
            self._kill()

    def _drain(self, output: int) -> None:
        os.set_blocking(output, False)
        with contextlib.suppress(BlockingIOError):
            while data := os.read(output, 65536):
                self._log.write(data)


def keep(guard: int) -> int:
    """Wait for the process ``guard``, then end all processes that are left below this one. Returns the
    guard's exit code."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os.kill(guard, signal.SIGTERM))
    ended, status = 0, 0
    while ended != guard:
        ended, status = os.waitpid(-1, 0)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(guard, signal.SIGKILL)
    if survivors := end_descendants(grace=0.0):
        # If the guard was killed, only the keeper can report it.
        sys.stderr.write(f"{_survivors_line(survivors)}\n")
    return _as_a_shell_has_it(os.waitstatus_to_exitcode(status))


def _reap_orphans(service: int) -> None:
    """Collect the exit codes of ended children, except for the process ``service``.

    These are orphans of the service. Without this they would stay in the process list as long as the service
    runs.
    """
    if _prctl() is None:
        return  # On this system orphans do not become children of this process.
    with contextlib.suppress(ChildProcessError):
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid == service:
                return
            os.waitpid(ended.si_pid, os.WNOHANG)


def end_descendants(*, grace: float) -> list[psutil.Process]:
    """End every process below this one: SIGTERM, after ``grace`` seconds SIGKILL.

    Returns the processes that did not end within ``_GIVE_UP_SECONDS``.
    """
    if grace:
        survivors = _descendants()
        for process in survivors:
            with contextlib.suppress(psutil.Error):
                process.terminate()
        psutil.wait_procs(survivors, timeout=grace)
    give_up = time.monotonic() + _GIVE_UP_SECONDS
    while (survivors := _descendants()) and time.monotonic() < give_up:
        for process in survivors:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(survivors, timeout=min(_WAIT_SECONDS, _GIVE_UP_SECONDS))
    return survivors


def _survivors_line(survivors: list[psutil.Process]) -> str:
    """Return a line for people that names the processes still running."""
    names = []
    for process in survivors:
        with contextlib.suppress(psutil.Error):
            names.append(f"{process.pid} ({process.name()}, user {process.uids().real}, {process.status()})")
    return (
        f"These processes could not be ended in {_GIVE_UP_SECONDS:.0f} s and are left: {', '.join(names)}. "
        "End them by hand, as their user or root; one in disk-sleep ends when its disk answers."
    )


def _descendants() -> list[psutil.Process]:
    """Return the processes below this one, found by parent only: psutil's own list also compares times of
    day."""
    parents: dict[int, list[psutil.Process]] = {}
    for pid in psutil.pids():
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            parents.setdefault(process.ppid(), []).append(process)
    descendants: list[psutil.Process] = []
    below = parents.pop(os.getpid(), [])
    while below:
        descendants += below
        below = [child for process in below for child in parents.pop(process.pid, [])]
    return descendants


def _die_with_parent(parent: int, number: signal.Signals) -> None:
    """Have the kernel send this process the signal ``number`` when its parent ``parent`` is gone (Linux)."""
    if (prctl := _prctl()) is not None:
        prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
        if os.getppid() != parent:
            os.kill(os.getpid(), number)


def _adopt_orphans() -> None:
    """Have orphans below this process become its children, so that it finds them (Linux)."""
    if (prctl := _prctl()) is not None:
        prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@cache
def _prctl() -> Callable[..., int] | None:
    # Loaded once, before any fork: a child that is about to run a program must load no library.
    if platform.system() != "Linux":
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    function: Callable[..., int] = libc.prctl
    return function


def _as_a_shell_has_it(code: int) -> int:
    return code if code >= 0 else 128 - code


def _guard(options: argparse.Namespace, keeper: int) -> int:
    # A session of its own: signals to the keeper's process group do not reach it.
    os.setsid()
    _adopt_orphans()
    log = RotatingLog(options.log)
    try:
        guard = Guard(options, log, keeper)
    except OSError as error:
        log.write(f"{options.command[0]} does not start: {error.strerror}\n".encode())
        return _NOT_STARTED
    return guard.run()


def main() -> int:
    parser = argparse.ArgumentParser(description="Run one service under a supervisor.")
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--pid-file", type=Path, required=True)
    parser.add_argument("--stop-signal", type=int, required=True)
    parser.add_argument("--grace", type=float, required=True, help="seconds")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    if options.command[:1] == ["--"]:
        options.command = options.command[1:]
    _adopt_orphans()
    keeper = os.getpid()
    guard = os.fork()
    if guard:
        return keep(guard)
    code = _FAILED
    try:
        code = _guard(options, keeper)
    finally:
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
