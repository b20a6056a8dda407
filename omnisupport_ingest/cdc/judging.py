"""Judge events: the step from ``raw_cdc_staging`` to ``deduped_events`` and ``quarantine``.

Every raw event gets a verdict: accepted, duplicate, or quarantined with a reason. The code is plain Python on
Arrow batches; Spark's workers run it (``dedupe.judge``). Nearly all events are ordinary and are judged
together, by whole columns (``ordinary``); the others are judged one by one.

This module finds which scenario an event is in. What is done in each scenario stands in the decision table.

The rules of contracts are Python functions, not column expressions: for hundreds of tables those would be a
plan of thousands of nodes, built again for every run.
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

from omnisupport_ingest.cdc.decrypting import decrypt
from omnisupport_ingest.cdc.erasing import Erasures, erased_in, without_values
from omnisupport_ingest.cdc.event_columns import EventColumns, EventId, TableOfBatch
from omnisupport_ingest.cdc.event_hashes import event_hashes
from omnisupport_ingest.cdc.images import read_image, with_unsent
from omnisupport_ingest.cdc.lateness import ALWAYS_REPLAYED, is_late, is_too_late
from omnisupport_ingest.cdc.ordinary import FEW, IMAGE_OPS, ROW_OPS, NeverOrdinary, OrdinaryEvents, Taken
from omnisupport_ingest.cdc.protecting import Protections, protect_batches
from omnisupport_ingest.cdc.subject_values import ErasedSubjects, without_erased
from omnisupport_ingest.contracts.decision_table import (
    ACCEPT,
    BATCH_REJECTED,
    COLLISION,
    CONTRACT,
    DEDUPE,
    DEDUPE_KEY,
    DISCARDED_EVENT,
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
    REVIEW_LEDGER,
    ROW_RULE,
    SCENARIOS,
    SCHEMA_MISMATCH,
    SEQUENCE_OR_TS,
    TOO_LATE,
    WATERMARK_GAP,
    WINDOW,
    DecisionTable,
    DetectedScenario,
)
from omnisupport_ingest.contracts.model import DEFAULT_ALLOWED_LATENESS, DEFAULT_MAX_LATENESS, TableContract
from omnisupport_ingest.contracts.names import TableName
from omnisupport_ingest.contracts.protection import Secrets
from omnisupport_ingest.contracts.row_columns import RowColumns
from omnisupport_ingest.contracts.row_rules import RowRules
from omnisupport_ingest.windows import KEY_FORMAT, OUT_OF_RANGE

ACCEPTED, DUPLICATE, QUARANTINED = "accepted", "duplicate", "quarantined"

OPEN, DISCARDED, NOT_NEEDED = "open", "discarded", "not_needed"
"""States of a quarantined event's review: a person must decide, a person has discarded it, or no decision
is needed."""

RELEASE, DISCARD = "release", "discard"
"""What a person decides about a quarantined event."""

DISCARD_COPIES = "discard copies"
"""A discard that concerns only the copies of an event, because only they were in quarantine."""

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
"""Value of each column in ``ADDED`` for an ordinary event that is no copy, and the type of the column."""

_IN_TIME = (False, False)
MARKS = ("copy", "collision")
"""The columns that judging removes: number of the copy, and whether the position has other content, too."""

_PASSES = frozenset((ACCEPT, INGEST, REPLAY_WINDOW, DEDUPE))

_OUT_OF_RANGE = WINDOW.found(OUT_OF_RANGE_TIME)
_COLLISION, _COPY = DEDUPE_KEY.found(COLLISION), DEDUPE_KEY.found(DUPLICATE_POSITION)
_OLDER_EPOCH = EPOCH.found(OLDER_EPOCH)
_MALFORMED, _ROW_RULE = ENVELOPE.found(MALFORMED), CONTRACT.found(ROW_RULE)
_SCHEMA_MISMATCH, _BATCH_REJECTED = CONTRACT.found(SCHEMA_MISMATCH), CONTRACT.found(BATCH_REJECTED)
_OUT_OF_ORDER = SEQUENCE_OR_TS.found(OUT_OF_ORDER)
_TOO_LATE = MAX_LATENESS.found(TOO_LATE)
LATE_FOUND = WATERMARK_GAP.found(LATE)
_DISCARDED_EVENT = REVIEW_LEDGER.found(DISCARDED_EVENT)
"""The findings of judging: a detector and the scenario it looks for. A late event may have another finding
too."""

_PLAIN_COPY: tuple[Any, ...] = (False, [], _COPY.scenario, DUPLICATE, _COPY.detector, None)
"""Value of each column in ``ADDED`` for a copy of an ordinary event, if copies are dropped."""

Image = Mapping[str, Any]
"""A row image: column name → text or None."""


@dataclass(frozen=True)
class JudgingRules:
    """What events are judged by.

    Attributes:
        contracts: of the source.
        decisions: the decision table.
        window_length: length of the lake's windows.
        reviews: what people decided about single events (``RELEASE``, ``DISCARD`` or ``DISCARD_COPIES``).
        erasures: the rows whose values are removed from their events after judging.
        subjects: the subjects whose values are removed from their images after judging, if they landed plain.
        secrets: keys for the policies for personal data.
        sealed: windows that retention sealed; they accept no event.
        rejected: for each batch of a table in which an event breaks a rule that rejects its batch, the names
            of these rules. A first judging finds them (``broken_rules``); a second one, with them, withholds
            all events of the batch.
        row_columns: of each table whose rows wait if they are not of the contract's columns.
    """

    contracts: tuple[TableContract, ...]
    decisions: DecisionTable
    window_length: timedelta
    reviews: Mapping[EventId, str] = field(default_factory=dict)
    erasures: Erasures = field(default_factory=Erasures)
    subjects: ErasedSubjects = field(default_factory=ErasedSubjects)
    secrets: Secrets = field(default_factory=Secrets)
    sealed: frozenset[str] = frozenset()
    rejected: Mapping[TableOfBatch, tuple[str, ...]] = field(default_factory=dict)
    row_columns: Mapping[TableName, RowColumns] = field(default_factory=dict)


def judge_batches(
    batches: Iterable[pa.RecordBatch],
    judging_rules: JudgingRules,
    *,
    few: int = FEW,
    taken: Taken | None = None,
) -> Iterator[pa.RecordBatch]:
    """Judge marked events, protect their personal values, and remove the values of erased rows and subjects.

    Args:
        batches: columns of ``RAW_TYPE`` and ``MARKS``.
        few: at most so many events of a table in a batch are judged one by one.
        taken: counter to which the judged events are added.

    Returns:
        The batches with the columns ``ADDED`` instead of ``MARKS``.
    """
    protections = Protections.of(judging_rules.contracts, judging_rules.secrets)
    judged = judge_unprotected(batches, judging_rules, few=few, taken=taken)
    return to_store(judged, judging_rules, protections, few=few)


def judge_unprotected(
    batches: Iterable[pa.RecordBatch],
    judging_rules: JudgingRules,
    *,
    few: int = FEW,
    taken: Taken | None = None,
    readable: bool = False,
) -> Iterator[pa.RecordBatch]:
    """Judge events as ``judge_batches`` does, but leave personal values as they are.

    For callers that need only the verdicts and store none of the values. ``readable``: the caller knows that
    no image landed encrypted.
    """
    judge = _Judge(judging_rules, few, taken or Taken())
    for landed in batches:
        batch, to_judge = landed, landed
        if not readable:
            batch, to_judge = decrypt(landed, judging_rules.contracts, judging_rules.secrets.subjects)
        kept = [name for name in batch.schema.names if name not in MARKS]
        yield pa.RecordBatch.from_arrays(
            [*(batch.column(name) for name in kept), *judge.judged(to_judge, batch.column("after"))],
            names=[*kept, *ADDED],
        )


def to_store(
    judged: Iterable[pa.RecordBatch], judging_rules: JudgingRules, protections: Protections, *, few: int = FEW
) -> Iterator[pa.RecordBatch]:
    """Protect the personal values of judged events, and remove the values of erased rows and subjects.

    An accepted event gets the hash of what is left. A quarantined one keeps its hash, because reviews name it
    by that. ``protections``: those of the rules.
    """
    if judging_rules.subjects:
        # Before they are protected: a policy may change the column that says whose a row is.
        judged = (without_erased(batch, judging_rules.subjects) for batch in judged)
    protected = protect_batches(judged, protections, few=few)
    if not judging_rules.erasures:
        yield from protected
        return
    keys = {each.table_name: each.key for each in judging_rules.contracts}
    for batch in protected:
        erased = erased_in(batch, judging_rules.erasures)
        yield _hashed_again(without_values(batch, erased, keys), erased) if any(erased) else batch


def _hashed_again(batch: pa.RecordBatch, erased: Sequence[bool]) -> pa.RecordBatch:
    changed = pc.and_(pa.array(erased), pc.equal(batch.column("verdict"), ACCEPTED))
    left = event_hashes(pa.Table.from_batches([batch.filter(changed)]))
    place = batch.schema.get_field_index("event_hash")
    hashes = pc.replace_with_mask(batch.column(place), changed, left)
    return batch.set_column(place, batch.schema.field(place), hashes)


class _Tables:
    """The contracts of the tables, and their row rules; the rules of a table are built when they are first
    needed."""

    def __init__(self, contracts: Sequence[TableContract]) -> None:
        self._contracts = {each.table_name: each for each in contracts}
        self._rules: dict[TableName, RowRules] = {}

    def broken(self, events: Sequence[tuple[TableName, Image | None]]) -> list[list[str]]:
        """Return for each event, given by table and image, the names of the rules that its row breaks."""
        found: list[list[str]] = [[] for _ in events]
        rows: dict[TableName, list[int]] = {}
        for row, (table_name, image) in enumerate(events):
            if image is not None and table_name in self._contracts:
                rows.setdefault(table_name, []).append(row)
        for table_name, of_table in rows.items():
            images = [image for row in of_table if (image := events[row][1]) is not None]
            for row, broken in zip(of_table, self._rules_of(table_name).broken_of(images), strict=True):
                found[row] = broken
        return found

    def has_contract(self, table_name: TableName) -> bool:
        return table_name in self._contracts

    def withheld(self, table_name: TableName, broken: Sequence[str]) -> bool:
        return bool(broken) and self._rules_of(table_name).withheld(broken)

    def _rules_of(self, table_name: TableName) -> RowRules:
        if table_name not in self._rules:
            self._rules[table_name] = RowRules(self._contracts[table_name])
        return self._rules[table_name]

    def lateness(self, table_name: TableName) -> tuple[timedelta, timedelta]:
        contract = self._contracts.get(table_name)
        if contract is None:
            return DEFAULT_ALLOWED_LATENESS, DEFAULT_MAX_LATENESS
        return contract.allowed_lateness, contract.max_lateness


class _Judge:
    """Judges batches by one set of rules."""

    def __init__(self, judging_rules: JudgingRules, few: int, taken: Taken) -> None:
        self._judging_rules, self._taken = judging_rules, taken
        self._tables = _Tables(judging_rules.contracts)
        self._window_ends: dict[str, datetime] = {}
        self._ordinary = OrdinaryEvents(
            {each.table_name: each for each in judging_rules.contracts},
            self._window_end,
            NeverOrdinary(
                hashes={event_hash for *_, event_hash in judging_rules.reviews},
                batches={batch_id for *_, batch_id in judging_rules.rejected},
                windows=judging_rules.sealed,
            ),
            few=few,
            row_columns=judging_rules.row_columns,
        )
        # Only scenarios that keep an event out are looked for.
        self._strict = {name for name in SCENARIOS if judging_rules.decisions.action(name) not in _PASSES}

    def judged(self, batch: pa.RecordBatch, stored: pa.StringArray) -> list[pa.Array]:
        """Return the columns ``ADDED`` of ``batch``, in this order. ``stored``: its new images before they
        were decrypted."""
        plain = self._ordinary.find(batch, self._taken)
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
                _ORDINARY,
                _PLAIN_COPY,
                self._one_by_one(batch.filter(others), stored.filter(others)),
                strict=True,
            )
        ]
        # Each column in ``exactly`` has the value of an ordinary event first, that of a copy of one second,
        # then those of the other events in their order. ``number`` counts the other events from 2.
        number = pc.add(pc.cumulative_sum(others.cast(pa.int64())), 1)
        numbers = pc.if_else(others, number, copies.cast(pa.int64()))
        added = [column.take(numbers) for column in exactly]
        if plain.warned:
            first = pc.and_not(ordinary, copies)
            warned = {name: pc.and_(broken, first) for name, broken in plain.warned.items()}
            number = ADDED.index("rules")
            added[number] = _with_warnings(exactly[number], numbers.to_numpy(), warned)
        return added

    def _one_by_one(self, batch: pa.RecordBatch, stored: pa.StringArray) -> list[pa.Array]:
        rows = EventColumns(batch, with_batch=bool(self._judging_rules.rejected))
        started = time.perf_counter()
        images = [self._row_image(rows, row) for row in range(batch.num_rows)]
        rules = self._tables.broken([(rows.table_name(row), image) for row, image in enumerate(images)])
        mismatches = self._mismatches(rows, images, stored)
        rules = [[*each, *broken] for each, broken in zip(mismatches, rules, strict=True)]
        self._taken.rules_seconds += time.perf_counter() - started
        lates: list[bool] = []
        findings: list[DetectedScenario | None] = []
        verdicts: list[str] = []
        states: list[str | None] = []
        for row in range(batch.num_rows):
            late, too_late = self._lateness(rows, row) if rows.watermark_before[row] else _IN_TIME
            decided = (
                self._judging_rules.reviews.get(rows.event(row)) if self._judging_rules.reviews else None
            )
            rejected = self._judging_rules.rejected.get(rows.of_batch(row), ())
            carried = _RowImage(images[row], rules[row], rejected, mismatched=bool(mismatches[row]))
            found = self._finding(rows, row, late, too_late, carried, released=decided == RELEASE)
            if rows.copy[row] > 1:
                found = _COPY
            elif found is None and decided == DISCARD:
                # Whatever a contract or the decision table says since, the event is never accepted.
                found = _DISCARDED_EVENT
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

    def _row_image(self, rows: EventColumns, row: int) -> Image | None:
        """Return the row that an event carries; None if it carries none or the image cannot be read.

        Columns that the fold takes from the old image are included: rules must see every value that the fold
        may use.
        """
        if rows.op[row] not in IMAGE_OPS:
            return None
        image = read_image(rows.after[row])
        return None if image is None else with_unsent(image, rows.unchanged[row], rows.before(row))

    def _mismatches(
        self, rows: EventColumns, images: Sequence[Image | None], stored: pa.StringArray
    ) -> list[list[str]]:
        """Return for each row how its columns, sent or not, are at odds with its contract."""
        found: list[list[str]] = [[] for _ in images]
        if not self._judging_rules.row_columns:
            return found
        for row, image in enumerate(images):
            columns = self._judging_rules.row_columns.get(rows.table_name(row))
            if columns is not None and image is not None:
                there = {*image, *(rows.unchanged[row] or ())}
                if stored[row].as_py() != rows.after[row]:
                    # Without the destroyed key nobody knows any more which columns it lacked.
                    there |= columns.required
                found[row] = columns.mismatches(there)
        return found

    def _verdict(self, found: DetectedScenario | None, decided: str | None) -> tuple[str, str | None]:
        if found is None:
            return ACCEPTED, None
        if found is _COPY and DUPLICATE_POSITION not in self._strict:
            return DUPLICATE, None
        return QUARANTINED, self._state(found.scenario, decided)

    def _state(self, reason: str, decided: str | None) -> str:
        if decided == DISCARD or (decided == DISCARD_COPIES and reason == DUPLICATE_POSITION):
            return DISCARDED
        return OPEN if self._judging_rules.decisions.needs_review(reason) else NOT_NEEDED

    def _lateness(self, rows: EventColumns, row: int) -> tuple[bool, bool]:
        """Return whether the event landed in a closed window, and whether it is too late to be replayed."""
        mark, window = rows.watermark_before[row], rows.window[row]
        if mark is None or window == OUT_OF_RANGE:
            return False, False
        allowed, longest = self._tables.lateness(rows.table_name(row))
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
        self, rows: EventColumns, row: int, late: bool, too_late: bool, carried: _RowImage, *, released: bool
    ) -> DetectedScenario | None:
        """Return the first scenario that keeps the event out, or None.

        A release overrides doubts about when and from where an event came. It does not override what the
        event carries: a row that cannot be read, or that breaks its contract, would break the dimension.
        """
        malformed = rows.op[row] in IMAGE_OPS and carried.image is None
        # Without a whole key nobody knows which row the event is about, not even if it is a delete. Without a
        # contract nobody asks, and capture lands no key of several columns.
        asked = rows.op[row] in ROW_OPS and self._tables.has_contract(rows.table_name(row))
        malformed |= asked and not rows.has_whole_keys(row)
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
        if carried.mismatched:
            return _SCHEMA_MISMATCH
        if self._tables.withheld(rows.table_name(row), carried.broken):
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
class _RowImage:
    """The row image of an event, the names of the rules that it breaks, and of those that reject its whole
    batch; and whether it is not of its contract's columns."""

    image: Image | None
    broken: Sequence[str]
    rejected: tuple[str, ...]
    mismatched: bool


def _with_warnings(
    exactly: pa.ListArray, numbers: np.ndarray[Any, Any], warned: Mapping[str, pa.BooleanArray]
) -> pa.ListArray:
    """Return the broken rules of every event.

    An event with a number above 0 takes the list of that number in ``exactly``. Ordinary events have the
    number 0 and get the rules in ``warned`` that they break.
    """
    names = list(warned)
    breaking = [np.flatnonzero(warned[name].to_numpy(zero_copy_only=False)) for name in names]
    rows = np.concatenate(breaking)
    rules = np.repeat(np.arange(len(names)), [len(each) for each in breaking])
    order = np.lexsort((rules, rows))
    passing, counts = np.unique(rows, return_counts=True)
    offsets = pa.array(np.concatenate([[0], np.cumsum(counts)]), pa.int32())
    lists = pa.ListArray.from_arrays(offsets, pa.array(names, pa.string()).take(pa.array(rules[order])))
    numbers = numbers.copy()
    numbers[passing] = len(exactly) + np.arange(len(passing))
    return pa.concat_arrays([exactly, lists]).take(pa.array(numbers))
