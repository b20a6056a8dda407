"""The part of ``status`` that judges: windows and quarantine of a source, and whether all is well."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from omnisupport_ingest.cli import render
from omnisupport_ingest.cli.status_promised import promises_broken

if TYPE_CHECKING:
    from omnisupport_ingest.layers.workspace import Workspace

HEALTHY, WARNING, BROKEN = "healthy", "warning", "broken"

_IN_DANGER = frozenset({"unreserved", "lost"})
"""States of a slot whose WAL the server may remove, or has."""


def facts_document(workspace: Workspace, source: str) -> dict[str, Any]:
    """Windows by their state, and events in quarantine by reason; None where it cannot be read."""
    from omnisupport_ingest.errors import IngestError
    from omnisupport_ingest.review.quarantine_stock import stock_of

    try:
        windows = _windows(workspace, source)
        marks = workspace.input_watermarks(source) if len(workspace.inputs(source)) > 1 else {}
    except IngestError:
        # Landing says so itself.
        windows, marks = None, {}
    inputs = {name: render.iso(mark) for name, mark in marks.items()}
    return {
        "windows": windows,
        "inputs": inputs,
        "quarantine": dict(stock_of(workspace, source).most_common()),
    }


def _windows(workspace: Workspace, source: str) -> dict[str, int]:
    from omnisupport_ingest.layers.lateness import Lateness
    from omnisupport_ingest.windows import OUT_OF_RANGE

    counts = {"open": 0, "closed": 0, OUT_OF_RANGE: 0}
    if not (workspace.home.path / "landing" / source / "manifests").is_dir():
        return counts
    store = workspace.landing(source)
    watermark, lateness = workspace.closing_watermark(source), Lateness.of(workspace, source)
    for window in store.windows():
        closed = lateness.closed(window, watermark)
        counts[window if window == OUT_OF_RANGE else "closed" if closed else "open"] += 1
    return counts


def source_facts(source: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Labels and texts of ``facts_document``."""
    windows = source["windows"]
    if windows and any(windows.values()):
        yield "windows", ", ".join(f"{count:,} {name}" for name, count in windows.items() if count)
    if source["inputs"]:
        # A source without a watermark holds all windows open.
        lowest = min(source["inputs"], key=lambda name: source["inputs"][name] or "")
        yield "", f"closed at the lowest watermark of {', '.join(source['inputs'])}: {lowest}"
    quarantined = source["quarantine"]
    if quarantined:
        counts = ", ".join(f"{count:,} {reason}" for reason, count in quarantined.items())
        yield "quarantine", f"{counts} (omnisupport-ingest quarantine list)"


def health(document: dict[str, Any]) -> dict[str, Any]:
    """Return the worst level in the document of ``status``, and the reasons for it."""
    broken, warned = list(_broken(document)), list(_warned(document))
    level = BROKEN if broken else WARNING if warned else HEALTHY
    return {"level": level, "reasons": broken + warned}


def health_line(health: dict[str, Any]) -> str:
    """The verdict as a text: a word, and what it rests on."""
    level = str(health["level"])
    word = level if level == HEALTHY else level.upper()
    return word if not health["reasons"] else f"{word}: {'; '.join(health['reasons'])}"


def _broken(document: dict[str, Any]) -> Iterator[str]:
    for log in (document["source"], *document["other_logs"]):
        if log["capture"] == "FAILED":
            yield f"capture of {log['name']} has failed"
    for each in document["sources"]:
        landing = each["landing"]
        if landing["problem"]:
            yield f"landing of {each['source']} cannot be read"
        elif landing["gap"] and not landing["gap"]["repaired"]:
            yield f"a gap holds batches of {each['source']} back"


def _warned(document: dict[str, Any]) -> Iterator[str]:
    platform = document["platform"]
    followed = {each["source"] for each in document["sources"] if each["landing"].get("stream_end")}
    for log in (document["source"], *document["other_logs"]):
        if log["slot"].get("there") is False and log["name"] in followed:
            yield f"the slot of {log['name']} is not on the server any more"
        if log["slot"]["wal_status"] in _IN_DANGER:
            yield f"the slot of {log['name']} is {log['slot']['wal_status']}"
    for each in document["readings"]:
        if each["problem"] is not None:
            yield f"{each['source']} cannot be looked at"
        if any(part["gone"] for part in each.get("partitions", ())):
            yield f"records of {each['source']} were deleted before they were read"
    for name in dict.fromkeys(each["source"] for each in document["definition_changes"]):
        yield f"files of {name} have changed, and its capture does not go by them yet"
    failed = platform["checks"]["failed"] if platform["checks"] else []
    if failed:
        yield f"{render.counted(len(failed), 'check')} failed"
    newest: dict[str, dict[str, Any]] = {}
    for run in platform["runs"] or ():
        newest.setdefault(run["job"], run)
    for run in newest.values():
        if run["status"] == "FAILURE":
            yield f"the last run of {run['job']} failed"
    for sensor in platform["sensors"] or ():
        if not sensor["running"] or sensor["tick"] == "FAILURE":
            yield f"sensor {sensor['name']} {'failed' if sensor['running'] else 'is stopped'}"
    yield from promises_broken(document)
    for each in document["sources"]:
        if events := sum(each["quarantine"].values()):
            yield f"{render.counted(events, 'event')} of {each['source']} in quarantine"
