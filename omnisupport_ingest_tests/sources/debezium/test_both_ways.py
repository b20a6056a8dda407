"""Files land the same, byte for byte, whether their lines are read many at once or one by one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnisupport_ingest.compiled import compiled_lines
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.landing.columns import events_table
from omnisupport_ingest.sources.debezium import column_texts, line_blocks, ordinary_lines
from omnisupport_ingest.sources.debezium import lines as of_files
from omnisupport_ingest.sources.debezium.faults import LineFault
from omnisupport_ingest.sources.debezium.land import _Reading
from omnisupport_ingest.sources.debezium.lines import content_of
from omnisupport_ingest.sources.debezium.unavailable import DISGUISES, PLACEHOLDER
from omnisupport_ingest.sources.postgres.protocol import text_columns
from omnisupport_ingest_tests.examples import examples
from omnisupport_ingest_tests.sources.debezium.recorded import START, TABLES, Recorder
from omnisupport_ingest_tests.sources.debezium.told import TS, envelope, flattened, schema_of

pytestmark = pytest.mark.skipif(compiled_lines is None, reason="installed without a C compiler")

COLUMNS = {
    "id": "bigint",
    "t": "text",
    "s": "smallint",
    "i": "integer",
    "b": "boolean",
    "n": "numeric(12,3)",
    "nn": "numeric",
    "by": "bytea",
    "tz": "timestamptz",
    "ts": "timestamp",
    "ts3": "timestamp(3)",
    "d": "date",
    "u": "uuid",
    "ta": "text[]",
    "ua": "uuid[]",
    "j": "jsonb",
    "r": "real",
    "f8": "double precision",
    "tm": "time",
    "e": "public.mood",
    "ch": "character(5)",
    "v": "numeric",
}
ROW = {
    "id": 1, "t": "x", "s": 1, "i": 1, "b": True, "n": "1.5", "nn": "1.5", "by": "AAE=",
    "tz": "2026-01-01T00:00:00.120000Z", "ts": 1_000_000, "ts3": 1000, "d": 20_000,
    "u": "00000000-0000-0000-0000-000000000005", "ta": ["a"], "ua": [None], "j": '{"a": 1}',
    "r": 1.5, "f8": -2.25, "tm": 1_500_000, "e": "sad", "ch": "ab   ",
    "v": {"scale": 2, "value": "AQ=="},
}  # fmt: skip

_DEBEZIUM = "io.debezium."
FIELDS: dict[str, dict[str, Any]] = {
    "id": {"type": "int64"}, "t": {"type": "string"}, "s": {"type": "int16"}, "i": {"type": "int32"},
    "b": {"type": "boolean", "default": False}, "nn": {"type": "string"}, "by": {"type": "bytes"},
    "n": {
        "type": "bytes", "name": "org.apache.kafka.connect.data.Decimal", "version": 1,
        "parameters": {"scale": "3", "connect.decimal.precision": "12"},
    },
    "tz": {"type": "string", "name": _DEBEZIUM + "time.ZonedTimestamp", "version": 1},
    "ts": {"type": "int64", "name": _DEBEZIUM + "time.MicroTimestamp", "version": 1},
    "ts3": {"type": "int64", "name": _DEBEZIUM + "time.Timestamp", "version": 1},
    "d": {"type": "int32", "name": _DEBEZIUM + "time.Date", "version": 1},
    "u": {"type": "string", "name": _DEBEZIUM + "data.Uuid", "version": 1},
    "j": {"type": "string", "name": _DEBEZIUM + "data.Json", "version": 1},
    "r": {"type": "float"}, "f8": {"type": "double"}, "ch": {"type": "string"},
    "v": {"type": "struct", "name": _DEBEZIUM + "data.VariableScaleDecimal", "version": 1},
    "tm": {"type": "int64", "name": _DEBEZIUM + "time.MicroTime", "version": 1},
    "e": {"type": "string", "name": _DEBEZIUM + "data.Enum", "version": 1},
    "ta": {"type": "array", "items": {"type": "string", "optional": True}},
    "ua": {"type": "array", "items": {"type": "string", "name": _DEBEZIUM + "data.Uuid", "version": 1}},
}  # fmt: skip

_HIDDEN = sorted(DISGUISES)
_NUMBERS = [0, -1, 32767, 32768, 2**31, 2**53 + 1, 2**63 - 1, -(2**63), 2**63]
_RAW_NUMBERS = ["-0", "1.0", "1e2", "01", "NaN", "9" * 40, '"5"', "true", "1.", "-", "1e400", "1.5.5"]
_FLOATS = [0.0, -0.0, 1e-5, 0.0001, 1e15, 3.14, 100.0, 123456.75, 1e300, 5]
_NUMERIC = {"id", "i", "s", "d", "ts", "ts3", "r", "f8", "tm"}
_VARIABLE: list[Any] = [
    {"scale": 0, "value": ""}, {"value": "AQ==", "scale": 1}, {"scale": -2, "value": "AQ=="}, {"scale": 1},
    {"scale": 3, "value": "gAAAAAAAAAA="}, {"scale": 1, "value": "AQ==", "x": 1},
    {"scale": "1", "value": "AQ=="},
    {"scale": 21_000, "value": "AQ=="}, {"scale": 1, "value": 'a"b'}, {},
]  # fmt: skip
_TEXTS = ["", " ", 'say "hi" \\', "\t\n\b\f\x1f\x7f", "\u2028\ufeff\uffff", "😀", "漢字", "null", *_HIDDEN]
_RAW_TEXTS = [r"\ud800", r"\udc00", r"\ud83d\ude00", r"\ud83dx", r"\u0000", "\0", "\t", r"\/", r"\u00e9"]
_TIMES = [
    "2026-01-01T00:00:00Z", "2026-02-30T00:00:00Z", "2026-01-01T24:00:00Z", "2026-01-01T23:59:60Z",
    "2026-01-01T00:00:00.1234567Z", "2026-01-01T00:00:00+01:00", "0001-01-01T00:00:00Z", "infinity", "x",
]  # fmt: skip
_DECIMALS = ["1", "AQ==", "1e5", "NaN", "Infinity", "", "-0.000", "1_0", " 1", "00001.50", "٣"]
_LISTS: list[Any] = [[], [None], ["NULL"], ['a"b\\'], [""], ["a", None], *([each] for each in _HIDDEN)]
_SOURCES: list[dict[str, Any]] = [
    {"connector": "postgresql"}, {"connector": None}, {"connector": "mysql"}, {"snapshot": "true"},
    {"snapshot": "first", "db": 'a"b\\c'}, {"table": "nobody_knows"}, {"table": "others"}, {"schema": None},
    {"version": None}, {"lsn": None}, {"txId": None}, {"unknown": 1},
]  # fmt: skip
_HEADERS: list[Any] = [
    [], None, [{"key": "a", "value": "b"}], [{"key": "__debezium.oldkey", "value": '{"id":9}'}],
    [{"key": "__op", "value": "d"}],
]  # fmt: skip
POOLS: dict[str, list[Any]] = {
    "id": _NUMBERS, "s": _NUMBERS, "i": _NUMBERS, "ts": [*_NUMBERS, *_TIMES], "ts3": _NUMBERS,
    "d": [*_NUMBERS, "2026-01-01"], "t": _TEXTS, "u": _TEXTS, "j": _TEXTS, "by": [*_TEXTS, *_DECIMALS],
    "n": _DECIMALS, "nn": _DECIMALS, "tz": _TIMES, "ta": _LISTS, "ua": _LISTS, "b": [True, False, "t", 1],
    "r": _FLOATS, "f8": _FLOATS, "tm": _NUMBERS, "e": _TEXTS, "ch": _TEXTS, "v": _VARIABLE,
}  # fmt: skip


def change(op: str, row: dict[str, Any], order: int = 1, lsn: int = 1) -> dict[str, Any]:
    return envelope(op, row, order=order, lsn=lsn, table="things")


def compact(document: Any) -> bytes:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


@st.composite
def values(draw: st.DrawFn) -> bytes:
    """A change of one row, an awkward value in one place or in none."""
    row, op = dict(ROW), draw(st.sampled_from("cudr"))
    row["id"] = draw(st.integers(1, 3))
    raw = None
    # Rarely a value of another JSON type: then no line of the table is read with others.
    kind = draw(st.sampled_from([None, None, None, "same", "same", "same", "same", "any", "raw"]))
    if kind is not None:
        name = draw(st.sampled_from(list(COLUMNS)))
        pool = [None, *(each for each in POOLS[name] if kind == "any" or type(each) is type(ROW[name]))]
        row[name] = draw(st.sampled_from(pool))
        if kind == "raw":
            row[name], raw = "@@", draw(st.sampled_from(_RAW_NUMBERS if name in _NUMERIC else _RAW_TEXTS))
    if not draw(st.integers(0, 19)):
        row = dict(reversed(row.items()))
    value = change(op, row, draw(st.sampled_from([1, 2, 16_384, 16_385])), draw(st.integers(1, 800)))
    if op == "u" and draw(st.booleans()):
        value["before"] = ROW if draw(st.booleans()) else dict.fromkeys(row, PLACEHOLDER)
    source = value["source"]
    if not draw(st.integers(0, 9)):
        source["sequence"] = draw(
            st.sampled_from(['["000900","1"]', "[null,null]", '["1e3",null]', "x", None])
        )
    if not draw(st.integers(0, 9)):
        source["ts_ms"] = draw(st.sampled_from([TS - 3_600_000, TS + 1, 0, -1, 18446744073709551, None]))
    source |= draw(st.sampled_from([{}, {"ts_us": TS * 1000 + 7}, {"ts_ns": TS * 10**6 + 1999}, {"xmin": 3}]))
    source |= draw(st.sampled_from([{}, {}, {}, *_SOURCES]))
    if not draw(st.integers(0, 9)):
        value["transaction"] = draw(st.sampled_from([None, {"id": None}, {"id": "x", "total_order": None}]))
    document: dict[str, Any] = value
    if not draw(st.integers(0, 2)):
        document = flattened(value, **draw(st.sampled_from([{}, {}, {"op": False}, {"deleted": False}])))
    around = draw(st.sampled_from([None, None, None, "payload", "schema", "schema", "no schema"]))
    if around is not None:
        told = {"schema": schema_of(document, FIELDS) if around == "schema" else None, "payload": document}
        document = told if around != "payload" else {"payload": document}
    if not draw(st.integers(0, 9)):
        key = draw(st.sampled_from([{"id": row["id"]}, {"id": 7}, None, {"a": {"b": "c"}}, "k", [1], 1.5]))
        document = {"topic": "t", "key": key, "value": document, "headers": draw(st.sampled_from(_HEADERS))}
    spaced = not draw(st.integers(0, 3))
    text = json.dumps(document, ensure_ascii=False, separators=(", ", ": ") if spaced else (",", ":"))
    if raw is not None:
        text = text.replace('"@@"', raw if raw in _RAW_NUMBERS else f'"{raw}"')
    return text.encode()


def changed(line: bytes) -> st.SearchStrategy[bytes]:
    """``line``, as a rule as it is; else with a member that stands twice, a comma too many, or torn."""
    others = [
        line.replace(b'"op":"', b'"op":null,"op":"'),
        line.replace(b'"total_order":', b'"total_order":7,"total_order":'),
        line.replace(b'"source":{', b'"source":null,"source":{'),
        line.replace(b'"txId":7', b'"txId":null,"tx\\u0049d":8'),
        line.replace(b'"t":"x",', b""),
        line.replace(b'"t":"x"', b'"t":"x","T":{"a":1}'),
        line[:-1] + b",}",
        line + b"}",
        line + line,
        line[:-9],
        line + b"\r",
        b"",
        b" ",
        b"\xef\xbb\xbf" + line,
        b"null",
        b'{"key":{"id":1},"value":null}',
    ]
    return st.one_of(*[st.just(line)] * 9, st.sampled_from(others))


class BothWays:
    """A file, read many lines at once and one by one, as it would land."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(TABLES, "things", (("id",), COLUMNS))
        monkeypatch.setitem(TABLES, "others", (("u", "id"), {"id": "integer", "u": "text"}))
        self._home, self._monkeypatch = Recorder(folder, "things", "others"), monkeypatch
        self.blocks = 0
        self.rows: list[int] = []
        """The lines of the last file that was read many at once, as its events came."""

    def read(self, lines: list[bytes], at_once: int = 1 << 20) -> tuple[object, object]:
        """What comes of ``lines`` in the one way and in the other; the line before them tells the order.
        ``at_once``: how many bytes are looked at at once."""
        path = self._home.file("events.jsonl", [compact(change("c", ROW)), *lines])
        self._monkeypatch.setattr(of_files, "_LINES_BLOCK", at_once)
        self._monkeypatch.setattr(text_columns, "PIECE_BYTES", at_once // 3)
        return self._read(path, 1), self._read(path, 10**9)

    def _read(self, path: Path, least: int) -> object:
        self._monkeypatch.setattr(ordinary_lines, "LEAST_LINES", least)
        reading = _Reading(path, self._home.inlet, None, content_of(path), START)
        rows: list[dict[str, Any]] = []
        try:
            for part in reading.parts(3):
                self.blocks += isinstance(part, pa.Table)
                rows += (part if isinstance(part, pa.Table) else events_table([part])).to_pylist()
        except IngestError as error:
            return str(error)
        if least == 1:
            self.rows = [row["file_row"] for row in rows]
        told = str(replace(reading.tally, first_odd=(0, LineFault("", "")))), reading.tally.first_odd[0]
        landed = [
            [(name, type(held), held) for name, held in row.items()]
            for row in sorted(rows, key=lambda row: row["file_row"])
        ]
        return landed, told, str(reading.tally.first_odd[1])


@pytest.fixture(scope="module")
def ways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BothWays]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield BothWays(tmp_path_factory.mktemp("both ways"), monkeypatch)


@settings(max_examples=examples(200))
@given(
    lines=st.lists(values().flatmap(changed), min_size=1, max_size=12),
    at_once=st.sampled_from([100, 2000, 1 << 20]),
)
def test_a_file_lands_the_same_both_ways(ways: BothWays, lines: list[bytes], at_once: int) -> None:
    many, single = ways.read(lines, at_once)
    assert many == single


def test_ordinary_lines_are_read_many_at_once(ways: BothWays) -> None:
    before = ways.blocks
    many, single = ways.read([compact(change("u", ROW, order)) for order in range(2, 14)])
    assert many == single and ways.blocks > before


def test_what_stands_in_a_list_where_the_others_have_a_blank_is_noticed(ways: BothWays) -> None:
    lines = [json.dumps(change("u", ROW | {"ta": ["a", "b"]}, order)).encode() for order in range(2, 9)]
    lines[3] = lines[3].replace(b'"a", "b"', b'"a",x"b"')
    before = ways.blocks
    many, single = ways.read(lines)
    assert many == single and ways.blocks > before and ways.rows[-1] == 5


@pytest.mark.parametrize("at_once", [64, 1000, 1 << 20])
def test_awkward_texts_are_ordinary_wherever_a_block_ends(ways: BothWays, at_once: int) -> None:
    texts = ['"', "\\", '\\"', '\\\\"x\\\\', "\n\t", "c:\\new\\u0041", "", 'a"b' * 40, "漢字😀\x7f", None]
    lines = [compact(change("u", ROW | {"t": text, "u": text}, order)) for order, text in enumerate(texts, 2)]
    before = ways.blocks
    many, single = ways.read(lines, at_once)
    assert many == single and ways.blocks > before


def test_the_forms_of_a_file_are_read_many_at_once_in_the_order_of_its_lines(ways: BothWays) -> None:
    row, lines = dict(reversed(ROW.items())), []
    for order in range(2, 20):
        value = change("cudu"[order % 4], row if order % 5 else ROW, order)
        if order % 4 == 3:
            value["before"] = value["after"]
        lines.append(compact(value if order % 3 else {"topic": f"t{order % 2}", "key": None, "value": value}))
    before = ways.blocks
    many, single = ways.read(lines)
    assert many == single and ways.blocks == before + 1 and ways.rows == [1, *range(2, 20)]


@pytest.mark.parametrize(
    ("name", "value"),
    [("t", PLACEHOLDER), ("j", PLACEHOLDER), *((name, [each]) for name in ("ta", "ua") for each in _HIDDEN)],
)
def test_a_column_that_was_not_sent_is_never_taken_for_a_value(
    ways: BothWays, name: str, value: object
) -> None:
    before = ways.blocks
    many, single = ways.read([compact(change("u", ROW)), compact(change("u", ROW | {name: value}, 2))])
    assert many == single and str(("unchanged", list, [name])) in str(many)
    assert ways.blocks == before + 1 and ways.rows == [1, 2, 3]


def test_a_time_beyond_all_numbers_is_odd_and_no_other_time(ways: BothWays) -> None:
    wraps = change("u", ROW)
    wraps["source"]["ts_ms"] = ((1 << 64) + TS * 1000) // 1000
    many, single = ways.read([compact(wraps)])
    assert many == single and "is no time" in str(many)


@pytest.mark.parametrize("largest", [700, 3000, 10_000])
def test_a_block_with_a_very_long_line_is_read_line_by_line(
    ways: BothWays, monkeypatch: pytest.MonkeyPatch, largest: int
) -> None:
    monkeypatch.setattr(line_blocks, "LARGEST_BLOCK", largest)
    texts = ["", "x", 'a"\\' * 1000, "y", "z" * 9000, "", "\n" * 2000]
    lines = [compact(change("u", ROW | {"t": text}, order)) for order, text in enumerate(texts, 2)]
    many, single = ways.read([*lines, b"", lines[0] + b"\r"], 500)
    assert many == single


def test_a_difference_between_the_ways_is_seen(ways: BothWays, monkeypatch: pytest.MonkeyPatch) -> None:
    line = compact(change("u", ROW))
    many, single = ways.read([line])
    assert many == single
    monkeypatch.setattr(column_texts, "text_of", lambda *_: "1.50")
    many, single = ways.read([line])
    assert many != single
