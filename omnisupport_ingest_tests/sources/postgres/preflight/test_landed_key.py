"""A contract that gives a table another key than what has landed: the table waits until it is read by it."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace

import pytest

from omnisupport_ingest.contracts.landed_keys import KeysOfTable, LandedKeys
from omnisupport_ingest.sources.postgres.preflight.findings import Finding, Severity
from omnisupport_ingest.sources.postgres.preflight.source_check import check_source
from omnisupport_ingest.sources.postgres.session.errors import PreflightFailed, TableMissedChanges
from omnisupport_ingest.sources.postgres.snapshot.landed_key import behind_their_snapshots
from omnisupport_ingest.sources.postgres.snapshot.requests import SnapshotRequests
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest, contract, folded

COLUMNS = ("tenant", "id", "v")


@pytest.fixture
def tickets(source: SourceUnderTest) -> SourceUnderTest:
    """A captured table ``tickets``, its key two of its columns."""
    source.sql("CREATE TABLE tickets (tenant int, id int, v text, PRIMARY KEY (tenant, id))")
    source.sql("INSERT INTO tickets SELECT g % 3, g, 'old' FROM generate_series(1, 20) g")
    source.tables.append(contract("tickets", COLUMNS, key=("tenant", "id")))
    source.catch_up()
    source.wait_for_free_slot()
    return source


@pytest.mark.parametrize("seen", ["read", "read, and streamed"])
@pytest.mark.parametrize("key", [("id",), ("id", "tenant"), ("tenant", "id", "v")], ids=" ".join)
def test_another_key_than_what_has_landed_is_refused_and_the_old_one_goes_on(
    tickets: SourceUnderTest, key: tuple[str, ...], seen: str
) -> None:
    if seen != "read":
        tickets.sql("UPDATE tickets SET v = 'streamed' WHERE id = 4")
        tickets.catch_up()
    (before,) = tickets.tables
    landed = tickets.store.batch_ids()
    tickets.sql("UPDATE tickets SET v = 'new' WHERE id = 5", "DELETE FROM tickets WHERE id = 6")
    tickets.tables[0] = replace(before, key=key)
    for begin in (tickets.catch_up, lambda: tickets.capture().begin_new_epoch("another key")):
        with pytest.raises(PreflightFailed) as refused:
            begin()
        assert f"the key ({', '.join(key)})" in str(refused.value)
        assert "has the key (tenant, id)" in str(refused.value)
        assert "omnisupport-ingest source snapshot tickets" in refused.value.fix
    found = check_source(tickets.dsn, tickets.settings, tickets.home, tickets.tables)
    assert found[0].check == "landed_key"
    assert tickets.store.batch_ids() == landed and len(tickets.store.epochs()) == 1
    keys = LandedKeys(tickets.store.folder).all()
    assert keys == {"public.tickets": KeysOfTable.first(("tenant", "id"))}
    tickets.tables[0] = before
    tickets.catch_up()
    of_source = {
        f'["{tenant}", "{id_}"]': v for tenant, id_, v in tickets.query("SELECT tenant, id, v FROM tickets")
    }
    in_lake = {key: row["v"] for key, row in folded(tickets.events(), "tickets").items()}
    assert in_lake == of_source


@pytest.mark.parametrize("written", [True, False], ids=["written to", "silent"])
@pytest.mark.parametrize("times", [1, 2], ids=["once", "and back"])
def test_with_a_requested_snapshot_the_table_lands_by_its_new_key_and_the_key_comes_into_force(
    tickets: SourceUnderTest, times: int, written: bool
) -> None:
    former, new = ("tenant", "id"), ("id", "tenant")
    tickets.sql("ALTER TABLE tickets ADD UNIQUE (id, tenant)")
    for key in (new, former)[:times]:
        # Changes that the stream has yet to bring land with the key of the contract they are read by.
        if written:
            tickets.sql("UPDATE tickets SET v = 'later' WHERE id = 5", "DELETE FROM tickets WHERE id = 6")
        tickets.tables[0] = replace(tickets.tables[0], key=key)
        SnapshotRequests(tickets.store.folder).write("tickets", "another key")
        tickets.catch_up()
        tickets.wait_for_free_slot()
    keys = LandedKeys(tickets.store.folder).all()["public.tickets"]
    assert [each.key for each in keys.eras] == [former, new, former][: times + 1]
    assert (keys.in_force, keys.waits) == (times, False)
    changed = replace(tickets.tables[0], key_eras=keys.eras, key_era=keys.in_force)
    starts = [(each.epoch, each.commit_lsn.value, each.ordinal) for each in keys.eras]
    for event in tickets.events("c", "u", "d", "r"):
        at = event.epoch, event.commit_lsn, event.ordinal
        era = sum(at >= start for start in starts) - 1
        assert event.key is not None and event.key.count(",") == 1
        if event.after is not None:
            row = json.loads(event.after)
            assert json.loads(event.key) == [row[name] for name in keys.eras[era].key]
    assert changed.other_keys == (((0, 0, 0), starts[times]),)


@pytest.mark.drawn(1)
@pytest.mark.slow
@pytest.mark.parametrize("point", ["before", "after", "before:2", "after:2"])
def test_a_capture_that_is_killed_while_it_records_a_key_changes_it_at_its_next_start(
    tickets: SourceUnderTest, point: str
) -> None:
    """First where the key begins, and after the snapshot that it is in force."""
    tickets.sql("ALTER TABLE tickets ADD UNIQUE (id, tenant)", "UPDATE tickets SET v = 'later' WHERE id = 5")
    tickets.tables[0] = replace(tickets.tables[0], key=("id", "tenant"))
    SnapshotRequests(tickets.store.folder).write("tickets", "another key")
    tickets.killed_at(f"source.landed_keys.{point}")
    tickets.sql("DELETE FROM tickets WHERE id = 6")
    tickets.wait_for_free_slot()
    tickets.catch_up()
    keys = LandedKeys(tickets.store.folder).all()["public.tickets"]
    assert [each.key for each in keys.eras] == [("tenant", "id"), ("id", "tenant")]
    assert not keys.waits
    start = keys.eras[1]
    begins = start.epoch, start.commit_lsn.value, start.ordinal
    events = [each for each in tickets.events() if (each.epoch, each.commit_lsn, each.ordinal) >= begins]
    of_source = {
        f'["{id_}", "{tenant}"]': v for tenant, id_, v in tickets.query("SELECT tenant, id, v FROM tickets")
    }
    assert {key: row["v"] for key, row in folded(events, "tickets").items()} == of_source


@pytest.mark.slow
def test_a_table_that_is_alone_takes_another_key_once_the_stream_has_passed_its_last_snapshot(
    tickets: SourceUnderTest,
) -> None:
    """What was read by the former key lies above the stream, which only a capture that runs moves on."""
    tickets.sql("ALTER TABLE tickets ADD UNIQUE (id, tenant)")
    for number, key in enumerate([("id", "tenant"), ("tenant", "id")]):
        tickets.sql(f"UPDATE tickets SET v = 'change {number}' WHERE id = 5")
        tickets.tables[0] = replace(tickets.tables[0], key=key)
        SnapshotRequests(tickets.store.folder).write("tickets", "another key")
        if not number:
            tickets.killed_at("source.landed_keys.after:2")
            tickets.wait_for_free_slot()
    waits = behind_their_snapshots(tickets.store, tickets.store.current_epoch(), {"tickets"})
    assert "tickets" in waits, "the stream has passed it, which this test is not about"
    for _ in range(2):
        with suppress(TableMissedChanges):
            tickets.catch_up()
        tickets.wait_for_free_slot()
    keys = LandedKeys(tickets.store.folder).all()["public.tickets"]
    assert (keys.newest, keys.waits) == (("tenant", "id"), False)


@pytest.mark.slow
def test_a_key_that_nothing_is_to_read_the_table_by_is_named(tickets: SourceUnderTest) -> None:
    """The request went away after the key had begun: the lake would show the former one without end."""
    tickets.sql("ALTER TABLE tickets ADD UNIQUE (id, tenant)")
    tickets.tables[0] = replace(tickets.tables[0], key=("id", "tenant"))
    requests = SnapshotRequests(tickets.store.folder)
    requests.write("tickets", "another key")
    tickets.killed_at("source.landed_keys.after")
    tickets.wait_for_free_slot()

    def named() -> list[Finding]:
        found = check_source(tickets.dsn, tickets.settings, tickets.home, tickets.tables)
        return [each for each in found if each.check == "landed_key"]

    assert named() == []
    for each in requests.read():
        requests.clear(each)
    [warning] = named()
    assert warning.severity is Severity.WARNS and "source snapshot tickets" in warning.fix
    requests.write("tickets", "another key")
    tickets.catch_up()
    assert named() == [] and not LandedKeys(tickets.store.folder).all()["public.tickets"].waits
