"""Values in each of the connector's forms become the text that PostgreSQL has for them."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from omnisupport_ingest.sources.debezium.faults import ValueFault
from omnisupport_ingest.sources.debezium.handling import Handling
from omnisupport_ingest.sources.debezium.targets import Target
from omnisupport_ingest.sources.debezium.unavailable import is_unavailable
from omnisupport_ingest.sources.debezium.values import text_of
from omnisupport_ingest_tests.sources.debezium.recorded import DEFAULTS, STRING_MODES, STRINGS, Recorder

MOMENT = "2026-02-28 13:14:15.123"
AS_IN_POSTGRESQL = {
    "b": "t",
    "i8": "9223372036854775807",
    "f4": "1.5",
    "f8": "2.25",
    "n": "123456789.123456789012345678",
    "n10_2": "12345678.90",
    "m": "$1,234.50",
    "ch": "ch   ",
    "by": "\\xdeadbeef00ff",
    "u": "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11",
    "js": '{"z": 1,  "a":2}',
    "jb": '{"a": 2, "z": 1}',
    "d": "2026-02-28",
    "tm": "13:14:15.123456",
    "ts": "2026-02-28 13:14:15.123456",
    "ts3": "2026-02-28 13:14:15.123",
    "tstz": "2026-02-28 13:14:15.123456+00",
    "ia": "{1,2,NULL}",
    "ta": '{a,"b c",NULL,"q\\"uote"}',
    "tsa": '{"2026-02-28 13:14:15+00"}',
    "ja": '{"{\\"a\\": 1}"}',
    "e": "happy",
    "ea": "{sad,happy}",
    "ip": "192.168.0.1/24",
    "bt": "101",
    "vb": "10101",
    "pt": "(1.5,2.5)",
    "i4r": "[1,10)",
    "tsr": '["2026-01-01 00:00:00+00",)',
    "tv": "'a' 'cat' 'fat'",
    "o": "12345",
}


@pytest.fixture(params=[(DEFAULTS, Handling()), (STRINGS, STRING_MODES)], ids=["defaults", "strings"])
def inserted(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, dict[str, Any]]:
    """What the inserts into the table of all types landed, by key."""
    path, handling = request.param
    recorder = Recorder(tmp_path, handling=handling)
    recorder.land(path)
    return {
        json.loads(event["key"])[0]: json.loads(event["after"])
        for event in recorder.events()
        if (event["source_table"], event["op"]) == ("all_types", "c")
    }


def test_a_recorded_row_of_all_types_has_postgresqls_own_text(inserted: dict[str, dict[str, Any]]) -> None:
    assert {name: inserted["1"][name] for name in AS_IN_POSTGRESQL} == AS_IN_POSTGRESQL


def test_infinities_and_years_before_christ_are_read_back(inserted: dict[str, dict[str, Any]]) -> None:
    third, fourth, fifth = inserted["3"], inserted["4"], inserted["5"]
    assert [third[name] for name in ("f4", "f8", "d", "ts", "tstz")] == [
        "NaN",
        "Infinity",
        "infinity",
        "infinity",
        "-infinity",
    ]
    assert [fourth[name] for name in ("f4", "n", "d", "ts", "tstz")] == [
        "-Infinity",
        "0",
        "-infinity",
        "-infinity",
        "infinity",
    ]
    assert (fifth["d"], fifth["ts"]) == ("0001-01-01 BC", "0001-01-01 00:00:00 BC")
    assert (fifth["n"], fifth["n10_2"]) == ("-0.000000000000000001", "-0.01")
    assert inserted["6"]["n"] == "1" + "0" * 30


def test_what_default_modes_lose_lands_as_it_was_told(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.land(DEFAULTS)
    events = recorder.events()
    images = {
        (event["source_table"], event["key"], event["op"]): json.loads(event["after"] or event["before"])
        for event in events
        if event["key"] is not None
    }
    # An explicit NULL in a column with a default; NaN in a numeric; a date in two dimensions.
    assert images["customers", '["22"]', "c"]["status"] == "active"
    assert images["all_types", '["3"]', "c"]["n"] is None
    assert images["all_types", '["1"]', "c"]["ia2"] == "{NULL,NULL}"
    # Months and days of an interval are hours; a time with zone is in UTC.
    assert images["all_types", '["1"]', "c"]["iv"] == "10303:05:06.789"
    assert images["all_types", '["1"]', "c"]["tmtz"] == "11:14:15.123456+00"
    # What the connector made up for a deleted row does not land; the envelope has it.
    assert images["customers", '["11"]', "d"] == {"id": "11"}
    deleted = [event for event in events if (event["op"], event["key"]) == ("d", '["11"]')]
    assert "1970-01-01" in deleted[0]["envelope"]


def test_string_modes_lose_less(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, handling=STRING_MODES)
    recorder.land(STRINGS)
    of_table = [event for event in recorder.events() if event["source_table"] == "all_types"]
    rows = [json.loads(event["after"]) for event in of_table if event["after"]]
    assert rows[0]["iv"] == "1 year 2 mons 3 days 04:05:06.789"
    assert (rows[0]["na"], rows[2]["n"]) == ("{1.10,2.2}", "NaN")
    assert [row["iv"] for row in rows if row["id"] == "5"] == ["-1 mons +2 days -03:00:00"]
    # But 24:00 is lost as a time of the next day.
    assert [row["tm"] for row in rows if row["id"] == "6"] == ["00:00:00"]


def typed(value: object, pg_type: str, schema: dict[str, Any] | None = None, **handling: str) -> str | None:
    return text_of(value, schema or {}, Target.of(pg_type), Handling(**handling))


@pytest.mark.parametrize(
    ("value", "pg_type", "schema", "text"),
    [
        (20512, "date", {"name": "io.debezium.time.Date", "type": "int32"}, "2026-02-28"),
        (-1, "date", {}, "1969-12-31"),
        (1772284455123456789, "timestamp", {"name": "io.debezium.time.NanoTimestamp"}, MOMENT + "456"),
        (1772284455123, "timestamp(2)", {}, MOMENT),
        (1772284455123, "timestamptz", {"name": "org.apache.kafka.connect.data.Timestamp"}, MOMENT + "+00"),
        ("2026-02-28T13:14:15+05:30", "timestamptz", {}, "2026-02-28 13:14:15+05:30"),
        ("2026-02-28T13:14Z", "timestamptz", {}, "2026-02-28 13:14:00+00"),
        ("-0043-03-15T12:00:00.000000Z", "timestamptz", {}, "0044-03-15 12:00:00+00 BC"),
        ("0000-12-31T23:59:59.500000Z", "timestamptz", {}, "0001-12-31 23:59:59.5+00 BC"),
        (3_600_000, "time(3)", {"name": "io.debezium.time.Time"}, "01:00:00"),
        (0, "interval", {}, "00:00:00"),
        ("P0Y0M0DT0H0M-0.5S", "interval", {}, "-00:00:00.5"),
        ("P-1Y-2M", "interval", {}, "-1 years -2 mons"),
        # The connector cuts a binary fraction off after nine digits.
        ("P0Y0M0DT0H-15M-36.918881999S", "interval", {}, "-00:15:36.918882"),
        ("P0Y0M0DT0H0M59.999999999S", "interval", {}, "00:01:00"),
        ("AQ==", "numeric(6,2)", {}, "0.01"),
        ("-1.50", "numeric(6,2)", {}, "-1.50"),
        (Decimal("1.5"), "numeric(6,2)", {}, "1.50"),
        ("1234", "numeric(10,0)", {"type": "string"}, "1234"),
        (Decimal("1e20"), "double precision", {}, "1e+20"),
        (Decimal("0.1"), "real", {}, "0.1"),
        (1234567, "real", {"type": "float"}, "1.234567e+06"),
        (True, "bit(1)", {}, "1"),
        ({"a": "1", "b": None}, "hstore", {}, '"a"=>"1", "b"=>NULL'),
        ('{"a":"q\\"x"}', "public.hstore", {}, '"a"=>"q\\"x"'),
        ('{"a":"q\\"x"}', "hstore", {}, '"a"=>"q\\"x"'),
        ({"z": [1, None]}, "jsonb", {}, '{"z":[1,null]}'),
        (["", "NULL", "a,b", "\\"], "text[]", {}, '{"","NULL","a,b","\\\\"}'),
        ([[1, 2], [3, 4]], "int[]", {}, "{{1,2},{3,4}}"),
        ("AQID", "bytea", {}, "\\x010203"),
    ],
)  # fmt: skip
def test_a_value_in_one_of_its_forms(value: object, pg_type: str, schema: dict[str, Any], text: str) -> None:
    assert typed(value, pg_type, schema) == text


@pytest.mark.parametrize(
    ("value", "pg_type", "schema"),
    [
        ("yes", "boolean", {}),
        (Decimal("1.5"), "integer", {}),
        ("tomorrow", "date", {}),
        (1772284455123456, "timestamptz", {}),
        ("2026-02-28T13:14:15", "timestamptz", {}),
        (86_400_000_001, "time", {}),
        ("P", "interval", {}),
        ("not base64!", "bytea", {}),
        ("deadbeef", "bytea", {"type": "string"}),
        ("x", "numeric", {}),
        ({"wkb": "AQE=", "srid": 4326}, "geometry", {"name": "io.debezium.data.geometry.Geometry"}),
        ([1], "hstore", {}),
    ],
)
def test_what_is_no_value_of_its_type_is_refused_without_being_told(
    value: object, pg_type: str, schema: dict[str, Any]
) -> None:
    with pytest.raises(ValueFault) as refused:
        typed(value, pg_type, schema)
    assert str(value) not in str(refused.value)


def test_decimals_and_bytes_are_read_as_the_connector_was_told_to_write_them() -> None:
    assert typed("1234", "numeric(10,0)") == str(int.from_bytes(b"\xd7\x6d\xf8", "big", signed=True))
    assert typed("1234", "numeric(10,0)", decimals="string") == "1234"
    assert typed("deadbeef", "bytea", {"type": "string"}, binary="hex") == "\\xdeadbeef"
    assert typed("3q2-7w==", "bytea", binary="base64-url-safe") == "\\xdeadbeef"


@pytest.mark.parametrize(
    "value",
    [
        "__debezium_unavailable_value",
        ["__debezium_unavailable_value"],
        "X19kZWJleml1bV91bmF2YWlsYWJsZV92YWx1ZQ==",
        "5f5f646562657a69756d5f756e617661696c61626c655f76616c7565",
        list(b"__debezium_unavailable_value"),
        {"__debezium_unavailable_value": "__debezium_unavailable_value"},
    ],
)
def test_a_value_that_was_not_sent_is_known_in_every_disguise(value: object) -> None:
    assert is_unavailable(value)


@pytest.mark.parametrize("value", ["", None, [], "__debezium", ["a", "__debezium_unavailable_value"], [95]])
def test_other_values_are_not_taken_for_it(value: object) -> None:
    assert not is_unavailable(value)
