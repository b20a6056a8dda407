"""A run of the ingest job in this process, recorded like one that the sensor asked for.

For commands that make one pass without daemon and code server: the instance, the job and the tags
are the same, so runs, materializations and checkpoints show in the UI afterwards.
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
    """A step that failed: the table it makes, and problem and fix as its error told them."""

    step: str
    problem: str
    fix: str


@dataclass(frozen=True, slots=True)
class DirectRun:
    """How a run ended; ``failures`` is empty if it succeeded."""

    run_id: str
    succeeded: bool
    failures: tuple[StepFailure, ...]


def run_windows(
    instance: dg.DagsterInstance,
    definitions: dg.Definitions,
    source: str,
    windows: WindowRange,
    cursor: str | None,
    *,
    replay: Mapping[str, str] | None = None,
    tables: Collection[str] | None = None,
) -> DirectRun:
    """Take ``windows`` of ``source`` through every layer; a table that fails does not stop the others.

    ``cursor``: the newest landed batch, as the sensor's requests name it. ``replay``: tags of a run
    that makes the windows again; it moves no cursor. ``tables``: the only ones that are visited, by the
    names of their contracts, after the layers above them; None for all.
    """
    if replay is not None:
        return _run(instance, definitions, keys.replay_job_name(source), source, windows, replay, tables)
    attempt = RunHistory(instance, source).attempts(cursor, windows.first, windows.last) + 1
    tags = {keys.CURSOR_TAG: cursor or "", keys.ATTEMPT_TAG: str(attempt), keys.MERGE_NOW_TAG: "true"}
    return _run(instance, definitions, keys.ingest_job_name(source), source, windows, tags, tables)


def _run(
    instance: dg.DagsterInstance,
    definitions: dg.Definitions,
    job_name: str,
    source: str,
    windows: WindowRange,
    tags: Mapping[str, str],
    tables: Collection[str] | None,
) -> DirectRun:
    job = definitions.resolve_job_def(job_name)
    if tables is not None:
        content = JobContent.of_job(source, job).visiting(tables)
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
    """Return problem and fix of the error of ours that made a step fail.

    Of any other error only the class is named, as its message may quote a row.
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
