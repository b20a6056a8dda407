"""What ``doctor`` finds in a home: disk, permissions, sources and slots, chain, lake, Dagster.

An area that cannot be examined is a finding itself, and does not hide others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from deltalake.exceptions import DeltaError

from omnisupport_ingest.cli import render
from omnisupport_ingest.cli.doctor_machine import Diagnosis, Level, disk, permissions
from omnisupport_ingest.cli.opening import source_dsn_or_error, sources_in_use
from omnisupport_ingest.contracts.pii_policies import HASH
from omnisupport_ingest.contracts.protection import has_policy
from omnisupport_ingest.contracts.sources import SourceKind, log_settings, log_sources, sources_in_force
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.read.loss_account import Verdict, loss_account
from omnisupport_ingest.runtime.home_lock import holder, takes_in
from omnisupport_ingest.runtime.recorded_runs import recorded
from omnisupport_ingest.sources.postgres.capture.status import source_status
from omnisupport_ingest.sources.postgres.embedded.dsn import embedded_server
from omnisupport_ingest.sources.postgres.session.connection import connect, one_row
from omnisupport_ingest.sources.postgres.slot.retention import Level as Danger
from omnisupport_ingest.storage import path_at_hand, put_back, storage_of

if TYPE_CHECKING:
    from omnisupport_ingest.layers.workspace import Workspace
    from omnisupport_ingest.settings import Settings

_SKEW_SECONDS = 1.0
_DAEMON_SILENT = timedelta(minutes=2)
_RESTORE = "Restore lake/ from a backup."
_REPLAY = " Or make the windows again: omnisupport-ingest replay --help"


def home(settings: Settings, workspace: Workspace) -> Iterator[Diagnosis]:
    """Yield the findings about the home and its sources."""
    yield from permissions(workspace.home.path)
    yield from _area("disk", lambda: [disk(workspace)])
    yield from _area("storage", lambda: _bucket(workspace))
    yield from _area("contracts", lambda: _contracts(workspace))
    yield from _area("source", lambda: _sources(settings, workspace))
    for source in sources_in_use(workspace):
        yield from _area("chain", lambda source=source: _chain(workspace, source))  # type: ignore[misc]
        yield from _area("lake", lambda source=source: _lake(workspace, source))  # type: ignore[misc]
    yield from _area("dagster", lambda: _dagster(workspace))


def _area(name: str, look: Callable[[], Iterable[Diagnosis]]) -> Iterator[Diagnosis]:
    try:
        yield from look()
    except IngestError as error:
        yield Diagnosis(name, Level.PROBLEM, error.problem, error.fix)
    except OSError as error:
        yield Diagnosis(
            name,
            Level.PROBLEM,
            f"{error.filename or name} cannot be read: {error.strerror}.",
            "Give this user the right.",
        )
    except Exception as error:
        # Damage must not hide other findings. The error's message is left out: it may quote a row.
        yield Diagnosis(
            name,
            Level.PROBLEM,
            f"It cannot be looked at ({type(error).__name__}).",
            "Mend first what is said of `lake` and `chain`; if nothing is, report this with an --archive.",
        )


def _bucket(workspace: Workspace) -> Iterator[Diagnosis]:
    """Check that an object store keeps to the conditions of puts, if the home has one."""
    storage = storage_of(workspace.home.lake / "any")
    if not storage.is_local:
        storage.require_conditions()
        yield Diagnosis("storage", Level.OK, "The object store refuses a put whose condition does not hold.")


def _contracts(workspace: Workspace) -> Iterator[Diagnosis]:
    contracts = workspace.contracts.all
    workspace.secrets(contracts)
    least = min((each.allowed_lateness for each in contracts), default=None)
    skew = workspace.settings.max_clock_skew_seconds
    if least is not None and timedelta(seconds=skew) > least:
        yield Diagnosis(
            "settings",
            Level.WARNING,
            f"OMNISUPPORT_MAX_CLOCK_SKEW_SECONDS ({skew:g}) is more than the least lateness that a contract "
            f"allows ({render.span(least.total_seconds())}).",
            "Set it below x-cdc.lateness.allowed of every contract.",
        )
    sources = len(workspace.contracts.sources())
    counts = f"{render.counted(len(contracts), 'table')} of {render.counted(sources, 'source')}"
    keys = "the keys that policies need are there" if has_policy(contracts, HASH) else "no policy needs a key"
    yield Diagnosis("contracts", Level.OK, f"{counts}; {keys}")


# --- the source, its slot and its clock --------------------------------------------------------------------


def _sources(settings: Settings, workspace: Workspace) -> Iterator[Diagnosis]:
    sources = sources_in_force(settings, workspace.contracts)
    for each in sources.all:
        if each.path and not each.tables(workspace.contracts):
            problem = f"No contract names the source {each.name}, so nothing of it is taken in."
            yield Diagnosis("source", Level.WARNING, problem, each.first_contracts)
    own = sources.find(settings.source)
    logs = {each.name: each for each in (own, *log_sources(settings, workspace.contracts))}
    for name, each in logs.items():
        if each.kind is SourceKind.LOG:
            yield from _log(log_settings(settings, each), workspace, name)


def _log(settings: Settings, workspace: Workspace, name: str) -> Iterator[Diagnosis]:
    dsn = source_dsn_or_error(settings, workspace.home)
    if isinstance(dsn, IngestError) and settings.source_dsn is None:
        embedded_server(settings, workspace.home)  # raises if the source was captured from another server
        yield Diagnosis(
            "source",
            Level.NOTE,
            f"{name}: the embedded PostgreSQL is not running.",
            "Start it with the platform (omnisupport-ingest up) if the source should be captured now.",
        )
        return
    tables = workspace.contracts.of_source(name)
    status = source_status(dsn, settings, workspace.home, tables)
    levels = {Danger.WELL: Level.NOTE, Danger.ALARM: Level.PROBLEM}
    for each in status.warnings:
        yield Diagnosis("source", levels.get(each.level, Level.WARNING), f"{name}: {each.problem}", each.fix)
    if status.server is not None:
        if not status.warnings:
            slot = "its slot is there" if status.server.slot is not None else "no slot yet"
            yield Diagnosis("source", Level.OK, f"{name}: PostgreSQL {status.server.version}, {slot}")
        if not isinstance(dsn, IngestError):
            yield from clocks(name, _server_clock(dsn), datetime.now(UTC))


def _server_clock(dsn: str) -> datetime:
    connection = connect(dsn, application_name="omnisupport-ingest doctor")
    try:
        (moment,) = one_row(connection, "SELECT clock_timestamp()")
    finally:
        connection.close()
    assert isinstance(moment, datetime)
    return moment


def clocks(name: str, server: datetime, local: datetime) -> Iterator[Diagnosis]:
    """Check that the clocks of the server and of this machine agree, allowing for the time of the answer."""
    apart = (server - local).total_seconds()
    if abs(apart) > _SKEW_SECONDS:
        direction = "ahead of" if apart > 0 else "behind"
        yield Diagnosis(
            "clocks",
            Level.WARNING,
            f"{name}: the server's clock is {abs(apart):.1f} s {direction} this machine's.",
            "Set both by NTP, or raise OMNISUPPORT_MAX_CLOCK_SKEW_SECONDS above that.",
        )
    else:
        yield Diagnosis("clocks", Level.OK, f"{name}: {abs(apart):.2f} s apart")


# --- chain and lake ----------------------------------------------------------------------------------------


def _chain(workspace: Workspace, source: str) -> Iterator[Diagnosis]:
    account = loss_account(workspace, source, withheld={})
    level = Level.PROBLEM if account.verdict is Verdict.MISSING else Level.OK
    fixes = [each.fix for each in account.open_gaps] + [each.fix for each in account.incomplete]
    fix = fixes[0] if fixes else f"omnisupport-ingest ledger --source {source}"
    yield Diagnosis("chain", level, account.sentence, fix if level is Level.PROBLEM else "")


def _lake(workspace: Workspace, source: str) -> Iterator[Diagnosis]:
    """Check that every table opens, every state can be read, and every file exists with its size."""
    tables = files = 0
    for table in workspace.tables():
        if not table.spec.path.startswith(f"{source}/"):
            continue
        name, restore = table.spec.path, put_back(table.folder, _RESTORE) + _REPLAY
        try:
            snapshot = table.look()
        except DeltaError as error:
            yield Diagnosis(
                "lake", Level.PROBLEM, f"The log of {name} cannot be read ({type(error).__name__}).", restore
            )
            continue
        if snapshot is None:
            continue
        tables += 1
        sizes = {each.path: _size(Path(each.stored)) for each in snapshot.all_files()}
        sizes |= {
            each.vector.path: _size(Path(path_at_hand(str(table.folder / each.vector.path))))
            for each in snapshot.all_files()
            if each.vector is not None and each.vector.path is not None
        }
        gone = [path for path, size in sizes.items() if size is None]
        cut = [each for each in snapshot.all_files() if sizes[each.path] not in (None, each.bytes)]
        files += len(sizes)
        unread = [window for window in snapshot.windows() if snapshot.state(window) is None]
        if gone:
            yield Diagnosis(
                "lake",
                Level.PROBLEM,
                f"{render.counted(len(gone), 'file')} of {name} that its log names are not there.",
                restore,
            )
        if cut:
            has = "has" if len(cut) == 1 else "have"
            yield Diagnosis(
                "lake",
                Level.PROBLEM,
                f"{render.counted(len(cut), 'file')} of {name} {has} another size than its log says.",
                restore,
            )
        if unread:
            yield Diagnosis(
                "lake",
                Level.WARNING,
                f"{name}: the state of {render.counted(len(unread), 'window')} cannot be read.",
                "The next run makes them again: omnisupport-ingest materialize",
            )
    yield Diagnosis(
        "lake",
        Level.OK,
        f"{source}: {render.counted(tables, 'table')}, {render.counted(files, 'file')} as their logs say",
    )


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


# --- Dagster -----------------------------------------------------------------------------------------------


def _dagster(workspace: Workspace) -> Iterator[Diagnosis]:
    home = workspace.home
    running = (home.run / "supervisor.lock").exists() and takes_in(holder(home))
    storage = workspace.settings.dagster_pg_url
    known = recorded(home.path / "dagster", storage)
    if known is None and storage is not None:
        yield Diagnosis(
            "dagster",
            Level.PROBLEM,
            "The PostgreSQL of Dagster's records does not answer.",
            "Start it, or correct OMNISUPPORT_DAGSTER_PG_URL.",
        )
        return
    if known is None:
        yield Diagnosis("dagster", Level.OK, "no run was recorded yet")
        return
    known = known.in_force({(each.source, each.name) for each in workspace.contracts.all})
    if running and known.daemon_at is not None and datetime.now(UTC) - known.daemon_at > _DAEMON_SILENT:
        yield Diagnosis(
            "daemon",
            Level.PROBLEM,
            f"The daemon was last alive {render.ago(known.daemon_at)}, and the platform runs.",
            "omnisupport-ingest logs --errors shows why; then stop `up` and start it again.",
        )
    elif running:
        yield Diagnosis("daemon", Level.OK, "alive" if known.daemon_at else "has just started")
    else:
        yield Diagnosis(
            "daemon", Level.NOTE, "The platform is not running.", "omnisupport-ingest up starts it."
        )
    failed = Counter(each.job for each in known.runs if each.failed)
    for job, count in failed.items():
        yield Diagnosis(
            "dagster",
            Level.WARNING,
            f"{count} of the last {len(known.runs)} runs were failures of {job}.",
            "omnisupport-ingest logs --errors shows why; what landed is taken again by the next run.",
        )
    for check in known.failed_checks:
        yield Diagnosis(
            "checks",
            Level.WARNING,
            f"{check.asset}:{check.check} failed {render.ago(check.at)}: {check.said or 'no message'}",
            "omnisupport-ingest status --all; docs/operate.md names the command for each symptom.",
        )
    if not failed and not known.failed_checks:
        yield Diagnosis(
            "dagster",
            Level.OK,
            f"{len(known.runs)} recent runs without a failure, {len(known.checks)} checks passed",
        )
