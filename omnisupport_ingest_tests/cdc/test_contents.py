"""What is the same event where values landed encrypted: whatever form they landed in, before and after an
erasure."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from omnisupport_ingest.cdc.contents import Contents
from omnisupport_ingest.cdc.dedupe import mark_copies as mark_by_shuffle
from omnisupport_ingest.cdc.envelope import RAW_TYPE
from omnisupport_ingest.cdc.event_hashes import event_hashes
from omnisupport_ingest.contracts.model import Subject, TableContract
from omnisupport_ingest.contracts.subject_keys import SubjectKeys, SubjectKeysUnreadable
from omnisupport_ingest.lake.schema import arrow_schema
from omnisupport_ingest.landing.columns import events_table
from omnisupport_ingest.layers.events.deduped import to_judge
from omnisupport_ingest.sources.encrypting import EncryptedLanding
from omnisupport_ingest_tests.examples import examples
from omnisupport_ingest_tests.layers.test_event_copies import NOON, WINDOW, marked, written
from omnisupport_ingest_tests.sources.test_encrypting import event, personal

RAW = arrow_schema(RAW_TYPE, without=())
PEOPLE = personal("people", ["id", "plan", "email", "name"], ["email", "name"], Subject("person", "id"))
ONCE = replace(
    personal("people", ["id", "plan", "email", "name"], ["email"], Subject("person", "id")),
    allowed_lateness=timedelta(hours=1),
)
"""What its contract said before: another column was not personal."""

Delivered = tuple[str, dict[str, Any]]
"""How an image landed (``plain``, ``encrypted``, ``reordered``, ``once``), and the image."""

TEXTS = st.sampled_from([None, "a", 'b"\\', "ü"])
IMAGES = st.fixed_dictionaries({"id": st.just("1"), "plan": TEXTS, "email": TEXTS, "name": TEXTS})
HOW = st.sampled_from(["plain", "encrypted", "reordered", "once"])


@pytest.fixture
def keys(tmp_path: Path) -> SubjectKeys:
    return SubjectKeys(tmp_path / "keys" / "subjects.sqlite")


def raw_events(keys: SubjectKeys, delivered: list[Delivered]) -> pa.Table:
    """The same position with what was ``delivered``, as raw has it."""
    landed: list[pa.Table] = []
    for how, image in delivered:
        sent = dict(reversed(image.items())) if how == "reordered" else image
        contract = ONCE if how == "once" else PEOPLE
        one = events_table([event(1, "people", json.dumps(sent, separators=(",", ":")))])
        landed.append(one if how == "plain" else _encrypted(keys, contract, one))
    return _raw(landed)


def _raw(landed: list[pa.Table], **others: list[Any]) -> pa.Table:
    """Events that landed one after the other, as raw has them."""
    count = len(landed)
    table = pa.concat_tables(landed).combine_chunks()
    table = table.append_column("event_hash", event_hashes(table))
    given = {
        "window": [WINDOW] * count,
        "batch_id": [f"b-{number}" for number in range(count)],
        "landed_at": [NOON + timedelta(seconds=number) for number in range(count)],
        "newest_epoch_before": [1] * count,
        "tx_id": list(range(count)),
        # In the order in which they landed, whatever way they came.
        "file_row": [None] * count,
        **others,
    }
    columns = {
        each.name: pa.array(given[each.name], each.type)
        if each.name in given
        else table[each.name].cast(each.type)
        if each.name in table.column_names
        else pa.nulls(count, each.type)
        for each in RAW
    }
    return pa.table(columns, schema=RAW)


def _encrypted(keys: SubjectKeys, contract: TableContract, events: pa.Table) -> pa.Table:
    return EncryptedLanding("desk", keys, lambda: (contract,))(events)


def expected(delivered: list[Delivered], *, erased: bool) -> list[tuple[int, int, bool]]:
    """Number, copy and collision of each: the oracle. Of an erased subject only what is readable counts, if
    one of them landed by its key, or after its destruction."""
    blind = erased and any(how != "plain" for how, _ in delivered)
    contents = [
        {name: image[name] for name in (("id", "plan") if blind else image)} for _, image in delivered
    ]
    collide = any(each != contents[0] for each in contents)
    return [(number, contents[: number + 1].count(each), collide) for number, each in enumerate(contents)]


@settings(max_examples=examples(60), deadline=None)
@given(
    before=st.lists(st.tuples(HOW, IMAGES), min_size=1, max_size=4),
    after=st.lists(st.tuples(HOW, IMAGES), max_size=3),
    erased=st.booleans(),
)
def test_an_event_is_the_same_whatever_form_it_landed_in(
    tmp_path_factory: pytest.TempPathFactory, before: list[Delivered], after: list[Delivered], erased: bool
) -> None:
    folder = tmp_path_factory.mktemp("contents")
    keys = SubjectKeys(folder / "keys" / "subjects.sqlite")
    keys.keys_of([("desk", "person", "0")])
    rows = raw_events(keys, before)
    if erased:
        keys.destroy(keys.ids_of([("desk", "person", "1")]))
    if after:
        # Delivered again, in part or with other content, after the erasure if there was one.
        rows = pa.concat_tables([rows, raw_events(keys, after)]).combine_chunks()
        count = len(before) + len(after)
        for name, values in (
            ("batch_id", [f"b-{number}" for number in range(count)]),
            ("landed_at", [NOON + timedelta(seconds=number) for number in range(count)]),
            ("tx_id", list(range(count))),
        ):
            place = RAW.get_field_index(name)
            rows = rows.set_column(place, RAW.field(place), pa.array(values, RAW.field(place).type))
    files = written(folder, rows.to_pylist(), 2 if rows.num_rows > 1 else 1)
    found = marked(folder, files, Contents((PEOPLE,), keys))
    assert found == expected([*before, *after], erased=erased)


IMAGE = {"id": "1", "plan": "gold", "email": "a@x.org", "name": "A"}
CASES: tuple[list[Delivered], ...] = (
    [("encrypted", IMAGE), ("plain", IMAGE), ("once", IMAGE), ("reordered", IMAGE)],
    [("encrypted", IMAGE), ("encrypted", IMAGE | {"email": "b@x.org"})],
)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("erased", [False, True])
def test_the_shuffle_says_the_same(
    keys: SubjectKeys, spark: SparkSession, case: list[Delivered], erased: bool
) -> None:
    rows = raw_events(keys, case)
    if erased:
        keys.destroy(keys.ids_of([("desk", "person", "1")]))
    frame = mark_by_shuffle(to_judge(spark.createDataFrame(rows)), Contents((PEOPLE,), keys))
    assert frame.columns == [*RAW.names, "copy", "collision"]
    found = sorted((row["tx_id"], row["copy"], row["collision"]) for row in frame.collect())
    assert found == expected(case, erased=erased)


MORE = personal("people", ["id", "plan", "email", "name"], ["plan", "email", "name"], Subject("person", "id"))
"""What its contract said before: one more column was personal."""


def _marked_both_ways(
    keys: SubjectKeys, rows: pa.Table, spark: SparkSession, folder: Path
) -> list[tuple[int, int, bool]]:
    contents = Contents((PEOPLE,), keys)
    found = marked(folder, written(folder, rows.to_pylist(), 2), contents)
    frame = mark_by_shuffle(to_judge(spark.createDataFrame(rows)), contents)
    assert sorted((row["tx_id"], row["copy"], row["collision"]) for row in frame.collect()) == found
    return found


def test_what_comes_again_of_an_erased_event_is_no_other_one_where_more_is_readable_by_now(
    keys: SubjectKeys, spark: SparkSession, tmp_path: Path
) -> None:
    one = events_table([event(1, "people", json.dumps(IMAGE, separators=(",", ":")))])
    before = _encrypted(keys, MORE, one)
    keys.destroy(keys.ids_of([("desk", "person", "1")]))
    rows = _raw([before, _encrypted(keys, PEOPLE, one)])
    assert _marked_both_ways(keys, rows, spark, tmp_path) == [(0, 1, False), (1, 2, False)]


def test_of_copies_by_cursor_the_one_that_landed_first_counts(
    keys: SubjectKeys, spark: SparkSession, tmp_path: Path
) -> None:
    """Their batches are named by content. The later copy may be judged otherwise, as it may be late."""
    one = events_table([event(1, "people", json.dumps(IMAGE, separators=(",", ":")))])
    rows = _raw([one, _encrypted(keys, PEOPLE, one)], batch_id=["f-b", "f-a"])
    assert _marked_both_ways(keys, rows, spark, tmp_path) == [(0, 1, False), (1, 2, False)]


@pytest.mark.parametrize("erased", [False, True])
def test_an_event_with_content_in_its_identity_is_the_same_whatever_form_it_landed_in(
    keys: SubjectKeys, spark: SparkSession, tmp_path: Path, erased: bool
) -> None:
    """A row that Debezium's snapshot read, another one at its position, and a line that cannot be read."""
    delivered = []
    for who, number in (("1", 1), ("2", 1)):
        image = json.dumps(IMAGE | {"id": who}, separators=(",", ":"))
        identity = json.dumps(["public", "people", f'["{who}"]', "r"], separators=(",", ":"))[:-1]
        read = event(number, "people", image, op="r", key=f'["{who}"]', envelope="{}")
        # What is hashed is what lands readable.
        delivered += [
            events_table([read._replace(identity=f'{identity},"{digit * 16}"]')]) for digit in "abc"
        ]
    odd = event(9, "people", None, op="u", identity='["odd","0123456789abcdef"]', envelope="half a line")
    another = odd._replace(identity='["odd","1123456789abcdef"]', envelope="half another line")
    delivered += [events_table([odd]), events_table([odd]), events_table([another])]
    contracts = [None, MORE, PEOPLE, None, PEOPLE, MORE, None, PEOPLE, PEOPLE]
    landed = [
        each if contract is None else _encrypted(keys, contract, each)
        for each, contract in zip(delivered, contracts, strict=True)
    ]
    if erased:
        keys.destroy(keys.ids_of([("desk", "person", "2")]))
    # Of an erased row nobody can say what its earlier contract hid, so that copy is one more event.
    second = [(3, 1, False), (4, 2, False), (5, 1 if erased else 3, False)]
    assert _marked_both_ways(keys, _raw(landed), spark, tmp_path) == [
        *((0, 1, False), (1, 2, False), (2, 3, False)),
        *second,
        *((6, 1, False), (7, 2, False), (8, 1, False)),
    ]


def test_an_identity_of_an_earlier_version_is_the_same_where_values_land_encrypted(
    keys: SubjectKeys, spark: SparkSession, tmp_path: Path
) -> None:
    one = event(1, "people", json.dumps(IMAGE, separators=(",", ":")), op="u", envelope="{}")
    start = '["public","people","[\\"1\\"]","u"'
    before = events_table([one._replace(identity=f'{start},"0123456789abcdef"]')])
    now = _encrypted(keys, PEOPLE, events_table([one._replace(identity=f"{start}]")]))
    rows = _raw([before, now])
    assert _marked_both_ways(keys, rows, spark, tmp_path) == [(0, 1, False), (1, 2, False)]


def test_a_key_that_is_missing_and_was_not_destroyed_is_a_loss(keys: SubjectKeys, tmp_path: Path) -> None:
    rows = raw_events(keys, [("encrypted", IMAGE)])
    others = SubjectKeys(tmp_path / "others" / "keys" / "subjects.sqlite")
    others.keys_of([("desk", "person", "2")])
    with pytest.raises(SubjectKeysUnreadable, match="lacks the key"):
        Contents((PEOPLE,), others).of(rows.to_batches()[0])


def test_tables_that_never_land_encrypted_are_compared_as_they_landed(keys: SubjectKeys) -> None:
    rows = raw_events(keys, [("plain", IMAGE)])
    plain = replace(personal("people", ["id", "plan", "email", "name"], [], None))
    keys.keys_of([("desk", "person", "1")])
    *hashes, erased = Contents((plain,), keys).of(rows.to_batches()[0])
    assert len(hashes) == 3 and all(each.to_pylist() == rows["event_hash"].to_pylist() for each in hashes)
    assert erased.to_pylist() == [0]
