"""Follows changes of a table in its contract's rules over several columns and references (``x-cdc.quality``).

A renamed column is renamed there. A rule or reference that names a removed column, or does not fit a column's
new type, is removed and returned in words, because a person wrote it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from omnisupport_ingest.contracts.expression_syntax import ExpressionProblem, closing_after, columns_of
from omnisupport_ingest.contracts.model import Column

_TOKEN = re.compile(r"""'(?:[^']|'')*'|"(?:[^"]|"")*"|[^\W\d]\w*(?:\s*\()?|\d\w*|.""", re.DOTALL)
"""A token of an SQL expression: a text, a quoted name, a name, or a function's name with its bracket."""


@dataclass(frozen=True, slots=True)
class TakenOut:
    """A rule or reference that was removed from the contract. ``at``: the path in the file; ``what`` and
    ``why``: for a person."""

    at: str
    what: str
    why: str


class NextQuality:
    """``x-cdc.quality`` of a contract that is edited into its next version. ``policy``: its ``x-cdc``, which
    is changed in place."""

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
        """Remove every rule and reference that names ``column``. Yields what was removed."""
        for rule in list(self._entries("rules")):
            if any(_is_name(token, column) for token in _tokens(rule["expression"])):
                yield self._without_rule(rule, f"it names {column}")
        for reference in list(self._entries("references")):
            if column in reference["columns"]:
                self._entries("references").remove(reference)
                what = f"{reference['name']} ({', '.join(reference['columns'])}) is taken out"
                yield TakenOut("x-cdc.quality.references", what, f"it names {column}")

    def take_out_unfit(self, properties: dict[str, Any]) -> Iterator[TakenOut]:
        """Remove the rules that cannot be computed over the columns in ``properties``. Yields them."""
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
    """Whether ``token`` of an expression names ``column``; SQL ignores case."""
    name = token[1:-1].replace('""', '"') if token.startswith('"') else token
    return name.lower() == column.lower()
