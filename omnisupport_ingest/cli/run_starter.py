"""The process that starts runs quickly: it has imported and defined everything, and opened nothing.

A fork of it executes a run, 0.2 seconds after the request; a new process would take seconds to import. The
parent never opens a Spark session, a Dagster instance or a table, and never uses an object store; each child
does so itself.

A child must run the same code and definitions as a new process. So before each fork, the parent checks the
files from which definitions are made: our code, the contracts, the sources, the decision table, `.env`. If
one has changed, the parent does not fork: Dagster's own launcher starts the run, and the parent executes
itself again under the same process id.

Run as a service; the settings come from the environment.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from pathlib import Path

import omnisupport_ingest
from omnisupport_ingest.contracts.in_force import record_in_force, settings_of_home
from omnisupport_ingest.contracts.kept import Stamp, documents_stamp, stamp_of
from omnisupport_ingest.home import Home
from omnisupport_ingest.runtime.fork_server import Duties, ForkServer, threads_in_the_way
from omnisupport_ingest.settings import ENV_FILE, Settings
from omnisupport_ingest.storage import leave_to_forks

_PACKAGE = Path(omnisupport_ingest.__file__).parent
_OF_RUNS = ("cdc", "lake", "landing", "layers", "read", "review", "checks", "targets")
"""Packages of ours that a run uses; they import one another only when a step needs it."""

_ALSO = (
    "dagster._core.storage.event_log",
    "dagster._core.storage.local_compute_log_manager",
    "dagster._core.storage.runs",
    "dagster._core.storage.schedules",
    "deltalake",
    "duckdb",
    "grpc",
    "grpc_status.rpc_status",
    "omnisupport_ingest.contracts.pandera_schema",
    "pyarrow.dataset",
    "pyspark.sql.connect.client",
    "pyspark.sql.connect.functions",
    "pyspark.sql.connect.session",
)
"""Modules that a run imports late; imported only if they are installed."""


def stamp() -> Stamp:
    """Return the stamp of every file from which definitions are made."""
    settings = settings_of_home(Settings())
    home = settings.home.absolute()
    others = stamp_of((*_PACKAGE.rglob("*.py"), home / "home.json", Path(ENV_FILE).absolute()))
    return documents_stamp(settings) + others


def import_everything() -> None:
    """Import everything that a run needs, so that no fork has to."""
    for name in _OF_RUNS:
        for module in pkgutil.walk_packages([str(_PACKAGE / name)], f"omnisupport_ingest.{name}."):
            importlib.import_module(module.name)
    for name in _ALSO:
        try:
            importlib.import_module(name)
        except ImportError as error:
            sys.stderr.write(f"Not imported beforehand: {error}.\n")


def main() -> int:
    """Serve at the socket named by the argument, until a signal stops it."""
    (socket,) = sys.argv[1:]
    leave_to_forks()
    settings = settings_of_home(Settings())
    record_in_force(settings, Home.open(settings.home, settings.window_size, first=settings.first_window))
    # Before any import: a file that changes meanwhile is noticed at the first request.
    imported = stamp()
    from omnisupport_ingest import definitions
    from omnisupport_ingest.defs.run_launcher import end_lost, execute_run, interrupt_runs

    import_everything()
    definitions.keep_definitions()
    if threads := threads_in_the_way():
        sys.stderr.write(f"Error: not to be forked, as threads run in it: {', '.join(threads)}.\n")
        return 1
    duties = Duties(
        is_current=lambda: stamp() == imported,
        work=execute_run,
        after_failure=end_lost,
        interrupt=interrupt_runs,
    )
    if ForkServer(Path(socket), duties).serve():
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - itself
    return 0


if __name__ == "__main__":
    sys.exit(main())
