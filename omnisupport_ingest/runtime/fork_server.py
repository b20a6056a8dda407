"""A server process that forks a child for each request, and the client that sends a request.

Starting Python and importing what a run needs takes seconds; forking a process that has done both takes
milliseconds. The server has one Python thread and has opened nothing: a fork has only the thread that forks,
so locks of other threads would stay locked in it, and connections would be shared.

The server listens on a Unix socket in a private folder. The client sends a line with its request. The forked
child sends back its process identity, and begins when the client has answered. So a client that has not
answered knows that nothing was begun, whichever process was killed at whatever time, and may do the work in
another way.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import psutil

from omnisupport_ingest.processes import ProcessIdentity

_BEGIN = "begin"
_LINE_BYTES = 4096
_REQUEST_SECONDS = 2.0
"""Seconds that a client may take to send its request; other clients wait meanwhile."""

_ANSWER_SECONDS = 30.0
"""Seconds that a client waits for the child's line, and the child for the client's answer."""

_FAILED = 70
_HARMLESS_THREADS = frozenset({"jemalloc_bg_thd"})
"""Threads of libraries that survive a fork: jemalloc, which pyarrow and deltalake bring, takes its locks
before a fork and starts its thread again after it."""

_TASKS = Path("/proc/self/task")


@dataclass(frozen=True, slots=True)
class Duties:
    """The work that a server forks for, and when it does not.

    ``is_current``: whether a new process would import the same code as this one has. ``work``: what a child
    does for a request; it returns the exit code. ``after_failure``: run in a further child when a child has
    ended by a signal or with an exit code other than 0. ``interrupt``: run in a further child to end those
    that still run ``patience`` seconds after the server was stopped.
    """

    is_current: Callable[[], bool]
    work: Callable[[str], int]
    after_failure: Callable[[], None]
    interrupt: Callable[[], None]
    patience: float = 10.0


def threads_in_the_way() -> list[str]:
    """Return the names of threads, besides this one, that a fork of this process would lose. Threads of
    libraries are found only on Linux."""
    main = threading.get_native_id()
    names = {each.native_id: each.name for each in threading.enumerate()}
    if _TASKS.is_dir():
        for task in _TASKS.iterdir():
            with contextlib.suppress(OSError):
                names.setdefault(int(task.name), (task / "comm").read_text().strip())
    return sorted(name for task, name in names.items() if task != main and name not in _HARMLESS_THREADS)


class ForkServer:
    """Serves requests at the socket ``path`` until it is stopped, or its code is no longer current."""

    def __init__(self, path: Path, duties: Duties) -> None:
        self._path, self._duties = path, duties
        self._children: set[int] = set()
        self._cleaners: set[int] = set()
        self._stopping = False
        self._wake, self._wake_writer = os.pipe()
        for descriptor in (self._wake, self._wake_writer):
            os.set_blocking(descriptor, False)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)

    def serve(self) -> bool:
        """Serve until SIGTERM or SIGINT, then wait until no child runs (``Duties.interrupt``); returns False.

        If the code is no longer current, returns True at once; running children continue as children of this
        process.
        """
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: setattr(self, "_stopping", True))
        signal.set_wakeup_fd(self._wake_writer, warn_on_full_buffer=False)
        # Those of the program that this process ran before. Any that has ended already wakes nobody.
        self._children.update(child.pid for child in psutil.Process().children())
        self._reap()
        # No failpoint: tells what runs now; nothing in it outlives a restart.
        self._path.unlink(missing_ok=True)
        self._listener.bind(str(self._path))
        self._listener.listen(64)
        # The garbage collector ignores all present objects from now on; otherwise a child would copy their
        # memory.
        gc.collect()
        gc.freeze()
        current = True
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._wake, selectors.EVENT_READ)
            while current and not self._stopping:
                for key, _ in selector.select():
                    if key.fileobj is self._listener:
                        current = self._answer()
                    else:
                        os.read(self._wake, 65536)
                self._reap()
            selector.unregister(self._listener)
            self._path.unlink(missing_ok=True)
            self._listener.close()
            if current:
                self._wait_for_children(selector)
        signal.set_wakeup_fd(-1)
        gc.unfreeze()
        return not current

    def _wait_for_children(self, selector: selectors.BaseSelector) -> None:
        """Wait until no child runs. Those that run longer than ``patience`` are interrupted, once."""
        patience: float | None = self._duties.patience
        since = time.monotonic()
        while self._children or self._cleaners:
            left = None if patience is None else max(0.0, since + patience - time.monotonic())
            if selector.select(left):
                os.read(self._wake, 65536)
            self._reap()
            if left == 0.0 and patience is not None and self._children:
                patience = None
                self._cleaners.add(self._fork(lambda: self._clean(self._duties.interrupt)))

    def _answer(self) -> bool:
        """Fork a child for the next client. Returns False if this process must not be forked any more."""
        client, _ = self._listener.accept()
        with client:
            client.settimeout(_REQUEST_SECONDS)
            try:
                request = _line(client)
            except OSError:
                return True
            if not request:
                return True  # The client only tested whether a server answers.
            if not self._duties.is_current():
                return False
            self._children.add(self._fork(lambda: self._serve_client(client, request)))
        return True

    def _serve_client(self, client: socket.socket, request: str) -> int:
        os.setsid()
        client.settimeout(_ANSWER_SECONDS)
        begin = False
        with client, contextlib.suppress(OSError):
            client.sendall(f"{ProcessIdentity.current().text}\n".encode())
            begin = _line(client) == _BEGIN
        return self._duties.work(request) if begin else 0

    def _fork(self, work: Callable[[], int]) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if child:
            return child
        code = _FAILED
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._listener.close()
            os.close(self._wake)
            os.close(self._wake_writer)
            code = work()
        except BaseException:
            traceback.print_exc()
        finally:
            _leave(code)

    def _reap(self) -> None:
        """Collect the exit codes of ended children, including those of the program that this process ran
        before."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                child, status = ended
                is_cleaner = child in self._cleaners
                self._children.discard(child)
                self._cleaners.discard(child)
                if os.waitstatus_to_exitcode(status) and not is_cleaner:
                    self._cleaners.add(self._fork(lambda: self._clean(self._duties.after_failure)))

    def _clean(self, duty: Callable[[], None]) -> int:
        duty()
        return 0


def ask(path: Path, request: str, begin: Callable[[ProcessIdentity], None]) -> bool:
    """Have the server at ``path`` do ``request`` in a child. Returns False if that did not begin and will
    not.

    ``begin`` is called with the child before the child begins; if it raises, the child does nothing.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        try:
            server.settimeout(_REQUEST_SECONDS)
            server.connect(str(path))
            server.sendall(f"{request}\n".encode())
            server.settimeout(_ANSWER_SECONDS)
            child = ProcessIdentity.parse(_line(server))
        except OSError:
            return False
        if child is None:
            return False
        begin(child)
        try:
            server.sendall(f"{_BEGIN}\n".encode())
        except OSError:
            return False
    return True


def _line(connection: socket.socket) -> str:
    """Return the next line of ``connection``, without its end; empty if the other side has closed it
    before."""
    text = b""
    while not text.endswith(b"\n") and len(text) < _LINE_BYTES:
        piece = connection.recv(_LINE_BYTES)
        if not piece:
            return ""
        text += piece
    return text.decode(errors="replace").strip()


def _leave(code: int) -> NoReturn:
    """End a child as a normal process ends, but without closing what its parent still has open."""
    try:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)
