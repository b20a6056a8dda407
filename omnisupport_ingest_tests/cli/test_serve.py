"""Services started one by one, as a service manager does, with Dagster's records in PostgreSQL."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import psycopg2
import pytest
from pydantic import SecretStr

from omnisupport_ingest.cli.probes import LIVE, READY
from omnisupport_ingest.home import Home
from omnisupport_ingest.runtime.dagster_services import WEBSERVER
from omnisupport_ingest.runtime.home_lock import DAEMON_HOLDS, HomeLock, service_lock
from omnisupport_ingest.runtime.ports import LOOPBACK, free_port
from omnisupport_ingest.runtime.running import record_service, record_ui_port
from omnisupport_ingest.settings import Settings
from omnisupport_ingest_tests.cli.command import command, environment
from omnisupport_ingest_tests.cli.test_probes import asked
from omnisupport_ingest_tests.waiting import PATIENCE, until

SERVICES = ("code-server", "runs", "daemon", "webserver")
_LAUNCH = """
mutation ($what: ExecutionParams!) { launchRun(executionParams: $what) {
    __typename ... on LaunchRunSuccess { run { runId } } ... on PythonError { message } } }
"""
_STATUS = "query ($id: ID!) { runOrError(runId: $id) { ... on Run { status } } }"


def ask(port: int, query: str, **variables: object) -> dict[str, Any]:
    request = urllib.request.Request(
        f"http://{LOOPBACK}:{port}/graphql",
        json.dumps({"query": query, "variables": variables}).encode(),
        {"Content-Type": "application/json"},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=60) as response:
        answer: dict[str, Any] = json.load(response)["data"]
    return answer


def begun(name: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "omnisupport_ingest.cli.main", "serve", name]
    return subprocess.Popen(command, start_new_session=True)


def unready(port: int) -> dict[str, str] | None:
    """What ``/readyz`` finds wrong and what it says of that, by name; None while nothing answers."""
    try:
        status, body = asked(port, READY)
    except OSError:
        return None
    wrong = {each["name"]: each["says"] for each in body["found"] if not each["ok"]}
    assert (status, body["ok"]) == ((503, False) if wrong else (200, True))
    return wrong


def launched(port: int, what: dict[str, Any]) -> str | None:
    """The id of the run that was launched; None while the webserver does not know its job yet."""
    answer = ask(port, _LAUNCH, what=what)["launchRun"]
    if answer["__typename"] == "PipelineNotFoundError":
        return None
    assert answer["__typename"] == "LaunchRunSuccess", answer
    return str(answer["run"]["runId"])


def age_heartbeats(url: str) -> None:
    """Make the heartbeats of Dagster's daemon ten minutes older."""
    with closing(psycopg2.connect(url)) as connection, connection, connection.cursor() as cursor:
        cursor.execute("UPDATE daemon_heartbeats SET timestamp = timestamp - interval '10 minutes'")
        assert cursor.rowcount > 0


@pytest.mark.slow
def test_single_services_record_a_run_in_postgresql_and_say_when_they_are_ready(
    records: SecretStr, tmp_path: Path
) -> None:
    port, health = free_port(), free_port()
    url = records.get_secret_value()
    ports = {"webserver_port": str(port), "metrics_port": str(health)}
    with environment(home=str(tmp_path / "h"), dagster_pg_url=url, **ports):
        started = {"metrics": begun("metrics")}
        try:
            until(lambda: "services" in (unready(health) or ()), every=0.5)
            assert asked(health, LIVE)[0] == 200, "nothing hangs"

            started |= {name: begun(name) for name in SERVICES}
            until(lambda: all(command("serve", name, "--check").code == 0 for name in started), every=0.5)
            assert [process.poll() for process in started.values()] == [None] * len(started)
            refused = command("materialize")
            assert (refused.code, "serve daemon" in refused.err) == (6, True)
            assert command("serve", "daemon").code == 6, "one daemon for one home"

            until(lambda: (tmp_path / "h/run/dagster-webserver.pid").exists())
            where = {"repositoryLocationName": "omnisupport_ingest", "repositoryName": "__repository__"}
            what = {"selector": {**where, "jobName": "retention"}, "runConfigData": {}}
            # The webserver began before the code server answered, and may still be loading its definitions.
            run_id = until(lambda: launched(port, what), every=0.5)

            def status() -> str:
                return str(ask(port, _STATUS, id=run_id)["runOrError"]["status"])

            until(lambda: status() in ("SUCCESS", "FAILURE"), every=0.5)
            assert status() == "SUCCESS"

            until(lambda: unready(health) == {}, every=0.5)
            seen = {each["name"] for each in asked(health, READY)[1]["found"]}
            assert seen == {"look", "home", "disk", "daemon"}
            # The daemon hangs, and minutes pass for its heartbeats.
            started["daemon"].send_signal(signal.SIGSTOP)
            age_heartbeats(url)
            until(lambda: unready(health), every=0.5)
            wrong = unready(health) or {}
            assert (*wrong,) == ("daemon",) and "its last heartbeat was" in wrong["daemon"], wrong
            assert asked(health, LIVE)[0] == 200, "looks go on"
            started["daemon"].send_signal(signal.SIGCONT)
            until(lambda: unready(health) == {}, every=0.5)
        finally:
            for process in started.values():
                # As systemd does: Dagster's code server alone would wait 30 seconds for its own child.
                os.killpg(process.pid, signal.SIGTERM)
                # What is stopped hears it when it goes on.
                os.killpg(process.pid, signal.SIGCONT)
            for process in started.values():
                process.wait(PATIENCE)
        assert command("serve", "daemon", "--check").code == 1
    with closing(psycopg2.connect(url)) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT status FROM runs WHERE run_id = %s", [run_id])
        assert cursor.fetchone() == ("SUCCESS",)
        cursor.execute("SELECT count(*) > 10 FROM event_logs WHERE run_id = %s", [run_id])
        assert cursor.fetchone() == (True,)
    assert not list((tmp_path / "h" / "dagster").rglob("*.db"))
    for log in (tmp_path / "h" / "dagster").glob("*.yaml"):
        assert url not in log.read_text()


def test_a_service_is_refused_on_a_home_whose_services_another_command_has(tmp_path: Path) -> None:
    with environment(home=str(tmp_path / "h")):
        assert command("serve", "code-server", "--check").code == 1
        home = Home.open(Settings().home, Settings().window_size)
        with HomeLock(home, "up"):
            refused = command("serve", "webserver")
    assert (refused.code, "`up`" in refused.err) == (6, True)


def test_no_command_with_services_of_its_own_begins_beside_single_services(tmp_path: Path) -> None:
    home = Home.open(tmp_path / "h", Settings(_env_file=None).window_size)
    with environment(home=str(tmp_path / "h")):
        # `serve spark` alone, as while a service manager starts the daemon again.
        with HomeLock(home, "serve spark", service_lock("spark")):
            refused = command("materialize")
            assert (refused.code, "`serve spark`" in refused.err) == (6, True)
            with HomeLock(home, DAEMON_HOLDS):
                pass
        with HomeLock(home, "sync"):
            pass


class _Open(BaseHTTPRequestHandler):
    """A UI without its guard: it answers every page."""

    def do_POST(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_a_webserver_that_answers_other_pages_is_not_taken_for_ready(tmp_path: Path) -> None:
    home = Home.open(tmp_path / "h", Settings(_env_file=None).window_size)
    with HTTPServer((LOOPBACK, 0), _Open) as server, environment(home=str(tmp_path / "h")):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        record_service(home.run, WEBSERVER)
        record_ui_port(home.run, server.server_port)
        try:
            assert command("serve", "webserver", "--check").code == 1
        finally:
            server.shutdown()


_SAYS = """
import signal, sys
from pathlib import Path
from omnisupport_ingest.cli.serve import _become
from omnisupport_ingest.home import Home
from omnisupport_ingest.runtime.supervisor import Service
from omnisupport_ingest.settings import Settings

signal.signal(signal.SIGINT, signal.SIG_IGN)
asks = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
home = Home.open(Path(sys.argv[1]), Settings(_env_file=None).window_size)
_become(Service("said", (sys.executable, "-c", asks)), home)
"""


def test_a_service_that_a_script_starts_in_the_background_can_be_stopped(tmp_path: Path) -> None:
    """Shells start it with SIGINT ignored, and Dagster takes SIGTERM as it takes SIGINT."""
    said = subprocess.check_output([sys.executable, "-c", _SAYS, str(tmp_path / "h")], text=True)
    assert said.strip() == "True"
