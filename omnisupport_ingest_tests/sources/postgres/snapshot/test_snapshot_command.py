"""``source snapshot``: rows are read again when a person asks, by whatever capture comes next."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.sources.postgres.capture.parked import ParkedTables
from omnisupport_ingest.sources.postgres.snapshot.requests import SnapshotRequests
from omnisupport_ingest_tests.cli.command import environment
from omnisupport_ingest_tests.sources.postgres.awkward import ROLE, SOURCE, Shop
from omnisupport_ingest_tests.sources.postgres.shop_facts import killed_at, status
from omnisupport_ingest_tests.waiting import until

ONCE = ("capture", "--once")

SLOWED = {
    "snapshot_rows_per_second": "200",
    "snapshot_chunk_rows": "100",
    "snapshot_threads": "1",
}
"""A snapshot that reads 200 rows a second, 100 at a time."""


def boundaries(shop: Shop) -> int:
    """How many snapshots of orders have landed whole."""
    batches = LandingStore(shop.home / "landing", SOURCE).manifests()
    return sum(batch.chunk.boundary and batch.chunk.table == "orders" for batch in batches if batch.chunk)


def under_way(shop: Shop) -> list[dict[str, Any]]:
    """The snapshots that a killed capture left, by table."""
    return sorted(status(shop, code=1)["snapshots"], key=lambda each: str(each["table"]))


def near_200(snapshot: dict[str, Any]) -> bool:
    """Whether its rate is that of ``SLOWED``, as near as a machine with other work allows."""
    return 100 < float(snapshot["rows_per_second"]) < 220


def test_capture_that_follows_reads_the_table_again_and_goes_on(shop: Shop) -> None:
    capture = shop.following()
    try:
        capture.says("snapshot of orders")
        until(lambda: boundaries(shop) == 1)
        asked = shop.run("source", "snapshot", "orders", "--reason", "a test")
        assert asked.code == 0 and "orders: requested." in asked.out and "source status" in asked.out
        until(lambda: boundaries(shop) == 2)
        assert status(shop)["snapshots"] == [] and status(shop)["snapshots_asked_for"] == []
        assert status(shop)["state"] == "RUNNING"
        shop.sql("ALTER TABLE orders RENAME TO elsewhere")
        gone = shop.run("source", "snapshot", "orders")
        assert gone.code == 5 and "Table public.orders does not exist" in gone.err
        assert "contracts withdraw orders" in gone.err
    finally:
        assert capture.stop() == 0


def test_running_capture_refuses_to_read_what_does_not_fit_its_contract(shop: Shop) -> None:
    """The next start would leave the table out, though it has just been read."""
    capture = shop.following()
    try:
        capture.says("snapshot of orders")
        until(lambda: boundaries(shop) == 1)
        shop.sql("ALTER TABLE orders RENAME v TO w")
        refused = shop.run("source", "snapshot", "orders")
        assert refused.code == 5 and "has no column v" in refused.err
        assert status(shop)["snapshots_asked_for"] == []
    finally:
        assert capture.stop() == 0


def test_range_of_a_table_that_is_left_out_is_refused(shop: Shop) -> None:
    assert shop.run(*ONCE).code == 0
    ParkedTables(LandingStore(shop.home / "landing", SOURCE).folder, 1).park({"orders": "A test."})
    refused = shop.run("source", "snapshot", "orders", "--from", "1")
    assert refused.code == 2 and "orders is left out, so all of it has to be read" in refused.err


def test_request_waits_for_the_next_capture_and_a_second_one_is_the_same(shop: Shop) -> None:
    assert shop.run(*ONCE).code == 0
    first = shop.run("source", "snapshot", "orders")
    assert "No capture is running" in first.out
    assert "had been requested already" in shop.run("source", "snapshot", "orders", "items").out
    assert status(shop)["snapshots_asked_for"] == ["items", "orders"]
    assert "orders: requested, not begun" in shop.run("source", "status").out
    assert shop.run(*ONCE).code == 0
    assert boundaries(shop) == 2 and status(shop)["snapshots_asked_for"] == []


def test_table_without_a_contract_is_refused_by_name(shop: Shop) -> None:
    assert shop.run(*ONCE).code == 0
    refused = shop.run("source", "snapshot", "orders", "invoices")
    assert (
        refused.code == 2
        and "'invoices' is the name of no table with a contract" in refused.err
        and f"{SOURCE}.items, {SOURCE}.orders" in refused.err
    )
    assert SnapshotRequests(LandingStore(shop.home / "landing", SOURCE).folder).read() == []


def test_range_of_keys_is_asked_for_by_its_bounds(shop: Shop) -> None:
    assert shop.run(*ONCE).code == 0
    first = shop.run("source", "snapshot", "orders", "--from", "01", "--to", "[2]")
    assert first.code == 0 and "orders, keys 1 to 2: requested." in first.out
    assert (
        "had been requested already"
        in shop.run("source", "snapshot", "orders", "--from", "1", "--to", "2").out
    )
    assert "orders, keys from 2: requested." in shop.run("source", "snapshot", "orders", "--from", "2").out
    asked = {"orders, keys 1 to 2", "orders, keys from 2"}
    assert set(status(shop)["snapshots_asked_for"]) == asked
    shown = shop.run("source", "status").out
    assert all(f"{each}: requested, not begun" in shown for each in asked)
    read = shop.run(*ONCE)
    assert read.code == 0 and "Landed the snapshot of a range of orders" in read.out + read.err
    assert status(shop)["snapshots_asked_for"] == [] and boundaries(shop) == 3


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        pytest.param(("orders", "items", "--from", "1"), "keys of one table", id="of two tables"),
        pytest.param(("orders", "--to", "[1"), "--to [1 is no JSON array", id="half an array"),
        pytest.param(("orders", "--to", "[null]"), "texts or whole numbers", id="no value"),
        pytest.param(("orders", "--from", "first"), "'first' is no value of column id", id="no number"),
        pytest.param(("orders", "--from", "2", "--to", "1"), "ends before it starts", id="swapped"),
    ],
)
def test_bounds_that_are_no_range_are_refused(shop: Shop, arguments: tuple[str, ...], why: str) -> None:
    assert shop.run(*ONCE).code == 0
    refused = shop.run("source", "snapshot", *arguments)
    assert refused.code == 2 and why in refused.err
    assert status(shop)["snapshots_asked_for"] == []


@pytest.mark.slow
def test_progress_of_an_interrupted_snapshot_is_told_with_rate_and_time_left(shop: Shop) -> None:
    # Orders, 493 rows, wait for items, which take two seconds.
    shop.sql("INSERT INTO items SELECT n, 'x' FROM generate_series(10, 407) n")
    shop.sql("INSERT INTO orders SELECT n, 'x' FROM generate_series(10, 500) n")
    with environment(**SLOWED):
        killed_at(shop, "landing.manifest.after@orders-000002", *ONCE)
        (orders,) = under_way(shop)
        assert (orders["chunks"], orders["chunks_landed"], orders["rows_landed"]) == (5, 3, 300)
        assert near_200(orders)
        assert orders["seconds_left"] == pytest.approx(200 / orders["rows_per_second"], abs=0.1)
        shown = shop.run("source", "status").out
        words = r"orders: 3 of 5 chunks, 300 rows, (\d+) rows/s, about (\d) s of reading left"
        told = re.search(words, shown)
        assert told, shown
        assert int(told[1]) == pytest.approx(orders["rows_per_second"], abs=1)
        assert int(told[2]) == pytest.approx(orders["seconds_left"], abs=1)
        # A pause of this time is no reading.
        time.sleep(2)
        killed_at(shop, "landing.manifest.after@orders-000003", *ONCE)
        (orders,) = under_way(shop)
        assert (orders["chunks_landed"], orders["rows_landed"]) == (4, 400) and near_200(orders)
        assert orders["seconds_left"] == pytest.approx(100 / orders["rows_per_second"], abs=0.1)
    assert shop.run(*ONCE).code == 0
    assert status(shop)["snapshots"] == [] and boundaries(shop) == 1


@pytest.mark.parametrize("ahead", ["1 hour", "-1 hour"])
def test_rate_is_told_from_the_first_chunk_on_whatever_the_clock_of_the_server_says(
    shop: Shop, ahead: str
) -> None:
    shop.sql(
        "CREATE SCHEMA off",
        "CREATE FUNCTION off.clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE"
        f" AS $$ SELECT pg_catalog.clock_timestamp() + interval '{ahead}' $$",
        f"GRANT USAGE ON SCHEMA off TO {ROLE}",
        f"ALTER ROLE {ROLE} IN DATABASE {shop.database} SET search_path = off, pg_catalog, public",
        "INSERT INTO items SELECT n, 'x' FROM generate_series(10, 500) n",
    )
    with environment(**SLOWED):
        killed_at(shop, "landing.manifest.after@items-000001", *ONCE)
        items, orders = under_way(shop)
    assert (items["chunks_landed"], items["rows_landed"]) == (2, 200) and near_200(items)
    assert (orders["chunks_landed"], orders["rows_per_second"], orders["seconds_left"]) == (0, None, None)
    assert "orders: 0 of 1 chunks, 0 rows, rate not known yet\n" in shop.run("source", "status").out


@pytest.mark.parametrize("times", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_request_killed_at_its_gates_is_obeyed_once_it_stands(shop: Shop, moment: str, times: int) -> None:
    assert shop.run(*ONCE).code == 0
    for _ in range(times):
        killed_at(shop, f"source.snapshot_request.{moment}", "source", "snapshot", "orders")
    assert shop.run("source", "snapshot", "orders").code == 0
    for _ in range(times):
        SnapshotRequests(LandingStore(shop.home / "landing", SOURCE).folder).write("orders", "again")
        killed_at(shop, f"source.snapshot_request_clear.{moment}", *ONCE)
    assert shop.run(*ONCE).code == 0
    assert boundaries(shop) == 2 and status(shop)["snapshots_asked_for"] == []
