"""Protecting events: by whole columns the same as one image at a time, and nothing else of an event
changes."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
from hypothesis import example, given, settings
from hypothesis import strategies as st

from omnisupport_ingest.cdc.envelope import RAW_TYPE
from omnisupport_ingest.cdc.erasing import Erasures, Span, key_hash
from omnisupport_ingest.cdc.event_hashes import event_hashes
from omnisupport_ingest.cdc.judging import ACCEPTED, QUARANTINED, JudgingRules, judge_batches
from omnisupport_ingest.cdc.protected_images import protect_image, protect_images
from omnisupport_ingest.cdc.protecting import Protections
from omnisupport_ingest.contracts.decision_table import default_decision_table, load_decision_table
from omnisupport_ingest.contracts.masks import Mask
from omnisupport_ingest.contracts.model import Column, TableContract
from omnisupport_ingest.contracts.pii_keys import HashKey, HashKeys
from omnisupport_ingest.contracts.pii_policies import lake_columns
from omnisupport_ingest.contracts.protection import Protection, Secrets
from omnisupport_ingest.lake.schema import arrow_schema
from omnisupport_ingest.landing.rows import LandedEvent
from omnisupport_ingest.read.protected_rows import LandedProtection
from omnisupport_ingest_tests.examples import examples

HOUR = timedelta(hours=1)
NOON = datetime(2026, 11, 1, 12, tzinfo=UTC)
COLUMNS = (
    Column("id", "bigint", nullable=False),
    Column("email", "text", pii="mask", mask=Mask("email"), pattern="@"),
    Column("badge", "integer", pii="hash"),
    Column("ssn", "text", pii="drop"),
    Column("note", "text"),
)
PEOPLE = TableContract(
    "people", "1.0.0", "desk", "public", "people", "", "", "", ("id",), lake_columns(COLUMNS), None, HOUR,
    HOUR, "", "", unprotected=COLUMNS,
)  # fmt: skip
PLAIN_COLUMNS = (Column("id", "bigint", nullable=False), Column("email", "text"))
PLAIN = TableContract(
    "plain", "1.0.0", "desk", "public", "plain", "", "", "", ("id",), PLAIN_COLUMNS, None, HOUR, HOUR, "", "",
)  # fmt: skip
KEY = HashKey("k1", b"a secret of more than thirty-two characters")
SECRETS = Secrets(HashKeys((KEY,)))
PROTECTION = Protection(PEOPLE, SECRETS)
RULES = JudgingRules((PEOPLE, PLAIN), load_decision_table(default_decision_table()), HOUR, secrets=SECRETS)
SCHEMA = (
    arrow_schema(RAW_TYPE, without=())
    .append(pa.field("copy", pa.int32()))
    .append(pa.field("collision", pa.bool_()))
)

VALUES = st.none() | st.text(
    st.characters(codec="utf-8") | st.sampled_from('@."\\/\n\x01\x7f\u2028'), max_size=12
)
IMAGES = st.dictionaries(st.sampled_from(["id", "email", "badge", "ssn", "note", "other"]), VALUES)
SPELLED = st.one_of(
    IMAGES.map(lambda row: json.dumps(row, ensure_ascii=False, separators=(",", ":"))),
    IMAGES.map(json.dumps),
    st.fixed_dictionaries({"id": VALUES, "email": VALUES, "badge": VALUES, "note": VALUES}).map(
        lambda row: json.dumps(row, ensure_ascii=False, separators=(",", ":"))
    ),
    st.sampled_from(
        ['{"email":"a@b","email":"c@d"}', '{"badge":7,"email":true}', "{broken ada@x.org", "[]", "{}"]
    ),
    st.none(),
)


@given(images=st.lists(SPELLED, max_size=30))
@example(
    images=['{"id":"1","email":"a\\u0041@x","note":"\\/"}', '{"id":"1","email":"a\\\\u@x","note":"\\""}']
)
@example(images=['{"id":"1","email":"a\\"b\\\\@x","note":"\\n\\t"}'] * 3)
@settings(max_examples=examples(300))
def test_images_by_whole_columns_are_protected_as_each_by_itself(images: list[str | None]) -> None:
    texts = pa.array(images, pa.string())
    meant = [protect_image(text, PROTECTION) for text in images]
    for few in (0, 2, 64):
        assert protect_images(texts, PROTECTION, few=few).to_pylist() == meant


def test_an_image_is_read_protected_and_written_compactly() -> None:
    text = '{"id": "1", "ssn": "123", "email": "ada.l@x.org", "other": "?", "note": null, "badge": 7}'
    assert protect_image(text, PROTECTION) == json.dumps(
        {"id": "1", "email": "ad***@x.org", "note": None, "badge": KEY.hash_of("7")}, separators=(",", ":")
    )


def landed(number: int, **sent: Any) -> dict[str, Any]:
    row = {
        "window": "2026-11-01T1200", "epoch": 1, "commit_lsn": number, "ordinal": 0, "op": "c",
        "source_ts": NOON, "source_schema": "public", "source_table": "people", "key": f'["{number}"]',
        "before": None, "after": None, "unchanged": None, "envelope": None, "batch_id": "b",
        "landed_at": NOON, "watermark_before": NOON - HOUR, "newest_epoch_before": 1, "copy": 1,
        "collision": False,
    }  # fmt: skip
    return {field.name: (row | sent).get(field.name) for field in SCHEMA}


def batch(*rows: dict[str, Any]) -> pa.RecordBatch:
    made = pa.Table.from_pylist(list(rows), SCHEMA)
    place = made.schema.get_field_index("event_hash")
    made = made.set_column(place, made.schema.field(place), event_hashes(made))
    return made.combine_chunks().to_batches()[0]


def person(number: int, email: str = "ada.lovelace@x.org", **sent: Any) -> dict[str, Any]:
    image = json.dumps(
        {"id": str(number), "email": email, "badge": "7", "ssn": "078-05-1120", "note": "n"},
        separators=(",", ":"),
    )
    return landed(number, **({"after": image} | sent))


def judged(rows: pa.RecordBatch, judging_rules: JudgingRules = RULES, few: int = 64) -> list[dict[str, Any]]:
    return [row for found in judge_batches([rows], judging_rules, few=few) for row in found.to_pylist()]


def test_every_event_of_a_table_with_policies_is_protected_and_no_verdict_changes() -> None:
    rows = batch(
        *(person(number) for number in range(1, 100)),
        person(100, email="no address"),
        person(
            101, op="d", after=None, before='{"id":"101","email":"ada.lovelace@x.org","ssn":"078-05-1120"}'
        ),
        person(102, after="{ada.lovelace@x.org"),
        person(103, op="b", key=None, after='{"by":["email"],"start":null,"end":["ada.lovelace@x.org"]}'),
        person(104, source_table="plain"),
        person(105, source_table="elsewhere", envelope="ada.lovelace@x.org"),
        person(106, envelope="ada.lovelace@x.org"),
        person(107, op="m", source_schema="", source_table="", key=None, after="ada.lovelace@x.org"),
        person(108, op="r", identity='["public","people","[\\"108\\"]","r","0123456789abcdef"]'),
    )
    plain = JudgingRules((PEOPLE, PLAIN), RULES.decisions, HOUR, secrets=SECRETS)
    for few in (0, 64):
        found = judged(rows, plain, few)
        by_number = {row["commit_lsn"]: row for row in found}
        assert {number for number, row in by_number.items() if row["verdict"] == QUARANTINED} == {100, 102}
        assert by_number[100]["rules"] == ["email:pattern"]
        assert by_number[102]["after"] is None
        assert json.loads(by_number[1]["after"])["email"] == "ada***@x.org"
        assert json.loads(by_number[101]["before"]) == {"id": "101", "email": "ada***@x.org"}
        # A snapshot end has a key range there, and no row.
        assert "ada.lovelace" in by_number[103]["after"]
        assert "ada.lovelace" in by_number[104]["after"]
        assert by_number[105]["envelope"] is by_number[106]["envelope"] is None
        # Of a table without a contract, and of a message, nobody knows what is personal.
        assert by_number[105]["after"] is by_number[107]["after"] is None
        assert by_number[108]["identity"] == '["public","people","[\\"108\\"]","r"]'
        for number, row in by_number.items():
            if number not in (103, 104):
                assert "ada.lovelace" not in str(row) and "078-05-1120" not in str(row)


def test_a_landed_event_is_shown_as_the_lake_has_it() -> None:
    rows = [
        person(1),
        person(2, source_table="plain"),
        person(3, source_table="elsewhere"),
        person(4, source_schema="archive", source_table="plain", before='{"email":"ada.lovelace@x.org"}'),
        person(5, op="m", source_schema="", source_table="", key=None, after='"ada.lovelace@x.org"'),
        person(6, op="b", key=None, after='{"by":["email"],"start":null,"end":["ada.lovelace@x.org"]}'),
    ]
    for contracts in ((PEOPLE, PLAIN), (PLAIN,)):
        rules = JudgingRules(contracts, RULES.decisions, HOUR, secrets=SECRETS)
        shown = LandedProtection(Protections.of(contracts, SECRETS))
        for in_lake in judged(batch(*rows), rules):
            row = rows[in_lake["commit_lsn"] - 1]
            event = shown.of(LandedEvent(**{name: row.get(name) for name in LandedEvent._fields}))
            assert (event.before, event.after) == (in_lake["before"], in_lake["after"]), row["commit_lsn"]


def test_an_accepted_event_has_the_hash_of_what_is_left_and_a_quarantined_one_keeps_its_name() -> None:
    rows = batch(person(1), person(2, email="no address"), person(3, source_table="plain"))
    found = {row["commit_lsn"]: row for row in judged(rows)}
    landed_as = {row["commit_lsn"]: row["event_hash"] for row in rows.to_pylist()}
    left = pa.Table.from_pylist([found[1]], arrow_schema(RAW_TYPE, without=()))
    assert found[1]["event_hash"] == event_hashes(left)[0].as_py() != landed_as[1]
    assert (found[2]["event_hash"], found[3]["event_hash"]) == (landed_as[2], landed_as[3])
    assert (found[1]["verdict"], found[2]["verdict"]) == (ACCEPTED, QUARANTINED)


def test_an_erased_event_of_a_protected_table_keeps_its_key_alone() -> None:
    span = Span(None, (1, 1, 0))
    erasures = Erasures({("public", "people", key_hash('["1"]')): (span,)})
    judging_rules = JudgingRules((PEOPLE,), RULES.decisions, HOUR, erasures=erasures, secrets=SECRETS)
    (one, two) = [
        row
        for found in judge_batches([batch(person(1), person(2))], judging_rules)
        for row in found.to_pylist()
    ]
    assert (one["after"], one["unchanged"]) == ('{"id":"1"}', ["badge", "email", "note"])
    assert json.loads(two["after"])["email"] == "ada***@x.org"


def test_unsent_columns_stay_unsent() -> None:
    (row,) = judged(batch(person(1, op="u", after='{"id":"1","note":"x"}', unchanged=["email", "ssn"])))
    assert (row["after"], row["unchanged"]) == ('{"id":"1","note":"x"}', ["email", "ssn"])
