"""What holds our capture against Debezium's engine: it finds what differs, and takes only what is documented.

The comparison itself, with the engine, is ``make parity``.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition

from omnisupport_ingest.contracts.sources import SourceKind, load_source
from omnisupport_ingest.landing.debezium_envelope import Origin, envelope
from omnisupport_ingest.landing.rows import LandedEvent
from omnisupport_ingest_tests.sources.kafka.broker import running_broker
from parity import categories
from parity.categories import CATEGORIES
from parity.compare import Outcome, compare
from parity.modes import TEXT
from parity.shapes import Shape
from parity.told import OurEvent, Record, Theirs, Transaction
from parity.topics import PARTITIONS, Topics, write_definition
from parity.typed import typed

DOCUMENT = Path(__file__).parents[1] / "docs" / "debezium_parity.md"
COMMITTED = datetime(2026, 11, 21, 14, 38, 29, 259442, tzinfo=UTC)
LANDED = datetime(2026, 11, 21, 14, 38, 30, tzinfo=UTC)
MICROS = 1795271909259442
SHAPE = Shape(
    types={"id": "integer", "label": "text", "rate": "numeric"},
    key=("id",),
    primary_key=("id",),
    identity=("id",),
    defaults={"label": "none"},
    not_null=frozenset({"id"}),
)

AS_THE_ENGINE_WROTE_IT = [
    ("numeric(12,2)", "9999999999.99", "AOjUpQ//"),
    ("numeric(12,2)", "-1.28", "gA=="),
    ("numeric(12,2)", "-1.29", "/38="),
    ("numeric", "-0.000000000000000001", {"scale": 18, "value": "/w=="}),
    ("numeric", "1.10", {"scale": 1, "value": "Cw=="}),
    ("real", "1.6777216e+07", 16777216.0),
    ("double precision", "-Infinity", "-Infinity"),
    ("boolean", "t", True),
    ("bytea", "\\xdeadbeef00ff", "3q2+7wD/"),
    ("text[]", '{a,"b c",NULL,"q\\"uote",""}', ["a", "b c", None, 'q"uote', ""]),
    ("integer[]", "{-23294,NULL,-11281}", [-23294, None, -11281]),
    ("date", "0044-03-15 BC", -735160),
    ("date", "infinity", -2147472692),
    ("date", "9999-12-31", 2932896),
    ("time without time zone", "24:00:00", 86400000000),
    ("timestamp without time zone", "0001-01-01 00:00:00 BC", -62167219200000000),
    ("timestamp without time zone", "-infinity", -9223372036832400000),
    ("timestamp(3) without time zone", "0001-12-31 23:59:59.999 BC", -62135596800001),
    ("timestamp with time zone", "2026-02-28 11:14:15.1+00", "2026-02-28T11:14:15.100000Z"),
    ("timestamp with time zone", "0044-03-15 12:00:00+00 BC", "-0043-03-15T12:00:00.000000Z"),
    ("timestamp with time zone", "12026-01-01 00:00:00+00", "+12026-01-01T00:00:00.000000Z"),
    ("interval", "1 year 2 mons 3 days 04:05:06.789", 37091106789000),
    ("interval", "-15 years -9 mons +00:04:34.129489", -497031925870511),
    ("interval", "-1 mons +2 days -03:00:00", -2467800000000),
    ("interval", "-00:15:36.918882", -936918881),
    ("interval", "19:00:18.015626", 68418015625),
]


@pytest.mark.parametrize(("pg_type", "text", "value"), AS_THE_ENGINE_WROTE_IT)
def test_a_value_is_told_as_the_engine_wrote_it(pg_type: str, text: str, value: Any) -> None:
    assert typed(text, pg_type).value == value


IN_TEXT_MODES = [
    ("numeric", "NaN", "NAN"),
    ("numeric", "-Infinity", "NEGATIVE_INFINITY"),
    ("numeric", "1.10", "1.10"),
    ("numeric(12,2)", "12.50", "12.50"),
    ("interval", "00:00:00", "P0Y0M0DT0H0M0S"),
    ("interval", "-1 mons +2 days -03:00:00", "P0Y-1M2DT-3H0M0S"),
    ("interval", "-1 years -4 mons +00:00:33.545026", "P-1Y-4M0DT0H0M33.545026S"),
    ("interval", "-00:15:36.918882", "P0Y0M0DT0H-15M-36.918881999S"),
    ("interval", "-5 mons +00:00:01.490544", "P0Y-5M0DT0H0M1.490543999S"),
]


@pytest.mark.parametrize(("pg_type", "text", "value"), IN_TEXT_MODES)
def test_a_value_is_told_as_the_engine_wrote_it_in_text_modes(pg_type: str, text: str, value: str) -> None:
    assert typed(text, pg_type, TEXT).value == value


def test_every_category_is_explained_and_no_other() -> None:
    assert re.findall(r"^\| `(\w+)` \|.*\|.*\|.*\|.*\|$", DOCUMENT.read_text(), re.MULTILINE) == list(
        CATEGORIES
    )


def landed(ordinal: int, op: str, **fields: Any) -> LandedEvent:
    base: dict[str, Any] = {
        "epoch": 1,
        "commit_lsn": 900,
        "ordinal": ordinal,
        "op": op,
        "source_ts": COMMITTED,
        "tx_id": 7,
        "lsn": 800 + ordinal,
        "source_schema": "parity",
        "source_table": "by_int",
        "key": '["1"]',
        "before": None,
        "after": None,
        "unchanged": None,
        "moved_from_key": None,
        "chunk_id": None,
    }
    return LandedEvent(**base | fields)


EVENTS = [
    landed(0, "c", after='{"id":"1","label":null,"rate":"1.5"}'),
    landed(2, "u", after='{"id":"1","label":"a","rate":"NaN"}'),
    landed(4, "d", before='{"id":"1"}'),
]


def told(order: int, op: str, before: Any, after: Any) -> dict[str, Any]:
    """A record's value, as the engine wrote it for ``EVENTS``."""
    lsn = 800 + 2 * (order - 1)
    source = {
        "version": "3.6.3.Final",
        "connector": "postgresql",
        "name": "parity",
        "ts_ms": MICROS // 1000,
        "snapshot": "false",
        "db": "support",
        "sequence": json.dumps([None, str(lsn)]),
        "ts_us": MICROS,
        "ts_ns": MICROS * 1000,
        "schema": "parity",
        "table": "by_int",
        "txId": 7,
        "lsn": lsn,
        "xmin": None,
        "origin": None,
        "origin_lsn": None,
    }
    handled = MICROS + 10
    return {
        "before": before,
        "after": after,
        "source": source,
        "transaction": {"id": f"7:{lsn}", "total_order": order, "data_collection_order": order},
        "op": op,
        "ts_ms": handled // 1000,
        "ts_us": handled,
        "ts_ns": handled * 1000,
    }


def theirs(plant: Callable[[list[dict[str, Any]]], object] | None = None) -> Theirs:
    values = [
        told(1, "c", None, {"id": 1, "label": "none", "rate": {"scale": 1, "value": "Dw=="}}),
        told(2, "u", None, {"id": 1, "label": "a", "rate": None}),
        told(3, "d", {"id": 1, "label": "none", "rate": None}, None),
    ]
    if plant is not None:
        plant(values)
    records = [Record("parity.parity.by_int", {"id": 1}, value, {}) for value in values]
    end = {"event_count": 3, "data_collections": [{"data_collection": "parity.by_int", "event_count": 3}]}
    tombstones = [
        (Record(each.topic, each.key, None, {}), each)
        for each in records
        if each.value is not None and each.value["op"] == "d"
    ]
    return Theirs([Transaction(7, records, end)], [], tombstones, [])


def outcome(with_them: Theirs, events: list[LandedEvent] = EVENTS) -> Outcome:
    origin = Origin("0.1.0", "postgresql", "parity", "support", LANDED)
    ours = [OurEvent(event, envelope(event, origin), rank) for rank, event in enumerate(events, start=1)]
    return compare([ours], with_them, {"by_int": SHAPE})


def test_what_is_documented_is_counted_by_its_name() -> None:
    found = outcome(theirs())
    assert found.unexplained == []
    assert found.events == 3
    assert {name: found.known[name] for name in found.known} == {
        categories.VERSION: 3,
        categories.PROCESSING_TIME: 9,
        categories.TRANSACTION_BLOCK: 3,
        categories.SEQUENCE: 3,
        categories.TOMBSTONE: 1,
        categories.TRANSACTION_MARKER: 2,
        categories.DEFAULT_FOR_NULL: 1,
        categories.NOT_A_NUMBER: 1,
        categories.MADE_UP_BEFORE: 2,
    }


PLANTED: dict[str, Callable[[list[dict[str, Any]]], object]] = {
    "op": lambda told: told[1].update(op="c"),
    "value": lambda told: told[1]["after"].update(label="b"),
    "value's type": lambda told: told[0]["after"].update(id="1"),
    "number that is true": lambda told: told[0]["after"].update(id=True),
    "null that is no default": lambda told: told[0]["after"].update(label=""),
    "number lost": lambda told: told[0]["after"].update(rate=None),
    "column too many": lambda told: told[0]["after"].update(extra=None),
    "column too few": lambda told: told[0]["after"].pop("rate"),
    "made-up value that is another": lambda told: told[2]["before"].update(label="a"),
    "old row": lambda told: told[1].update(before={"id": 1}),
    "transaction": lambda told: told[1]["source"].update(txId=8),
    "order in the transaction": lambda told: told[1]["transaction"].update(total_order=1),
    "commit time": lambda told: told[1]["source"].update(ts_us=MICROS + 1),
    "log position": lambda told: told[1]["source"].update(lsn=803),
    "sequence": lambda told: told[1]["source"].update(sequence='["901","802"]'),
    "handled before its commit": lambda told: told[1].update(ts_us=MICROS - 1),
    "member too many": lambda told: told[1].update(extra=1),
    "two events swapped": lambda told: told.insert(0, told.pop(1)),
    "event missing": lambda told: told.pop(1),
    "event twice": lambda told: told.insert(1, told[0]),
}


@pytest.mark.parametrize("plant", PLANTED.values(), ids=PLANTED)
def test_a_planted_difference_is_found(plant: Callable[[list[dict[str, Any]]], object]) -> None:
    assert outcome(theirs(plant)).unexplained


def test_a_transaction_that_one_of_the_two_does_not_have_is_found() -> None:
    with_more = theirs()
    another = Transaction(8, [], None)
    for transactions in ([*with_more.transactions, another], []):
        found = outcome(Theirs(transactions, [], [], []))
        assert any("the next transaction" in each.what for each in found.unexplained)


def test_a_delete_without_its_tombstone_is_found() -> None:
    without = theirs()
    assert outcome(Theirs(without.transactions, [], [], [])).unexplained


JAVAS_PARTITIONS = {
    "foobar": 0,
    "abc": 0,
    "a-little-bit-long-string": 2,
    "lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": 2,
}
"""Keys with the partition of three that Java's producer gives them, by hashes of Kafka's ``UtilsTest``."""


@pytest.mark.full
def test_records_are_sent_as_debeziums_server_sends_them(tmp_path: Path) -> None:
    with running_broker(tmp_path / "log") as broker:
        topics = Topics(broker.address)
        for key in JAVAS_PARTITIONS:
            topics.send("parity.a", key, '{"amount": 1.10}', [("h", '{"id": 1}')])
            topics.send("parity.a", key, None, [])
        topics.flush()
        settings = {"bootstrap.servers": broker.address, "group.id": "g", "auto.offset.reset": "earliest"}
        consumer = Consumer(settings)
        consumer.assign([TopicPartition("parity.a", number, 0) for number in range(PARTITIONS)])
        found: dict[str, list[Any]] = {}
        ends = time.monotonic() + 60
        while sum(map(len, found.values())) < 2 * len(JAVAS_PARTITIONS) and time.monotonic() < ends:
            for each in consumer.consume(20, 5.0):
                assert each.error() is None
                found.setdefault(each.key().decode(), []).append(each)
        consumer.close()
    assert {key: each[0].partition() for key, each in found.items()} == JAVAS_PARTITIONS
    for first, tombstone in found.values():
        assert first.value() == b'{"amount": 1.10}', "digits stay as they were written"
        assert first.headers() == [("h", b'{"id": 1}')]
        assert tombstone.value() is None and tombstone.partition() == first.partition()


def test_the_definition_of_the_topics_is_one_that_the_program_reads(tmp_path: Path) -> None:
    path = tmp_path / "sources" / "parity_topics.json"
    write_definition(path, "parity_topics", "127.0.0.1:1", TEXT)
    found = load_source(path)
    assert found.kind is SourceKind.KAFKA and found.events == {"decimals": "string"}
    assert found.kafka is not None
    assert found.kafka.chooses("parity.parity.by_int") and not found.kafka.chooses("paritytwo.a")
