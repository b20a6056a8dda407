"""What an object store may do to a request for each thing that must count once: it counts once, or not."""

from __future__ import annotations

from pathlib import Path

import pytest

from omnisupport_ingest.home import Home
from omnisupport_ingest.layers.ledgers import retention_ledger
from omnisupport_ingest_tests.landing.batches import land
from omnisupport_ingest_tests.storage.faulty_proxy import BUSY, CUT, LOST, SLOW, FaultyProxy
from omnisupport_ingest_tests.storage.s3_server import S3Server
from omnisupport_ingest_tests.storage.test_bucket import HOURLY, landing_of, proxy
from omnisupport_ingest_tests.storage.test_killed import DECIDES, start
from omnisupport_ingest_tests.waiting import PATIENCE, until

__all__ = ["proxy"]

FAULTS = (BUSY, CUT, LOST, SLOW)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("of", ["/epochs/", "/data/", "/manifests/"])
def test_what_lands_lands_once(proxy: FaultyProxy, s3: S3Server, tmp_path: Path, of: str, fault: str) -> None:
    place = s3.place()
    ours = landing_of(tmp_path / "ours", place)
    proxy.of = of
    proxy.plan.append(fault)
    ours.begin_epoch("the first", None)
    land(ours, 10, 20)
    land(ours, 20, 30)
    assert not proxy.plan
    other = landing_of(tmp_path / "other", place)
    assert [each.reason for each in other.epochs()] == ["the first"]
    assert (other.landed().count, other.landed().gap) == (2, None)
    for each in other.manifests():
        other.verify(each)


@pytest.mark.parametrize("fault", FAULTS)
def test_two_machines_that_make_one_home_agree_on_its_windows(
    proxy: FaultyProxy, s3: S3Server, tmp_path: Path, fault: str
) -> None:
    place = s3.place()
    proxy.of = "home.json"
    proxy.plan.extend([fault] * 2)
    ours, other = (Home.open(tmp_path / name, HOURLY, storage=place) for name in ("ours", "other"))
    assert not proxy.plan
    assert ours.grid == other.grid


@pytest.mark.parametrize("fault", [BUSY, LOST, SLOW])
def test_the_index_is_whole_whatever_the_lists_of_the_store_answer(
    proxy: FaultyProxy, s3: S3Server, tmp_path: Path, fault: str
) -> None:
    place = s3.place()
    ours = landing_of(tmp_path / "ours", place)
    ours.begin_epoch("the first", None)
    for start_at in (10, 20, 30):
        land(ours, start_at, start_at + 10)
    other = landing_of(tmp_path / "other", place)
    assert other.landed().count == 3
    land(ours, 40, 50)
    proxy.method, proxy.of = "GET", "list-type=2"
    proxy.plan.extend([fault] * 2)
    other.look_again()
    assert not proxy.plan
    assert (other.landed().count, other.landed().gap) == (4, None)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_decision_counts_once_whatever_happens_to_its_file(
    proxy: FaultyProxy, s3: S3Server, tmp_path: Path, fault: str
) -> None:
    place = s3.place()
    home = Home.open(tmp_path / "home", HOURLY, storage=place)
    proxy.of = "/entry-"
    proxy.plan.extend([fault] * 2)
    # In a process of its own: delta-rs holds this one's lock while it waits for the proxy.
    process = start(DECIDES, tmp_path / "home", place, 2)
    assert process.communicate(timeout=PATIENCE)[1] == ""
    assert not proxy.plan
    assert numbers(home, s3) == [1, 2]


@pytest.mark.parametrize("fault", [BUSY, LOST, SLOW])
def test_a_decision_counts_once_whatever_is_answered_of_the_log(
    proxy: FaultyProxy, s3: S3Server, tmp_path: Path, fault: str
) -> None:
    place = s3.place()
    home = Home.open(tmp_path / "home", HOURLY, storage=place)
    proxy.method, proxy.of = "GET", "_delta_log"
    proxy.plan.extend([fault] * 4)
    process = start(DECIDES, tmp_path / "home", place, 2)
    assert process.communicate(timeout=PATIENCE)[1] == ""
    assert not proxy.plan
    assert numbers(home, s3) == [1, 2]


def test_a_writer_whose_lists_are_stale_is_refused_and_commits_once_they_are_not(
    proxy: FaultyProxy, s3: S3Server, tmp_path: Path
) -> None:
    place = s3.place()
    home = Home.open(tmp_path / "home", HOURLY, storage=place)
    first = start(DECIDES, tmp_path / "home", place, 2)
    assert first.communicate(timeout=PATIENCE)[1] == ""
    # The second decision is there, and no list says so.
    entry = f"_delta_log/{2:020d}.json"
    proxy.unlisted = {entry.encode()}
    proxy.of = entry
    proxy.plan.append(SLOW)
    process = start(DECIDES, tmp_path / "home", place, 1)
    # It puts its own as the second, and the store refuses that.
    until(lambda: process.poll() is not None or not proxy.plan)
    assert not proxy.plan, "no list was stale"
    proxy.unlisted = set()
    assert process.communicate(timeout=PATIENCE)[1] == ""
    assert numbers(home, s3) == [1, 2, 3]


def numbers(home: Home, s3: S3Server) -> list[int]:
    """The numbers of the decisions, as a reader without the proxy finds them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", s3.variables["AWS_ENDPOINT_URL"])
        found: list[int] = retention_ledger(home.lake, "shop").entries()["sequence"].to_pylist()
    return found
