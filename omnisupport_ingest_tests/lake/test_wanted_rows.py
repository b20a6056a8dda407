"""Rows of certain keys, read from files of any make: the same as a filter of all live rows gives."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import given
from hypothesis import strategies as st

from omnisupport_ingest.lake.deletion_vectors import write_vectors
from omnisupport_ingest.lake.layout import LakeFile
from omnisupport_ingest.lake.wanted_rows import Wanted, _wanted_rows

SCHEMA = pa.schema(
    [
        ("window", pa.string()),
        ("key", pa.string()),
        ("moved_from", pa.string()),
        ("place", pa.int64()),
        ("number", pa.int32()),
        ("value", pa.struct([("text", pa.string())])),
        ("added_later", pa.string()),
    ]
)
FEW = st.sampled_from(["a", "b", "c", "d", None])
PLACE = st.integers(0, 5)
ROW = st.tuples(FEW, st.sampled_from([None, None, None, "a"]), PLACE, PLACE, st.integers(0, 99))
FILE = st.tuples(st.lists(ROW, max_size=12), st.sets(st.integers(0, 11)), st.integers(1, 5), st.booleans())


def written(folder: Path, number: int, told: tuple) -> tuple[LakeFile, list[tuple]]:
    """A file of a window, and its live rows. Some of its rows are marked as deleted."""
    rows, dead, of_a_group, has_added = told
    dead = {each for each in dead if each < len(rows)}
    columns = {
        "key": [row[0] for row in rows],
        "moved_from": [row[1] for row in rows],
        "place": [row[2] for row in rows],
        "number": [row[3] for row in rows],
        "value": [{"text": str(row[4])} for row in rows],
    }
    if has_added:
        columns["added_later"] = [str(row[4]) for row in rows]
    kept = [SCHEMA.field(name) for name in columns]
    path = folder / f"{number}.parquet"
    pq.write_table(pa.table(columns, pa.schema(kept)), path, row_group_size=of_a_group)
    vector = write_vectors(folder, "unit", {path.name: sorted(dead)})[path.name] if dead else None
    window = f"w{number % 2}"
    file = LakeFile(
        path.name, str(path), window, (("window", window),), len(rows) - len(dead), 1, vector=vector
    )
    live = [
        (window, *row[:4], {"text": str(row[4])}, str(row[4]) if has_added else None)
        for place, row in enumerate(rows)
        if place not in dead
    ]
    return file, live


PLACES = st.sets(st.integers(0, 5), max_size=3)


WINDOW = st.sampled_from([None, "w0"])


@given(st.lists(FILE, max_size=4), st.sets(st.sampled_from("abcx")), PLACES, PLACES, WINDOW, st.booleans())
def test_they_are_those_of_the_keys_moved_of_a_place_or_without_a_key(
    told: list[tuple],
    keys: set[str],
    places: set[int],
    numbers: set[int],
    only: str | None,
    keyless: bool,
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        made = [written(Path(folder), number, each) for number, each in enumerate(told)]
        others = {"place": tuple(places), "number": tuple(numbers)}
        wanted = Wanted("key", tuple(keys), "moved_from", others, {"window": only} if only else {}, keyless)
        shares = [[file for file, _ in made[:2]], [file for file, _ in made[2:]]]
        asked = pa.RecordBatch.from_pydict({"id": pa.array([0, 1])})
        batches = list(_wanted_rows([asked], shares, wanted, SCHEMA))
    found = [tuple(row.values()) for batch in batches for row in batch.to_pylist()]
    assert all(batch.schema == SCHEMA for batch in batches)
    assert found == [
        row
        for _, live in made
        for row in live
        if only in (None, row[0])
        and (
            (keyless and row[1] is None)
            or row[1] in keys
            or row[2] is not None
            or (row[3] in places and row[4] in numbers)
        )
    ]
