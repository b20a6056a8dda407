"""``docs/faults.md`` is honest: its tests are there, and its errors exist with the exit codes it says."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from functools import cache
from pathlib import Path

import pytest

import omnisupport_ingest.sources.postgres
from omnisupport_ingest.errors import IngestError

TESTS = Path(__file__).parent / "sources" / "postgres"
PAGE = Path(__file__).parents[1] / "docs" / "faults.md"
BEGIN = "<!-- faults: kept by omnisupport_ingest_tests/test_faults_page.py -->"
END = "<!-- end of faults -->"
COLUMNS = ["fault", "how it is noticed", "error", "code", "lost, and the repair", "shown by"]
NONE = "–"


def rows() -> list[list[str]]:
    """The cells of each fault."""
    table = PAGE.read_text().split(BEGIN)[1].split(END)[0]
    lines = [line for line in table.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    heads = [row for row in cells if row[0] == "fault"]
    assert heads and all(head == COLUMNS for head in heads)
    return [row for row in cells if row[0] != "fault" and set(row[0]) != {"-"}]


def faults() -> list[object]:
    return [pytest.param(row, id=row[0]) for row in rows()]


@cache
def exit_codes() -> dict[str, int]:
    """The exit code of every error of a source, by the name of its class."""
    package = omnisupport_ingest.sources.postgres
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)
    found, left = dict[str, int](), [IngestError]
    while left:
        kind = left.pop()
        found[kind.__name__] = kind.exit_code
        left += kind.__subclasses__()
    return found


@cache
def functions_of(file: str) -> set[str]:
    (path,) = TESTS.rglob(file)
    tree = ast.parse(path.read_text())
    return {each.name for each in tree.body if isinstance(each, ast.FunctionDef)}


@pytest.mark.parametrize("row", faults())
def test_fault_is_shown_by_tests_that_are_there(row: list[str]) -> None:
    assert len(row) == len(COLUMNS)
    named = re.findall(r"`(\w+\.py)::(test_\w+)`", row[5])
    assert named and row[5] == " ".join(f"`{file}::{test}`" for file, test in named)
    missing = [test for file, test in named if test not in functions_of(file)]
    assert not missing


@pytest.mark.parametrize("row", faults())
def test_error_of_a_fault_exists_with_its_exit_code(row: list[str]) -> None:
    if row[2] == NONE:
        assert row[3] == NONE
        return
    (name,) = re.fullmatch(r"`(\w+)`", row[2]).groups()  # type: ignore[union-attr]
    assert exit_codes()[name] == int(row[3])
    # Those in the words of the other cells, too: `SlotInUse` (6), `PreflightFailed`, 5.
    for other, code in re.findall(r"`(\w+)`(?: \(|, )(\d+)", " ".join(row)):
        assert exit_codes()[other] == int(code)


def test_page_has_faults_of_every_part() -> None:
    assert len(rows()) > 30
