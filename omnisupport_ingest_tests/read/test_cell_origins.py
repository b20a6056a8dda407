"""Why a cell has its value: the event that is named is the one that the oracle names, on drawn histories."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from omnisupport_ingest.cdc.event_fold import TableColumns
from omnisupport_ingest.read.cell_origins import KeyEvent, Role, origins_of
from omnisupport_ingest_tests.cdc import kernels
from omnisupport_ingest_tests.cdc.test_kernel_fold import TABLE, drawn, oracle_states
from omnisupport_ingest_tests.examples import examples
from omnisupport_ingest_tests.oracle.histories import SHAPE
from omnisupport_ingest_tests.oracle.oracle import current_state

randoms = st.integers(0, (1 << 32) - 1).map(Random)

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
NOTES = TableColumns(("id", "title", "body"), ("id",))


def told(events, table) -> list[KeyEvent]:  # type: ignore[no-untyped-def]
    """Drawn ``events`` as the lake has them, in one window; equal ones count once."""
    spoken = [each for each in dict.fromkeys(map(_Whole, events)) if each.event.table == table.oracle.name]
    return [each.told(table) for each in spoken]


class _Whole:
    """An event of the oracle, equal to another of the same content."""

    def __init__(self, event) -> None:  # type: ignore[no-untyped-def]
        self.event = event
        self.same = (event.at, event.content, event.identity, event.quarantined)

    def __hash__(self) -> int:
        return hash(self.event.at)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Whole) and self.same == other.same

    def told(self, table) -> KeyEvent:  # type: ignore[no-untyped-def]
        event = self.event
        after = kernels.image_text(event.after, event.key, table)
        if event.scope is not None:
            after = kernels.scope_text(event.scope)
        return KeyEvent(
            window="w0",
            position=tuple(event.at),
            op=event.op,
            key=kernels.key_text(event.key),
            source_ts=event.source_ts,
            batch_id="b",
            landed_at=event.source_ts,
            before=kernels.image_text(event.before, event.moved_from or event.key, table),
            after=after,
            unchanged=tuple(sorted(event.unchanged)),
            moved_from_key=kernels.key_text(event.moved_from),
            identity=event.identity,
            withheld=event.quarantined,
        )


@settings(max_examples=examples(160))
@given(randoms)
def test_the_event_that_is_named_is_the_one_that_decides_by_the_oracle(rng: Random) -> None:
    events = drawn(rng, withheld=rng.random() < 0.6)
    lake, rows, states = told(events, TABLE), current_state(events, SHAPE), oracle_states(events)
    for key, row in rows.items():
        if states[key].doubtful or (row.ended and any(each.quarantined for each in events)):
            continue
        found = origins_of(lake, kernels.key_text(key) or "", TABLE.shape)
        assert found is not None
        assert (found.ended_by is not None) == row.ended
        if row.deleted_at is not None and found.ended_by is not None:
            assert found.ended_by.position == row.deleted_at
        assert found.last.position == row.last or row.ended
        for name in set(SHAPE.columns) - set(TABLE.key):
            origin = found.columns[name]
            assert origin.resolved == (name in row.cells), name
            if name not in row.cells:
                continue
            cell = row.cells[name]
            assert origin.event is not None
            assert origin.event.position == cell.decided_by.at, name
            assert origin.value == cell.value
            assert found.role(origin.event, name) is Role.DECIDES
            assert [each for each in lake if found.role(each, name) is Role.DECIDES] == [origin.event]


def event(op: str, lsn: int, after: str | None = None, **facts: object) -> KeyEvent:
    at = NOON + timedelta(seconds=lsn)
    key = None if op in "tb" else str(facts.pop("key", '["1"]'))
    return KeyEvent("w", (1, lsn, 0), op, key, at, "b", at, after=after, **facts)  # type: ignore[arg-type]


def roles(events: list[KeyEvent], column: str, key: str = '["1"]') -> dict[int, Role]:
    found = origins_of(events, key, NOTES)
    assert found is not None
    return {each.position[1]: found.role(each, column) for each in events}


def test_every_loser_says_why_it_lost() -> None:
    events = [
        event("c", 10, '{"id":"1","title":"first life","body":"x"}'),
        event("d", 20),
        event("c", 30, '{"id":"1","title":"second life","body":"long"}'),
        event("u", 40, '{"id":"1","title":"renamed"}', unchanged=("body",)),
        event("u", 50, '{"id":"1","title":"bad","body":"bad"}', withheld=True),
        event("u", 60, '{"id":"1","title":"last"}', unchanged=("body",)),
    ]
    assert roles(events, "title") == {
        10: Role.EARLIER_LIFE,
        20: Role.NO_VALUES,
        30: Role.OLDER,
        40: Role.OLDER,
        50: Role.WITHHELD,
        60: Role.DECIDES,
    }
    hidden = roles(events, "body")
    assert (hidden[50], hidden[60]) == (Role.HIDES, Role.NOT_SENT)


def test_a_row_that_is_older_than_a_column_has_its_default_by_the_event_that_began_it() -> None:
    columns = TableColumns(("id", "title", "size", "note"), ("id",), (("size", "0"), ("note", "none yet")))
    events = [
        event("c", 10, '{"id":"1","title":"a"}', unchanged=("note",)),
        event("d", 20),
        event("r", 30, '{"id":"1","title":"b"}'),
        event("u", 40, '{"id":"1","title":"c","size":"7"}'),
        event("u", 50, '{"id":"1","title":"d"}'),
    ]
    found = origins_of(events, '["1"]', columns)
    assert found is not None
    told = {name: (each.event, each.value, each.by_default) for name, each in found.columns.items()}
    assert told == {
        "title": (events[4], "d", False),
        "size": (events[3], "7", False),
        "note": (events[2], "none yet", True),
    }
    assert found.role(events[2], "note") is Role.DECIDES
    earlier = origins_of(events[:1], '["1"]', columns)
    assert earlier is not None
    # The table had this one, and it was not sent.
    assert (earlier.columns["size"].value, earlier.columns["note"].resolved) == ("0", False)
    waits = [events[0], event("c", 60, '{"id":"1","title":"bad"}', withheld=True)]
    hidden = origins_of(waits, '["1"]', columns)
    assert hidden is not None and hidden.columns["note"].event == waits[1]


def test_a_truncate_ends_the_life_of_a_row() -> None:
    events = [event("c", 10, '{"id":"1","title":"a","body":null}'), event("t", 20)]
    found = origins_of(events, '["1"]', NOTES)
    assert found is not None
    assert found.ended_by == events[1]
    assert found.columns["title"].value == "a"


def test_a_column_that_a_key_change_did_not_send_comes_from_the_old_key() -> None:
    start = event("c", 10, '{"id":"1","title":"a","body":"long"}')
    moved = KeyEvent(
        *("w", (1, 20, 1), "c", '["2"]', NOON, "b", NOON),
        after='{"id":"2","title":"b"}',
        unchanged=("body",),
        moved_from_key='["1"]',
    )
    found = origins_of([start, event("d", 20), moved], '["2"]', NOTES)
    assert found is not None
    assert found.columns["body"].event == start
    assert found.columns["body"].old_key
    assert found.role(start, "title") is Role.OLD_KEY


def test_a_withheld_event_whose_position_an_accepted_one_has_says_nothing() -> None:
    good = event("c", 10, '{"id":"1","title":"good","body":"b"}')
    bad = event("c", 10, '{"id":"1","title":"bad","body":"b"}', withheld=True)
    found = origins_of([bad, good], '["1"]', NOTES)
    assert found is not None
    assert found.columns["title"].value == "good"
    assert found.role(bad, "title") is Role.VOIDED
