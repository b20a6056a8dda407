"""What landing and raw hold of personal columns (``x-cdc.at_rest``): their values, or values that the key of
their subject encrypted before they were written.

Encrypted is what the columns in ``x-cdc.pii`` hold, and what columns hold that the contract does not name: of
those nobody has said that they are not personal. By the columns of the key, the subject, soft deletes and
cursors rows are found and ordered, so these stay readable.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omnisupport_ingest.contracts.columns import refused
from omnisupport_ingest.contracts.model import Column, Subject, TableContract

ENCRYPTED = "encrypted"


def read_at_rest(
    path: Path, policy: dict[str, Any], columns: tuple[Column, ...], name: str
) -> Subject | None:
    """The subject whose key encrypts, from ``policy``, the ``x-cdc`` of the contract in ``path``.

    ``name``: of the table in the lake. None where values land plain. ``ContractError`` for what cannot be
    carried out.
    """
    stated = policy.get("at_rest")
    if stated is None or stated["pii"] != ENCRYPTED:
        if stated is not None and len(stated) > 1:
            raise refused(
                path, "x-cdc.at_rest", "names a subject of plain values", "Take it out, or write encrypted."
            )
        return None
    if not any(column.personal for column in columns):
        raise refused(
            path, "x-cdc.at_rest.pii", "is 'encrypted', and pii names no column", "Name the columns in pii."
        )
    subject = Subject(
        stated.get("subject", name), _column(path, policy, columns, stated.get("subject_column"))
    )
    readable = _readable(policy, subject)
    if all(column.name in readable for column in columns if column.personal):
        raise refused(
            path,
            "x-cdc.at_rest.pii",
            "is 'encrypted', and pii names only columns by which rows are found, which land readable",
            "Name another personal column in pii, or write plain.",
        )
    for column in columns:
        if column.personal and column.name not in readable and not column.nullable:
            raise refused(
                path,
                f"x-cdc.pii.{column.name}",
                "is of a column that may not be NULL, and it is NULL once its subject's key is destroyed",
                f'Take {column.name} out of required, and add "null" to its type. The source may keep its '
                "NOT NULL.",
            )
    return subject


def readable_columns(contract: TableContract) -> frozenset[str]:
    """The columns of an encrypted contract that land as they are."""
    assert contract.subject is not None, "its values are encrypted"
    return _found_by(contract) | {column.name for column in contract.source_columns if not column.personal}


def null_once_erased(contract: TableContract) -> tuple[str, ...]:
    """The columns that are NULL where the key of an image is gone and the image does not show them.

    Not only those that are encrypted now: what no contract named as it landed is encrypted too. But none that
    rows are found by, and none that may not be NULL.
    """
    found_by = _found_by(contract)
    return tuple(
        column.name
        for column in contract.source_columns
        if column.name not in found_by and (column.personal or column.nullable)
    )


def encrypted_columns(contract: TableContract) -> tuple[str, ...]:
    """The columns of the contract that land encrypted; none where it says plain."""
    if contract.subject is None:
        return ()
    readable = readable_columns(contract)
    return tuple(column.name for column in contract.source_columns if column.name not in readable)


def maybe_encrypted_columns(contract: TableContract) -> tuple[str, ...]:
    """The columns whose values may have landed encrypted, whatever the contract says by now."""
    if contract.subject is not None:
        return encrypted_columns(contract)
    return tuple(
        column.name
        for column in contract.source_columns
        if column.personal and column.name not in contract.key
    )


def _found_by(contract: TableContract) -> frozenset[str]:
    """The columns by which rows are found and ordered: they land readable, whatever they hold."""
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
