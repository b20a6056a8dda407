"""The names that the columns of a table have had at its source, as far as they are on record.

An image has the names of its time. Who looks for the value of a column in older images asks here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from omnisupport_ingest.cdc.life import PositionTuple
from omnisupport_ingest.landing.schema_changes import RecordedSchemas, SchemaChange

_Named = tuple[str, SchemaChange | None]
"""A name of a column, and the change that gave it; None: its first one."""


class ColumnNames:
    """The names of the columns of one table.

    A source that does not tell of a column that it was renamed has it under its present name alone.
    """

    def __init__(self, changes: Iterable[SchemaChange], current: Collection[str]) -> None:
        """``changes``: of the table, in the order in which they were noticed. ``current``: the columns that
        it had when last seen."""
        self._columns, self._current = _columns(changes), frozenset(current)

    @classmethod
    def of(cls, recorded: RecordedSchemas, table: str) -> ColumnNames:
        """Return the names on record for the table with the contract ``table``."""
        seen = recorded.tables.get(table)
        changes = (each for each in recorded.changes if each.table == table)
        return cls(changes, [each.name for each in seen.columns] if seen is not None else ())

    def now(self, column: str) -> str:
        """Return the present name of what was, or is, called ``column``."""
        return self._names(column)[-1][0]

    def value(self, image: Mapping[str, Any], column: str, at: PositionTuple) -> str | None:
        """Return the text of ``column`` in ``image``, of an event at the position ``at``; None: the image
        has none.

        ``column``: one of the names that it has had, or has.
        """
        names = self._names(column)
        if len(names) == 1:
            return image.get(column)
        of_time = next(name for name, given in reversed(names) if _had(name, given, image, at))
        # A snapshot stands at a position below its reading, so its rows may have a later name.
        order = [of_time, *(name for name, _ in reversed(names))]
        return next((image[name] for name in order if name in image), None)

    def _names(self, column: str) -> Sequence[_Named]:
        present = next((each for each in self._columns if each[-1][0] == column), None)
        if present is None and column not in self._current:
            former = (each for each in self._columns if any(name == column for name, _ in each))
            present = next(former, None)
        return present or [(column, None)]


def _had(name: str, given: SchemaChange | None, image: Mapping[str, Any], at: PositionTuple) -> bool:
    """Return whether the column had ``name``, ``given`` by that change, at the position ``at``."""
    if given is None:
        return True
    if at[:2] < (given.epoch, given.above.value):
        return False
    known = given.first_commit is not None and at[:2] >= (given.epoch, given.first_commit.value)
    return known or name in image


def _columns(changes: Iterable[SchemaChange]) -> list[list[_Named]]:
    """Return the names of each column that was renamed, in their order; the newest columns first."""
    columns: list[list[_Named]] = []
    renamed = (each for each in changes if each.kind == "column_renamed")
    # Columns that swapped their names did so between the same two looks.
    for _, look in groupby(renamed, key=lambda each: each.noticed_at):
        given: list[tuple[list[_Named], _Named]] = []
        for each in look:
            if each.before is None or each.after is None:
                continue
            column = next((names for names in columns if names[-1][0] == each.before), None)
            if column is None:
                column = [(each.before, None)]
                columns.insert(0, column)
            given.append((column, (each.after, each)))
        for column, name in given:
            column.append(name)
    return columns
