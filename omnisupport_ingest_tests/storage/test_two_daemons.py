"""All services on two machines: homes of their own, one bucket, Dagster's records in one PostgreSQL."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from pydantic import SecretStr

from omnisupport_ingest.cli.serve import CODE_SERVER, DAEMON, RUNS, WEBSERVER
from omnisupport_ingest.runtime.ports import free_port
from omnisupport_ingest_tests.cli.test_serve import _LAUNCH, _STATUS, ask
from omnisupport_ingest_tests.storage.s3_server import S3Server
from omnisupport_ingest_tests.waiting import PATIENCE, until

_WHERE = {"repositoryLocationName": "omnisupport_ingest", "repositoryName": "__repository__"}


class Machine:
    """A home with services of its own, each started as a service manager does."""

    def __init__(self, folder: Path, given: dict[str, str]) -> None:
        folder.mkdir()
        self.folder, self.home = folder, folder / "home"
        self._given = {**os.environ, **given, "OMNISUPPORT_HOME": str(self.home)}
        self.services: dict[str, subprocess.Popen[bytes]] = {}

    def begin(self, *names: str) -> None:
        for name in names:
            with self.log(name).open("ab") as log:
                self.services[name] = subprocess.Popen(
                    self._command(name), cwd=self.folder, env=self._given, stdout=log, stderr=log
                )

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def answers(self, *names: str) -> bool:
        for name in names:
            assert self.services[name].poll() is None, self.log(name).read_text()[-3000:]
        checks = (self._command(name, "--check") for name in names)
        return all(
            subprocess.run(check, cwd=self.folder, env=self._given).returncode == 0 for check in checks
        )

    def lose(self) -> None:
        """End all of its processes, as when the machine is gone."""
        for process in self.services.values():
            children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
            for each in (process, *children):
                with suppress(psutil.NoSuchProcess):
                    each.kill()
            process.wait(PATIENCE)
        self.services = {}

    def _command(self, name: str, *options: str) -> Sequence[str]:
        return [sys.executable, "-m", "omnisupport_ingest.cli.main", "serve", name, *options]


@contextmanager
def machine(folder: Path, given: dict[str, str]) -> Iterator[Machine]:
    made = Machine(folder, given)
    try:
        yield made
    finally:
        made.lose()


@pytest.mark.slow
def test_a_daemon_of_another_machine_stands_by_and_takes_over_with_the_same_records(
    s3: S3Server, records: SecretStr, tmp_path: Path
) -> None:
    port = free_port()
    given = {
        "OMNISUPPORT_STORAGE": s3.place(),
        "OMNISUPPORT_DAGSTER_PG_URL": records.get_secret_value(),
        "OMNISUPPORT_WEBSERVER_PORT": str(port),
    }
    with ExitStack() as stack:
        first, second = (stack.enter_context(machine(tmp_path / name, given)) for name in ("first", "second"))
        first.begin(CODE_SERVER, RUNS, DAEMON)
        until(lambda: first.answers(CODE_SERVER, RUNS, DAEMON), every=1)
        second.begin(CODE_SERVER, RUNS, DAEMON, WEBSERVER)
        until(lambda: "this one stands by" in second.log(DAEMON).read_text(), every=0.5)
        until(lambda: second.answers(CODE_SERVER, RUNS, DAEMON, WEBSERVER), every=1)

        # Asked for at the UI of the second machine, a run is launched by the daemon of the first.
        assert where_it_ran(port, first, second) == [first]

        first.lose()
        until(lambda: "this daemon goes on" in second.log(DAEMON).read_text(), every=0.5)
        assert where_it_ran(port, first, second) == [second]


def where_it_ran(port: int, *machines: Machine) -> list[Machine]:
    """Ask the UI at ``port`` for a run, which the queue launches; the machines that have its output."""
    what = {"selector": {**_WHERE, "jobName": "retention"}, "runConfigData": {}}
    launched = ask(port, _LAUNCH, what=what)["launchRun"]
    assert launched["__typename"] == "LaunchRunSuccess", launched
    run_id = launched["run"]["runId"]

    def ended() -> str | None:
        status = str(ask(port, _STATUS, id=run_id)["runOrError"]["status"])
        return status if status in ("SUCCESS", "FAILURE") else None

    assert until(ended, every=0.5) == "SUCCESS"
    return [each for each in machines if [*(each.home / "logs" / "runs").rglob(f"{run_id}*")]]
