"""Builds keys and row images for all row changes of a block at once, in one compiled pass over its bytes.

Facts about tables (column names, key, replica identity) are arrays over the columns of all tables, so one
call converts the changes of any mix of tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import orjson
import pyarrow as pa

from omnisupport_ingest.compiled import compiled_rows, texts_of
from omnisupport_ingest.landing.rows import DIVIDED_SCHEMA, EVENT_SCHEMA, Division
from omnisupport_ingest.sources.postgres.protocol.frames import Rows
from omnisupport_ingest.sources.postgres.protocol.row_events import RowSchema
from omnisupport_ingest.sources.postgres.protocol.text_columns import Flags, Numbers

_IN_IDENTITY, _HIDDEN, _SAYS_SUBJECT = 1, 2, 4
_IMAGES = ("key", "before", "after", *DIVIDED_SCHEMA.names[len(EVENT_SCHEMA.names) :])
"""The columns that ``convert_changes`` returns, in its order."""


class Images(NamedTuple):
    """Columns of the events of all rows, by name. A row whose flag in ``converted`` is not set has nulls in
    all of them: ``row_events`` must convert it."""

    converted: Flags
    columns: dict[str, pa.Array]


@lru_cache(8)
def used_tables(schemas: tuple[RowSchema, ...], divisions: tuple[Division | None, ...]) -> UsedTables:
    """Return one value for the same tables: if a block has a thousand of them, the next one has, too."""
    return UsedTables(schemas, divisions)


class UsedTables:
    """The ``schemas`` of a block, with the columns of all tables in one sequence."""

    def __init__(self, schemas: Sequence[RowSchema], divisions: Sequence[Division | None]) -> None:
        """``divisions``: for each schema, how its images are divided; None: not divided."""
        self.divided = any(divisions)
        self._names = [name for each in schemas for name in each.names]
        columns = np.array([len(each.names) for each in schemas], np.int64)
        keys = np.array([len(each.key_indexes) for each in schemas], np.int64)
        members = [orjson.dumps(name) + b":" for name in self._names]
        flags = [
            (_IN_IDENTITY if index in identity else 0)
            | (_HIDDEN if division is not None and name not in division.readable else 0)
            | (_SAYS_SUBJECT if division is not None and name == division.subject else 0)
            for schema, division in zip(schemas, divisions, strict=True)
            for identity in [frozenset(schema.identity)]
            for index, name in enumerate(schema.names)
        ]
        self._facts = (
            columns,
            np.cumsum(columns) - columns,
            keys,
            np.cumsum(keys) - keys,
            np.array([index for each in schemas for index in each.key_indexes], np.int64),
            np.array([each.partitioned for each in schemas], np.uint8),
            np.array([bool(each.identity) for each in schemas], np.uint8),
            np.array(flags, np.uint8),
            b"".join(members),
            np.cumsum([0, *map(len, members)]).astype(np.int32),
        )

    def images(self, pieces: Sequence[Rows], table_of: Numbers) -> Images:
        """Return the keys and images of the row changes in ``pieces``.

        ``table_of``: for each change, number of its table; -1: none. Raises ``pa.ArrowInvalid`` if a text is
        not UTF-8, and ``OverflowError`` if the images of all rows are too large for one array.
        """
        count = len(table_of)
        if compiled_rows is None:
            return Images(np.zeros(count, np.bool_), {})
        flags, columns, unsent_at, unsent = compiled_rows.convert_changes(
            pieces, table_of, *self._facts, self.divided
        )
        found = {name: texts_of(each, count) for name, each in zip(_IMAGES, columns, strict=False)}
        if unsent:
            found["unchanged"] = self._unchanged(
                np.frombuffer(unsent_at, np.int32), np.frombuffer(unsent, np.int32)
            )
        return Images(np.frombuffer(flags, np.bool_), found)

    def _unchanged(self, offsets: Numbers, columns: Numbers) -> pa.ListArray:
        """Return for each row the names of the columns that were not sent; null if all were sent."""
        return pa.ListArray.from_arrays(
            pa.array(offsets),
            pa.array(self._names, pa.string()).take(pa.array(columns)),
            type=EVENT_SCHEMA.field("unchanged").type,
            mask=pa.array(np.diff(offsets) == 0),
        )
