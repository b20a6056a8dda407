"""A history updated in place, part by part, equals the history of all events made at once.

No Spark: keys that the kernel returns for a refold are made here from all events so far, as the layer does
it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnisupport_ingest.cdc.columnar import micros_of
from omnisupport_ingest.cdc.event_fold import ENDED, KEY
from omnisupport_ingest.cdc.history import history_type
from omnisupport_ingest.cdc.history_rows import history_groups
from omnisupport_ingest.cdc.history_update import HistoryRules, only_changes
from omnisupport_ingest.cdc.key_changes import OLD_KEY_ENDED
from omnisupport_ingest.cdc.stored import with_hashes
from omnisupport_ingest.cdc.updating import CHANGE, GONE, SET
from omnisupport_ingest.contracts.model import Column, TableContract
from omnisupport_ingest.lake.contenthash import ContentHash
from omnisupport_ingest.lake.schema import arrow_schema
from omnisupport_ingest_tests.cdc import kernels, lanes
from omnisupport_ingest_tests.cdc.kernels import Table
from omnisupport_ingest_tests.cdc.test_kernel_history import any_events, whole_table, with_rows_at_ends
from omnisupport_ingest_tests.examples import examples
from omnisupport_ingest_tests.oracle import histories
from omnisupport_ingest_tests.oracle.model import Event

TABLE = Table(
    histories.SHAPE,
    ("lane", "id"),
    {"lane": "text", "id": "text", **dict.fromkeys(histories.SHAPE.columns, "text")},
)
_COLUMNS = tuple(Column(name, "text") for name in TABLE.types)
SCHEMA = arrow_schema(history_type(cast(TableContract, SimpleNamespace(columns=_COLUMNS))), without=())
_EVENT = pa.struct(list(kernels.EVENTS))

randoms = st.integers(0, (1 << 32) - 1).map(Random)


class Held:
    """A history in one file that is updated in place."""

    def __init__(self, *, changed_only: bool = False, ended_before: int | None = None) -> None:
        self.changed_only, self.ended_before = changed_only, ended_before
        self.rows = SCHEMA.empty_table()
        self.content = ContentHash()
        self.seen: list[Event] = []
        self.counts: Counter[str] = Counter()

    def take(self, part: list[Event]) -> None:
        """Update the versions by the events of one more part."""
        through = max((tuple(event.at) for event in self.seen), default=(0, 0, 0))
        self.seen += part
        ends = whole_table(part)
        if any(end.withheld or end.position <= through for end in ends):
            self.counts["whole"] += 1
            self._put(self._whole())
            return
        rules = HistoryRules(
            TABLE.shape,
            _COLUMNS,
            SCHEMA,
            _EVENT,
            through,
            tuple(ends),
            changed_only=self.changed_only,
            ended_before=self.ended_before,
        )
        sent = rules.rows_of(table_of(part))
        updated = rules.update(self.rows, sent)
        if len(updated.refold):
            self.counts["refolded"] += 1
            again = tied(set(updated.refold.to_pylist()), self.seen)
            rows = [row for row in self._whole().to_pylist() if row["_cdc_key"] in again]
            settled = [{**row, CHANGE: SET} for row in rows]
            settled += [{"_cdc_key": key, CHANGE: GONE} for key in again]
            sent = pa.concat_tables([sent, pa.Table.from_pylist(settled, schema=rules.sent)])
            updated = rules.update(self.rows, sent)
        elif part:
            self.counts["extended"] += 1
        assert not len(updated.refold)
        self.rows = updated.rows.combine_chunks()
        self.content = self.content - ContentHash.of(updated.removed) + ContentHash.of(updated.added)

    def _whole(self) -> pa.Table:
        made = whole(self.seen)
        made = with_hashes(only_changes(made, TABLE.shape.names)) if self.changed_only else made
        return young(made, self.ended_before)

    def _put(self, rows: pa.Table) -> None:
        self.rows = rows
        self.content = ContentHash.of(rows["_cdc_row_hash"].to_numpy())


def young(rows: pa.Table, before: int | None) -> pa.Table:
    """``rows`` without the versions that ended before the moment ``before``."""
    ends = [None if end is None else micros_of(end) for end in rows["_cdc_valid_to"].to_pylist()]
    return rows.filter(pa.array([before is None or end is None or end >= before for end in ends], pa.bool_()))


def table_of(events: list[Event]) -> pa.Table:
    table = kernels.events_table(events, TABLE, {event.at[:2]: "w" for event in events})
    return table.filter(pc.not_equal(table["op"], OLD_KEY_ENDED))


def tied(keys: set[str], events: list[Event]) -> set[str]:
    """Return ``keys`` and all keys that key changes tie to them."""
    moves = [
        {kernels.key_text(event.key), kernels.key_text(event.moved_from)}
        for event in events
        if event.moved_from is not None and not event.quarantined
    ]
    found = set(keys)
    while more := {key for move in moves if move & found for key in move} - found:
        found |= cast(set[str], more)
    return found


def whole(events: list[Event]) -> pa.Table:
    """The history of ``events``, made at once."""
    table = kernels.events_table(events, TABLE, {event.at[:2]: "w" for event in events})
    keyed = table.filter(pc.is_valid(table["key"]))
    rows: list[dict[str, Any]] = []
    for batch in history_groups(keyed.to_batches(), TABLE.shape, whole_table(events)):
        rows += batch.to_pylist()
    lives = {
        (row["_cdc_key"], repr(row["_cdc_ended_at"])): {**row, "_cdc_exact": {}}
        for row in rows
        if row["_cdc_kind"] == ENDED
    }
    made = [filled({**row, "_cdc_is_deleted": False}, lives) for row in rows if row["_cdc_kind"] == KEY]
    rules = HistoryRules(TABLE.shape, _COLUMNS, SCHEMA, _EVENT, (0, 0, 0))
    sent = pa.Table.from_pylist(
        [{**{name: row.get(name) for name in SCHEMA.names}, "_cdc_exact": [], CHANGE: SET} for row in made],
        schema=rules.sent,
    )
    return rules.update(SCHEMA.empty_table(), sent).rows.combine_chunks()


def filled(row: dict[str, Any], lives: dict[tuple[str, str], dict[str, Any]]) -> dict[str, Any]:
    still_open, place = set(row["_open"]), (row["_from_key"], repr(row["_from_at"]))
    while still_open and place in lives:
        life = lives[place]
        fills = still_open - set(life["_cdc_unresolved"])
        row |= {name: life[name] for name in fills}
        row["_cdc_unresolved"] = [name for name in row["_cdc_unresolved"] if name not in fills]
        still_open = (still_open - fills) & set(life["_open"])
        place = life["_from_key"], repr(life["_from_at"])
    return row


def content(rows: pa.Table) -> list[str]:
    return sorted(repr(row) for row in rows.drop_columns(["_cdc_batch_id"]).to_pylist())


def cut(events: list[Event], rng: Random) -> list[list[Event]]:
    """Divide ``events`` into one to six runs."""
    places = sorted(rng.randrange(len(events) + 1) for _ in range(rng.randrange(6)))
    return [events[start:end] for start, end in zip([0, *places], [*places, len(events)], strict=True)]


def agrees(events: list[Event], rng: Random, *, changed_only: bool = False) -> Counter[str]:
    held = Held(changed_only=changed_only)
    for part in cut(events, rng):
        held.take(part)
    at_once = whole(events)
    if changed_only:
        versions = at_once.num_rows
        at_once = with_hashes(only_changes(at_once, TABLE.shape.names))
        held.counts["left out"] += versions - at_once.num_rows
    assert content(held.rows) == content(at_once)
    assert held.content == ContentHash.of(at_once["_cdc_row_hash"].to_numpy())
    return held.counts


@settings(max_examples=examples(40))
@given(randoms)
def test_events_that_arrive_in_any_order_and_any_number_of_runs_give_the_history_of_one(rng: Random) -> None:
    agrees(with_rows_at_ends(any_events(rng), rng), rng)


@settings(max_examples=examples(40))
@given(randoms)
def test_events_in_the_order_of_the_log_cut_into_runs_give_the_history_of_one(rng: Random) -> None:
    events = with_rows_at_ends(any_events(rng), rng)
    agrees(sorted(events, key=lambda event: event.at), rng)


@settings(max_examples=examples(30))
@given(randoms)
def test_what_a_database_sent_cut_into_runs_gives_the_history_of_one(rng: Random) -> None:
    sent = histories.simulate(rng).events
    events = lanes.with_distinct_times(lanes.in_one_lane(sent))
    agrees(sorted(events, key=lambda event: event.at), rng)


@settings(max_examples=examples(40))
@given(randoms, st.booleans())
def test_versions_that_retention_took_stay_out_whatever_comes_after(rng: Random, changed_only: bool) -> None:
    events = any_events(rng)
    if rng.random() < 0.7:
        events.sort(key=lambda event: event.at)
    else:
        rng.shuffle(events)
    whole_history, held = Held(changed_only=changed_only), Held(changed_only=changed_only)
    times = sorted(micros_of(end) for end in whole(events)["_cdc_valid_to"].to_pylist() if end is not None)
    before = rng.choice([0, *times])
    parts = cut(events, rng)
    taken_at = rng.randrange(len(parts))
    for number, part in enumerate(parts):
        whole_history.take(part)
        held.take(part)
        if number == taken_at:
            held.ended_before = before
            held._put(young(held.rows, before))
    assert content(held.rows) == content(young(whole_history.rows, before))
    assert held.content == ContentHash.of(held.rows["_cdc_row_hash"].to_numpy())


@pytest.mark.full
def test_what_changes_nothing_opens_no_version_however_the_runs_are_cut() -> None:
    seen: Counter[str] = Counter()
    for seed in range(40):
        rng = Random(seed)
        events = [
            replace(
                event, after={name: rng.choice(("x", None)) for name in event.after} if event.after else None
            )
            for event in any_events(rng)
        ]
        seen += agrees(sorted(events, key=lambda event: event.at), rng, changed_only=True)
    assert min(seen["left out"], seen["whole"], seen["refolded"], seen["extended"]) > 5


@pytest.mark.full
def test_the_runs_go_every_way_and_most_keys_in_order_are_extended() -> None:
    seen: Counter[str] = Counter()
    for seed in range(30):
        rng = Random(seed)
        seen += agrees(sorted(any_events(rng), key=lambda event: event.at), rng)
    assert min(seen["whole"], seen["refolded"], seen["extended"]) > 5
