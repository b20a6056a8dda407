"""Rows without a cursor of which one part lands while the next is read."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from omnisupport_ingest.landing.columns import events_table
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.sources.query.batches import Batches, Inlet
from omnisupport_ingest.sources.query.cursor import NULL_ORDINALS, CursorColumn
from omnisupport_ingest.sources.query.events import RowEvents
from omnisupport_ingest.sources.query.null_rows import NullRows
from omnisupport_ingest.sources.query.state import QueryState
from omnisupport_ingest_tests.sources.query.tickets import GRID, SOURCE, contract

pytestmark = pytest.mark.quick

TABLE = contract()
NAME = TABLE.full_name


def rows(makes: RowEvents, key: str, subject: str) -> pa.Table:
    """A row without a cursor, as it is read."""
    delete = makes.delete(f'["{key}"]', NULL_ORDINALS.start, GRID.first)
    return events_table([delete._replace(op="r", after=f'{{"id":"{key}","subject":"{subject}"}}')])


def test_a_process_that_dies_while_rows_land_has_not_said_that_it_knows_them(tmp_path: Path) -> None:
    store = LandingStore(tmp_path, SOURCE)
    epoch = store.begin_epoch("a test", None, now=GRID.first)
    makes = RowEvents(TABLE, CursorColumn.of(TABLE), GRID, epoch.number)
    batches = Batches(Inlet(store, GRID, (TABLE,), "desk.json"), epoch)
    with QueryState(store.folder) as state:
        nulls, parts = NullRows(makes, store, state), batches.parts()
        parts.add(nulls.changed(rows(makes, "1", "one")).events)
        state.expect_null_rows(NAME)
        # The next part is read before this one has landed, and nothing is remembered before both have.
        nulls.changed(rows(makes, "2", "beside it"))
        batches.land(TABLE, parts, free_windows=False)
    with QueryState(store.folder) as state:
        (changed,) = NullRows(makes, store, state).changed(rows(makes, "1", "two")).rows
    assert changed.ordinal == NULL_ORDINALS.start + 2
