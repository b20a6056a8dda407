"""A sync is killed at its failpoints; the next one ends with every record landed, and landed once."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import uuid
from collections import Counter
from pathlib import Path

import pytest

from omnisupport_ingest.failpoints import VARIABLE
from omnisupport_ingest.settings import PREFIX
from omnisupport_ingest_tests.sources.kafka.broker import Broker
from omnisupport_ingest_tests.sources.kafka.topics import Reader, changes
from omnisupport_ingest_tests.waiting import PATIENCE

POINTS = (
    "landing.epoch.before",
    "landing.epoch.after",
    "landing.data.before",
    "landing.data.after",
    "landing.manifest.before",
    "landing.manifest.after",
    "landing.index.before",
    "landing.index.after",
    "kafka.mirror.before",
    "kafka.mirror.after",
)

_PROGRAM = """
import sys
from pathlib import Path
from omnisupport_ingest_tests.sources.kafka.topics import Reader
Reader(Path(sys.argv[1]), sys.argv[2], sys.argv[3], batch_rows=6).sync()
"""

_CASES = [
    pytest.param(*case, marks=() if case == ("landing.manifest.after", 2) else pytest.mark.crash)
    for case in itertools.product(POINTS, (1, 2))
    if not case[0].startswith("landing.epoch") or case[1] == 1
]


@pytest.mark.parametrize(("point", "at"), _CASES)
def test_a_sync_that_is_killed_goes_on_where_it_was(
    tmp_path: Path, broker: Broker, point: str, at: int
) -> None:
    prefix = f"k{uuid.uuid4().hex[:8]}"
    broker.make_topic(prefix, 2)
    for partition in (0, 1):
        broker.produce(prefix, changes(100 * partition, 15), partition)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    ends = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(tmp_path), broker.address, prefix],
        env={**inherited, VARIABLE: f"{point}:{at}"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert ends.returncode == -signal.SIGKILL, ends.stderr
    reader = Reader(tmp_path, broker.address, prefix, batch_rows=6)
    for _ in range(2):
        assert reader.sync().finished
    # A round is landed or not, so not even a duplicate is left to dedupe.
    assert Counter(reader.keys()) == Counter([*range(15), *range(100, 115)])
    assert reader.store.landed().gap is None
