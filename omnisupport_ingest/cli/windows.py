"""``windows``: the state of every window, and what replays of it changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click

from omnisupport_ingest.cli.opening import contracted_source, open_workspace
from omnisupport_ingest.cli.render import clock, counted, echo_json, iso
from omnisupport_ingest.cli.render import table as show_table
from omnisupport_ingest.read.window_list import WindowLine, WindowList, window_list

_LEGEND = (
    "open: takes events. closing: the watermark has passed it, its files are still to be compacted.\n"
    "late: events landed after it had closed, its replay is due. *: a run is due."
)


@click.command()
@click.option("--source", "only", help="Only this source.  [default: every source with contracts]")
@click.option("--late", "late_only", is_flag=True, help="Only windows with late events.")
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    default=48,
    show_default=True,
    metavar="N",
    help="List only the newest N; 0 lists all.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document, with every window, or every late one."
)
def windows(only: str | None, late_only: bool, limit: int, as_json: bool) -> None:
    """Show the windows with events: open, closed or late, and what the last replay changed.

    A window closes when the watermark of its source is past its end by the lateness that the contracts allow.
    Reads manifests and the tables' Delta logs. Changes nothing, and needs no Spark. Times are UTC.

    \b
    Examples:
      omnisupport-ingest windows --source partner_desk
      omnisupport-ingest windows --late --json | jq '.[].windows[].window'

    Exit code: 0 done, 2 usage or settings, 3 no home.
    """
    workspace = open_workspace()
    sources = [contracted_source(workspace, only)] if only is not None else workspace.contracts.sources()
    lists = [window_list(workspace, source) for source in sources]
    if as_json:
        echo_json([_document(each, _chosen(each, late_only=late_only)) for each in lists])
        return
    for each in lists:
        _print(each, _chosen(each, late_only=late_only), limit=limit)
    click.echo(_LEGEND)


def _chosen(listed: WindowList, *, late_only: bool) -> list[WindowLine]:
    return [line for line in listed.windows if line.late_events or not late_only]


def _document(listed: WindowList, lines: Sequence[WindowLine]) -> dict[str, Any]:
    return {
        "source": listed.source,
        "watermark": iso(listed.watermark),
        "inputs": list(listed.inputs),
        "windows": [
            asdict(line) | {"stand": line.stand.value, "closes_at": iso(line.closes_at)} for line in lines
        ],
    }


def _print(listed: WindowList, lines: Sequence[WindowLine], *, limit: int) -> None:
    mark = clock(listed.watermark) if listed.watermark else "none yet"
    shown = lines[-limit:] if limit else lines
    shared = f", the lowest of {', '.join(listed.inputs)}" if len(listed.inputs) > 1 else ""
    click.echo(f"{listed.source}: watermark {mark}{shared}, {counted(len(listed.windows), 'window')}.")
    if len(shown) < len(lines):
        click.echo(f"The newest {len(shown)} of {len(lines):,}; --limit 0 shows all.")
    if shown:
        numbers = ("events", "batches", "late", "accepted", "duplicates", "quarantined")
        titles = ("window", "state", "closes at", *numbers, "last replay")
        show_table(titles, [_cells(line) for line in shown], right=numbers)


def _cells(line: WindowLine) -> list[str]:
    state = line.stand.value + ("*" if line.pending and line.stand.value != "late" else "")
    return [
        line.window,
        state,
        f"{line.closes_at:%m-%d %H:%M}" if line.closes_at else "–",
        f"{line.events:,}",
        f"{line.batches:,}",
        f"{line.late_events:,}" if line.late_events else "–",
        *("–" if n is None else f"{n:,}" for n in (line.accepted, line.duplicates, line.quarantined)),
        line.replay or "–",
    ]
