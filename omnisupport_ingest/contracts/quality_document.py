"""Reading ``x-cdc.quality`` of a contract document; a rule that cannot be checked is refused."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omnisupport_ingest.contracts.columns import refused
from omnisupport_ingest.contracts.durations import parse_duration
from omnisupport_ingest.contracts.expression_syntax import closing_after
from omnisupport_ingest.contracts.quality import (
    NO_QUALITY,
    QUARANTINE,
    WARN,
    Expected,
    ExpressionRule,
    Freshness,
    Quality,
    Reference,
)

if TYPE_CHECKING:
    from omnisupport_ingest.contracts.model import Column, ContractError, Contracts

_LEARNS_FROM, _SPREAD = 48, 6.0


def read_quality(path: Path, document: dict[str, Any] | None, columns: Sequence[Column]) -> Quality:
    """Return ``x-cdc.quality`` of the contract in ``path``. ``columns``: as the source has them.

    Raises ``ContractError``. Whether the tables of references exist is not checked here.
    """
    if document is None:
        return NO_QUALITY
    given = document.get("rules", ())
    with closing_after():
        rules = tuple(_rule(path, f"x-cdc.quality.rules[{n}]", each, columns) for n, each in enumerate(given))
    references = tuple(
        _reference(path, f"x-cdc.quality.references[{place}]", each, columns)
        for place, each in enumerate(document.get("references", ()))
    )
    _refuse_repeated(path, "rules", [each.name for each in rules])
    _refuse_repeated(path, "references", [each.name for each in references])
    return Quality(
        rules,
        references,
        _freshness(path, document.get("freshness")),
        _volume(path, document.get("volume")),
    )


def reference_problems(contracts: Contracts) -> list[ContractError]:
    """Return the problems of references among ``contracts``: an unknown table, or another number of columns.

    A single contract does not show these. No row depends on them; the check of the table reports them too.
    """
    found = []
    for contract in contracts:
        tables = {each.name: each for each in contracts.of_source(contract.source)}
        for place, reference in enumerate(contract.quality.references):
            path, at = Path(contract.path), f"x-cdc.quality.references[{place}]"
            other = tables.get(reference.table)
            if other is None:
                near = difflib.get_close_matches(reference.table, tables, n=1)
                fix = f"Write {near[0]}, if that is meant." if near else f"Name one of: {', '.join(tables)}."
                problem = f"{reference.table!r} is no table of the source {contract.source!r}"
                found.append(refused(path, f"{at}.table", problem, fix))
            elif len(other.key) != len(reference.columns):
                problem = f"has {len(reference.columns)} columns, the key of {other.name} {len(other.key)}"
                fix = f"Name a column for each of: {', '.join(other.key)}."
                found.append(refused(path, f"{at}.columns", problem, fix))
    return found


def judged_by(document: dict[str, Any] | None) -> dict[str, Any]:
    """Return the part of ``x-cdc.quality`` by which rows are judged, as a part of ``x-cdc``."""
    rules = (document or {}).get("rules")
    return {"quality": {"rules": rules}} if rules else {}


def _rule(path: Path, at: str, document: dict[str, Any], columns: Sequence[Column]) -> ExpressionRule:
    # Imported here: DuckDB and Arrow are slow to load, and most contracts have no such rule.
    from omnisupport_ingest.contracts.expression_syntax import ExpressionProblem, columns_of

    expression = document["expression"]
    try:
        named = columns_of(expression, columns)
    except ExpressionProblem as problem:
        raise refused(path, f"{at}.expression", str(problem), problem.fix) from None
    return ExpressionRule(
        document["name"], expression, named, document.get("policy", QUARANTINE), document.get("note", "")
    )


def _reference(path: Path, at: str, document: dict[str, Any], columns: Sequence[Column]) -> Reference:
    known = {column.name: column for column in columns}
    for place, name in enumerate(document["columns"]):
        if name not in known:
            raise refused(
                path, f"{at}.columns[{place}]", f"{name!r} is not a column", "Name columns of this contract."
            )
        if known[name].pii != "keep":
            raise refused(
                path,
                f"{at}.columns[{place}]",
                f"{name!r} has the policy {known[name].pii!r}, so the lake cannot look its values up",
                "Name columns whose values are kept.",
            )
    return Reference(
        document["name"], tuple(document["columns"]), document["table"], document.get("severity", WARN)
    )


def _freshness(path: Path, document: dict[str, Any] | str | None) -> Freshness | None:
    at = "x-cdc.quality.freshness"
    if document is None:
        return None
    if isinstance(document, str):
        return Freshness(_duration(path, at, document))
    severity = document.get("severity", WARN)
    quiet = document.get("quiet")
    return Freshness(
        _duration(path, f"{at}.max_lag", document.get("max_lag")),
        None if quiet is None else _learned(quiet, severity),
        severity,
        _duration(path, f"{at}.verified_within", document.get("verified_within")),
    )


def _duration(path: Path, at: str, text: str | None) -> timedelta | None:
    try:
        return None if text is None else parse_duration(text)
    except ValueError as problem:
        raise refused(path, at, str(problem), "Write a duration such as PT15M.") from None


def _volume(path: Path, document: dict[str, Any] | None) -> Expected | None:
    if document is None:
        return None
    severity = document.get("severity", WARN)
    if "learned" in document:
        return _learned(document["learned"], severity)
    low, high = document.get("at_least"), document.get("at_most")
    if low is not None and high is not None and low > high:
        raise refused(
            path, "x-cdc.quality.volume.at_most", f"is {high}, below at_least", "Make it at least as large."
        )
    return Expected(low, high, severity=severity)


def _learned(document: dict[str, Any], severity: str) -> Expected:
    return Expected(
        learned=True,
        windows=document.get("windows", _LEARNS_FROM),
        spread=float(document.get("spread", _SPREAD)),
        severity=severity,
    )


def _refuse_repeated(path: Path, what: str, names: list[str]) -> None:
    for place, name in enumerate(names):
        if name in names[:place]:
            raise refused(
                path, f"x-cdc.quality.{what}[{place}].name", f"{name!r} is there twice", "Rename one of them."
            )
