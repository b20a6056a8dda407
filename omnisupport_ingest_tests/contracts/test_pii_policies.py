"""Policies for personal data in a contract: what they make of its columns, and which cannot hold."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from omnisupport_ingest.contracts.load import ContractError, contract_of, load_contract
from omnisupport_ingest.contracts.masks import Mask
from omnisupport_ingest.contracts.pii_keys import NO_KEY, PiiKeyMissing, current_version, keys_in_force

TYPES = {
    "id": "bigint",
    "email": "text",
    "phone": "character varying(30)",
    "born_on": "date",
    "badge": "integer",
    "salary": "numeric(10,2)",
    "tags": "text[]",
    "removed_at": "timestamptz",
}
JSON_TYPES = {"bigint": "integer", "integer": "integer", "numeric(10,2)": "number", "text[]": "array"}
DOCUMENT: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "People",
    "description": "Every column that a policy may meet.",
    "type": "object",
    "required": ["id"],
    "additionalProperties": True,
    "properties": {
        name: {
            "type": "integer" if name == "id" else [JSON_TYPES.get(kind, "string"), "null"],
            "x-pg-type": kind,
            "description": f"{name}.",
        }
        for name, kind in TYPES.items()
    },
    "x-cdc": {
        "version": "1.0.0",
        "source": "desk",
        "schema": "public",
        "table": "people",
        "owner": "team:tests",
        "key": ["id"],
        "events": {"soft_delete_column": "removed_at"},
    },
}
SECRET = "0123456789abcdef" * 2


def contract(folder: Path, **pii: dict[str, str]) -> Any:
    document = copy.deepcopy(DOCUMENT)
    document["properties"]["email"] |= {"pattern": "@", "maxLength": 100}
    document["properties"]["badge"]["minimum"] = 1
    document["x-cdc"]["pii"] = {name: {"note": "Because.", **told} for name, told in pii.items()}
    path = folder / "people.json"
    path.write_text(json.dumps(document))
    return load_contract(path)


def test_the_lake_has_the_columns_that_policies_leave(tmp_path: Path) -> None:
    found = contract(
        tmp_path,
        email={"policy": "mask", "mask": "email"},
        phone={"policy": "keep"},
        born_on={"policy": "hash"},
        badge={"policy": "tokenize"},
        salary={"policy": "drop"},
    )
    assert [(each.name, each.pg_type, each.pii) for each in found.columns] == [
        ("id", "bigint", "keep"),
        ("email", "text", "mask"),
        ("phone", "character varying(30)", "keep"),
        ("born_on", "text", "hash"),
        ("badge", "text", "tokenize"),
        ("tags", "text[]", "keep"),
        ("removed_at", "timestamptz", "keep"),
    ]
    assert found.column("email").mask == Mask("email")
    assert {each.name for each in found.columns if each.personal} == {"email", "phone", "born_on", "badge"}


def test_rules_are_kept_by_what_the_source_sends_and_not_by_what_is_left_of_it(tmp_path: Path) -> None:
    found = contract(tmp_path, email={"policy": "mask", "mask": "text"}, badge={"policy": "hash"})
    at_source = {each.name: each for each in found.source_columns}
    assert (at_source["email"].pattern, at_source["email"].max_length) == ("@", 100)
    assert (at_source["badge"].minimum, at_source["badge"].pg_type) == (1, "integer")
    email, badge = found.column("email"), found.column("badge")
    assert (email.pattern, email.max_length, badge.minimum) == (None, None, None)


def test_a_contract_that_keeps_everything_has_the_columns_of_its_source(tmp_path: Path) -> None:
    found = contract(tmp_path, email={"policy": "keep"})
    assert found.unprotected == () and found.source_columns == found.columns


def test_another_policy_is_another_contract(tmp_path: Path) -> None:
    kept = contract(tmp_path, email={"policy": "keep"}).fingerprint
    assert contract(tmp_path, email={"policy": "hash"}).fingerprint != kept


REFUSED: dict[str, tuple[str, dict[str, str], str]] = {
    "of a key column": ("id", {"policy": "hash"}, "is of the key"),
    "token of a key column": ("id", {"policy": "tokenize"}, "is of the key"),
    "of the soft-delete column": ("removed_at", {"policy": "drop"}, "says whether a row lives"),
    "mask of a number": (
        "badge",
        {"policy": "mask", "mask": "text"},
        "cannot be applied to the type 'integer'",
    ),
    "hash of a numeric": ("salary", {"policy": "hash"}, "cannot be applied to the type 'numeric(10,2)'"),
    "token of an array": ("tags", {"policy": "tokenize"}, "cannot be applied to the type 'text[]'"),
    "no such column": ("ghost", {"policy": "hash"}, "is not a column"),
    "no mask": ("email", {"policy": "mask"}, "does not say which mask"),
    "a mask that nothing uses": ("email", {"policy": "hash", "mask": "email"}, "and a mask"),
    "no pattern": ("email", {"policy": "mask", "mask": "pattern"}, "has the mask 'pattern'"),
    "a pattern beside a mask": (
        "email",
        {"policy": "mask", "mask": "name", "pattern": "a"},
        "has the mask 'name'",
    ),
    "a replacement beside a mask": (
        "email",
        {"policy": "mask", "mask": "email", "replacement": "a"},
        "has the mask 'email'",
    ),
    "a pattern that is none": (
        "email",
        {"policy": "mask", "mask": "pattern", "pattern": "(", "replacement": "x"},
        "no regular expression",
    ),
    "a group that is none": (
        "email",
        {"policy": "mask", "mask": "pattern", "pattern": "a", "replacement": r"\3"},
        "no regular expression",
    ),
    "another policy": ("email", {"policy": "scramble"}, "policy"),
}


@pytest.mark.parametrize(("column", "told", "words"), REFUSED.values(), ids=REFUSED)
def test_a_policy_that_cannot_hold_is_refused_with_its_place(
    tmp_path: Path, column: str, told: dict[str, str], words: str
) -> None:
    with pytest.raises(ContractError) as refused:
        contract(tmp_path, **{column: told})
    assert f"$.x-cdc.pii.{column}" in refused.value.problem
    assert words in str(refused.value)


@pytest.mark.parametrize("part", ["field", "event_time"])
def test_a_column_that_positions_and_times_are_made_of_stays(tmp_path: Path, part: str) -> None:
    document = json.loads(Path("contracts/data/omnisupport_tickets.json").read_text())
    cursor = document["x-cdc"]["cursor"]
    column = cursor.setdefault(part, "created_at")
    document["x-cdc"].setdefault("pii", {})[column] = {"policy": "drop", "note": "when"}
    with pytest.raises(ContractError, match=r"a column of x-cdc\.cursor"):
        contract_of(document, tmp_path / "tickets.json")


def test_keys_are_named_by_the_setting_and_stand_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "former"
    file.write_text("former " * 8 + "\n")
    file.chmod(0o600)
    monkeypatch.setenv("PII_NEW", SECRET)
    keys = keys_in_force(f"new=env:PII_NEW, old=file:{file}")
    assert [key.id for key in keys.all] == ["new", "old"]
    assert keys.current.hash_of("ada").startswith("new:")
    assert SECRET not in repr(keys) and "former" not in repr(keys)


MISSING = {
    "no key at all": (None, "names no key"),
    "no such variable": ("new=env:PII_NOWHERE", "PII_NOWHERE"),
    "no such file": ("new=file:/nowhere/key", "/nowhere/key"),
    "a secret that can be guessed": ("new=env:PII_SHORT", "has 5 characters"),
    "a secret in the setting": (f"new={SECRET}", "Entry 1"),
    "one id twice": ("a=env:PII_NEW,a=env:PII_SHORT", "'a' twice"),
}


@pytest.mark.parametrize(("setting", "words"), MISSING.values(), ids=MISSING)
def test_a_key_that_is_not_there_is_named_with_the_fix_and_no_secret(
    monkeypatch: pytest.MonkeyPatch, setting: str | None, words: str
) -> None:
    monkeypatch.setenv("PII_NEW", SECRET)
    monkeypatch.setenv("PII_SHORT", "short")
    with pytest.raises(PiiKeyMissing) as missing:
        keys_in_force(setting)
    assert words in missing.value.problem and missing.value.fix
    assert SECRET not in str(missing.value) and "short" not in str(missing.value).replace("PII_SHORT", "")


def test_a_file_that_others_may_read_is_no_secret(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(SECRET)
    file.chmod(0o640)
    with pytest.raises(PiiKeyMissing, match="others than its owner"):
        keys_in_force(f"a=file:{file}")


def test_another_key_and_another_secret_under_its_id_are_other_versions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PII_ONE", SECRET)
    one = current_version("a=env:PII_ONE")
    assert one.startswith("a.") and SECRET not in one
    assert current_version("a=env:PII_ONE,b=env:PII_NOWHERE") == one
    assert current_version("b=env:PII_ONE") != one
    monkeypatch.setenv("PII_ONE", SECRET[::-1])
    assert current_version("a=env:PII_ONE") != one
    assert current_version(None) == current_version("a=env:PII_NOWHERE") == NO_KEY


@pytest.mark.parametrize(("default", "known"), [("nobody@example.com", False), (None, True)])
def test_a_default_is_protected_as_values_are(tmp_path: Path, default: str | None, known: bool) -> None:
    document = copy.deepcopy(DOCUMENT)
    document["properties"]["email"]["default"] = default
    document["x-cdc"]["pii"] = {"email": {"policy": "mask", "mask": "email", "note": "Because."}}
    (email,) = (each for each in contract_of(document, tmp_path / "p.json").columns if each.name == "email")
    # A constant that no mask or hash has made is no value of the lake's: not known, it is unresolved.
    assert (email.default is not None) == known and (email.default is None or email.default.text is None)
