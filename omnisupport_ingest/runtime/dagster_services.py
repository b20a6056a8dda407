"""Dagster's processes as services: the code server, the run starter, the daemon, the webserver.

One code server serves the daemon and the webserver, so the definitions are loaded once. After a contract file
was added, "Reload" in the UI loads them again. Runs are forks of the run starter, which notices such a file
by itself. If it is not ready, runs are children of the code server.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import replace
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from typing import Any

from omnisupport_ingest.foreign import parse_json
from omnisupport_ingest.home import Home
from omnisupport_ingest.runtime.dagster_home import (
    LOCATION,
    dagster_environment,
    run_starter_socket,
    write_dagster_home,
    write_workspace,
)
from omnisupport_ingest.runtime.ports import LOOPBACK, require_port
from omnisupport_ingest.runtime.private_folders import socket_answers, socket_folder
from omnisupport_ingest.runtime.running import record_ui_port
from omnisupport_ingest.runtime.supervisor import Backoff, Service, ServiceFailed, Supervisor
from omnisupport_ingest.settings import Settings

CODE_SERVER = "dagster-code-server"
DAEMON = "dagster-daemon"
RUN_STARTER = "dagster-runs"
WEBSERVER = "dagster-webserver"

DEFINITIONS = "omnisupport_ingest.definitions"
STARTER = "omnisupport_ingest.cli.run_starter"
GUARDED_WEBSERVER = "omnisupport_ingest.defs.webserver"

PROMPT_DAEMON = "omnisupport_ingest.defs.daemon"

_READY_SECONDS = 300.0
_AGAIN_SECONDS = 0.2
_THREADS = 48
_QUIET = {"PYTHONWARNINGS": "ignore"}
"""Dagster warns about its own preview features at every start."""

_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
"""NumPy's library of linear algebra starts threads when it is imported; runs do not use them."""


def start_dagster(supervisor: Supervisor, settings: Settings, home: Home) -> str:
    """Start the code server, the daemon and the UI. Returns the UI's address once it shows the code location.

    Raises ``PortTaken`` before anything starts, and ``ServiceFailed`` if a service does not become ready.
    """
    port = require_port(settings.webserver_port, "OMNISUPPORT_WEBSERVER_PORT")
    start_dagster_without_ui(supervisor, settings, home)
    supervisor.start(webserver(settings, home, port))
    supervisor.wait(lambda: _shows_location(port), service="The Dagster UI", seconds=_READY_SECONDS)
    _require_guard(port)
    record_ui_port(home.run, port)
    return f"http://{LOOPBACK}:{port}"


def start_dagster_without_ui(supervisor: Supervisor, settings: Settings, home: Home) -> None:
    """Start only the code server and the daemon, which sensors and backfills need."""
    # Files that an earlier, killed start left behind are not needed any more.
    # No failpoint: scratch files, which the next command removes if this process is killed.
    shutil.rmtree(_temporary(home), ignore_errors=True)
    prepare_dagster(settings, home)
    supervisor.start(code_server(settings, home))
    # Nobody waits for it: until it is ready, runs start without it.
    supervisor.start(run_starter(settings, home))
    socket = code_server_socket(home)
    supervisor.wait(lambda: socket_answers(socket), service="The Dagster code server", seconds=_READY_SECONDS)
    supervisor.start(daemon(settings, home))


def stop_dagster(supervisor: Supervisor) -> None:
    """Stop all of Dagster, before the services that its runs use. Runs in progress have a few seconds to end;
    then they are cancelled."""
    for name in (WEBSERVER, DAEMON, RUN_STARTER, CODE_SERVER):
        supervisor.stop(name)


def prepare_dagster(settings: Settings, home: Home) -> None:
    """Write the files that Dagster's services of ``home`` read at their start. Every start of a service calls
    it."""
    write_dagster_home(settings, home)
    # No failpoint: scratch files, which the next command removes if this process is killed.
    _temporary(home).mkdir(mode=0o700, exist_ok=True)
    write_workspace(home, code_server_socket(home))


def code_server(settings: Settings, home: Home) -> Service:
    return _service(CODE_SERVER, code_server_command(code_server_socket(home)), settings, home)


def run_starter(settings: Settings, home: Home) -> Service:
    """Return the run starter as a service: the process that is forked for each run."""
    starter = _service(RUN_STARTER, (STARTER, str(run_starter_socket(home))), settings, home)
    return replace(starter, environment={**starter.environment, **_ONE_THREAD})


def daemon(settings: Settings, home: Home) -> Service:
    """Return the daemon: sensors, schedules, and the run queue."""
    return _service(DAEMON, (PROMPT_DAEMON, "run", "-w", _workspace(home)), settings, home)


def webserver(settings: Settings, home: Home, port: int, listen: str = LOOPBACK) -> Service:
    """Return the webserver with the UI, at ``port`` of the address ``listen``."""
    command = (GUARDED_WEBSERVER, "-h", listen, "-p", str(port), "-w", _workspace(home))
    return _service(WEBSERVER, command, settings, home)


def code_server_socket(home: Home) -> Path:
    """Return the socket of the code server. Whoever connects can run code, so only the owner can connect."""
    return socket_folder(home.run) / "dagster-code-server.sock"


def code_server_command(socket: Path) -> tuple[str, ...]:
    """Return the module and arguments of the code server."""
    where = ("-s", str(socket), "--use-python-environment-entry-point", "--location-name", LOCATION)
    # A tick that waits holds a thread, and the UI needs some too.
    return ("dagster", "code-server", "start", "-m", DEFINITIONS, *where, "-n", str(_THREADS))


def _service(name: str, module: tuple[str, ...], settings: Settings, home: Home) -> Service:
    return Service(
        name,
        (sys.executable, "-m", *module),
        # The code server's own child listens on a socket in the temporary folder, where runs write as well.
        environment=dagster_environment(settings, home) | _QUIET | {"TMPDIR": str(_temporary(home))},
        restart=Backoff(),
    )


def _temporary(home: Home) -> Path:
    return socket_folder(home.run) / "tmp"


def _workspace(home: Home) -> str:
    return str(home.dagster / "workspace.yaml")


_ANSWER_BYTES = 16 * 1024 * 1024


def _shows_location(port: int) -> bool:
    """Whether the webserver at ``port`` answers a GraphQL query with a code location."""
    question = "{ repositoriesOrError { ... on RepositoryConnection { nodes { name } } } }"
    try:
        with _ask(port, question) as response:
            answer = parse_json(response.read(_ANSWER_BYTES))
        return bool(answer["data"]["repositoriesOrError"].get("nodes"))
    except (OSError, HTTPException, ValueError, LookupError, TypeError, AttributeError):
        return False


def _require_guard(port: int, *, seconds: float = _READY_SECONDS) -> None:
    """Raise ``ServiceFailed`` if the webserver answers a request that another web page could have sent.

    It is raised, too, if that is still unknown after ``seconds``.
    """
    deadline = time.monotonic() + seconds
    while (status := _status_for_another_page(port)) is None:
        if time.monotonic() > deadline:
            raise ServiceFailed(
                "Whether the Dagster UI refuses requests of other web pages is not known: it gave no answer "
                f"within {seconds:g} seconds.",
                fix=f"Look at the log of {WEBSERVER}, then run the same command again.",
            )
        time.sleep(_AGAIN_SECONDS)
    if status != HTTPStatus.FORBIDDEN:
        raise ServiceFailed(
            f"The Dagster UI answers requests of other web pages (status {status} for a foreign Host).",
            fix="Install the versions of constraints.txt: the guard in omnisupport_ingest.defs.webserver "
            "does not know this dagster-webserver.",
        )


def refuses_other_pages(port: int) -> bool:
    """Whether the webserver at ``port`` answers, and refuses a request that another web page could have
    sent."""
    return _status_for_another_page(port) == HTTPStatus.FORBIDDEN


def _status_for_another_page(port: int) -> int | None:
    """Return the status of the answer to a request with a foreign ``Host``; None if there is no answer."""
    try:
        with _ask(port, "{ version }", {"Host": "another-page.invalid"}) as response:
            return int(response.status)
    except urllib.error.HTTPError as refused:
        return refused.code
    except (OSError, HTTPException):
        return None


def _ask(port: int, query: str, headers: Mapping[str, str] | None = None) -> Any:
    request = urllib.request.Request(
        f"http://{LOOPBACK}:{port}/graphql",
        data=json.dumps({"query": query}).encode(),
        headers={"Content-Type": "application/json", **(headers or {})},
    )
    # A proxy from the environment must not be used for loopback.
    return urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=5)
