"""The runs of one source in Dagster's storage: runs in progress, attempts, failures in a row."""

from __future__ import annotations

from datetime import UTC, datetime

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
"""Failures in a row are counted up to this many runs; the wait between attempts reaches its limit earlier."""

_RANGE_START = "dagster/asset_partition_range_start"
_RANGE_END = "dagster/asset_partition_range_end"


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

    def attempts(self, last_batch_id: str | None, first: str, last: str) -> int:
        """Return how many runs were ever requested for this range at this cursor."""
        tags = {keys.CURSOR_TAG: last_batch_id or "", _RANGE_START: first, _RANGE_END: last}
        return self._instance.get_runs_count(dg.RunsFilter(job_name=self._job, tags=tags))

    def failures_in_a_row(self) -> tuple[int, datetime | None]:
        """Return how many ingest runs failed since the last success, and when the last of them ended."""
        records = self._instance.get_run_records(
            dg.RunsFilter(job_name=self._job, statuses=_FINISHED), limit=_LOOK_BACK
        )
        failures, ended = 0, None
        for record in records:
            if record.dagster_run.status not in _FAILED:
                break
            failures += 1
            moment = record.end_time or record.update_timestamp.timestamp()
            ended = max(ended or 0.0, moment)
        return failures, datetime.fromtimestamp(ended, UTC) if ended is not None else None
