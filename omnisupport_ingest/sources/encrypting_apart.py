"""Encrypting large blocks in a process of its own, while the one that captures reads on.

A Python process runs one thread of Python at a time, and encrypting takes as long as all else of capture. So
blocks of many images go to another process, on another core: by a pipe, as Arrow streams. It makes keys as
the capture does, in the same file, and answers once they are durable. Whatever it cannot do, the capture
does itself: the first blocks, while the process starts, and those in which it ends.
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
from omnisupport_ingest.contracts.subject_keys import SubjectKey, SubjectKeys, row_subject

LEAST_ROWS = 2_000
"""Fewer images than this are encrypted where they are: a few milliseconds."""

_MOST_FAILURES = 3
"""After so many processes that failed no other is started."""

_MOST_KEYS = 20_000
"""Keys kept in memory, about 2 KB each."""

_READY = b"\n"
_ANSWER = pa.schema([("image", pa.string())])


class KnownKeys:
    """The keys of the subjects of one source, the newest of them kept in memory. Threads may share it."""

    def __init__(self, source: str, keys: SubjectKeys) -> None:
        self._source, self._keys = source, keys
        self._known: dict[tuple[str, str, str], SubjectKey] = {}
        self._known_of = keys.file_id
        self._lock = threading.Lock()

    def of(self, table: str, subject: str | None, whose: Sequence[tuple[bool, str]]) -> list[SubjectKey]:
        """The keys of distinct subjects of ``table``, as ``encrypted_images.KeysOf`` has them; durable.

        ``subject``: the name of the subjects that the contract names; null: each row is its own.
        """
        own, source = row_subject(table), self._source
        named = subject or own
        wanted = [(source, named if said else own, text) for said, text in whose]
        with self._lock:
            if self._keys.file_id != self._known_of:
                # Lost or restored meanwhile: what is encrypted by a key that it lacks, nobody can read.
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
        """``idle_seconds``: after so long without work the process ends; the next large block starts
        another."""
        self._command = [sys.executable, "-m", __name__, source, str(keys.path), str(idle_seconds)]
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ready = False
        self._failures = 0
        self._lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        """The id of the process that was started last; null: there is none."""
        return self._process.pid if self._process is not None else None

    def encrypted(self, table: str, subject: str, images: pa.Table) -> pa.StringArray | None:
        """What ``encrypt_divided`` makes of ``images`` (what is readable, what is hidden, the subject, the
        key of the row) of ``table``; null: the caller has to do it."""
        if images.num_rows < LEAST_ROWS or _cores() < 2:
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
        """The process once it is ready; it is started if there is none."""
        if self._process is not None and self._process.poll() == 0:
            # It has been idle.
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


def _cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
    """Encrypt the blocks that come on stdin, and write them to stdout, until stdin ends or is idle.

    An error ends the process. The capture then encrypts the block itself, and raises the error if it recurs.
    """
    # Ctrl-C reaches the capture too, which lands what it has read, and then closes the pipe.
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
    main(*sys.argv[1:])
