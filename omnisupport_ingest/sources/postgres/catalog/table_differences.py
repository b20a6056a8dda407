"""Differences between two schemas of a table, by the numbers of tables (oid) and columns (``attnum``).

A column keeps its number when it is renamed, and no other column of the table ever gets that number. So a
rename can be told from a drop and an add, and a column that was dropped and added again under its old name is
recognised.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from omnisupport_ingest.contracts.pg_types import NUMBERS, Fit, Kind, PgType, fit
from omnisupport_ingest.landing.schema_changes import Difference, SeenColumn, SeenTable


def differences(before: SeenTable, now: SeenTable | None) -> Iterator[Difference]:
    """Yield every difference. ``now``: None if the table is gone."""
    if now is None:
        yield Difference("table_gone", None, before.name, None)
        return
    if before.relation != now.relation:
        yield Difference("table_made_anew", None, before.name, now.name)
        before = _by_name(before, now)
    elif before.name != now.name:
        yield Difference("table_renamed", None, before.name, now.name)
    yield from _of_columns(before, now)
    # A database without numbers of tables may not have told its key before.
    if _key(before, now) != now.key and (before.key or now.relation):
        yield Difference("key_changed", None, ", ".join(before.key), ", ".join(now.key))


def _by_name(before: SeenTable, now: SeenTable) -> SeenTable:
    """Return ``before`` with the column numbers of ``now``, a table created again, matched by name."""
    numbers = {column.name: column.number for column in now.columns}
    columns = tuple(
        SeenColumn(
            numbers.get(each.name, -each.number), each.name, each.pg_type, each.not_null, each.default,
            each.before, each.labels,
        )
        for each in before.columns
    )  # fmt: skip
    return SeenTable(now.relation, before.name, columns, before.key, before.rows)


def _key(before: SeenTable, now: SeenTable) -> tuple[str, ...]:
    """Return the earlier key with the present names of its columns."""
    numbers = {each.name: each.number for each in before.columns}
    names = {each.number: each.name for each in now.columns}
    return tuple(names.get(numbers.get(name, 0), name) for name in before.key)


def _of_columns(before: SeenTable, now: SeenTable) -> Iterator[Difference]:
    old, new = ({each.number: each for each in table.columns} for table in (before, now))
    gone = {each.name: each for number, each in old.items() if number not in new}
    added = {each.name: each for number, each in new.items() if number not in old}
    for name, column in gone.items():
        if name not in added:
            yield Difference("column_dropped", name, column.pg_type, None)
    for name, column in added.items():
        if name in gone:
            yield Difference("column_added_again", name, gone[name].pg_type, described(column))
        else:
            yield Difference("column_added", name, None, described(column))
    converted = converted_columns(before, now)
    for number in sorted(old.keys() & new.keys()):
        yield from _of_column(old[number], new[number])
        if number in converted:
            yield Difference("column_converted", new[number].name, None, None)


def _of_column(before: SeenColumn, now: SeenColumn) -> Iterator[Difference]:
    if before.name != now.name:
        yield Difference("column_renamed", before.name, before.name, now.name)
    if now.pg_type and not before.pg_type:
        # The type was unknown before; a known type is no change.
        return
    if before.pg_type != now.pg_type:
        yield Difference(type_change(before.pg_type, now.pg_type), now.name, before.pg_type, now.pg_type)
    if before.not_null != now.not_null:
        kind = "column_not_null" if now.not_null else "column_nullable"
        yield Difference(kind, now.name, None, None)
    if before.labels != now.labels and before.pg_type == now.pg_type:
        gone = [label for label in before.labels if label not in now.labels]
        added = [label for label in now.labels if label not in before.labels]
        if gone:
            yield Difference("enum_values_changed", now.name, ", ".join(gone), ", ".join(added) or None)
        elif added:
            yield Difference("enum_value_added", now.name, None, ", ".join(added))


def described(column: SeenColumn) -> str:
    """Return the column's definition as in ALTER TABLE … ADD COLUMN, without its name."""
    default = f" DEFAULT {column.default}" if column.default is not None else ""
    return f"{column.pg_type}{default}{' NOT NULL' if column.not_null else ''}"


_FREE = re.compile(
    r"(text|character varying|bit varying|numeric|time(?:stamp)?)(?:\((\d+)(?:,(-?\d+))?\))?"
    r"( with(?:out)? time zone)?"
)
"""Types whose limit PostgreSQL takes away or raises without writing rows anew."""


def converted_columns(before: SeenTable, now: SeenTable) -> frozenset[int]:
    """Return the numbers of the columns whose values a ``USING`` expression seems to have converted.

    Their types need no new files of the table, but it has new ones, and no other difference explains them.
    (``VACUUM FULL`` between the same two looks does, and is not seen.)
    """
    if before.relation != now.relation or None in (before.storage, now.storage):
        return frozenset()
    types = {each.number: each.pg_type for each in before.columns}
    filled = any(each.number not in types and (each.default or each.not_null) for each in now.columns)
    retyped = [each for each in now.columns if types.get(each.number, each.pg_type) != each.pg_type]
    kept = all(_keeps_files(types[each.number], each.pg_type) for each in retyped)
    shown = before.storage != now.storage and kept and not filled
    return frozenset(each.number for each in retyped) if shown else frozenset()


def _keeps_files(before: str, now: str) -> bool:
    was, after = _FREE.fullmatch(before), _FREE.fullmatch(now)
    if was is None or after is None or (_family(was), was[4]) != (_family(after), after[4]):
        return False
    if after[2] is None:
        return True
    return was[2] is not None and int(was[2]) <= int(after[2]) and was[3] == after[3]


def _family(of: re.Match[str]) -> str:
    return "text" if of[1] == "character varying" else of[1]


_LENGTH = re.compile(r"\((\d+)\)")


def type_change(before: str, now: str) -> str:
    """Return the kind of change from type ``before`` to ``now``, both as ``format_type`` writes them.

    Between number types, or lengths of text, a column is widened or narrowed. Any other change of type is
    ``column_retyped``, including a number that becomes text.
    """
    old, new = PgType.parse(before), PgType.parse(now)
    if old.kind is Kind.TEXT and new.kind is Kind.TEXT:
        return _of_texts(before, now)
    if {old.kind, new.kind} <= NUMBERS:
        if fit(new, old) is Fit.ALL:
            return "column_widened"
        return "column_narrowed" if fit(old, new) is Fit.ALL else "column_retyped"
    return "column_retyped"


_TEXTS = frozenset({"text", "character varying", "character"})


def _of_texts(before: str, now: str) -> str:
    if not {_LENGTH.sub("", before), _LENGTH.sub("", now)} <= _TEXTS:
        return "column_retyped"
    lengths = [int(match[1]) if (match := _LENGTH.search(each)) else None for each in (before, now)]
    if lengths[1] is None or (lengths[0] is not None and lengths[0] <= lengths[1]):
        return "column_widened"
    return "column_narrowed"
