"""Whose a cell above raw is: the subject's that its row names, whatever landing and raw still have of it."""

from __future__ import annotations

import json

import pyarrow as pa

from omnisupport_ingest.read.subject_traces import Wanted

ROWS = pa.table(
    {
        "_cdc_key": ['["1"]', '["2"]', '["3"]', '["4"]', '["5"]'],
        "owner": pa.array([1, 2, None, None, 1], pa.int64()),
    }
)


def wanted(named: str | None, keys: set[str]) -> Wanted:
    return Wanted(frozenset({"address"}), named, {"1"}, {'["3"]'}, keys)


def test_rows_count_by_whom_they_name_also_those_that_landing_and_raw_forgot() -> None:
    # Row 2 was the subject's once, row 3 said of nobody's, of row 5 no image is left.
    assert wanted("owner", set()).of_rows(ROWS).to_pylist() == [True, False, True, False, True]
    # While windows wait, a row may hold what it was sent before.
    assert wanted("owner", {'["2"]'}).of_rows(ROWS).to_pylist() == [True, True, True, False, True]
    # Where the lake does not have whom they name, their keys tell.
    assert wanted(None, {'["1"]', '["2"]'}).of_rows(ROWS).to_pylist() == [True, True, False, False, False]


def test_images_of_events_count_alike() -> None:
    said = [{"owner": None if each is None else str(each)} for each in ROWS["owner"].to_pylist()]
    images = [json.dumps(each, separators=(",", ":")) for each in said]
    events = pa.table({"key": ROWS["_cdc_key"], "before": pa.nulls(5, pa.string()), "after": images})
    for keys in (set[str](), {'["2"]'}):
        each = wanted("owner", keys)
        found = [
            each.of_image(key, image) for key, image in zip(events["key"].to_pylist(), said, strict=True)
        ]
        assert found == each.of_rows(ROWS).to_pylist() == each.may_have(events).to_pylist()
