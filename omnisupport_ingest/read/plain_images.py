"""Finds the images of a subject that landed plain, in landing and raw, in every table of the source.

Such an image says itself whose it is, or its row does (``SubjectTable.whose``), as in judging. Where no image
of an event has values, its delivered line may: of a delete that landed its key alone, or of a row that was
kept out. Every file of the source is read; a text is parsed only if it may be one that is looked for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from omnisupport_ingest.cdc.images import read_image
from omnisupport_ingest.cdc.protecting import WITHOUT_VALUES
from omnisupport_ingest.cdc.subject_values import Of, emptied
from omnisupport_ingest.contracts.at_rest import SubjectTable, subject_tables
from omnisupport_ingest.contracts.encrypted_images import MARK
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.contracts.names import TableName, row_subject
from omnisupport_ingest.json_values import compact
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.read.holdings import former_raw_events, landed_events

_IMAGES = ("before", "after")
_LINE = "envelope"
_READ = ["op", "source_schema", "source_table", "key", *_IMAGES, _LINE]

Row = tuple[str, str, str]
"""Schema, table, and the text of a row's key."""


@dataclass(frozen=True, slots=True)
class Sought:
    """Which images are looked for: those of ``subjects``, and those of ``rows``, whosever they are."""

    subjects: Collection[Of] = ()
    rows: Collection[Row] = ()
    _texts: dict[str, set[str]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        for kind, text in self.subjects:
            self._texts.setdefault(kind, set()).add(text)

    def holds(self, row: Row | None, of: Of) -> bool:
        return of[1] in self._texts.get(of[0], ()) or (row is not None and row in self.rows)

    def texts(self, table: SubjectTable) -> set[str]:
        """Return what the subject column of ``table`` says in such images."""
        return self._texts.get(table.name, set())

    def keys(self, table_name: tuple[str, str], table: SubjectTable) -> set[str]:
        """Return the keys of rows of ``table`` that such images may have, whatever the images say."""
        keys = {key for *name, key in self.rows if tuple(name) == table_name}
        if table.is_key:
            keys |= {compact([text]) for text in self.texts(table)}
        return keys | self._texts.get(row_subject(table.full_name), set())


@dataclass(frozen=True, slots=True)
class PlainImage:
    """An image that landed plain, or a delivered line.

    ``window``: empty of a former file of raw. ``row``: None if its key could not be read. ``of``: its
    subject. ``personal``: whether it has a value that an erasure of the subject removes, or cannot be
    read; a line is.
    """

    layer: str
    path: Path
    window: str
    row: Row | None
    of: Of
    personal: bool


def plain_images(
    workspace: Workspace, source: str, contracts: Sequence[TableContract], sought: Sought
) -> Iterator[PlainImage]:
    """Yield the images that are looked for, of landing, raw and former files of raw. ``contracts``: of the
    tables whose events may be there."""
    tables = subject_tables(contracts)
    former = former_raw_events(workspace, source, _READ)
    for layer, path, window, batch in chain(landed_events(workspace, source, _READ), former):
        for table_name, table in tables.items():
            schema, name = table_name
            of_table = pc.and_(
                pc.equal(batch.column("source_schema"), schema), pc.equal(batch.column("source_table"), name)
            )
            rows = pc.invert(pc.is_in(batch.column("op"), pa.array(sorted(WITHOUT_VALUES))))
            events = batch.filter(pc.and_(of_table, rows))
            if not events.num_rows:
                continue
            for row, of, personal in _in_events(events, sought, (table_name, table)):
                yield PlainImage(layer, path, window, row, of, personal)


def _in_events(
    events: pa.RecordBatch, sought: Sought, table: tuple[TableName, SubjectTable]
) -> Iterator[tuple[Row | None, Of, bool]]:
    """Yield row, subject and ``personal`` of the images in ``events`` of one table that are looked for."""
    (schema, name), subject_table = table
    with_values = set[int]()
    for image in (*_IMAGES, _LINE):
        for number, key, text in _candidates(events, image, sought, table):
            row = None if key is None else (schema, name, key)
            if image == _LINE:
                if number not in with_values:
                    of_line = subject_table.said_in_line(text) or [subject_table.whose(None, key)]
                    yield from ((row, of, True) for of in of_line if sought.holds(row, of))
                continue
            of = subject_table.whose((read_image(text) or {}).get(subject_table.column), key)
            if sought.holds(row, of):
                personal = emptied(text, subject_table) != text
                if personal:
                    with_values.add(number)
                yield row, of, personal


def _candidates(
    events: pa.RecordBatch, image: str, sought: Sought, of: tuple[TableName, SubjectTable]
) -> Iterator[tuple[int, str | None, str]]:
    """Yield number, key and text of the plain images ``image`` of ``events`` that may be looked for."""
    table_name, table = of
    images = events.column(image)
    keys = pa.array(sorted(sought.keys(table_name, table)), pa.string())
    # Without an escape a text stands in an image as it is.
    parts = ["\\", *sought.texts(table)] if sought.texts(table) else []
    named = (pc.match_substring(images, part) for part in parts)
    may = reduce(pc.or_, named, pc.is_in(events.column("key"), keys))
    plain = pc.and_not(pc.fill_null(may, False), pc.fill_null(pc.match_substring(images, MARK), True))
    numbers = np.flatnonzero(plain.to_numpy(zero_copy_only=False))
    found = events.select(["key", image]).take(pa.array(numbers))
    yield from zip(numbers.tolist(), *(each.to_pylist() for each in found.columns), strict=True)
