"""Events as they land where a contract says encrypted: what is readable in them, whose key has the rest."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from omnisupport_ingest.cdc.decrypting import decrypt, has_encrypted
from omnisupport_ingest.contracts.model import Column, Subject, TableContract
from omnisupport_ingest.contracts.subject_keys import SubjectKeys, SubjectKeysUnreadable
from omnisupport_ingest.landing.columns import events_table
from omnisupport_ingest.landing.rows import LandedEvent
from omnisupport_ingest.sources.encrypting import EncryptedLanding
from omnisupport_ingest_tests.layers.story import START
from omnisupport_ingest_tests.sources.postgres.source_under_test import contract

ADA = "zebrafinch"


def personal(table: str, columns: list[str], hidden: list[str], subject: Subject | None) -> TableContract:
    made = contract(table, columns)
    named = tuple(Column(each, "text", personal=each in hidden) for each in columns)
    return replace(made, columns=named, subject=subject, allowed_lateness=timedelta(hours=1))


CUSTOMERS = personal("customers", ["id", "email"], ["email"], Subject("customer", "id"))
ORDERS = personal("orders", ["id", "owner", "address"], ["address"], Subject("customer", "owner"))
PLAIN = contract("plans", ["id", "name"])


def event(number: int, table: str, after: Any, **fields: Any) -> LandedEvent:
    text = None if after is None else after if isinstance(after, str) else json.dumps(after)
    found = LandedEvent(
        *(1, 10, 2 * number, "c", START, None, None, "public", table, f'["{number}"]', None, text),
        *(None, None, None),
    )
    return found._replace(**fields)


@pytest.fixture
def keys(tmp_path: Path) -> SubjectKeys:
    return SubjectKeys(tmp_path / "keys" / "subjects.sqlite")


def landed(keys: SubjectKeys, *events: LandedEvent) -> pa.RecordBatch:
    landing = EncryptedLanding("desk", keys, lambda: (CUSTOMERS, ORDERS, PLAIN))
    return landing(events_table(list(events))).combine_chunks().to_batches()[0]


def read(batch: pa.RecordBatch, keys: SubjectKeys, name: str = "after") -> list[Any]:
    found = decrypt(batch, (CUSTOMERS, ORDERS, PLAIN), keys)[0].column(name).to_pylist()
    return [None if each is None else json.loads(each) for each in found]


STORY = (
    event(1, "customers", {"id": "1", "email": ADA}),
    event(2, "customers", {"id": "2", "email": None}, before=json.dumps({"id": "2", "email": ADA})),
    event(3, "orders", {"id": "3", "owner": "1", "address": ADA, "no contract": ADA}),
    event(4, "orders", {"id": "4", "owner": None, "address": ADA}),
    event(5, "orders", {"id": "5", "owner": "1"}, op="u", unchanged=["address"]),
    event(6, "plans", {"id": "6", "name": "gold"}),
    event(7, "unknown", {"id": "7", "name": ADA}, key=None),
    event(8, "", f"{ADA}, a message", op="m", key=None),
    event(9, "orders", {"after": ["1"], "through": ["9"]}, op="b", key=None),
)


def test_each_image_is_encrypted_by_what_it_says_and_comes_back(keys: SubjectKeys) -> None:
    batch = landed(keys, *STORY)
    assert has_encrypted(batch) and ADA not in repr(batch.to_pydict())
    found = batch.column("after").to_pylist()
    assert [json.loads(found[place]) for place in (5, 8)] == [
        {"id": "6", "name": "gold"},
        {"after": ["1"], "through": ["9"]},
    ]
    assert json.loads(found[4]) == {"id": "5", "owner": "1"}, "nothing personal was sent"
    plain = batch.set_column(
        batch.schema.get_field_index("after"),
        "after",
        pa.array([None if number == 7 else text for number, text in enumerate(found)], pa.string()),
    )
    expected = [None if each.op == "m" or each.after is None else json.loads(each.after) for each in STORY]
    assert read(plain, keys) == expected
    assert read(plain, keys, "before")[1] == {"id": "2", "email": ADA}
    message = decrypt(batch, (), keys)[0].column("after")[7].as_py()
    assert message == f"{ADA}, a message"


def test_the_same_events_land_the_same_anew(keys: SubjectKeys) -> None:
    assert landed(keys, *STORY).equals(landed(keys, *reversed(STORY)).take(pa.array(range(8, -1, -1))))


def test_a_destroyed_key_takes_the_values_of_its_subject_in_every_table_and_no_other(
    keys: SubjectKeys,
) -> None:
    batch = landed(keys, *STORY)
    (key,) = keys.keys_of([("desk", "customer", "1")])
    keys.destroy([key.id])
    # What lands later has none to begin with.
    later = landed(keys, event(1, "customers", {"id": "1", "email": ADA}))
    assert ADA not in repr(later.to_pydict())
    assert read(later, keys) == [{"id": "1", "email": None}]
    found = read(batch.slice(0, 6), keys)
    assert found[0] == {"id": "1", "email": None}
    assert found[2] == {"id": "3", "owner": "1", "address": None}
    assert found[3] == {"id": "4", "owner": None, "address": ADA}, "it says of nobody's whose it is"
    assert found[4] == {"id": "5", "owner": "1"}, "what was not sent stays so"
    assert read(batch.slice(1, 1), keys, "before") == [{"id": "2", "email": ADA}]


def test_a_capture_that_runs_misses_a_file_of_keys_that_is_lost(keys: SubjectKeys, tmp_path: Path) -> None:
    landing = EncryptedLanding("desk", keys, lambda: (CUSTOMERS,))
    events = events_table([event(1, "customers", {"id": "1", "email": ADA})])
    before = landing(events)
    kept = keys.path.rename(tmp_path / "kept")
    with pytest.raises(SubjectKeysUnreadable, match="is not there"):
        landing(events)
    kept.rename(keys.path)
    assert landing(events).equals(before)
