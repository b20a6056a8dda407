"""Encrypts large blocks in a process of its own, while the capturing process continues to read.

Python runs one thread at a time per process, and encryption takes as long as all other work of capture. So
blocks of many images go to another process, on another core: through a pipe, as Arrow streams. That process
makes keys in the same file as capture does, and answers once they are durable. Capture itself encrypts what
the process cannot: the first blocks, while it starts, and those during which it ends.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pyarrow as pa

from omnisupport_ingest.contracts.encrypted_images import Whose, encrypt_divided
from omnisupport_ingest.contracts.names import row_subject
from omnisupport_ingest.contracts.subject_ciphers import SubjectKey
from omnisupport_ingest.contracts.subject_keys import SubjectKeys
from omnisupport_ingest.landing.writer_threads import cores

LEAST_ROWS = 2_000
"""Fewer images than this are encrypted in the calling process, which takes a few milliseconds."""

_MOST_FAILURES = 3
"""After so many failed processes no other is started."""

_MOST_KEYS = 20_000
"""Keys kept in memory, about 2 KB each."""

_READY = b"\n"
_ANSWER = pa.schema([("image", pa.string())])


class KnownKeys:
    """The keys of the subjects of one source; keeps the newest in memory. Threads may share it."""

    def __init__(self, source: str, keys: SubjectKeys) -> None:
        self._source, self._keys = source, keys
        self._known: dict[tuple[str, str, str], SubjectKey] = {}
        self._known_of = keys.file_id
        self._lock = threading.Lock()

    def of(self, table: str, subject: str | None, whose: Sequence[tuple[bool, str]]) -> list[SubjectKey]:
        """Return the keys of distinct subjects of ``table``, as of ``encrypted_images.KeysOf``; they are
        durable.

        ``subject``: the name of the contract's subjects; None: each row is its own subject.
        """
        own, source = row_subject(table), self._source
        named = subject or own
        wanted = [(source, named if said else own, text) for said, text in whose]
        with self._lock:
            if self._keys.file_id != self._known_of:
                # The file of keys was lost or restored meanwhile. A value encrypted by a key that it lacks
                # could not be read by anyone.
                self._known = {}
            new = [each for each in wanted if each not in self._known]
            if new:
                keys = self._keys.keys_of(new)
                if len(self._known) + len(new) > _MOST_KEYS:
                    self._known = {each: self._known[each] for each in wanted if each in self._known}
                self._known |= dict(zip(new, keys, strict=True))
                self._known_of = self._keys.file_id
            return [self._known[each] for each in wanted]


class EncryptingProcess:
    """The process that encrypts for one source. Threads may share it."""

    def __init__(self, source: str, keys: SubjectKeys, *, idle_seconds: float = 60.0) -> None:
        """``idle_seconds``: without work for so long, the process ends; the next large block starts
        another."""
        self._command = [sys.executable, "-m", __name__, source, str(keys.path), str(idle_seconds)]
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ready = False
        self._failures = 0
        self._lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        """The id of the process that was started last; None if there is none."""
        return self._process.pid if self._process is not None else None

    def encrypted(self, table: str, subject: str, images: pa.Table) -> pa.StringArray | None:
        """Return what ``encrypt_divided`` makes of ``images`` of ``table``; None: the caller must encrypt
        them.

        ``images``: columns with the readable part, the hidden part, the subject, and the key of the row.
        """
        if images.num_rows < LEAST_ROWS or cores() < 2:
            return None
        with self._lock:
            try:
                process = self._ready_process()
                return _asked(process, table, subject, images) if process is not None else None
            except (OSError, pa.ArrowException):
                self._failures += 1
                self._end()
                return None

    def close(self) -> None:
        """End the process. The next large block would start another."""
        with self._lock:
            self._end()

    def _ready_process(self) -> subprocess.Popen[bytes] | None:
        """Return the process if it is ready, else None. Starts it if there is none.

        Raises ``OSError`` if it has failed.
        """
        if self._process is not None and (code := self._process.poll()) is not None:
            if code:
                raise OSError("the process has failed")
            # The process ended because it was idle.
            self._end()
        if self._process is None:
            if self._failures < _MOST_FAILURES:
                self._process = subprocess.Popen(
                    self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
                )
            return None
        stdout = self._process.stdout
        assert stdout is not None
        if not self._is_ready and select.select([stdout], [], [], 0)[0]:
            if stdout.read(len(_READY)) != _READY:
                raise OSError("the process has ended")
            self._is_ready = True
        return self._process if self._is_ready else None

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process, self._is_ready = None, False


def _asked(process: subprocess.Popen[bytes], table: str, subject: str, images: pa.Table) -> pa.StringArray:
    assert process.stdin is not None
    assert process.stdout is not None
    asked = images.combine_chunks().replace_schema_metadata({"table": table, "subject": subject})
    with pa.ipc.new_stream(process.stdin, asked.schema) as stream:
        stream.write_table(asked)
    process.stdin.flush()
    with pa.ipc.open_stream(process.stdout) as answer:
        return answer.read_all().column(0).combine_chunks()


def main(source: str, path: str, idle_seconds: str) -> None:
    """Encrypt the blocks that come on stdin, and write them to stdout, until stdin ends or stays idle.

    An error ends the process. Capture then encrypts the block itself, and raises the error if it recurs.
    """
    # Ctrl-C reaches capture too. It lands what it has read, and then closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    known = KnownKeys(source, SubjectKeys(Path(path)))
    asks, answers = os.fdopen(sys.stdin.fileno(), "rb", closefd=False), sys.stdout.buffer
    answers.write(_READY)
    answers.flush()
    while select.select([asks], [], [], float(idle_seconds))[0] and asks.peek(1):
        with pa.ipc.open_stream(asks) as stream:
            asked = stream.read_all()
        table, subject = (asked.schema.metadata[each].decode() for each in (b"table", b"subject"))
        readable, hidden, subjects, rows = (each.combine_chunks() for each in asked.columns)
        images = encrypt_divided(
            readable, hidden, Whose.said(subjects, rows), table.encode(), partial(known.of, table, subject)
        )
        with pa.ipc.new_stream(answers, _ANSWER) as answer:
            answer.write_batch(pa.record_batch([images], schema=_ANSWER))
        answers.flush()


if __name__ == "__main__":
    code = 1
    try:
        main(*sys.argv[1:])
        code = 0
    finally:
        # All answers are flushed and all keys durable, so nothing is left to do. The orderly end of an
        # interpreter waits for threads of libraries; a process that had failed was twice seen not to end.
        os._exit(code)
