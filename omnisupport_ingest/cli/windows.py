"""``windows``: where every window stands."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from omnisupport_ingest.cli.opening import existing_home, open_settings

if TYPE_CHECKING:
    from omnisupport_ingest.stages.window_list import WindowLine, WindowList

_WIDTH = 120

_LEGEND = (
    "open: takes events. closing: the watermark has passed it, its files are still to be folded.\n"
    "late: events landed after it had closed, its replay is due. *: a run is due."
)


@click.command()
@click.option("--source", "only", help="The source; every source with contracts if left out.")
@click.option("--late", "late_only", is_flag=True, help="Only windows that late events landed in.")
@click.option("--limit", default=48, show_default=True, help="At most so many, the newest ones; 0 for all.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document, with every window.")
def windows(only: str | None, late_only: bool, limit: int, as_json: bool) -> None:
    """Show the windows that anything landed in: open, closed, late, and what replays changed.

    A window closes when the watermark of its source has passed its end by what the contracts allow.
    Reads manifests and the tables' own logs; changes nothing, and needs no Spark. Times are UTC.

    \b
    Examples:
      omnisupport-ingest windows --source partner_desk
      omnisupport-ingest windows --late --json | jq '.[].windows[].window'

    Exit code: 0 done, 2 usage or settings, 3 no home.
    """
    from omnisupport_ingest.stages.window_list import window_list
    from omnisupport_ingest.stages.workspace import Workspace

    settings = open_settings()
    existing_home(settings)
    workspace = Workspace.open(settings)
    sources = workspace.contracts.sources()
    if only is not None and only not in sources:
        raise click.UsageError(f"No contract names the source {only!r}. Sources: {', '.join(sources)}.")
    found = [window_list(workspace, source) for source in ([only] if only else sources)]
    if as_json:
        click.echo(json.dumps([_document(each) for each in found], indent=2))
        return
    for each in found:
        _print(each, late_only=late_only, limit=limit)
    click.echo(_LEGEND)


def _document(found: WindowList) -> dict[str, Any]:
    return {
        "source": found.source,
        "watermark": _iso(found.watermark),
        "windows": [
            asdict(line) | {"stand": line.stand.value, "closes_at": _iso(line.closes_at)}
            for line in found.windows
        ],
    }


def _print(found: WindowList, *, late_only: bool, limit: int) -> None:
    from rich.console import Console
    from rich.table import Table

    mark = f"{found.watermark:%Y-%m-%d %H:%M:%S}" if found.watermark else "none yet"
    lines = [line for line in found.windows if line.late_events or not late_only]
    shown = lines[-limit:] if limit else lines
    click.echo(f"{found.source}: watermark {mark}, {len(found.windows)} windows.")
    if len(shown) < len(lines):
        click.echo(f"The newest {len(shown)} of {len(lines)}; --limit 0 shows all.")
    if not shown:
        return
    table = Table(box=None, pad_edge=False)
    for name in ("window", "stand", "closes at"):
        table.add_column(name, no_wrap=True)
    for name in ("events", "batches", "late", "accepted", "copies", "quarantined"):
        table.add_column(name, justify="right")
    table.add_column("last replay", no_wrap=True)
    for line in shown:
        table.add_row(*_cells(line))
    console = Console(highlight=False)
    # Cut cells would be worse than lines that a narrow terminal wraps.
    console.width = max(console.width, _WIDTH)
    console.print(table)


def _cells(line: WindowLine) -> list[str]:
    stand = line.stand.value + ("*" if line.pending and line.stand.value != "late" else "")
    return [
        line.window,
        stand,
        f"{line.closes_at:%m-%d %H:%M}" if line.closes_at else "–",
        f"{line.events:,}",
        f"{line.batches:,}",
        f"{line.late_events:,}" if line.late_events else "–",
        *("–" if n is None else f"{n:,}" for n in (line.accepted, line.duplicates, line.quarantined)),
        line.replay or "–",
    ]


def _iso(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat()
