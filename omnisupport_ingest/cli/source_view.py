"""The status of a source as a person reads it, and as a program does."""

from __future__ import annotations

import textwrap
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from omnisupport_ingest.cli.slot_left import size_text

if TYPE_CHECKING:
    from omnisupport_ingest.landing.snapshot_progress import SnapshotProgress
    from omnisupport_ingest.sources.postgres.capture.state import CaptureState
    from omnisupport_ingest.sources.postgres.capture.status import LandedUpTo, ServerState, SourceStatus
    from omnisupport_ingest.sources.postgres.session.server import SlotFacts

_LABEL = 13


def print_status(status: SourceStatus) -> None:
    """Print ``status`` as lines of a label and a fact, then the warnings with their remedies."""
    server = status.server
    _line("source", f"{status.source}, {status.tables} tables by contract")
    if server is not None:
        _line("server", f"PostgreSQL {server.version}, database {server.database}, role {server.role}")
    else:
        _line("server", "cannot be asked, see below")
    _line("state", _state(status))
    _line("last error", _last_error(status))
    _line("landed", _landed(status.landed))
    _line("lag", _lag(status.landed))
    for under_way in status.snapshots:
        _line("snapshot", _snapshot(under_way))
    for table in status.requested:
        _line("snapshot", f"{table}: asked for, not begun")
    if server is not None:
        _line("slot", f"{status.slot_name}: {_slot(server.slot)}")
        if server.slot is not None:
            _line("WAL kept", _retained(server, server.slot))
            _line("forecast", _forecast(server))
        _line("publication", f"{status.publication}: {_publication(status, server)}")
    for each in status.warnings:
        click.echo(f"\n{click.style('Warning:', fg='yellow', bold=True)} {each.problem}\nFix: {each.fix}")


def status_document(status: SourceStatus) -> dict[str, object]:
    """``status`` for ``--json``: sizes in bytes, times in ISO 8601, LSNs as PostgreSQL writes them."""
    from omnisupport_ingest.sources.postgres.capture.state import State

    server, landed = status.server, status.landed
    holder, error = status.capture.holder, status.capture.last_error
    lag = landed.lag_seconds(datetime.now(UTC)) if landed is not None else None
    return {
        "source": status.source,
        "tables": status.tables,
        "state": str(status.capture.state),
        "state_since": _iso(status.capture.since),
        "capture": {
            "running": status.capture.state is State.RUNNING,
            "pid": holder.pid if holder else None,
            "host": holder.host if holder else None,
            "killed": status.capture.killed,
            "paused_since": _iso(status.paused.since) if status.paused else None,
            "paused_because": (status.paused.reason or None) if status.paused else None,
        },
        "last_error": None
        if error is None
        else {"error": error.error, "problem": error.problem, "fix": error.fix, "at": _iso(error.at)},
        "landed": None
        if landed is None
        else {
            "epoch": landed.epoch,
            "lsn": str(landed.lsn),
            "at": _iso(landed.at),
            "watermark": _iso(landed.watermark),
            "watermark_lag_seconds": None if lag is None else round(lag, 1),
            "bytes_behind": landed.behind,
        },
        "snapshots": [_snapshot_document(each) for each in status.snapshots],
        "snapshots_asked_for": list(status.requested),
        "server": None if server is None else _server_document(status, server),
        "warnings": [{"what": each.problem, "fix": each.fix} for each in status.warnings],
    }


def _snapshot_document(under_way: SnapshotProgress) -> dict[str, object]:
    rate, left = under_way.rows_per_second, under_way.seconds_left
    return {
        "table": under_way.table,
        "keys": under_way.scope,
        "reason": under_way.reason,
        "planned_at": _iso(under_way.planned_at),
        "chunks": under_way.chunks,
        "chunks_landed": under_way.done,
        "rows_landed": under_way.rows,
        "rows_per_second": None if rate is None else round(rate, 1),
        "seconds_left": None if left is None else round(left, 1),
    }


def _server_document(status: SourceStatus, server: ServerState) -> dict[str, object]:
    slot, ahead = server.slot, server.forecast
    reader = slot.reader if slot is not None else None
    return {
        "version": server.version,
        "database": server.database,
        "role": server.role,
        "wal_end": str(server.wal_end),
        "max_slot_wal_keep_size": server.room.limit,
        "disk_free": server.room.disk_free,
        "slot": None
        if slot is None
        else {
            "name": slot.name,
            "plugin": slot.plugin,
            "active": reader is not None,
            "reader": None
            if reader is None
            else {
                "pid": reader.pid,
                "application": reader.application,
                "user": reader.user,
                "address": reader.address,
            },
            "restart_lsn": _text(slot.restart_lsn),
            "confirmed_flush_lsn": _text(slot.confirmed_flush_lsn),
            "wal_status": slot.wal_status,
            "retained_bytes": slot.retained_bytes,
            "safe_wal_size": slot.safe_bytes,
            "invalidation_reason": slot.invalidated,
        },
        "forecast": None
        if ahead is None
        else {
            "wal_bytes_per_second": None if ahead.rate is None else round(ahead.rate, 1),
            "ends_at": ahead.ends_at,
            "bytes_left": ahead.left,
            "seconds_left": None if ahead.seconds is None else round(ahead.seconds),
        },
        "publication": {
            "name": status.publication,
            "exists": server.publication_found,
            "missing_tables": list(server.missing),
        },
    }


def _state(status: SourceStatus) -> str:
    from omnisupport_ingest.sources.postgres.capture.state import State

    capture, paused, holder = status.capture, status.paused, status.capture.holder
    since = f" since {_clock(capture.since)}" if capture.since else ""
    by = f", process {holder.pid} on {holder.host}" if holder and holder.pid else ""
    if capture.state is State.RUNNING:
        return f"{_coloured(capture)}{since}{by}" + (
            f"; paused {paused}, and about to stop" if paused else ""
        )
    if capture.state is State.PAUSED:
        return f"{_coloured(capture)} {paused}"
    if capture.state is State.FAILED:
        if capture.killed and capture.last_error:
            return f"{_coloured(capture)}: killed, not before {_clock(capture.last_error.at)}"
        return f"{_coloured(capture)}{since}" + (f"; trying again{by}" if holder else "")
    return f"{_coloured(capture)}{since}" if since else f"{_coloured(capture)}: no start is on record"


def _coloured(capture: CaptureState) -> str:
    colours = {"RUNNING": "green", "FAILED": "red"}
    return click.style(str(capture.state), fg=colours.get(capture.state, "yellow"), bold=True)


def _last_error(status: SourceStatus) -> str:
    from omnisupport_ingest.sources.postgres.capture.state import State

    error = status.capture.last_error
    if error is None:
        return "none"
    told = f"{error.error}, {_ago(error.at)} ago at {_clock(error.at)}"
    if status.capture.state is State.FAILED:
        return f"{told}, see below"
    margin = " " * _LABEL
    return f"{told}\n" + textwrap.indent(f"{error.problem}\nFix: {error.fix}", margin)


def _lag(landed: LandedUpTo | None) -> str:
    if landed is None:
        return "not known, nothing has landed"
    lag = landed.lag_seconds(datetime.now(UTC))
    mark = "no watermark yet" if lag is None else f"watermark {_span(lag)} behind the clock"
    if landed.behind is None:
        return mark
    if not landed.behind:
        return f"none: the source has written nothing since ({mark})"
    return f"{size_text(landed.behind)} of WAL; {mark}"


def _landed(landed: LandedUpTo | None) -> str:
    if landed is None:
        return "nothing yet"
    parts = [f"up to {landed.lsn} in epoch {landed.epoch}"]
    if landed.at is not None:
        parts.append(f"last batch {_ago(landed.at)} ago")
    return ", ".join(parts)


def _snapshot(under_way: SnapshotProgress) -> str:
    of, rate, seconds = under_way, under_way.rows_per_second, under_way.seconds_left
    scope = "" if of.scope is None else f", keys {of.scope}"
    done = f"{of.table}{scope}: {of.done} of {of.chunks} chunks"
    left = "time left not known yet" if seconds is None else f"about {_span(seconds)} of reading left"
    if of.compared:
        return f"{done} compared, {of.rows:,} rows read again, {left}"
    # The time left is told by the rate: neither is known without the other.
    speed = "rate not known yet" if rate is None else f"{rate:,.0f} rows/s, {left}"
    return f"{done}, {of.rows:,} rows, {speed}"


def _slot(slot: SlotFacts | None) -> str:
    if slot is None:
        return "not on the server"
    read = f"read by {slot.reader}" if slot.reader else "nobody reads it"
    given_up = f", given up: {slot.invalidated}" if slot.invalidated else ""
    at = f"confirmed up to {slot.confirmed_flush_lsn}, restarts at {slot.restart_lsn}"
    return f"{read}, plugin {slot.plugin}, {at}{given_up}"


def _retained(server: ServerState, slot: SlotFacts) -> str:
    limit = server.room.limit
    bound = "no limit (max_slot_wal_keep_size)" if limit is None else f"limit {size_text(limit)}"
    safe = "" if slot.safe_bytes is None else f", {size_text(max(0, slot.safe_bytes))} left"
    return f"{size_text(slot.retained_bytes or 0)} for the slot, {bound}{safe}, status {slot.wal_status}"


def _forecast(server: ServerState) -> str:
    ahead = server.forecast
    assert ahead is not None, "a slot has a forecast"
    rate = "rate of the WAL not known yet"
    if ahead.rate is not None:
        rate = f"{size_text(round(ahead.rate * 3600))} of WAL an hour"
    if ahead.ends_at is None:
        return f"{rate}; how much room there is cannot be seen from here"
    if ahead.left is not None and ahead.seconds is None:
        return f"{rate}; {size_text(ahead.left)} until {ahead.ends_at}"
    return f"{rate}; if the slot stood still, {ahead.ends_at} in {_span(ahead.seconds or 0)}"


def _publication(status: SourceStatus, server: ServerState) -> str:
    if not server.publication_found:
        return "not on the server"
    return f"covers {status.tables - len(server.missing)} of {status.tables} tables"


def _line(label: str, text: str) -> None:
    click.echo(f"{label:<{_LABEL}}{text}")


def _ago(moment: datetime) -> str:
    return _span(max(0.0, (datetime.now(UTC) - moment).total_seconds()))


def _span(seconds: float) -> str:
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} seconds"


def _clock(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(sep=" ", timespec="seconds")


def _iso(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat()


def _text(value: object) -> str | None:
    return None if value is None else str(value)
