"""The document of ``status`` as lines and tables for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from omnisupport_ingest.cli import render
from omnisupport_ingest.cli.status_health import health_line, logs_in, source_facts
from omnisupport_ingest.cli.status_platform import platform_facts
from omnisupport_ingest.cli.status_promised import promised_facts, table_name
from omnisupport_ingest.cli.status_reading import reading_summary
from omnisupport_ingest.cli.status_targets import target_facts


def show_status(document: dict[str, Any], *, everything: bool) -> None:
    """Print the document of ``status``."""
    platform, chosen = document["platform"], document["in_force"]
    lines = [
        ("home", f"{document['home']}, windows: {document['window']}"),
        *([("storage", f"landing and lake in {document['storage']}")] if document["storage"] else []),
        ("contracts", f"{chosen['contracts']}, {chosen['tables']} tables"),
        ("decisions", chosen["decision_table"]),
        ("health", health_line(document["health"])),
        *platform_facts(platform, everything=everything),
        ("disk", _disk_line(document["disk"])),
        *_retention_facts(document["retention"]),
    ]
    for log in logs_in(document):
        lines.append(("source", _source_line(log)))
        if log["slot"]["there"] is not None:
            lines.append(("slot", _slot_line(log["slot"])))
        lines.append(("capture", _capture_line(log)))
    lines += [("source", reading_summary(each)) for each in document["readings"]]
    for each in document["definition_changes"]:
        lines.append(("changed", f"{each['source']}: {each['what']}. To do: {each['fix']}"))
    if (wrong := document["documents_refused"]) is not None:
        since = f"In use are contracts, sources and decision table as they were at {wrong['since']}."
        lines.append(("not used", f"{wrong['problem']} {since} To do: {wrong['fix']}"))
    for each in document["contracts_gone"]:
        lines.append(("changed", f"{each['what']}. To do: {each['fix']}"))
    for each in document["schema_changes"]:
        table = f"{each['source']}.{each['table']}"
        lines.append(("changed", f"{table}: {each['what']}. To do: {each['edit']}"))
    if document["sources_not_in_use"]:
        names = ", ".join(document["sources_not_in_use"])
        lines.append(("not in use", f"{names} (--all shows them)"))
    render.facts(lines)
    for each in document["sources"]:
        click.echo()
        render.heading(each["source"])
        lines = [*_landing_facts(each["landing"]), *_freshness_facts(each["source"], each["tables"])]
        lines += promised_facts(each["source"], each["tables"])
        lines += source_facts(each)
        lines += target_facts(each["targets"])
        render.facts(lines, indent=2, label=11)
        # A source of which nothing has landed has no table to show.
        if each["landing"]["batches"] or any(table["there"] for table in each["tables"]):
            _show_tables(each["source"], each["tables"])
        advice = [
            ("advice", f"{table_name(each['source'], table)}: {table['recommended']}")
            for table in each["tables"]
            if table.get("recommended")
        ]
        render.facts(advice, indent=2, label=11)


def _disk_line(disk: dict[str, Any]) -> str:
    """Return the sizes in use, the largest layer first, their growth, and when the disk is full."""
    sizes = sorted(disk["layers"].items(), key=lambda each: -each[1])
    used = (
        ", ".join(f"{layer} {render.size(used_bytes)}" for layer, used_bytes in sizes if used_bytes)
        or "nothing yet"
    )
    free = f"{render.size(disk['free'])} free"
    if disk["per_day"] is None:
        return f"{used}; {free}"
    full = f", full in {disk['days']:,.0f} days" if disk["days"] is not None else ""
    return f"{used}; grows by {render.size(disk['per_day'])} a day; {free}{full} (estimated)"


def _retention_facts(retention: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what is removed by age, and what happens to it every night; nothing if all is kept."""
    given = [f"{', '.join(layers)} of {source}" for source, layers in retention["gives_up"].items()]
    if retention["runs_kept_days"] is not None:
        given.append(f"runs older than {render.counted(retention['runs_kept_days'], 'day')}")
    if given:
        done = (
            "removed every night"
            if retention["nightly"] == "apply"
            else "counted every night, not removed (OMNISUPPORT_RETENTION=apply removes it)"
        )
        yield "retention", f"given up by age: {'; '.join(given)}: {done}"


def _source_line(source: dict[str, Any]) -> str:
    subject = f"{source['name']}, {source['kind']} PostgreSQL"
    if source["reachable"]:
        return f"{subject} {source['server_version']}, answers"
    return f"{subject}, does not answer: {source['problem']}"


def _slot_line(slot: dict[str, Any]) -> str:
    if not slot["there"]:
        return f"{slot['name']} is not on the server"
    read = "is being read" if slot["read"] else "is not being read"
    kept = f", keeps {render.size(slot['retained_bytes'])} of WAL" if slot["retained_bytes"] else ""
    status = f", {slot['wal_status']}" if slot["wal_status"] not in (None, "reserved") else ""
    bytes_left = f", {render.size(max(0, slot['safe_bytes']))} left" if slot["safe_bytes"] is not None else ""
    return f"{slot['name']} {read}{kept}{status}{bytes_left}{_slot_forecast(slot)}"


def _slot_forecast(slot: dict[str, Any]) -> str:
    """Return how the kept WAL grows; knowing that takes two looks."""
    rate = slot.get("bytes_per_second")
    if not rate or rate < 0:
        return ""
    ends = f", given up in {render.span(slot['seconds_left'])}" if slot["seconds_left"] is not None else ""
    return f", grows {render.size(rate * 60)} a minute{ends}"


def _capture_line(source: dict[str, Any]) -> str:
    state = source["capture"]
    if source["paused"]:
        return f"{state} {source['paused']}"
    return f"{state}: {source['last_error']}" if state == "FAILED" else state


def _landing_facts(landing: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if landing["problem"]:
        yield "landed", landing["problem"]["problem"]
        yield "fix", landing["problem"]["fix"]
    elif not landing["batches"]:
        yield "landed", "nothing yet"
    else:
        batches, events = (
            render.counted(landing[name], noun) for name, noun in (("batches", "batch"), ("events", "event"))
        )
        yield "landed", f"{batches} with {events}"
        yield "last", f"{landing['last_batch_id']}, {render.ago(landing['last_landed_at'])}"
    if landing["stream_end"]:
        yield "stream", f"epoch {landing['epoch']}, landed up to {landing['stream_end']}"
    if landing["watermark"]:
        mark, behind = render.clock(landing["watermark"]), render.since(landing["watermark"])
        yield "watermark", f"{mark}, {behind} behind the clock"
    if landing["gap"]:
        yield "gap", landing["gap"]["problem"]
        yield "fix", landing["gap"]["fix"]


def _freshness_facts(source: str, tables: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield how far behind the dimensions are, and which one is furthest behind."""
    shown = [each for each in tables if each["there"] and each.get("complete_to") is not None]
    if not shown:
        return
    oldest = min(shown, key=lambda each: str(each["complete_to"]))
    moment = oldest["complete_to"]
    yield (
        "read",
        f"people read what was committed before {render.clock(moment)}, {render.ago(moment)} "
        f"(the oldest: {table_name(source, oldest)})",
    )


def _show_tables(source: str, tables: list[dict[str, Any]]) -> None:
    columns = ["  table", "windows", "rows", "cursor at", "watermark", "behind", "pending"]
    render.table(
        columns, [_table_row(source, table) for table in tables], right=("windows", "rows", "behind")
    )


def _table_row(source: str, table: dict[str, Any]) -> list[str]:
    name, pending = f"  {table_name(source, table)}", _pending(table)
    if not table["there"]:
        state = "cannot be read" if table["problem"] else "not there yet"
        return [name, "-", "-", "-", state, "-", pending]
    # Epoch and LSN only; the ordinal is of no use to a person.
    cursor = ":".join(table["cursor"].split(":")[:2]) if table["cursor"] else "-"
    mark = render.clock(table["watermark"])[5:19] if table["watermark"] else "-"
    behind = render.since(table["complete_to"]) if table.get("complete_to") else "-"
    return [name, f"{table['windows']:,}", f"{table['rows']:,}", cursor, mark, behind, pending]


def _pending(table: dict[str, Any]) -> str:
    windows, batches = table["pending_windows"], table["pending_batches"]
    if windows is None:
        return "-"
    if not windows and not batches:
        return "nothing"
    if table.get("merge_waits"):
        return f"merged by {table['merge_waits']['due'][11:19]}"
    return f"{render.counted(windows, 'window')}, {render.counted(batches, 'batch')}"
