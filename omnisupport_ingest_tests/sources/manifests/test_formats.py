"""Every format gives the same rows; what is no row is told by its number, and the rest is read."""

from __future__ import annotations

import json
import math
import random
import struct
from contextlib import closing
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from omnisupport_ingest.contracts.load import TableContract, load_contracts
from omnisupport_ingest.sources.manifests import formats
from omnisupport_ingest.sources.manifests import land as land_module
from omnisupport_ingest.sources.manifests.arrow_values import float_text
from omnisupport_ingest.sources.manifests.formats import FileUnreadable, Record, digests, records
from omnisupport_ingest.sources.manifests.land import _Unit, land
from omnisupport_ingest.sources.postgres.embedded.server import EmbeddedPostgres
from omnisupport_ingest.sources.postgres.session.connection import connect
from omnisupport_ingest_tests.sources.debezium.recorded import contract as contract_of
from omnisupport_ingest_tests.sources.manifests.deliveries import (
    CONTRACTS,
    content,
    delivery,
    events,
    inlet,
    ticket,
)

TEXTS = [plain + packed for plain in (".jsonl", ".csv") for packed in ("", ".gz", ".zst")]
ROWS = [ticket(1), ticket(2, subject='a "b", c\nd', error_codes=None), ticket(3, requester_email="ü@x")]


def contract() -> TableContract:
    return next(each for each in CONTRACTS if each.name == "omnisupport_tickets")


def read(folder: Path, suffix: str, given: bytes) -> list[tuple[int, str | None]]:
    path = folder / f"rows{suffix}"
    path.write_bytes(given)
    return [(each.number, each.fault) for each in records(path, contract())]


@pytest.mark.parametrize("suffix", [*TEXTS, ".parquet"])
def test_every_format_lands_the_same_rows(tmp_path: Path, suffix: str) -> None:
    into = inlet(tmp_path)
    land(delivery(tmp_path, "incremental_cursor", ROWS, name=f"tickets{suffix}"), into)
    found = [json.loads(each["after"]) for each in events(into)]
    assert [each["subject"] for each in found] == [each["subject"] for each in ROWS]
    assert [each["error_codes"] for each in found] == ['{"STU-1","a b"}', None, '{"STU-1","a b"}']
    assert [each["requester_email"] for each in found] == [None, None, "ü@x"]


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_a_packed_copy_under_another_name_lands_nothing_twice(tmp_path: Path, suffix: str) -> None:
    into = inlet(tmp_path)
    first = land(delivery(tmp_path, "incremental_cursor", ROWS, name=f"a{suffix}"), into)
    for packed in (".gz", ".zst"):
        again = land(delivery(tmp_path, "incremental_cursor", ROWS, name=f"b{suffix}{packed}"), into)
        assert again.already_landed and again.batches == first.batches


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".jsonl.zst", ".csv.gz", ".parquet"])
def test_a_torn_file_is_not_read_as_a_short_one(tmp_path: Path, suffix: str) -> None:
    whole = content(ROWS * 2000, suffix)
    path = tmp_path / f"rows{suffix}"
    path.write_bytes(whole[:-9])
    with pytest.raises(FileUnreadable):
        digests(path)
        list(records(path, contract()))


def test_an_empty_value_of_csv_is_null_and_a_quoted_one_is_empty_text(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(b'ticket_id,subject,requester_email\nTKT-1,"",\n')
    (record,) = records(path, contract())
    assert record.row is not None
    assert (record.row["subject"], record.row["requester_email"], record.number) == ("", None, 2)


@pytest.mark.full
def test_records_of_csv_that_are_no_rows_are_numbered_and_the_rest_is_read(tmp_path: Path) -> None:
    lines = [b"ticket_id,subject"]
    for number in range(2, 200_000):
        lines.append(b"TKT-%d,%s" % (number, b"x" * 40))
    wrong = {
        5: b"TKT,a,b",
        6: b"only",
        7: b",no key",
        8: b"TKT-8,\xff",
        150_000: b"TKT,a,b",
        199_999: b"last",
    }
    for number, line in wrong.items():
        lines[number - 1] = line
    found = read(tmp_path, ".csv", b"\n".join(lines) + b"\n")
    assert [number for number, _ in found] == list(range(2, 200_000))
    faults = {number: fault for number, fault in found if fault is not None}
    assert list(faults) == list(wrong)
    assert "3 values" in faults[150_000] and "not UTF-8" in faults[8] and "'ticket_id'" in faults[7]


@pytest.mark.parametrize("given", [b"", b"a,a\n1,2\n", b"a,\n1,2\n", b"\xff\n1\n"])
def test_what_has_no_header_is_no_csv(tmp_path: Path, given: bytes) -> None:
    with pytest.raises(FileUnreadable):
        read(tmp_path, ".csv", given)


def test_values_of_parquet_are_the_texts_of_postgresql(tmp_path: Path) -> None:
    row = {
        "ticket_id": "TKT-1",
        "updated_at": datetime(2026, 4, 18, 10, 0, 0, 250_000, tzinfo=UTC),
        "novel_number": Decimal("1.50"),
        "novel_flag": True,
        "novel_object": {"a": [1, None]},
        "error_codes": ["a"],
    }
    path = tmp_path / "rows.parquet"
    path.write_bytes(content([row], ".parquet"))
    (record,) = records(path, contract())
    assert record.row is not None
    assert record.row["updated_at"] == "2026-04-18 10:00:00.25+00"
    assert (record.row["novel_number"], record.row["novel_flag"]) == ("1.50", "t")
    assert (record.row["novel_object"], record.row["error_codes"]) == ('{"a":[1,null]}', '{"a"}')


@pytest.mark.parametrize("at", [2, 3000])
def test_a_large_value_of_csv_is_read_with_the_rows_around_it(tmp_path: Path, at: int) -> None:
    lines = [b"ticket_id,subject"] + [b"TKT-%d,%s" % (number, b"x" * 3000) for number in range(2, 4000)]
    lines[at - 1] = b'TKT-large,"%s\n"' % (b"y" * (9 << 20))
    lines[at] = b"TKT,a,b"
    path = tmp_path / "rows.csv"
    path.write_bytes(b"\n".join(lines) + b"\n")
    found = [(each.number, each.fault, len(each.text)) for each in records(path, contract())]
    assert [number for number, _, _ in found] == list(range(2, 4000))
    assert [number for number, fault, _ in found if fault is not None] == [at + 1]
    assert next(length for number, _, length in found if number == at) > 9 << 20


def test_a_record_of_csv_that_no_block_holds_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "_CSV_BLOCKS", (1 << 10, 1 << 12))
    given = b"ticket_id,subject\nTKT-1,a\nTKT-2," + b"x" * (1 << 16) + b"\n"
    with pytest.raises(FileUnreadable, match="the record behind number 2 is longer"):
        read(tmp_path, ".csv", given)


@pytest.mark.parametrize("packed", [".jsonl.gz", ".jsonl.zst", ".csv.gz"])
def test_a_packed_file_without_a_byte_is_not_a_whole_one(tmp_path: Path, packed: str) -> None:
    path = tmp_path / f"rows{packed}"
    path.write_bytes(b"")
    with pytest.raises(FileUnreadable, match="not a whole"):
        digests(path)
    with pytest.raises(FileUnreadable, match="not a whole"):
        list(records(path, contract()))


def of_parquet(folder: Path, **columns: pa.Array) -> list[Record]:
    rows = len(next(iter(columns.values())))
    keys = pa.array([f"TKT-{number}" for number in range(rows)])
    pq.write_table(pa.table({"ticket_id": keys, **columns}), folder / "rows.parquet")
    return list(records(folder / "rows.parquet", contract()))


def test_maps_numbers_and_times_of_parquet_are_what_they_were(tmp_path: Path) -> None:
    nanos = 1_776_506_400_123_456_789
    (record,) = of_parquet(
        tmp_path,
        a_map=pa.array([[("a", 1), ("b", None)]], pa.map_(pa.string(), pa.int64())),
        no_map=pa.array([[]], pa.map_(pa.string(), pa.int64())),
        of_numbers=pa.array([[(1, 2.5)]], pa.map_(pa.int64(), pa.float64())),
        large=pa.array([1e22]),
        inside=pa.array([{"a": 1e22, "b": [1.5, None], "c": Decimal("1.50"), "d": float("inf")}]),
        updated_at=pa.array([nanos], pa.timestamp("ns", "UTC")),
        at=pa.array([123_456_789], pa.time64("ns")),
        times=pa.array([[nanos]], pa.list_(pa.timestamp("ns"))),
    )
    row = record.row
    assert row is not None, record.fault
    assert (row["a_map"], row["no_map"], row["of_numbers"]) == ('{"a":1,"b":null}', "{}", '{"1":2.5}')
    assert row["large"] == "1e+22"
    assert row["inside"] == '{"a":10000000000000000000000,"b":[1.5,null],"c":1.50,"d":"Infinity"}'
    assert (row["updated_at"], row["at"]) == ("2026-04-18 10:00:00.123456+00", "00:00:00.123456")
    assert row["times"] == '["2026-04-18 10:00:00.123456"]'


def test_a_map_that_names_a_key_twice_is_no_row_and_the_others_are(tmp_path: Path) -> None:
    maps = pa.array([[("a", 1)], [("a", 1), ("a", 2)], [("b", 2)]], pa.map_(pa.string(), pa.int64()))
    found = of_parquet(tmp_path, novel=maps)
    assert [each.fault for each in found] == [None, "a map in it names a key twice", None]
    assert [each.number for each in found] == [1, 2, 3]


def test_rows_are_held_by_what_they_fill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = [ticket(number, subject="x" * 40_000) for number in range(1, 60)]
    sizes = []
    of_block = _Unit._of_block

    def noted(self: _Unit, file: Any, block: Any, before: int, ordinal: int) -> Any:
        sizes.append(sum(len(each.text) for each in block))
        return of_block(self, file, block, before, ordinal)

    monkeypatch.setattr(_Unit, "_of_block", noted)
    monkeypatch.setattr(land_module, "_BLOCK_CHARACTERS", 200_000)
    into = inlet(tmp_path)
    land(delivery(tmp_path, "full_snapshot", large), into)
    assert len([each for each in events(into) if each["op"] == "r"]) == 59
    assert max(sizes) < 300_000


def test_floats_are_written_as_the_server_writes_them(postgres: EmbeddedPostgres) -> None:
    chance = random.Random(7)
    drawn = [struct.unpack("d", chance.randbytes(8))[0] for _ in range(3000)]
    drawn += [sign * 10.0**power for power in range(-30, 30) for sign in (1, -1)]
    drawn += [0.0, -0.0, 1.5, 123456.0, 1234567.0, 999999999999999.0, 1e15, float("inf"), float("nan")]
    small = [each for each in drawn if not 3e38 < abs(each) < math.inf and not 0 < abs(each) < 1e-37]
    singles = [float(np.float32(each)) for each in small]
    ask = "SELECT (v::{})::text FROM unnest(%s) WITH ORDINALITY u (v, n) ORDER BY n"
    with closing(connect(postgres.dsn())) as connection, connection.cursor() as cursor:
        for kind, numbers in (("float8", drawn), ("float4", singles)):
            cursor.execute(ask.format(kind), ([repr(each) for each in numbers],))
            theirs = [text for (text,) in cursor.fetchall()]
            ours = [float_text(each, single=kind == "float4") for each in numbers]
            other = [pair for pair in zip(ours, theirs, strict=True) if pair[0] != pair[1]]
            assert len(other) < len(numbers) / 100, other[:5]
            # One digit more of the same number, in the same form.
            for our, their in other:
                assert (len(our) + 1, our.rpartition("e")[2]) == (len(their), their.rpartition("e")[2])
                assert float(our) == float(their) or np.float32(our) == np.float32(their)


def typed(folder: Path) -> TableContract:
    types = {"id": "bigint", "t": "text", "n": "numeric", "r": "real", "d": "double precision"}
    types |= {"ts": "timestamp", "tz": "timestamptz", "da": "date", "tm": "time", "j": "jsonb"}
    types |= {"iv": "interval", "ta": "text[]", "u": "uuid", "by": "bytea", "b": "boolean"}
    (folder / "contracts").mkdir()
    (folder / "contracts" / "x.json").write_text(json.dumps(contract_of("x", ("id",), types)))
    (found,) = load_contracts(folder / "contracts")
    return found


def of_typed(folder: Path, name: str, values: pa.Array) -> list[str | None]:
    """The texts of a column of Parquet; of a value that is a fault, the fault."""
    path = folder / "typed.parquet"
    pq.write_table(pa.table({"id": pa.array(range(len(values)), pa.int64()), name: values}), path)
    found = list(records(path, typed(folder)))
    assert all((each.row is None) is (each.fault is not None) for each in found)
    return [each.fault if each.row is None else each.row[name] for each in found]


_FOREVER = (1 << 63) - 1
_FAR, _FAR_DATE = 253402300800000000, 2932897
"""The first moment, and the first day, of the year 10000."""

OF_PARQUET: dict[str, tuple[str, pa.Array, list[str | None]]] = {
    "infinite timestamps": (
        "ts", pa.array([_FOREVER, -_FOREVER, 0], pa.timestamp("us")),
        ["infinity", "-infinity", "1970-01-01 00:00:00"],
    ),
    "infinite dates": (
        "da", pa.array([2147483647, -2147483648, 0], pa.date32()), ["infinity", "-infinity", "1970-01-01"],
    ),
    "a time that no year has": (
        "tz", pa.array([_FAR, 0], pa.timestamp("us", "UTC")),
        ["the value of 'tz' is a time outside the years 1 to 9999", "1970-01-01 00:00:00+00"],
    ),
    "a date that no year has": (
        "da", pa.array([_FAR_DATE, -800000], pa.date32()),
        ["the value of 'da' is a date outside the years 1 to 9999"] * 2,
    ),
    "a zone that nobody knows": (
        "tz", pa.array([0], pa.timestamp("us", "Mars/Phobos")), ["1970-01-01 00:00:00+00"],
    ),
    "seconds": ("ts", pa.array([60, None], pa.timestamp("s")), ["1970-01-01 00:01:00", None]),
    "times of a day": (
        "tm", pa.array([43200120000, 0], pa.time64("us")), ["12:00:00.12", "00:00:00"],
    ),
    "milliseconds of a day": ("tm", pa.array([43200120], pa.time32("ms")), ["12:00:00.12"]),
    "durations": (
        "iv", pa.array([86401500000, -1], pa.duration("us")), ["24:00:01.5", "-00:00:00.000001"],
    ),
    "durations of nanoseconds": (
        "iv", pa.array([1001, 1], pa.duration("ns")), ["00:00:00.000001", "00:00:00"],
    ),
    "bytes in a text": (
        "t", pa.array([b"abc", b"\xff"]), ["abc", "the value of 't' is bytes that are not UTF-8"],
    ),
    "bytes in a JSON": ("j", pa.array([b'{"a":1}']), ['{"a":1}']),
    "bytes in bytes": ("by", pa.array([b"abc"]), ["\\x616263"]),
    "bytes of a uuid": (
        "u", pa.array([bytes(range(16))], pa.binary(16)), ["00010203-0405-0607-0809-0a0b0c0d0e0f"],
    ),
    "half as wide a float in a numeric": ("n", pa.array([0.1, 1e10], pa.float32()), ["0.1", "10000000000"]),
    "half as wide a float in a double": ("d", pa.array([0.1], pa.float32()), ["0.1"]),
    "half as wide a float in no column": ("more", pa.array([0.1], pa.float32()), ["0.1"]),
    "half as wide floats in a list": ("j", pa.array([[0.1]], pa.list_(pa.float32())), ["[0.1]"]),
    "a large list": (
        "ta", pa.array([[1001, None]], pa.large_list(pa.timestamp("ns"))),
        ['{"1970-01-01 00:00:00.000001",NULL}'],
    ),
    "a list of fixed size": (
        "ta", pa.array([[1001, 1]], pa.list_(pa.timestamp("ns"), 2)),
        ['{"1970-01-01 00:00:00.000001","1970-01-01 00:00:00"}'],
    ),
    "a dictionary of times": (
        "ts", pa.array([1, 1], pa.timestamp("us")).dictionary_encode(), ["1970-01-01 00:00:00.000001"] * 2,
    ),
    "booleans in a JSON": ("j", pa.array([True, False, None]), ["true", "false", None]),
    "an object in a JSON": (
        "j", pa.array([{"a": True, "b": datetime(2026, 1, 1), "c": None}]),
        ['{"a":true,"b":"2026-01-01 00:00:00","c":null}'],
    ),
    "a number in a boolean": ("b", pa.array([1, 0]), ["t", "f"]),
}  # fmt: skip


@pytest.mark.parametrize("what", OF_PARQUET)
def test_whatever_parquet_holds_is_a_text_or_a_fault_of_its_row(tmp_path: Path, what: str) -> None:
    name, values, texts = OF_PARQUET[what]
    assert of_typed(tmp_path, name, values) == texts


def test_an_object_of_parquet_that_names_a_field_twice_is_told_by_its_column(tmp_path: Path) -> None:
    twice = pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
    with pytest.raises(FileUnreadable, match="an object in its column 'j' names a field twice") as why:
        of_typed(tmp_path, "j", twice)
    assert why.value.fix


def test_a_csv_with_more_columns_than_a_table_can_have_is_told(tmp_path: Path) -> None:
    names = ",".join(["ticket_id", *(f"c{number}" for number in range(1700))])
    given = f"{names}\n{','.join('1' * 1701)}\n".encode()
    with pytest.raises(FileUnreadable, match="more than 1,600 columns"):
        read(tmp_path, ".csv", given)


def test_a_fault_of_csv_names_a_column_only_if_the_contract_has_it(tmp_path: Path) -> None:
    (found,) = read(tmp_path, ".csv", b"ticket_id,subject\nTKT-1,\xff\n")
    assert found == (2, "the value of 'subject' is not UTF-8")
    (found,) = read(tmp_path, ".csv", b"1,jane.doe@example.com\n2,\xe9\n")
    assert found == (2, "the value of column 2 is not UTF-8")


def test_a_mark_before_json_lines_and_blank_lines_are_no_rows(tmp_path: Path) -> None:
    given = b"\xef\xbb\xbf" + content([ticket(1)], ".jsonl") + b"\n \r\n" + content([ticket(2)], ".jsonl")
    assert read(tmp_path, ".jsonl", given) == [(1, None), (4, None)]
    given = b"ticket_id,subject\nTKT-1,a\n\n,\nTKT-2,b\n\n"
    assert read(tmp_path, ".csv", given) == [(2, None), (5, None)]


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
def test_a_csv_that_is_only_a_header_is_an_empty_table(tmp_path: Path, end: bytes) -> None:
    assert read(tmp_path, ".csv", b"ticket_id,subject" + end) == []
    assert [each.name for each in formats.columns_of(tmp_path / "rows.csv") or ()] == (
        ["ticket_id", "subject"]
    )


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_version_of_a_row_is_the_same_in_every_format(tmp_path: Path, suffix: str) -> None:
    times = {"created_at": "2026-04-17T08:00:00Z", "updated_at": "2026-04-18T12:00:00.50+02:00"}
    row = ticket(1, requester_email="a@b") | times
    # In UTC: once pandera is imported, pyarrow ignores another offset of datetimes in a column that it makes.
    moments = {name: datetime.fromisoformat(text).astimezone(UTC) for name, text in times.items()}
    typed_row: dict[str, Any] = row | moments
    into = inlet(tmp_path)
    land(delivery(tmp_path, "incremental_cursor", [row]), into)
    again = typed_row if suffix == ".parquet" else row
    land(delivery(tmp_path, "backfill", [again], name=f"again{suffix}"), into)
    first, second = events(into)
    assert first["ordinal"] == second["ordinal"]
    assert json.loads(first["after"]) == json.loads(second["after"])
    assert json.loads(first["after"])["updated_at"] == "2026-04-18 10:00:00.5+00"
