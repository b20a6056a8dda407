"""A process that is killed between two puts: nothing counts twice, and what it left is swept."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from omnisupport_ingest.failpoints import VARIABLE
from omnisupport_ingest.home import Home
from omnisupport_ingest.lake.sweep import sweep
from omnisupport_ingest.lake.table import LakeTable
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.layers.ledgers import retention_ledger
from omnisupport_ingest.storage import storage_of
from omnisupport_ingest.windows import WindowSize
from omnisupport_ingest_tests.landing.batches import land
from omnisupport_ingest_tests.storage.faulty_proxy import BUSY, CUT, LOST, SLOW, faulty_proxy
from omnisupport_ingest_tests.storage.s3_server import S3Server

HOURLY = WindowSize.parse("hourly")

_OPENS = """
import sys
from pathlib import Path
from omnisupport_ingest.home import Home
from omnisupport_ingest.windows import WindowSize
home = Home.open(Path(sys.argv[1]), WindowSize.parse("hourly"), storage=sys.argv[2])
"""

LANDS = f"""{_OPENS}
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest_tests.landing.batches import land
land(LandingStore(home.landing, "shop"), 10, 20)
"""

DECIDES = f"""{_OPENS}
import pyarrow as pa
from omnisupport_ingest.lake.schema import arrow_schema
from omnisupport_ingest.layers.ledgers import retention_ledger
ledger = retention_ledger(home.lake, "shop")
schema = arrow_schema(ledger.spec.schema, without=("sequence",))
for _ in range(int(sys.argv[3])):
    ledger.append(lambda held: pa.table([pa.nulls(1, each.type) for each in schema], schema=schema))
"""


def start(script: str, *arguments: object, failpoint: str = "") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        env={**os.environ, VARIABLE: failpoint},
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("failpoint", "landed"),
    [("landing.data.after", 0), ("landing.manifest.before", 0), ("landing.manifest.after", 1)],
)
def test_data_without_its_manifest_is_no_batch_and_a_manifest_without_its_copy_is_one(
    s3: S3Server, tmp_path: Path, failpoint: str, landed: int
) -> None:
    place = s3.place()
    process = start(LANDS, tmp_path / "home", place, failpoint=failpoint)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL

    # Where nothing of the killed process's disk is left.
    home = Home.open(tmp_path / "another", HOURLY, storage=place)
    store = LandingStore(home.landing, "shop")
    assert store.landed().count == landed
    if not landed:
        land(store, 10, 20)
    land(store, 20, 30)
    assert store.landed().count == 2
    for batch in store.manifests():
        store.verify(batch)
    left = [each.path for each in storage_of(home.landing / "x").listed(home.landing / "shop" / "data")]
    assert len(left) == (2 if landed else 3)
    assert store.sweep(timedelta(days=1)) == []


def test_data_that_never_landed_is_swept_once_it_is_old(s3: S3Server, tmp_path: Path) -> None:
    place = s3.place()
    start(LANDS, tmp_path / "home", place, failpoint="landing.data.after").communicate(timeout=60)
    home = Home.open(tmp_path / "another", HOURLY, storage=place)
    store = LandingStore(home.landing, "shop")
    land(store, 20, 30)
    copies = home.landing / "shop" / "data"
    assert len([*copies.rglob("*.parquet")]) == 1
    assert len(store.sweep(timedelta(seconds=-5))) == 1
    assert not [*copies.rglob("*.parquet")]
    assert [len(store.manifests()), store.landed().count] == [1, 1]
    store.verify(store.manifests()[0])


@pytest.mark.parametrize("failpoint", ["lake.upload.before", "lake.upload.after", "lake.commit.after"])
def test_a_decision_whose_commit_did_not_come_is_none_and_its_file_is_swept(
    s3: S3Server, tmp_path: Path, failpoint: str
) -> None:
    place = s3.place()
    process = start(DECIDES, tmp_path / "home", place, 1, failpoint=failpoint)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    home = Home.open(tmp_path / "another", HOURLY, storage=place)
    ledger = retention_ledger(home.lake, "shop")
    committed = int(failpoint == "lake.commit.after")
    assert ledger.entries().num_rows == committed
    again = start(DECIDES, tmp_path / "another", place, 1)
    again.communicate(timeout=60)
    assert ledger.entries().num_rows == committed + 1
    table = LakeTable(home.lake, ledger.spec)
    assert sweep(table) == []
    assert len(sweep(table, timedelta(seconds=-5))) == 1 - committed
    assert ledger.entries().num_rows == committed + 1


@pytest.mark.drawn(4)
@pytest.mark.parametrize("fault", [BUSY, CUT, LOST, SLOW])
@pytest.mark.parametrize("entry", [0, 1, 2], ids=["table", "first", "second"])
def test_a_commit_that_the_store_answers_badly_counts_once(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, entry: int
) -> None:
    place = s3.place()
    home = Home.open(tmp_path / "home", HOURLY, storage=place)
    with faulty_proxy(s3.port) as proxy:
        proxy.of = f"_delta_log/{entry:020d}.json"
        proxy.plan.append(fault)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        process = start(DECIDES, tmp_path / "home", place, 2)
        assert process.communicate(timeout=120)[1] == ""
        assert not proxy.plan
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.variables["AWS_ENDPOINT_URL"])
    assert retention_ledger(home.lake, "shop").entries()["sequence"].to_pylist() == [1, 2]


def test_two_machines_that_commit_at_once_lose_nothing(s3: S3Server, tmp_path: Path) -> None:
    place = s3.place()
    Home.open(tmp_path / "a", HOURLY, storage=place)
    both = [start(DECIDES, tmp_path / name, place, 4) for name in ("a", "b")]
    for each in both:
        assert each.communicate(timeout=60)[1] == ""
    home = Home.open(tmp_path / "a", HOURLY, storage=place)
    numbers = retention_ledger(home.lake, "shop").entries()["sequence"].to_pylist()
    assert numbers == list(range(1, 9))
