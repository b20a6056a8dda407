"""Measure real captures at several settings, on a temporary platform or on the user's own.

The temporary platform is a home with an embedded PostgreSQL, the demo's database, a slot and a publication of
its own. For each setting, a capture process starts with it, and the demo's traffic runs for some seconds. The
manifests and the tables' logs then show the latency of the events, as in a report. The user's
``OMNISUPPORT_…`` variables and ``.env`` are hidden meanwhile, so no process can reach the user's source or
home.

On the user's own home, capture runs with each setting in turn and lands whatever the user's programs commit,
as always: batches of another age are batches like any other. Nothing is written to the source.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import psutil

from omnisupport_ingest.contracts.documents import program_file
from omnisupport_ingest.contracts.in_force import record_in_force
from omnisupport_ingest.demo.domains import DEFAULT, embedded_domain
from omnisupport_ingest.demo.workload import Workload
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.home import Home
from omnisupport_ingest.landing.completeness import incomplete_now
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.layers.scheduling.pending import pending_windows
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.report import figures
from omnisupport_ingest.report.facts import source_facts
from omnisupport_ingest.runtime.dagster_services import start_dagster_without_ui, stop_dagster
from omnisupport_ingest.runtime.home_lock import HomeLock
from omnisupport_ingest.runtime.private_folders import remove_socket_folder
from omnisupport_ingest.runtime.running import running_services
from omnisupport_ingest.runtime.spark_connect import stop_spark_connect
from omnisupport_ingest.runtime.supervisor import ServiceFailed, Supervisor
from omnisupport_ingest.settings import PREFIX, Settings
from omnisupport_ingest.sources.postgres.capture.requests import PauseRequest
from omnisupport_ingest.sources.postgres.embedded.dsn import source_dsn
from omnisupport_ingest.sources.postgres.embedded.server import EmbeddedPostgres
from omnisupport_ingest.sources.postgres.session.connection import connect
from omnisupport_ingest.sources.postgres.session.errors import CapturePaused
from omnisupport_ingest.sources.postgres.session.server import current_wal_lsn, slot_facts
from omnisupport_ingest.tuning.points import Percentiles, Point, Setting
from omnisupport_ingest.verify import services

_DECISIONS = "reports/week03/late_arrival_decision_table.csv"
_TAKEN_OVER = (
    "window",
    "stream_transactions",
    "stream_above_bytes",
    "spark_master",
    "spark_properties",
    "spark_driver_memory",
)
"""The user's settings that change what is measured, and reach nothing of the user's."""

_READY_SECONDS = 120.0
_DONE_SECONDS = 900.0
_MOST_BATCHES = 1_000_000
_LAST_LINES = 5

Say = Callable[[str], None]


class MeasuringFailed(IngestError):
    """``tune`` could not measure a point: nothing landed of it, or what ran for it failed.

    Fix: Act on the end of the logs in the message, or measure for longer (``--seconds``).
    """

    exit_code = 7


@dataclass(frozen=True)
class Load:
    """The load under which each point is measured for ``seconds``.

    ``rate``: changes a second of the demo's traffic; None: whatever the user's programs commit.
    ``to_dimension``: Spark and Dagster run too, and latency is measured up to the dimensions.
    """

    rate: float | None
    seconds: float
    seed: int = services.SEED
    to_dimension: bool = False


@dataclass(frozen=True)
class Measured:
    """The platform that is measured, with everything running except capture."""

    settings: Settings
    home: Home
    supervisor: Supervisor
    load: Load

    @property
    def dsn(self) -> str:
        return source_dsn(self.settings, self.home)

    @property
    def workspace(self) -> Workspace:
        return Workspace.open(self.settings)


@contextmanager
def scratch(settings: Settings, folder: Path, load: Load, say: Say) -> Iterator[Measured]:
    """Yield a platform in a new folder below ``folder``; remove all of it at the end, however the block ends.

    ``settings``: of the user; only those that change what is measured are taken.
    """
    # No failpoint: scratch files, which the next command removes if this process is killed.
    path = Path(tempfile.mkdtemp(prefix=".omnisupport-tune-", dir=folder))
    try:
        with _out_of_sight(path):
            ours = Settings(
                home=path / "home",
                source=DEFAULT.name,
                contracts_dir=program_file(DEFAULT.contracts),
                decision_table=program_file(_DECISIONS),
                **{name: getattr(settings, name) for name in _TAKEN_OVER},
            )
            home = Home.open(ours.home, ours.window_size)
            record_in_force(ours, home)
            yield from _platform(ours, home, load, say)
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def own(settings: Settings, home: Home, load: Load, say: Say) -> Iterator[Measured]:
    """Yield the user's own platform, without its capture. Raises ``HomeInUse`` while the platform runs, and
    ``CapturePaused``."""
    refuse_paused(settings, home)
    with HomeLock(home, "tune"):
        services.check_source(settings, home, say)
        with _running(settings, home, load, say) as platform:
            yield platform


def refuse_paused(settings: Settings, home: Home) -> None:
    """Raise ``CapturePaused`` while the source is paused: its capture would wait, and nothing would land."""
    pause = PauseRequest(LandingStore(home.landing, settings.source).folder).read()
    if pause is not None:
        raise CapturePaused(
            f"The capture of {settings.source} is paused {pause}, so nothing of it can be measured.",
            fix=f"omnisupport-ingest source resume {settings.source}",
        )


@contextmanager
def _running(settings: Settings, home: Home, load: Load, say: Say) -> Iterator[Measured]:
    """Yield the platform with everything running except capture, on a home whose lock is held."""
    with Supervisor(home, report=say) as supervisor:
        try:
            if settings.source_dsn is None:
                services.start_source(supervisor, settings, home, say, seed=load.seed)
            if load.to_dimension:
                services.start_spark(supervisor, settings, home, say)
                say("Starting Dagster …")
                start_dagster_without_ui(supervisor, settings, home)
            yield Measured(settings, home, supervisor, load)
        finally:
            stop_dagster(supervisor)
            stop_spark_connect(supervisor, home)


def _platform(settings: Settings, home: Home, load: Load, say: Say) -> Iterator[Measured]:
    try:
        with HomeLock(home, "tune"), _running(settings, home, load, say) as platform:
            try:
                yield platform
            except ServiceFailed as failed:
                # The logs that the error names will be removed in a moment, so quote their ends.
                raise MeasuringFailed(failed.problem, fix=f"Its logs end with:\n{_ends_of(home)}") from None
    finally:
        # The data of PostgreSQL may lie outside the home.
        EmbeddedPostgres(home.postgres).destroy()
        remove_socket_folder(home.run)


def _ends_of(home: Home) -> str:
    """Return the last lines of every log."""
    log_ends = []
    for path in sorted(home.logs.glob("*.log")):
        lines = path.read_text(errors="replace").splitlines()[-_LAST_LINES:]
        log_ends += [f"  {path.stem}: {each}" for each in lines]
    return "\n".join(log_ends)


@contextmanager
def _out_of_sight(folder: Path) -> Iterator[None]:
    """Work in ``folder`` without any ``OMNISUPPORT_…`` variable, so that no process finds the user's
    settings."""
    before = Path.cwd()
    removed = {name: os.environ.pop(name) for name in list(os.environ) if name.upper().startswith(PREFIX)}
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
        os.environ.update(removed)


def measure(platform: Measured, setting: Setting) -> Point:
    """Capture the traffic of the load with ``setting``. Raises ``MeasuringFailed`` if none of it lands, and
    ``CapturePaused`` if somebody pauses the source meanwhile."""
    supervisor = platform.supervisor
    tried = platform.settings.model_copy(
        update={"batch_max_seconds": setting.seconds, "batch_max_bytes": setting.bytes}
    )
    supervisor.start(services.capture(tried))
    try:
        supervisor.wait(lambda: _captures(platform), service="Capture", seconds=_READY_SECONDS)
        if platform.load.to_dimension:
            # The snapshots, which the runs would be busy with.
            _wait_for_all(platform)
        began, spent = datetime.now(UTC), _processor_seconds(platform)
        traffic = _traffic(platform)
        _wait_for_all(platform)
        spent = _processor_seconds(platform) - spent
    finally:
        supervisor.stop(services.CAPTURE)
    return _point(platform, setting, began, traffic, spent)


@dataclass(frozen=True, slots=True)
class _Traffic:
    """Number of changes that this program committed (0: others did), and the seconds that it took."""

    changes: int
    seconds: float


def _point(platform: Measured, setting: Setting, began: datetime, traffic: _Traffic, spent: float) -> Point:
    """Return the point of what has landed since ``began``. ``spent``: processor seconds since then."""
    workspace, source = platform.workspace, platform.settings.source
    facts = source_facts(workspace, source, most=_MOST_BATCHES)
    since = [] if facts is None else [each for each in facts.batches if each.landed_at >= began]
    streamed = [each for each in since if each.kind == "stream"]
    last = max((each.landed_at for each in streamed if each.events), default=None)
    if facts is None or last is None:
        own = platform.load.rate is None
        raise MeasuringFailed(
            f"Nothing was committed to a table of {source} for {traffic.seconds:.0f} s."
            if own
            else f"Nothing landed of {traffic.changes:,} changes at {setting.seconds:g} s.",
            fix=f"Measure {'while your programs write, or' if own else 'with a higher --rate or'} for "
            "longer: --seconds.",
        )
    # What capture landed while nothing committed any more is no cost of the traffic.
    taken = tuple(each for each in streamed if each.landed_at <= last)
    measured = replace(facts, batches=taken)
    store = workspace.landing(source)
    to_dimension = figures.to_dimension(measured) if platform.load.to_dimension else []
    events = sum(each.events for each in taken)
    rate = (traffic.changes or events) / traffic.seconds
    return Point(
        setting=setting,
        rate_asked=rate if platform.load.rate is None else platform.load.rate,
        rate=rate,
        events=events,
        batches=len(taken),
        files=sum(1 + len(store.read(each.batch_id).files) for each in taken),
        seconds=(last - began).total_seconds(),
        cpu=spent / traffic.seconds,
        landing=_percentiles(figures.to_landing(measured)),
        dimension=_percentiles(to_dimension) if to_dimension else None,
    )


def _percentiles(latencies: Sequence[figures.Latency]) -> Percentiles:
    values = [figures.percentile(latencies, rank) for rank in figures.PERCENTILES]
    return Percentiles(*(each or 0.0 for each in values))


def _traffic(platform: Measured) -> _Traffic:
    """Run the load, or wait while others commit changes."""
    load, began = platform.load, time.monotonic()
    if load.rate is None:
        while (waited := time.monotonic() - began) < load.seconds:
            platform.supervisor.check()
            time.sleep(min(0.2, load.seconds - waited))
        return _Traffic(0, time.monotonic() - began)
    workload = Workload(embedded_domain(platform.settings), platform.dsn, load.seed)

    def watch(_done: int) -> None:
        platform.supervisor.check()

    made = workload.run(round(load.rate * load.seconds), load.seconds, on_progress=watch)
    return _Traffic(made.changes, time.monotonic() - began)


def _captures(platform: Measured) -> bool:
    """Whether capture follows the slot, and every table has been read. Raises ``CapturePaused``."""
    refuse_paused(platform.settings, platform.home)
    with closing(connect(platform.dsn)) as connection:
        slot = slot_facts(connection, platform.settings.slot)
    if slot is None or slot.active_pid is None:
        return False
    if platform.load.rate is None:
        # If tables are being read, their rows land in batches of their own, which count in no point.
        return True
    workspace, source = platform.workspace, platform.settings.source
    store = workspace.landing(source)
    epoch = store.current_epoch()
    if epoch is None:
        return False
    batches = store.landed().around_snapshots(epoch.number)
    return not any(
        incomplete_now(batches, each.name, epoch.number, ()) for each in workspace.contracts.of_source(source)
    )


def _wait_for_all(platform: Measured) -> None:
    """Wait until what has committed by now has landed and, where that is measured, is in every layer."""
    workspace, until = platform.workspace, current_wal_lsn(platform.dsn)

    def all_there() -> bool:
        refuse_paused(platform.settings, platform.home)
        pending = pending_windows(workspace, platform.settings.source)
        landed = pending.stream_end is not None and pending.stream_end >= until
        return landed and (pending.nothing or not platform.load.to_dimension)

    layers = "Every layer" if platform.load.to_dimension else "Landing"
    platform.supervisor.wait(all_there, service=layers, seconds=_DONE_SECONDS)


def _processor_seconds(platform: Measured) -> float:
    """Return the user and system time of the platform's processes so far, in seconds, without
    PostgreSQL's."""
    spent = 0.0
    for name, pid in running_services(platform.home.run).items():
        if name == services.POSTGRES:
            continue
        try:
            root = psutil.Process(pid)
            below = root.children(recursive=True)
        except psutil.Error:
            continue
        for each in (root, *below):
            try:
                times = each.cpu_times()
            except psutil.Error:
                continue
            # Of those that ended: the children that it waited for.
            spent += times.user + times.system + times.children_user + times.children_system
    return spent
