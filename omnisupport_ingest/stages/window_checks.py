"""Checks of windows: closed when they should be, late events replayed, replays explained. No Spark."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from omnisupport_ingest.lake.table import LakeTable
from omnisupport_ingest.stages import checkpoints
from omnisupport_ingest.stages.explained import UNEXPLAINED
from omnisupport_ingest.stages.findings import CheckFinding
from omnisupport_ingest.stages.window_list import Stand, window_list
from omnisupport_ingest.stages.workspace import Workspace

_NAMED = 3


def windows_settled(workspace: Workspace, source: str) -> CheckFinding:
    """Whether every window that the watermark has passed is closed, and no late event waits."""
    lines = window_list(workspace, source).windows
    late = [line.window for line in lines if line.stand is Stand.LATE]
    closing = [line.window for line in lines if line.stand is Stand.CLOSING]
    numbers: dict[str, int | float] = {
        "windows_open": sum(line.stand is Stand.OPEN for line in lines),
        "windows_closed": sum(line.stand is Stand.CLOSED for line in lines),
        "windows_closing": len(closing),
        "windows_late": len(late),
        "events_late": sum(line.late_events for line in lines),
    }
    if late:
        summary = (
            f"Late events wait for the replay of {_named(late)}; the sensor late_arrivals_{source} asks for "
            f"it, or: omnisupport-ingest replay --source {source} --from {late[0]} --to {late[-1]}"
        )
        return CheckFinding(False, summary, numbers)
    if closing:
        summary = f"The watermark has passed {_named(closing)}, which the next run closes."
        return CheckFinding(True, summary, numbers)
    return CheckFinding(True, "Every window that the watermark has passed is closed.", numbers)


def replays_explained(workspace: Workspace, source: str) -> CheckFinding:
    """Whether every replay that changed a window's content says why."""
    changed = unexplained = 0
    windows: list[str] = []
    for checkpoint in checkpoints.read(_partitioned(workspace, source)):
        if checkpoint.changed_by:
            changed += 1
        if UNEXPLAINED in checkpoint.changed_by:
            unexplained += 1
            windows.append(f"{checkpoint.table} {checkpoint.window}")
    numbers: dict[str, int | float] = {"changed": changed, "unexplained": unexplained}
    if unexplained:
        summary = (
            f"The last replay of {_named(windows)} came to another content although nothing beneath had "
            "changed. Compare the versions of the table, and report it with both."
        )
        return CheckFinding(False, summary, numbers)
    return CheckFinding(
        True, f"{changed} windows were changed by their last replay, each explained.", numbers
    )


def _partitioned(workspace: Workspace, source: str) -> Iterator[LakeTable]:
    yield workspace.raw(source)
    yield workspace.deduped(source)
    for contract in workspace.contracts.of_source(source):
        yield workspace.net_changes(contract)


def _named(names: Iterable[str]) -> str:
    found = sorted(set(names))
    more = len(found) - _NAMED
    return ", ".join(found[:_NAMED]) + (f" and {more} more" if more > 0 else "")
