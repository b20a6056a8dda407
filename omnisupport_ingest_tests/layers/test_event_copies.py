"""Marks that a task finds from narrow columns: those that Spark finds by a shuffle, of whatever events."""

from __future__ import annotations

import random
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from omnisupport_ingest.cdc.contents import AS_LANDED, Contents
from omnisupport_ingest.cdc.dedupe import mark_copies as mark_by_shuffle
from omnisupport_ingest.cdc.envelope import RAW_TYPE
from omnisupport_ingest.lake.file_tasks import Output
from omnisupport_ingest.lake.layout import LakeFile
from omnisupport_ingest.lake.schema import arrow_schema
from omnisupport_ingest.layers.events import event_copies
from omnisupport_ingest.layers.events.deduped import to_judge
from omnisupport_ingest.layers.events.event_copies import Copies, Marks, Together, mark_copies, mark_windows

RAW = arrow_schema(RAW_TYPE, without=())
WINDOW = "2026-11-21T12"
NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)


def event(number: int, rng: random.Random) -> dict[str, Any]:
    captured = rng.random() < 0.5
    return {
        "window": WINDOW,
        "epoch": rng.choice((1, 2)),
        "commit_lsn": rng.choice((0, 7, 8)),
        "ordinal": rng.choice((-2, 0, 2)),
        "identity": rng.choice((None, "a", 'null,"t"]', 'null,"t","0123456789abcdef"]')),
        "event_hash": rng.choice((1, 1, 1, 2)),
        "newest_epoch_before": rng.choice((None, 1, 2)),
        "watermark_before": rng.choice((None, NOON, NOON + timedelta(seconds=1))),
        "landed_at": NOON + timedelta(seconds=rng.choice((0, 1))),
        "batch_id": rng.choice(("b-1", "b-2", "B-3")),
        "file_row": None if captured else rng.choice((0, 1, 5)),
        # Only to tell events apart in what is compared.
        "tx_id": number,
    }


def written(folder: Path, rows: list[dict[str, Any]], files: int) -> list[LakeFile]:
    found = []
    for number in range(files):
        mine = rows[number::files]
        path = folder / f"part-{number}.parquet"
        table = pa.Table.from_pylist(mine, schema=RAW).drop_columns(["window"])
        pq.write_table(table, path, row_group_size=7)
        size = path.stat().st_size
        found.append(LakeFile(path.name, str(path), WINDOW, (("window", WINDOW),), len(mine), size))
    return found


def marked(
    folder: Path, files: list[LakeFile], contents: Contents = AS_LANDED, *, parts: int = 1
) -> list[tuple[int, int, bool]]:
    """``tx_id``, copy and collision of every event, as whoever judges a file sees them."""
    folder = folder / f"output-{parts}"
    output = Output(folder, 0, RAW, ("window",))
    for part in range(parts):
        mark_copies(output, Together(tuple(enumerate(files)), part, parts), contents)
    output.close()
    return as_seen(put_aside(folder, files).of(files), files)


def put_aside(output: Path, files: list[LakeFile]) -> Copies:
    marks = tuple(str(each) for each in sorted((output / "aside").iterdir()))
    return Copies(marks, {file.uri: number for number, file in enumerate(files)})


def as_seen(copies_found: Mapping[str, Marks], files: list[LakeFile]) -> list[tuple[int, int, bool]]:
    found = []
    for file in files:
        numbers = pq.read_table(file.uri)["tx_id"].to_pylist()
        of_file = copies_found[file.uri]
        for start in range(0, len(numbers), 5):
            end = min(start + 5, len(numbers))
            copies, collisions = of_file.between(start, end)
            found += zip(numbers[start:end], copies.to_pylist(), collisions.to_pylist(), strict=True)
    return sorted(found)


@pytest.mark.quick
def test_they_are_those_of_a_shuffle(tmp_path: Path, spark: SparkSession) -> None:
    rng = random.Random(3)
    rows = [event(number, rng) for number in range(400)]
    files = written(tmp_path, rows, 3)
    shuffled = mark_by_shuffle(to_judge(spark.createDataFrame(pa.Table.from_pylist(rows, schema=RAW))))
    # Of what arrived in one instant, from one row of one file, the order is nobody's.
    ties = {key for key, count in _arrivals(rows).items() if count > 1}
    expected = {row["tx_id"]: (row["copy"], row["collision"]) for row in shuffled.collect()}
    found = {number: (copy, collision) for number, copy, collision in marked(tmp_path, files)}
    assert found.keys() == expected.keys()
    differ = [row for row in rows if found[row["tx_id"]] != expected[row["tx_id"]]]
    assert all(_arrival(row) in ties for row in differ)
    assert {key: each[1] for key, each in found.items()} == {key: each[1] for key, each in expected.items()}
    assert sum(copy > 1 for copy, _ in found.values()) == sum(copy > 1 for copy, _ in expected.values()) > 50
    assert any(collision for _, collision in found.values())


def test_parts_of_a_window_are_marked_as_the_whole_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(4)
    rows = [
        event(number, rng) | {"landed_at": NOON + timedelta(microseconds=number)} for number in range(400)
    ]
    files = written(tmp_path, rows, 3)
    whole = marked(tmp_path, files)
    for parts in (2, 3):
        assert marked(tmp_path, files, parts=parts) == whole
    numbered = tuple(enumerate(files))
    assert Together.of(numbered) == [Together(numbered)]
    monkeypatch.setattr(event_copies, "_ROWS_OF_PARTS", 400)
    one, other = Together.of(numbered)
    compared = [event_copies._rows_to_compare(part, by_identity=False) for part in (one, other)]
    assert all(sum(map(len, part)) > 50 for part in compared)
    of_whole = event_copies._rows_to_compare(Together(numbered), by_identity=False)
    for rows_of_parts, rows_of_whole in zip(zip(*compared, strict=True), of_whole, strict=True):
        # Each row is in one part.
        assert sorted(np.concatenate(rows_of_parts)) == rows_of_whole.tolist()
    assert one.rows + other.rows == 400
    # With more events than a task may number, one task compares all.
    monkeypatch.setattr(event_copies, "MOST_NUMBERED", 399)
    assert Together.of(numbered) == [Together(numbered)]


def _arrival(row: dict[str, Any]) -> tuple[Any, ...]:
    names = (
        "epoch", "commit_lsn", "ordinal", "identity", "event_hash", "newest_epoch_before", "watermark_before",
        "landed_at", "batch_id", "file_row",
    )  # fmt: skip
    identity = (row["identity"] or "").replace(',"0123456789abcdef"', "")
    return tuple(identity if name == "identity" else row[name] for name in names)


def _arrivals(rows: list[dict[str, Any]]) -> dict[tuple[Any, ...], int]:
    found: dict[tuple[Any, ...], int] = {}
    for row in rows:
        found[_arrival(row)] = found.get(_arrival(row), 0) + 1
    return found


def test_chunks_that_were_read_side_by_side_have_no_copies_which_their_positions_alone_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing but positions is looked at.
    monkeypatch.setattr(event_copies, "_narrow", None)
    rng = random.Random(3)
    rows = [
        event(number, rng) | {"epoch": 1, "commit_lsn": 7, "ordinal": number - 1_000} for number in range(60)
    ]
    # The ordinals of the files alternate.
    files = written(tmp_path, rows, 2)
    assert marked(tmp_path, files) == [(number, 1, False) for number in range(60)]


def test_a_task_marks_several_windows_and_another_reads_the_marks_of_all_its_files_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, windows, expected = random.Random(3), list[list[LakeFile]](), list[tuple[int, int, bool]]()
    for name in ("one", "none", "other"):
        folder = tmp_path / name
        folder.mkdir()
        # No two arrive in one instant, of which the order is nobody's.
        rows = [
            event(number, rng) | {"landed_at": NOON + timedelta(microseconds=number)} for number in range(40)
        ]
        if name == "none":
            rows = [row | {"epoch": 1, "commit_lsn": 7, "ordinal": row["tx_id"]} for row in rows]
        windows.append(written(folder, rows, 3))
        expected += marked(folder, windows[-1])
    files = [file for window in windows for file in window]
    numbers = iter(enumerate(files))
    output = Output(tmp_path / "output", 0, RAW, ("window",))
    together = [Together(tuple(next(numbers) for _ in window)) for window in windows]
    assert int(mark_windows(output, together)) > 0
    output.close()
    read: list[object] = []
    dataset = event_copies.ds.dataset
    monkeypatch.setattr(
        event_copies.ds, "dataset", lambda marks, **how: read.append(marks) or dataset(marks, **how)
    )
    found = put_aside(tmp_path / "output", files).of(files)
    assert len(read) == 1
    assert [bool(found[file.uri]) for file in windows[1]] == [False] * 3
    assert sorted(as_seen(found, files)) == sorted(expected)


@given(seed=st.integers(0, 10_000), count=st.integers(1, 60), files=st.integers(1, 4))
def test_of_each_content_one_is_the_first_and_two_contents_collide(
    tmp_path_factory: pytest.TempPathFactory, seed: int, count: int, files: int
) -> None:
    rng = random.Random(seed)
    rows = [event(number, rng) for number in range(count)]
    folder = tmp_path_factory.mktemp("marks")
    found = marked(folder, written(folder, rows, min(files, count)))
    places: dict[tuple[Any, ...], set[int]] = {}
    contents: dict[tuple[Any, ...], list[int]] = {}
    by_number = {number: (copy, collision) for number, copy, collision in found}
    for row in rows:
        place = _arrival(row)[:4] if row["identity"] is not None else (*_arrival(row)[:3], None)
        places.setdefault(place, set()).add(row["event_hash"])
        contents.setdefault((*place, row["event_hash"]), []).append(row["tx_id"])
    for (*place, _), numbers in contents.items():
        assert sorted(by_number[each][0] for each in numbers) == list(range(1, len(numbers) + 1))
        assert {by_number[each][1] for each in numbers} == {len(places[tuple(place)]) > 1}


def test_a_file_of_an_earlier_version_lacks_a_column(tmp_path: Path) -> None:
    rows = [event(number, random.Random(5)) | {"identity": None, "file_row": None} for number in range(3)]
    files = written(tmp_path, rows, 1)
    pq.write_table(pq.read_table(files[0].uri).drop_columns(["identity", "file_row"]), files[0].uri)
    assert sorted(copy for _, copy, _ in marked(tmp_path, files)) == [1, 2, 3]
