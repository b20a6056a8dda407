"""Nothing is made for the support desk alone: no module outside of the domains names what is in one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import omnisupport_ingest
from omnisupport_ingest.contracts.documents import program_file
from omnisupport_ingest.contracts.load import default_contracts_dir, load_contracts
from omnisupport_ingest.demo.domains import DOMAINS
from omnisupport_ingest.demo.social import SOCIAL
from omnisupport_ingest.demo.support_desk import SUPPORT_DESK
from omnisupport_ingest.sources.postgres.embedded.server import database_of

PACKAGE = Path(omnisupport_ingest.__file__).parent
OF_DOMAINS = [PACKAGE / "demo" / name for name in DOMAINS]
MODULES = [
    path
    for path in sorted(PACKAGE.rglob("*.py"))
    if not any(path.is_relative_to(folder) for folder in OF_DOMAINS)
]


def contracts_of(domain: str) -> dict[str, set[str]]:
    """The columns of each table of the domain."""
    found = load_contracts(program_file(DOMAINS[domain].contracts)).of_source(domain)
    return {each.table: {column.name for column in each.columns} for each in found}


DESK = contracts_of(SUPPORT_DESK.name)
SHARED = {column for columns in contracts_of(SOCIAL.name).values() for column in columns}

OF_ANY_DATABASE = {"display_name"}
"""Columns of the desk that databases of every kind have, so that `pii scan` looks for them by name."""
ITS_NAMES = sorted(
    {*DESK, f"{SUPPORT_DESK.schema}.", "ticket"}
    | {column for columns in DESK.values() for column in columns if "_" in column and column not in SHARED}
    - OF_ANY_DATABASE
)
"""Tables, the schema before a dot, and the columns that are no plain word and of no other domain."""

NAMED = re.compile("|".join(rf"(?<![A-Za-z]){re.escape(name)}(?![A-Za-z])" for name in ITS_NAMES))


def code_of(module: Path) -> Iterator[tuple[int, str]]:
    """What runs: names and texts, with their lines. Docstrings are documentation, and may give examples."""
    tree = ast.parse(module.read_text())
    told: set[ast.AST] = {
        node.body[0].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in told:
            yield node.lineno, node.value
        elif isinstance(node, ast.Name | ast.Attribute | ast.arg | ast.keyword):
            name = getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "arg", None)
            yield getattr(node, "lineno", 0), name or ""


def test_the_names_that_are_looked_for_are_those_of_the_support_desk() -> None:
    assert {"tickets", "agents", "organizations", "ticket_comments", "customers"} <= set(ITS_NAMES)
    assert {"organization_id", "comment_no", "agent_handle", "lifetime_value"} <= set(ITS_NAMES)
    assert NAMED.search("DELETE FROM support.tickets") and NAMED.search("dim_tickets")
    assert len(MODULES) > 300


def test_no_module_outside_of_the_domains_names_a_table_or_column_of_the_support_desk() -> None:
    found = [
        f"{module.relative_to(PACKAGE)}:{line}: {text}"
        for module in MODULES
        if any(name in module.read_text() for name in ITS_NAMES)
        for line, text in code_of(module)
        if NAMED.search(text)
    ]
    assert found == []


def test_no_module_but_the_list_of_domains_imports_one() -> None:
    names = tuple(f"omnisupport_ingest.demo.{name}" for name in DOMAINS)
    importing = {
        str(module.relative_to(PACKAGE))
        for module in MODULES
        if any(name in module.read_text() for name in names)
        for node in ast.walk(ast.parse(module.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(names)
    }
    assert importing == {"demo/domains.py"}


def test_each_domain_has_a_database_of_its_own_on_the_embedded_server() -> None:
    assert len({database_of(name) for name in DOMAINS}) == len(DOMAINS)


def test_a_new_home_of_the_source_of_each_domain_has_its_contracts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for domain in DOMAINS.values():
        assert default_contracts_dir(domain.name) == program_file(domain.contracts)


def test_each_domain_has_a_contract_for_every_table_and_one_with_a_key_of_several_columns() -> None:
    for domain in DOMAINS.values():
        contracts = load_contracts(program_file(domain.contracts)).of_source(domain.name)
        assert {each.schema for each in contracts} == {domain.schema}
        assert domain.shown in {each.name for each in contracts}
        assert any(len(each.key) > 1 for each in contracts)
        assert any(each.soft_delete_column for each in contracts)
