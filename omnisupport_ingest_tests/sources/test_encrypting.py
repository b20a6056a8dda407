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
from omnisupport_ingest.contracts.encrypted_images import decrypted, key_id
from omnisupport_ingest.contracts.model import Column, Subject, TableContract
from omnisupport_ingest.contracts.subject_keys import SubjectKeys, SubjectKeysUnreadable
from omnisupport_ingest.landing.columns import events_table
from omnisupport_ingest.landing.rows import LandedEvent
from omnisupport_ingest.sources.debezium.changes import Change
from omnisupport_ingest.sources.debezium.events import Events
from omnisupport_ingest.sources.debezium.handling import Handling
from omnisupport_ingest.sources.debezium.records import read_line
from omnisupport_ingest.sources.encrypting import EncryptedLanding
from omnisupport_ingest_tests.layers.story import START
from omnisupport_ingest_tests.sources.debezium.told import envelope
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


ODD = '["odd","0123456789abcdef"]'


def delivered(number: int, table: str, text: str, **fields: Any) -> LandedEvent:
    return event(number, table, None, envelope=text, **fields)


def test_what_was_delivered_lands_only_where_it_could_not_be_read_and_is_encrypted_whole(
    keys: SubjectKeys,
) -> None:
    line = json.dumps({"id": 1, "email": ADA})
    events = (
        event(1, "customers", {"id": "1", "email": ADA}, envelope=line),
        delivered(2, "customers", line, identity=ODD, key=None),
        delivered(3, "customers", f"{ADA}, half a li", identity='["kept out","schema",3,"0123456789abcdef"]'),
        delivered(4, "?", ADA, identity=ODD, key=None),
        event(5, "unknown", {"name": ADA}, envelope=ADA),
        event(6, "plans", {"id": "6", "name": "gold"}, envelope="gold"),
        delivered(7, "plans", "gold and", identity=ODD),
    )
    batch = landed(keys, *events)
    assert ADA not in repr(batch.to_pydict())
    texts = batch.column("envelope").to_pylist()
    assert (texts[0], texts[4], texts[5:]) == (None, None, ["gold", "gold and"])
    by_id = keys.by_id([each for text in texts[1:4] if (each := key_id(text)) is not None])
    whole = [decrypted(text, by_id[key_id(text) or b""], of) for text, of in zip(texts[1:4], OF, strict=True)]
    assert whole == [line, f"{ADA}, half a li", ADA]

    # By the key of whom it is of, if it says so.
    keys.destroy(keys.ids_of([("desk", "customer", "1")]))
    again = landed(keys, *events).column("envelope").to_pylist()
    assert again[1] == '{"encrypted:1":""}' and again[2:] == texts[2:]
    # Nothing of an identity is a plain hash, and the key does not count for it.
    identities = batch.column("identity").to_pylist()
    assert identities == landed(keys, *events).column("identity").to_pylist()
    assert identities[1] == identities[3] != ODD and identities[2].startswith('["kept out","schema",3,"')


OF = (b"public.customers", b"public.customers", b"public.?")


def test_an_identity_is_found_as_it_landed(keys: SubjectKeys, tmp_path: Path) -> None:
    landing = EncryptedLanding("desk", keys, lambda: (CUSTOMERS,))
    names = [
        ODD,
        '["public","t","[\\"1\\"]","r","0123456789abcdef"]',
        '["public","t",["0123456789abcdef"]]',
        "",
    ]
    events = [event(number, "customers", None, identity=name) for number, name in enumerate(names)]
    found = landing(events_table(events)).column("identity").to_pylist()
    assert found == [landing.identity(each) for each in events]
    assert found[2:] == names[2:] and found[0] != names[0] and len(found[1]) == len(names[1])
    others = EncryptedLanding("desk", SubjectKeys(tmp_path / "b" / "keys" / "k.sqlite"), lambda: (CUSTOMERS,))
    assert others.identity(events[0]) != landing.identity(events[0]), "each home has a secret of its own"
    plain = EncryptedLanding("desk", keys, lambda: (PLAIN,))
    assert plain.identity(events[0]) == ODD


def test_an_identity_of_a_table_that_lands_plain_stays_as_it_is(keys: SubjectKeys) -> None:
    """Else what landed before another contract said encrypted would come again as another event."""
    identity = '["public","plans","[\\"1\\"]","r","0123456789abcdef"]'
    one = event(1, "plans", {"id": "1", "name": "n"}, op="r", identity=identity, envelope="{}")
    odd = event(2, "plans", None, op="u", identity=ODD, envelope="half a line")
    landing = EncryptedLanding("desk", keys, lambda: (CUSTOMERS, PLAIN))
    found = landing(events_table([one, odd]))
    assert found.column("identity").to_pylist() == [identity, ODD]
    assert [landing.identity(each) for each in (one, odd)] == [identity, ODD]


@pytest.mark.parametrize(
    "delivered",
    [
        {"owner": 7},
        {"op": "u", "before": None, "after": {"owner": 7, "address": "x"}},
        {"op": "d", "before": {"owner": "7"}, "after": None},
        {"schema": {}, "payload": {"op": "u", "before": None, "after": {"owner": "7"}}},
        {"schema": {}, "payload": {"owner": "7", "__op": "u"}},
    ],
)
def test_what_cannot_be_read_is_of_the_subject_that_it_says_wherever_it_does(
    keys: SubjectKeys, delivered: dict[str, Any]
) -> None:
    odd = event(1, "orders", None, op="u", key=None, identity=ODD, envelope=json.dumps(delivered))
    text = landed(keys, odd).column("envelope")[0].as_py()
    assert key_id(text) == keys.ids_of([("desk", "customer", "7")])[0]


@pytest.mark.parametrize("encrypted", [False, True])
def test_the_identity_of_a_row_that_a_snapshot_read_has_nothing_of_what_is_encrypted(encrypted: bool) -> None:
    subject = Subject("customer", "id") if encrypted else None
    events = Events((replace(CUSTOMERS, subject=subject),), Handling())

    def identity(**row: str) -> str | None:
        told = envelope("r", {"id": "1"} | row, before_lsn=None)
        change = read_line(json.dumps(told).encode())
        assert isinstance(change, Change)
        return events.event(change, 1, 1, "").identity

    # No key is in it that could be destroyed, so it is the same for the row that comes again.
    assert (identity(email=ADA) == identity(email="another")) == encrypted
    assert identity(email=ADA) == identity(email=ADA) != identity(email=ADA, id="2")
