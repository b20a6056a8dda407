"""``source repair``: after a gap capture goes on as a person decides, and what was lost has a name."""

from __future__ import annotations

import pytest

from omnisupport_ingest.landing.accepted_losses import AcceptedLosses
from omnisupport_ingest.landing.completeness import incomplete_now
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.sources.postgres.session.errors import GapInSource
from omnisupport_ingest_tests.sources.postgres.awkward import SOURCE, Shop
from omnisupport_ingest_tests.sources.postgres.shop_facts import (
    killed_at,
    landed_rows,
    same_as_source,
    status,
)

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
