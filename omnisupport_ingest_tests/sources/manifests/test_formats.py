"""Every format gives the same rows; what is no row is told by its number, and the rest is read."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import pytest

from omnisupport_ingest.contracts.load import TableContract
from omnisupport_ingest.sources.manifests.formats import FileUnreadable, digests, records
from omnisupport_ingest.sources.manifests.land import land
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
