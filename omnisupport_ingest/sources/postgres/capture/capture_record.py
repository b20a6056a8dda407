"""What capture writes down of its own starts and ends, so that its last error is known when it is gone."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from omnisupport_ingest import durable
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.failpoints import gate
from omnisupport_ingest.foreign import Unreadable
from omnisupport_ingest.json_values import read_note

_FILE = "capture.json"

LOGS = "omnisupport-ingest logs --component capture --errors"


@dataclass(frozen=True, slots=True)
class LastError:
    """Why a capture ended. ``error`` is a class of ours or of Python's, or ``Killed``.

    ``at``: when it ended; for one that was killed, the last that is known of it.
    """

    error: str
    problem: str
    fix: str
    at: datetime

    @classmethod
    def of(cls, error: Exception) -> Self:
        """What may be kept of ``error``: of one not ours the class alone, as its text may quote a row."""
        name, now = type(error).__name__, datetime.now(UTC)
        if isinstance(error, IngestError):
            return cls(name, error.problem, error.fix, now)
        return cls(
            name,
            f"Capture ended by an unexpected {name}.",
            f"Read the log ({LOGS}), or run `omnisupport-ingest --debug capture` and report the traceback.",
            now,
        )


@dataclass(frozen=True, slots=True)
class CaptureRecord:
    """The last start of a capture. ``follows``: it has no end of its own; ``ready``: it may capture.

    ``ended`` is null while it runs, and for good if it was killed. ``failing_since``: when the first of
    the failures in a row was, up to this start; null if this one went well. ``last_error`` may be of an
    earlier start.
    """

    pid: int
    host: str
    started: datetime
    follows: bool
    ready: bool
    ended: datetime | None
    failing_since: datetime | None
    last_error: LastError | None

    def killed(self, last_landed: datetime | None) -> LastError:
        """The error of a capture that is gone without having written an end."""
        at = max(self.started, last_landed or self.started)
        return LastError(
            "Killed",
            f"Capture, process {self.pid} on {self.host}, is gone without having said why: it was killed, "
            f"its machine went down, or its disk was full. The last that is known of it is of "
            f"{at.isoformat(timespec='seconds')}.",
            "Start it again, it goes on where landing ends: omnisupport-ingest up. Killed again and again, "
            "it may lack memory: look at the log of the system.",
            at,
        )


class CaptureRecords:
    """The record of one source, in its landing folder; written only by who holds the lease."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / _FILE

    def read(self) -> CaptureRecord | None:
        """The last start; none if there was none, or its record cannot be read."""
        try:
            return read_note(CaptureRecord, self._path)
        except (OSError, Unreadable):
            return None

    def write(self, record: CaptureRecord) -> None:
        """Durable when this returns."""
        content = json.dumps(asdict(record), default=datetime.isoformat, indent=2).encode() + b"\n"
        with gate("source.capture_record"):
            durable.replace(self._path, content)


@contextmanager
def recorded(
    records: CaptureRecords, *, follows: bool, last_landed: Callable[[], datetime | None]
) -> Iterator[Callable[[], None]]:
    """Write down the start of what is done inside, and how it ends; call what it gives once it may capture.

    ``last_landed``: when the newest batch of the source landed, asked for if the one before was killed.
    """
    before = records.read()
    failing_since = before.failing_since if before is not None else None
    last_error = before.last_error if before is not None else None
    if before is not None and before.ended is None:
        last_error = before.killed(last_landed())
        failing_since = failing_since or last_error.at
    now = datetime.now(UTC)
    record = CaptureRecord(
        os.getpid(), socket.gethostname(), now, follows, False, None, failing_since, last_error
    )
    records.write(record)

    def ready() -> None:
        nonlocal record
        record = replace(record, ready=True, failing_since=None)
        records.write(record)

    def end(error: LastError | None) -> None:
        at = datetime.now(UTC)
        if error is None:
            records.write(replace(record, ended=at, failing_since=None))
            return
        since = record.failing_since or error.at
        # The error itself is what must be seen, not that it cannot be written down.
        with suppress(OSError):
            records.write(replace(record, ended=at, failing_since=since, last_error=error))

    try:
        yield ready
    except Exception as error:
        end(LastError.of(error))
        raise
    except BaseException:
        # A person has stopped it.
        end(None)
        raise
    end(None)
