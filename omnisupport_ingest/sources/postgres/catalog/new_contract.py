"""Drafts a contract for a table as it is now, for a person to complete.

The draft contains what the source declares (types, key, NOT NULL, enum labels, lengths, comments) and adds no
rule. The caller, which writes the file, notes columns that seem to hold personal data
(``contracts.pii_scan``). ``choose`` finds the table that a person named. ``key_of`` finds the key that
identifies its rows in the stream, or raises an error that lists the ways to give it one.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from omnisupport_ingest.contracts.columns import PARTITION_COLUMN, RESERVED_PREFIX
from omnisupport_ingest.contracts.cursor_policy import TIMES
from omnisupport_ingest.contracts.model import CursorCandidate
from omnisupport_ingest.contracts.names import COLUMN_NAME, TableName, spellings
from omnisupport_ingest.contracts.pg_types import ARRAYS, INTEGERS, NUMBERS, Kind
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.sources.postgres.catalog.live_table import LiveColumn, LiveIndex, LiveTable
from omnisupport_ingest.sources.postgres.session.quoting import identifier, qualified


class NoSuchTable(IngestError):
    """The source has no table of the name, or several.

    Fix: Name it as schema and table, and quote a part that is not in lower case.
    """


def choose(text: str, tables: Collection[TableName]) -> TableName:
    """Return the table that ``text`` names: ``schema.table``, or ``table`` of the schema public.

    Each part may be quoted. Case matters. Raises ``NoSuchTable`` with the most similar names.
    """
    matching = [name for name in tables if text in _spellings(name)]
    if len(matching) == 1:
        return matching[0]
    if matching:
        listed = " or ".join(
            f"{identifier(schema)}.{identifier(table)}" for schema, table in sorted(matching)
        )
        raise NoSuchTable(f"{text} may be one of several tables.", fix=f"Quote its parts: {listed}")
    near = difflib.get_close_matches(text.lower(), [_plain(name).lower() for name in tables], n=3, cutoff=0.8)
    meant = [_plain(name) for name in sorted(tables) if _plain(name).lower() in near]
    raise NoSuchTable(
        f"The source has no table {text}.",
        fix=f"Did you mean {' or '.join(meant)}?"
        if meant
        else "Name it as schema.table; --all takes every one.",
    )


def all_tables(tables: Collection[LiveTable]) -> list[LiveTable]:
    """Return the tables that ``--all`` stands for: no views, no partitions, no tables of an extension."""
    return [
        table
        for table in tables
        if table.kind in ("r", "p") and table.root is None and table.extension is None
    ]


def _plain(name: TableName) -> str:
    return f"{name[0]}.{name[1]}"


def _spellings(name: TableName) -> set[str]:
    schema, table = name
    alone = {table, identifier(table)}
    return spellings(name) - (set() if schema == "public" else alone)


class NoKey(IngestError):
    """The changes of a table do not say which row they are of: it has no key that the stream carries.

    Fix: Give the table a primary key or a replica identity, by the SQL in the message.
    """


def key_of(table: LiveTable) -> LiveIndex:
    """Return the index whose columns are the key of ``table``: the primary key, if the stream sends it.

    Raises ``NoKey``, which names every way to give the table a key.
    """
    name, primary = qualified(table.schema, table.table), table.primary_key
    if table.replica_identity == "n":
        raise NoKey(
            f"{table.full_name} has replica identity NOTHING: its updates and deletes name no row.",
            fix=f"ALTER TABLE {name} REPLICA IDENTITY DEFAULT;" if primary else _ways_to_a_key(table),
        )
    usable = [
        index
        for index in table.unique
        if not index.deferrable and set(index.columns) <= table.identity and _may_be_key(table, index)
    ]
    if usable:
        # The primary key is first.
        return usable[0]
    if primary is not None and primary.deferrable:
        raise NoKey(
            f"The primary key of {table.full_name} is deferrable: two rows may share a key for a time, and "
            "it is no replica identity.",
            fix=f"ALTER TABLE {name} DROP CONSTRAINT {identifier(primary.name)}, ADD CONSTRAINT"
            f" {identifier(primary.name)} PRIMARY KEY ({_listed(primary.columns)}) NOT DEFERRABLE;",
        )
    if primary is not None and not _may_be_key(table, primary):
        raise NoKey(
            f"The primary key of {table.full_name} has a column that the server generates; the stream does "
            "not carry it.",
            fix=f"ALTER TABLE {name} REPLICA IDENTITY USING INDEX ...; of an index on other columns, or "
            "leave the table out: capture does not publish a table without a contract.",
        )
    if table.replica_identity == "i" and primary is not None:
        raise NoKey(
            f"The index that was the replica identity of {table.full_name} is gone.",
            fix=f"ALTER TABLE {name} REPLICA IDENTITY DEFAULT;",
        )
    if table.replica_identity == "f":
        problem = (
            f"{table.full_name} has replica identity FULL, but nothing that keeps its rows apart: two equal "
            "rows would be one."
        )
    else:
        problem = (
            f"{table.full_name} has no primary key and no other replica identity: its updates and deletes "
            "could not name their row."
        )
    raise NoKey(problem, fix=_ways_to_a_key(table))


def _may_be_key(table: LiveTable, index: LiveIndex) -> bool:
    columns = [table.column(name) for name in index.columns]
    return all(column is not None and not column.generated for column in columns)


def _ways_to_a_key(table: LiveTable) -> str:
    name = qualified(table.schema, table.table)
    candidates = [index for index in table.unique if not index.deferrable and _may_be_key(table, index)]
    if candidates:
        by_index = f"ALTER TABLE {name} REPLICA IDENTITY USING INDEX {identifier(candidates[0].name)};"
    else:
        by_index = (
            f"CREATE UNIQUE INDEX ... ON {name} (...); on NOT NULL columns, then "
            f"ALTER TABLE {name} REPLICA IDENTITY USING INDEX ...;"
        )
    return (
        f"one of\n  ALTER TABLE {name} ADD PRIMARY KEY (...);\n  {by_index}\n"
        "  or leave it out: capture does not publish a table without a contract.\n"
        "  (REPLICA IDENTITY FULL alone is no way: it sends whole rows, and does not keep them apart. For\n"
        "  columns that you know to do that, write a contract by hand: docs/source.md, tables without a key.)"
    )


def _listed(columns: tuple[str, ...]) -> str:
    return ", ".join(identifier(column) for column in columns)


_JSON = ["object", "array", "string", "number", "boolean"]

_OTHER_KINDS = {"v": "a view", "m": "a materialized view", "f": "a foreign table"}


class CannotBeCaptured(IngestError):
    """No contract can be made for a table: it is a view, a partition or unlogged, or the lake cannot have a
    column of its key.

    Fix: Do what the message says, or leave the table out.
    """


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A column that the contract does not name, and why. Raw keeps its values."""

    column: str
    why: str


@dataclass(frozen=True, slots=True)
class Draft:
    """A drafted contract. ``document``: the content of its file."""

    document: dict[str, Any]
    left_out: tuple[LeftOut, ...]


def draft(
    table: LiveTable, *, source: str, name: str, owner: str, candidates: Sequence[CursorCandidate] = ()
) -> Draft:
    """Return the contract of ``table``, called ``name`` in the lake of ``source``.

    ``candidates``: columns that could be a cursor, the usable ones first. The first usable one with times is
    proposed. Raises ``CannotBeCaptured`` or ``NoKey``, with what to change at the source, if no contract is
    possible.
    """
    _require_logged(table)
    key = key_of(table).columns
    left_out = tuple(left_out_columns(table))
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
        "properties": {column.name: column_document(column, column.name in key) for column in columns},
        "x-cdc": policy,
    }
    return Draft(document, left_out)


def _require_logged(table: LiveTable) -> None:
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


def left_out_columns(table: LiveTable) -> Iterator[LeftOut]:
    """Yield the columns that a contract cannot name, each with the reason."""
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


def column_document(column: LiveColumn, in_key: bool) -> dict[str, Any]:
    """Return the contract's entry for ``column`` under ``properties``. ``in_key``: it is in the key."""
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
