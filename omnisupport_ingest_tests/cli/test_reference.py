"""What a person reads about the commands is there, and is what the code says."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import click
import pytest

from bench.commands import LONG_LOOKS, LOOKS, NO_LOOKS
from omnisupport_ingest.cli import reference
from omnisupport_ingest.cli.reference_data import reference_page
from omnisupport_ingest.defs import metadata
from omnisupport_ingest.settings import Settings
from omnisupport_ingest_tests.cli.command import command

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]
COMMANDS = list(reference.commands())
LEAVES = [(name, command) for name, command in COMMANDS if not isinstance(command, click.Group)]

HEAVY = (
    "pyspark",
    "dagster",
    "pandas",
    "numpy",
    "pyarrow",
    "deltalake",
    "duckdb",
    "psycopg2",
    "pandera",
    "sqlalchemy",
)


def test_every_command_is_timed_or_named_as_one_that_does_not_only_look() -> None:
    named = [*LOOKS, *LONG_LOOKS, *(name for names in NO_LOOKS.values() for name in names)]
    assert sorted(named) == sorted(name.removeprefix("omnisupport-ingest ") for name, _ in LEAVES)


@pytest.mark.parametrize(("name", "command"), LEAVES, ids=[name for name, _ in LEAVES])
def test_the_help_of_every_command_has_an_example_of_it(name: str, command: click.Command) -> None:
    told = reference.help_of(name, command)
    _, found, examples = told.partition("Example")
    assert found, f"`{name} --help` has no Example"
    assert name in examples, f"the Example of `{name} --help` does not call it"


@pytest.mark.parametrize(("name", "command"), LEAVES, ids=[name for name, _ in LEAVES])
def test_the_help_of_every_command_says_its_exit_codes(name: str, command: click.Command) -> None:
    assert "Exit code: " in reference.help_of(name, command), "docs/cli.md says that each help does"


@pytest.mark.parametrize(("name", "command"), COMMANDS, ids=[name for name, _ in COMMANDS])
def test_every_option_is_explained(name: str, command: click.Command) -> None:
    options = [each for each in command.params if isinstance(each, click.Option)]
    assert [each.name for each in options if not each.help] == []


def test_the_page_of_commands_is_current() -> None:
    written = (ROOT / "docs" / "cli.md").read_text()
    # In a process of its own: click keeps the help options of a command that another test called alone.
    program = "from omnisupport_ingest.cli.reference import commands_page\nprint(commands_page(), end='')"
    command = [sys.executable, "-c", program]
    made = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert written == made, f"docs/cli.md is old; make it again: {reference.REGENERATE}"


def test_the_page_of_settings_and_the_example_are_current() -> None:
    page = (ROOT / reference.SETTINGS_PAGE).read_text()
    example = (ROOT / reference.EXAMPLE).read_text()
    how = f"make it again: {reference.REGENERATE}"
    assert page == reference.settings_page(page), f"{reference.SETTINGS_PAGE} is old; {how}"
    assert example == reference.example(), f"{reference.EXAMPLE} is old; {how}"


def test_the_page_of_contracts_tables_checks_and_metadata_is_what_the_code_says() -> None:
    page = (ROOT / reference.DATA_PAGE).read_text()
    assert page == reference_page(), f"{reference.DATA_PAGE} is old; make it again: {reference.REGENERATE}"


def test_every_entry_of_metadata_has_a_meaning() -> None:
    tree = ast.parse(Path(metadata.__file__).read_text())
    makers = ("checkpoint_metadata", "dimension_metadata", "merge_metadata", "_rules", "_replay")
    names = {
        name
        for part in tree.body
        if (isinstance(part, ast.FunctionDef) and part.name in makers)
        or (isinstance(part, ast.AnnAssign) and ast.unparse(part.target) == "_EVENTS")
        for node in ast.walk(part)
        for name in _entries(node)
    }
    assert len(names) > 30
    assert names - set(metadata.MEANINGS) == set()
    assert set(metadata.MEANINGS) - names == {"scenario_NAME", "delta_version", "upstream_version"}


def _entries(node: ast.AST) -> list[str]:
    """The names of entries that ``node`` makes: keys of a dictionary, or a place in one that is set."""
    found: list[ast.expr | None] = list(node.keys) if isinstance(node, ast.Dict) else []
    if isinstance(node, ast.Assign):
        found += [each.slice for each in node.targets if isinstance(each, ast.Subscript)]
    return [each.value for each in found if isinstance(each, ast.Constant) and isinstance(each.value, str)]


def test_every_setting_says_what_it_means_and_what_it_takes() -> None:
    for name, field in Settings.model_fields.items():
        assert field.description, name
        assert field.default is not None or field.examples or name.endswith("_dir"), f"{name} has no example"
        assert reference.values_of(field) != "number", f"{name} has no bounds"


def test_what_the_example_file_sets_can_be_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Settings.model_fields:
        monkeypatch.delenv(f"OMNISUPPORT_{name.upper()}", raising=False)
    monkeypatch.chdir(tmp_path)
    lines = reference.example().splitlines()
    uncommented = [line.removeprefix("#") for line in lines if line.startswith("#OMNISUPPORT_")]
    (tmp_path / ".env").write_text("\n".join(uncommented))
    assert Settings().model_fields_set == set(Settings.model_fields)


def test_importing_every_command_loads_nothing_heavy() -> None:
    program = f"import sys, omnisupport_ingest.cli.main\nprint({set(HEAVY)!r} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "set()"


def test_settings_in_a_terminal_have_no_links_and_no_long_lines() -> None:
    seen = command("settings").out
    assert "](" not in seen and "](" not in reference.example()
    assert max(len(line) for line in seen.splitlines() if line.startswith("    ")) <= 100


def test_settings_that_are_set_can_be_listed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNISUPPORT_RETENTION", "apply")
    seen = command("settings", "--set").out
    assert "OMNISUPPORT_RETENTION=apply" in seen and "OMNISUPPORT_SLOT=" not in seen
