"""``serve``: one service of the platform in the foreground, for a service manager.

``up`` supervises all services. Here systemd, Compose or Kubernetes does, and this process becomes the service
itself: it gets the signals, and its exit code is the service's. The services find one another in the home, by
sockets and files, as under ``up``; so they run on one machine and as one user.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING

import click

from omnisupport_ingest.cli.errors import FINDINGS
from omnisupport_ingest.cli.opening import open_home, open_settings
from omnisupport_ingest.cli.probes import daemon_hangs, is_live
from omnisupport_ingest.runtime import dagster_services
from omnisupport_ingest.runtime.connect_address import ConnectAddress
from omnisupport_ingest.runtime.dagster_home import run_starter_socket
from omnisupport_ingest.runtime.dagster_services import code_server_socket, refuses_other_pages
from omnisupport_ingest.runtime.home_lock import DAEMON_HOLDS, HomeInUse, HomeLock, holder, service_lock
from omnisupport_ingest.runtime.ports import LOOPBACK, require_port
from omnisupport_ingest.runtime.private_folders import socket_answers
from omnisupport_ingest.runtime.running import record_service, record_ui_port, ui_port
from omnisupport_ingest.runtime.spark_connect import connect_service
from omnisupport_ingest.verify.services import metrics

if TYPE_CHECKING:
    from omnisupport_ingest.home import Home
    from omnisupport_ingest.runtime.supervisor import Service
    from omnisupport_ingest.settings import Settings

SPARK, CODE_SERVER, RUNS, DAEMON, WEBSERVER = "spark", "code-server", "runs", "daemon", "webserver"
METRICS = "metrics"


@click.command()
@click.argument("name", type=click.Choice([SPARK, CODE_SERVER, RUNS, DAEMON, WEBSERVER, METRICS]))
@click.option(
    "--listen",
    default=LOOPBACK,
    show_default=True,
    metavar="ADDRESS",
    help="Where `webserver` or `metrics` listens. Neither has a login: another address is for a container "
    "whose port is published on loopback alone, or reached by probes of its machine.",
)
@click.option(
    "--check",
    is_flag=True,
    help="Start nothing; exit with 0 if the service answers, else 1: for probes.",
)
def serve(name: str, listen: str, check: bool) -> int | None:
    """Run one service of the platform in the foreground, for systemd, Compose or Kubernetes.

    `spark`: the warm Spark Connect server; not needed with OMNISUPPORT_SPARK_REMOTE. `code-server`: the
    definitions. `runs`: what runs are forked from. `daemon`: sensors and schedules; it holds the home, as
    `up` does. `webserver`: the UI. `metrics`: metrics and health on OMNISUPPORT_METRICS_PORT. Capture is a
    service of its own: `capture`.

    All run on one machine, on one home, as one user, and see one another's processes. Each may be started
    before the others, and again at any time.

    \b
    Examples:
      omnisupport-ingest serve daemon
      omnisupport-ingest serve daemon --check

    Exit code: that of the service; 1 it does not answer, 2 usage or settings, 4 Java or the library of
    metrics is missing, 5 its port is taken, 6 the home is in use.
    """
    settings = open_settings()
    home = open_home(settings)
    if check:
        return 0 if _answers(name, settings, home) else FINDINGS
    if name == METRICS:
        # The service only reads, so it takes no lock.
        _become(metrics(settings, listen), home)
    # The lock is held as long as the process lives, whatever it executes; `up` and passes are refused
    # meanwhile.
    HomeLock(home, f"serve {name}", service_lock(name)).keep()
    other = holder(home)
    if other is not None and other.command != DAEMON_HOLDS:
        raise HomeInUse(
            f"{home.path} is in use by {other}, which has services of its own.",
            fix=f"{other.stop}, or set OMNISUPPORT_HOME to another folder.",
        )
    if name == DAEMON:
        HomeLock(home, DAEMON_HOLDS).keep()
    _become(_service(name, settings, home, listen), home)
    return None


def _service(name: str, settings: Settings, home: Home, listen: str) -> Service:
    if name == SPARK:
        return connect_service(settings)
    dagster_services.prepare_dagster(settings, home)
    if name == WEBSERVER:
        port = require_port(settings.webserver_port, "OMNISUPPORT_WEBSERVER_PORT")
        record_ui_port(home.run, port)
        return dagster_services.webserver(settings, home, port, listen)
    makes = {
        CODE_SERVER: dagster_services.code_server,
        RUNS: dagster_services.run_starter,
        DAEMON: dagster_services.daemon,
    }
    return makes[name](settings, home)


def _become(service: Service, home: Home) -> None:
    """Replace this process by ``service``, recorded as a service that runs on ``home``."""
    record_service(home.run, service.name)
    sys.stdout.flush()
    # A shell starts a background command with SIGINT ignored, and a new program inherits that. Dagster treats
    # SIGTERM like SIGINT, so only SIGKILL would end it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    program, environment = service.command[0], {**os.environ, **service.environment}
    os.execve(program, service.command, environment)  # noqa: S606 - the service is this process


def _answers(name: str, settings: Settings, home: Home) -> bool:
    """Whether the service ``name`` of ``home`` can be used."""
    if name == SPARK:
        return ConnectAddress.read(home.run) is not None
    if name == DAEMON:
        lock_holder = holder(home)
        holds = lock_holder is not None and lock_holder.command == DAEMON_HOLDS
        return holds and not daemon_hangs(home, settings)
    if name == METRICS:
        return settings.metrics_port is not None and is_live(settings.metrics_port)
    if name == WEBSERVER:
        port = ui_port(home.run)
        return port is not None and refuses_other_pages(port)
    return socket_answers(code_server_socket(home) if name == CODE_SERVER else run_starter_socket(home))
