"""Builds keys and row images for all row changes of a block at once.

Facts about tables (column names, key, replica identity) are arrays over the columns of all tables. So one
lookup serves all values, whatever tables they belong to.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from omnisupport_ingest.landing.rows import EVENT_SCHEMA, Division
from omnisupport_ingest.sources.postgres.protocol.json_texts import JsonTexts, Members, escaped_texts
from omnisupport_ingest.sources.postgres.protocol.row_events import RowSchema
from omnisupport_ingest.sources.postgres.protocol.text_columns import (
    TUPLE_NULL,
    TUPLE_TEXT,
    TUPLE_UNCHANGED,
    Flags,
    Positions,
    TupleValues,
)


class UsedTables:
    """The ``schemas`` of a block, with the columns of all tables in one sequence."""

    def __init__(self, schemas: Sequence[RowSchema], divisions: Sequence[Division | None]) -> None:
        """``divisions``: for each schema, how its images are divided; None: not divided."""
        self.schemas = schemas
        self.divided = any(divisions)
        self.counts = np.array([len(each.names) for each in schemas], np.int64)
        self.first = np.cumsum(self.counts) - self.counts
        """For each table, index of its first column in that sequence."""
        self.partitioned = np.array([each.partitioned for each in schemas], np.bool_)
        self.key_counts = np.array([len(each.key_indexes) for each in schemas], np.int64)
        self.first_key = np.cumsum(self.key_counts) - self.key_counts
        self.keys = np.array([index for each in schemas for index in each.key_indexes], np.int64)
        """Indexes of the key columns within their table, one table after another."""
        self.in_identity = np.zeros(int(self.counts.sum()), np.bool_)
        for schema, first in zip(schemas, self.first.tolist(), strict=True):
            self.in_identity[[first + column for column in schema.identity]] = True
        self.has_identity = np.array([bool(each.identity) for each in schemas], np.bool_)
        of_columns = [
            (division is not None and name not in division.readable, division and name == division.subject)
            for schema, division in zip(schemas, divisions, strict=True)
            for name in schema.names
        ]
        self.hidden = np.array([hidden for hidden, _ in of_columns], np.bool_)
        self.says_subject = np.array([bool(says) for _, says in of_columns], np.bool_)

    @cached_property
    def names(self) -> pa.StringArray:
        """The names of all columns, one table after another."""
        return pa.array([name for each in self.schemas for name in each.names], pa.string())


class Images(NamedTuple):
    """Columns of the events of all rows. ``divided``: the columns that ``DIVIDED_SCHEMA`` adds; empty if no
    table is divided. ``kept``: flags of the rows whose key did not change."""

    key: pa.StringArray
    before: pa.StringArray
    after: pa.StringArray
    unchanged: pa.ListArray | None
    divided: dict[str, pa.StringArray]
    kept: Flags


class RowTuples(NamedTuple):
    """The tuples of row changes: their ``values``, and in ``row_of`` the row that each tuple belongs to.

    ``is_old``: flags of the tuples of old rows. ``is_key``: flags of the tuples that carry only the replica
    identity.
    """

    values: TupleValues
    row_of: Positions
    is_old: Flags
    is_key: Flags


class ParsedRows:
    """Row changes of ``tables``. ``table_of``: for each row, the number of its table."""

    def __init__(self, tables: UsedTables, table_of: Positions, tuples: RowTuples, whole: Flags) -> None:
        """``whole``: flags of the rows that could be read to their end."""
        self.tables, self.table_of = tables, table_of
        self._values, self._row_of, is_old, self._is_key = tuples
        self._new, self._old = (self._by_row(~is_old), self._by_row(is_old))
        # For each row, index of its new and of its old tuple; -1 if there is none.
        self._new_of, self._old_of = (np.full(len(table_of), -1) for _ in range(2))
        self._new_of[self._row_of[self._new]] = self._new
        self._old_of[self._row_of[self._old]] = self._old
        self.regular = whole.copy()
        """Flags of the rows that ``images`` can convert; ``row_events`` must convert the others."""
        self._leave_out_irregular()

    def _by_row(self, which: Flags) -> Positions:
        indexes = np.flatnonzero(which)
        return indexes[np.argsort(self._row_of[indexes], kind="stable")]

    def _leave_out_irregular(self) -> None:
        kinds, tables = self._values.kinds, self.tables
        self._any_unsent = bool((kinds == TUPLE_UNCHANGED).any())
        if self._any_unsent:
            unsent = np.add.reduceat(kinds == TUPLE_UNCHANGED, self._values.first, dtype=np.int64)
            irregular = (unsent == self._values.counts) | (self._is_key & (unsent > 0))
            self.regular[self._row_of[irregular]] = False
        table_of = self.table_of[self._row_of]
        self.regular[self._row_of[self._is_key & ~tables.has_identity[table_of]]] = False
        rows, values = self._key_values()
        self.regular[rows[kinds[values] == TUPLE_UNCHANGED]] = False
        rows, values = self._key_values(self._old_of)
        # The key must be sent. A null in it is regular only if the table is not partitioned: a partition
        # sends null for a column outside its replica identity.
        nameless = (kinds[values] == TUPLE_NULL) & tables.partitioned[self.table_of[rows]]
        self.regular[rows[nameless | (kinds[values] == TUPLE_UNCHANGED)]] = False

    def _key_values(self, tuple_of: Positions | None = None) -> tuple[Positions, Positions]:
        """Return the rows and the key values of the tuples ``tuple_of`` (for each row a tuple, or -1).

        None: take the new row, or the old row if there is no new one. A key value that the new row did not
        send again is taken from the old row.
        """
        tables = self.tables
        from_new = tuple_of is None
        if tuple_of is None:
            tuple_of = np.where(self._new_of >= 0, self._new_of, self._old_of)
        with_tuple = np.flatnonzero(tuple_of >= 0)
        counts = tables.key_counts[self.table_of[with_tuple]]
        rows = np.repeat(with_tuple, counts)
        columns = tables.keys[_ragged(tables.first_key[self.table_of[with_tuple]], counts)]
        values = self._values.first[tuple_of[rows]] + columns
        if from_new and self._any_unsent:
            unsent = (self._values.kinds[values] == TUPLE_UNCHANGED) & (self._old_of[rows] >= 0)
            values[unsent] = self._values.first[self._old_of[rows[unsent]]] + columns[unsent]
        return rows, values

    def images(self, block: bytes) -> Images:
        """Return the keys and images of the rows. All rows must be ``regular``."""
        values, count = self._values, len(self.table_of)
        is_text = values.kinds == TUPLE_TEXT
        texts = escaped_texts(block, values.starts[is_text], values.stops[is_text])
        json = JsonTexts.of(*texts, [each.literals for each in self.tables.schemas])
        numbers = np.cumsum(is_text) - 1

        def arrays(rows: Positions, value_indexes: Positions) -> pa.StringArray:
            return json.arrays(Members(rows, rows, is_text[value_indexes], numbers[value_indexes]), count)

        divided: dict[str, pa.StringArray] = {}

        def objects(tuples: Positions, *, old: bool) -> pa.StringArray:
            rows, value_indexes, columns = self._members(tuples, old=old)
            members = Members(rows, columns, is_text[value_indexes], numbers[value_indexes])
            if not self.tables.divided:
                return json.objects(members, count)
            name, is_hidden = "before" if old else "after", self.tables.hidden[columns]
            hidden = json.objects(members.where(is_hidden), count)
            divided[f"{name}_hidden"] = hidden
            divided[f"{name}_subject"] = json.values_by_row(
                members.where(self.tables.says_subject[columns]), count
            )
            readable = json.objects(members.where(~is_hidden), count)
            return (
                readable
                if not hidden.is_valid().true_count
                else pc.if_else(pc.and_(readable.is_null(), hidden.is_valid()), "{}", readable)
            )

        key = arrays(*self._key_values())
        kept = np.ones(count, np.bool_)
        if ((self._new_of >= 0) & (self._old_of >= 0)).any():
            old_key = arrays(*self._key_values(self._old_of))
            key_changed = pc.fill_null(pc.not_equal(key, old_key), False)
            kept = ~np.asarray(key_changed)
        before, after = objects(self._old, old=True), objects(self._new, old=False)
        return Images(key, before, after, self._unchanged(), divided, kept)

    def _members(self, tuples: Positions, *, old: bool) -> tuple[Positions, Positions, Positions]:
        """Return rows, values and columns of what was sent in ``tuples``.

        For ``old`` tuples, return only the columns that have a meaning: a key tuple has nulls in all other
        columns, and a tuple of a partition has nulls in columns outside the partition's replica identity.
        """
        counts = self._values.counts[tuples]
        values = _ragged(self._values.first[tuples], counts)
        rows = np.repeat(self._row_of[tuples], counts)
        columns = _ragged(self.tables.first[self.table_of[self._row_of[tuples]]], counts)
        sent = None
        if self._any_unsent:
            sent = self._values.kinds[values] != TUPLE_UNCHANGED
        if old:
            has_meaning = self.tables.in_identity[columns] | np.repeat(~self._is_key[tuples], counts)
            is_text = self._values.kinds[values] == TUPLE_TEXT
            has_meaning &= is_text | ~self.tables.partitioned[self.table_of[rows]]
            sent = has_meaning if sent is None else sent & has_meaning
        return (rows, values, columns) if sent is None else (rows[sent], values[sent], columns[sent])

    def _unchanged(self) -> pa.ListArray | None:
        """Return for each row the names of the columns that were not sent; null if all were sent."""
        if not self._any_unsent:
            return None
        counts = self._values.counts[self._new]
        values = _ragged(self._values.first[self._new], counts)
        unsent = self._values.kinds[values] == TUPLE_UNCHANGED
        rows = np.repeat(self._row_of[self._new], counts)[unsent]
        columns = _ragged(self.tables.first[self.table_of[self._row_of[self._new]]], counts)[unsent]
        of_row = np.bincount(rows, minlength=len(self.table_of))
        offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(of_row))).astype(np.int32)
        return pa.ListArray.from_arrays(
            pa.array(offsets),
            self.tables.names.take(pa.array(columns)),
            type=EVENT_SCHEMA.field("unchanged").type,
            mask=pa.array(of_row == 0),
        )


def _ragged(first: Positions, counts: Positions) -> Positions:
    """Return ``counts`` consecutive numbers from each number in ``first`` on, in one array."""
    indexes: Positions = np.repeat(first - (np.cumsum(counts) - counts), counts)
    indexes += np.arange(len(indexes))
    return indexes
