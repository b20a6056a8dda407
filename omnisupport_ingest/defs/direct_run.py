"""Runs the ingest job in this process, recorded like a run that the sensor requested.

For commands that make one pass without daemon and code server. Instance, job and tags are the same, so runs,
materializations and checkpoints show in the UI afterwards.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import dagster as dg

from omnisupport_ingest.defs import keys
from omnisupport_ingest.defs.jobs import JobContent
from omnisupport_ingest.defs.run_history import RunHistory
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.processes import ProcessIdentity
from omnisupport_ingest.windows import WindowRange

_OURS = "omnisupport_ingest."


@dataclass(frozen=True, slots=True)
class StepFailure:
    """A step that failed: the table it makes, and problem and fix from its error."""

    step: str
    problem: str
    fix: str


@dataclass(frozen=True, slots=True)
class DirectRun:
    """How a run ended; ``failures`` is empty if it succeeded."""

    run_id: str
    succeeded: bool
    failures: tuple[StepFailure, ...]


@dataclass(frozen=True, slots=True)
class WindowRun:
    """A run over ``windows`` of ``source``.

    ``cursor``: the newest landed batch, as in the sensor's requests. ``replay``: tags of a run that rebuilds
    the windows, which moves no cursor; None for an ingest run. ``tables``: visit only these, by the names of
    their contracts, after the layers upstream; None for all.
    """

    source: str
    windows: WindowRange
    cursor: str | None = None
    replay: Mapping[str, str] | None = None
    tables: Collection[str] | None = None


def run_windows(instance: dg.DagsterInstance, definitions: dg.Definitions, wanted: WindowRun) -> DirectRun:
    """Take the windows through every layer; a table that fails does not stop the others."""
    source, windows = wanted.source, wanted.windows
    if wanted.replay is not None:
        job_name, tags = keys.replay_job_name(source), wanted.replay
    else:
        attempt = RunHistory(instance, source).tried(wanted.cursor, windows).attempt + 1
        job_name = keys.ingest_job_name(source)
        tags = {
            keys.CURSOR_TAG: wanted.cursor or "",
            keys.ATTEMPT_TAG: str(attempt),
            keys.MERGE_NOW_TAG: "true",
        }
    job = definitions.resolve_job_def(job_name)
    if wanted.tables is not None:
        content = JobContent.of_job(source, job).visiting(wanted.tables)
        job = job.get_subset(asset_selection=content.assets, asset_check_selection=content.checks)
    with failpoint("dagster.run", source):
        result = job.execute_in_process(
            instance=instance,
            raise_on_error=False,
            tags={
                "dagster/asset_partition_range_start": windows.first,
                "dagster/asset_partition_range_end": windows.last,
                keys.PROCESS_TAG: ProcessIdentity.current().text,
                **tags,
            },
        )
    failures = tuple(
        step_failure(event)
        for event in result.all_events
        if event.event_type is dg.DagsterEventType.STEP_FAILURE
    )
    return DirectRun(result.run_id, result.success, failures)


def step_failure(event: dg.DagsterEvent) -> StepFailure:
    """Return problem and fix of the ``IngestError`` that made a step fail.

    For any other error only the class is named, because its message may quote a row.
    """
    chain = []
    error = event.step_failure_data.error
    while error is not None:
        chain.append(error)
        error = error.cause
    ours = [each for each in chain if each.message.startswith(_OURS)]
    step = (event.step_key or "a step").replace("__", "/")
    if ours:
        message = ours[-1].message.partition(": ")[2].strip()
        problem, _, fix = message.partition("\nFix: ")
        if fix:
            return StepFailure(step, problem, fix)
    kind = chain[-1].cls_name if chain else "error"
    return StepFailure(step, f"unexpected {kind}.", "")
