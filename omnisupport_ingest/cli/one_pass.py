"""One pass over a home without daemon and webserver: source, capture, runs, each on demand.

What ``sync``, ``capture --once`` and ``materialize`` are made of. Spark is started when the first run
needs it, so a pass that finds nothing new is over in seconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from omnisupport_ingest.cli import services
from omnisupport_ingest.cli.counted import counted
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.home import Home
from omnisupport_ingest.runtime.home_lock import HomeInUse, HomeLock
from omnisupport_ingest.runtime.supervisor import Supervisor
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.windows import KEY_FORMAT, WindowRange

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from omnisupport_ingest.landing.manifest import Manifest
    from omnisupport_ingest.position import Lsn
    from omnisupport_ingest.stages.pending import Pending
    from omnisupport_ingest.stages.workspace import Workspace

_END_SECONDS = 30.0
"""How long a run that is told to end may take."""


class RunFailed(IngestError):
    """A run of the ingest job failed; what it had committed stays, and the rest is pending."""


class NothingMoves(IngestError):
    """What is pending cannot be taken in by a run, so asking again would go on for ever."""


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """A run of the pass: its id in Dagster, the source, and the windows it took, both ends included."""

    run_id: str
    source: str
    first: str
    last: str
    batches: int
    """Batches that waited when the run was started."""


@dataclass
class OnePass:
    """The pass of one command. ``say`` is told the progress, a line at a time."""

    settings: Settings
    home: Home
    supervisor: Supervisor
    say: Callable[[str], None]
    left_out: IngestError | None = field(default=None, init=False)
    """What was wrong with the tables that the last capture left out."""
    _spark_started: bool = field(default=False, init=False)
    _session: SparkSession | None = field(default=None, init=False)
    _log_begun: bool = field(default=False, init=False)

    def start_source(self, source: Settings) -> None:
        """See that the log of ``source`` is there: the embedded server is started if it does not run.

        ``BadDsn`` or ``SourceUnavailable`` if the configured one does not answer.
        """
        from omnisupport_ingest.sources.postgres.connection import connect
        from omnisupport_ingest.sources.postgres.source_dsn import source_dsn

        if source.source_dsn is None and not _embedded_runs(self.home):
            services.start_source(self.supervisor, self.settings, self.home, say=self.say)
        connect(source_dsn(source, self.home)).close()

    def capture(self, source: Settings, workspace: Workspace, until: Lsn) -> list[Manifest]:
        """Land all of the log of ``source`` that committed below ``until``, snapshots first; returns it.

        A table that cannot be followed is left out (``left_out``), and the others are taken in.
        """
        from omnisupport_ingest.cli.landed_line import landed_line
        from omnisupport_ingest.sources.postgres.capture import capture_once

        batches: list[Manifest] = []

        def landed(batch: Manifest) -> None:
            batches.append(batch)
            if line := landed_line(batch):
                self.say(line)

        contracts = workspace.contracts
        self.left_out = capture_once(source, self.home, contracts, until, landed)
        return batches

    def materialize(self, workspace: Workspace) -> list[FinishedRun]:
        """Take everything that has landed, of every source, through every layer; no merge waits.

        Raises ``RunFailed`` at the first run that fails, ``NothingMoves``.
        """
        self.prepare()
        # Nobody comes after this pass who would merge what waits.
        workspace = workspace.merging_at_once()
        done: list[FinishedRun] = []
        for source in workspace.contracts.sources():
            done += self._materialize(workspace, source)
        return done

    def prepare(self) -> None:
        """Write Dagster's files of the home, which runs need."""
        from omnisupport_ingest.runtime.dagster_home import remove_old_run_logs, write_dagster_home

        write_dagster_home(self.settings, self.home)
        remove_old_run_logs(self.home)

    def spark(self) -> SparkSession:
        """A session on the Spark of this pass."""
        from omnisupport_ingest.runtime.spark import session

        self._start_spark()
        if self._session is None:
            self._session = session(self.settings)
        return self._session

    def close_spark(self) -> None:
        """Let go of the session: once its server is gone, giving it back would be tried for minutes."""
        if self._session is not None:
            self._session.stop()
            self._session = None

    def _materialize(self, workspace: Workspace, source: str) -> list[FinishedRun]:
        from omnisupport_ingest.stages.pending import pending_windows

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
        if pending.hole is not None and pending.hole.later_epoch is None:
            raise IngestError(f"{pending.hole} Everything before it is in the lake.", fix=pending.hole.fix)
        return done

    def _run(self, source: str, windows: WindowRange, pending: Pending) -> FinishedRun:
        self._start_spark()
        which = windows.first if windows.first == windows.last else f"{windows.first} to {windows.last}"
        self.say(f"Running ingest_{source} for {which}, {counted(pending.batches, 'batch')} waiting …")
        answer = self._answer_of_run(source, windows, pending.last_batch_id)
        if not answer["succeeded"]:
            raise _failed(answer, which, self._log)
        return FinishedRun(answer["run_id"], source, windows.first, windows.last, pending.batches)

    def replay(
        self, source: str, windows: WindowRange, tags: Mapping[str, str], table: str | None = None
    ) -> FinishedRun:
        """Make ``windows`` again through every layer; ``tags`` say why. ``RunFailed`` as in a run.

        ``table``: the only one that is made again, by the name of its contract; null: all.
        """
        from omnisupport_ingest.defs.keys import REASON_TAG

        self._start_spark()
        which = windows.first if windows.first == windows.last else f"{windows.first} to {windows.last}"
        self.say(f"Replaying {which} of {source}: {tags[REASON_TAG]} …")
        answer = self._answer_of_run(source, windows, None, replay=tags, table=table)
        if not answer["succeeded"]:
            raise _failed(answer, which, self._log)
        return FinishedRun(answer["run_id"], source, windows.first, windows.last, 0)

    def _answer_of_run(
        self,
        source: str,
        windows: WindowRange,
        cursor: str | None,
        *,
        replay: Mapping[str, str] | None = None,
        table: str | None = None,
    ) -> dict[str, Any]:
        from omnisupport_ingest.runtime.dagster_home import dagster_environment

        command = [sys.executable, "-m", "omnisupport_ingest.cli.main", "ingest-run"]
        command += [source, windows.first, windows.last, *(["--cursor", cursor] if cursor else [])]
        command += ["--replay", json.dumps(dict(replay))] if replay is not None else []
        command += ["--table", table] if table is not None else []
        with open(self._log, "ab" if self._log_begun else "wb", opener=_owner_only) as log:
            self._log_begun = True
            child = subprocess.Popen(
                command,
                env={
                    **os.environ,
                    **dagster_environment(self.settings, self.home),
                    "PYTHONWARNINGS": "ignore",
                },
                # Open as long as this process lives: the run does not outlive it.
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                # Ctrl-C reaches this process alone, which then ends the run.
                start_new_session=True,
            )
            assert child.stdout is not None
            try:
                said = child.stdout.read()
                child.wait()
            except BaseException:
                _end(child)
                raise
        try:
            answer: dict[str, Any] = json.loads(said.splitlines()[-1])
        except (ValueError, IndexError):
            raise RunFailed(
                f"The run of ingest_{source} ended with exit code {child.returncode} and did not say why.",
                fix=f"Read {self._log}; then run the same command again, it goes on from what is committed.",
            ) from None
        return answer

    @property
    def _log(self) -> str:
        return str(self.home.logs / "ingest-run.log")

    def _start_spark(self) -> None:
        if not self._spark_started:
            services.start_spark(self.supervisor, self.settings, self.home, say=self.say)
            self._spark_started = True


@contextmanager
def one_pass(settings: Settings, home: Home, command: str, say: Callable[[str], None]) -> Iterator[OnePass]:
    """A pass that has ``home`` for itself; whatever it started is stopped at the end.

    ``HomeInUse`` if the platform, or another pass, runs on the home.
    """
    from omnisupport_ingest.runtime.spark_connect import stop_spark_connect

    with _locked(home, command), Supervisor(home, report=say) as supervisor:
        the_pass = OnePass(settings, home, supervisor, say)
        try:
            yield the_pass
        finally:
            the_pass.close_spark()
            stop_spark_connect(supervisor, home)


@contextmanager
def _locked(home: Home, command: str) -> Iterator[None]:
    lock = HomeLock(home, command)
    try:
        lock.__enter__()
    except HomeInUse as error:
        raise HomeInUse(
            error.problem,
            fix="If it is `up`, there is nothing to do: its capture and its sensor take everything in, and "
            "`omnisupport-ingest verify` proves it. If it is another pass, run this command when that has "
            "ended.",
        ) from None
    try:
        yield
    finally:
        lock.__exit__(None, None, None)


def _embedded_runs(home: Home) -> bool:
    from omnisupport_ingest.sources.postgres.embedded import EmbeddedPostgres

    return EmbeddedPostgres(home.postgres).running


def late_tags(source: str, pending: Pending, windows: WindowRange) -> dict[str, str]:
    """The tags of a run that replays those of ``windows`` that late events landed in."""
    from omnisupport_ingest.defs import keys
    from omnisupport_ingest.stages.late_replay import LateReplay

    arrivals = tuple(each for each in pending.late if windows.first <= each.window <= windows.last)
    replay = LateReplay(source, arrivals)
    return {
        keys.REASON_TAG: replay.reason,
        keys.LATE_TAG: str(replay.events),
        keys.LATE_BATCHES_TAG: replay.named_batches,
    }


def _ranges(workspace: Workspace, windows: Iterable[str]) -> tuple[WindowRange, ...]:
    from omnisupport_ingest.stages.run_requests import plan_runs

    # The home is ours alone: no run is in progress, and the newest partition is the open window.
    newest = workspace.grid.truncate(datetime.now(UTC)).strftime(KEY_FORMAT)
    return plan_runs(workspace.grid, windows, in_progress=(), newest=newest).ranges


def _stuck(source: str, pending: Pending) -> NothingMoves:
    windows = (*pending.windows, *pending.late_windows)
    named = ", ".join(windows[:3]) + (" …" if len(windows) > 3 else "")
    return NothingMoves(
        f"{counted(len(windows), 'window')} of {source} cannot be taken in now: {named}.",
        fix="If they lie in the future, the clock of the source is ahead of this machine's: set both right, "
        "and run the same command again. If they do not, report it with the output of "
        "`omnisupport-ingest checkpoint show`.",
    )


def _failed(answer: dict[str, Any], which: str, log: str) -> RunFailed:
    failures = answer["failures"]
    told = "; ".join(f"{each['step']}: {each['problem']}" for each in failures) or "no step says why."
    fixes = list(dict.fromkeys(each["fix"] for each in failures if each["fix"]))
    fixes.append(
        f"The run is {answer['run_id']} in the Dagster UI, its log {log}. The same command again goes on "
        "from what is committed."
    )
    return RunFailed(f"The run over {which} failed. {told}", fix="\n".join(fixes))


def _end(child: subprocess.Popen[bytes]) -> None:
    child.terminate()
    try:
        child.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _owner_only(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
