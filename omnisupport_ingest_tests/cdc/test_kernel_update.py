"""Rows updated in place, one part of a history after the other, come to what one fold of everything comes to.

No Spark: keys that the kernel gives back are folded here from all parts so far, as the layer does it.
"""

from __future__ import annotations

from datetime import UTC, datetime
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnisupport_ingest.cdc.event_fold import ENDED, KEY
from omnisupport_ingest.cdc.stored import STATE, stored_type
from omnisupport_ingest.cdc.table_ends import TableEnd, TableEnds, table_ends_in
from omnisupport_ingest.cdc.updating import AGAIN, CHANGE, GONE, MERGE, SET, Updated, UpdateRules, update_rows
from omnisupport_ingest.contracts.model import Column, TableContract
from omnisupport_ingest.lake.contenthash import ContentHash
from omnisupport_ingest.lake.schema import arrow_schema
from omnisupport_ingest_tests.cdc import kernels
from omnisupport_ingest_tests.cdc.kernels import Cut
from omnisupport_ingest_tests.cdc.test_kernel_fold import EXAMPLES, TABLE, appended_parts, drawn, in_windows
from omnisupport_ingest_tests.examples import examples
from omnisupport_ingest_tests.oracle.histories import SHAPE
from omnisupport_ingest_tests.oracle.model import Event, Position

_PG = {"text": "text", "bigint": "bigint", "numeric": "numeric(12,2)", "timestamptz": "timestamptz"}
_CONTRACT = cast(
    TableContract,
    SimpleNamespace(columns=tuple(Column(name, _PG[kind]) for name, kind in TABLE.types.items())),
)
SCHEMA = arrow_schema(stored_type(_CONTRACT), without=())
_STATE = SCHEMA.field(STATE).type

_START = datetime(2026, 11, 1, tzinfo=UTC)

randoms = st.integers(0, (1 << 32) - 1).map(Random)


class Held:
    """A table updated in place, as one file."""

    def __init__(self, few: int = 0) -> None:
        self.few = few
        self.rows = SCHEMA.empty_table()
        self.content = ContentHash()
        self.refolded = 0
        self.parts: list[pa.Table] = []
        self._applied: set[TableEnd] = set()

    def take(self, part: pa.Table) -> None:
        """Update the rows by the folded rows of one more part."""
        self.parts.append(part)
        table_ends = set(table_ends_in(part))
        rules = UpdateRules(
            TABLE.shape,
            SCHEMA,
            few=self.few,
            ends=TableEnds.collect(self._applied | table_ends),
            new_ends=TableEnds.collect(table_ends - self._applied),
        )
        self._applied |= table_ends
        keyed = _of_kind(part, KEY)
        odd = {
            row["_cdc_key"]
            for row in part.to_pylist(maps_as_pydicts="strict")
            if row["_cdc_kind"] == ENDED or row["_cdc_moved_from_key"] or row["_cdc_doubt"]
        } - {None}
        while True:
            updated = self._update(self._sent(keyed, odd, rules), rules)
            if not len(updated.refold):
                break
            assert not odd >= set(updated.refold.to_pylist())
            odd |= set(updated.refold.to_pylist())
        self.rows = updated.rows.combine_chunks()
        self.content = self.content - ContentHash.of(updated.removed) + ContentHash.of(updated.added)

    def _update(self, sent: pa.Table, rules: UpdateRules) -> Updated:
        return update_rows(self.rows, sent, rules)

    def _sent(self, keyed: pa.Table, odd: set[str], rules: UpdateRules) -> pa.Table:
        rows = [{**_stored(row), CHANGE: MERGE} for row in keyed.to_pylist(maps_as_pydicts="strict")]
        if odd:
            self.refolded += len(odd)
            rows += self._folded_again(odd, rules)
        return pa.Table.from_pylist(rows, schema=SCHEMA.append(pa.field(CHANGE, pa.string())))

    def _folded_again(self, odd: set[str], rules: UpdateRules) -> list[dict[str, Any]]:
        together = pa.concat_tables(self.parts)
        tied = {
            key
            for row in together.to_pylist(maps_as_pydicts="strict")
            if row["_cdc_kind"] == ENDED or row["_cdc_moved_from_key"]
            for key in (row["_cdc_key"], row["_cdc_moved_from_key"])
            if key is not None
        }
        ended = set(_of_kind(together, ENDED)["_cdc_key"].to_pylist())
        wanted = odd | tied
        once = _of_kind(together, KEY)
        place = once.schema.get_field_index("window")
        merged = kernels.merged([once.set_column(place, "window", pa.array([""] * once.num_rows))], TABLE)
        states = {row["_cdc_key"]: row for row in merged.to_pylist(maps_as_pydicts="strict")}
        found = []
        doubted = bool(rules.ends.doubts or any(ends.doubts for _, ends in rules.ends.ranged))
        for life in kernels.current(together, TABLE):
            state = states[life["_cdc_key"]]
            if life["_cdc_key"] not in wanted:
                continue
            ties = state["_cdc_key"] in ended or state["_cdc_moved_from_key"] or state["_cdc_doubt"]
            row = _stored({**state, **life, "_cdc_exact": life["_cdc_exact"]})
            row[STATE] = _stored(state)[STATE] | {"refold": bool(ties) or doubted}
            row |= {"_cdc_is_deleted": life["_ended"], "_cdc_deleted_at": life["_ended_time"]}
            row |= {"_cdc_unresolved": life["_cdc_unresolved"], CHANGE: SET}
            found.append(row)
        there = {row["_cdc_key"] for row in found}
        return [*found, *({"_cdc_key": key, CHANGE: GONE} for key in wanted - there)]


def _of_kind(rows: pa.Table, kind: str) -> pa.Table:
    return rows.filter(pc.equal(rows["_cdc_kind"], kind))


def _stored(row: dict[str, Any]) -> dict[str, Any]:
    last = row["_cdc_position"]
    stored = {
        field.name: row.get(field.name) for field in SCHEMA if field.name not in ("_cdc_unresolved", STATE)
    }
    stored |= {
        "_cdc_epoch": last["epoch"],
        "_cdc_commit_lsn": last["commit_lsn"],
        "_cdc_ordinal": last["ordinal"],
    }
    stored[STATE] = {field.name: row.get(f"_cdc_{field.name}") for field in _STATE} | {"refold": False}
    return stored


def _states(held: Held, events: Any) -> Any:
    rows = held.rows.to_pylist(maps_as_pydicts="strict")
    listed = [
        {
            **row,
            "_cdc_position": {
                "epoch": row["_cdc_epoch"],
                "commit_lsn": row["_cdc_commit_lsn"],
                "ordinal": row["_cdc_ordinal"],
            },
            "_ended_time": row["_cdc_deleted_at"],
        }
        for row in rows
    ]
    return kernels.without_shown(kernels.states(listed, TABLE), events)


@settings(max_examples=examples(EXAMPLES))
@given(randoms, st.integers(1, 5), st.booleans(), st.booleans())
def test_parts_in_any_order_update_the_rows_to_one_fold_of_everything(
    rng: Random, count: int, withheld: bool, moving: bool
) -> None:
    events = drawn(rng, withheld=withheld, moving=moving)
    windows = in_windows(rng, events, 3)
    part_of = {at: rng.randrange(count) for at in windows}
    held = Held(rng.choice((0, 1000)))
    parts = []
    for part in range(count):
        listed = [event for event in events if part_of[event.at[:2]] == part]
        if listed:
            parts.append(kernels.fold(kernels.events_table(listed, TABLE, windows), TABLE, Cut()))
            held.take(parts[-1])
    rows = kernels.current(pa.concat_tables(parts), TABLE)
    assert _states(held, events) == kernels.without_shown(kernels.states(rows, TABLE), events)
    assert held.content == ContentHash.of(held.rows["_cdc_row_hash"].to_numpy())


@settings(max_examples=examples(EXAMPLES))
@given(randoms, st.booleans())
def test_the_rows_updated_by_appended_parts_are_those_of_windows_made_again(
    rng: Random, moving: bool
) -> None:
    events = drawn(rng, moving=moving)
    windows = in_windows(rng, events, 3)
    held = Held(rng.choice((0, 1000)))
    for part in appended_parts(rng, events, Cut(), windows):
        held.take(part)
    again = kernels.fold(kernels.events_table(events, TABLE, windows), TABLE)
    due = kernels.states(kernels.current(again, TABLE), TABLE)
    assert _states(held, events) == kernels.without_shown(due, events)


@settings(max_examples=examples(EXAMPLES // 4))
@given(randoms)
def test_what_was_taken_already_changes_no_row(rng: Random) -> None:
    events = drawn(rng)
    part = kernels.fold(kernels.events_table(events, TABLE, in_windows(rng, events, 1)), TABLE, Cut())
    held = Held()
    held.take(part)
    before, content = held.rows, held.content
    held.take(part)
    assert held.rows.sort_by("_cdc_key").equals(before.sort_by("_cdc_key"))
    assert held.content == content


@settings(max_examples=examples(EXAMPLES))
@given(randoms)
def test_keys_are_made_again_of_what_is_sent_so_alone(rng: Random) -> None:
    def some() -> tuple[list[Event], pa.Table]:
        events = [each for each in drawn(rng, withheld=False) if not each.moved_from]
        return events, pa.concat_tables(appended_parts(rng, events, Cut(), in_windows(rng, events, 3)))

    (events, now), (_, before), (_, ignored) = some(), some(), some()
    held = Held()
    held.take(before)
    ends = TableEnds.collect(table_ends_in(now))
    rules = UpdateRules(
        TABLE.shape, SCHEMA, few=rng.choice((0, 1000)), ends=ends, rows_may_be_purged=rng.random() < 0.5
    )
    keys = {*_of_kind(now, KEY)["_cdc_key"].to_pylist(), *held.rows["_cdc_key"].to_pylist()}
    chosen = {key for key in sorted(keys) if rng.random() < 0.7}
    sent = [
        {**_stored(row), CHANGE: change}
        for change, rows in ((AGAIN, now), (MERGE, ignored))
        for row in _of_kind(rows, KEY).to_pylist(maps_as_pydicts="strict")
        if row["_cdc_key"] in chosen
    ]
    sent += [{"_cdc_key": key, CHANGE: GONE} for key in chosen]
    rng.shuffle(sent)
    updated = update_rows(held.rows, pa.Table.from_pylist(sent, schema=rules.sent), rules)

    assert not len(updated.refold)
    of_chosen = pc.is_in(updated.rows["_cdc_key"], pa.array(sorted(chosen), pa.string()))
    stayed = pc.invert(pc.is_in(held.rows["_cdc_key"], pa.array(sorted(chosen), pa.string())))
    others = updated.rows.filter(pc.invert(of_chosen)).sort_by("_cdc_key")
    assert others.equals(held.rows.filter(stayed).sort_by("_cdc_key"))
    made = Held()
    made.rows = updated.rows.filter(of_chosen)
    due = [row for row in kernels.current(now, TABLE) if row["_cdc_key"] in chosen]
    assert _states(made, events) == kernels.without_shown(kernels.states(due, TABLE), events)


@pytest.mark.parametrize(
    ("ops", "again"), [("c", False), ("r", False), ("u", True), ("d", True), ("uc", True)]
)
def test_a_key_whose_row_may_be_purged_is_folded_again_where_its_events_may_be_of_an_ended_life(
    ops: str, again: bool
) -> None:
    key = ("1", "eu")
    events = [
        Event(Position(1, lsn, 0), op, SHAPE.name, key, _START, after=None if op == "d" else {"status": "v"})
        for lsn, op in enumerate(ops, start=5)
    ]
    part = kernels.fold(kernels.events_table(events, TABLE, {each.at[:2]: "w" for each in events}), TABLE)
    rules = UpdateRules(TABLE.shape, SCHEMA, rows_may_be_purged=True)
    sent = [{**_stored(row), CHANGE: MERGE} for row in part.to_pylist(maps_as_pydicts="strict")]
    updated = update_rows(SCHEMA.empty_table(), pa.Table.from_pylist(sent, schema=rules.sent), rules)
    assert updated.refold.to_pylist() == [kernels.key_text(key)] * again


@pytest.mark.full
def test_most_keys_are_merged_where_they_stand() -> None:
    refolded = keys = 0
    for seed in range(60):
        rng = Random(seed)
        events = [each for each in drawn(rng, withheld=False) if not each.moved_from]
        windows = in_windows(rng, events, 1)
        held = Held()
        for part in (events[: len(events) // 2], events[len(events) // 2 :]):
            if part:
                held.take(kernels.fold(kernels.events_table(part, TABLE, windows), TABLE, Cut()))
        refolded, keys = refolded + held.refolded, keys + held.rows.num_rows
    assert keys > 100
    assert refolded == 0
