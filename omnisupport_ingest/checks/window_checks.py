"""Checks of windows: closed when they should be, late events replayed, replays explained. No Spark."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from omnisupport_ingest.checks.findings import CheckFinding
from omnisupport_ingest.layers.replay_reasons import UNEXPLAINED
from omnisupport_ingest.layers.scheduling.pending import standing_of_windows
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.wording import counted

_NAMED = 3


def windows_settled(workspace: Workspace, source: str) -> CheckFinding:
    """Check that every window that the watermark has passed is closed, and that no late event waits."""
    standing = standing_of_windows(workspace, source)
    late, closing = standing.late, standing.closing
    numbers: dict[str, int | float] = {
        "windows_open": standing.open,
        "windows_closed": standing.closed,
        "windows_closing": len(closing),
        "windows_late": len(late),
        "events_late": standing.late_events,
    }
    if late:
        summary = (
            f"Late events wait for the replay of {_named(late)}; the sensor late_arrivals_{source} requests "
            f"it, or: omnisupport-ingest replay --source {source} --from {late[0]} --to {late[-1]}"
        )
        return CheckFinding(False, summary, numbers)
    if closing:
        summary = f"The watermark has passed {_named(closing)}, which the next run closes."
        return CheckFinding(True, summary, numbers)
    inputs = workspace.inputs(source)
    lowest = f" The watermark is the lowest of {', '.join(inputs)}." if len(inputs) > 1 else ""
    return CheckFinding(True, f"Every window that the watermark has passed is closed.{lowest}", numbers)


def replays_explained(workspace: Workspace, source: str) -> CheckFinding:
    """Check that every replay that changed a window's content has a reason for the change."""
    standing = standing_of_windows(workspace, source)
    changed = standing.changed
    windows = list(_unexplained(workspace, source, standing.unexplained))
    unexplained = len(windows)
    numbers: dict[str, int | float] = {"changed": changed, "unexplained": unexplained}
    if unexplained:
        summary = (
            f"The last replay of {_named(windows)} gave another content although its inputs had not changed. "
            "Compare the versions of the table, and report it with both: omnisupport-ingest doctor --archive"
        )
        return CheckFinding(False, summary, numbers)
    return CheckFinding(
        True, f"Changed by its last replay, and explained: {counted(changed, 'window')}.", numbers
    )


def _unexplained(workspace: Workspace, source: str, windows: Iterable[str]) -> Iterator[str]:
    """Yield the tables and windows among ``windows`` whose last replay has no reason."""
    for table in workspace.windowed_tables(source) if windows else ():
        snapshot = table.look()
        for window in windows:
            state = snapshot.state(window) if snapshot is not None else None
            if state is not None and UNEXPLAINED in state.checkpoint.changed_by:
                yield f"{table.spec.path} {window}"


def _named(names: Iterable[str]) -> str:
    found = sorted(set(names))
    more = len(found) - _NAMED
    return ", ".join(found[:_NAMED]) + (f" and {more} more" if more > 0 else "")
