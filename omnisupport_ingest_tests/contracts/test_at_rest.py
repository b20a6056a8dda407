"""``x-cdc.at_rest``: what contracts may say of it."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from omnisupport_ingest.contracts.at_rest import (
    SubjectTable,
    encrypted_columns,
    maybe_encrypted_columns,
    readable_columns,
)
from omnisupport_ingest.contracts.load import load_contract
from omnisupport_ingest.contracts.model import ContractError, Contracts, Subject, TableContract

DOCUMENT: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "People",
    "description": "People.",
    "type": "object",
    "required": ["id", "lane"],
    "additionalProperties": True,
    "properties": {
        "id": {"type": "integer", "x-pg-type": "bigint", "description": "Key."},
        "lane": {"type": "string", "x-pg-type": "text", "description": "Of some keys."},
        "email": {"type": ["string", "null"], "x-pg-type": "text", "description": "Personal."},
        "plan": {"type": ["string", "null"], "x-pg-type": "text", "description": "Not personal."},
        "gone": {"type": ["string", "null"], "x-pg-type": "timestamptz", "description": "Soft delete."},
    },
    "x-cdc": {
        "version": "1.0.0",
        "source": "desk",
        "schema": "public",
        "table": "people",
        "owner": "team:tests",
        "key": ["id"],
        "events": {"soft_delete_column": "gone"},
        "pii": {name: {"policy": "keep", "note": "A test."} for name in ("id", "email", "gone")},
    },
}


def contract(folder: Path, at_rest: object, **policy: object) -> TableContract:
    document = copy.deepcopy(DOCUMENT)
    document["x-cdc"] |= {"at_rest": at_rest} | policy
    if policy.get("required"):
        document["required"] = [*document["required"], *document["x-cdc"].pop("required")]
        document["properties"]["email"]["type"] = "string"
    path = folder / "people.json"
    path.write_text(json.dumps(document))
    return load_contract(path)


def test_what_finds_and_orders_rows_is_readable_and_the_rest_of_pii_is_not(tmp_path: Path) -> None:
    found = contract(tmp_path, {"pii": "encrypted"})
    assert found.subject == Subject("people", "id")
    assert encrypted_columns(found) == ("email",)
    # A column that the contract does not name is none of these, so it is encrypted.
    assert readable_columns(found) == {"id", "lane", "plan", "gone"}
    pii = {name: {"policy": "keep", "note": "A test."} for name in ("email", "plan")}
    other = contract(
        tmp_path, {"pii": "encrypted", "subject": "customer", "subject_column": "email"}, pii=pii
    )
    assert (other.subject, encrypted_columns(other)) == (Subject("customer", "email"), ("plan",))


def test_a_contract_of_plain_values_may_say_whose_they_are(tmp_path: Path) -> None:
    found = contract(tmp_path, {"pii": "plain", "subject": "customer"})
    assert found.subject == Subject("customer", "id", encrypted=False)
    assert (found.encrypted_subject, encrypted_columns(found)) == (None, ())
    # What an erasure empties, and what it leaves.
    assert maybe_encrypted_columns(found) == ("email",)
    assert readable_columns(found) == {"id", "lane", "plan", "gone"}
    assert found.fingerprint != contract(tmp_path, {"pii": "plain"}).fingerprint
    both = [of_type(tmp_path, "a", "bigint"), replace(found, table="b", name="b")]
    with pytest.raises(ContractError, match="share the subject"):
        Contracts((of_type(tmp_path, "c", "text"), both[1]))
    assert len(list(Contracts(tuple(both)))) == 2


@pytest.mark.parametrize(
    ("text", "key", "due"),
    [
        ("7", '["1"]', ("customer", "7")),
        (None, '["1"]', ("row of public.people", '["1"]')),
        (None, None, ("row of public.people", "")),
    ],
)
def test_an_image_that_says_nothing_is_of_its_row(
    tmp_path: Path, text: str | None, key: str | None, due: tuple[str, str]
) -> None:
    at_rest = {"pii": "plain", "subject": "customer", "subject_column": "plan"}
    assert SubjectTable.of(contract(tmp_path, at_rest)).whose(text, key) == due


def test_an_image_without_its_subject_is_of_whom_the_key_names(tmp_path: Path) -> None:
    table = SubjectTable.of(contract(tmp_path, {"pii": "plain", "subject": "customer"}))
    assert table.whose(None, '["1"]') == ("customer", "1")
    assert table.whose(None, "no key") == ("row of public.people", "no key")


def test_encrypted_is_another_contract(
    tmp_path: Path,
) -> None:
    plain = contract(tmp_path, {"pii": "plain"})
    assert plain.subject is None and encrypted_columns(plain) == ()
    assert contract(tmp_path, {"pii": "encrypted"}).fingerprint != plain.fingerprint


@pytest.mark.parametrize(
    ("at_rest", "policy", "problem"),
    [
        ({"pii": "sealed"}, {}, "'sealed' is not one of"),
        ({"pii": "plain", "subject": "x"}, {"pii": {}}, "names a subject, and pii names no column"),
        ({"pii": "plain", "subject_column": "email"}, {}, "which stay readable"),
        ({"pii": "plain", "subject": "x"}, {"key": ["id", "lane"]}, "does not say whose a row is"),
        ({"pii": "plain", "subject": "x"}, {"required": ["email"]}, "may not be NULL"),
        ({"pii": "encrypted"}, {"pii": {}}, "pii names no column"),
        ({"pii": "encrypted", "subject_column": "email"}, {}, "which stay readable"),
        ({"pii": "encrypted"}, {"key": ["id", "lane"]}, "does not say whose a row is"),
        ({"pii": "encrypted", "subject_column": "owner"}, {}, "'owner' is not a column"),
        ({"pii": "encrypted", "subject": "a b"}, {}, "does not match"),
        ({"pii": "encrypted"}, {"required": ["email"]}, "may not be NULL"),
    ],
)
def test_what_cannot_be_carried_out_is_refused(
    tmp_path: Path, at_rest: object, policy: dict[str, object], problem: str
) -> None:
    with pytest.raises(ContractError, match=problem) as refused:
        contract(tmp_path, at_rest, **policy)
    assert "people.json" in refused.value.problem and refused.value.fix


def of_type(folder: Path, table: str, pg_type: str, subject: str = "customer") -> TableContract:
    """Return a contract whose column ``owner`` has ``pg_type`` and names the subject."""
    document = copy.deepcopy(DOCUMENT)
    kind = "integer" if pg_type in ("bigint", "integer") else "string"
    document["properties"]["owner"] = {"type": [kind, "null"], "x-pg-type": pg_type, "description": "Whose."}
    at_rest = {"pii": "encrypted", "subject": subject, "subject_column": "owner"}
    document["x-cdc"] |= {"table": table, "at_rest": at_rest}
    path = folder / f"{table}.json"
    path.write_text(json.dumps(document))
    return load_contract(path)


@pytest.mark.parametrize(
    "pg_type",
    [
        "bpchar",
        "numeric",
        "decimal",
        "numeric[]",
        "numrange",
        "citext",
        "public.citext",
        "citext[]",
        "interval",
        "interval(3)",
        "interval day to second",
        "jsonb",
    ],
)
def test_a_subject_that_may_be_spelled_in_two_ways_is_refused(tmp_path: Path, pg_type: str) -> None:
    with pytest.raises(ContractError, match="may write one value in two ways"):
        of_type(tmp_path, "orders", pg_type)


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ("bigint", "integer", True),
        ("bigint", "numeric(10)", True),
        ("text", "character varying(8)", True),
        ("uuid", "uuid", True),
        ("bigint", "text", False),
        ("uuid", "text", False),
        ("bigint", "numeric(40)", True),
        ("bigint", "numeric(10,2)", False),
        ("numeric(10,2)", "decimal(10, 2)", True),
        ("numeric(10,2)", "numeric(10,3)", False),
        ("decimal(5,-2)", "numeric(5,-2)", True),
        ("character(8)", "char(8)", True),
        ("character(8)", "bpchar(9)", False),
        ("character", "char(1)", True),
        ("character(8)", "character varying(8)", False),
    ],
)
def test_tables_share_a_subject_only_if_they_spell_it_alike(
    tmp_path: Path, one: str, other: str, alike: bool
) -> None:
    tables = (of_type(tmp_path, "orders", one), of_type(tmp_path, "tickets", other))
    if alike:
        assert len(Contracts(tables)) == 2
    else:
        with pytest.raises(ContractError, match="one subject would have two keys"):
            Contracts(tables)
    assert len(Contracts((tables[0], of_type(tmp_path, "tickets", other, "agent")))) == 2
