"""The comparison behind the proof must find every way in which the lake can differ from its source."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from omnisupport_ingest.contracts.model import Column
from omnisupport_ingest.read.compare import Comparison, Difference, Sample, changed_since, compare
from omnisupport_ingest_tests.layers.notes import CONTRACT, LAKE, SOURCE, write_lake, write_source


def outcome(
    tmp_path: Path,
    source: list[dict],
    lake: list[dict],
    *,
    sample: Sample | None = None,
    live: int | None = None,
) -> Comparison:
    expected = write_source(tmp_path / "expected.parquet", source)
    state = write_lake(tmp_path / "state.parquet", lake)
    return compare(CONTRACT, expected, [str(state)], sample=sample, source_live=live)


@pytest.mark.parametrize(
    ("source", "lake"),
    [
        pytest.param([SOURCE], [LAKE], id="equal"),
        pytest.param([], [], id="both empty"),
        pytest.param([], [LAKE | {"_cdc_is_deleted": True}], id="deleted in both"),
        pytest.param(
            [SOURCE | {"amount": "NaN"}],
            [LAKE | {"amount": None, "_cdc_exact": [("amount", "NaN")]}],
            id="a value its type cannot hold, kept as exact text",
        ),
        pytest.param(
            [SOURCE | {"gone_at": "2026-01-02 00:00:00+00"}],
            [LAKE | {"gone_at": datetime(2026, 1, 2, tzinfo=UTC), "_cdc_is_deleted": True}],
            id="softly deleted in the source",
        ),
    ],
)
def test_what_is_the_same_does_not_differ(tmp_path, source, lake):
    assert outcome(tmp_path, source, lake).differences == 0


@pytest.mark.parametrize(
    ("source", "lake", "columns"),
    [
        pytest.param([SOURCE], [], ("missing in the lake",), id="a row the lake does not have"),
        pytest.param([], [LAKE], ("not in the source",), id="a live row the source does not have"),
        pytest.param(
            [SOURCE], [LAKE | {"_cdc_is_deleted": True}], ("deleted in the lake",), id="deleted too much"
        ),
        pytest.param([SOURCE], [LAKE, LAKE], ("twice in the lake",), id="a row that the lake has twice"),
        pytest.param(
            [SOURCE],
            [LAKE, LAKE | {"_cdc_is_deleted": True, "title": "b"}],
            ("twice in the lake",),
            id="a live row and a deleted one of the same key",
        ),
        pytest.param([SOURCE], [LAKE | {"title": "b"}], ("title",), id="another text"),
        pytest.param([SOURCE | {"title": ""}], [LAKE | {"title": None}], ("title",), id="empty is not NULL"),
        pytest.param([SOURCE | {"title": None}], [LAKE | {"title": ""}], ("title",), id="NULL is not empty"),
        pytest.param([SOURCE], [LAKE | {"amount": Decimal("1.51")}], ("amount",), id="another number"),
        pytest.param(
            [SOURCE | {"amount": "NaN"}], [LAKE | {"amount": None}], ("amount",), id="NaN became NULL"
        ),
        pytest.param([SOURCE], [LAKE | {"tags": ["x", "y", None]}], ("tags",), id="another array"),
        pytest.param(
            [SOURCE], [LAKE | {"at": datetime(2026, 1, 1, tzinfo=UTC)}], ("at",), id="half a second off"
        ),
    ],
)
def test_every_difference_is_found_and_named(tmp_path, source, lake, columns):
    found = outcome(tmp_path, source, lake)
    assert (found.differences, found.examples) == (1, (Difference("1", columns),))


def test_a_timestamp_of_a_source_with_a_zone_is_the_same_as_one_without(tmp_path):
    contract = replace(
        CONTRACT, columns=(*CONTRACT.columns[:4], Column("at", "timestamp"), CONTRACT.columns[5])
    )
    state = write_lake(tmp_path / "state.parquet", [LAKE])
    for shown in ("2026-01-01 00:00:00.5+00", "2026-01-01 00:00:00.5"):
        expected = write_source(tmp_path / "expected.parquet", [SOURCE | {"at": shown}])
        assert compare(contract, expected, [str(state)]).differences == 0, shown


def test_a_live_row_with_an_unresolved_column_is_counted_even_if_its_value_happens_to_agree(tmp_path):
    found = outcome(
        tmp_path, [SOURCE | {"title": None}], [LAKE | {"title": None, "_cdc_unresolved": ["title"]}]
    )
    assert (found.differences, found.unresolved) == (0, 1)


def test_a_key_whose_type_cannot_hold_it_is_the_same_key(tmp_path):
    contract = replace(CONTRACT, key=("at",))
    expected = write_source(tmp_path / "expected.parquet", [SOURCE | {"at": "infinity"}])
    state = write_lake(
        tmp_path / "state.parquet",
        [LAKE | {"at": None, "_cdc_key": '["infinity"]', "_cdc_exact": [("at", "infinity")]}],
    )
    assert compare(contract, expected, [str(state)]).differences == 0


EVENTS_SCHEMA = pa.schema(
    [("epoch", pa.int64()), ("commit_lsn", pa.int64()), ("source_schema", pa.string()), ("key", pa.string())]
)


def events(tmp_path: Path, *found: tuple[int, str | None]) -> tuple[str, ...]:
    """A file of accepted events of epoch 1: commit LSN and key."""
    rows = [
        {"epoch": 1, "commit_lsn": lsn, "source_schema": CONTRACT.schema, "key": key} for lsn, key in found
    ]
    path = tmp_path / "events.parquet"
    pq.write_table(pa.Table.from_pylist(rows, EVENTS_SCHEMA), path)
    return (str(path),)


def test_of_a_sample_keys_that_have_changed_since_are_left_out_and_counted(tmp_path):
    later = Sample(None, events(tmp_path, (9, '["2"]'), (10, '["1"]')), (), 1, 10)
    assert changed_since(CONTRACT, later) == (1, 0)
    other = LAKE | {"id": 2, "_cdc_key": '["2"]', "title": "b"}
    found = outcome(
        tmp_path, [SOURCE, SOURCE | {"id": "2"}], [LAKE | {"title": "newer"}, other], sample=later, live=2
    )
    assert (found.differences, found.examples) == (1, (Difference("2", ("title",)),))
    assert (found.skipped, found.miscounted) == (1, None)


def test_an_event_without_a_key_is_about_every_row(tmp_path):
    assert changed_since(CONTRACT, Sample(None, events(tmp_path, (10, None)), (), 1, 10)) == (0, 1)


def test_a_row_outside_of_the_sample_is_found_by_the_count_alone(tmp_path):
    # Bound 0: no key of the lake is in the sample, and none of the source was read.
    nothing = Sample("00000000", (), (), 1, 10)
    found = outcome(tmp_path, [], [LAKE], sample=nothing, live=2)
    assert (found.differences, found.miscounted, found.holds) == (0, 1, False)
