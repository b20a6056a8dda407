"""The rules of several columns and the references of a contract (``x-cdc.quality``) that follows its table.

They follow a renamed column. What names a column that is gone, or does not fit the new type of one, is taken
out, and returned in words: a person wrote it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from omnisupport_ingest.contracts.expressions import ExpressionProblem, closing_after, columns_of
from omnisupport_ingest.contracts.model import Column

_TOKEN = re.compile(r"""'(?:[^']|'')*'|"(?:[^"]|"")*"|[^\W\d]\w*(?:\s*\()?|\d\w*|.""", re.DOTALL)
"""A token of an SQL expression: a text, a quoted name, a name, or a function's name with its bracket."""


@dataclass(frozen=True, slots=True)
class TakenOut:
    """A rule or reference that left the contract. ``at``: the path in the file; ``what`` and ``why``: for a
    person."""

    at: str
    what: str
    why: str


class NextQuality:
    """``x-cdc.quality`` of a contract on its way to its next version; ``policy``: its ``x-cdc``, changed in
    place."""

    def __init__(self, policy: dict[str, Any]) -> None:
        self._policy = policy

    def rename(self, old: str, new: str) -> None:
        for rule in self._entries("rules"):
            rule["expression"] = "".join(
                '"' + new.replace('"', '""') + '"' if _is_name(token, old) else token
                for token in _tokens(rule["expression"])
            )
        for reference in self._entries("references"):
            reference["columns"] = [new if each == old else each for each in reference["columns"]]

    def take_out_column(self, column: str) -> Iterator[TakenOut]:
        """Take out everything that names ``column``."""
        for rule in list(self._entries("rules")):
            if any(_is_name(token, column) for token in _tokens(rule["expression"])):
                yield self._without_rule(rule, f"it names {column}")
        for reference in list(self._entries("references")):
            if column in reference["columns"]:
                self._entries("references").remove(reference)
                what = f"{reference['name']} ({', '.join(reference['columns'])}) is taken out"
                yield TakenOut("x-cdc.quality.references", what, f"it names {column}")

    def take_out_unfit(self, properties: dict[str, Any]) -> Iterator[TakenOut]:
        """Take out the rules that cannot be computed over columns as ``properties`` has them."""
        columns = [Column(name, line["x-pg-type"]) for name, line in properties.items()]
        with closing_after():
            for rule in list(self._entries("rules")):
                try:
                    columns_of(rule["expression"], columns)
                except ExpressionProblem as problem:
                    yield self._without_rule(rule, f"it {problem}")

    def _without_rule(self, rule: dict[str, Any], why: str) -> TakenOut:
        self._entries("rules").remove(rule)
        what = f"the rule {rule['name']} ({rule['expression']}) is taken out"
        return TakenOut("x-cdc.quality.rules", what, why)

    def _entries(self, part: str) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = self._policy.get("quality", {}).get(part, [])
        return entries


def _tokens(expression: str) -> Iterator[str]:
    return (match[0] for match in _TOKEN.finditer(expression))


def _is_name(token: str, column: str) -> bool:
    """Whether a part of an expression names ``column``; SQL ignores case."""
    name = token[1:-1].replace('""', '"') if token.startswith('"') else token
    return name.lower() == column.lower()
