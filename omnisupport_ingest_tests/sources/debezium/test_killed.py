"""A landing of events is killed at its failpoints; the next one ends with all of it landed and told once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from omnisupport_ingest.failpoints import VARIABLE
from omnisupport_ingest.landing.schema_changes import SchemaChanges
from omnisupport_ingest.settings import PREFIX
from omnisupport_ingest_tests.sources.debezium.recorded import Recorder
from omnisupport_ingest_tests.sources.debezium.told import TS, customer, envelope
from omnisupport_ingest_tests.waiting import PATIENCE

_PROGRAM = """
import sys
from pathlib import Path
from omnisupport_ingest_tests.sources.debezium.recorded import Recorder
Recorder(Path(sys.argv[1]), "customers").land(Path(sys.argv[2]))
"""


@pytest.mark.full
@pytest.mark.parametrize(
    "point",
    [
        "landing.schema_changes.after",
        pytest.param("landing.schema_changes.before", marks=pytest.mark.crash),
        pytest.param("landing.manifest.before", marks=pytest.mark.crash),
        pytest.param("landing.manifest.after", marks=pytest.mark.crash),
    ],
)
def test_a_change_is_told_once_wherever_the_landing_that_sees_it_is_killed(
    tmp_path: Path, point: str
) -> None:
    recorder = Recorder(tmp_path, "customers")
    recorder.land_values("1.jsonl", envelope("c", customer(1), lsn=1))
    late = envelope("c", customer(2, more=1), lsn=2, ts=TS + 1)
    path = recorder.file("2.jsonl", [json.dumps(late).encode()])
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(PREFIX)}
    ends = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(tmp_path), str(path)],
        env={**inherited, VARIABLE: f"{point}:1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert ends.returncode == -signal.SIGKILL, ends.stderr
    recorder.land(path)
    changes = SchemaChanges(recorder.inlet.store.folder).all()
    assert [(each.kind, each.column) for each in changes] == [("column_added", "more")]
    assert {json.loads(each["key"])[0] for each in recorder.events()} == {"1", "2"}
