"""What ``status`` found, as JSON values and in words for a person."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from omnisupport_ingest.stages.overview import SourceOverview, TableOverview

_WIDTH = 100


def source_document(seen: SourceOverview) -> dict[str, Any]:
    """``seen`` as JSON values: moments in ISO 8601, positions and LSNs as text."""
    hole, problem = seen.landing.hole, seen.landing.problem
    landing = asdict(replace(seen.landing, hole=None, problem=None))
    landing["problem"] = {"problem": problem.problem, "fix": problem.fix} if problem else None
    landing["stream_end"] = str(seen.landing.stream_end) if seen.landing.stream_end else None
    landing["hole"] = {"problem": str(hole), "fix": hole.fix} if hole else None
    lag = (datetime.now(UTC) - seen.landing.watermark).total_seconds() if seen.landing.watermark else None
    landing["watermark_lag_seconds"] = round(lag, 1) if lag is not None else None
    tables = [_table_document(table) for table in seen.tables]
    return {"source": seen.source, "landing": plain(landing), "tables": tables}


def _table_document(table: TableOverview) -> dict[str, Any]:
    found = asdict(replace(table, freshness=None))
    del found["freshness"], found["waits"], found["scattered"]
    if (fresh := table.freshness) is not None:
        found |= {
            "complete_to": fresh.complete_to,
            "lag_seconds": fresh.lag_seconds(datetime.now(UTC)),
            "behind_landing_seconds": fresh.behind_landing_seconds,
            "unshown_batches": fresh.unshown_batches,
            "merge_waits": plain(asdict(table.waits)) if table.waits is not None else None,
            "recommended": _recommended(table),
        }
    return plain(found)


def _recommended(table: TableOverview) -> str | None:
    found = table.scattered
    if found is None:
        return None
    return (
        f"Writes are scattered: the last {found.updates} updates rewrote {found.files_share:.0%} of the "
        f"files for {found.keys_share:.3%} of the keys. A delayed merge lets many share an update: "
        '"delayed_merge": {"max_age": "PT10M", "max_share": 0.01} in x-cdc of its contract.'
    )


def plain(record: dict[str, Any]) -> dict[str, Any]:
    """``record`` with its moments as ISO 8601."""
    return {
        name: value.isoformat() if isinstance(value, datetime) else value for name, value in record.items()
    }


def print_status(document: dict[str, Any]) -> None:
    """Print the document of ``status`` within 100 columns."""
    platform, source = document["platform"], document["source"]
    _line("home", f"{document['home']}, windows: {document['window']}")
    chosen = document["in_force"]
    _line("contracts", f"{chosen['contracts']}, {chosen['tables']} tables")
    _line("decisions", chosen["decision_table"])
    _line("platform", _platform(platform))
    for sensor in platform["sensors"] or ():
        _line("sensor", _sensor(sensor))
    for log in (source, *document["other_logs"]):
        _line("source", _source(log))
        if log["slot"]["there"] is not None:
            _line("slot", _slot(log["slot"]))
        _line("capture", _capture(log))
    for each in document["sources"]:
        click.echo()
        _landing(each["source"], each["landing"])
        _read(each["source"], each["tables"])
        _tables(each["source"], each["tables"])
        for table in each["tables"]:
            if table.get("recommended"):
                name = table["table"].removeprefix(f"{each['source']}/")
                _line("  advice", f"{name}: {table['recommended']}")


def _line(title: str, text: str) -> None:
    margin = " " * 10
    lines = textwrap.wrap(text, _WIDTH, initial_indent=f"{title:<10}", subsequent_indent=margin)
    click.echo("\n".join(lines))


def _platform(platform: dict[str, Any]) -> str:
    if not platform["running"]:
        return "not running (omnisupport-ingest up)"
    ui = f"UI: {platform['ui']}" if platform["ui"] else "no UI"
    return f"running, {ui}; {', '.join(platform['services']) or 'no service runs yet'}"


def _sensor(sensor: dict[str, Any]) -> str:
    state = "runs" if sensor["running"] else "is stopped"
    if sensor["tick"] is None:
        return f"{sensor['name']} {state}, no tick yet"
    said = sensor["said"] or {"SUCCESS": "asked for runs", "FAILURE": "failed; see the UI"}.get(
        sensor["tick"], sensor["tick"].lower()
    )
    return f"{sensor['name']} {state}, {_ago(sensor['tick_at'])} ago: {said}"


def _source(source: dict[str, Any]) -> str:
    what = f"{source['name']}, {source['kind']} PostgreSQL"
    if source["reachable"]:
        return f"{what} {source['server_version']}, answers"
    return f"{what}, does not answer: {source['problem']}"


def _slot(slot: dict[str, Any]) -> str:
    if not slot["there"]:
        return f"{slot['name']} is not on the server"
    read = "is being read" if slot["read"] else "is not being read"
    kept = f", keeps {slot['retained_bytes'] / 2**20:,.1f} MiB of WAL" if slot["retained_bytes"] else ""
    status = f", {slot['wal_status']}" if slot["wal_status"] not in (None, "reserved") else ""
    return f"{slot['name']} {read}{kept}{status}"


def _capture(source: dict[str, Any]) -> str:
    state = source["capture"]
    if source["paused"]:
        return f"{state} {source['paused']}"
    return f"{state}: {source['last_error']}" if state == "FAILED" else state


def _landing(name: str, landing: dict[str, Any]) -> None:
    click.echo(click.style(name, bold=True))
    if landing["problem"]:
        _line("  landed", landing["problem"]["problem"])
        _line("  fix", landing["problem"]["fix"])
    elif not landing["batches"]:
        _line("  landed", "nothing yet")
    else:
        _line("  landed", f"{landing['batches']:,} batches with {landing['events']:,} events")
        _line("  last", f"{landing['last_batch_id']}, {_ago(landing['last_landed_at'])} ago")
    if landing["stream_end"]:
        _line("  stream", f"epoch {landing['epoch']}, landed up to {landing['stream_end']}")
    if landing["watermark"]:
        mark = landing["watermark"][:19].replace("T", " ")
        _line("  mark", f"watermark {mark}, {_ago(landing['watermark'])} behind the clock")
    if landing["hole"]:
        _line("  hole", landing["hole"]["problem"])
        _line("  fix", landing["hole"]["fix"])


def _read(source: str, tables: list[dict[str, Any]]) -> None:
    """How far behind the dimensions are: the oldest is named."""
    shown = [each for each in tables if each.get("complete_to") is not None]
    if not shown:
        return
    oldest = min(shown, key=lambda each: str(each["complete_to"]))
    moment = oldest["complete_to"][:19].replace("T", " ")
    _line(
        "  read",
        f"people read what was committed before {moment}, {_ago(oldest['complete_to'])} ago "
        f"(the oldest: {oldest['table'].removeprefix(f'{source}/')})",
    )


def _tables(source: str, tables: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    shown.add_column("  table", overflow="fold")
    for title in ("windows", "rows"):
        shown.add_column(title, justify="right", no_wrap=True)
    for title in ("cursor at", "watermark"):
        shown.add_column(title, no_wrap=True)
    shown.add_column("behind", justify="right", no_wrap=True)
    shown.add_column("pending", no_wrap=True)
    for table in tables:
        name = table["table"].removeprefix(f"{source}/")
        if not table["there"]:
            shown.add_row(f"  {name}", "-", "-", "-", "not there yet", "-", _pending(table))
            continue
        cursor = ":".join(table["cursor"].split(":")[:2]) if table["cursor"] else "-"
        mark = table["watermark"][5:19].replace("T", " ") if table["watermark"] else "-"
        counts = (f"{table['windows']:,}", f"{table['rows']:,}")
        shown.add_row(f"  {name}", *counts, cursor, mark, _behind(table), _pending(table))
    Console(highlight=False, width=_WIDTH).print(shown)


def _behind(table: dict[str, Any]) -> str:
    return _ago(table["complete_to"]) if table.get("complete_to") else "-"


def _pending(table: dict[str, Any]) -> str:
    windows, batches = table["pending_windows"], table["pending_batches"]
    if windows is None:
        return "-"
    if not windows and not batches:
        return "nothing"
    if table.get("merge_waits"):
        return f"merged by {table['merge_waits']['due'][11:19]}"
    return f"{windows} window{'s' * (windows != 1)}, {batches} batch{'es' * (batches != 1)}"


def _ago(moment: str) -> str:
    """How long ago, in the largest unit that tells it: ``4 s``, ``26 min``, ``3 h``, ``2 days``."""
    seconds = max(0.0, (datetime.now(UTC) - datetime.fromisoformat(moment)).total_seconds())
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
