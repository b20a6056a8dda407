"""Events with a former key count for nothing, whether they are folded now or were folded before.

The oracle has no former keys: it gets only the events with the key in force.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pyarrow as pa
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from omnisupport_ingest.cdc.fold import to_fold
from omnisupport_ingest.cdc.typed_fold import EVENT_COLUMNS, events_to_fold
from omnisupport_ingest.contracts.model import PositionRange
from omnisupport_ingest_tests.cdc import kernels, lanes
from omnisupport_ingest_tests.cdc.kernels import Cut
from omnisupport_ingest_tests.cdc.test_kernel_fold import (
    EXAMPLES,
    TABLE,
    assert_part,
    cuts,
    drawn,
    in_windows,
    kernel_states,
    oracle_states,
    randoms,
)
from omnisupport_ingest_tests.examples import examples
from omnisupport_ingest_tests.oracle.model import Event

_BEGINNING = (0, 0, 0)
_BY_KEY = "cudrb"
"""Operations that count for the key in whose era they lie."""


def split(rng: Random, events: Sequence[Event]) -> tuple[list[Event], list[Event], PositionRange]:
    """Draw a transaction from which on events have the key in force: those below, those above, and where the
    former ones lie."""
    transactions = sorted({event.at[:2] for event in events})
    assume(len(transactions) > 1)
    start = rng.choice(transactions[1:])
    below = [event for event in events if event.at[:2] < start]
    return below, [event for event in events if event.at[:2] >= start], (_BEGINNING, (*start, 0))


@settings(max_examples=examples(EXAMPLES))
@given(randoms, cuts)
def test_what_was_folded_from_them_counts_for_no_row(rng: Random, cut: Cut) -> None:
    """As the net changes of a window that retention sealed before the key changed."""
    events = drawn(rng)
    below, above, former = split(rng, events)
    table = replace(TABLE, other_keys=(former,))
    windows = in_windows(rng, events, 2)
    # A window that was sealed holds events of one key only: what landed later with another is left out.
    before = kernels.events_table(below, TABLE, {at: f"sealed {each}" for at, each in windows.items()})
    folded = (
        kernels.fold(before, TABLE, cut),
        kernels.fold(kernels.events_table(above, TABLE, windows), TABLE),
    )
    found = kernels.current(kernels.merged(folded, TABLE, cut), table, cut)
    assert_part(kernel_states(found, above), oracle_states(above), above)
    everything = kernels.current(kernels.merged(folded, TABLE, cut), TABLE, cut)
    assert {row["_cdc_key"] for row in found} <= {row["_cdc_key"] for row in everything}


def _unprepared(events: Sequence[Event]) -> pa.Table:
    """The events as deduped events have them, with EVENT_COLUMNS."""
    windows = {event.at[:2]: "w" for event in events}
    table = kernels.events_table(events, TABLE, windows)
    own = [op in "cudrtb" for op in table["op"].to_pylist()]
    return table.filter(pa.array(own)).combine_chunks()


@settings(max_examples=examples(EXAMPLES))
@given(randoms, st.integers(1, 3))
def test_they_are_left_out_before_the_fold(rng: Random, ranges: int) -> None:
    """So are the snapshot ends of reads by another key. A truncate ends every row, whatever its key."""
    events = drawn(rng)
    starts = sorted(tuple(each.at) for each in rng.choices(events, k=2 * ranges))
    others: list[PositionRange] = list(zip(starts[::2], starts[1::2], strict=True))
    if rng.random() < 0.5:
        others.append((starts[-1], None))
    table = _unprepared(events)
    stays = [
        op not in _BY_KEY or not any(start <= at and (end is None or at < end) for start, end in others)
        for op, at in zip(
            table["op"].to_pylist(),
            zip(*(table[name].to_pylist() for name in ("epoch", "commit_lsn", "ordinal")), strict=True),
            strict=True,
        )
    ]
    due = events_to_fold(table.filter(pa.array(stays)).combine_chunks())
    assert events_to_fold(table, others).equals(due)


@pytest.mark.parametrize("open_end", [False, True])
def test_spark_leaves_out_the_same(spark: SparkSession, open_end: bool) -> None:
    rng = Random(7)
    events = lanes.with_distinct_times(lanes.in_lanes(rng, 20))
    transactions = sorted({event.at[:2] for event in events})
    middle = sorted(tuple(event.at) for event in events)[len(events) // 2]
    others: list[PositionRange] = [(middle, None) if open_end else (_BEGINNING, middle)]
    frame = lanes.frame(spark, events, dict.fromkeys(transactions, "w"))
    place = F.struct(*(F.col(name).cast("long") for name in ("epoch", "commit_lsn", "ordinal")))
    at = F.struct(*(F.lit(each).cast("long") for each in middle))
    former = (place >= at) if open_end else (place < at)
    due = to_fold(frame.where(~(former & F.col("op").isin(*_BY_KEY))))
    found = to_fold(frame, others)
    columns = list(EVENT_COLUMNS)
    assert 0 < found.count() < frame.count()
    assert found.select(columns).exceptAll(due.select(columns)).isEmpty()
    assert due.select(columns).exceptAll(found.select(columns)).isEmpty()
