"""What SQLAlchemy tells of a database: the types of its columns, what is unique, and its errors."""

from __future__ import annotations

import warnings
from contextlib import suppress
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine.interfaces import ReflectedIndex

from omnisupport_ingest.sources.postgres.catalog.live_table import LiveIndex
from omnisupport_ingest.sources.query.errors import QueryRefused

ReflectedTable = tuple[str, str | None]
"""Name and schema of a table, as SQLAlchemy's inspector takes them."""


def unique_keys(inspector: sa.Inspector, table: ReflectedTable) -> tuple[LiveIndex, ...]:
    """Return what tells the rows of ``table`` apart: its primary key, which comes first, and each other
    unique constraint or index over NOT NULL columns. A database that cannot tell its constraints has none."""
    primary = tuple(inspector.get_pk_constraint(*table)["constrained_columns"])
    # SQLite reports the columns of a key as nullable.
    not_null = {each["name"] for each in inspector.get_columns(*table) if not each.get("nullable", True)}
    not_null |= {*primary}
    others = list[tuple[str, ...]]()
    with suppress(NotImplementedError):
        others += [tuple(each["column_names"]) for each in inspector.get_unique_constraints(*table)]
    with warnings.catch_warnings():
        # SQLAlchemy warns of each index over an expression.
        warnings.simplefilter("ignore", sa.exc.SAWarning)
        indexes = [each for each in inspector.get_indexes(*table) if _of_all_rows(each)]
    others += [tuple(map(str, each["column_names"])) for each in indexes]
    found = [primary, *(each for each in others if not_null.issuperset(each))]
    return tuple(
        LiveIndex("primary key" if each == primary else "", each, each == primary, False, False)
        for each in dict.fromkeys(found)
        if each
    )


def _of_all_rows(index: ReflectedIndex) -> bool:
    """Whether the index distinguishes all rows of its table: it is unique, and not partial."""
    partial = any(name.endswith("_where") for name in index.get("dialect_options", {}))
    return index["unique"] and not partial


def pg_type_of(declared: sa.types.TypeEngine[Any]) -> str:
    """Return the PostgreSQL type for values of a column with the declared type ``declared``; empty if no type
    is certain."""
    if isinstance(declared, sa.SmallInteger):
        return "smallint"
    if isinstance(declared, sa.BigInteger):
        return "bigint"
    if isinstance(declared, sa.String):
        return "text" if declared.length is None else f"character varying({declared.length})"
    if isinstance(declared, sa.Numeric) and not isinstance(declared, sa.Float):
        size = (declared.precision, declared.scale or 0)
        return "numeric" if declared.precision is None else "numeric({},{})".format(*size)
    for kind, name in _PG_TYPES:
        if isinstance(declared, kind):
            return name
    return ""


_PG_TYPES: tuple[tuple[type[sa.types.TypeEngine[Any]], str], ...] = (
    (sa.Boolean, "boolean"),
    (sa.Integer, "integer"),
    (sa.Float, "double precision"),
    (sa.DateTime, "timestamp without time zone"),
    (sa.Date, "date"),
    (sa.Time, "time without time zone"),
    (sa.LargeBinary, "bytea"),
    (sa.Uuid, "uuid"),
)


def is_loose(declared: sa.types.TypeEngine[Any]) -> bool:
    """Whether the declared type of a column of SQLite says nothing of its values.

    It is a text, which times may be as well, or no type that SQLAlchemy knows. To such a type, for example
    ``timestamptz``, SQLAlchemy gives the name ``NUMERIC``.
    """
    if isinstance(declared, sa.Numeric) and not isinstance(declared, sa.Float):
        return declared.precision is None
    return isinstance(declared, sa.String) or not pg_type_of(declared)


class refusals:
    """Turns errors of the driver into ``QueryRefused``, by class and code: the text of a driver may quote a
    row. ``connecting``: nothing is read yet, so the text is shown."""

    def __init__(self, what: str, *, connecting: bool = False) -> None:
        self._what, self._connecting = what, connecting

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, sa.exc.DBAPIError):
            reason = type(error).__name__
            if self._connecting and error.orig is not None:
                reason += f": {str(error.orig).partition(chr(10))[0]}"
            elif (code := _code_of(error.orig)) is not None:
                reason += f" ({code})"
            raise QueryRefused(
                f"{self._what} cannot be read: {reason}.",
                fix="Start the database if it is down; else compare the contract with the table.",
            ) from None
        if isinstance(error, sa.exc.NoSuchTableError):
            raise QueryRefused(
                f"The database has no table {self._what}.",
                fix="Correct x-cdc.schema and x-cdc.table of the contract, or create the table.",
            ) from None
        if isinstance(error, sa.exc.SQLAlchemyError):
            raise QueryRefused(
                f"{self._what} cannot be read: {type(error).__name__}.",
                fix="Compare the contract with the table: schema, name and columns.",
            ) from None


def _code_of(error: BaseException | None) -> str | None:
    """Return the code that the driver gives ``error``: an SQLSTATE, the name of an error of SQLite, or a
    number; None without one."""
    found = (getattr(error, name, None) for name in ("sqlstate", "pgcode", "sqlite_errorname"))
    code = next((each for each in found if isinstance(each, str)), None)
    numbers = [each for each in getattr(error, "args", ())[:1] if isinstance(each, int)]
    return code or (str(numbers[0]) if numbers else None)
