"""Writers that die or race: real processes, real signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from omnisupport_ingest.failpoints import VARIABLE
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest_tests.landing.batches import land
from omnisupport_ingest_tests.waiting import PATIENCE

LAND_THREE = """
import sys
from pathlib import Path
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest_tests.landing.batches import land
store = LandingStore(Path(sys.argv[1]), "support_desk")
for start in (10, 20, 30):
    land(store, start, start + 10)
"""

RACE = """
import sys
from pathlib import Path
from omnisupport_ingest.landing.errors import ChainContested
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest_tests.landing.batches import manifest, land
store = LandingStore(Path(sys.argv[1]), "support_desk")
print("ready", flush=True)
sys.stdin.readline()
won = 0
for start in range(10, 400, 10):
    try:
        if sys.argv[2] == "writer":
            land(store, start, start + 10)
        else:
            store.publish(manifest(start, start + 10))
        won += 1
    except ChainContested:
        while not store.exists(manifest(start, start + 10).batch_id):
            pass
print(won)
"""


def start(script: str, *arguments: object, failpoint: str = "") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        env={**os.environ, VARIABLE: failpoint},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("failpoint", "landed"),
    [
        pytest.param("landing.data.after", 0, marks=pytest.mark.full),
        ("landing.data.after:3", 2),
        ("landing.manifest.after", 1),
        pytest.param("landing.manifest.after:2", 2, marks=pytest.mark.full),
        pytest.param("landing.index.before", 0, marks=pytest.mark.full),
        pytest.param("landing.index.after", 0, marks=pytest.mark.full),
        ("landing.index.before@e000001-s-000000000000000a", 1),
        pytest.param("landing.index.after@e000001-s-000000000000000a", 1, marks=pytest.mark.full),
        pytest.param("landing.index.before@e000001-s-0000000000000014", 2, marks=pytest.mark.full),
    ],
)
def test_killed_writer_leaves_whole_batches_only(tmp_path: Path, failpoint: str, landed: int) -> None:
    process = start(LAND_THREE, tmp_path, failpoint=failpoint)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == -signal.SIGKILL
    store = LandingStore(tmp_path, "support_desk")
    batches = store.landed().batches
    assert len(batches) == landed
    for batch in batches:
        store.verify(batch)
    # What follows continues after what is there, over the garbage of the dead writer.
    for begin in range(10 + 10 * landed, 40, 10):
        land(store, begin, begin + 10)
    assert store.landed().gap is None
    for batch in store.landed().batches:
        store.verify(batch)
        assert len(list(store.data_folder(batch.batch_id).iterdir())) == 1
    assert len(store.batch_ids()) == 3


@pytest.mark.parametrize("through", ["store", "writer"])
@pytest.mark.full
def test_of_two_processes_one_lands_each_batch(tmp_path: Path, through: str) -> None:
    racers = [start(RACE, tmp_path, through) for _ in range(2)]
    for racer in racers:
        assert racer.stdout is not None and racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    won = [int(racer.communicate(timeout=PATIENCE)[0]) for racer in racers]
    store = LandingStore(tmp_path, "support_desk")
    assert sum(won) == len(store.batch_ids()) == 39
    assert store.landed().gap is None
    for batch in store.landed().batches:
        store.verify(batch)
