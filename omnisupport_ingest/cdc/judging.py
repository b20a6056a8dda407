"""Judging events, in plain Python on Arrow batches: what ``dedupe.judge`` hands to Spark's workers.

The rules of hundreds of tables are a table of functions here; as column expressions they would be a
plan of thousands of nodes, built again for every run. What is done in each scenario is not decided
here but in the decision table.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from omnisupport_ingest.cdc import columnar
from omnisupport_ingest.cdc.decrypting import decrypt
from omnisupport_ingest.cdc.erasing import Erasures, erase_batches
from omnisupport_ingest.cdc.images import is_whole, read_image, with_unsent
from omnisupport_ingest.cdc.lateness import ALWAYS_REPLAYED, is_late, is_too_late
from omnisupport_ingest.cdc.ordinary import FEW, IMAGE_OPS, ROW_OPS, Ordinary, Taken
from omnisupport_ingest.cdc.protecting import Protections, protect_batches
from omnisupport_ingest.contracts.decision_table import (
    ACCEPT,
    BATCH_REJECTED,
    COLLISION,
    CONTRACT,
    DEDUPE,
    DEDUPE_KEY,
    DUPLICATE_POSITION,
    ENVELOPE,
    EPOCH,
    INGEST,
    LATE,
    MALFORMED,
    MAX_LATENESS,
    OLDER_EPOCH,
    OUT_OF_ORDER,
    OUT_OF_RANGE_TIME,
    REPLAY_WINDOW,
    ROW_RULE,
    SCENARIOS,
    SEQUENCE_OR_TS,
    TOO_LATE,
    WATERMARK_GAP,
    WINDOW,
    DecisionTable,
    Finding,
)
from omnisupport_ingest.contracts.model import DEFAULT_ALLOWED_LATENESS, DEFAULT_MAX_LATENESS, TableContract
from omnisupport_ingest.contracts.protection import Secrets
from omnisupport_ingest.contracts.row_rules import RowRules
from omnisupport_ingest.windows import KEY_FORMAT, OUT_OF_RANGE

ACCEPTED, DUPLICATE, QUARANTINED = "accepted", "duplicate", "quarantined"

OPEN, DISCARDED, NOT_NEEDED = "open", "discarded", "not_needed"
"""States of a quarantined event's review: somebody must look, has looked, or need not."""

RELEASE, DISCARD = "release", "discard"
"""What a review decides."""

ADDED = ("late", "rules", "reason", "verdict", "detector", "review_state")
"""The columns that judging adds."""

_ORDINARY: tuple[tuple[Any, pa.DataType], ...] = (
    (False, pa.bool_()),
    ([], pa.list_(pa.string())),
    (None, pa.string()),
    (ACCEPTED, pa.string()),
    (None, pa.string()),
    (None, pa.string()),
)
"""What an ordinary event that is no copy gets in each of ``ADDED``, and the column's type."""

_IN_TIME = (False, False)
MARKS = ("copy", "collision")
"""The columns that judging takes away: what is known of other events at the same position."""

_PASSES = frozenset((ACCEPT, INGEST, REPLAY_WINDOW, DEDUPE))

_OUT_OF_RANGE = WINDOW.found(OUT_OF_RANGE_TIME)
_COLLISION, _COPY = DEDUPE_KEY.found(COLLISION), DEDUPE_KEY.found(DUPLICATE_POSITION)
_OLDER_EPOCH = EPOCH.found(OLDER_EPOCH)
_MALFORMED, _ROW_RULE = ENVELOPE.found(MALFORMED), CONTRACT.found(ROW_RULE)
_BATCH_REJECTED = CONTRACT.found(BATCH_REJECTED)
_OUT_OF_ORDER = SEQUENCE_OR_TS.found(OUT_OF_ORDER)
_TOO_LATE = MAX_LATENESS.found(TOO_LATE)
LATE_FOUND = WATERMARK_GAP.found(LATE)
"""What judging finds, each where it looks for it. An event may be late besides what else it is."""

_PLAIN_COPY: tuple[Any, ...] = (False, [], _COPY.scenario, DUPLICATE, _COPY.detector, None)
"""What a copy of an ordinary event gets in each of ``ADDED``, where copies are dropped."""

Image = Mapping[str, Any]
"""A row image: column name → text or null."""

EventId = tuple[int, int, int, int]
"""(epoch, commit LSN, ordinal, event hash): one event, whatever batch brought it."""


TableOfBatch = tuple[str, str, str, str]
"""(window, schema, table, batch): the events of one table that one batch brought into one window."""


@dataclass(frozen=True)
class JudgingRules:
    """What events are judged by.

    ``contracts``: of the source. ``decisions``: the decision table. ``reviews``: what people decided of
    single events (``RELEASE`` or ``DISCARD``). ``erasures``: the rows whose values are taken out of their
    events once these are judged. ``window_length``: of the lake. ``secrets``: what policies for personal data
    need. ``sealed``: windows that retention has sealed; nothing is accepted in them any more. ``rejected``:
    the batches of a table in which an event breaks a rule that rejects its batch, with these rules; a first
    judgement finds them (``broken_rules``), a second withholds their events.
    """

    contracts: tuple[TableContract, ...]
    decisions: DecisionTable
    window_length: timedelta
    reviews: Mapping[EventId, str] = field(default_factory=dict)
    erasures: Erasures = field(default_factory=Erasures)
    secrets: Secrets = field(default_factory=Secrets)
    sealed: frozenset[str] = frozenset()
    rejected: Mapping[TableOfBatch, tuple[str, ...]] = field(default_factory=dict)


def judge_batches(
    batches: Iterable[pa.RecordBatch],
    judging_rules: JudgingRules,
    *,
    few: int = FEW,
    taken: Taken | None = None,
) -> Iterator[pa.RecordBatch]:
    """Add the columns ``ADDED`` to marked events, taking the marks away, and protect their personal values.

    ``few``: of so many events of a table in a batch, or fewer, each is judged by itself. ``taken``: counts
    the events.
    """
    protections = Protections.of(judging_rules.contracts, judging_rules.secrets)
    return protect_batches(
        judge_unprotected(batches, judging_rules, few=few, taken=taken), protections, few=few
    )


def judge_unprotected(
    batches: Iterable[pa.RecordBatch],
    judging_rules: JudgingRules,
    *,
    few: int = FEW,
    taken: Taken | None = None,
    readable: bool = False,
) -> Iterator[pa.RecordBatch]:
    """Judge as ``judge_batches`` does, for verdicts alone: personal values stay, so nothing of it is kept.

    ``readable``: the caller has seen that no image landed encrypted.
    """
    judge = _Judge(judging_rules, few, taken or Taken())
    for landed in batches:
        batch, asked = landed, landed
        if not readable:
            batch, asked = decrypt(landed, judging_rules.contracts, judging_rules.secrets.subjects)
        kept = [name for name in batch.schema.names if name not in MARKS]
        yield pa.RecordBatch.from_arrays(
            [*(batch.column(name) for name in kept), *judge.judged(asked)], names=[*kept, *ADDED]
        )


def judge_and_erase(
    batches: Iterable[pa.RecordBatch], judging_rules: JudgingRules, *, few: int = FEW
) -> Iterator[pa.RecordBatch]:
    """``judge_batches``, and then the values taken out of erased events; adds ``erasing.ERASED`` too."""
    keys = {(each.schema, each.table): each.key for each in judging_rules.contracts}
    return erase_batches(judge_batches(batches, judging_rules, few=few), judging_rules.erasures, keys)


class _Tables:
    """What the contract of each table says, looked up when the first event of the table comes by."""

    def __init__(self, contracts: Sequence[TableContract]) -> None:
        self._contracts = {(each.schema, each.table): each for each in contracts}
        self._rules: dict[tuple[str, str], RowRules] = {}

    def broken(self, events: Sequence[tuple[tuple[str, str], Image | None]]) -> list[list[str]]:
        """The rules that the row of each event breaks, by its table and image."""
        found: list[list[str]] = [[] for _ in events]
        rows: dict[tuple[str, str], list[int]] = {}
        for row, (place, image) in enumerate(events):
            if image is not None and place in self._contracts:
                rows.setdefault(place, []).append(row)
        for place, of_place in rows.items():
            images = [image for row in of_place if (image := events[row][1]) is not None]
            for row, broken in zip(of_place, self._rules_of(place).broken_of(images), strict=True):
                found[row] = broken
        return found

    def withheld(self, place: tuple[str, str], broken: Sequence[str]) -> bool:
        return bool(broken) and self._rules_of(place).withheld(broken)

    def _rules_of(self, place: tuple[str, str]) -> RowRules:
        if place not in self._rules:
            self._rules[place] = RowRules(self._contracts[place])
        return self._rules[place]

    def lateness(self, place: tuple[str, str]) -> tuple[timedelta, timedelta]:
        contract = self._contracts.get(place)
        if contract is None:
            return DEFAULT_ALLOWED_LATENESS, DEFAULT_MAX_LATENESS
        return contract.allowed_lateness, contract.max_lateness


class _Judge:
    def __init__(self, judging_rules: JudgingRules, few: int, taken: Taken) -> None:
        self._judging_rules, self._taken = judging_rules, taken
        self._tables = _Tables(judging_rules.contracts)
        self._window_ends: dict[str, datetime] = {}
        self._ordinary = Ordinary(
            {(each.schema, each.table): each for each in judging_rules.contracts},
            {event_hash for *_, event_hash in judging_rules.reviews},
            self._window_end,
            few=few,
            rejected={batch_id for *_, batch_id in judging_rules.rejected},
            sealed=judging_rules.sealed,
        )
        # Scenarios that let an event pass are not looked for.
        self._strict = {name for name in SCENARIOS if judging_rules.decisions.action(name) not in _PASSES}

    def judged(self, batch: pa.RecordBatch) -> list[pa.Array]:
        """The added columns, in the order of ``ADDED``."""
        plain = self._ordinary.among(batch, self._taken)
        copies = pc.greater(batch.column("copy"), 1)
        ordinary = plain.ordinary
        if DUPLICATE_POSITION in self._strict:
            ordinary = pc.and_not(ordinary, copies)
        others = pc.invert(ordinary)
        self._taken.events += batch.num_rows
        self._taken.exactly += others.true_count
        exactly = [
            pa.concat_arrays([pa.array([plain, copy], kind), found])
            for (plain, kind), copy, found in zip(
                _ORDINARY, _PLAIN_COPY, self._one_by_one(batch.filter(others)), strict=True
            )
        ]
        # The first is what every ordinary event gets, the next what a copy of one does; then what the others
        # got, one after another.
        place = pc.add(pc.cumulative_sum(others.cast(pa.int64())), 1)
        numbers = pc.if_else(others, place, copies.cast(pa.int64()))
        added = [column.take(numbers) for column in exactly]
        if plain.warned:
            first = pc.and_not(ordinary, copies)
            warned = {name: pc.and_(broken, first) for name, broken in plain.warned.items()}
            number = ADDED.index("rules")
            added[number] = _with_warned(exactly[number], numbers.to_numpy(), warned)
        return added

    def _one_by_one(self, batch: pa.RecordBatch) -> list[pa.Array]:
        rows = _Rows(batch, with_batch=bool(self._judging_rules.rejected))
        started = time.perf_counter()
        images = [self._carried(rows, row) for row in range(batch.num_rows)]
        rules = self._tables.broken([(rows.place(row), image) for row, image in enumerate(images)])
        self._taken.rules_seconds += time.perf_counter() - started
        lates: list[bool] = []
        findings: list[Finding | None] = []
        verdicts: list[str] = []
        states: list[str | None] = []
        for row in range(batch.num_rows):
            late, too_late = self._lateness(rows, row) if rows.watermark_before[row] else _IN_TIME
            decided = (
                self._judging_rules.reviews.get(rows.event(row)) if self._judging_rules.reviews else None
            )
            carried = _Carried(
                images[row], rules[row], self._judging_rules.rejected.get(rows.of_batch(row), ())
            )
            found = self._finding(rows, row, late, too_late, carried, released=decided == RELEASE)
            if rows.copy[row] > 1:
                found = _COPY
            if found is _BATCH_REJECTED:
                rules[row] = [*dict.fromkeys([*rules[row], *carried.rejected])]
            verdict, state = self._verdict(found, decided)
            lates.append(late)
            findings.append(found)
            verdicts.append(verdict)
            states.append(state)
        reasons = [None if found is None else found.scenario for found in findings]
        detectors = [None if found is None else found.detector for found in findings]
        added = (lates, rules, reasons, verdicts, detectors, states)
        return [pa.array(values, kind) for values, (_, kind) in zip(added, _ORDINARY, strict=True)]

    def _carried(self, rows: _Rows, row: int) -> Image | None:
        """The image of an event that brings a row; None where there is none, or it cannot be read.

        What the fold takes from the old image is judged too, else it would reach the gate.
        """
        if rows.op[row] not in IMAGE_OPS:
            return None
        image = read_image(rows.after[row])
        return None if image is None else with_unsent(image, rows.unchanged[row], rows.before(row))

    def _verdict(self, found: Finding | None, decided: str | None) -> tuple[str, str | None]:
        if found is None:
            return ACCEPTED, None
        if found is _COPY and DUPLICATE_POSITION not in self._strict:
            return DUPLICATE, None
        return QUARANTINED, self._state(found.scenario, decided)

    def _state(self, reason: str, decided: str | None) -> str:
        if decided == DISCARD:
            return DISCARDED
        return OPEN if self._judging_rules.decisions.needs_review(reason) else NOT_NEEDED

    def _lateness(self, rows: _Rows, row: int) -> tuple[bool, bool]:
        """Whether the event landed in a closed window, and whether it is too late to be replayed."""
        mark, window = rows.watermark_before[row], rows.window[row]
        if mark is None or window == OUT_OF_RANGE:
            return False, False
        allowed, longest = self._tables.lateness(rows.place(row))
        late = is_late(mark, self._window_end(window), allowed)
        if not late or rows.file_row[row] is None or rows.op[row] in ALWAYS_REPLAYED:
            return late, False
        return late, is_too_late(mark, rows.source_ts(row), longest)

    def _window_end(self, window: str) -> datetime:
        if window not in self._window_ends:
            start = datetime.strptime(window, KEY_FORMAT).replace(tzinfo=UTC)
            self._window_ends[window] = start + self._judging_rules.window_length
        return self._window_ends[window]

    def _finding(
        self, rows: _Rows, row: int, late: bool, too_late: bool, carried: _Carried, *, released: bool
    ) -> Finding | None:
        """The first scenario that keeps the event out.

        A release outweighs doubts about when and where an event came, never what it carries: a row that
        cannot be read, or breaks its contract by now, would break the dimension.
        """
        malformed = rows.op[row] in IMAGE_OPS and carried.image is None
        # Nothing can be said of the row of an event without a whole key, were it a delete.
        malformed |= rows.op[row] in ROW_OPS and not rows.has_whole_keys(row)
        newest = rows.newest_epoch_before[row]
        strict = self._strict
        if rows.window[row] == OUT_OF_RANGE:
            return _OUT_OF_RANGE
        if rows.window[row] in self._judging_rules.sealed:
            return _TOO_LATE
        if rows.collision[row] and not released:
            return _COLLISION
        if newest is not None and newest > rows.epoch[row] and OLDER_EPOCH in strict and not released:
            return _OLDER_EPOCH
        if malformed:
            return _MALFORMED
        if self._tables.withheld(rows.place(row), carried.broken):
            return _ROW_RULE
        if released:
            return None
        if carried.rejected:
            return _BATCH_REJECTED
        if rows.misplaced[row] and OUT_OF_ORDER in strict:
            return _OUT_OF_ORDER
        if too_late:
            return _TOO_LATE if TOO_LATE in strict else None
        return LATE_FOUND if late and LATE in strict else None


@dataclass(frozen=True, slots=True)
class _Carried:
    """The row image of an event, the rules that it breaks, and the rules that reject its whole batch."""

    image: Image | None
    broken: Sequence[str]
    rejected: tuple[str, ...]


class _Rows:
    """The columns of a batch that every event is asked for."""

    def __init__(self, batch: pa.RecordBatch, *, with_batch: bool) -> None:
        """``with_batch``: whether it is asked which batch brought an event."""
        self._batch_id: list[str] | None = batch.column("batch_id").to_pylist() if with_batch else None
        self.window: list[str] = batch.column("window").to_pylist()
        self.copy: list[int] = batch.column("copy").to_pylist()
        self.collision: list[bool] = batch.column("collision").to_pylist()
        self.epoch: list[int] = batch.column("epoch").to_pylist()
        self.newest_epoch_before: list[int | None] = batch.column("newest_epoch_before").to_pylist()
        self.op: list[str] = batch.column("op").to_pylist()
        self.key: list[str | None] = batch.column("key").to_pylist()
        self.after: list[str | None] = batch.column("after").to_pylist()
        self.unchanged: list[list[str] | None] = batch.column("unchanged").to_pylist()
        self.misplaced: list[bool | None] = batch.column("misplaced").to_pylist()
        self.file_row: list[int | None] = batch.column("file_row").to_pylist()
        self.watermark_before = _moments(batch.column("watermark_before"))
        self._moved_from: list[str | None] = batch.column("moved_from_key").to_pylist()
        self._schema: list[str] = batch.column("source_schema").to_pylist()
        self._table: list[str] = batch.column("source_table").to_pylist()
        self._batch = batch

    def place(self, row: int) -> tuple[str, str]:
        return self._schema[row], self._table[row]

    def of_batch(self, row: int) -> TableOfBatch:
        """The table's part of the batch that brought the event; of no batch if that is not asked."""
        batch_id = "" if self._batch_id is None else self._batch_id[row]
        return (self.window[row], *self.place(row), batch_id)

    def before(self, row: int) -> str | None:
        """The old image; it is read only where a column was not sent."""
        return self._batch.column("before")[row].as_py() if self.unchanged[row] else None

    def has_whole_keys(self, row: int) -> bool:
        """Whether the event has a key, and no NULL stands in it, nor in the one that it moved from."""
        moved_from: str | None = self._moved_from[row]
        return is_whole(self.key[row]) and (moved_from is None or is_whole(moved_from))

    def source_ts(self, row: int) -> datetime:
        moment = _moments(self._batch.column("source_ts").slice(row, 1))[0]
        assert moment is not None, "source_ts is never null"
        return moment

    def event(self, row: int) -> EventId:
        return (
            self.epoch[row],
            self._batch.column("commit_lsn")[row].as_py(),
            self._batch.column("ordinal")[row].as_py(),
            self._batch.column("event_hash")[row].as_py(),
        )


def _with_warned(
    exactly: pa.ListArray, numbers: np.ndarray[Any, Any], warned: Mapping[str, pa.BooleanArray]
) -> pa.ListArray:
    """The broken rules of all events: those of ``exactly`` by ``numbers``, and for ordinary events, which
    have the number 0, the rules in ``warned`` that they break."""
    names = list(warned)
    places = [np.flatnonzero(warned[name].to_numpy(zero_copy_only=False)) for name in names]
    rows = np.concatenate(places)
    rules = np.repeat(np.arange(len(names)), [len(each) for each in places])
    order = np.lexsort((rules, rows))
    passing, counts = np.unique(rows, return_counts=True)
    offsets = pa.array(np.concatenate([[0], np.cumsum(counts)]), pa.int32())
    lists = pa.ListArray.from_arrays(offsets, pa.array(names, pa.string()).take(pa.array(rules[order])))
    numbers = numbers.copy()
    numbers[passing] = len(exactly) + np.arange(len(passing))
    return pa.concat_arrays([exactly, lists]).take(pa.array(numbers))


def _moments(column: pa.Array) -> list[datetime | None]:
    """Times as datetimes; a batch's watermark stands in all of its rows, so each is made once."""
    known: dict[int, datetime] = {}
    found: list[datetime | None] = []
    for at in columnar.micros(column):
        if at is not None and at not in known:
            known[at] = columnar.EPOCH_START + timedelta(microseconds=at)
        found.append(None if at is None else known[at])
    return found
