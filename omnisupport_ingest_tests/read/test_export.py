"""Rows of a dimension as a file: every value survives, and nothing that is not known looks like NULL."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from omnisupport_ingest.contracts.load import load_contracts
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.read.export import Format, NoDimension, write_rows

COLUMNS: dict[str, tuple[str, str, pa.DataType]] = {
    "id": ("integer", "bigint", pa.int64()),
    "name": ("string", "text", pa.string()),
    "price": ("number", "numeric(10,2)", pa.decimal128(10, 2)),
    "ratio": ("number", "double precision", pa.float64()),
    "share": ("number", "real", pa.float32()),
    "vip": ("boolean", "boolean", pa.bool_()),
    "day": ("string", "date", pa.date32()),
    "seen": ("string", "timestamptz", pa.timestamp("us", "UTC")),
    "tags": ("array", "text[]", pa.list_(pa.string())),
    "raw": ("string", "bytea", pa.binary()),
}
PLAIN: dict[str, Any] = {
    "id": 1,
    "name": 'a "quoted", naïve\nline',
    "price": Decimal("12.50"),
    "ratio": 0.1,
    "share": 0.1,
    "vip": True,
    "day": date(2026, 3, 2),
    "seen": datetime(2026, 3, 2, 12, 0, 0, 123456, tzinfo=UTC),
    "tags": ["a,b", None, 'c"d'],
    "raw": b"\xde\xad",
}
NOTHING = dict.fromkeys(COLUMNS)
SYSTEM = pa.schema(
    [
        ("_cdc_is_deleted", pa.bool_()),
        ("_cdc_deleted_at", pa.timestamp("us", "UTC")),
        ("_cdc_unresolved", pa.list_(pa.string())),
        ("_cdc_exact", pa.map_(pa.string(), pa.string())),
    ]
)
LIVE: dict[str, Any] = {
    "_cdc_is_deleted": False,
    "_cdc_deleted_at": None,
    "_cdc_unresolved": [],
    "_cdc_exact": [],
}
ROWS = [
    PLAIN | LIVE,
    NOTHING | {"id": 2, "name": ""} | LIVE,
    NOTHING
    | {"id": 3, "ratio": float("nan"), "share": float("nan")}
    | LIVE
    | {"_cdc_exact": [("price", "NaN"), ("day", "infinity"), ("seen", "-infinity"), ("tags", "{{1},{2}}")]},
    NOTHING | {"id": 4, "ratio": float("-inf")} | LIVE | {"_cdc_unresolved": ["name", "price"]},
    NOTHING | {"id": 5} | LIVE | {"_cdc_is_deleted": True, "_cdc_deleted_at": PLAIN["seen"]},
]


@pytest.fixture(scope="module")
def contract(tmp_path_factory: pytest.TempPathFactory) -> TableContract:
    folder = tmp_path_factory.mktemp("contracts")
    document = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Things",
        "description": "A column of every kind.",
        "type": "object",
        "required": ["id"],
        "additionalProperties": True,
        "properties": {
            name: {
                "type": kind if name == "id" else [kind, "null"],
                "x-pg-type": pg_type,
                "description": f"{name}.",
            }
            for name, (kind, pg_type, _) in COLUMNS.items()
        },
        "x-cdc": {
            "version": "1.0.0",
            "source": "desk",
            "schema": "public",
            "table": "things",
            "owner": "team:tests",
            "key": ["id"],
            "events": {"soft_delete_column": None},
            "lateness": {"allowed": "PT1H", "max": "P7D"},
            "pii": {},
        },
    }
    (folder / "things.json").write_text(json.dumps(document))
    return load_contracts(folder).of_source("desk")[0]


@pytest.fixture(scope="module")
def lake_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    schema = pa.schema([(name, kind) for name, (_, _, kind) in COLUMNS.items()])
    path = tmp_path_factory.mktemp("lake") / "part.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS, pa.schema([*schema, *SYSTEM])), path)
    return str(path)


def test_csv_tells_null_from_an_empty_text_and_keeps_every_value(
    contract: TableContract, lake_file: str, tmp_path: Path
) -> None:
    out = tmp_path / "things.csv"
    assert write_rows(contract, [lake_file], out, Format.CSV, deleted=False) == (4, 1)
    plain, empty, exact, unresolved = csv.DictReader(out.open(newline=""))
    assert plain == {
        "id": "1",
        "name": PLAIN["name"],
        "price": "12.50",
        "ratio": "0.1",
        "share": "0.1",
        "vip": "true",
        "day": "2026-03-02",
        "seen": "2026-03-02T12:00:00.123456Z",
        "tags": '["a,b",null,"c\\"d"]',
        "raw": "\\xdead",
        "_cdc_unresolved": "",
    }
    assert '\n2,"",,' in out.read_text()
    assert empty["price"] == ""
    assert (exact["price"], exact["ratio"], exact["day"]) == ("NaN", "NaN", "infinity")
    assert (exact["seen"], exact["tags"]) == ("-infinity", "{{1},{2}}")
    assert (unresolved["_cdc_unresolved"], unresolved["ratio"]) == ("name price", "-Infinity")


def test_json_lines_are_json_and_lose_no_digit(
    contract: TableContract, lake_file: str, tmp_path: Path
) -> None:
    out = tmp_path / "things.jsonl"
    assert write_rows(contract, [lake_file], out, Format.JSON_LINES, deleted=True) == (5, 1)
    # NaN is no JSON: a reader that is strict must take every line.
    plain, empty, exact, unresolved, gone = (
        json.loads(line, parse_constant=pytest.fail) for line in out.read_text().splitlines()
    )
    assert plain | {"_cdc_is_deleted": False, "_cdc_deleted_at": None, "_cdc_unresolved": []} == plain
    assert {name: plain[name] for name in COLUMNS} == PLAIN | {
        "price": "12.50",
        "day": "2026-03-02",
        "seen": "2026-03-02T12:00:00.123456Z",
        "raw": "\\xdead",
    }
    assert (empty["name"], empty["tags"], empty["ratio"]) == ("", None, None)
    assert (exact["price"], exact["ratio"], exact["tags"]) == ("NaN", "NaN", "{{1},{2}}")
    assert exact["share"] == "NaN"
    assert (unresolved["_cdc_unresolved"], unresolved["name"]) == (["name", "price"], None)
    assert (gone["_cdc_is_deleted"], gone["_cdc_deleted_at"]) == (True, "2026-03-02T12:00:00.123456Z")


def test_a_value_of_a_former_type_is_its_text_where_numbers_are(
    contract: TableContract, tmp_path: Path
) -> None:
    retyped = replace(contract.columns[0], name="size", pg_type="integer", former_types=("text",))
    schema = pa.schema([(name, kind) for name, (_, _, kind) in COLUMNS.items()] + [("size", pa.int32())])
    rows = [PLAIN | LIVE | {"size": 7}, PLAIN | LIVE | {"size": None, "_cdc_exact": [("size", "ten")]}]
    pq.write_table(pa.Table.from_pylist(rows, pa.schema([*schema, *SYSTEM])), tmp_path / "lake.parquet")
    out, known = tmp_path / "things.jsonl", replace(contract, columns=(*contract.columns, retyped))
    write_rows(known, [str(tmp_path / "lake.parquet")], out, Format.JSON_LINES, deleted=False)
    assert [json.loads(line)["size"] for line in out.read_text().splitlines()] == [7, "ten"]


def test_parquet_keeps_the_types_and_the_exact_texts_beside_them(
    contract: TableContract, lake_file: str, tmp_path: Path
) -> None:
    out = tmp_path / "things.parquet"
    assert write_rows(contract, [lake_file], out, Format.PARQUET, deleted=False) == (4, 1)
    table = pq.read_table(out)
    assert table.schema.field("price").type == pa.decimal128(10, 2)
    plain, _, exact, unresolved = table.to_pylist()
    assert {name: plain[name] for name in COLUMNS} == PLAIN | {"share": pa.scalar(0.1, pa.float32()).as_py()}
    assert (exact["price"], dict(exact["_cdc_exact"])["price"]) == (None, "NaN")
    assert unresolved["_cdc_unresolved"] == ["name", "price"]


def test_a_column_that_is_not_in_the_dimension_yet_is_named_and_not_written_as_null(
    contract: TableContract, tmp_path: Path
) -> None:
    older = tmp_path / "older.parquet"
    pq.write_table(pa.table({"id": [1]}), older)
    with pytest.raises(NoDimension, match="'name'"):
        write_rows(contract, [str(older)], tmp_path / "out", Format.CSV, deleted=False)


@pytest.mark.parametrize("form", list(Format))
def test_a_table_without_rows_still_has_its_columns(
    contract: TableContract, form: Format, tmp_path: Path
) -> None:
    out = tmp_path / "things"
    assert write_rows(contract, [], out, form, deleted=True) == (0, 0)
    if form is Format.CSV:
        assert out.read_text().startswith(",".join(COLUMNS))
    if form is Format.PARQUET:
        assert pq.read_schema(out).names[: len(COLUMNS)] == list(COLUMNS)
    if form is Format.JSON_LINES:
        assert out.read_text() == ""
