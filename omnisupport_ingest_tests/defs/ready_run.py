"""What stands ready for runs of ``waiting_job``, and a process that launches one, for tests that end either.

``serve SOCKET`` stands ready; ``launch RUN_ID`` launches a run that has been made, on the instance of
``DAGSTER_HOME``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import dagster as dg

from omnisupport_ingest.defs.run_launcher import end_lost, execute_run, interrupt_runs
from omnisupport_ingest.runtime.fork_server import Duties, ForkServer
from omnisupport_ingest_tests.defs import waiting_job  # noqa: F401 - what a run of it would import


def main(what: str, of: str) -> None:
    if what == "serve":
        duties = Duties(lambda: True, execute_run, end_lost, interrupt_runs, patience=0.5)
        ForkServer(Path(of), duties).serve()
    else:
        with dg.DagsterInstance.get() as instance:
            instance.launch_run(of, None)


if __name__ == "__main__":
    main(*sys.argv[1:])
