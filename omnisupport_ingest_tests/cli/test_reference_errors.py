"""``docs/errors.md`` has every error that a person may meet, each with what it means and what to do."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

import omnisupport_ingest
from omnisupport_ingest.cli import reference
from omnisupport_ingest.cli.errors import EXIT_CODES
from omnisupport_ingest.cli.reference_errors import described, errors, errors_page
from omnisupport_ingest.errors import IngestError

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]
PACKAGE = Path(omnisupport_ingest.__file__).parent
PAGE = ROOT / reference.ERRORS_PAGE

_FEWEST_WORDS = 6
_SENTENCES = re.compile(r"[A-Z`].*[.)]", flags=re.DOTALL)
_LEANS_ON_MORE = re.compile(r"(Raised|Raise|An? error|Error|It|They|This|That|See|As)\b")
"""First words that say nothing by themselves."""


@cache
def written() -> frozenset[str]:
    """Every class of the source that derives from ``IngestError``, as its module and name."""
    found: dict[str, tuple[str, set[str]]] = {}
    for file in PACKAGE.rglob("*.py"):
        module = ".".join(("omnisupport_ingest", *file.relative_to(PACKAGE).with_suffix("").parts))
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                bases = {ast.unparse(each).rpartition(".")[2] for each in node.bases}
                found[f"{module.removesuffix('.__init__')}.{node.name}"] = (node.name, bases)
    names, before = {IngestError.__name__}, 0
    while len(names) > before:
        before = len(names)
        names |= {name for name, bases in found.values() if bases & names}
    return frozenset(place for place, (_, bases) in found.items() if bases & names)


def test_the_page_of_errors_is_current() -> None:
    how = f"make it again: {reference.REGENERATE}"
    assert PAGE.read_text() == errors_page(PAGE.parent), f"{reference.ERRORS_PAGE} is old; {how}"


def test_every_error_of_the_source_has_a_row() -> None:
    assert len(written()) > 140
    assert {f"{each.__module__}.{each.__qualname__}" for each in errors()} == written()
    rows = Counter(re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), flags=re.MULTILINE))
    names = Counter(place.rpartition(".")[2] for place in written())
    # A name that two errors have would say two things, and link to what is said of the other.
    assert rows == names and [name for name, count in names.items() if count > 1] == []


def test_every_error_says_alone_what_it_means_and_what_to_do() -> None:
    told = {error.__name__: described(error) for error in errors()}
    assert {name: lacks for name, each in told.items() if (lacks := _lacks(*each))} == {}
    meanings = Counter(meaning for meaning, _ in told.values())
    assert [meaning for meaning, count in meanings.items() if count > 1] == []


def _lacks(meaning: str, fix: str) -> str | None:
    """What a reader of a docstring lacks, or None."""
    if len(meaning.split()) < _FEWEST_WORDS or not _SENTENCES.fullmatch(meaning):
        return f"say in a sentence what has happened: {meaning!r}"
    if _LEANS_ON_MORE.match(meaning):
        return f"begin with the thing that is wrong: {meaning!r}"
    if len(fix.split()) < 3 or not _SENTENCES.fullmatch(fix):
        return f"say in a paragraph that begins with Fix: what to do: {fix!r}"
    return None


@pytest.mark.parametrize(
    ("meaning", "fix"),
    [
        ("", "Start it again."),
        ("Not there.", "Start it again."),
        ("the server has gone away while it was read.", "Start it again."),
        ("Raised when the server has gone away while it was read.", "Start it again."),
        ("It has gone away while it was read from.", "Start it again."),
        ("The server has gone away while it was read.", ""),
        ("The server has gone away while it was read.", "See above."),
    ],
)
def test_a_docstring_that_says_too_little_is_noticed(meaning: str, fix: str) -> None:
    assert _lacks(meaning, fix)


def test_every_error_ends_a_command_with_a_code_that_is_explained() -> None:
    assert {error.__name__ for error in errors() if error.exit_code not in EXIT_CODES} == set()
    page = (ROOT / reference.COMMANDS_PAGE).read_text()
    assert [code for code, each in EXIT_CODES.items() if f"| {code} | {each.meaning} |" not in page] == []


def test_an_error_that_a_page_explains_leads_there() -> None:
    (row,) = re.findall(r"^\| `SlotMoved` \|.*$", PAGE.read_text(), flags=re.MULTILINE)
    for section in ("troubleshooting.md#capture-stopped", "recovery.md#bad-input", "faults.md#slot"):
        assert f"({section})" in row
