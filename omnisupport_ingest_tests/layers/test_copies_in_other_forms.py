"""Copies of an event that landed in several forms are counted as duplicates, and share its reviews."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from omnisupport_ingest.cdc.contents import Contents
from omnisupport_ingest.contracts.subject_keys import SubjectKeys
from omnisupport_ingest.layers.events.event_copies import duplicates_in_other_forms, reviews_of_all_forms
from omnisupport_ingest_tests.cdc.test_contents import PEOPLE, raw_events
from omnisupport_ingest_tests.layers.test_event_copies import written

ADA: dict[str, Any] = {"id": "1", "plan": None, "email": "ada@x.org", "name": "Ada"}


@pytest.fixture
def keys(tmp_path: Path) -> SubjectKeys:
    return SubjectKeys(tmp_path / "keys" / "subjects.sqlite")


def counted(tmp_path: Path, keys: SubjectKeys, rows: pa.Table) -> dict[str, int]:
    pq.write_table(rows, tmp_path / "raw.parquet")
    return duplicates_in_other_forms([str(tmp_path / "raw.parquet")], (PEOPLE,), keys, tmp_path / "spill")


def test_an_event_that_landed_plain_and_encrypted_is_one(tmp_path: Path, keys: SubjectKeys) -> None:
    rows = raw_events(keys, [("plain", ADA), ("encrypted", ADA), ("reordered", ADA), ("encrypted", ADA)])
    hashes = len(set(rows["event_hash"].to_pylist()))
    assert hashes > 1
    assert counted(tmp_path, keys, rows) == {"public.people": hashes - 1}
    keys.destroy(keys.ids_of([("desk", "person", "1")]))
    assert counted(tmp_path, keys, rows) == {"public.people": hashes - 1}, "what is readable is the same"


def test_two_contents_are_two_and_equal_hashes_are_counted_elsewhere(
    tmp_path: Path, keys: SubjectKeys
) -> None:
    other = ADA | {"name": json.dumps("Eve")}
    two = raw_events(keys, [("plain", ADA), ("encrypted", other)])
    assert counted(tmp_path, keys, two) == {"public.people": 0}
    assert counted(tmp_path, keys, raw_events(keys, [("plain", ADA), ("plain", ADA)])) == {}
    assert duplicates_in_other_forms([], (PEOPLE,), keys, tmp_path) == {}


def test_what_does_not_fit_into_memory_goes_where_it_may(
    tmp_path: Path, keys: SubjectKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not into the folder that the command was given in: of a table that lands plain it has values."""
    connect, places = duckdb.connect, list[str]()

    def watched(*arguments: Any, **named: Any) -> duckdb.DuckDBPyConnection:
        made = connect(*arguments, **named)
        places.append(*made.execute("SELECT current_setting('temp_directory')").fetchall()[0])
        return made

    monkeypatch.setattr(duckdb, "connect", watched)
    one = raw_events(keys, [("plain", ADA), ("encrypted", ADA)])
    assert counted(tmp_path, keys, one) == {"public.people": 1}
    assert places == [str(tmp_path / "spill")]


@pytest.mark.parametrize("erased", [False, True])
def test_what_is_decided_of_an_event_holds_for_its_copies_in_other_forms(
    tmp_path: Path, keys: SubjectKeys, erased: bool
) -> None:
    """And not for an event with other content, where that can be told."""
    delivered = [("plain", ADA), ("encrypted", ADA), ("once", ADA), ("encrypted", ADA | {"name": "Eve"})]
    rows = raw_events(keys, delivered)
    if erased:
        keys.destroy(keys.ids_of([("desk", "person", "1")]))
    files = written(tmp_path, rows.to_pylist(), 2)
    names = ("epoch", "commit_lsn", "ordinal", "event_hash")
    plain, encrypted, once, other = zip(*(rows[name].to_pylist() for name in names), strict=True)
    assert len({plain, encrypted, once, other}) == 4
    contents = Contents((PEOPLE,), keys)
    alike = {plain, encrypted, once, other} if erased else {plain, encrypted, once}
    assert reviews_of_all_forms(files, contents, {once: "discard"}) == dict.fromkeys(alike, "discard")
    # What was decided of a copy itself stays.
    of_both = {once: "discard", plain: "release"}
    found = reviews_of_all_forms(files, contents, of_both)
    assert found.keys() == alike and found | of_both == found
    elsewhere = {(once[0], once[1] + 1, *once[2:]): "discard"}
    assert reviews_of_all_forms(files, contents, elsewhere) == elsewhere
    assert reviews_of_all_forms(files, Contents(), of_both) == of_both


@pytest.mark.parametrize("strictest", ["discard", "discard copies"])
def test_of_several_decisions_the_strictest_counts_in_whatever_order_the_files_have_them(
    tmp_path: Path, keys: SubjectKeys, strictest: str
) -> None:
    """Three contents of which two were reviewed are one event once their subject is erased."""
    delivered = [("encrypted", ADA | {"name": json.dumps(name)}) for name in ("Ada", "Eve", "Ann")]
    rows = raw_events(keys, delivered)
    keys.destroy(keys.ids_of([("desk", "person", "1")]))
    names = ("epoch", "commit_lsn", "ordinal", "event_hash")
    ada, eve, ann = zip(*(rows[name].to_pylist() for name in names), strict=True)
    reviews = {eve: strictest, ann: "release"}
    for number, order in enumerate(([0, 1, 2], [2, 1, 0])):
        (tmp_path / str(number)).mkdir()
        files = written(tmp_path / str(number), rows.take(order).to_pylist(), 1)
        found = reviews_of_all_forms(files, Contents((PEOPLE,), keys), reviews)
        assert found == reviews | {ada: strictest}
