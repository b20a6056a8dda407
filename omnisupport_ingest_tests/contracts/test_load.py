"""A contract that cannot be used is refused with the file, the place and the fix."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from omnisupport_ingest.contracts.documents import program_file
from omnisupport_ingest.contracts.load import (
    ContractError,
    default_contracts_dir,
    has_contract_of,
    load_contract,
    load_contracts,
)

Edit = Callable[[dict[str, Any]], object]


def orders() -> dict[str, Any]:
    """A valid contract document."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Orders",
        "description": "What was ordered.",
        "type": "object",
        "required": ["id", "state"],
        "properties": {
            "id": {"type": "integer", "x-pg-type": "bigint", "description": "Identity."},
            "state": {"type": "string", "x-pg-type": "shop.state", "enum": ["new"], "description": "State."},
            "total": {
                "type": ["number", "null"],
                "x-pg-type": "numeric(12,2)",
                "minimum": 0.1,
                "description": "Sum.",
            },
            "removed_at": {
                "type": ["string", "null"],
                "x-pg-type": "timestamptz",
                "description": "When removed.",
            },
        },
        "x-cdc": {
            "version": "1.2.3",
            "source": "shop",
            "schema": "public",
            "table": "orders",
            "owner": "team:shop",
            "key": ["id"],
            "events": {"soft_delete_column": "removed_at"},
            "lateness": {"allowed": "PT30M", "max": "P2D"},
            "pii": {"total": {"policy": "keep", "note": "Needed for reports."}},
        },
    }


def written(folder: Path, document: dict[str, Any], name: str = "orders.json") -> Path:
    path = folder / name
    path.write_text(json.dumps(document))
    return path


def test_a_contract_is_read_whole(tmp_path: Path) -> None:
    contract = load_contract(written(tmp_path, orders()))
    assert (contract.name, contract.full_name, contract.version) == ("orders", "public.orders", "1.2.3")
    assert (contract.key, contract.soft_delete_column) == (("id",), "removed_at")
    assert (contract.allowed_lateness, contract.max_lateness) == (timedelta(minutes=30), timedelta(days=2))
    assert contract.column("total").minimum == Decimal("0.1")
    assert contract.column("total").personal
    assert [column.nullable for column in contract.columns] == [False, False, True, True]
    assert contract.column("state").enum == ("new",)


def test_the_fingerprint_is_of_the_content_and_not_of_its_layout(tmp_path: Path) -> None:
    plain = load_contract(written(tmp_path, orders()))
    document = dict(reversed(orders().items()))
    (tmp_path / "orders.json").write_text(json.dumps(document, indent=3))
    assert load_contract(tmp_path / "orders.json").fingerprint == plain.fingerprint
    document["title"] = "Other"
    assert load_contract(written(tmp_path, document)).fingerprint != plain.fingerprint


def properties(document: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = document["properties"]
    return found


REFUSED: dict[str, tuple[Edit, str, str]] = {
    "the key names no column": (
        lambda d: d["x-cdc"].update(key=["id", "nope"]),
        "$.x-cdc.key[1]",
        "under properties",
    ),
    "a key column may be null": (
        lambda d: d["x-cdc"].update(key=["total"]),
        "$.x-cdc.key[0]",
        "List total in required",
    ),
    "every row would be deleted": (
        lambda d: d["x-cdc"]["events"].update(soft_delete_column="state"),
        "$.x-cdc.events.soft_delete_column",
        "is required",
    ),
    "no value would do": (
        lambda d: properties(d)["total"].update(maximum=0),
        "$.properties.total.minimum",
        "above the maximum 0",
    ),
    "there is no key": (lambda d: d["x-cdc"].pop("key"), "$.x-cdc", "'key' is a required property"),
    "the key is empty": (lambda d: d["x-cdc"].update(key=[]), "$.x-cdc.key", "List the key's columns"),
    "a column has a reserved name": (
        lambda d: properties(d).update(_CDC_op=properties(d)["total"]),
        "$.properties._CDC_op",
        "Rename",
    ),
    "a column is called as the lake's partitions are": (
        lambda d: properties(d).update(Window=properties(d)["total"]),
        "$.properties.Window",
        "Rename",
    ),
    "two columns differ in case": (
        lambda d: properties(d).update(Total=properties(d)["total"]),
        "$.properties.Total",
        "Rename",
    ),
    "a column name has a dot": (
        lambda d: properties(d).update({"a.b": properties(d)["total"]}),
        "$.properties",
        "name has no dot",
    ),
    "null is allowed and required at once": (
        lambda d: d["required"].append("total"),
        "$.properties.total.type",
        "not both",
    ),
    "required names no column": (lambda d: d["required"].append("ghost"), "$.required", "'ghost'"),
    "the JSON type contradicts the PostgreSQL type": (
        lambda d: properties(d)["id"].update(type="string"),
        "$.properties.id.type",
        "Use integer",
    ),
    "a rule would not be enforced": (
        lambda d: properties(d)["removed_at"].update(pattern="^2"),
        "$.properties.removed_at.pattern",
        "Take the rule out",
    ),
    "a keyword is unknown": (
        lambda d: properties(d)["id"].update(multipleOf=2),
        "$.properties.id",
        "'multipleOf' was unexpected",
    ),
    "a pattern is no regular expression": (
        lambda d: properties(d).update(
            state={"type": "string", "x-pg-type": "text", "pattern": "(", "description": "x"}
        ),
        "$.properties.state.pattern",
        "Correct the pattern",
    ),
    "a key column had another type": (
        lambda d: properties(d)["id"].update({"x-former-types": ["text"]}),
        "$.properties.id.x-former-types",
        "Take it out",
    ),
    "a text had another type": (
        lambda d: properties(d)["state"].update({"x-former-types": ["integer"]}),
        "$.properties.state.x-former-types",
        "holds every text",
    ),
    "the soft delete column is missing": (
        lambda d: d["x-cdc"]["events"].update(soft_delete_column="gone"),
        "$.x-cdc.events.soft_delete_column",
        "Name a column, or null",
    ),
    "a duration has months": (
        lambda d: d["x-cdc"]["lateness"].update(max="P1M"),
        "$.x-cdc.lateness.max",
        "without years and months",
    ),
    "max lateness is below allowed": (
        lambda d: d["x-cdc"]["lateness"].update(max="PT1M"),
        "$.x-cdc.lateness.max",
        "at least as long",
    ),
    "the version is not major.minor.patch": (
        lambda d: d["x-cdc"].update(version="1"),
        "$.x-cdc.version",
        "major.minor.patch",
    ),
    "the table name is no plain name": (
        lambda d: d["x-cdc"].update(table="Order Lines"),
        "$.x-cdc.table",
        "plain name",
    ),
    "personal data names no column": (
        lambda d: d["x-cdc"]["pii"].update(ghost={"policy": "keep", "note": "x"}),
        "$.x-cdc.pii.ghost",
        "Name columns only",
    ),
}


@pytest.mark.parametrize("situation", REFUSED)
def test_refused_with_file_place_and_fix(tmp_path: Path, situation: str) -> None:
    edit, place, words = REFUSED[situation]
    document = orders()
    edit(document)
    path = written(tmp_path, document)
    with pytest.raises(ContractError) as refused:
        load_contract(path)
    assert f"{path} at {place}" in refused.value.problem
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"title": ', "not valid JSON"),
        ("[]", "no JSON object"),
        ('{"title": "a", "title": "b"}', "'title' stands twice"),
    ],
)
def test_broken_json_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(ContractError, match=words) as refused:
        load_contract(path)
    assert str(path) in refused.value.problem


@pytest.mark.parametrize("schema", ["public", "archive"])
def test_two_contracts_for_one_table_are_refused_by_name(tmp_path: Path, schema: str) -> None:
    other = orders()
    other["x-cdc"]["schema"] = schema
    first, second = written(tmp_path, orders(), "a.json"), written(tmp_path, other, "b.json")
    with pytest.raises(ContractError) as refused:
        load_contracts(tmp_path)
    assert str(first) in refused.value.problem and str(second) in refused.value.problem


def test_an_unknown_type_is_kept_as_exact_text(tmp_path: Path) -> None:
    document = orders()
    document["properties"]["total"] = {
        "type": ["string", "null"],
        "x-pg-type": "geometry(Point,4326)",
        "description": "Where.",
    }
    document["x-cdc"]["pii"] = {}
    column = load_contract(written(tmp_path, document)).column("total")
    assert column.type.kind.name == "TEXT"


def test_contracts_are_found_by_source_and_table(tmp_path: Path) -> None:
    other = orders()
    other["x-cdc"].update(source="archive", table="Lines")
    written(tmp_path, orders(), "a.json")
    written(tmp_path, other, "b.json")
    contracts = load_contracts(tmp_path)
    assert len(contracts) == 2
    assert contracts.sources() == ("archive", "shop")
    assert [contract.name for contract in contracts] == ["Lines", "orders"]
    assert [contract.name for contract in contracts.of_source("shop")] == ["orders"]
    found = contracts.find("shop", "public", "orders")
    assert found is not None and found.name == "orders"
    assert contracts.find("shop", "other", "orders") is None


@pytest.mark.parametrize("folder", ["missing", "."])
def test_a_folder_without_contracts_is_refused(tmp_path: Path, folder: str) -> None:
    with pytest.raises(ContractError):
        load_contracts(tmp_path / folder)


def test_contracts_of_the_working_folder_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert (default_contracts_dir() / "tickets.json").exists()
    (tmp_path / "contracts" / "data").mkdir(parents=True)
    assert default_contracts_dir() == Path("contracts/data")


def test_a_source_has_a_contract_whatever_else_is_in_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "contracts"
    assert not has_contract_of(folder, "support_desk")
    folder.mkdir()
    (folder / "b.json").write_text('{"x-cdc": null}')
    shutil.copy(default_contracts_dir() / "tickets.json", folder)
    assert has_contract_of(folder, "support_desk") and not has_contract_of(folder, "social")
    (folder / "a.json").write_text("{")
    assert has_contract_of(folder, "support_desk")
    with pytest.raises(ContractError, match=r"a\.json is not valid JSON"):
        has_contract_of(folder, "social")


def test_a_source_with_contracts_of_the_program_has_these_unless_the_working_folder_has_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    social, usual = Path("contracts/social/data"), Path("contracts/data")
    assert default_contracts_dir("social") == program_file(str(social))
    assert default_contracts_dir("shop") == default_contracts_dir() == program_file(str(usual))
    usual.mkdir(parents=True)
    assert default_contracts_dir("social") == default_contracts_dir("shop") == usual
    social.mkdir(parents=True)
    assert default_contracts_dir("social") == social and default_contracts_dir() == usual
    Path("contracts/shop/data").mkdir(parents=True)
    assert default_contracts_dir("shop") == usual, "the program has none of that name"


def test_reading_contracts_needs_neither_spark_nor_pandera() -> None:
    code = (
        "import sys; from omnisupport_ingest.contracts.load import default_contracts_dir, load_contracts; "
        "load_contracts(default_contracts_dir()); "
        "assert not {'pyspark', 'pandera', 'pandas', 'dagster'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_table_with_an_odd_name_has_a_name_of_its_own_in_the_lake(tmp_path: Path) -> None:
    document = orders()
    document["x-cdc"] |= {"schema": "My Schema", "table": 'Weird "Name"', "name": "weird"}
    contract = load_contract(written(tmp_path, document))
    assert (contract.name, contract.schema, contract.table) == ("weird", "My Schema", 'Weird "Name"')


def test_two_schemas_may_hold_a_table_of_one_name(tmp_path: Path) -> None:
    written(tmp_path, orders())
    document = orders()
    document["x-cdc"] |= {"schema": "archive", "name": "archive_orders"}
    written(tmp_path, document, "archive.json")
    assert [contract.name for contract in load_contracts(tmp_path)] == ["archive_orders", "orders"]


def test_two_names_for_one_table_are_refused(tmp_path: Path) -> None:
    written(tmp_path, orders())
    document = orders()
    document["x-cdc"]["name"] = "other"
    written(tmp_path, document, "other.json")
    with pytest.raises(ContractError, match=r"both contracts for public\.orders"):
        load_contracts(tmp_path)


def test_an_owner_that_dagster_would_not_take_is_refused(tmp_path: Path) -> None:
    document = orders()
    document["x-cdc"]["owner"] = "somebody"
    with pytest.raises(ContractError, match="Write team:NAME or an email address"):
        load_contract(written(tmp_path, document))


@pytest.mark.parametrize(
    ("edit", "at", "told"),
    [
        (lambda d: d.update({"x-cdcc": d.pop("x-cdc")}), "$:", "Write x-cdc in place of x-cdcc"),
        (
            lambda d: d["x-cdc"].update(versoin=d["x-cdc"].pop("version")),
            "$.x-cdc:",
            "Write version in place",
        ),
        (
            lambda d: properties(d)["id"].update({"x-pgtype": properties(d)["id"].pop("x-pg-type")}),
            "$.properties.id:",
            "Write x-pg-type in place of x-pgtype",
        ),
        (lambda d: d.update(whatever=1), "$:", "Take 'whatever' out"),
        (
            lambda d: properties(d)["id"].update({"x-pg-type": "bigintt"}),
            "$.properties.id.x-pg-type:",
            "Write bigint",
        ),
        (
            lambda d: properties(d)["id"].update({"x-pg-type": "interger"}),
            "$.properties.id.x-pg-type:",
            "Write integer",
        ),
    ],
    ids=["the policy", "a part of it", "a column's type", "nothing known", "bigint", "integer"],
)
def test_a_misspelled_word_is_answered_with_the_one_that_was_meant(
    tmp_path: Path, edit: Edit, at: str, told: str
) -> None:
    document = orders()
    edit(document)
    with pytest.raises(ContractError) as refused:
        load_contract(written(tmp_path, document))
    assert at in refused.value.problem
    assert told in refused.value.fix
