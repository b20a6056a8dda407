"""Reading the columns of a contract document; a rule that cannot be enforced is refused."""

from __future__ import annotations

import re
from decimal import Decimal
from pathlib import Path
from typing import Any

from omnisupport_ingest.contracts.model import Column, ContractError, Default
from omnisupport_ingest.contracts.pg_types import (
    ARRAYS,
    FLOATS,
    INTEGERS,
    MAX_DECIMAL_PRECISION,
    NUMBERS,
    Kind,
    PgType,
    nearest_type,
)
from omnisupport_ingest.contracts.quality import Policies
from omnisupport_ingest.contracts.row_rules import VALUE_RULES, rules_of
from omnisupport_ingest.foreign import abridged

RESERVED_PREFIX = "_cdc_"
"""Prefix of the lake's own columns; a source column may not have it."""

PARTITION_COLUMN = "window"
"""The lake's own column without that prefix."""

_RULE_OF = {"type": "type", "required": "not_null"} | {rule.keyword: rule.name for rule in VALUE_RULES}
"""Keyword that makes a rule → the rule's name behind the column's (``row_rules``)."""


def read_columns(path: Path, document: dict[str, Any]) -> tuple[Column, ...]:
    """Return the columns of ``document`` in its order, as the source has them.

    Raises ``ContractError`` for the first that cannot be used. ``pii_policies`` reads policies for personal
    data.
    """
    required = set(document["required"])
    unknown = sorted(required - set(document["properties"]))
    if unknown:
        raise refused(path, "required", f"names {unknown[0]!r}, which is not a column", "Name columns only.")
    _check_names(path, document)
    key = document["x-cdc"]["key"]
    return tuple(
        _column(path, name, body, nullable=name not in required, in_key=name in key)
        for name, body in document["properties"].items()
    )


def refused(path: Path, at: str, problem: str, fix: str) -> ContractError:
    """Return the error for the JSON path ``$.<at>`` of the file ``path``; what it quotes may be long."""
    return ContractError(f"{path} at $.{abridged(at)}: {abridged(problem)}.", fix=abridged(fix))


def _column(path: Path, name: str, body: dict[str, Any], *, nullable: bool, in_key: bool) -> Column:
    kind = PgType.parse(body["x-pg-type"]).kind
    _check_type(path, f"properties.{name}.type", body, kind, nullable=nullable)
    _check_rules(path, f"properties.{name}", body, kind)
    column = Column(
        name=name,
        pg_type=body["x-pg-type"],
        nullable=nullable,
        description=body["description"],
        enum=tuple(value for value in body.get("enum", ()) if value is not None),
        minimum=_bound(path, name, "minimum", body, kind),
        maximum=_bound(path, name, "maximum", body, kind),
        pattern=body.get("pattern"),
        max_length=body.get("maxLength"),
        default=Default(body["default"]) if "default" in body else None,
        policies=_policies(path, name, body, nullable=nullable),
        former_types=tuple(body.get("x-former-types", ())),
    )
    if column.minimum is not None and column.maximum is not None and column.minimum > column.maximum:
        raise refused(
            path,
            f"properties.{name}.minimum",
            f"is {column.minimum}, above the maximum {column.maximum}: no value would do",
            "Correct one of them.",
        )
    _check_former_types(path, column, in_key=in_key)
    _check_default(path, column)
    return column


def _check_former_types(path: Path, column: Column, *, in_key: bool) -> None:
    if not column.former_types:
        return
    if in_key:
        problem = "is of a key column, and a row is known by its key's own values"
    elif column.type.kind is Kind.TEXT:
        problem = f"is of the type {column.pg_type!r}, which holds every text"
    else:
        return
    raise refused(path, f"properties.{column.name}.x-former-types", problem, "Take it out.")


def _check_default(path: Path, column: Column) -> None:
    """Refuse a default that breaks a rule of its column: it is in no event, so only the gate would
    find it.
    """
    if column.default is None:
        return
    text, rules = column.default.text, rules_of(column)
    broken = [rules.not_null] if text is None and rules.not_null else []
    if text is not None:
        broken = [f"{column.name}:{name}" for name, breaks in rules.by_name.items() if breaks(text)]
    broken = [each for each in broken if column.policies.withholds(each.rpartition(":")[2])]
    if broken:
        raise refused(
            path,
            f"properties.{column.name}.default",
            f"breaks {', '.join(broken)}",
            "Write what older rows have in the column, as PostgreSQL's text; or leave it out: not known.",
        )


def _policies(path: Path, name: str, body: dict[str, Any], *, nullable: bool) -> Policies:
    """Return ``x-policy`` of a column: what happens to a row that breaks one of its rules."""
    given = body.get("x-policy", {})
    of_text = PgType.parse(body["x-pg-type"]).kind is Kind.TEXT
    has = {"required": not nullable, "type": not of_text}
    for keyword in given:
        if not has.get(keyword, keyword in body):
            raise refused(
                path,
                f"properties.{name}.x-policy.{keyword}",
                "is the policy of a rule that the column does not have",
                "Take it out, or write the rule.",
            )
    return Policies(tuple(sorted((_RULE_OF[keyword], policy) for keyword, policy in given.items())))


def _check_names(path: Path, document: dict[str, Any]) -> None:
    seen: dict[str, str] = {}
    for name in document["properties"]:
        at, plain = f"properties.{name}", name.lower()
        if plain.startswith(RESERVED_PREFIX):
            problem = f"begins with {RESERVED_PREFIX}, which marks the lake's own columns"
        elif plain == PARTITION_COLUMN:
            problem = "is the name of the lake's partition column"
        elif seen.setdefault(plain, name) != name:
            problem = f"differs from {seen[plain]!r} only in case, and Spark ignores case"
        else:
            continue
        raise refused(path, at, problem, "Rename the column at the source, or leave it out of the contract.")


def _check_type(path: Path, at: str, body: dict[str, Any], kind: Kind, *, nullable: bool) -> None:
    types = {body["type"]} if isinstance(body["type"], str) else set(body["type"])
    if ("null" in types) != nullable:
        raise refused(
            path,
            at,
            "and $.required disagree on whether the column may be null",
            'Either list the column in required, or allow the type "null"; not both, not neither.',
        )
    if body["x-pg-type"].lower() in ("json", "jsonb"):
        return
    fitting = _json_types(kind)
    misfits = sorted(types - fitting - {"null"})
    near = nearest_type(body["x-pg-type"])
    if misfits and near is not None:
        raise refused(
            path,
            f"{at.removesuffix('.type')}.x-pg-type",
            f"{body['x-pg-type']!r} is no type that has values of {misfits[0]!r}",
            f"Write {near}, if that is meant.",
        )
    if misfits:
        raise refused(
            path,
            at,
            f"{misfits[0]!r} does not fit the PostgreSQL type {body['x-pg-type']!r}",
            f"Use {' or '.join(sorted(fitting))}, or correct x-pg-type.",
        )


def _json_types(kind: Kind) -> set[str]:
    """Return the JSON types that a column of ``kind`` may have in a document; numerics may be strings."""
    if kind is Kind.BOOLEAN:
        return {"boolean"}
    if kind in INTEGERS:
        return {"integer"}
    if kind in FLOATS:
        return {"number", "integer"}
    if kind in NUMBERS:
        return {"number", "integer", "string"}
    if kind in ARRAYS:
        return {"array", "string"}
    return {"string", "object", "array"}


def _check_rules(path: Path, at: str, body: dict[str, Any], kind: Kind) -> None:
    for rule in VALUE_RULES:
        if rule.keyword in body and kind not in rule.kinds:
            raise refused(
                path,
                f"{at}.{rule.keyword}",
                f"is not enforced on the type {body['x-pg-type']!r}",
                "Take the rule out.",
            )
    try:
        re.compile(body.get("pattern", ""))
    except (re.error, OverflowError, RecursionError) as problem:
        raise refused(
            path, f"{at}.pattern", f"is not a regular expression: {problem}", "Correct the pattern."
        ) from None


def _bound(path: Path, name: str, rule: str, body: dict[str, Any], kind: Kind) -> Decimal | None:
    number: int | float | None = body.get(rule)
    if number is None:
        return None
    bound = Decimal(str(number))
    exponent = bound.as_tuple().exponent
    digits = max(bound.adjusted() + 1, 0) + max(-exponent if isinstance(exponent, int) else 0, 0)
    # Bounds of floats are floats; others are compared as decimals, and Spark limits the digits of these.
    if kind not in FLOATS and kind is not Kind.NUMERIC_TEXT and digits > MAX_DECIMAL_PRECISION:
        raise refused(
            path,
            f"properties.{name}.{rule}",
            f"has {digits} digits, and a bound of this type may have {MAX_DECIMAL_PRECISION}",
            "Take a bound that values can have, or take the rule out.",
        )
    return bound
