"""Copies of events that raw holds: which are duplicates, which are not judged yet."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from pyarrow import Table

from omnisupport_ingest.cdc.envelope import RAW_TYPE
from omnisupport_ingest.cdc.fold import table_columns_of
from omnisupport_ingest.lake.layout import LakeFile
from omnisupport_ingest.lake.schema import arrow_schema
from omnisupport_ingest.landing.manifest import DataFile
from omnisupport_ingest.position import Lsn, Position
from omnisupport_ingest.read.cell_origins import KeyEvent, origins_of
from omnisupport_ingest.read.explain import Explanation, Landed, _rows, copies_of
from omnisupport_ingest_tests.layers.story import Story

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
KEY, OTHER = '["1"]', '["2"]'


def event(lsn: int, batch: str) -> KeyEvent:
    return KeyEvent("w", (1, lsn, 0), "u", KEY, NOON, batch, NOON)


def raw(lsn: int, batch: str, key: str = KEY, identity: str | None = None) -> tuple[str, dict[str, object]]:
    facts = {"epoch": 1, "commit_lsn": lsn, "ordinal": 0, "identity": identity, "key": key}
    return "w", facts | {"batch_id": batch, "landed_at": NOON}


def told(*rows: tuple[str, dict[str, object]]) -> list[tuple[int, str, bool, int]]:
    copies = copies_of(KEY, [event(10, "a")], rows)
    return [(each.position[1], each.batch_id, each.duplicate, each.copies) for each in copies]


def test_the_event_that_is_kept_is_no_copy() -> None:
    assert told(raw(10, "a")) == []


def test_the_same_position_from_another_batch_or_twice_in_one_is_a_duplicate() -> None:
    assert told(raw(10, "a"), raw(10, "b"), raw(10, "a")) == [(10, "a", True, 1), (10, "b", True, 1)]


def test_an_event_at_a_position_that_no_layer_has_is_not_judged_yet() -> None:
    assert told(raw(10, "a"), raw(20, "c")) == [(20, "c", False, 1)]


def test_a_copy_is_known_by_its_position_whatever_became_of_its_key() -> None:
    assert told(raw(10, "a", "protected"), raw(10, "b", "protected")) == [(10, "b", True, 1)]
    assert told(raw(10, "a"), raw(20, "b", OTHER)) == []


def test_where_positions_are_not_unique_the_key_tells_events_apart() -> None:
    assert told(raw(10, "a", identity="1 u"), raw(10, "a", OTHER, identity="2 u")) == []


def test_an_event_names_the_file_of_its_window_and_position() -> None:
    def file(path: str, window: str, first: int, last: int) -> DataFile:
        at = (Position(1, Lsn(lsn), 0) for lsn in (first, last))
        return DataFile(path, window, 1, 1, "", *at, True, {"public.notes": 1})

    files = (file("other", "v", 10, 10), file("first", "w", 1, 9), file("second", "w", 10, 20))
    landed = Landed("a", files, "stream", None)
    assert landed.file_of(event(10, "a")) == "second"
    assert Landed("a", (), None, None).file_of(event(10, "a")) is None


def test_a_row_whose_source_marks_it_as_deleted_names_what_marked_it(tmp_path: Path) -> None:
    contract = replace(Story(tmp_path).contract, soft_delete_column="body")
    created = replace(event(10, "a"), op="c", after='{"id": "1", "title": "one", "body": null}')
    marked = replace(event(20, "a"), after='{"id": "1", "title": "one", "body": "2026-01-01"}')

    def told(*events: KeyEvent) -> Explanation:
        origins = origins_of(events, KEY, table_columns_of(contract))
        return Explanation(
            contract, KEY, events, origins, (), frozenset(), {}, (), {}, (), shown=None, waiting=()
        )

    found = told(created, marked).marked
    assert found is not None
    assert found.event == marked
    assert told(created).marked is None
    ended = replace(event(30, "a"), op="d")
    assert told(created, marked, ended).marked is None


def test_images_are_read_only_where_the_key_is(tmp_path: Path) -> None:
    """Files of events are not ordered by key, and images are most of their bytes."""
    schema = arrow_schema(RAW_TYPE, without=("window", "source_table"))
    rows = [
        {
            "key": f'["{number % 5 if number < 16 else 1 + number % 2 * 2}"]',
            "op": "u",
            "source_schema": "public",
            "after": f"image {number}",
        }
        for number in range(20)
    ] + [{"key": KEY, "op": "u", "source_schema": "public", "after": "alone"}, {"key": None, "op": "t"}]
    path = tmp_path / "events.parquet"
    pq.write_table(Table.from_pylist(rows, schema), path, row_group_size=4)
    # The images of the group before the last do not have the key: they cannot be read.
    group = pq.ParquetFile(path).metadata.row_group(4)
    images = next(
        each for n in range(group.num_columns) if (each := group.column(n)).path_in_schema == "after"
    )
    content = bytearray(path.read_bytes())
    begin = images.dictionary_page_offset or images.data_page_offset
    content[begin : begin + images.total_compressed_size] = b"\xff" * images.total_compressed_size
    path.write_bytes(content)
    file = LakeFile("events.parquet", str(path), "w", (), len(rows), path.stat().st_size)
    where = (pc.field("key") == '["2"]') & (pc.field("source_schema") == "public")
    found = _rows(file, schema, ["key", "after", "ordinal"], where)
    assert [row["after"] for row in found] == ["image 2", "image 7", "image 12"]
    assert found[0] == {"key": '["2"]', "after": "image 2", "ordinal": None}
    with pytest.raises(OSError):
        _rows(file, schema, ["after"], pc.field("key") == '["3"]')
