"""Capture as a process that a test can kill: ``python -m … DSN SLOT HOME UNTIL TABLES OVERRIDES``."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from omnisupport_ingest import failpoints
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.position import Lsn
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest, contract


def main(arguments: Sequence[str]) -> int:
    dsn, slot, home, until, tables, overrides = arguments
    contracts = [contract(table, columns, key) for table, columns, key in json.loads(tables)]
    source = SourceUnderTest(dsn, slot, Path(home), contracts, json.loads(overrides))
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda _signal, _frame: stop.set())
    try:
        capture = source.capture()
        capture.run(Lsn.parse(until) if until else None, stop)
        if until:
            capture.raise_left_out()
    except IngestError as error:
        print(type(error).__name__, error, file=sys.stderr)
        return error.exit_code
    return 0


def in_fork(arguments: Sequence[str], environment: Mapping[str, str], errors: Path) -> None:
    """Do the same in a process that was forked, not started; its standard error is the file ``errors``."""
    os.environ.clear()
    os.environ.update(environment)
    failpoints._armed = failpoints._armed_by(environment.get(failpoints.VARIABLE, ""))
    with errors.open("w") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    sys.exit(main(arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
