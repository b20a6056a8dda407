"""``source repair``: after a gap capture goes on as a person decides, and what was lost has a name."""

from __future__ import annotations

import json
import threading
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest

from omnisupport_ingest.contracts.model import BLOCK, TableContract
from omnisupport_ingest.landing.accepted_losses import AcceptedLosses
from omnisupport_ingest.landing.completeness import incomplete_now
from omnisupport_ingest.landing.lost_changes import LostChanges
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.read.dimension_rows import DimensionRows
from omnisupport_ingest.sources.postgres.capture.parked import ParkedTables
from omnisupport_ingest.sources.postgres.session.errors import (
    GapInSource,
    PreflightFailed,
    TableMissedChanges,
)
from omnisupport_ingest.sources.postgres.snapshot.requests import SnapshotRequests
from omnisupport_ingest_tests.sources.postgres.awkward import SOURCE, Shop, contract_document
from omnisupport_ingest_tests.sources.postgres.conftest import source as source
from omnisupport_ingest_tests.sources.postgres.folded_lake import FoldedLake
from omnisupport_ingest_tests.sources.postgres.shop_facts import (
    killed_at,
    landed_rows,
    same_as_source,
    status,
)
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest, contract

ONCE = ("capture", "--once")


def store(shop: Shop) -> LandingStore:
    return LandingStore(shop.home / "landing", SOURCE)


def snapshots(shop: Shop, epoch: int) -> set[str]:
    """The tables whose snapshot has landed whole in ``epoch``."""
    batches = store(shop).manifests()
    return {
        each.chunk.table for each in batches if each.epoch == epoch and each.chunk and each.chunk.boundary
    }


@pytest.fixture
def without_slot(shop: Shop) -> Shop:
    """A shop that was captured, and whose slot is gone with changes that nobody captured."""
    assert shop.run(*ONCE).code == 0
    shop.sql(
        f"SELECT pg_drop_replication_slot('{shop.database}')",
        "UPDATE items SET v = 'unseen' WHERE id = 1",
        "DELETE FROM orders WHERE id = 2",
    )
    assert shop.run(*ONCE).code == GapInSource.exit_code
    return shop


def test_resnapshot_reads_every_table_again_in_a_new_epoch(without_slot: Shop) -> None:
    shop = without_slot
    done = shop.run("source", "repair", "--mode", "resnapshot", "--reason", "slot dropped")
    assert done.code == 0 and "reads every table again" in done.out
    assert shop.run(*ONCE).code == 0
    assert snapshots(shop, 2) == {"items", "orders"}
    assert store(shop).epochs()[1].reason == "slot dropped"
    same_as_source(shop)
    assert status(shop)["state"] == "STOPPED"


def test_accepted_loss_is_named_and_the_stream_goes_on_without_reading_anything(without_slot: Shop) -> None:
    shop = without_slot
    end = status(shop, code=1)["landed"]["lsn"]
    done = shop.run("source", "repair", "--mode", "accept-loss", "--reason", "a test system", "--by", "anna")
    assert done.code == 0 and f"from {end} to " in done.out and "accepted by anna" in done.out
    shop.sql("UPDATE items SET v = 'seen' WHERE id = 2")
    assert shop.run(*ONCE).code == 0
    assert snapshots(shop, 2) == set() and landed_rows(shop) == 1
    loss = AcceptedLosses(store(shop).folder).of(2)
    assert loss is not None and (loss.by, loss.reason, str(loss.lost_from)) == ("anna", "a test system", end)
    # Never green: the table is incomplete until somebody has it read.
    assert incomplete_now(store(shop).manifests(), "items", 2, ()) is not None
    assert shop.run("source", "snapshot", "items").code == 0
    assert shop.run(*ONCE).code == 0
    assert snapshots(shop, 2) == {"items"}
    assert incomplete_now(store(shop).manifests(), "items", 2, ()) is None


def test_table_that_was_never_read_is_read_in_an_epoch_with_an_accepted_loss_too(without_slot: Shop) -> None:
    shop = without_slot
    assert shop.run("source", "repair", "--mode", "accept-loss", "--reason", "a test").code == 0
    shop.sql("CREATE TABLE late (id int PRIMARY KEY, v text)", "GRANT SELECT ON late TO capture_role")
    shop.sql(f"ALTER PUBLICATION {shop.database} ADD TABLE late")
    shop.contract("late")
    assert shop.run(*ONCE).code == 0
    assert snapshots(shop, 2) == {"late"}


@pytest.mark.parametrize("times", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_repair_killed_at_its_note_leaves_an_epoch_that_capture_goes_on_with(
    without_slot: Shop, moment: str, times: int
) -> None:
    shop = without_slot
    asked = ("source", "repair", "--mode", "accept-loss", "--reason", "a test")
    for _ in range(times):
        killed_at(shop, f"landing.accepted_loss.{moment}", *asked)
    assert shop.run(*ONCE).code == 0
    # Without the note nothing was accepted: everything is read.
    assert snapshots(shop, 1 + times) == ({"items", "orders"} if moment == "before" else set())


def test_repair_without_a_reason_or_with_another_mode_is_refused(shop: Shop) -> None:
    assert shop.run("source", "repair", "--mode", "resnapshot").code == 2
    assert shop.run("source", "repair", "--mode", "hope", "--reason", "x").code == 2


@pytest.mark.parametrize("mode", ["resnapshot", "accept-loss"])
def test_repair_names_the_tables_that_the_new_epoch_leaves_out(
    shop: Shop, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One does not fit its contract any more; the other has changed, and its contract wants a decision."""
    decided = contract_document("orders")
    decided["x-cdc"]["evolution"] = "block"
    (shop.contracts / "orders.json").write_text(json.dumps(decided))
    shop.sql("CREATE TABLE late (id int PRIMARY KEY, v text)", "GRANT SELECT ON late TO capture_role")
    shop.sql(f"ALTER PUBLICATION {shop.database} ADD TABLE late")
    shop.contract("late")
    assert shop.run(*ONCE).code == 0
    shop.sql("ALTER TABLE items RENAME v TO w", "ALTER TABLE orders ADD note text")
    shop.run(*ONCE)
    shop.sql(f"SELECT pg_drop_replication_slot('{shop.database}')")
    caplog.clear()
    done = shop.run("source", "repair", "--mode", mode, "--reason", "slot dropped")
    assert done.code == PreflightFailed.exit_code, done.output
    assert "Epoch 2 of" in done.out
    assert "public.items has no column v" in done.output
    assert "orders is left out" in caplog.text and "column added: note text" in caplog.text
    # And so it comes.
    assert shop.run(*ONCE).code == PreflightFailed.exit_code
    assert snapshots(shop, 2) == ({"late"} if mode == "resnapshot" else set())
    assert shop.run("source", "snapshot", "orders").code == 0
    shop.sql("ALTER TABLE items RENAME w TO v")
    assert shop.run(*ONCE).code == 0
    assert "orders" in snapshots(shop, 2)
    # Where the loss was accepted, nothing is read unless somebody wants it, and the table stays incomplete.
    assert ("items" in snapshots(shop, 2)) == (mode == "resnapshot")
    assert (incomplete_now(store(shop).manifests(), "items", 2, ()) is None) == (mode == "resnapshot")


@pytest.mark.parametrize("others", [1, 0])
def test_recovery_compares_the_tables_that_fit_and_names_the_others(
    source: SourceUnderTest, tmp_path: Path, others: int
) -> None:
    for table in ("changed", "stays")[: 1 + others]:
        source.sql(
            f"CREATE TABLE {table} (id int PRIMARY KEY, v text)", f"INSERT INTO {table} VALUES (1, 'a')"
        )
        source.tables.append(contract(table, ("id", "v")))
    source.tables[0] = replace(source.tables[0], evolution=BLOCK)
    source.catch_up()
    source.sql("ALTER TABLE changed ADD w text", f"SELECT pg_drop_replication_slot('{source.slot}')")
    capture, done = source.capture(), list[str]()
    capture.recover(
        "a test", FoldedLake(source, tmp_path), threading.Event(), lambda one: done.append(one.table)
    )
    assert done == ["stays"] * others
    assert isinstance(capture.left_out, TableMissedChanges)
    assert "The schema of public.changed has changed: column added: w text" in capture.left_out.problem
    assert set(ParkedTables(source.store.folder, 2).all()) == {"changed"}
    # Somebody has looked: it is read whole.
    SnapshotRequests(source.store.folder).write("changed", "seen")
    source.catch_up()
    assert ParkedTables(source.store.folder, 2).all() == {}
    lost = LostChanges(source.store.folder, 2).all()
    assert incomplete_now(source.manifests(), "changed", 2, lost) is None


def test_recovery_accepts_no_change_that_came_meanwhile_and_wants_a_decision(
    source: SourceUnderTest, tmp_path: Path
) -> None:
    for table in ("decided", "stays"):
        source.sql(
            f"CREATE TABLE {table} (id int PRIMARY KEY, v text)", f"INSERT INTO {table} VALUES (1, 'a')"
        )
        source.tables.append(replace(contract(table, ("id", "v")), evolution=BLOCK))
    source.catch_up()
    source.sql(f"SELECT pg_drop_replication_slot('{source.slot}')")

    class Changing(FoldedLake):
        def rows(self, table: TableContract) -> AbstractContextManager[DimensionRows]:
            if table.name == "decided":
                source.sql("ALTER TABLE decided ADD w text")
            return super().rows(table)

    capture = source.capture()
    assert capture.recover("a test", Changing(source, tmp_path), threading.Event(), lambda _: None)[1]
    with pytest.raises(TableMissedChanges, match="column added: w text"):
        source.catch_up()
    assert set(ParkedTables(source.store.folder, 2).all()) == {"decided"}


def test_repair_names_every_table_where_none_can_be_captured(source: SourceUnderTest) -> None:
    """One has changed and waits for a decision, the other does not fit its contract."""
    for table in ("decided", "renamed"):
        source.sql(f"CREATE TABLE {table} (id int PRIMARY KEY, v text)")
        source.tables.append(contract(table, ("id", "v")))
    source.tables[0] = replace(source.tables[0], evolution=BLOCK)
    source.catch_up()
    source.sql("ALTER TABLE decided ADD w text", "ALTER TABLE renamed RENAME v TO w")
    source.sql(f"SELECT pg_drop_replication_slot('{source.slot}')")
    capture = source.capture()
    capture.begin_new_epoch("a test")
    assert isinstance(capture.left_out, TableMissedChanges)
    assert "column added: w text" in capture.left_out.problem
    assert "public.renamed has no column v" in capture.left_out.problem
