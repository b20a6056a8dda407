"""``tail``: rows of a dimension as they change."""

from __future__ import annotations

import json
import math
from datetime import date, datetime, time
from decimal import Decimal
from typing import TYPE_CHECKING, Any
from uuid import UUID

import click

from omnisupport_ingest.cli import render
from omnisupport_ingest.cli.opening import SOURCE_OF_TABLE, open_workspace, table_of
from omnisupport_ingest.cli.stopping import stop_on_signal
from omnisupport_ingest.read.dimension_changes import RowChange, changes_of, last_changes, newest_version

if TYPE_CHECKING:
    from omnisupport_ingest.contracts.model import TableContract

_LONGEST = 32
"""Characters of a value that people see; ``--json`` has the whole value."""

_NULL, _UNRESOLVED, _NOT_SHOWN = "NULL", "(unresolved)", "(not shown)"


@click.command()
@click.argument("table")
@click.option(
    "-n",
    "count",
    type=click.IntRange(min=0),
    default=10,
    show_default=True,
    metavar="N",
    help="Begin with the last N changes.",
)
@click.option("--follow", "-f", is_flag=True, help="Go on with the changes from now on, until Ctrl-C.")
@click.option(
    "--every",
    type=click.FloatRange(min=0.1),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="How often --follow looks.",
)
@click.option("--source", metavar="NAME", help=SOURCE_OF_TABLE)
@click.option("--json", "as_json", is_flag=True, help="Print each change as one line of JSON.")
def tail(table: str, count: int, follow: bool, every: float, source: str | None, as_json: bool) -> None:
    """Print the rows of TABLE's dimension as they change: inserts, updates, deletes.

    Reads the Delta log of the dimension and the files that each version replaced, without Spark. Several
    events of a row in one version are shown as one change. Values are those of the dimension, as the policies
    for personal data left them: what was erased since is "(not shown)", and so is a column with a policy in a
    version that another contract made. What `sweep` has deleted can not be shown any more; the events
    themselves are shown by `landing tail`. Times are UTC.

    \b
    Examples:
      omnisupport-ingest tail tickets
      omnisupport-ingest tail tickets -n 0 --follow
      omnisupport-ingest tail tickets -f --json | jq 'select(.change == "delete")'

    Exit code: 0 done or stopped, 1 a file of the lake is damaged, 2 usage or settings, 3 no home.
    """
    workspace = open_workspace()
    contract = table_of(workspace, table, source)
    seen = newest_version(workspace, contract)
    if seen is None and not follow:
        click.echo(f"dim_{contract.name} is not there yet.", err=True)
        return
    for change in last_changes(workspace, contract, count, seen) if seen is not None else ():
        _print(change, contract, as_json=as_json)
    if not follow:
        return
    with stop_on_signal() as stop:
        while not stop.wait(every):
            newest = newest_version(workspace, contract)
            if newest is None:
                continue
            if seen is not None and (newest.table_id != seen.table_id or newest.number < seen.number):
                render.say_err(f"dim_{contract.name} was made anew.")
                seen = newest
            for version in range(0 if seen is None else seen.number + 1, newest.number + 1):
                changes = changes_of(workspace, contract, version)
                if changes is None:
                    render.say_err(f"Version {version} can no longer be shown: its files were swept.")
                for change in changes or ():
                    _print(change, contract, as_json=as_json)
            seen = newest


def _print(change: RowChange, contract: TableContract, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(_finite(_document(change, contract)), ensure_ascii=False, default=_plain))
        return
    at = f"{change.at:%Y-%m-%d %H:%M:%S}"
    click.echo(f"{at} {change.kind:<6} {change.key} at {change.position}: {_shown_changes(change, contract)}")


def _document(change: RowChange, contract: TableContract) -> dict[str, Any]:
    return {
        "table": contract.full_name,
        "version": change.version,
        "at": change.at.isoformat(),
        "change": change.kind,
        "key": change.key,
        "position": str(change.position),
        "before": change.before,
        "unresolved_before": sorted(change.unresolved_before),
        "hidden": sorted(change.hidden),
        "row": change.row,
    }


def _shown_changes(change: RowChange, contract: TableContract) -> str:
    parts, every = [], change.kind != "update" and not (change.before or change.unresolved_before)
    for name in contract.column_names:
        old, now = _old(change, name), _now(change, name)
        if old is not None:
            parts.append(f"{name} {old}" if old == now else f"{name} {old} → {now}")
        elif every and name not in contract.key and now != _NULL:
            parts.append(f"{name} {now}")
    return ", ".join(parts)


def _old(change: RowChange, name: str) -> str | None:
    """Return the text of the value before the change, for people; None if the column has not changed."""
    if name in change.hidden:
        return _NOT_SHOWN
    if name in change.unresolved_before:
        return _UNRESOLVED
    return _short(change.before[name]) if name in change.before else None


def _now(change: RowChange, name: str) -> str:
    if name in change.hidden and name not in change.row:
        return _NOT_SHOWN
    return _UNRESOLVED if name in change.unresolved else _short(change.value(name))


def _short(value: Any) -> str:
    text = _NULL if value is None else value if isinstance(value, str) else str(_plain(value))
    # Control characters, on which a terminal would act, are left out for people.
    text = "".join(each if each.isprintable() else "�" for each in " ".join(text.split()))
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _finite(value: Any) -> Any:
    """Return ``value`` with the numbers that JSON cannot hold as text."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return _plain(value) if isinstance(value, float) and not math.isfinite(value) else value


def _plain(value: Any) -> Any:
    """Return a value of a column as JSON has it: times, bytes, and numbers that JSON cannot hold, as text."""
    if isinstance(value, float) and not math.isfinite(value):
        # As PostgreSQL writes them.
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, (datetime, date, time)):
        return value.isoformat()
    if isinstance(value, (Decimal, UUID)):
        return str(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value).hex()
    return str(value)
