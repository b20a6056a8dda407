"""The part of ``status`` about targets: how far each is behind its dimension, and what its last sync failed
of. It connects to none of them (``targets.standing``)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from omnisupport_ingest.cli import render
from omnisupport_ingest.errors import IngestError

if TYPE_CHECKING:
    from omnisupport_ingest.layers.workspace import Workspace
    from omnisupport_ingest.targets.standing import Standing

Document = dict[str, Any]

LATE_SECONDS = 900.0
"""A target that lacks a version of its dimension for longer is late; its sensor tries every 5 minutes."""


def targets_document(workspace: Workspace, source: str) -> list[Document]:
    """Return how far every target of ``source`` is behind, as JSON values.

    A target whose dimension cannot be read is left out: the overview names the dimension.
    """
    from deltalake.exceptions import DeltaError

    from omnisupport_ingest.targets.standing import standing_of

    found = []
    for contract in workspace.contracts.of_source(source):
        if contract.target is not None:
            with suppress(IngestError, DeltaError):
                table = f"{contract.source}.{contract.name}"
                found.append({"table": table} | _document(standing_of(workspace, contract)))
    return found


def _document(standing: Standing) -> Document:
    last, since = standing.last, standing.behind_since
    behind = None
    if since is not None:
        behind = round(max(0.0, (datetime.now(UTC) - since).total_seconds()), 1)
    elif standing.versions == 0:
        behind = 0.0
    failed = last is not None and last.failed_at is not None
    return {
        "target": standing.target,
        "lake_version": standing.lake_version,
        "version": last.version if last is not None else None,
        "versions_behind": standing.versions,
        "seconds_behind": behind,
        "synced_at": render.iso(last.synced_at) if last is not None else None,
        "problem": None
        if last is None or not failed
        else {
            "problem": last.problem,
            "fix": last.fix,
            "at": render.iso(last.failed_at),
            "since": render.iso(last.failing_since),
        },
    }


def target_facts(targets: list[Document]) -> Iterator[tuple[str, str]]:
    """Yield a line for each target, for people."""
    for each in targets:
        text = f"{each['target']}: {_how_far(each)}"
        if (failed := each["problem"]) is not None:
            text += f"; the last sync failed {render.ago(failed['at'])}: {failed['problem']}"
        yield "target", text


def _how_far(target: Document) -> str:
    if target["lake_version"] is None:
        return "there is no dimension yet"
    if target["versions_behind"] is None:
        lag = "" if target["seconds_behind"] is None else f", behind for {_span(target)}"
        if target["version"] is not None:
            return f"it has another dimension than the lake{lag}"
        return f"no sync of it has succeeded{lag}" if target["problem"] else "no sync of it is known here"
    synced = f"synced {render.ago(target['synced_at'])}"
    if not target["versions_behind"]:
        return f"up to date, {synced}"
    return f"{render.counted(target['versions_behind'], 'version')} behind for {_span(target)}, {synced}"


def _span(target: Document) -> str:
    seconds: float | None = target["seconds_behind"]
    return "an unknown time" if seconds is None else render.span(seconds)


def target_problems(targets: list[Document]) -> Iterator[tuple[str, str, str]]:
    """Yield kind, text and fix of everything that is wrong with ``targets``."""
    for each in targets:
        table, name = each["table"], f"the target {each['target']} of {each['table']}"
        if (failed := each["problem"]) is not None:
            problem = failed["problem"].rstrip(".")
            yield f"target {table}", f"{name} ({_how_far(each)}) cannot be synced: {problem}", failed["fix"]
        elif (each["seconds_behind"] or 0.0) > LATE_SECONDS:
            says = f"{name} is late: {_how_far(each)}"
            yield f"target late {table}", says, f"omnisupport-ingest target status {table}"
