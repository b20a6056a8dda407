"""One pass over a home without daemon and webserver: source, capture and runs, each only if it is needed.

``sync``, ``capture --once``, ``materialize``, ``rebuild`` and ``replay`` use it. Spark starts with the first
run, so a pass that finds nothing new takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.home import Home
from omnisupport_ingest.runtime.home_lock import DAEMON_HOLDS, HomeInUse, HomeLock, holder
from omnisupport_ingest.runtime.supervisor import Supervisor
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.verify import services
from omnisupport_ingest.verify.runs import FinishedRun, IngestRuns, RunRequest
from omnisupport_ingest.windows import KEY_FORMAT, WindowRange
from omnisupport_ingest.wording import agreeing, counted

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from omnisupport_ingest.landing.manifest import Manifest
    from omnisupport_ingest.layers.scheduling.pending import Pending
    from omnisupport_ingest.layers.workspace import Workspace
    from omnisupport_ingest.position import Lsn
    from omnisupport_ingest.verify.proof import Proof

NONE, IN_SAMPLE, FULL = "none", "sample", "full"
"""How a pass compares source and lake at its end: not at all, in a sample, or in full."""


class NothingMoves(IngestError):
    """Windows wait that no run can take in now; to ask for them again would never end.

    Fix: If they lie in the future, set the clocks of the source and of this machine right, and run the same
    again. If not, report it with the output of ``omnisupport-ingest checkpoint show``.
    """


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a pass reports. ``say`` takes a line of text; ``landed`` a batch that capture has landed."""

    say: Callable[[str], None]
    landed: Callable[[Manifest], None]


@dataclass
class OnePass:
    """The pass of one command."""

    settings: Settings
    home: Home
    supervisor: Supervisor
    progress: Progress
    left_out: IngestError | None = field(default=None, init=False)
    """The error of the tables that the last capture left out; None if it left out none."""
    _spark_launched: bool = field(default=False, init=False)
    _spark_started: bool = field(default=False, init=False)
    _session: SparkSession | None = field(default=None, init=False)
    _runs: IngestRuns = field(init=False)

    def __post_init__(self) -> None:
        self._runs = IngestRuns(self.settings, self.home)

    def say(self, line: str) -> None:
        self.progress.say(line)

    def start_source(self, source: Settings) -> None:
        """Start the embedded server if ``source`` is in it and it does not run; then connect to ``source``.

        Raises ``BadDsn``, and ``SourceUnavailable`` if a configured source does not answer, or if the source
        was captured from one that the settings do not name now.
        """
        from omnisupport_ingest.sources.postgres.embedded.dsn import embedded_server, source_dsn
        from omnisupport_ingest.sources.postgres.session.connection import connect

        if source.source_dsn is None and not embedded_server(source, self.home).running:
            services.start_source(self.supervisor, self.settings, self.home, self.say)
        connect(source_dsn(source, self.home)).close()

    def capture(
        self, source: Settings, workspace: Workspace, until: Lsn, *, then_run: bool = False
    ) -> list[Manifest]:
        """Land everything of the log of ``source`` that committed below ``until``, snapshots first; return
        the batches.

        ``then_run``: a run follows, so Spark starts beside capture once a batch has landed. A table that
        cannot be followed is left out; ``left_out`` names it.
        """
        from omnisupport_ingest.sources.postgres.capture.capture import capture_once

        batches: list[Manifest] = []

        def landed(batch: Manifest) -> None:
            batches.append(batch)
            self.progress.landed(batch)
            if then_run and not self._spark_launched:
                self._launch_spark()

        self.left_out = capture_once(source, self.home, workspace.contracts, until, landed)
        return batches

    def materialize(self, workspace: Workspace) -> list[FinishedRun]:
        """Take everything that has landed, of every source, through every layer, and do not delay any merge.

        Raises ``RunFailed`` at the first run that fails, ``NothingMoves``, and ``IngestError`` for a gap.
        """
        self.prepare()
        # No later run would make a delayed merge. And the workspace may be outdated: capture may have let
        # contracts learn columns since it was opened.
        workspace = workspace.current().merging_at_once()
        done: list[FinishedRun] = []
        for source in workspace.contracts.sources():
            done += self._materialize(workspace, source)
        return done

    def prepare(self) -> None:
        """Write the files of Dagster that runs of the home need."""
        from omnisupport_ingest.runtime.dagster_home import remove_old_run_logs, write_dagster_home

        write_dagster_home(self.settings, self.home)
        remove_old_run_logs(self.home)

    def spark(self) -> SparkSession:
        """Return a session on the Spark of this pass."""
        from omnisupport_ingest.runtime.spark import session

        self._start_spark()
        if self._session is None:
            self._session = session(self.settings)
        return self._session

    def close_spark(self) -> None:
        """Close the session before its server ends; afterwards closing would be retried for minutes."""
        if self._session is not None:
            self._session.stop()
            self._session = None

    def replay(
        self, source: str, windows: WindowRange, tags: Mapping[str, str], table: str | None = None
    ) -> FinishedRun:
        """Replay ``windows`` through every layer; ``tags`` say why. Raises ``RunFailed``.

        ``table``: replay only the table of the contract with this name; None for all.
        """
        from omnisupport_ingest.defs.keys import REASON_TAG

        only = None if table is None else (table,)
        request = RunRequest(source, windows, replay=tags, tables=only)
        self._start_spark()
        self.say(f"Replaying {request.span} of {source}: {tags[REASON_TAG]} …")
        return self._runs.run(request)

    def _materialize(self, workspace: Workspace, source: str) -> list[FinishedRun]:
        from omnisupport_ingest.layers.scheduling.pending import pending_windows

        done: list[FinishedRun] = []
        before: Pending | None = None
        while not (pending := pending_windows(workspace, source)).nothing:
            ranges = _ranges(workspace, pending.windows)
            late = _ranges(workspace, pending.late_windows)
            if pending == before or not (ranges or late):
                raise _stuck(source, pending)
            before = pending
            for windows in ranges:
                done.append(self._run(source, windows, pending))
            for windows in late:
                done.append(self.replay(source, windows, late_tags(source, pending, windows)))
        if pending.gap is not None and not pending.gap.is_repaired:
            left = "Everything before it is in the lake."
            if pending.batches:
                batches, wait = counted(pending.batches, "batch"), agreeing(pending.batches, "waits", "wait")
                left = f"Nothing is taken in until it is repaired: {batches} {wait}."
            raise IngestError(f"{pending.gap} {left}", fix=pending.gap.fix)
        return done

    def _run(self, source: str, windows: WindowRange, pending: Pending) -> FinishedRun:
        request = RunRequest(source, windows, cursor=pending.last_batch_id, tables=pending.tables)
        self._start_spark()
        waiting = f"{pending.batches:,} batch{'es' * (pending.batches != 1)} waiting"
        self.say(f"Running ingest_{source} for {request.span}, {waiting} …")
        return self._runs.run(request, batches=pending.batches)

    def _launch_spark(self) -> None:
        self._spark_launched = True
        # The run reports what is missing, once everything has landed.
        with suppress(IngestError):
            services.launch_spark(self.supervisor, self.settings, self.home)

    def _start_spark(self) -> None:
        if not self._spark_started:
            services.start_spark(self.supervisor, self.settings, self.home, self.say)
            self._spark_launched = self._spark_started = True


@contextmanager
def one_pass(settings: Settings, home: Home, command: str, progress: Progress) -> Iterator[OnePass]:
    """Yield a pass that has ``home`` to itself. At the end, everything that it started is stopped.

    Raises ``HomeInUse`` if the platform or another pass runs on the home.
    """
    from omnisupport_ingest.runtime.spark_connect import stop_spark_connect

    with _locked(home, command), Supervisor(home, report=progress.say) as supervisor:
        the_pass = OnePass(settings, home, supervisor, progress)
        try:
            yield the_pass
        finally:
            the_pass.close_spark()
            stop_spark_connect(supervisor, home)


@dataclass(frozen=True)
class Synced:
    """The result of ``sync_log``: the lake has the log up to ``lsn``. ``proof``: None without a
    comparison."""

    source: str
    lsn: Lsn
    landed: list[Manifest]
    runs: list[FinishedRun]
    proof: Proof | None

    @property
    def holds(self) -> bool:
        return self.proof is None or self.proof.holds


def sync_log(the_pass: OnePass, workspace: Workspace, comparison: str) -> Synced:
    """Take the log that the settings of ``workspace`` name into the lake, up to what has committed by now.

    ``comparison``: ``NONE``, ``IN_SAMPLE`` or ``FULL``. Raises the errors of capture, runs and comparison.
    """
    from omnisupport_ingest.sources.postgres.embedded.dsn import source_dsn
    from omnisupport_ingest.sources.postgres.preflight.source_check import contracted_tables
    from omnisupport_ingest.sources.postgres.session.server import current_wal_lsn
    from omnisupport_ingest.verify.proof import SAMPLE, prove

    settings = workspace.settings
    # A source without contracts is refused before anything starts.
    contracted_tables(workspace.contracts, settings.source)
    the_pass.start_source(settings)
    until = current_wal_lsn(source_dsn(settings, the_pass.home))
    the_pass.say(f"Capturing {settings.source} up to {until} …")
    landed = the_pass.capture(settings, workspace, until, then_run=True)
    # Before the comparison: to be exact, that waits for every open transaction of the server.
    runs = the_pass.materialize(workspace)
    proof = None
    if comparison != NONE:
        sample = SAMPLE if comparison == IN_SAMPLE else None
        the_pass.say(f"Reading rows of the source to compare with: {'all' if sample is None else 'a sample'}")

        def advance(lsn: Lsn) -> None:
            landed.extend(the_pass.capture(settings, workspace, lsn, then_run=True))
            runs.extend(the_pass.materialize(workspace))

        proof = prove(workspace, the_pass.spark, advance=advance, sample=sample)
    return Synced(settings.source, until, landed, runs, proof)


_UNDER_UP = (
    "There is nothing to do: capture and sensor of the platform take everything in, and `omnisupport-ingest "
    "verify` proves it."
)
_BESIDE_ANOTHER = "Run this command again when that has ended."


@contextmanager
def _locked(home: Home, command: str) -> Iterator[None]:
    lock = HomeLock(home, command)
    try:
        lock.__enter__()
    except HomeInUse as error:
        other = holder(home)
        platform = other is None or other.command in ("up", DAEMON_HOLDS)
        raise HomeInUse(error.problem, fix=_UNDER_UP if platform else _BESIDE_ANOTHER) from None
    try:
        yield
    finally:
        lock.__exit__(None, None, None)


def late_tags(source: str, pending: Pending, windows: WindowRange) -> dict[str, str]:
    """Return the tags of a run that replays those of ``windows`` in which late events landed."""
    from omnisupport_ingest.defs import keys
    from omnisupport_ingest.layers.scheduling.late_replay import LateReplay

    arrivals = tuple(each for each in pending.late if windows.first <= each.window <= windows.last)
    replay = LateReplay(source, arrivals)
    return {
        keys.REASON_TAG: replay.reason,
        keys.LATE_TAG: str(replay.events),
        keys.LATE_BATCHES_TAG: replay.named_batches,
    }


def _ranges(workspace: Workspace, windows: Iterable[str]) -> tuple[WindowRange, ...]:
    from omnisupport_ingest.layers.scheduling.run_requests import plan_runs

    # The pass has the home to itself: no run is in progress, and the newest partition is the open window.
    newest = workspace.grid.truncate(datetime.now(UTC)).strftime(KEY_FORMAT)
    return plan_runs(workspace.grid, windows, in_progress=(), newest=newest).ranges


def _stuck(source: str, pending: Pending) -> NothingMoves:
    windows = (*pending.windows, *pending.late_windows)
    named = ", ".join(windows[:3]) + (" …" if len(windows) > 3 else "")
    return NothingMoves(
        f"{len(windows):,} window{'s' * (len(windows) != 1)} of {source} cannot be taken in now: {named}.",
        fix="If they lie in the future, the clock of the source is ahead of this machine's: set both right, "
        "and run the same command again. If they do not, report it with the output of "
        "`omnisupport-ingest checkpoint show`.",
    )
