"""The oracle agrees with a simulated database on every history, and with the rules one by one.

So what the Spark fold is compared with is itself proven: by a model that knows the end of the
story (the database), and by the specification's situations, each written down by hand.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnisupport_ingest_tests.examples import examples
from omnisupport_ingest_tests.oracle import histories as source
from omnisupport_ingest_tests.oracle.histories import KEYS, SHAPE, History
from omnisupport_ingest_tests.oracle.model import Event, Image, Key, Position, Row, TableShape
from omnisupport_ingest_tests.oracle.oracle import current_state, layers, live

NOON = datetime(2026, 11, 1, 12, tzinfo=UTC)
ONE, TWO, THREE = KEYS[:3]
FULL = {"status": "open", "note": None, "body": "long text"}
NOTHING: Image = {}

randoms = st.randoms(use_true_random=False)


def event(lsn: int, op: str, key: Key | None = ONE, after: Image | None = None, **more: Any) -> Event:
    """An event of transaction ``lsn`` of epoch 1; columns that are not in ``after`` were not sent."""
    plain = Event(Position(1, lsn, 0), op, SHAPE.name, key, NOON + timedelta(minutes=lsn), after=after)
    return replace(plain, **more)


def moved(
    lsn: int, old: Key, new: Key, after: Image, before: Image | None = None, ordinal: int = 0
) -> list[Event]:
    """A key-changing update: ``d`` of the old key, just above it ``c`` of the new one."""
    below = event(lsn, "d", old, before=before, at=Position(1, lsn, ordinal))
    above = event(lsn, "c", new, after, before=before, moved_from=old, at=Position(1, lsn, ordinal + 1))
    return [below, above]


def withheld(quarantined: Event) -> Event:
    return replace(quarantined, quarantined=True)


def fold(*events: Event, shape: TableShape = SHAPE) -> dict[Key, Row]:
    return current_state(events, shape)


def known(rows: dict[Key, Row]) -> dict[Key, Image]:
    return {key: row.values for key, row in rows.items()}


class TestAgainstTheDatabase:
    @settings(max_examples=examples(400), deadline=None)
    @given(source.histories())
    def test_every_resolved_cell_of_a_live_row_is_what_the_database_holds(self, history: History) -> None:
        rows = live(current_state(history.events, SHAPE))
        assert rows.keys() == history.final.keys()
        for key, row in rows.items():
            assert row.values == {column: history.final[key][column] for column in row.cells}
            assert not row.existence_unresolved

    @settings(max_examples=examples(300), deadline=None)
    @given(randoms)
    @pytest.mark.slow
    def test_nothing_is_unresolved_where_every_snapshot_was_one_exact_read(self, rng: Random) -> None:
        history = source.simulate(rng, exact=True)
        assert known(live(current_state(history.events, SHAPE))) == history.final

    @settings(max_examples=examples(300), deadline=None)
    @given(randoms)
    @pytest.mark.slow
    def test_reading_unresolved_rows_again_completes_them(self, rng: Random) -> None:
        history = source.simulate(rng, exact=False)
        rows = live(current_state(history.events, SHAPE))
        again = [read for read in history.read_again if read.key is not None and rows[read.key].unresolved]
        assert known(live(current_state(history.events + again, SHAPE))) == history.final

    def test_the_histories_hold_every_situation_they_are_meant_to(self) -> None:
        drawn = [source.simulate(Random(seed)) for seed in range(500)]
        events = [event for history in drawn for event in history.events]
        assert {event.op for event in events} == set("crudtb")
        assert {event.at.epoch for event in events} == {1, 2}
        assert any(event.moved_from and event.unchanged and not event.before for event in events)
        assert any(event.moved_from and event.unchanged and event.before for event in events)
        assert any(event.read_at and event.read_at > event.at.commit_lsn for event in events)
        assert any(row.unresolved for h in drawn for row in live(current_state(h.events, SHAPE)).values())
        in_order = sorted(events, key=lambda event: event.at)
        times = [event.source_ts for event in in_order]
        assert times != sorted(times)
        commits = [{(event.at.commit_lsn, event.source_ts) for event in each.events} for each in drawn]
        assert any(len(each) > len({time for _, time in each}) for each in commits)
        assert sum(event.scope is not None for event in events) > 200


class TestSoups:
    @settings(max_examples=examples(200), deadline=None)
    @given(source.soups(), randoms)
    def test_order_of_arrival_and_repetition_change_nothing(self, events: list[Event], rng: Random) -> None:
        again = events + [event for event in events if rng.random() < 0.5]
        rng.shuffle(again)
        assert fold(*again) == fold(*events)

    @settings(max_examples=examples(200), deadline=None)
    @given(source.soups())
    def test_what_a_withheld_leaves_resolved_holds_whether_it_is_released_or_discarded(
        self, events: list[Event]
    ) -> None:
        rows = live(fold(*events))
        released = live(fold(*(replace(event, quarantined=False) for event in events)))
        discarded = live(fold(*(event for event in events if not event.quarantined)))
        for other in (released, discarded):
            for key in rows.keys() & other.keys():
                values = other[key].values
                assert rows[key].values == {column: values.get(column, "lost") for column in rows[key].cells}

    @settings(max_examples=examples(200), deadline=None)
    @given(source.soups(), randoms)
    def test_every_raw_event_is_accepted_or_a_duplicate_or_quarantined(
        self, events: list[Event], rng: Random
    ) -> None:
        raw = source.collided(rng, [replace(event, quarantined=False) for event in events])
        sorted_out = layers(raw)
        assert len(sorted_out.accepted) + len(sorted_out.duplicates) + len(sorted_out.quarantined) == len(raw)
        positions = [event.at for event in sorted_out.accepted]
        assert len(set(positions)) == len(positions)
        assert not set(positions) & {event.at for event in sorted_out.quarantined}


class TestLife:
    @pytest.mark.parametrize("op", ["c", "r"])
    def test_a_new_life_inherits_nothing(self, op: str) -> None:
        row = fold(event(1, "c", after=FULL), event(2, op, after={"status": "new"}))[ONE]
        assert row.values == {"status": "new"}
        assert row.unresolved == {"note", "body"}

    def test_null_that_was_sent_is_a_value(self) -> None:
        row = fold(event(1, "c", after={"status": "open", "note": None}))[ONE]
        assert row.values["note"] is None
        assert row.unresolved == {"body"}

    def test_an_unsent_column_keeps_the_value_of_this_life(self) -> None:
        row = fold(event(1, "c", after=FULL), event(2, "u", after={"status": "closed", "note": "n"}))[ONE]
        assert row.values == {"status": "closed", "note": "n", "body": "long text"}

    @pytest.mark.parametrize("end", ["d", "t", "b"])
    def test_an_update_after_the_end_makes_the_row_alive_without_its_unsent_columns(self, end: str) -> None:
        ended = event(2, end, key=ONE if end == "d" else None)
        row = fold(event(1, "c", after=FULL), ended, event(3, "u", after={"status": "back"}))[ONE]
        assert not row.is_deleted
        assert row.values == {"status": "back"}

    def test_an_update_of_a_row_never_created_makes_it_alive(self) -> None:
        row = fold(event(1, "u", after={"status": "open"}))[ONE]
        assert not row.is_deleted
        assert row.unresolved == {"note", "body"}

    def test_a_delete_keeps_the_last_values_for_display(self) -> None:
        row = fold(event(1, "c", after=FULL), event(2, "d"))[ONE]
        assert row.is_deleted
        assert row.values == FULL

    def test_a_delete_of_a_row_never_seen_leaves_a_tombstone(self) -> None:
        row = fold(event(1, "d"))[ONE]
        assert row.is_deleted
        assert row.values == NOTHING

    @pytest.mark.parametrize("second", ["d", "t", "b"])
    def test_the_first_delete_is_the_one_that_ended_the_life(self, second: str) -> None:
        again = event(3, second, key=ONE if second == "d" else None)
        row = fold(event(1, "c", after=FULL), event(2, "d"), again)[ONE]
        assert row.deleted_at == Position(1, 2, 0)
        assert row.last == Position(1, 2, 0)

    def test_an_early_event_that_arrives_last_changes_nothing_above_it(self) -> None:
        events = [event(6, "u", after={"status": "six"}), event(4, "u", after={"body": "four"})]
        assert fold(event(1, "c", after=FULL), *events) == fold(*events, event(1, "c", after=FULL))
        row = fold(event(1, "c", after=FULL), *events)[ONE]
        assert row.values == {"status": "six", "note": None, "body": "four"}

    def test_a_higher_epoch_is_later_whatever_its_lsn(self) -> None:
        promoted = event(1, "u", after={"status": "two"}, at=Position(2, 1, 0))
        row = fold(event(900, "c", after=FULL), promoted)[ONE]
        assert row.values["status"] == "two"


class TestWholeTable:
    @pytest.mark.parametrize("op", ["t", "b"])
    def test_it_ends_every_lower_life_and_no_higher_one(self, op: str) -> None:
        rows = fold(event(1, "c", after=FULL), event(3, op, None), event(5, "c", TWO, after=FULL))
        assert rows[ONE].deleted_at == Position(1, 3, 0)
        assert live(rows).keys() == {TWO}

    @pytest.mark.parametrize(
        ("scope", "ended"), [((ONE, ONE), {ONE}), ((ONE, TWO), {ONE, TWO}), ((TWO, ONE), set())]
    )
    def test_a_boundary_of_a_range_ends_the_lives_of_its_keys_alone(
        self, scope: tuple[Key, Key], ended: set[Key]
    ) -> None:
        boundary = replace(event(5, "b", None), scope=scope)
        rows = fold(event(1, "c", after=FULL), event(2, "c", TWO, after=FULL), boundary)
        assert {key for key, row in rows.items() if row.ended} == ended

    def test_bounds_of_a_range_may_be_what_keys_begin_with(self) -> None:
        boundary = replace(event(5, "b", None), scope=(("2",), ("2", "7")))
        keys: list[Key] = [("1", "9"), ("2", "1"), ("2", "7"), ("2", "10"), ("3", "1")]
        assert [key for key in keys if boundary.reaches(key)] == [("2", "1"), ("2", "7")]

    def test_a_boundary_spares_the_rows_of_its_own_snapshot(self) -> None:
        """They stand at the same low watermark; its ordinal was reserved before theirs."""
        gone, there = event(1, "c", after=FULL), event(1, "c", TWO, after=FULL, at=Position(1, 1, 2))
        boundary = event(5, "b", None, at=Position(1, 5, -9))
        read = event(5, "r", TWO, after=FULL, at=Position(1, 5, -8))
        assert live(fold(gone, there, boundary, read)).keys() == {TWO}

    def test_it_ends_the_life_before_a_later_delete_does(self) -> None:
        row = fold(event(1, "c", after=FULL), event(5, "t", None), event(8, "d"))[ONE]
        assert row.deleted_at == Position(1, 5, 0)

    def test_another_table_is_left_alone(self) -> None:
        assert live(fold(event(1, "c", after=FULL), event(2, "t", None, table="comments"))).keys() == {ONE}


class TestSnapshotRows:
    def test_a_transaction_above_the_low_watermark_overrides_the_row_read_later(self) -> None:
        read = event(5, "r", after={**FULL, "status": "as read"}, at=Position(1, 5, -3), read_at=9)
        row = fold(read, event(5, "u", after={"status": "from the stream"}))[ONE]
        assert row.values == {**FULL, "status": "from the stream"}

    def test_a_second_read_at_one_watermark_is_a_later_event(self) -> None:
        first, second = Position(1, 5, -3), Position(1, 5, -2)
        row = fold(event(5, "r", after=FULL, at=second), event(5, "r", after=NOTHING, at=first))[ONE]
        assert row.values == FULL

    def test_a_transaction_older_than_the_snapshot_that_committed_after_it_is_later(self) -> None:
        """Its changes were logged below the watermark; only its commit record decides."""
        read = event(5, "r", after=FULL, at=Position(1, 5, -3))
        assert fold(read, event(6, "u", after={"note": "x"}))[ONE].values == {**FULL, "note": "x"}


class TestKeyChange:
    def test_an_unsent_column_comes_along_from_the_old_key(self) -> None:
        rows = fold(event(1, "c", after=FULL), *moved(2, ONE, TWO, {"status": "moved", "note": None}))
        assert rows[TWO].values == {"status": "moved", "note": None, "body": "long text"}
        assert rows[ONE].is_deleted

    def test_before_is_asked_first(self) -> None:
        change = moved(2, ONE, TWO, NOTHING, before={"body": "from before"})
        rows = fold(event(1, "c", after=FULL), *change)
        assert rows[TWO].values == {**FULL, "body": "from before"}

    def test_a_chain_within_one_transaction_is_followed_to_its_start(self) -> None:
        rows = fold(
            event(1, "c", after=FULL), *moved(2, ONE, TWO, NOTHING), *moved(2, TWO, THREE, NOTHING, ordinal=2)
        )
        assert rows[THREE].values == FULL
        assert live(rows).keys() == {THREE}

    def test_a_swap_gives_each_row_its_own_values(self) -> None:
        spare = ("9",)
        rows = fold(
            event(1, "c", ONE, after={"body": "first"}),
            event(1, "c", TWO, after={"body": "second"}, at=Position(1, 1, 2)),
            *moved(2, ONE, spare, NOTHING),
            *moved(2, TWO, ONE, NOTHING, ordinal=2),
            *moved(2, spare, TWO, NOTHING, ordinal=4),
        )
        assert known(live(rows)) == {ONE: {"body": "second"}, TWO: {"body": "first"}}

    def test_the_old_key_taken_again_by_another_row_is_not_asked(self) -> None:
        rows = fold(
            event(1, "c", after=FULL),
            *moved(2, ONE, TWO, NOTHING),
            event(3, "c", ONE, after={"body": "another row"}),
        )
        assert rows[TWO].values == FULL

    @pytest.mark.parametrize("end", ["d", "t"])
    def test_an_old_key_that_was_dead_below_the_move_gives_nothing(self, end: str) -> None:
        ended = event(2, end, key=ONE if end == "d" else None)
        rows = fold(event(1, "c", after=FULL), ended, *moved(3, ONE, TWO, {"status": "moved"}))
        assert rows[TWO].values == {"status": "moved"}

    def test_a_snapshot_row_that_saw_the_move_gives_what_the_old_key_cannot(self) -> None:
        read = event(5, "r", TWO, after=FULL, at=Position(1, 5, -3), read_at=9)
        rows = fold(read, *moved(7, ONE, TWO, {"status": "moved"}))
        assert rows[TWO].values == {**FULL, "status": "moved"}

    def test_a_snapshot_row_under_the_old_key_that_saw_the_move_is_another_row(self) -> None:
        """Read at 9, placed at 5: what stands under the old key came there after the move at 7."""
        newcomer = event(5, "r", ONE, after={"body": "another row"}, at=Position(1, 5, -3), read_at=9)
        arrived = event(8, "c", ONE, after={"body": "another row"})
        change = moved(7, ONE, TWO, {"status": "moved"})
        assert fold(newcomer, *change, arrived)[TWO].values == {"status": "moved"}
        read = event(5, "r", TWO, after=FULL, at=Position(1, 5, -2), read_at=9)
        assert fold(newcomer, read, *change, arrived)[TWO].values == {**FULL, "status": "moved"}


class TestSoftDelete:
    SHAPE = TableShape("tickets", ("status", "note", "body"), soft_delete_column="note")

    def test_not_null_is_deleted_and_null_again_is_alive(self) -> None:
        created, marked = event(1, "c", after=FULL), event(2, "u", after={"note": "2026-11-01"})
        assert fold(created, marked, shape=self.SHAPE)[ONE].is_deleted
        back = event(3, "u", after={"note": None})
        assert not fold(created, marked, back, shape=self.SHAPE)[ONE].is_deleted

    def test_a_tombstone_after_it_leaves_the_row_deleted(self) -> None:
        marked = event(1, "c", after={**FULL, "note": "2026-11-01"})
        assert fold(marked, event(2, "d"), shape=self.SHAPE)[ONE].is_deleted


class TestHoles:
    def test_the_columns_of_a_quarantined_update_are_unresolved_until_they_come_again(self) -> None:
        created = event(1, "c", after=FULL)
        quarantined = withheld(event(2, "u", after={"status": "?", "body": "?"}))
        assert fold(created, quarantined)[ONE].unresolved == {"status", "body"}
        row = fold(created, quarantined, event(3, "u", after={"status": "known"}))[ONE]
        assert row.values == {"status": "known", "note": None}

    @pytest.mark.parametrize("op", ["c", "r"])
    def test_a_quarantined_beginning_begins_a_life_of_which_nothing_is_known(self, op: str) -> None:
        row = fold(event(1, "c", after=FULL), event(2, "d"), withheld(event(3, op, after=FULL)))[ONE]
        assert not row.is_deleted
        assert row.values == NOTHING

    def test_a_quarantined_delete_leaves_open_whether_the_row_exists(self) -> None:
        row = fold(event(1, "c", after=FULL), withheld(event(2, "d")))[ONE]
        assert row.existence_unresolved
        assert not row.is_deleted
        assert row.values == NOTHING

    @pytest.mark.parametrize("op", ["c", "u", "d", "t"])
    def test_an_accepted_event_above_a_quarantined_delete_settles_existence(self, op: str) -> None:
        settling = event(3, op, None if op == "t" else ONE, after=FULL if op in "cu" else None)
        row = fold(event(1, "c", after=FULL), withheld(event(2, "d")), settling)[ONE]
        assert not row.existence_unresolved
        assert row.is_deleted == (op in "dt")

    def test_a_quarantined_delete_below_the_accepted_one_of_a_dead_row_changes_nothing(self) -> None:
        row = fold(event(1, "c", after=FULL), event(2, "d"), withheld(event(3, "d")))[ONE]
        assert row.deleted_at == Position(1, 2, 0)
        assert not row.existence_unresolved

    def test_a_released_event_voids_its_withheld(self) -> None:
        update = event(2, "u", after={"status": "released"})
        created = event(1, "c", after=FULL)
        assert fold(created, withheld(update), update) == fold(created, update)

    def test_an_unknown_column_stays_unknown_when_the_row_moves(self) -> None:
        quarantined = withheld(event(2, "u", after={"body": "?"}))
        rows = fold(event(1, "c", after=FULL), quarantined, *moved(3, ONE, TWO, NOTHING))
        assert rows[TWO].values == {"status": "open", "note": None}


class TestIdentity:
    def test_the_same_content_at_one_position_is_a_duplicate(self) -> None:
        first = event(1, "c", after=FULL)
        result = layers([first, replace(first, after=dict(FULL))])
        assert (result.accepted, len(result.duplicates), result.quarantined) == ([first], 1, [])

    @pytest.mark.parametrize(
        "other",
        [
            event(1, "u", after=FULL),
            event(1, "c", TWO, after=FULL),
            event(1, "c", after={**FULL, "note": "other"}),
            event(1, "c", after=FULL, before=FULL),
            event(1, "c", after=FULL, unchanged=frozenset({"body"})),
            event(1, "c", after=FULL, source_ts=NOON),
        ],
        ids=["operation", "key", "after", "before", "unchanged", "commit time"],
    )
    def test_other_content_at_one_position_quarantines_both(self, other: Event) -> None:
        result = layers([event(1, "c", after=FULL), other])
        assert (len(result.accepted), len(result.duplicates), len(result.quarantined)) == (0, 0, 2)

    def test_duplicates_are_judged_before_collisions(self) -> None:
        first, other = event(1, "c", after=FULL), event(1, "c", after=NOTHING)
        result = layers([first, first, other])
        assert (len(result.duplicates), len(result.quarantined)) == (1, 2)

    def test_one_lsn_holds_several_rows(self) -> None:
        """The position tells them apart; the LSN alone would lose one."""
        second = event(1, "c", TWO, after=FULL, at=Position(1, 1, 2))
        assert len(layers([event(1, "c", after=FULL), second]).accepted) == 2

    def test_which_of_two_colliding_events_comes_first_changes_nothing(self) -> None:
        pair = [event(1, "c", after=FULL), event(1, "d")]
        states = [fold(*layers(order).folded) for order in (pair, pair[::-1])]
        assert states[0] == states[1]
        assert states[0][ONE].existence_unresolved
