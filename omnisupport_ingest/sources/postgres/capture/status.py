"""The status of a source: server, slot, publication, what has landed, and warnings."""

from __future__ import annotations

import shutil
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from psycopg2.extensions import connection as Connection

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.home import Home
from omnisupport_ingest.landing.names import stream_prefix
from omnisupport_ingest.landing.snapshot_progress import SnapshotProgress, snapshots_under_way
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.sources.postgres.capture.added_tables import (
    added_table_findings,
    adds_tables,
    not_captured,
)
from omnisupport_ingest.sources.postgres.capture.parked import ParkedTables, unpark_fix
from omnisupport_ingest.sources.postgres.capture.requests import Pause, PauseRequest
from omnisupport_ingest.sources.postgres.capture.state import CaptureState, State, capture_state
from omnisupport_ingest.sources.postgres.catalog.publication import read_publication
from omnisupport_ingest.sources.postgres.embedded.files import Location
from omnisupport_ingest.sources.postgres.preflight import Finding, blocking
from omnisupport_ingest.sources.postgres.preflight.source_check import continuity_findings, published_findings
from omnisupport_ingest.sources.postgres.session.connection import connect, one_row, source_errors
from omnisupport_ingest.sources.postgres.session.errors import SourceRefused, SourceUnavailable
from omnisupport_ingest.sources.postgres.session.server import SlotFacts, slot_facts
from omnisupport_ingest.sources.postgres.slot.home_identity import HomeCopied, HomeIdentity
from omnisupport_ingest.sources.postgres.slot.home_slot import end_of_chain
from omnisupport_ingest.sources.postgres.slot.retention import (
    Forecast,
    Level,
    SlotWarning,
    Thresholds,
    WalLimits,
    WalMark,
    forecast,
    wal_rate,
    warnings,
)
from omnisupport_ingest.sources.postgres.snapshot.requests import SnapshotRequests

_RATE_SPAN = timedelta(hours=1)
"""Time span, approximately, over which the rate of WAL is measured."""

_RATE_MIN_SPAN = timedelta(minutes=1)
"""The shortest such span. If only less is known, the rate is unknown."""

_BATCHES_PER_PROBE = 100
"""Of so many batches only one manifest is read, to skip old batches quickly."""

_MEGABYTE = 1024 * 1024


@dataclass(frozen=True, slots=True)
class LandedUpTo:
    """The end of the landed chain of the current epoch. ``at``: when its last batch landed.

    ``behind``: bytes of WAL between that end and the end of the server's WAL; None without a server. 0 means
    that nothing was written since, however old the watermark is.
    """

    epoch: int
    lsn: Lsn
    at: datetime | None
    watermark: datetime | None
    behind: int | None

    def lag_seconds(self, now: datetime) -> float | None:
        """Return the seconds by which the watermark is behind ``now``; None without a watermark."""
        return None if self.watermark is None else max(0.0, (now - self.watermark).total_seconds())


@dataclass(frozen=True, slots=True)
class ServerState:
    """What the server reports. ``missing``: tables with contracts that the publication does not cover.

    ``clock_ahead``: by how much the server's clock is ahead of ours.
    """

    version: str
    database: str
    role: str
    wal_end: Lsn
    slot: SlotFacts | None
    limits: WalLimits
    forecast: Forecast | None
    clock_ahead: timedelta
    publication_found: bool
    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SourceStatus:
    """The status of a source. ``server``: None if it does not answer; ``warnings`` then contains the reason.

    ``snapshots``: snapshots that are begun but not finished. ``requested``: snapshots that are requested but
    not begun, in words.
    """

    source: str
    slot_name: str
    publication: str
    tables: int
    capture: CaptureState
    paused: Pause | None
    landed: LandedUpTo | None
    snapshots: tuple[SnapshotProgress, ...]
    requested: tuple[str, ...]
    server: ServerState | None
    warnings: tuple[SlotWarning, ...]


def source_status(
    dsn: str | IngestError, settings: Settings, home: Home, tables: Sequence[TableContract]
) -> SourceStatus:
    """Return the status of the source at ``dsn``.

    If ``dsn`` is an error, the status lacks the server and has the error as a warning.
    """
    store = LandingStore(home.landing, settings.source)
    epoch = store.current_epoch()
    slot_name = epoch.facts.slot if epoch is not None and epoch.facts is not None else settings.slot
    paused = PauseRequest(store.folder).read()
    landed = _landed(store)
    capture = capture_state(
        home.run, store.folder, settings.source, paused, landed.at if landed is not None else None
    )
    parked = ParkedTables(store.folder, epoch.number).all() if epoch is not None else {}
    parked = {each.name: parked[each.name] for each in tables if each.name in parked}
    found = [
        SlotWarning(
            f"{name} is left out, the other tables go on: {why.reason}", unpark_fix(name), Level.ALARM
        )
        for name, why in sorted(parked.items())
    ]
    try:
        HomeIdentity(home).look()
    except HomeCopied as copied:
        found.insert(0, SlotWarning(copied.problem, copied.fix, Level.ALARM))
    server: ServerState | None = None
    if isinstance(dsn, IngestError):
        found.append(SlotWarning(dsn.problem, dsn.fix))
    else:
        new = not_captured(store, tables)
        followed = [each for each in tables if each not in new and each.name not in parked]
        try:
            with closing(connect(dsn)) as connection:
                look = _ServerLook(connection, settings, store)
                server = look.state(slot_name, tables, _disk_free(settings, home))
                gap = _alarms(continuity_findings(dsn, store))
                found += gap
                if not gap:
                    found += look.slot_warnings(server, _how_to_start(paused))
                found += look.publication_warnings(server, followed)
                added = capture.state is State.RUNNING and adds_tables(store)
                found += look.new_tables(new) if added else look.left_out(new)
        except (SourceRefused, SourceUnavailable) as error:
            found.append(SlotWarning(error.problem, error.fix))
    if server is not None and landed is not None:
        landed = replace(landed, behind=max(0, server.wal_end.value - landed.lsn.value))
    found += _failure_warning(capture, found)
    ahead = server.clock_ahead if server is not None else timedelta(0)
    return SourceStatus(
        settings.source,
        slot_name,
        settings.publication,
        len(tables),
        capture,
        paused,
        landed,
        tuple(snapshots_under_way(store, epoch.number, ahead)) if epoch is not None else (),
        tuple(str(each) for each in SnapshotRequests(store.folder).read()),
        server,
        tuple(found),
    )


def _failure_warning(capture: CaptureState, found: Sequence[SlotWarning]) -> Iterator[SlotWarning]:
    error = capture.last_error
    if capture.state is not State.FAILED or error is None:
        return
    # The server may have reported the same fault already.
    if error.problem not in {each.problem for each in found}:
        yield SlotWarning(f"Capture has failed: {error.problem}", error.fix)


def _how_to_start(paused: Pause | None) -> str:
    if paused is not None:
        return "Let the capture go on: omnisupport-ingest source resume."
    return "Start the capture: omnisupport-ingest up."


class _ServerLook:
    """One look at the server, by one connection.

    Its methods raise ``SourceUnavailable`` if the server stops answering.
    """

    def __init__(self, connection: Connection, settings: Settings, store: LandingStore) -> None:
        self._connection, self._settings, self._store = connection, settings, store

    def state(self, slot_name: str, tables: Sequence[TableContract], disk_free: int | None) -> ServerState:
        """Return what the server reports. ``disk_free``: bytes on the server's disk, if they are known."""
        with source_errors("reading the state of the source"):
            version, database, role, end, limit = one_row(
                self._connection,
                "SELECT current_setting('server_version'), current_database()::text, current_user::text,"
                " (CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn()"
                "  ELSE pg_current_wal_lsn() END)::text,"
                " (SELECT setting::bigint FROM pg_settings WHERE name = 'max_slot_wal_keep_size')",
            )
            ahead = self._clock_difference()
            slot = slot_facts(self._connection, slot_name)
            publication = read_publication(self._connection, self._settings.publication)
        wal_end = Lsn.parse(end)
        limits = WalLimits(limit * _MEGABYTE if limit >= 0 else None, disk_free)
        rate = wal_rate(_wal_mark_an_hour_ago(self._store, ahead), WalMark(wal_end, datetime.now(UTC)))
        covered = {*publication.tables, *publication.roots} if publication is not None else None
        return ServerState(
            version,
            database,
            role,
            wal_end,
            slot,
            limits,
            forecast(slot, limits, rate) if slot is not None else None,
            ahead,
            covered is not None,
            tuple(
                each.full_name for each in tables if covered is not None and each.table_name not in covered
            ),
        )

    def _clock_difference(self) -> timedelta:
        """Return by how much the server's clock is ahead of ours at least; zero if the two may agree."""
        before = datetime.now(UTC)
        (answer,) = one_row(self._connection, "SELECT clock_timestamp()")
        clock: datetime = answer
        return clock - min(max(before, clock), datetime.now(UTC))

    def slot_warnings(self, server: ServerState, how_to_start: str) -> Iterable[SlotWarning]:
        """Return the warnings about the WAL that the slot keeps; none if there is no slot."""
        if server.slot is None or server.forecast is None:
            return ()
        much = Thresholds(self._settings.slot_warning_bytes, self._settings.slot_alarm_bytes)
        return warnings(server.slot, server.limits, server.forecast, how_to_start, much)

    def publication_warnings(
        self, server: ServerState, followed: Sequence[TableContract]
    ) -> Sequence[SlotWarning]:
        """Return what the publication does not send of the ``followed`` tables; nothing before the first
        start of capture."""
        if server.slot is None:
            return ()
        name = self._settings.publication
        if not server.publication_found:
            problem = f"Publication {name} is not on the server."
            return (SlotWarning(problem, "omnisupport-ingest preflight", Level.ALARM),)
        if missing := [each.full_name for each in followed if each.full_name in server.missing]:
            problem = f"Publication {name} lacks {', '.join(missing)}."
            return (SlotWarning(problem, "omnisupport-ingest preflight", Level.ALARM),)
        return _alarms(published_findings(self._connection, self._store, name, followed))

    def new_tables(self, new: Sequence[TableContract]) -> Iterator[SlotWarning]:
        """Yield why ``new`` tables, whose contracts the running capture has not read, are not captured."""
        requested = {each.table for each in SnapshotRequests(self._store.folder).read()}
        unrequested = []
        for table in new:
            if table.name in requested:
                for each in self._blocking(table):
                    yield SlotWarning(f"{table.name} is not captured yet. {each.problem}", each.fix)
            elif wrong := list(self.left_out([table])):
                yield from wrong
            else:
                unrequested.append(table.name)
        if unrequested:
            yield SlotWarning(
                f"The running capture has not read the contract of {', '.join(unrequested)}, which is newer.",
                f"Let it read the contract: omnisupport-ingest source snapshot {' '.join(unrequested)}",
            )

    def left_out(self, new: Sequence[TableContract]) -> Iterator[SlotWarning]:
        """Yield why a start of capture would leave out tables that were never captured."""
        for table in new:
            for each in self._blocking(table):
                yield SlotWarning(f"{table.name} is not captured. {each.problem}", each.fix)

    def _blocking(self, table: TableContract) -> Sequence[Finding]:
        return blocking(added_table_findings(self._connection, self._store, self._settings, [table]))


def _alarms(findings: Iterable[Finding]) -> list[SlotWarning]:
    return [SlotWarning(each.problem, each.fix, Level.ALARM) for each in findings]


def _disk_free(settings: Settings, home: Home) -> int | None:
    """Return the free bytes on the disk of the embedded server; None for any other server."""
    if settings.source_dsn is not None:
        return None
    location = Location.read(home.postgres)
    if location is None:
        return None
    with suppress(OSError):
        return shutil.disk_usage(location.data).free
    return None


def _wal_mark_an_hour_ago(store: LandingStore, ahead: timedelta) -> WalMark | None:
    """Return where the WAL ended about an hour ago, or as near to that as the batches show; None if unknown.

    A capture that catches up lands in minutes what was written in hours. So use the commit time of a batch's
    last transaction, which is by the server's clock, ``ahead`` of ours.
    """
    epoch = store.current_epoch()
    if epoch is None:
        return None
    prefix = stream_prefix(epoch.number)
    now = datetime.now(UTC)
    names: list[str] = []
    for name in store.newest_first(prefix):
        names.append(name)
        if not len(names) % _BATCHES_PER_PROBE and store.read(name).arrival.landed_at < now - _RATE_SPAN:
            break
    names.reverse()
    first = bisect_left(names, now - _RATE_SPAN, key=lambda each: store.read(each).arrival.landed_at)
    for index in (first, first - 1):
        if 0 <= index < len(names):
            batch = store.read(names[index])
            if batch.stream is None:
                continue
            committed, at = batch.stream.last_commit_ts, batch.arrival.landed_at
            if committed is not None:
                at = min(at, committed - ahead)
            if at <= now - _RATE_MIN_SPAN:
                return WalMark(batch.stream.end_lsn, at)
    return None


def _landed(store: LandingStore) -> LandedUpTo | None:
    epoch = store.current_epoch()
    if epoch is None:
        return None
    end = end_of_chain(store, epoch).end
    last = store.last_stream(epoch.number)
    arrival = last.arrival if last is not None else None
    return LandedUpTo(
        epoch.number,
        end,
        arrival.landed_at if arrival else None,
        arrival.watermark if arrival else None,
        None,
    )
