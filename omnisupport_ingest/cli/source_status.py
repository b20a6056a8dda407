"""``source status``: how far the capture of a log is, and how far cursors or topics have been read."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from omnisupport_ingest.cli import render
from omnisupport_ingest.cli.errors import FINDINGS
from omnisupport_ingest.cli.opening import (
    contracted_tables,
    existing_home,
    has_log,
    log_of,
    open_settings,
    source_dsn_or_error,
)
from omnisupport_ingest.cli.status_reading import is_well, reading_document, reading_lines
from omnisupport_ingest.contracts.sources import SourceKind, SourceUnknown, sources_in_force
from omnisupport_ingest.sources.postgres.capture.requests import PauseRequest
from omnisupport_ingest.sources.postgres.capture.state import State

if TYPE_CHECKING:
    from omnisupport_ingest.landing.snapshot_progress import SnapshotProgress
    from omnisupport_ingest.settings import Settings
    from omnisupport_ingest.sources.postgres.capture.status import LandedUpTo, ServerState, SourceStatus
    from omnisupport_ingest.sources.postgres.session.server import SlotFacts


@click.command()
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document, sizes in bytes.")
def status(name: str | None, as_json: bool) -> int:
    """Show the state of capture, its last error, its lag, and the slot with the WAL kept for it.

    NAME is a source of the home (`sources list`); by default it is the one that the settings name. For a
    source that is read by cursors, the command shows how far each table has been read; for Kafka topics,
    how far behind each partition is.

    \b
    RUNNING   a process captures; its host and process id are shown
    PAUSED    by `source pause`
    FAILED    the last start ended in an error or was killed; capture may be trying again
    STOPPED   capture ended well, or never ran

    The last error is shown until capture has none, also while it runs.

    The lag is the WAL that has not landed, and the age of the watermark. The watermark moves only with the
    WAL, so that of an idle source may be old although nothing is missing: then no WAL is left to land.

    The forecast says when the server gives up the slot, or its disk is full, if the slot stood still.

    \b
    Examples:
      omnisupport-ingest source status
      omnisupport-ingest source status --json | jq -r .state

    Exit code: 0 all is well, 1 capture has failed or there are warnings, 2 usage or settings, 3 no home.
    """
    from omnisupport_ingest.sources.postgres.capture.status import source_status

    settings = open_settings()
    if name is not None and not has_log(settings, name):
        return _other_status(settings, name, as_json=as_json)
    settings = log_of(settings, name)
    tables = contracted_tables(settings)
    home = existing_home(settings)
    log_status = source_status(source_dsn_or_error(settings, home), settings, home, tables)
    if as_json:
        render.echo_json(status_document(log_status))
    else:
        show_status(log_status)
    return FINDINGS if log_status.warnings else 0


# --- a log, for people -------------------------------------------------------------------------------------


def show_status(status: SourceStatus) -> None:
    """Print ``status`` as labelled lines, then the warnings with their fixes."""
    render.facts(_facts(status))
    for each in status.warnings:
        click.echo()
        render.finding(each.problem, each.fix)


def _facts(status: SourceStatus) -> Iterator[tuple[str, str]]:
    server = status.server
    yield "source", f"{status.source}, {render.counted(status.tables, 'table')} by contract"
    if server is not None:
        yield "server", f"PostgreSQL {server.version}, database {server.database}, role {server.role}"
    else:
        yield "server", "does not answer, see below"
    yield "state", _state(status)
    yield "last error", _last_error(status)
    yield "landed", _landed(status.landed)
    yield "lag", _lag(status.landed)
    for under_way in status.snapshots:
        yield "snapshot", _snapshot(under_way)
    for table in status.requested:
        yield "snapshot", f"{table}: requested, not begun"
    if server is not None:
        yield "slot", f"{status.slot_name}: {_slot(server.slot)}"
        if server.slot is not None:
            yield "WAL kept", _retained(server, server.slot)
            yield "forecast", _forecast(server)
        yield "publication", f"{status.publication}: {_publication(status, server)}"


def _state(status: SourceStatus) -> str:
    capture, paused, holder = status.capture, status.paused, status.capture.holder
    since = f" since {render.clock(capture.since)}" if capture.since else ""
    by = f", process {holder.pid} on {holder.host}" if holder and holder.pid else ""
    if capture.state is State.RUNNING:
        return f"{capture.state}{since}{by}" + (f"; paused {paused}, and about to stop" if paused else "")
    if capture.state is State.PAUSED:
        return f"{capture.state} {paused}"
    if capture.state is State.FAILED:
        if capture.killed and capture.last_error:
            return f"{capture.state}: killed, not before {render.clock(capture.last_error.at)}"
        return f"{capture.state}{since}" + (f"; trying again{by}" if holder else "")
    return f"{capture.state}{since}" if since else f"{capture.state}: no start is on record"


def _last_error(status: SourceStatus) -> str:
    error = status.capture.last_error
    if error is None:
        return "none"
    when = f"{error.error}, {render.ago(error.at)}, at {render.clock(error.at)}"
    if status.capture.state is State.FAILED:
        return f"{when}, see below"
    since = status.capture.since
    if status.capture.state is State.RUNNING and since is not None and error.at <= since:
        return f"{when}, before this start, which went well\n{error.problem}"
    return f"{when}\n{error.problem}\nFix: {error.fix}"


def _lag(landed: LandedUpTo | None) -> str:
    if landed is None:
        return "not known, nothing has landed"
    lag = landed.lag_seconds(datetime.now(UTC))
    mark = "no watermark yet" if lag is None else f"watermark {render.span(lag)} behind the clock"
    if landed.behind is None:
        return mark
    if not landed.behind:
        return f"none: the source has written nothing since ({mark})"
    return f"{render.size(landed.behind)} of WAL; {mark}"


def _landed(landed: LandedUpTo | None) -> str:
    if landed is None:
        return "nothing yet"
    parts = [f"up to {landed.lsn} in epoch {landed.epoch}"]
    if landed.at is not None:
        parts.append(f"last batch {render.ago(landed.at)}")
    return ", ".join(parts)


def _snapshot(under_way: SnapshotProgress) -> str:
    snapshot, rate, seconds = under_way, under_way.rows_per_second, under_way.seconds_left
    scope = "" if snapshot.scope is None else f", keys {snapshot.scope}"
    done = f"{snapshot.table}{scope}: {snapshot.done} of {snapshot.chunks} chunks"
    remaining = (
        "time left not known yet" if seconds is None else f"about {render.span(seconds)} of reading left"
    )
    if snapshot.compared:
        return f"{done} compared, {snapshot.rows:,} rows read again, {remaining}"
    # The remaining time follows from the rate: if one is unknown, so is the other.
    speed = "rate not known yet" if rate is None else f"{render.rate(rate)}, {remaining}"
    return f"{done}, {snapshot.rows:,} rows, {speed}"


def _slot(slot: SlotFacts | None) -> str:
    if slot is None:
        return "not on the server"
    read = f"read by {slot.reader}" if slot.reader else "nobody reads it"
    given_up = f", given up: {slot.invalidated}" if slot.invalidated else ""
    at = f"confirmed up to {slot.confirmed_flush_lsn}, restarts at {slot.restart_lsn}"
    return f"{read}, plugin {slot.plugin}, {at}{given_up}"


def _retained(server: ServerState, slot: SlotFacts) -> str:
    limit = server.limits.limit
    bound = "no limit (max_slot_wal_keep_size)" if limit is None else f"limit {render.size(limit)}"
    safe = "" if slot.safe_bytes is None else f", {render.size(max(0, slot.safe_bytes))} left"
    return f"{render.size(slot.retained_bytes or 0)} for the slot, {bound}{safe}, status {slot.wal_status}"


def _forecast(server: ServerState) -> str:
    ahead = server.forecast
    assert ahead is not None, "a slot has a forecast"
    rate = "rate of the WAL not known yet"
    if ahead.rate is not None:
        rate = f"{render.size(round(ahead.rate * 3600))} of WAL an hour"
    if ahead.ends_at is None:
        return f"{rate}; how much room there is cannot be seen from here"
    if ahead.left is not None and ahead.seconds is None:
        return f"{rate}; {render.size(ahead.left)} until {ahead.ends_at}"
    return f"{rate}; if the slot stood still, {ahead.ends_at} in {render.span(ahead.seconds or 0)}"


def _publication(status: SourceStatus, server: ServerState) -> str:
    if not server.publication_found:
        return "not on the server"
    return f"covers {status.tables - len(server.missing)} of {status.tables} tables"


# --- a log, for --json -------------------------------------------------------------------------------------


def status_document(status: SourceStatus) -> dict[str, object]:
    """Return ``status`` for ``--json``: sizes in bytes, times in ISO 8601, LSNs as PostgreSQL writes them."""
    server, landed = status.server, status.landed
    holder, error = status.capture.holder, status.capture.last_error
    lag = landed.lag_seconds(datetime.now(UTC)) if landed is not None else None
    return {
        "source": status.source,
        "tables": status.tables,
        "state": str(status.capture.state),
        "state_since": render.iso(status.capture.since),
        "capture": {
            "running": status.capture.state is State.RUNNING,
            "pid": holder.pid if holder else None,
            "host": holder.host if holder else None,
            "killed": status.capture.killed,
            "paused_since": render.iso(status.paused.since) if status.paused else None,
            "paused_because": (status.paused.reason or None) if status.paused else None,
        },
        "last_error": None
        if error is None
        else {"error": error.error, "problem": error.problem, "fix": error.fix, "at": render.iso(error.at)},
        "landed": None
        if landed is None
        else {
            "epoch": landed.epoch,
            "lsn": str(landed.lsn),
            "at": render.iso(landed.at),
            "watermark": render.iso(landed.watermark),
            "watermark_lag_seconds": None if lag is None else round(lag, 1),
            "bytes_behind": landed.behind,
        },
        "snapshots": [_snapshot_document(each) for each in status.snapshots],
        "snapshots_asked_for": list(status.requested),
        "server": None if server is None else _server_document(status, server),
        "warnings": [{"what": each.problem, "fix": each.fix} for each in status.warnings],
    }


def _snapshot_document(under_way: SnapshotProgress) -> dict[str, object]:
    rate, seconds_left = under_way.rows_per_second, under_way.seconds_left
    return {
        "table": under_way.table,
        "keys": under_way.scope,
        "reason": under_way.reason,
        "planned_at": render.iso(under_way.planned_at),
        "chunks": under_way.chunks,
        "chunks_landed": under_way.done,
        "rows_landed": under_way.rows,
        "rows_per_second": None if rate is None else round(rate, 1),
        "seconds_left": None if seconds_left is None else round(seconds_left, 1),
    }


def _server_document(status: SourceStatus, server: ServerState) -> dict[str, object]:
    slot, ahead = server.slot, server.forecast
    reader = slot.reader if slot is not None else None
    return {
        "version": server.version,
        "database": server.database,
        "role": server.role,
        "wal_end": str(server.wal_end),
        "max_slot_wal_keep_size": server.limits.limit,
        "disk_free": server.limits.disk_free,
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


def _text(value: object) -> str | None:
    return None if value is None else str(value)


# --- sources that are read by cursors, or from Kafka topics ------------------------------------------------


def _other_status(settings: Settings, name: str, *, as_json: bool) -> int:
    """Print how far each table or partition of the source ``name`` has been read; returns the exit code."""
    definition = sources_in_force(settings).find(name)
    if definition.kind not in (SourceKind.KAFKA, SourceKind.QUERY):
        pause = PauseRequest(existing_home(settings).landing / name).read()
        is_paused = "" if pause is None else f" It is paused {pause}."
        raise SourceUnknown(
            f"{name} is a source of the kind {definition.kind}: its files are landed, nothing reads "
            f"it.{is_paused}",
            fix=f"omnisupport-ingest {'landing list --source' if pause is None else 'source resume'} {name}",
        )
    document = reading_document(settings, definition, existing_home(settings))
    if as_json:
        render.echo_json(document)
    else:
        for line in reading_lines(document):
            click.echo(line)
    return 0 if is_well(document) else FINDINGS
