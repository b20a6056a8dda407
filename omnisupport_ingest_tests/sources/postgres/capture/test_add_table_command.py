"""``source snapshot`` of a table whose contract is newer than the capture that runs: checked and taken up."""

from __future__ import annotations

import json
import signal

import pytest

from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.sources.postgres.capture.state import CaptureRecord, CaptureRecords
from omnisupport_ingest.sources.postgres.session.errors import PreflightFailed
from omnisupport_ingest.sources.postgres.snapshot.requests import SnapshotRequests
from omnisupport_ingest_tests.sources.postgres.awkward import ROLE, SOURCE, Shop, contract_document
from omnisupport_ingest_tests.sources.postgres.shop_facts import landed_rows, same_as_source, status
from omnisupport_ingest_tests.sources.postgres.source_under_test import folded, landed_events
from omnisupport_ingest_tests.waiting import PATIENCE, until

ASK = ("source", "snapshot", "late", "--reason", "its contract is new")


def make_late(shop: Shop, *, key: str = "PRIMARY KEY") -> None:
    """A table that the publication has, its contract in the folder, its key as ``key`` says."""
    shop.sql(
        f"CREATE TABLE late (id int {key}, v text)",
        "INSERT INTO late VALUES (1, 'one'), (2, 'two')",
        f"GRANT SELECT ON late TO {ROLE}",
    )
    shop.contract("late")


def publish(shop: Shop) -> None:
    shop.sql(f"ALTER PUBLICATION {shop.database} ADD TABLE late")


def folder(shop: Shop) -> LandingStore:
    return LandingStore(shop.home / "landing", SOURCE)


def start(shop: Shop) -> CaptureRecord | None:
    return CaptureRecords(folder(shop).folder).read()


def late_is_right(shop: Shop) -> bool:
    rows = shop.query("SELECT id::text, v FROM late")
    return folded(landed_events(folder(shop)), "late") == {
        json.dumps([key]): {"id": key, "v": v} for key, v in rows
    }


def test_capture_that_runs_takes_the_table_up_and_is_not_started_again(shop: Shop) -> None:
    capture = shop.following()
    try:
        capture.says("snapshot of orders")
        until(lambda: landed_rows(shop) == 0 and status(shop)["state"] == "RUNNING")
        before = start(shop)
        make_late(shop)
        publish(shop)
        told = status(shop, code=1)["warnings"]
        assert [each["fix"] for each in told] == [
            "Let it read the contract: omnisupport-ingest source snapshot late"
        ]
        ranged = shop.run(*ASK, "--from", "1")
        assert ranged.code == 2 and "late has never been read. Request all of it first." in ranged.err
        asked = shop.run(*ASK)
        assert asked.code == 0, asked.output
        assert "late: requested." in asked.out
        assert "The running capture adds late; the other tables go on." in asked.out
        capture.says("snapshot of late")
        shop.sql(
            "INSERT INTO items VALUES (3, 'three')",
            "UPDATE late SET v = 'changed' WHERE id = 1",
            "DELETE FROM late WHERE id = 2",
        )
        until(lambda: landed_rows(shop) == 3)
        assert late_is_right(shop)
        same_as_source(shop)
        assert start(shop) == before
        now = status(shop)
        assert now["warnings"] == [] and now["snapshots_asked_for"] == []
        # From now on it is one of the others.
        again = shop.run(*ASK)
        assert again.code == 0 and "joins" not in again.out
    finally:
        assert capture.stop() == 0


def test_read_by_a_contract_that_capture_has_not_taken_in_yet_is_refused(shop: Shop) -> None:
    """The read would not answer for what has changed, and a whole one would come again after the restart."""
    read = ("source", "snapshot", "items")
    capture = shop.following()
    try:
        capture.says("snapshot of orders")
        until(lambda: landed_rows(shop) == 0 and status(shop)["state"] == "RUNNING")
        edited = contract_document("items")
        edited["x-cdc"]["evolution"] = "additive"
        (shop.contracts / "items.json").write_text(json.dumps(edited))
        refused = shop.run(*read)
        assert refused.code == PreflightFailed.exit_code
        assert "capture goes by the contract as it was at its start" in refused.err
        assert f"source restart {SOURCE}; then this command again" in refused.err
        assert SnapshotRequests(folder(shop).folder).read() == []
        assert shop.run(*read, "--from", "1").code == 0, "of a range nobody expects more"
        assert shop.run("source", "snapshot", "orders").code == 0
        before = start(shop)
        assert shop.run("source", "restart").code == 0
        until(lambda: start(shop) != before and status(shop)["state"] == "RUNNING")
        assert shop.run(*read).code == 0
    finally:
        assert capture.stop() == 0


def test_table_that_cannot_be_captured_is_refused_before_the_capture_is_asked(shop: Shop) -> None:
    capture = shop.following()
    try:
        capture.says("snapshot of orders")
        make_late(shop, key="NOT NULL")
        refused = shop.run(*ASK)
        assert refused.code == PreflightFailed.exit_code
        assert "public.late" in refused.err and "Fix:" in refused.err
        # The role does not own it either: everything that is in the way is told at once.
        assert f'ALTER PUBLICATION "{shop.database}" ADD TABLE' in refused.err
        assert SnapshotRequests(folder(shop).folder).read() == []
        # Asked for all the same, it is the status that tells what keeps it.
        SnapshotRequests(folder(shop).folder).write("late", "")
        capture.says("late is not captured yet")
        told = status(shop, code=1)["warnings"]
        assert told and all(each["what"].startswith("late is not captured yet. ") for each in told)
        shop.sql("INSERT INTO items VALUES (3, 'three')")
        until(lambda: landed_rows(shop) == 1)
    finally:
        assert capture.stop() == 0
    same_as_source(shop)


def test_contract_that_nobody_has_asked_for_stops_no_capture_whose_source_was_away(shop: Shop) -> None:
    capture = shop.following()
    try:
        capture.says("snapshot of orders")
        make_late(shop, key="NOT NULL")
        shop.sql(
            "SELECT pg_terminate_backend(active_pid, 5000) FROM pg_replication_slots"
            " WHERE database = current_database()"
        )
        capture.says("Trying again in")
        shop.sql("INSERT INTO items VALUES (3, 'three')")
        until(lambda: landed_rows(shop) == 1)
    finally:
        assert capture.stop() == 0
    same_as_source(shop)


def test_without_a_capture_the_next_start_takes_it_in(shop: Shop) -> None:
    assert shop.run("capture", "--once").code == 0
    make_late(shop)
    publish(shop)
    assert status(shop)["warnings"] == []
    asked = shop.run(*ASK)
    assert asked.code == 0 and "No capture is running; the next one reads them" in asked.out
    assert shop.run("capture", "--once").code == 0
    assert late_is_right(shop) and SnapshotRequests(folder(shop).folder).read() == []


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    "point",
    [
        "source.published.before:2",
        "source.published.after:2",
        "landing.snapshot_plan.before@late",
        "landing.snapshot_plan.after@late",
        "source.snapshot_request_clear.after@late",
    ],
)
def test_capture_killed_while_a_table_joins_has_it_after_its_next_start(shop: Shop, point: str) -> None:
    capture = shop.following(failpoint=point)
    try:
        capture.says("snapshot of orders")
        make_late(shop)
        publish(shop)
        # It may have seen the publication already, and be dead.
        assert shop.run(*ASK).code == 0
        assert capture.process.wait(PATIENCE) == -signal.SIGKILL
    finally:
        capture.process.kill()
    shop.sql("UPDATE late SET v = 'changed' WHERE id = 1", "INSERT INTO items VALUES (3, 'three')")
    assert shop.run("capture", "--once").code == 0
    assert late_is_right(shop) and SnapshotRequests(folder(shop).folder).read() == []
    same_as_source(shop)
