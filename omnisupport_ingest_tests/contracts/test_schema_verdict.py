"""The fast verdict on a document and jsonschema's are the same, or there is none."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from omnisupport_ingest.contracts.documents import program_file
from omnisupport_ingest.contracts.load import (
    contract_of,
    default_contracts_dir,
    load_contract,
    load_contracts,
)
from omnisupport_ingest.contracts.model import ContractError
from omnisupport_ingest.contracts.schema_verdict import Unsure, compile_schema

FOLDERS = {
    "contracts/contract.schema.json": default_contracts_dir(),
    "contracts/source.schema.json": program_file("contracts/sources"),
}
JSON = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-2, 300),
        st.sampled_from((0.5, 1.0, 2.0)),
        st.sampled_from(("", "a", "PT1H", "integer", "string", "keep", "a b", "1.0.0", "team:x", "é\n")),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(("env", "name", "pattern", "type", "x")), inner, max_size=3),
    ),
    max_leaves=4,
)


@cache
def schema(name: str) -> dict[str, Any]:
    return json.loads(program_file(name).read_text())


@cache
def documents(name: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(FOLDERS[name].glob("*.json"))]


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every member or item of a document, as what holds it and its name or number there."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = [(value, at) for at, _ in inner]
    return found + [place for _, each in inner for place in places(each)]


@pytest.mark.parametrize("name", FOLDERS)
@given(data=st.data())
def test_a_spoiled_document_is_judged_as_by_jsonschema(name: str, data: st.DataObject):
    document = copy.deepcopy(data.draw(st.sampled_from(documents(name))))
    for _ in range(data.draw(st.integers(0, 3))):
        holder, at = data.draw(st.sampled_from(places(document)))
        match data.draw(st.sampled_from(("replace", "take out", "add", "copy"))):
            case "replace":
                holder[at] = data.draw(JSON)
            case "take out":
                del holder[at]
            case "add" if isinstance(holder, dict):
                names = ("x", "pattern", "minimum", "enum", "maxLength", "retention", "log", "licenses")
                holder[data.draw(st.sampled_from(names))] = data.draw(JSON)
            case _:
                other, there = data.draw(st.sampled_from(places(document)))
                holder[at] = copy.deepcopy(other[there])
        if not places(document):
            break
    try:
        found = compile_schema(schema(name))(document)
    except Unsure:
        return
    assert found == Draft202012Validator(schema(name)).is_valid(document)


@pytest.mark.parametrize("name", [*FOLDERS, "contracts/seed_manifest.schema.json"])
def test_each_schema_of_ours_is_compiled(name: str):
    """With a keyword that is not known it would be jsonschema alone, which is slow."""
    verdict = compile_schema(schema(name))
    if name in FOLDERS:
        assert documents(name) and all(verdict(each) for each in documents(name))


@pytest.mark.parametrize("part", [{"dependentRequired": {}}, {"$ref": "other.json"}, {"contains": {}}])
def test_an_unknown_keyword_is_left_to_jsonschema(part: dict[str, Any]):
    with pytest.raises(Unsure):
        compile_schema({"properties": {"a": part}})


def test_many_contracts_are_read_with_one_database_that_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """DuckDB's database for rules takes milliseconds to open, and its threads keep a process from forking."""
    import duckdb

    from omnisupport_ingest.contracts import expression_syntax

    document = json.loads((default_contracts_dir() / "tickets.json").read_text())
    assert document["x-cdc"]["quality"]["rules"]
    for number in range(20):
        policy = document["x-cdc"] | {"table": f"t{number}"}
        (tmp_path / f"t{number}.json").write_text(json.dumps(document | {"x-cdc": policy}))
    opened = []
    connect = duckdb.connect
    monkeypatch.setattr(duckdb, "connect", lambda *args, **named: opened.append(1) or connect(*args, **named))
    expression_syntax._close()
    expression_syntax._columns_of.cache_clear()
    assert len(load_contracts(tmp_path).all) == 20
    assert len(opened) == 1 and not expression_syntax._held
    load_contract(tmp_path / "t1.json")
    assert len(opened) == 1, "the rules are known"
    wrong = copy.deepcopy(document)
    wrong["x-cdc"]["quality"]["rules"][0]["expression"] = "nothing > 1"
    with pytest.raises(ContractError):
        contract_of(wrong, tmp_path / "t2.json")
    assert len(opened) == 2
    assert not expression_syntax._held
