"""Who may import whom: the imports of every module against the table of packages."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from pathlib import Path

import pytest

import omnisupport_ingest

PACKAGE = Path(omnisupport_ingest.__file__).parent

VALUES = {"errors", "position", "key_range", "windows", "foreign", "json_values", "records"}
VALUES |= {"sealed_requests", "wording"}
FLOOR_1 = VALUES | {"settings", "durable", "failpoints", "tracing", "progress", "home", "locks", "processes"}
FLOOR_1 |= {"storage", "bucket", "visiting", "sqlite_index", "compiled"}

LAKE_SIDE = {"layers", "read", "review", "checks"}

MAY_IMPORT: dict[str, set[str]] = {
    **{name: FLOOR_1 - {name} for name in FLOOR_1},
    "contracts": FLOOR_1,
    "lake": FLOOR_1,
    "landing": FLOOR_1,
    "cdc": FLOOR_1 | {"contracts"},
    "sources": FLOOR_1 | {"contracts", "landing"},
    "demo": FLOOR_1 | {"sources"},
    "layers": FLOOR_1 | {"contracts", "landing", "lake", "cdc"},
    "read": FLOOR_1 | {"contracts", "landing", "lake", "cdc", "layers"},
    "review": FLOOR_1 | {"contracts", "landing", "lake", "cdc", "layers", "read"},
    "checks": FLOOR_1 | {"contracts", "landing", "lake", "cdc", "layers", "read", "review"},
    "withdrawal": FLOOR_1 | {"contracts", "lake", "sources", "layers", "read"},
    "retention": FLOOR_1 | {"contracts", "landing", "lake", "cdc", "layers", "read", "review"},
    "report": FLOOR_1 | {"contracts", "landing", "lake", "layers", "read"},
    "targets": FLOOR_1 | {"contracts", "lake", "sources", "layers", "read"},
    "equality": FLOOR_1 | {"contracts", "landing", "lake", "sources", "layers", "read"},
    "runtime": FLOOR_1,
    "defs": FLOOR_1
    | {"contracts", "landing", "lake", "cdc", "sources", "targets", "equality", "runtime", "retention"}
    | {"report"}
    | LAKE_SIDE,
    "definitions": FLOOR_1 | {"contracts", "layers", "defs", "runtime"},
    "verify": FLOOR_1 | {"contracts", "landing", "lake", "sources", "demo", "runtime", "defs"} | LAKE_SIDE,
    "tuning": FLOOR_1 | {"contracts", "landing", "layers", "sources", "demo", "runtime", "report", "verify"},
}
"""Package → packages it may import besides itself. ``cli`` may import everything."""

MODULES = sorted(PACKAGE.rglob("*.py"))


@functools.cache
def imported(module: Path) -> frozenset[str]:
    """Every name that ``module`` imports, at whatever depth of the code."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports by a relative name"
            name = node.module or ""
            own = name == "omnisupport_ingest"
            found |= {f"{name}.{alias.name}" for alias in node.names} if own else {name}
    return frozenset(found)


def package_of(module: Path) -> str:
    return module.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_arrows_point_down(module):
    package = package_of(module)
    if package in ("cli", "__init__"):
        return
    ours = {name.split(".")[1] for name in imported(module) if name.startswith("omnisupport_ingest.")}
    assert ours - {package, "__version__"} <= MAY_IMPORT[package]


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_dagster_stays_above_the_layers(module):
    if package_of(module) in ("cli", "defs", "definitions"):
        return
    assert not {name for name in imported(module) if name.split(".")[0].startswith("dagster")}


POSTGRES = (
    "session",
    "embedded",
    "slot",
    "protocol",
    "catalog",
    "stream",
    "snapshot",
    "preflight",
    "capture",
)
"""The packages of ``sources/postgres``; each imports only those before it."""


@pytest.mark.parametrize("package", POSTGRES)
def test_packages_of_postgres_import_only_those_below_them(package):
    root = PACKAGE / "sources" / "postgres"
    ours = {
        name.split(".")[3]
        for module in (root / package).rglob("*.py")
        for name in imported(module)
        if name.startswith("omnisupport_ingest.sources.postgres.")
    }
    assert ours <= set(POSTGRES[: POSTGRES.index(package) + 1])


def test_the_order_of_postgres_has_every_package():
    found = {each.name for each in (PACKAGE / "sources" / "postgres").iterdir() if each.is_dir()}
    assert found - {"__pycache__"} == set(POSTGRES)


LAYERS = ("events", "dimension", "histories", "scheduling")
"""The packages of ``layers``; each imports only those before it, and what all layers share."""


@pytest.mark.parametrize("package", LAYERS)
def test_packages_of_layers_import_only_those_below_them(package):
    ours = {
        name.split(".")[2]
        for module in (PACKAGE / "layers" / package).rglob("*.py")
        for name in imported(module)
        if name.startswith("omnisupport_ingest.layers.")
    }
    assert not ours & set(LAYERS[LAYERS.index(package) + 1 :])


TERMINAL = {"click", "rich"}
"""What renders for people and reads their arguments."""


def test_words_for_a_terminal_are_the_command_lines_alone():
    assert not {
        (str(module.relative_to(PACKAGE)), name)
        for module in MODULES
        if package_of(module) != "cli"
        for name in imported(module)
        if name.split(".")[0] in TERMINAL
    }


def test_private_dagster_names_are_in_five_modules():
    private = {
        str(module.relative_to(PACKAGE))
        for module in MODULES
        if any(name.startswith("dagster._") for name in imported(module))
    }
    expected = {"backfills.py", "daemon.py", "dagster_storage.py", "metadata.py", "run_launcher.py"}
    assert private == {f"defs/{name}" for name in expected}


CALLED_FROM_ELSEWHERE = {
    "read_as_of": "people's own programs, by docs/history.md",
    "toChannel": "PySpark",
    "generate_trace_id": "OpenTelemetry",
    "list_commands": "click",
    "_init_session": "dagster-pyspark",
    "check_run_worker_health": "Dagster",
    "end_watch": "Dagster",
    "log_message": "http.server",
    "verify_request": "socketserver",
    "handle_error": "socketserver",
    "readinto": "io",
}


def test_nothing_is_in_the_program_for_tests_alone():
    text = {module: module.read_text() for module in MODULES}
    named = Counter(word for each in text.values() for word in re.findall(r"\w+", each))
    found = {
        node.name: str(module.relative_to(PACKAGE))
        for module, source in text.items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        # What a decorator registers is called by that name nowhere.
        if named[node.name] == 1 and not node.decorator_list and not node.name.startswith("__")
    }
    assert {name: place for name, place in found.items() if name not in CALLED_FROM_ELSEWHERE} == {}
    assert found.keys() >= CALLED_FROM_ELSEWHERE.keys()
