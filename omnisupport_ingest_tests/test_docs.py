"""The pages name tests and files that exist, and every way into the lake stands in the README's picture."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import click
import pytest

from omnisupport_ingest.cli.main import cli

TESTS = Path(__file__).parent
ROOT = TESTS.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])

_FILE = re.compile(r"(?<![\w/])(?:omnisupport_ingest_tests/)?((?:\w+/)*test_\w+\.py)\b")
_TEST = re.compile(r"\b(test_\w+)\b(?!\.py|/)")
_FOLDER = re.compile(r"omnisupport_ingest(?:_tests)?/[\w/]+")


@cache
def _known() -> frozenset[str]:
    """Every test function there is, by name, and every module of tests without its ending."""
    found = set()
    for file in TESTS.rglob("test_*.py"):
        found.add(file.stem)
        tree = ast.parse(file.read_text())
        found |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    return frozenset(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_is_there(page: Path) -> None:
    text = page.read_text()
    files = [name for name in _FILE.findall(text) if not any(TESTS.rglob(name))]
    named = [name for name in _TEST.findall(text) if name not in _known() and name != "test_decoding"]
    folders = [name for name in _FOLDER.findall(text) if not _there(name)]
    assert (files, named, folders) == ([], [], [])


def _there(name: str) -> bool:
    path = ROOT / name.rstrip("/")
    return path.exists() or path.with_suffix(".py").exists()


def test_every_way_in_stands_in_the_picture_of_the_readme() -> None:
    picture = (ROOT / "README.md").read_text().partition("## The path of a row")[2].partition("\n## ")[0]
    package = ROOT / "omnisupport_ingest"
    ways = [folder.name for folder in (package / "sources").iterdir() if (folder / "__init__.py").exists()]
    missing = [way for way in ways if f"sources/{way}/" not in picture]
    assert missing == []
    named = re.findall(r"(?:layers|defs)/\w+\.py", picture)
    assert [name for name in named if not (package / name).is_file()] == []


def test_nothing_is_called_planned_that_is_built() -> None:
    """A row that says *planned* names no way in that is there, by the folder that it has."""
    sources = ROOT / "omnisupport_ingest" / "sources"
    built = [folder.name for folder in sources.iterdir() if (folder / "__init__.py").exists()]
    planned = [
        (page.name, way, line)
        for page in PAGES
        for line in page.read_text().splitlines()
        for way in built
        if "| *planned*" in line and way in line.lower()
    ]
    assert planned == []


_COMMAND = re.compile(r"^(?: {4}|\$ )?(?:\.venv/bin/)?omnisupport-ingest (.+)$", flags=re.MULTILINE)
_PLACEHOLDER = re.compile(r"\b[A-Z]{3,}\b|…|\.\.\.|COMMAND")


def typed_commands(page: Path) -> list[str]:
    """The command lines that ``page`` shows to be typed, without what stands behind a comment or a pipe."""
    lines = (line.split(" #")[0] for line in _COMMAND.findall(page.read_text()))
    return [re.split(r" [|>] ", line)[0] for line in lines if not _PLACEHOLDER.search(line)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_that_a_page_shows_can_be_typed(page: Path) -> None:
    if page.name == "cli.md":
        return  # It is made from the commands.
    refused = {line: problem for line in typed_commands(page) if (problem := _problem(shlex.split(line)))}
    assert refused == {}


def _problem(words: list[str]) -> str | None:
    """Why click would refuse the command before it runs, or None."""
    command: click.Command = cli
    context = click.Context(cli, info_name="omnisupport-ingest")
    while isinstance(command, click.Group):
        if not words or words[0].startswith("-"):
            return None
        name, *words = words
        found = command.get_command(context, name)
        if found is None:
            return f"{name} is no command"
        command, context = found, click.Context(found, parent=context, info_name=name)
    try:
        command.make_parser(context).parse_args(words)
    except click.UsageError as problem:
        return problem.format_message()
    return None


def test_the_pages_show_many_commands() -> None:
    assert len([line for page in PAGES for line in typed_commands(page)]) > 100


def test_every_runbook_says_when_what_comes_first_how_it_worked_and_what_is_lost() -> None:
    page = (ROOT / "docs" / "runbooks.md").read_text()
    contents, *runbooks = re.split(r"^## ", page, flags=re.MULTILINE)
    parts = ("**When.**", "**Before you begin.**", "\n1. ", "**It worked** when", "**Lost.**")
    incomplete = {
        runbook.partition("\n")[0]: missing
        for runbook in runbooks
        if (missing := [part for part in parts if part not in runbook])
    }
    assert incomplete == {}
    assert contents.count("](#") == len(runbooks) > 8


_SYMPTOMS = ROOT / "docs" / "troubleshooting.md"
_SEEN = {"how you see it", "look with", "what else to look at"}


def test_every_symptom_has_a_cause_what_shows_it_and_a_fix() -> None:
    _, *sections = re.split(r"^## ", _SYMPTOMS.read_text(), flags=re.MULTILINE)
    rows = 0
    for section in sections:
        lines = [line for line in section.splitlines() if line.startswith("|")]
        if not lines:
            continue
        title, _, *found = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
        assert _SEEN & set(title) and title[-1] == "fix", section.partition("\n")[0]
        for cells in found:
            assert len(cells) == len(title) and all(cells), cells
            rows += 1
    assert rows > 50


def test_every_check_stands_in_the_page_of_symptoms() -> None:
    checks = (ROOT / "docs" / "reference.md").read_text().partition("\n## Checks\n")[2].partition("\n## ")[0]
    names = re.findall(r"^\| `(\w+)` \|", checks, flags=re.MULTILINE)
    names += re.findall(r"`(\w+)`", checks.partition("| check |")[0])
    symptoms = _SYMPTOMS.read_text().partition("\n## A check is red\n")[2].partition("\n## ")[0]
    assert len(names) > 20 and [name for name in names if f"`{name}`" not in symptoms] == []


@pytest.mark.parametrize("name", ["troubleshooting.md", "operate.md", "errors.md"])
def test_the_commands_that_a_table_names_can_be_typed(name: str) -> None:
    rows = [line for line in (ROOT / "docs" / name).read_text().splitlines() if line.startswith("|")]
    codes = [code for line in rows for code in re.findall(r"`([^`]+)`", line)]
    lines = [code.removeprefix("omnisupport-ingest ") for code in codes]
    typed = [line for line in lines if line.split()[0] in cli.listed and not _PLACEHOLDER.search(line)]
    assert len(typed) > 30
    assert {line: problem for line in typed if (problem := _problem(shlex.split(line)))} == {}


_CALLED = re.compile(r"omnisupport-ingest((?: -{0,2}[a-z][a-z-]+)+)")


def test_the_commands_that_messages_and_docstrings_name_are_there() -> None:
    named = {
        (str(file.relative_to(ROOT)), called)
        for file in (ROOT / "omnisupport_ingest").rglob("*.py")
        for text in _texts(ast.parse(file.read_text()))
        for called in _CALLED.findall(text)
    }
    assert len(named) > 100
    assert {place: word for place in named if (word := _unknown(place[1].split()))} == {}


def _texts(tree: ast.Module) -> Iterator[str]:
    """Every text of a module, those with expressions in them as a whole."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(each.value) if isinstance(each, ast.Constant) else "…" for each in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _unknown(words: list[str]) -> str | None:
    """The first of ``words`` that is no command or option where one must be; what follows may be prose."""
    commands: Mapping[str, click.Command] = cli.whole()
    command: click.Command = cli
    for word in words:
        if word.startswith("-"):
            options = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
            if word not in {"--help", *options}:
                return word
        elif isinstance(command, click.Group):
            if word not in commands:
                return word
            command = commands[word]
            commands = command.commands if isinstance(command, click.Group) else {}
        else:
            return None
    return None
