"""Rows of an erased subject: their values are NULL, and no rule keeps such a row out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from omnisupport_ingest.cdc.broken_rules import RulesLookout
from omnisupport_ingest.cdc.decrypting import decrypt, has_encrypted
from omnisupport_ingest.cdc.ordinary import FEW
from omnisupport_ingest.contracts.at_rest import readable_columns
from omnisupport_ingest.contracts.encrypted_images import MARK, Split, encrypt_images
from omnisupport_ingest.contracts.model import Column, Default, Subject
from omnisupport_ingest.contracts.protection import Secrets
from omnisupport_ingest.contracts.row_columns import RowColumns
from omnisupport_ingest.contracts.subject_keys import SubjectKeys
from omnisupport_ingest_tests.cdc.test_rule_policies import CONTRACT, judged, judging_rules, marked

ENCRYPTED = replace(
    CONTRACT,
    columns=tuple(replace(each, personal=each.name == "owner") for each in CONTRACT.columns),
    subject=Subject("person", "id"),
)
OPENED, SOLVED = "2026-11-21 09:00:00+00", "2026-11-21 11:00:00+00"


def landed_images(events: pa.RecordBatch, keys: SubjectKeys) -> pa.StringArray:
    """The new images of ``events`` as they land, encrypted by the keys of their subjects."""
    return encrypt_images(
        events.column("after"),
        events.column("key"),
        Split(readable_columns(ENCRYPTED), "id"),
        ENCRYPTED.full_name.encode(),
        lambda whose: keys.keys_of([("desk", "person", text) for _, text in whose]),
    )


@pytest.mark.parametrize("few", [0, FEW])
def test_a_subject_that_is_erased_breaks_no_rule_of_several_columns(tmp_path: Path, few: int) -> None:
    keys = SubjectKeys(tmp_path / "keys" / "subjects.sqlite")
    # What is solved has an owner (or waits in quarantine); only the boss costs 50 (or the batch is refused).
    images = [
        {"id": str(number), "owner": "boss", "cost": "50", "opened": OPENED, "solved": SOLVED}
        for number in range(1, 5)
    ]
    events = marked(images, ["a"] * 4)
    landed = landed_images(events, keys)
    assert all(MARK in each for each in landed.to_pylist())
    events = events.set_column(events.schema.get_field_index("after"), "after", landed)
    (key,) = keys.keys_of([("desk", "person", "2")])
    keys.destroy([key.id])
    by = judging_rules(contract=ENCRYPTED, secrets=Secrets(subjects=keys))
    found = judged(events, by, few)
    assert found.column("verdict").to_pylist() == ["accepted"] * 4
    assert found.column("rules").to_pylist() == [[]] * 4
    assert not RulesLookout([ENCRYPTED]).found(found).rejected
    kept = [json.loads(each) for each in found.column("after").to_pylist()]
    assert [each["owner"] for each in kept] == ["boss", None, "boss", "boss"], "NULL, not a column not sent"
    assert {name: kept[1][name] for name in images[1]} == images[1] | {"owner": None}
    # A rule of what can be read is asked as ever.
    late = pa.array([each.replace(SOLVED, "2026-11-21 08:00:00+00") for each in landed.to_pylist()])
    events = events.set_column(events.schema.get_field_index("after"), "after", late)
    assert judged(events, by, few).column("rules").to_pylist() == [["solved_after_opened"]] * 4


@pytest.mark.parametrize("few", [0, FEW])
def test_a_subject_that_is_erased_lacks_no_column_that_its_contract_waits_for(
    tmp_path: Path, few: int
) -> None:
    keys = SubjectKeys(tmp_path / "keys" / "subjects.sqlite")
    full: dict[str, str | None] = {each.name: None for each in ENCRYPTED.source_columns}
    images = [full | {"id": str(number), "owner": "boss", "opened": OPENED} for number in (1, 2, 3)]
    del images[2]["owner"]
    events = marked(images, ["a"] * 3)
    landed = landed_images(events, keys)
    events = events.set_column(events.schema.get_field_index("after"), "after", landed)
    columns = {ENCRYPTED.table_name: RowColumns.of(ENCRYPTED, bare=False)}
    by = replace(judging_rules(contract=ENCRYPTED, secrets=Secrets(subjects=keys)), row_columns=columns)
    verdicts = ["accepted", "accepted", "quarantined"]
    assert judged(events, by, few).column("verdict").to_pylist() == verdicts
    (key,) = keys.keys_of([("desk", "person", "2")])
    keys.destroy([key.id])
    assert judged(events, by, few).column("verdict").to_pylist() == verdicts


def test_a_column_that_was_not_named_yet_is_null_once_its_subject_is_erased(tmp_path: Path) -> None:
    """What no contract names lands encrypted; then the contract learns it, with a default for older rows."""
    keys = SubjectKeys(tmp_path / "keys" / "subjects.sqlite")
    priority = Column("priority", "text", default=Default("low"))
    learned = replace(ENCRYPTED, columns=(*ENCRYPTED.columns, priority))
    images = [
        {"id": str(number), "owner": "boss", "opened": OPENED} | ({"priority": "high"} if number < 3 else {})
        for number in range(1, 5)
    ]
    events = marked(images, ["a"] * 4)
    landed = landed_images(events, keys)
    assert "high" not in str(landed.to_pylist())
    events = events.set_column(events.schema.get_field_index("after"), "after", landed)
    keys.destroy(key.id for key in keys.keys_of([("desk", "person", "2"), ("desk", "person", "4")]))
    stored, to_judge = decrypt(events, [learned], keys)
    after = [json.loads(each) for each in stored.column("after").to_pylist()]
    # The fold makes the default of what an image lacks. Of 4 nobody can say any more that it lacked it.
    assert [each.get("priority", "lacks it") for each in after] == ["high", None, "lacks it", None]
    seen_by_rules = [json.loads(each) for each in to_judge.column("after").to_pylist()]
    assert ["priority" in each for each in seen_by_rules] == [True, False, False, False]
    assert all(each["id"] == str(number) for number, each in enumerate(after, start=1))


def test_an_encrypted_image_is_seen_wherever_it_stands() -> None:
    plain, encrypted = '{"id":"1"}', f'{{"id":"2",{MARK}"}}'
    images = [None, plain, encrypted, plain, None]
    # Two texts that are one mark when they are read together are none.
    halves = [f'{{"id":"{MARK[:5]}', f"{MARK[5:]}", None]
    for before, after in ((images, [plain] * 5), ([plain] * 5, images), ([None] * 5, images)):
        texts = [pa.array(each, pa.string()) for each in (before, after)]
        batch = pa.RecordBatch.from_arrays(texts, names=["before", "after"])
        assert has_encrypted(batch)
        assert has_encrypted(batch.slice(2, 1))
        assert not has_encrypted(batch.slice(0, 2))
        assert not has_encrypted(batch.slice(3))
        assert not has_encrypted(batch.slice(5))
    none = pa.nulls(3, pa.string())
    assert not has_encrypted(pa.RecordBatch.from_arrays([none, pa.array(halves)], names=["before", "after"]))
