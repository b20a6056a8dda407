"""The state of a capture in one word: whether it runs, is paused, has failed, or was stopped."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path

from omnisupport_ingest.sources.postgres.capture.capture_record import (
    CaptureRecord,
    CaptureRecords,
    LastError,
)
from omnisupport_ingest.sources.postgres.capture.pause import Pause
from omnisupport_ingest.sources.postgres.session.lease import Holder, Lease


class State(StrEnum):
    """``FAILED``: the last start ended by an error or was killed, and no later one has gone well."""

    RUNNING = "RUNNING"
    PAUSED = "PAUSED"
    FAILED = "FAILED"
    STOPPED = "STOPPED"


@dataclass(frozen=True, slots=True)
class CaptureState:
    """``since`` is null where nothing is on record. ``holder``: the process that captures now.

    ``killed``: the failure is that it is gone without a word; ``since`` is then the last known of it.
    ``last_error`` stays when a later start has gone well.
    """

    state: State
    since: datetime | None
    holder: Holder | None
    killed: bool
    last_error: LastError | None


def capture_state(
    run_folder: Path, landing: Path, source: str, paused: Pause | None, last_landed: datetime | None
) -> CaptureState:
    """The state of the capture of ``source``. ``landing``: the landing folder of the source;
    ``last_landed``: when its newest batch landed."""
    holder, record = _seen(run_folder, source, CaptureRecords(landing))
    error = record.last_error if record is not None else None
    failing_since = record.failing_since if record is not None else None
    killed = False
    if record is not None and record.ended is None and (holder is None or holder.pid != record.pid):
        killed, error = True, record.killed(last_landed)
        failing_since = failing_since or error.at
    # A start that has not come through its checks, or written down that it began, is no good one yet.
    if holder is not None and failing_since is None:
        return CaptureState(State.RUNNING, holder.since, holder, False, error)
    if paused is not None:
        return CaptureState(State.PAUSED, paused.since, holder, killed, error)
    if failing_since is not None:
        return CaptureState(State.FAILED, failing_since, holder, killed, error)
    return CaptureState(State.STOPPED, record.ended if record else None, None, False, error)


def _seen(
    run_folder: Path, source: str, records: CaptureRecords
) -> tuple[Holder | None, CaptureRecord | None]:
    """Lease and record of one moment: a capture that starts or ends between two looks is not a killed one."""
    record = records.read()
    while True:
        holder = Lease.holder(run_folder, source)
        again = records.read()
        if again == record:
            return holder, record
        record = again
