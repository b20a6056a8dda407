"""A JSON line reads as the texts that PostgreSQL sends for the same row."""

from __future__ import annotations

import json

import pytest

from omnisupport_ingest.contracts.documents import program_file
from omnisupport_ingest.contracts.load import load_contract
from omnisupport_ingest.sources.manifests.row_text import RowFault, array_literal, read_row

CONTRACT = load_contract(program_file("contracts/data/legacy_tickets.json"))


def read(**values: object) -> dict[str, str | None]:
    return read_row(json.dumps({"ticket_ref": "HD-2025-00001"} | values).encode(), CONTRACT)


def test_values_become_postgresql_text() -> None:
    row = read(escalated=True, priority=2, satisfaction=None, subject='a "b"', organization="Łódź")
    assert (row["escalated"], row["priority"], row["satisfaction"]) == ("t", "2", None)
    assert (row["subject"], row["organization"]) == ('a "b"', "Łódź")
    assert read(escalated=False)["escalated"] == "f"


def test_numbers_keep_every_digit() -> None:
    line = (
        b'{"ticket_ref":"HD-2025-00001","refund_amount":1.50,"satisfaction":12345678901234567.000000000001}'
    )
    row = read_row(line, CONTRACT)
    assert (row["refund_amount"], row["satisfaction"]) == ("1.50", "12345678901234567.000000000001")
    nested = b'{"ticket_ref":"HD-2025-00001","custom_fields":{"a":[1.10,null,true,"x"]}}'
    assert read_row(nested, CONTRACT)["custom_fields"] == '{"a":[1.10,null,true,"x"]}'


def test_a_number_too_long_to_write_out_keeps_its_exponent() -> None:
    assert (
        read_row(b'{"ticket_ref":"HD-2025-00001","satisfaction":1e999999}', CONTRACT)["satisfaction"]
        == "1E+999999"
    )


def test_arrays_become_array_literals_only_where_the_contract_has_arrays() -> None:
    row = read(tags=["a", 'say "hi"', "back\\slash", None, ""], custom_fields=["x"])
    assert row["tags"] == r'{"a","say \"hi\"","back\\slash",NULL,""}'
    assert row["custom_fields"] == '["x"]'
    assert array_literal([1, [2, None]]) == "{1,{2,NULL}}"


@pytest.mark.parametrize(
    ("given", "landed"),
    [
        ("2025-04-18T10:00:00Z", "2025-04-18 10:00:00+00"),
        ("2025-04-18 12:00:00.250000+02:00", "2025-04-18 10:00:00.25+00"),
        ("2025-04-18T12:00+0200", "2025-04-18 10:00:00+00"),
        ("0999-12-31 23:00:00-01", "1000-01-01 00:00:00+00"),
        ("2025-04-18 10:00:00+00", "2025-04-18 10:00:00+00"),
    ],
)
def test_a_time_has_one_text_however_it_is_written(given: str, landed: str) -> None:
    assert read(opened_at=given)["opened_at"] == landed


@pytest.mark.parametrize(
    "given",
    [
        *("2025-04-18 10:00:00", "infinity", "2025-04-18", "yesterday", "2025-13-01 00:00:00Z", "1745000000"),
        *("2025-04-18 10:00:00.1234567Z", "9999-12-31 23:59:59-05", "2025-04-18 10:00.5Z"),
    ],
)
def test_a_time_that_may_be_read_in_several_ways_stays_as_it_is_written(given: str) -> None:
    assert read(opened_at=given)["opened_at"] == given


@pytest.mark.parametrize(
    ("given", "landed"),
    [("TRUE", "t"), ("no", "f"), (1, "t"), (0, "f"), ("f", "f"), ("maybe", "maybe"), (None, None)],
)
def test_a_boolean_has_one_text_however_it_is_written(given: object, landed: str | None) -> None:
    assert read(escalated=given)["escalated"] == landed


@pytest.mark.parametrize(
    ("given", "landed"),
    [
        *((True, "true"), (False, "false"), (7, "7"), ("abc", '"abc"'), ('"abc"', '"abc"'), ("", '""')),
        *(
            ('{"a": 1}', '{"a": 1}'),
            ("true", "true"),
            ("NaN", '"NaN"'),
            ("9" * 5000, "9" * 5000),
            (None, None),
        ),
    ],
)
def test_a_json_column_always_holds_json(given: object, landed: str | None) -> None:
    assert read(custom_fields=given)["custom_fields"] == landed


def test_columns_left_out_are_null_and_further_columns_are_kept() -> None:
    row = read(novel={"x": 1})
    assert list(row) == [*CONTRACT.column_names, "novel"]
    assert row["body"] is None and row["novel"] == '{"x":1}'


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"[1]",
        b'{"ticket_ref": ',
        b'{"ticket_ref": NaN}',
        b'{"ticket_ref": "\\ud800"}',
        b'{"ticket_ref": "\xff"}',
        b'{"ticket_ref": null}',
        b'{"subject": "s3cret"}',
        b"[" * 100_000,
    ],
)
def test_what_is_no_row_is_refused_without_its_values(line: bytes) -> None:
    with pytest.raises(RowFault) as fault:
        read_row(line, CONTRACT)
    assert "s3cret" not in str(fault.value)
