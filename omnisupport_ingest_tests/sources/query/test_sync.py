"""What a sync makes of the cursor and the event time that a contract names, on a real server."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

from omnisupport_ingest.sources.query.postgres import PostgresReader
from omnisupport_ingest.sources.query.state import QueryState
from omnisupport_ingest.sources.query.sync import sync
from omnisupport_ingest_tests.sources.query.tickets import Desk, contract


def test_the_event_time_decides_the_window_and_a_version_stays_in_its_first_one(desk: Desk):
    happened = {
        "type": ["string", "null"],
        "x-pg-type": "timestamp with time zone",
        "description": "When it happened.",
    }
    policy = {"field": "updated_at", "lookback": "PT5M", "event_time": "happened_at"}
    desk.table = contract(policy, happened_at=happened)
    desk.run("ALTER TABLE tickets ADD happened_at timestamptz")
    desk.run(
        "INSERT INTO tickets VALUES (1, 'one', now(), '2026-11-20 10:30+00'),"
        " (2, 'two', now(), '2026-11-20 08:10+00'), (3, 'long ago', now(), '1999-12-31 23:59+00'),"
        " (4, 'at no time', '2026-11-21 07:00+00', NULL)"
    )
    desk.sync()
    windows = {each["key"]: each["window"] for each in desk.events() if each["op"] == "r"}
    first = desk.grid.key_of(desk.grid.first, desk.grid.first)
    assert windows == {
        '["1"]': "2026-11-20T1000",
        '["2"]': "2026-11-20T0800",
        '["3"]': first,
        '["4"]': "2026-11-21T0700",
    }
    # The same version with another time is a contradiction, which dedupe finds within one window.
    desk.run("UPDATE tickets SET happened_at = '2026-11-20 09:30+00' WHERE id = 1")
    assert desk.sync().tables[0].landed == 1
    of_one = [each for each in desk.events() if each["key"] == '["1"]']
    assert [each["window"] for each in of_one] == ["2026-11-20T1000"] * 2
    assert len({each["ordinal"] for each in of_one}) == 1


def test_a_number_is_a_cursor_with_a_lookback_in_numbers(desk: Desk):
    version = {"type": ["integer", "null"], "x-pg-type": "bigint", "description": "Grows with each change."}
    policy = {"field": "version", "lookback": 10, "event_time": "updated_at"}
    desk.table = contract(policy, version=version)
    desk.run("ALTER TABLE tickets ADD version bigint")
    desk.run("CREATE INDEX ON tickets (version, id)")
    desk.run("INSERT INTO tickets VALUES (1, 'one', now(), 100)")
    desk.sync()
    desk.run(
        "INSERT INTO tickets VALUES (2, 'late', now(), 90), (3, 'too late', now(), 89),"
        " (4, 'new', now(), 101)"
    )
    report = desk.sync().tables[0]
    assert (report.again, report.cursor) == (1, "101")
    assert desk.subjects() == {1: "one", 2: "late", 4: "new"}
    desk.run("UPDATE tickets SET subject = 'changed', version = 102 WHERE id = 1")
    desk.sync()
    assert desk.subjects()[1] == "changed"


def test_a_table_that_the_server_refuses_keeps_no_other_table_from_landing(desk: Desk):
    desk.run("INSERT INTO tickets (id, subject) VALUES (1, 'one')")
    nowhere = replace(desk.table, name="nowhere", table="nowhere")
    inlet = replace(desk.inlet(), tables=(nowhere, desk.table))
    with closing(PostgresReader(desk.dsn)) as reader, QueryState(desk.store.folder) as state:
        report = sync(inlet, reader, state)
    (fault,) = report.faults
    assert "public.nowhere" in fault.problem
    assert [each.landed for each in report.tables] == [0, 1]
    assert not report.finished
