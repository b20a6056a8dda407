"""A red check names the command that helps, whichever check it is."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from omnisupport_ingest.cli.main import cli

CHECKS = Path(__file__).parents[2] / "omnisupport_ingest" / "checks"


def _red_functions() -> Iterator[tuple[str, str]]:
    """Each function that can return a red finding: where it is, and its text with what it calls."""
    for file in sorted(CHECKS.glob("*.py")):
        text = file.read_text()
        functions = [each for each in ast.parse(text).body if isinstance(each, ast.FunctionDef)]
        texts = {each.name: ast.get_source_segment(text, each) or "" for each in functions}
        for function in functions:
            if any(_can_be_red(node) for node in ast.walk(function)):
                source = texts[function.name]
                called = [helper for name, helper in texts.items() if f"{name}(" in source]
                yield f"{file.name}:{function.name}", "".join([source, *called, _constants(text, source)])


def _can_be_red(node: ast.AST) -> bool:
    named = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "CheckFinding"
    return named and not (isinstance(node.args[0], ast.Constant) and node.args[0].value is True)  # type: ignore[attr-defined]


def _constants(text: str, source: str) -> str:
    """The lines of the module's constants that the function uses."""
    return "".join(
        line for line in text.splitlines() if re.match(r"_[A-Z]+ = ", line) and line.split()[0] in source
    )


RED = dict(_red_functions())


@pytest.mark.parametrize(("where", "text"), RED.items(), ids=RED)
def test_a_red_check_names_the_command_that_helps(where: str, text: str) -> None:
    commands = set(re.findall(r"omnisupport-ingest \"?\s*f?\"?([a-z-]+)", text))
    assert commands or ".fix}" in text
    assert commands <= set(cli.listed), "a command that does not exist"


OF_A_SOURCE = {"status", "source", "verify", "explain", "replay", "quarantine"}
"""Commands that look at the home's own source unless another one is named."""


@pytest.mark.parametrize(("where", "text"), RED.items(), ids=RED)
def test_a_command_that_is_about_a_source_names_the_source_of_the_check(where: str, text: str) -> None:
    advised = re.findall(r"omnisupport-ingest \"?\s*f?\"?([a-z-]+)(.{0,170})", text, flags=re.DOTALL)
    assert [command for command, rest in advised if command in OF_A_SOURCE and "source}" not in rest] == []


def test_there_are_many_red_checks() -> None:
    assert len(RED) > 12
