"""``verify --checksums``: compare source and lake by checksums of key ranges; ``--repair`` reads differences
again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from omnisupport_ingest.cli import render
from omnisupport_ingest.cli.errors import FINDINGS
from omnisupport_ingest.cli.long_look import speaking
from omnisupport_ingest.contracts.row_checksum import checked_columns
from omnisupport_ingest.equality.checking import Checked, CheckOptions, check_source
from omnisupport_ingest.equality.repairing import request_repair
from omnisupport_ingest.read.verified import DIFFERS, EQUAL

if TYPE_CHECKING:
    from omnisupport_ingest.layers.workspace import Workspace

_KEYS_SHOWN = 20


def verify_by_checksums(workspace: Workspace, tables: Sequence[str], *, repair: bool, as_json: bool) -> int:
    """Check ``tables`` (empty: all), request another reading of what differs if ``repair``, and print the
    result.

    Returns the exit code.
    """
    with speaking():
        checked = check_source(workspace, CheckOptions(tables))
    requested = {
        each.contract.name: _repaired(workspace, each)
        for each in checked
        if repair and each.note.state == DIFFERS
    }
    if as_json:
        render.echo_json({"tables": {each.contract.name: _document(each, requested) for each in checked}})
    else:
        for each in checked:
            _show(each, requested)
    return 0 if all(each.note.state == EQUAL for each in checked) else FINDINGS


def _repaired(workspace: Workspace, checked: Checked) -> list[str]:
    """Request another reading of what differs; return the requests in words."""
    assert checked.differing is not None, "a table that differs has been compared"
    reason = f"verify --repair: {checked.note.why}"
    return [str(each) for each in request_repair(workspace, checked.contract, checked.differing, reason)]


def _document(checked: Checked, requested: dict[str, list[str]]) -> dict[str, Any]:
    """Return the result for ``--json``, without any key."""
    note = checked.note
    return {
        "state": note.state,
        "differs": note.differs,
        "why": note.why,
        "rows_compared": note.rows,
        "keys_changed_since_left_out": note.left_out,
        "keys_differing": note.differing,
        "columns_left_out": _columns_left_out(checked),
        "seconds": note.seconds,
        "verified_through": None
        if note.through is None
        else {"lsn": str(note.through.lsn), "epoch": note.through.epoch, "at": note.through.at.isoformat()},
        "requested": len(requested.get(checked.contract.name, ())),
    }


def _show(checked: Checked, requested: dict[str, list[str]]) -> None:
    name, note = checked.contract.name, checked.note
    click.echo(f"{name}: {note.state.upper()}: {note.why}.")
    for line in _details(checked):
        click.echo(f"  {line}")
    for each in requested.get(name, ()):
        status = f"omnisupport-ingest source status {checked.contract.source}"
        click.echo(f"  Requested: {each}. Capture reads it next: {status}")


def _details(checked: Checked) -> Iterator[str]:
    note, differing = checked.note, checked.differing
    if note.rows:
        yield f"{render.counted(note.rows, 'row')} compared in {note.seconds:.1f} s"
    if note.left_out:
        yield f"{render.counted(note.left_out, 'key')} left out, as they changed meanwhile"
    if columns := _columns_left_out(checked):
        yield f"not compared, as the lake writes them otherwise: {', '.join(columns)}"
    if note.differs and note.state != DIFFERS:
        yield "it was found to differ, and no comparison has found those rows equal since"
    if note.state == DIFFERS and differing is not None:
        keys = [", ".join(key) for key in differing.keys[:_KEYS_SHOWN]]
        more = " …" if len(differing.keys) > _KEYS_SHOWN else ""
        if keys:
            yield f"keys: {'; '.join(keys)}{more}"
        yield f"Read them again: omnisupport-ingest verify {checked.contract.source} --repair"


def _columns_left_out(checked: Checked) -> list[str]:
    compared = {each.name for each in checked_columns(checked.contract)}
    return [each.name for each in checked.contract.columns if each.name not in compared]
