"""A column that is converted at once has the text, letter for letter, that each of its values has alone."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnisupport_ingest.compiled import compiled_lines
from omnisupport_ingest.foreign import parse_row
from omnisupport_ingest.sources.debezium.column_texts import Column, column_of
from omnisupport_ingest.sources.debezium.faults import ValueFault
from omnisupport_ingest.sources.debezium.handling import PLAIN, Handling
from omnisupport_ingest.sources.debezium.json_walk import Slot
from omnisupport_ingest.sources.debezium.line_blocks import PADDING, Block
from omnisupport_ingest.sources.debezium.targets import Target
from omnisupport_ingest.sources.debezium.values import text_of
from omnisupport_ingest_tests.examples import examples

pytestmark = pytest.mark.skipif(compiled_lines is None, reason="installed without a C compiler")

_TIME = "io.debezium.time."
_CONNECT = "org.apache.kafka.connect.data."


@dataclass(frozen=True)
class Kind:
    """Values of a column: its type, the schema beside them, a usual one, and others."""

    pg_type: str | None
    usual: list[Any]
    others: st.SearchStrategy[Any]
    schema: dict[str, Any] = field(default_factory=dict)
    handling: Handling = PLAIN

    def column(self) -> Column:
        return column_of("c", Target.of(self.pg_type), self.usual[0], self.handling, self.schema)


def named(name: str, kind: str, **parameters: str) -> dict[str, Any]:
    return {"type": kind, "name": name} | ({"parameters": parameters} if parameters else {})


def in_base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def unscaled(number: int) -> str:
    size = (number if number >= 0 else ~number).bit_length() // 8 + 1
    return in_base64(number.to_bytes(size, "big", signed=True))


DAY = 86_400_000_000
_EDGES = [
    each + step
    for each in (0, -354_285, 2_932_896, -719_162, DAY, -354_285 * DAY, 2_932_897 * DAY, 2**31, 2**63 - 1)
    for step in (-1, 0, 1)
    if each + step < 2**63
]
_LONG = st.integers(-(2**63), 2**63 - 1)
_DAYS = st.integers(-800_000, 3_000_000) | st.sampled_from([-2_147_472_692, -2_147_472_691, *_EDGES]) | _LONG
_MICROS = (
    st.integers(-62_135_596_800_000_000, 253_402_300_800_000_000)
    | st.integers(-(10**7), 10**7)
    | st.sampled_from([9_223_372_036_825_200_000, -9_223_372_036_832_400_000, *_EDGES])
    | _LONG
)
_OF_A_DAY = st.integers(-1, DAY + 1) | st.integers(0, 86_400_001) | _LONG
_ODD = st.sampled_from(
    ["", " ", "=", "==", "A", "AQ", "AQ=", "AQ==", "AR==", "A===", "AQ==AQ==", "AAAA=AAA",
     "AAA-", "AAA_", "+/+/", "1", "1.", ".5", "-1.50", "+1", "007", "1e5", "1_0", "NaN", "Infinity", "-0",
     "-Infinity", "-0.00", "0." + "0" * 300,
     "9" * 200, "٣", "a\\b", 'a"b', "\n", "deadbeef", "DEADBEEF", "dead beef", "é"]
)  # fmt: skip
_BYTES = st.binary(max_size=40)
_DECIMALS = st.decimals(allow_nan=False, allow_infinity=False).map(str) | st.decimals(
    -(10**9), 10**9, places=4
).map(str)
_UNSCALED = (_LONG | st.integers(-(2**80), 2**80) | st.integers(-300, 300)).map(unscaled)
_VARIABLE = st.builds(
    lambda scale, value: {"scale": scale, "value": value},
    st.integers(-3, 6) | st.sampled_from([38, 39, 500, 20_001, -0]),
    _UNSCALED | _BYTES.map(in_base64),
)
_MOMENTS = st.datetimes().map(lambda each: each.isoformat() + "Z") | st.sampled_from(
    ["infinity", "2026-02-30T00:00:00Z", "2026-01-01T24:00:00Z", "2026-01-01T00:00:00+01:00",
     "1999-12-31T23:59:59Z", "2026-01-01T00:00:00.1234567Z", "2026-01-01T00:00:00", "0001-01-01T00:00:00Z",
     "-0001-01-01T00:00:00Z", "", "x"]
)  # fmt: skip


@dataclass(frozen=True)
class Letters:
    """A number as it stands in a line."""

    text: str


_FLOATS = (
    st.floats(allow_nan=False, allow_infinity=False).map(lambda each: Letters(repr(each)))
    | st.floats(allow_nan=False, allow_infinity=False, width=32).map(lambda each: Letters(repr(each)))
    | st.decimals(-(10**6), 10**6, places=3).map(lambda each: Letters(str(each)))
    | st.integers(-(10**17), 10**17).map(lambda each: Letters(str(each)))
    | st.sampled_from(
        ["0", "-0", "0.0", "-0.0", "0.0000", "0.00001", "0.0001", "1e5", "1E-5", "1.50", "100", "1e400",
         "123456", "1234567", "999999999999999", "9999999999999999", "0.000012", "12.50", "1e15",
         "100000000000000.5", "33554433"]
    ).map(Letters)
)  # fmt: skip

_MOMENT = "2026-02-28T13:14:15.120000Z"
KINDS: dict[str, Kind] = {
    "date": Kind("date", [20_512, -1, 0], _DAYS),
    "date with a schema": Kind(None, [20_512], _DAYS, named(_TIME + "Date", "int32")),
    "date of Connect": Kind("date", [20_512], _DAYS, named(_CONNECT + "Date", "int32")),
    "timestamp": Kind("timestamp", [1_772_284_455_120_000, -1, 0], _MICROS),
    "timestamp(3)": Kind("timestamp(3)", [1_772_284_455_120, -1], _MICROS),
    "milliseconds": Kind("timestamptz", [1_772_284_455_120], _MICROS, named(_TIME + "Timestamp", "int64")),
    "microseconds": Kind("timestamp", [-1], _MICROS, named(_TIME + "MicroTimestamp", "int64")),
    "nanoseconds": Kind(None, [-1, -1000, 7], _MICROS, named(_TIME + "NanoTimestamp", "int64")),
    "time": Kind("time", [0, DAY - 1, 1_500_000], _OF_A_DAY),
    "time(3)": Kind("time(3)", [1_500], _OF_A_DAY),
    "time in nanoseconds": Kind("time", [1_999, 0], _OF_A_DAY, named(_TIME + "NanoTime", "int64")),
    "timestamptz": Kind("timestamptz", [_MOMENT], _MOMENTS),
    "timestamp as a text": Kind("timestamp", [_MOMENT], _MOMENTS),
    "zoned": Kind("timestamp", [_MOMENT], _MOMENTS, named(_TIME + "ZonedTimestamp", "string")),
    "ISO": Kind("timestamptz", [_MOMENT], _MOMENTS, named(_TIME + "IsoTimestamp", "string")),
    "real": Kind("real", [1.5, 2, -0.25, 0.0], _FLOATS),
    "double precision": Kind("double precision", [1.5, -3, 1234.0625, 100.0], _FLOATS),
    "float with a schema": Kind(None, [1.5], _FLOATS, {"type": "float"}),
    "numeric": Kind("numeric", ["1.50", "-0.001", "12"], _ODD | _DECIMALS),
    "numeric as text": Kind("numeric(9,0)", ["12"], _ODD | _DECIMALS, handling=Handling(decimals="string")),
    "numeric(12,3)": Kind(
        "numeric(12,3)", ["AQ==", "/w==", "1.5", unscaled(-(2**63) + 1)], _ODD | _UNSCALED | _DECIMALS
    ),
    "numeric(9,0)": Kind("numeric(9,0)", ["AQ==", "gA=="], _ODD | _UNSCALED),
    "decimal": Kind("numeric", ["AQ=="], _ODD | _UNSCALED, named(_CONNECT + "Decimal", "bytes", scale="5")),
    "decimal of money": Kind("money", ["AQ=="], _UNSCALED, named(_CONNECT + "Decimal", "bytes", scale="2")),
    "numeric as a number": Kind("numeric(9,2)", [1.5], _FLOATS),
    "numeric with a scale of its own": Kind("numeric", [{"scale": 2, "value": "AQ=="}], _VARIABLE),
    "the same with a schema": Kind(
        None, [{"scale": 0, "value": "/w=="}, {"scale": 5, "value": "AQ=="}], _VARIABLE,
        named("io.debezium.data.VariableScaleDecimal", "struct"),
    ),
    "bytea": Kind("bytea", ["", "AQ==", "AAE=", "AAEC" * 9], _ODD | _BYTES.map(in_base64)),
    "bytes": Kind(None, ["AQ=="], _ODD | _BYTES.map(in_base64), {"type": "bytes"}),
    "bytes for URLs": Kind(
        "bytea", ["-_-_", "AQ=="], _ODD | _BYTES.map(lambda each: base64.urlsafe_b64encode(each).decode()),
        handling=Handling(binary="base64-url-safe"),
    ),
    "hexadecimal": Kind("bytea", ["", "00ff"], _ODD | _BYTES.map(bytes.hex), handling=Handling(binary="hex")),
    "interval": Kind("interval", [1_500_000], _MICROS),
    "an enumeration": Kind("public.mood", ["sad"], _ODD),
    "char": Kind("character(5)", ["ab   "], _ODD),
}  # fmt: skip
BY_ITSELF = {"decimal of money", "numeric as a number", "interval", "an enumeration", "char"}
"""Kinds whose values are converted one by one, or land as they come."""


def letters(value: Any) -> str:
    return value.text if isinstance(value, Letters) else json.dumps(value, ensure_ascii=False)


def at_once(column: Column, values: list[Any]) -> list[str | None]:
    lines = [letters(each) for each in values]
    block = Block.of_file("\n".join(lines).encode() + PADDING, 1)
    is_null = np.array([each == "null" for each in lines])
    return list(column.texts(block, Slot(block.starts, block.stops, is_null)).to_pylist())


def alone(column: Column, value: Any) -> str | None:
    text = text_of(parse_row(letters(value)), column.schema, column.target, column.handling)
    return None if text is None else orjson.dumps(text).decode()[1:-1]


@settings(max_examples=examples(600))
@given(data=st.data())
def test_every_value_has_the_text_that_it_has_alone(data: st.DataObject) -> None:
    kind = KINDS[data.draw(st.sampled_from(list(KINDS)))]
    column = kind.column()
    held: list[Any] = []
    wanted: list[str | None] = []
    for value in data.draw(
        st.lists(kind.others | st.sampled_from([*kind.usual, None]), min_size=1, max_size=9)
    ):
        try:
            text = alone(column, value)
        except ValueFault:
            with pytest.raises(ValueFault):
                at_once(column, [value])
            continue
        held.append(value)
        wanted.append(text)
    if held:
        assert at_once(column, held) == wanted


@pytest.mark.parametrize("name", sorted(KINDS.keys() - BY_ITSELF))
def test_usual_values_are_converted_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = KINDS[name]
    column, values = kind.column(), [*kind.usual, None] * 3
    wanted = [alone(column, each) for each in values]

    def one_by_one(*_: object) -> pa.StringArray:
        raise AssertionError("a usual value was read by itself")

    monkeypatch.setattr(Column, "_each", one_by_one)
    assert at_once(column, values) == wanted


def test_one_unusual_value_leaves_the_others_of_its_column_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    column, read = KINDS["timestamptz"].column(), list[int]()
    each_of = Column._each

    def counted(self: Column, block: Block, slot: Slot) -> pa.StringArray:
        read.append(len(slot.begins))
        return each_of(self, block, slot)

    monkeypatch.setattr(Column, "_each", counted)
    texts = at_once(column, [_MOMENT, "infinity", None, _MOMENT])
    assert texts == ["2026-02-28 13:14:15.12+00", "infinity", None, "2026-02-28 13:14:15.12+00"]
    assert read == [1]


@pytest.mark.parametrize("name", ["numeric(12,3)", "numeric(9,0)", "decimal"])
def test_a_name_that_is_base64_too_is_read_as_it_is_alone(name: str) -> None:
    column = KINDS[name].column()
    assert at_once(column, ["Infinity", "AQ=="]) == [alone(column, "Infinity"), alone(column, "AQ==")]
