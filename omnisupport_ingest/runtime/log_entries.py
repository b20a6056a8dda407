"""Lines of a log, joined to entries: an error with its traceback, its fix and whatever else belongs to it.

The services log in ways of their own: Dagster, Spark and PostgreSQL begin an entry with a time, our
commands print lines without one. An entry goes on until the next line that begins one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

LONGEST = 500
"""Lines of an entry that are kept; what is beyond them is counted, not kept."""

_BEGINS = ("Error: ", "Refused: ")
"""What a problem of ours begins with."""

_TIME = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d")
_ERROR = re.compile(
    r"(?:^|[\s\[-])(?:ERROR|CRITICAL|FATAL|PANIC)\b"
    r"|^(?:Error|Refused): |^Traceback \(most recent call last\)|^Fix:|^Exception in thread"
)
_CONTINUES = re.compile(
    r"\s|$|- |\+ |Fix:|Trying again in |Traceback \(|Caused by: |Suppressed: |During handling of the above"
    r"|The above exception was|\.\.\. \d+ more"
)
_BESIDE = re.compile(r".*\] (?:DETAIL|HINT|CONTEXT|QUERY|STATEMENT|LOCATION): ")
"""What PostgreSQL adds to a message, each with a time of its own."""


class Entries:
    """Takes one log, line by line and without their ends, and gives it back by entries."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._left_out = 0
        self._is_error = self._timed = False
        # A problem goes on until its fix, a traceback until the line that names the exception.
        self._in_problem = self._in_traceback = False

    def errors(self, line: str) -> Iterator[list[str]]:
        """The entry that ``line`` ends, if that is an error."""
        if self._lines and not self._continues(line):
            yield from self.rest()
        if not self._lines:
            self._timed = _TIME.match(line) is not None
        self._is_error = self._is_error or _ERROR.search(line) is not None
        self._look_for_an_end(line)
        if len(self._lines) < LONGEST:
            self._lines.append(line)
        else:
            self._left_out += 1

    def rest(self) -> Iterator[list[str]]:
        """The entry that is not ended yet, as no line has come after it, if it is an error."""
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
