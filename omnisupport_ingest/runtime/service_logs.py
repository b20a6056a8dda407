"""The logs of a home's services: which exist, their last lines, new lines as they come, and errors.

A log is one file and its older parts (``.1`` is the newest of them), as ``guard.py`` rotates it. No log is
read into memory as a whole.

Lines are joined to entries: an error with its traceback, its fix and the other lines that belong to it. The
formats differ: Dagster, Spark and PostgreSQL begin an entry with a time; our commands print lines without
one. An entry ends before the next line that begins one.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Self

_BLOCK = 64 * 1024
_LONGEST_LINE = 16 * 1024
"""Most bytes of a line; without an end after so many, a line is cut there."""

_COLOUR = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f]")
"""All control characters except the tab."""

SERVER = "postgres-server"
"""The embedded PostgreSQL's own log; ``postgres`` is the log of the process that watches it."""

LONGEST = 500
"""Most lines of an entry that are kept; further lines are only counted."""

_BEGINS = ("Error: ", "Refused: ")
"""The beginning of one of our problems."""

_TIME = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d")
_ERROR = re.compile(
    r"(?:^|[\s\[-])(?:ERROR|CRITICAL|FATAL|PANIC)\b"
    r"|^(?:Error|Refused): |^Traceback \(most recent call last\)|^Fix:|^Exception in thread"
)
_PASSING = re.compile(r"FATAL:  the database system is (?:starting up|shutting down|not yet accepting)")
"""What PostgreSQL answers while it starts and stops: our own start asks until it is ready."""

_CONTINUES = re.compile(
    r"\s|$|- |\+ |Fix:|Trying again in |Traceback \(|Caused by: |Suppressed: |During handling of the above"
    r"|The above exception was|\.\.\. \d+ more"
)
_BESIDE = re.compile(r".*\] (?:DETAIL|HINT|CONTEXT|QUERY|STATEMENT|LOCATION): ")
"""Additions of PostgreSQL to a message; each comes with a time of its own."""


@dataclass(frozen=True, slots=True)
class ServiceLog:
    """The log of one ``component``. ``path``: the part that is written now; it may not exist yet."""

    component: str
    path: Path

    @property
    def parts(self) -> list[Path]:
        """The files of the log, the oldest first."""
        older = [each for each in self.path.parent.glob(f"{self.path.name}.*") if each.suffix[1:].isdigit()]
        older.sort(key=lambda each: -int(each.suffix[1:]))
        return [*older, self.path] if self.path.exists() else older

    @property
    def last_written(self) -> float:
        """When the log was last written, in seconds since 1970; 0 if it has just been removed."""
        return max((_modified(part) for part in self.parts), default=0.0)


def service_logs(home: Path) -> list[ServiceLog]:
    """Return the logs in the home at ``home``, without empty ones; the last written comes last."""
    logs = [ServiceLog(path.stem, path) for path in (home / "logs").glob("*.log")]
    server = home / "postgres" / "postgres.log"
    if server.exists():
        logs.append(ServiceLog(SERVER, server))
    with_content = [log for log in logs if any(_size(part) for part in log.parts)]
    return sorted(with_content, key=lambda log: (log.last_written, log.component))


def last_lines(log: ServiceLog, count: int) -> Iterator[str]:
    """Yield the last ``count`` lines of ``log``, the oldest first, from its older parts if necessary."""
    wanted, starts = count, deque[tuple[Path, int]]()
    for part in reversed(log.parts):
        if wanted <= 0:
            break
        try:
            start, lines_found = _start_of_last(part, wanted)
        except FileNotFoundError:
            continue
        starts.appendleft((part, start))
        wanted -= lines_found
    for part, start in starts:
        yield from _lines(part, start)


def last_errors(log: ServiceLog, count: int) -> list[list[str]]:
    """Return the last ``count`` errors in ``log``, the oldest first, each as a list of its lines."""
    blocks: list[list[str]] = []
    for part in reversed(log.parts):
        entries = Entries()
        newest = deque[list[str]](maxlen=count - len(blocks))
        for line in _lines(part, 0):
            newest.extend(entries.errors(line))
        newest.extend(entries.rest())
        blocks = [*newest, *blocks]
        if len(blocks) >= count:
            break
    return blocks


class LogFollower:
    """Follows a log through its rotations; a context manager."""

    def __init__(self, log: ServiceLog, *, from_start: bool = False) -> None:
        """``from_start``: the log appeared while others were followed, so all of its lines are new."""
        self._path = log.path
        self._begun = b""
        self._file = _opened(self._path)
        if self._file is not None and not from_start:
            self._file.seek(0, os.SEEK_END)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def new_lines(self) -> Iterator[str]:
        """Yield the lines that were completed since the last call."""
        yield from self._read()
        if self._replaced():
            # The renamed part may have got further lines after it was last read.
            yield from self._read()
            if self._file is not None:
                self._file.close()
            self._begun, self._file = b"", _opened(self._path)
            yield from self._read()

    def _replaced(self) -> bool:
        if self._file is None:
            return True
        try:
            status = os.stat(self._path)
        except FileNotFoundError:
            return False
        # The server's log is truncated in place; the others are renamed.
        return status.st_ino != os.fstat(self._file.fileno()).st_ino or status.st_size < self._file.tell()

    def _read(self) -> Iterator[str]:
        while self._file is not None and (piece := self._file.readline(_LONGEST_LINE)):
            self._begun += piece
            if self._begun.endswith(b"\n") or len(self._begun) >= _LONGEST_LINE:
                yield _text(self._begun)
                self._begun = b""


def _start_of_last(path: Path, count: int) -> tuple[int, int]:
    """Return the offset at which the last ``count`` lines of ``path`` begin, and how many lines there are."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        if end == 0:
            return 0, 0
        # The end of the last line does not separate two lines.
        at, seen = end - 1, 0
        while at > 0:
            begin = max(0, at - _BLOCK)
            file.seek(begin)
            block = file.read(at - begin)
            line_end = len(block)
            while (line_end := block.rfind(b"\n", 0, line_end)) >= 0:
                seen += 1
                if seen == count:
                    return begin + line_end + 1, count
            at = begin
        return 0, seen + 1


def _lines(path: Path, start: int) -> Iterator[str]:
    file = _opened(path)
    if file is None:
        return
    with file:
        file.seek(start)
        while piece := file.readline(_LONGEST_LINE):
            yield _text(piece)


def _text(line: bytes) -> str:
    """Return ``line`` without its end, its colours, and characters that could control a terminal."""
    return _CONTROL.sub("", _COLOUR.sub("", line.decode(errors="replace")))


def _opened(path: Path) -> BinaryIO | None:
    try:
        return path.open("rb")
    except FileNotFoundError:
        return None


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


class Entries:
    """Takes the lines of one log, without their ends, one by one, and yields them as entries."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._left_out = 0
        self._is_error = self._timed = False
        # A problem ends with its fix; a traceback ends with the line that names the exception.
        self._in_problem = self._in_traceback = False

    def errors(self, line: str) -> Iterator[list[str]]:
        """Yield the entry that ``line`` ends, if it is an error."""
        if self._lines and not self._continues(line):
            yield from self.rest()
        if not self._lines:
            self._timed = _TIME.match(line) is not None
        is_error = _ERROR.search(line) is not None and not (self._timed and _PASSING.search(line))
        self._is_error = self._is_error or is_error
        self._look_for_an_end(line)
        if len(self._lines) < LONGEST:
            self._lines.append(line)
        else:
            self._left_out += 1

    def rest(self) -> Iterator[list[str]]:
        """Yield the last entry, which no further line has ended, if it is an error."""
        if self._is_error:
            left_out = [f"… and {self._left_out:,} more lines"] if self._left_out else []
            yield self._lines + left_out
        self._lines, self._left_out = [], 0
        self._is_error = self._timed = self._in_problem = self._in_traceback = False

    def _continues(self, line: str) -> bool:
        if _TIME.match(line):
            return _BESIDE.match(line) is not None
        if line.startswith(_BEGINS):
            return False
        if line.startswith("Traceback (") and not (self._timed or self._is_error):
            return False
        return self._timed or self._in_problem or self._in_traceback or _CONTINUES.match(line) is not None

    def _look_for_an_end(self, line: str) -> None:
        if line.startswith(_BEGINS):
            self._in_problem = True
        elif line.startswith("Fix:"):
            self._in_problem = False
        elif line.startswith("Traceback ("):
            self._in_traceback = True
        elif line and not line[0].isspace():
            self._in_traceback = False
