"""What landing and raw hold of personal columns (``x-cdc.at_rest``): plain values, or values that the key of
their subject encrypted before they were written. Of either the contract may say whose they are: their
subject, which can be erased.

A contract that says encrypted encrypts the columns in ``x-cdc.pii``, and columns that it does not name,
because nobody has said that these are not personal. Rows are found and ordered by the columns of the key, the
subject, soft deletes and cursors, so these stay readable. Of values that land plain, an erasure of their
subject removes the same columns, after judging (``cdc.subject_values``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omnisupport_ingest.contracts.columns import refused
from omnisupport_ingest.contracts.model import Column, Subject, TableContract
from omnisupport_ingest.contracts.names import TableName, row_subject
from omnisupport_ingest.contracts.pg_types import spelling
from omnisupport_ingest.foreign import Unreadable, texts_only

ENCRYPTED = "encrypted"


def read_at_rest(
    path: Path, policy: dict[str, Any], columns: tuple[Column, ...], name: str
) -> Subject | None:
    """Return the subject of personal values; None if they land plain and the contract names no subject.

    Args:
        path: the contract's file.
        policy: the ``x-cdc`` of the contract.
        columns: of the contract.
        name: of the table in the lake.

    Raises:
        ContractError: ``at_rest`` cannot be carried out.
    """
    stated = policy.get("at_rest")
    if stated is None or (stated["pii"] != ENCRYPTED and len(stated) == 1):
        return None
    encrypted = stated["pii"] == ENCRYPTED
    what, instead = ("is 'encrypted'", "write plain") if encrypted else ("names a subject", "name no subject")
    if not any(column.personal for column in columns):
        raise refused(
            path, "x-cdc.at_rest.pii", f"{what}, and pii names no column", "Name the columns in pii."
        )
    subject = Subject(
        stated.get("subject", name), _column(path, policy, columns, stated.get("subject_column")), encrypted
    )
    _require_one_spelling(path, columns, subject)
    readable = _readable(policy, subject)
    if all(column.name in readable for column in columns if column.personal):
        raise refused(
            path,
            "x-cdc.at_rest.pii",
            f"{what}, and pii names only columns by which rows are found, which stay readable",
            f"Name another personal column in pii, or {instead}.",
        )
    for column in columns:
        if column.personal and column.name not in readable and not column.nullable:
            raise refused(
                path,
                f"x-cdc.pii.{column.name}",
                "is of a column that may not be NULL, and it is NULL once its subject is erased",
                f'Take {column.name} out of required, and add "null" to its type. The source may keep its '
                "NOT NULL.",
            )
    return subject


@dataclass(frozen=True, slots=True)
class SubjectTable:
    """How the rows of one table say whose they are.

    ``full_name``: of the table. ``name``: the kind of subject. ``column``: the column that says whose a row
    is. ``is_key``: whether that column is the whole key. ``kept``: the columns that an erasure of a subject
    leaves readable.
    """

    full_name: str
    name: str
    column: str
    is_key: bool
    kept: frozenset[str]

    @classmethod
    def of(cls, contract: TableContract) -> SubjectTable:
        """``contract``: one that names its subject."""
        assert contract.subject is not None, "it names its subject"
        column = contract.subject.column
        kept = readable_columns(contract)
        return cls(contract.full_name, contract.subject.name, column, contract.key == (column,), kept)

    def whose(self, text: str | None, key: str | None) -> tuple[str, str]:
        """Return kind and value of the subject of an image of the row ``key``.

        ``text``: what the image says in ``column``. An image that says nothing there is of whom the key
        names; if the key does not, its row is its own subject.
        """
        if text is None and key is not None and self.is_key:
            text = _only_text(key)
        return (self.name, text) if text is not None else (row_subject(self.full_name), key or "")

    def said_in_line(self, line: str | None) -> list[tuple[str, str]]:
        """Return kind and value of each subject that a delivered line names; empty if it cannot be read."""
        said = (row.get(self.column) for row in rows_in_line(line))
        return [(self.name, each) for each in dict.fromkeys(said) if isinstance(each, str)]


def rows_in_line(line: str | None) -> Iterator[dict[str, Any]]:
    """Yield the objects in a delivered line that may be a row: the line, and the images of a change. None if
    the line is no JSON."""
    try:
        document = texts_only(line or "")
    except Unreadable:
        return
    if not isinstance(document, dict):
        return
    yield document
    for change in (document, document.get("payload")):
        if isinstance(change, dict):
            yield from (each for name in ("after", "before") if isinstance(each := change.get(name), dict))
            if change is not document:
                yield change


def subject_tables(contracts: Sequence[TableContract]) -> dict[TableName, SubjectTable]:
    """Return how the tables of those ``contracts`` that name a subject say whose a row is."""
    return {each.table_name: SubjectTable.of(each) for each in contracts if each.subject is not None}


def _only_text(key: str) -> str | None:
    """Return the value of a key of one column; None if it is not readable."""
    try:
        parts = json.loads(key)
    except ValueError:
        return None
    return parts[0] if isinstance(parts, list) and len(parts) == 1 and isinstance(parts[0], str) else None


def _require_one_spelling(path: Path, columns: tuple[Column, ...], subject: Subject) -> None:
    """Raise ``ContractError`` if one subject may be spelled in two ways: each would have a key."""
    of = next(column for column in columns if column.name == subject.column)
    if spelling(of.pg_type) is None:
        raise refused(
            path,
            "x-cdc.at_rest",
            f"finds whose a row is in {of.name}, and {of.pg_type} may write one value in two ways: a subject "
            "would have two keys, and an erasure would reach only one",
            "Name a column of an integer type, text, varchar or uuid in subject_column; give the table "
            "one if it has none.",
        )


def readable_columns(contract: TableContract) -> frozenset[str]:
    """Return the columns that stay readable once a subject is erased: of a contract that says encrypted,
    those that land readable."""
    assert contract.subject is not None, "it names its subject"
    return _found_by(contract) | {column.name for column in contract.source_columns if not column.personal}


def null_once_erased(contract: TableContract) -> tuple[str, ...]:
    """Return the columns that become NULL if the key of an image is gone and the image does not show them.

    They include columns that are not encrypted now: a column that no contract named when it landed was
    encrypted. They do not include columns that rows are found by, or columns that may not be NULL.
    """
    found_by = _found_by(contract)
    return tuple(
        column.name
        for column in contract.source_columns
        if column.name not in found_by and (column.personal or column.nullable)
    )


def encrypted_columns(contract: TableContract) -> tuple[str, ...]:
    """Return the columns of the contract that land encrypted; none if it says plain."""
    if contract.encrypted_subject is None:
        return ()
    readable = readable_columns(contract)
    return tuple(column.name for column in contract.source_columns if column.name not in readable)


def maybe_encrypted_columns(contract: TableContract) -> tuple[str, ...]:
    """Return the columns whose values may have landed encrypted, whatever the contract says now. They are
    those that an erasure of their subject empties, in whatever form they landed."""
    if contract.subject is not None:
        readable = readable_columns(contract)
        return tuple(column.name for column in contract.source_columns if column.name not in readable)
    return tuple(
        column.name
        for column in contract.source_columns
        if column.personal and column.name not in contract.key
    )


def _found_by(contract: TableContract) -> frozenset[str]:
    """Return the columns by which rows are found and ordered; they land readable, whatever they hold."""
    subject, cursor = contract.subject, contract.cursor
    found = {*contract.key, contract.soft_delete_column}
    found |= {subject.column} if subject is not None else set()
    found |= {cursor.field, cursor.event_time} if cursor is not None else set()
    return frozenset(name for name in found if name is not None)


def _column(path: Path, policy: dict[str, Any], columns: tuple[Column, ...], stated: str | None) -> str:
    if stated is None:
        if len(policy["key"]) != 1:
            raise refused(
                path,
                "x-cdc.at_rest",
                "does not say whose a row is, and the key has several columns",
                "Name the column in subject_column.",
            )
        only: str = policy["key"][0]
        return only
    if stated not in {column.name for column in columns}:
        raise refused(path, "x-cdc.at_rest.subject_column", f"{stated!r} is not a column", "Name a column.")
    return stated


def _readable(policy: dict[str, Any], subject: Subject) -> set[str | None]:
    cursor = policy.get("cursor") or {}
    soft_delete = policy["events"]["soft_delete_column"]
    return {*policy["key"], subject.column, soft_delete, cursor.get("field"), cursor.get("event_time")}
