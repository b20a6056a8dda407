"""A contract for a table as it is now: the draft that a person goes on from.

It says what the source says (types, key, NOT NULL, enum labels, lengths, comments) and decides nothing
else: no rule is made up. (What seems to be personal data is noted by who writes the file: ``pii_scan``.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from omnisupport_ingest.contracts.columns import PARTITION_COLUMN, RESERVED_PREFIX
from omnisupport_ingest.contracts.cursor_policy import TIMES
from omnisupport_ingest.contracts.model import CursorCandidate
from omnisupport_ingest.contracts.names import COLUMN_NAME
from omnisupport_ingest.contracts.pg_types import ARRAYS, INTEGERS, NUMBERS, Kind
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.sources.postgres.live_table import LiveColumn, LiveTable
from omnisupport_ingest.sources.postgres.quoting import identifier, qualified
from omnisupport_ingest.sources.postgres.table_key import key_of

_JSON = ["object", "array", "string", "number", "boolean"]

_OTHER_KINDS = {"v": "a view", "m": "a materialized view", "f": "a foreign table"}


class CannotBeCaptured(IngestError):
    """A table that no contract can be made for."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A column that the contract does not name, and why. Its values stay in the raw layers."""

    column: str
    why: str


@dataclass(frozen=True, slots=True)
class Draft:
    """``document``: the contract, as its file holds it."""

    document: dict[str, Any]
    left_out: tuple[LeftOut, ...]


def draft(
    table: LiveTable, *, source: str, name: str, owner: str, candidates: Sequence[CursorCandidate] = ()
) -> Draft:
    """The contract of ``table``, called ``name`` in the lake of ``source``.

    ``candidates``: the columns that could be a cursor, the usable ones first; one of a time is proposed.
    ``CannotBeCaptured`` or ``NoKey`` if there can be none, with what to change at the source.
    """
    _refuse_what_is_not_in_the_wal(table)
    key = key_of(table).columns
    left_out = tuple(_left_out(table))
    for each in left_out:
        if each.column in key:
            raise CannotBeCaptured(
                f"Key column {each.column!r} of {table.full_name} cannot be in the lake: {each.why}.",
                fix=f"ALTER TABLE {qualified(table.schema, table.table)} RENAME COLUMN"
                f" {identifier(each.column)} TO ...;",
            )
    unnamed = {each.column for each in left_out}
    columns = [column for column in table.columns if column.name not in unnamed]
    policy: dict[str, Any] = {
        "version": "1.0.0",
        "source": source,
        "schema": table.schema,
        "table": table.table,
    }
    if name != table.table:
        policy["name"] = name
    policy |= {
        "owner": owner,
        "key": list(key),
        "events": {"soft_delete_column": None},
        "lateness": {"allowed": "PT1H", "max": "P7D"},
    }
    times = {column.name for column in columns if column.type.kind in TIMES}
    proposed = [each for each in candidates if each.column not in unnamed]
    if proposed:
        field = next((each.column for each in proposed if each.usable and each.column in times), None)
        policy["cursor"] = {
            "field": field,
            **({"lookback": "PT10M"} if field is not None else {}),
            "candidates": [asdict(each) for each in proposed],
        }
    document = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": _title(table.table),
        "description": _sentence(table.comment) or f"Rows of {table.full_name} (no comment at the source).",
        "type": "object",
        "required": [column.name for column in columns if column.not_null],
        "additionalProperties": True,
        "properties": {column.name: _column(column, column.name in key) for column in columns},
        "x-cdc": policy,
    }
    return Draft(document, left_out)


def _refuse_what_is_not_in_the_wal(table: LiveTable) -> None:
    if table.kind in _OTHER_KINDS:
        raise CannotBeCaptured(
            f"{table.full_name} is {_OTHER_KINDS[table.kind]}: its rows are not in the WAL.",
            fix="Name the tables that it reads from.",
        )
    if table.persistence == "u":
        raise CannotBeCaptured(
            f"{table.full_name} is an unlogged table: its changes are not in the WAL.",
            fix=f"ALTER TABLE {qualified(table.schema, table.table)} SET LOGGED;",
        )
    if table.root is not None:
        raise CannotBeCaptured(
            f"{table.full_name} is a partition: its changes come under the name of {table.root}.",
            fix=f"Name {table.root} instead.",
        )


def _left_out(table: LiveTable) -> Iterator[LeftOut]:
    seen: dict[str, str] = {}
    for column in table.columns:
        plain = column.name.lower()
        if column.generated:
            yield LeftOut(column.name, "the server generates it, and the stream does not carry it")
        elif not COLUMN_NAME.fullmatch(column.name):
            yield LeftOut(column.name, "its name has a space, dot, quote, bracket or the like")
        elif plain.startswith(RESERVED_PREFIX):
            yield LeftOut(column.name, f"its name begins with {RESERVED_PREFIX}, as the lake's own do")
        elif plain == PARTITION_COLUMN:
            yield LeftOut(column.name, "its name is that of the lake's partition column")
        elif plain in seen:
            yield LeftOut(column.name, f"its name differs from {seen[plain]!r} only in case")
        else:
            seen[plain] = column.name


def _column(column: LiveColumn, in_key: bool) -> dict[str, Any]:
    kind = column.type.kind
    types = _json_types(column.pg_type, kind)
    if not column.not_null:
        types = [*types, "null"]
    body: dict[str, Any] = {"type": types[0] if len(types) == 1 else types, "x-pg-type": column.pg_type}
    if kind in ARRAYS:
        body["items"] = {"type": "string" if kind is Kind.TEXT_ARRAY else "integer"}
    if column.labels:
        body["enum"] = [*column.labels, *([] if column.not_null else [None])]
    if column.max_length is not None:
        body["maxLength"] = column.max_length
    words = f"{_title(column.name)}, part of the key" if in_key else _title(column.name)
    body["description"] = _sentence(column.comment) or f"{words} (no comment at the source)."
    return body


def _json_types(pg_type: str, kind: Kind) -> list[str]:
    if pg_type in ("json", "jsonb"):
        return _JSON
    if kind is Kind.BOOLEAN:
        return ["boolean"]
    if kind in INTEGERS:
        return ["integer"]
    if kind in NUMBERS:
        return ["number"]
    return ["array"] if kind in ARRAYS else ["string"]


def _title(name: str) -> str:
    words = " ".join(name.replace("_", " ").split()) or name
    return words[0].upper() + words[1:]


def _sentence(comment: str | None) -> str:
    return " ".join((comment or "").split())
