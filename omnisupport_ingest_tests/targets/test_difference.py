"""What a target is told: the rows that differ, as PostgreSQL's COPY reads them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from omnisupport_ingest.contracts.load import contract_of
from omnisupport_ingest.contracts.model import Column, ContractError, TargetPolicy
from omnisupport_ingest.targets.columns import TargetRefused, missing_columns, target_columns
from omnisupport_ingest.targets.lake_rows import Difference
from omnisupport_ingest_tests.layers.notes import CONTRACT, LAKE, LAKE_SCHEMA, MOMENT
from omnisupport_ingest_tests.layers.story import CONTRACT as DOCUMENT

SCHEMA = pa.schema(
    [
        *LAKE_SCHEMA,
        ("_cdc_deleted_at", MOMENT),
        ("_cdc_updated_at", MOMENT),
        ("_cdc_epoch", pa.int32()),
        ("_cdc_commit_lsn", pa.int64()),
        ("_cdc_ordinal", pa.int64()),
        ("_cdc_row_hash", pa.int64()),
    ]
)


def row(number: int, lsn: int = 1, content: int = 5, **other: Any) -> dict[str, Any]:
    own = {"id": number, "_cdc_key": f'["{number}"]', "_cdc_deleted_at": None, "_cdc_updated_at": None}
    place = {"_cdc_epoch": 1, "_cdc_commit_lsn": lsn, "_cdc_ordinal": 0, "_cdc_row_hash": content}
    return LAKE | own | place | other


def written(path: Path, *rows: dict[str, Any]) -> str:
    pq.write_table(pa.Table.from_pylist(list(rows), SCHEMA), path)
    return str(path)


@pytest.fixture
def before(tmp_path: Path) -> str:
    return written(tmp_path / "before", row(1), row(2), row(3, lsn=9), row(4))


def test_only_rows_that_differ_are_told_and_those_that_went_or_went_back(tmp_path: Path, before: str) -> None:
    after = written(tmp_path / "after", row(1), row(2, 2, 6), row(3, 3, 7), row(5))
    with Difference(CONTRACT, [after], [before], tmp_path) as difference:
        assert difference.counts() == (3, 1)
        assert difference.highest() == ((1, 3, 0), (1, 9, 0))
        told = b"".join(difference.lines()).decode().splitlines()
        assert sorted(line.split("\t")[0] for line in told) == ["2", "3", "5"]
        leaving = b"".join(difference.leaving()).decode().splitlines()
        assert sorted(leaving) == ['["3"]\tfalse', '["4"]\ttrue']


def test_what_the_target_has_stands_for_files_that_cannot_be_read(tmp_path: Path, before: str) -> None:
    known = tmp_path / "known.csv"
    known.write_text('"[""1""]",1,1,0,5\n"[""a\n,b""]",1,1,0,5\n')
    with Difference(CONTRACT, [before], known, tmp_path) as difference:
        assert difference.counts() == (3, 1)
        assert b"".join(difference.leaving()) == b'["a\\n,b"]\ttrue\n'


def test_the_same_rows_are_nothing_to_tell_but_for_a_new_column(tmp_path: Path, before: str) -> None:
    with Difference(CONTRACT, [before], [before], tmp_path) as difference:
        assert difference.counts() == (0, 0) and not list(difference.lines())
    with Difference(CONTRACT, [before], [before], tmp_path, again=True) as difference:
        assert difference.counts() == (4, 0)
    with Difference(CONTRACT, [], [before], tmp_path) as difference:
        assert difference.counts() == (0, 4)


def test_values_are_the_text_that_copy_reads(tmp_path: Path) -> None:
    odd = row(1, title="a\\\t\n\r", tags=['a"b\\', None, ""], _cdc_exact=[("amount", "NaN")])
    after = written(tmp_path / "after", odd, row(2, title=None, tags=[], _cdc_unresolved=["title"]))
    with Difference(CONTRACT, [after], (), tmp_path) as difference:
        found = dict(line.split("\t", 1) for line in b"".join(difference.lines()).decode().splitlines())
    at = "2026-01-01 00:00:00.5+00"
    assert found["1"].split("\t")[:5] == [r"a\\\t\n\r", "NaN", r'{"a\\"b\\\\",NULL,""}', at, r"\N"]
    assert found["2"].split("\t")[:3] == [r"\N", "1.50", "{}"]
    assert '{"title"}' in found["2"]


def test_a_value_of_a_former_type_is_null_where_its_text_would_be_refused(tmp_path: Path) -> None:
    columns = [
        replace(each, former_types=("text",)) if each.name == "amount" else each for each in CONTRACT.columns
    ]
    after = written(tmp_path / "after", row(1, amount=None, _cdc_exact=[("amount", "much")]), row(2))
    with Difference(replace(CONTRACT, columns=tuple(columns)), [after], (), tmp_path) as difference:
        found = dict(line.split("\t", 1) for line in b"".join(difference.lines()).decode().splitlines())
    assert [found[key].split("\t")[1] for key in "12"] == [r"\N", "1.50"]


def test_a_column_of_another_type_is_refused_with_the_sql() -> None:
    columns = target_columns(CONTRACT)
    there = {column.name: column.pg_type for column in columns if column.name != "amount"}
    assert [each.name for each in missing_columns("w", "notes", columns, there)] == ["amount"]
    with pytest.raises(TargetRefused) as refused:
        missing_columns("w", "notes", columns, there | {"title": "character varying(9)"})
    assert 'ALTER COLUMN "title" TYPE text USING "title"::text' in refused.value.fix


def test_a_contract_names_a_target_and_stays_the_same_contract() -> None:
    def of(target: dict[str, Any]) -> Any:
        document = DOCUMENT | {"x-cdc": {**DOCUMENT["x-cdc"], **target}}  # type: ignore[dict-item]
        return contract_of(document, Path("notes.json"))

    named = of({"target": {"connection": {"env": "W"}, "schema": "w"}})
    assert named.target == TargetPolicy("W", None, "w", "notes")
    assert named.fingerprint == of({}).fingerprint and of({}).target is None
    for wrong in ({}, {"env": "A", "file": "b"}, {"env": "postgresql://me:s3cret@x/y"}):
        with pytest.raises(ContractError):
            of({"target": {"connection": wrong}})


KINDS = {
    "b": "boolean",
    "n": "numeric",
    "d": "numeric(9,2)",
    "f": "double precision",
    "day": "date",
    "t": "timestamp",
    "z": "timestamptz",
    "y": "bytea",
    "i": "bigint[]",
    "x": "text[]",
    "j": "jsonb",
}


@pytest.mark.parametrize("files", [True, False])
def test_files_that_are_older_than_a_column_of_the_contract_have_none_in_it(
    tmp_path: Path, before: str, files: bool
) -> None:
    gained = (*CONTRACT.columns, *(Column(name, kind) for name, kind in KINDS.items()))
    contract = replace(CONTRACT, columns=gained)
    with Difference(contract, [before] if files else [], (), tmp_path) as difference:
        assert difference.counts() == (4 if files else 0, 0)
        told = b"".join(difference.lines()).decode().splitlines()
        assert len(told) == (4 if files else 0)
        for line in told:
            assert line.split("\t")[len(CONTRACT.columns) : len(gained)] == [r"\N"] * len(KINDS)
