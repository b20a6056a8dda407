"""Whose a cell above raw is: the subject's that its row names, whatever landing and raw still have of it."""

from __future__ import annotations

import binascii
import json
from dataclasses import replace
from pathlib import Path
from typing import cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from omnisupport_ingest.contracts.encrypted_images import MARK
from omnisupport_ingest.contracts.model import KeyEra
from omnisupport_ingest.contracts.recent_keys import ID_BYTES
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.read import subject_traces
from omnisupport_ingest.read.subject_traces import Wanted, _event_cells, key_ids_of_row
from omnisupport_ingest_tests.cdc.test_subject_values import ORDERS

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
    events = events.append_column("envelope", pa.nulls(5, pa.string()))
    for keys in (set[str](), {'["2"]'}):
        each = wanted("owner", keys)
        found = [
            each.of_image(key, image) for key, image in zip(events["key"].to_pylist(), said, strict=True)
        ]
        assert found == each.of_rows(ROWS).to_pylist() == each.may_have(events).to_pylist()


LINES = {
    "of the subject": ('["2"]', '{"op": "d", "before": {"owner": 1, "address": "x"}, "after": null}', 1),
    "of somebody else": ('["3"]', '{"op": "d", "before": {"owner": 2, "address": "x"}, "after": null}', 0),
    "of nobody, in its row": ('["3"]', '{"op": "d", "before": {"owner": null, "address": "x"}}', 1),
    "not readable, of its row": ('["3"]', "1;2;3", 1),
    "not readable, of another row": ('["2"]', "1;2;3", 0),
}


@pytest.mark.parametrize(("key", "line", "count"), LINES.values(), ids=LINES.keys())
def test_a_delivered_line_that_names_the_subject_is_a_cell(
    tmp_path: Path, key: str, line: str, count: int
) -> None:
    pq.write_table(held(key, None, line), tmp_path / "events.parquet")
    assert _event_cells(tmp_path / "events.parquet", ORDERS, wanted("owner", set())) == count


def test_an_image_of_the_subjects_row_that_cannot_be_read_is_a_cell(tmp_path: Path) -> None:
    pq.write_table(held('["3"]', "no image", None), tmp_path / "events.parquet")
    assert _event_cells(tmp_path / "events.parquet", ORDERS, wanted("owner", set())) == 1


def held(key: str, after: str | None, line: str | None) -> pa.Table:
    columns = {"source_schema": "public", "source_table": "orders", "key": key, "before": None}
    schema = pa.schema([(name, pa.string()) for name in (*columns, "after", "envelope")])
    return pa.Table.from_pylist([columns | {"after": after, "envelope": line}], schema=schema)


def test_keys_of_a_row_are_those_of_events_by_its_present_key(monkeypatch: pytest.MonkeyPatch) -> None:
    # Until the second event, the text ["1"] was the key of another row.
    former, present = bytes(ID_BYTES), bytes([1] * ID_BYTES)
    events = pa.Table.from_pylist(
        [
            encrypted(former, (1, 100, 5)),
            encrypted(present, (1, 100, 6)),
            encrypted(present, (2, 0, 0)) | {"key": '["2"]'},
        ]
    )
    events = events.set_column(events.column_names.index("epoch"), "epoch", events["epoch"].cast(pa.int32()))
    (batch,) = events.combine_chunks().to_batches()
    monkeypatch.setattr(subject_traces, "landed_events", lambda *_: [("landing", Path(), "", batch)])
    eras = (KeyEra(("amount",), 0, Lsn(0), 0), KeyEra(ORDERS.key, 1, Lsn(100), 6))
    orders = replace(ORDERS, key_eras=eras, key_era=1)
    workspace = cast(Workspace, None)
    assert key_ids_of_row(workspace, orders, '["1"]') == {present}
    assert key_ids_of_row(workspace, ORDERS, '["1"]') == {former, present}


def encrypted(key_id: bytes, position: tuple[int, int, int]) -> dict[str, object]:
    """An event at ``position`` of the row ["1"], with an image that the key called ``key_id`` encrypted."""
    body = binascii.b2a_base64(key_id, newline=False).decode()
    image = f'{{"owner":"1"{MARK}{body}"}}'
    event = {"source_schema": "public", "source_table": "orders", "key": '["1"]', "after": image}
    at = dict(zip(("epoch", "commit_lsn", "ordinal"), position, strict=True))
    return event | {"before": "", "envelope": "", "moved_from_key": ""} | at
