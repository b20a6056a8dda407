"""The runs of one source in Dagster's storage: runs in progress, attempts, failures in a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import takewhile

import dagster as dg

from omnisupport_ingest.defs import keys
from omnisupport_ingest.windows import WindowRange

_IN_PROGRESS = [
    dg.DagsterRunStatus.QUEUED,
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
]
_FAILED = (dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED)
_FINISHED = [dg.DagsterRunStatus.SUCCESS, *_FAILED]

_LOOK_BACK = 20
"""Runs in a row are counted up to this many; the wait between attempts reaches its limit earlier."""

_RANGE_START = "dagster/asset_partition_range_start"
_RANGE_END = "dagster/asset_partition_range_end"


@dataclass(frozen=True, slots=True)
class InARow:
    """How many of the newest runs ended alike (``count``), and when the last of them ended; None if none."""

    count: int = 0
    ended: datetime | None = None


@dataclass(frozen=True, slots=True)
class Tried:
    """The recorded runs of one range at one cursor.

    ``attempt``: the highest number of an attempt; 0 without one. ``in_vain``: the newest runs, if they
    succeeded and were requested for the same batches by the same rules. If the range is pending even so, they
    have settled nothing.
    """

    attempt: int
    in_vain: InARow


def unfinished(instance: dg.DagsterInstance, job_name: str) -> Sequence[dg.DagsterRun]:
    """Return the runs of a job that wait or go on."""
    return instance.get_runs(dg.RunsFilter(job_name=job_name, statuses=_IN_PROGRESS))


class RunHistory:
    """The runs of one source; each call queries ``instance``."""

    def __init__(self, instance: dg.DagsterInstance, source: str) -> None:
        self._instance = instance
        self._job = keys.ingest_job_name(source)
        self._replay_job = keys.replay_job_name(source)
        self._raw = keys.raw_key(source)

    def in_progress(self) -> list[WindowRange]:
        """Return the windows of queued and started runs: of the ingest job, and of any other run (a backfill,
        a click) that materializes raw."""
        runs = self._instance.get_runs(dg.RunsFilter(statuses=_IN_PROGRESS))
        found = []
        for run in runs:
            if run.job_name not in (self._job, self._replay_job) and self._raw not in (
                run.asset_selection or ()
            ):
                continue
            one = run.tags.get("dagster/partition")
            first, last = run.tags.get(_RANGE_START, one), run.tags.get(_RANGE_END, one)
            if first and last:
                found.append(WindowRange(first, last))
        return found

    def ingesting(self) -> bool:
        """Return whether a run of the ingest job is queued or started."""
        wanted = dg.RunsFilter(job_name=self._job, statuses=_IN_PROGRESS)
        return self._instance.get_runs_count(wanted) > 0

    def tried(self, last_batch_id: str | None, windows: WindowRange, digest: str = "") -> Tried:
        """Return the runs that were requested for ``windows`` at this cursor. ``digest``: of
        what is pending now (``Pending.digest``).

        Attempts have numbers, because older runs may be deleted: their count could fall, and a number that
        was given already makes no new run.
        """
        tags = {
            keys.CURSOR_TAG: last_batch_id or "",
            _RANGE_START: windows.first,
            _RANGE_END: windows.last,
        }
        records = self._newest(dg.RunsFilter(job_name=self._job, tags=tags))
        numbers = [each.dagster_run.tags.get(keys.ATTEMPT_TAG, "") for each in records]
        return Tried(
            max((int(each) for each in numbers if each.isdecimal()), default=0),
            _in_a_row(
                records,
                lambda run: (
                    run.status is dg.DagsterRunStatus.SUCCESS and run.tags.get(keys.PENDING_TAG) == digest
                ),
            ),
        )

    def failures_in_a_row(self) -> InARow:
        """Return the ingest runs that failed since the last success."""
        records = self._newest(dg.RunsFilter(job_name=self._job, statuses=_FINISHED))
        return _in_a_row(records, lambda run: run.status in _FAILED)

    def _newest(self, wanted: dg.RunsFilter) -> Sequence[dg.RunRecord]:
        return self._instance.get_run_records(wanted, limit=_LOOK_BACK)


def _in_a_row(records: Sequence[dg.RunRecord], alike: Callable[[dg.DagsterRun], bool]) -> InARow:
    """Return the first of ``records``, newest first, whose runs are ``alike``."""
    found = list(takewhile(lambda record: alike(record.dagster_run), records))
    if not found:
        return InARow()
    ended = max(each.end_time or each.update_timestamp.timestamp() for each in found)
    return InARow(len(found), datetime.fromtimestamp(ended, UTC))
