"""A slot that somebody drops, moves, makes anew or lets run dry: a gap that is named, never a silent one."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from omnisupport_ingest.sources.postgres.session.errors import GapInSource, SlotMoved, SourceUnavailable
from omnisupport_ingest.sources.postgres.stream import reading
from omnisupport_ingest_tests.landing.batches import is_stream
from omnisupport_ingest_tests.sources.postgres.awkward import Shop
from omnisupport_ingest_tests.sources.postgres.shop_facts import landed_rows, same_as_source, status
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest, contract, folded
from omnisupport_ingest_tests.waiting import PATIENCE, until

COLUMNS = ("id", "v")
UNSEEN = "UPDATE tickets SET v = 'unseen' WHERE id = 1", "DELETE FROM tickets WHERE id = 2"


@pytest.fixture
def tickets(source: SourceUnderTest) -> SourceUnderTest:
    """A captured table ``tickets`` with a landed change."""
    source.sql("CREATE TABLE tickets (id int PRIMARY KEY, v text)")
    source.sql("INSERT INTO tickets VALUES (1, 'one'), (2, 'two'), (3, 'three')")
    source.tables.append(contract("tickets", COLUMNS))
    source.catch_up()
    source.sql("UPDATE tickets SET v = 'seen' WHERE id = 3")
    source.catch_up()
    source.wait_for_free_slot()
    return source


def is_a_gap_and_repaired(source: SourceUnderTest, problem: str) -> None:
    landed = source.store.batch_ids()
    for _ in range(2):
        with pytest.raises(GapInSource, match=problem) as gap:
            source.catch_up()
        assert "--new-epoch" in gap.value.fix
    assert source.store.batch_ids() == landed
    source.capture().begin_new_epoch("a test")
    source.catch_up()
    source.sql("UPDATE tickets SET v = 'later' WHERE id = 3")
    source.catch_up()
    assert folded(source.events(), "tickets") == source.rows("tickets", COLUMNS)


def run_dry(source: SourceUnderTest) -> None:
    """Write WAL until the server gives up the slot."""
    source.sql("ALTER SYSTEM SET max_slot_wal_keep_size = '32MB'", "SELECT pg_reload_conf()")
    try:
        state = f"SELECT wal_status FROM pg_replication_slots WHERE slot_name = '{source.slot}'"
        for _ in range(20):
            source.sql("SELECT pg_switch_wal()", "CREATE TABLE filling ()", "DROP TABLE filling")
            source.sql("CHECKPOINT")
            if source.query(state) == [("lost",)]:
                return
        pytest.fail("the server has kept the WAL")
    finally:
        source.sql("ALTER SYSTEM RESET max_slot_wal_keep_size", "SELECT pg_reload_conf()")


def test_slot_whose_wal_the_server_has_removed_is_a_gap(tickets: SourceUnderTest) -> None:
    tickets.sql(*UNSEEN)
    run_dry(tickets)
    is_a_gap_and_repaired(tickets, "has removed WAL")


def test_slot_that_nobody_has_read_for_too_long_is_a_gap_that_says_so(tickets: SourceUnderTest) -> None:
    if tickets.server_version() < 180000:
        pytest.skip("slots are given up for idleness by PostgreSQL 18 and newer")
    tickets.sql(*UNSEEN)
    state = f"SELECT invalidation_reason FROM pg_replication_slots WHERE slot_name = '{tickets.slot}'"
    tickets.sql("ALTER SYSTEM SET idle_replication_slot_timeout = '1s'", "SELECT pg_reload_conf()")
    try:

        def given_up() -> bool:
            # Looked for at a checkpoint, which does nothing where nothing was written.
            tickets.sql("SELECT pg_logical_emit_message(false, 'test', '')", "CHECKPOINT")
            return tickets.query(state) == [("idle_timeout",)]

        until(given_up)
    finally:
        tickets.sql("ALTER SYSTEM RESET idle_replication_slot_timeout", "SELECT pg_reload_conf()")
    is_a_gap_and_repaired(tickets, "nobody read it for longer than idle_replication_slot_timeout")


def test_slot_given_up_while_capture_reads_it_ends_capture_and_is_a_gap(tickets: SourceUnderTest) -> None:
    before = len(tickets.store.batch_ids())
    process = tickets.capture_process()
    try:
        tickets.sql("INSERT INTO tickets VALUES (5, 'five')")
        until(lambda: any(is_stream(name) for name in tickets.store.batch_ids()[before:]))
        process.send_signal(signal.SIGSTOP)
        tickets.sql(*UNSEEN)
        run_dry(tickets)
        process.send_signal(signal.SIGCONT)
        _, errors = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert process.returncode == SourceUnavailable.exit_code, errors
    is_a_gap_and_repaired(tickets, "has removed WAL")


def test_slot_that_somebody_has_advanced_is_a_gap(tickets: SourceUnderTest) -> None:
    tickets.sql(*UNSEEN, f"SELECT pg_replication_slot_advance('{tickets.slot}', pg_current_wal_lsn())")
    is_a_gap_and_repaired(tickets, "read by somebody else")


@pytest.mark.parametrize("put_back", [False, True], ids=["new epoch", "put back"])
@pytest.mark.parametrize("mode", [None, "when_needed"])
def test_batches_that_are_missing_at_the_end_of_landing_are_a_gap(
    tickets: SourceUnderTest, mode: str | None, put_back: bool
) -> None:
    """The server does not send again what was confirmed to it."""
    tickets.sql("DELETE FROM tickets WHERE id = 1", "UPDATE tickets SET v = 'new' WHERE id = 2")
    tickets.catch_up()
    last = max(tickets.store.folder.glob("manifests/*-s-*.json"))
    batch = last.read_bytes()
    last.unlink()
    if mode is not None:
        tickets.overrides["snapshot_mode"] = mode
    landed, confirmed = tickets.store.batch_ids(), tickets.confirmed()
    for _ in range(2):
        with pytest.raises(SlotMoved, match="or batches are missing at the end of landing") as moved:
            tickets.catch_up()
        assert moved.value.exit_code == 7
        for way in ("no copy of this home captures through it", "to put them back", "--new-epoch"):
            assert way in moved.value.fix
        # No mode begins an epoch, which would drop the slot of whoever reads it.
        assert [epoch.number for epoch in tickets.store.epochs()] == [1]
        assert tickets.store.batch_ids() == landed and tickets.confirmed() == confirmed
    if put_back:
        last.write_bytes(batch)
        tickets.sql("UPDATE tickets SET v = 'later' WHERE id = 3")
        tickets.catch_up()
        assert [epoch.number for epoch in tickets.store.epochs()] == [1]
        assert folded(tickets.events(), "tickets") == tickets.rows("tickets", COLUMNS)
        return
    is_a_gap_and_repaired(tickets, "or batches are missing at the end of landing")
    assert [epoch.number for epoch in tickets.store.epochs()] == [1, 2]


@pytest.mark.parametrize(
    "meanwhile",
    [
        ("SELECT pg_replication_slot_advance('{slot}', pg_current_wal_lsn())",),
        (
            "SELECT pg_drop_replication_slot('{slot}')",
            "SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')",
        ),
    ],
    ids=["advanced", "made anew"],
)
def test_slot_that_moves_between_the_proof_and_the_start_of_the_stream_is_a_gap(
    tickets: SourceUnderTest, meanwhile: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server would pass over what lies below, without an error."""
    connects = reading.connect_replication

    def late(*given: Any, **named: Any) -> Any:
        tickets.sql(*UNSEEN, *(each.format(slot=tickets.slot) for each in meanwhile))
        monkeypatch.undo()
        return connects(*given, **named)

    tickets.sql("UPDATE tickets SET v = 'waiting' WHERE id = 3")
    monkeypatch.setattr(reading, "connect_replication", late)
    with pytest.raises(GapInSource, match="read by somebody else"):
        tickets.catch_up()
    is_a_gap_and_repaired(tickets, "read by somebody else")


REPLACED = {
    "physical": ("SELECT pg_create_physical_replication_slot('{slot}')", "is gone"),
    "the same kind": ("SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')", "made anew"),
}


@pytest.mark.parametrize(("made", "problem"), REPLACED.values(), ids=REPLACED.keys())
def test_slot_made_anew_under_its_name_is_a_gap(tickets: SourceUnderTest, made: str, problem: str) -> None:
    tickets.sql(f"SELECT pg_drop_replication_slot('{tickets.slot}')", *UNSEEN)
    try:
        tickets.sql(made.format(slot=tickets.slot))
        is_a_gap_and_repaired(tickets, problem)
    finally:
        tickets.sql(
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots"
            f" WHERE slot_name = '{tickets.slot}' AND NOT active"
        )


@pytest.mark.parametrize("what", ["drop", "advance"])
def test_slot_dropped_or_advanced_while_capture_connects_again_ends_it_as_a_gap(
    shop: Shop, what: str
) -> None:
    running = shop.following()
    running.says("snapshot of orders")
    shop.sql("INSERT INTO items VALUES (3, 'three')")
    until(lambda: landed_rows(shop) == 1)
    slot = shop.database
    actions = {
        "drop": f"SELECT pg_drop_replication_slot('{slot}')",
        "advance": f"SELECT pg_replication_slot_advance('{slot}', pg_current_wal_insert_lsn())",
    }
    shop.sql(
        f"SELECT pg_terminate_backend(active_pid, 5000) FROM pg_replication_slots WHERE slot_name = '{slot}'",
        "INSERT INTO items VALUES (4, 'unseen')",
        "DELETE FROM orders WHERE id = 1",
        "SELECT pg_switch_wal()",
        actions[what],
    )
    assert running.process.wait(timeout=PATIENCE) == GapInSource.exit_code
    error, way = {
        "drop": ("GapInSource", "Find out what happened to the source first"),
        "advance": ("SlotMoved", "no copy of this home captures through it"),
    }[what]
    for _ in range(2):
        last = status(shop, code=1)["last_error"]
        assert last["error"] == error and way in last["fix"] and "--new-epoch" in last["fix"]
        # Never by itself.
        assert shop.run("capture", "--once").code == GapInSource.exit_code
        assert landed_rows(shop) == 1
    assert shop.run("source", "repair", "--mode", "resnapshot", "--reason", "a test").code == 0
    assert shop.run("capture", "--once").code == 0
    same_as_source(shop)
    assert status(shop)["state"] == "STOPPED"
