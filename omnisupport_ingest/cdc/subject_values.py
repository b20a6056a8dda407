"""Remove the values of erased subjects from judged events, in whatever form they landed.

An encrypted image of an erased subject cannot be decrypted any more. An image that landed plain can be read:
of it the values are removed here, between the verdict and the row in ``deduped_events`` or ``quarantine``. So
an erasure changes no verdict, no collision and no review, as with an erased row (``erasing``), and it holds
for events that land later too. What is left is what an encrypted image leaves: the columns by which rows are
found, and those that nobody called personal. All others are NULL, and the fold treats them as known.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from omnisupport_ingest.cdc.event_hashes import event_hashes
from omnisupport_ingest.cdc.images import read_image
from omnisupport_ingest.cdc.protecting import CONTENT_HASH, WITHOUT_VALUES
from omnisupport_ingest.contracts.at_rest import SubjectTable
from omnisupport_ingest.contracts.flat_images import read_flat
from omnisupport_ingest.contracts.names import TableName
from omnisupport_ingest.contracts.subject_keys import ErasedIds
from omnisupport_ingest.json_values import compact

_IMAGES = ("before", "after")
_NO_ROW = pa.array(sorted(WITHOUT_VALUES))
_ACCEPTED = "accepted"
"""The verdict ``judging.ACCEPTED``. ``judging`` imports this module, so it cannot be imported here."""

Rows = npt.NDArray[np.int64]
Of = tuple[str, str]
"""Kind and value of a subject."""


@dataclass(frozen=True)
class ErasedSubjects:
    """The erased subjects of a ``source``, and its ``tables`` that say whose their rows are. False if nobody
    was erased.

    ``unnamed``: tables with erased subjects of which nothing says whose their rows are any more. Their events
    lose images and lines whole.
    """

    source: str = ""
    tables: Mapping[TableName, SubjectTable] = field(default_factory=dict)
    erased: ErasedIds | None = None
    unnamed: frozenset[TableName] = frozenset()

    def __bool__(self) -> bool:
        return self.erased is not None and bool(self.tables or self.unnamed)

    def among(self, subjects: Sequence[Of]) -> list[bool]:
        """Return whether each of ``subjects`` is erased."""
        assert self.erased is not None, "somebody was erased"
        return self.erased.among([(self.source, *each) for each in subjects])


def images_of_erased(batch: pa.RecordBatch, subjects: ErasedSubjects) -> dict[str, Rows]:
    """Return by image (``before``, ``after``) the numbers of the events of ``batch`` in which it is of an
    erased subject; and by ``envelope`` those of which such an image, the key or the delivered line says so.

    A line may hold more than the images: of a delete that lands its key alone, or of a row that was kept out.
    """
    found: dict[str, list[int]] = {name: [] for name in (*_IMAGES, "envelope")}
    for table_name, table in subjects.tables.items() if subjects else ():
        rows = np.flatnonzero(_of_table(batch, table_name))
        if not len(rows):
            continue
        events = batch.select(["key", *_IMAGES]).take(pa.array(rows))
        keys: list[str | None] = events.column("key").to_pylist()
        whose = {name: _whose(events.column(name), keys, table) for name in _IMAGES}
        by_key = [None if key is None else table.whose(None, key) for key in keys]
        distinct = [*{of for each in (*whose.values(), by_key) for of in each if of is not None}]
        known = dict(zip(distinct, subjects.among(distinct), strict=True))
        gone = {name: np.array([of is not None and known[of] for of in each]) for name, each in whose.items()}
        gone["envelope"] = np.array([of is not None and known[of] for of in by_key])
        gone["envelope"] |= gone["before"] | gone["after"]
        if "envelope" in batch.schema.names:
            rest = np.flatnonzero(~gone["envelope"])
            lines = batch.column("envelope").take(pa.array(rows[rest]))
            gone["envelope"][rest] = _of_lines(lines, table, subjects)
        for name, mask in gone.items():
            found[name] += rows[mask].tolist()
    for table_name in subjects.unnamed if subjects else ():
        rows = np.flatnonzero(_of_table(batch, table_name))
        for numbers in found.values():
            numbers += rows.tolist()
    return {name: np.array(sorted(each), np.int64) for name, each in found.items()}


def without_erased(
    batch: pa.RecordBatch, subjects: ErasedSubjects, *, accepted: bool | None = None
) -> pa.RecordBatch:
    """Return ``batch``, judged events, without the values of erased subjects. ``accepted``: whether all are;
    None: the column ``verdict`` says which.

    An accepted event that changes gets the hash of what is left. Its identity loses the hash of what landed,
    also if only its line goes. In quarantine both name the event, so they stay.
    """
    gone = images_of_erased(batch, subjects)
    if not len(gone["envelope"]):
        return batch
    columns = {name: batch.column(name) for name in batch.schema.names}
    tables = _tables(batch, subjects)
    changed: set[int] = set()
    for name in _IMAGES:
        places, texts = [], []
        for row in gone[name].tolist():
            text = columns[name][row].as_py()
            left = emptied(text, tables[row]) if row in tables else None
            if left != text:
                places.append(row)
                texts.append(left)
        columns[name] = _put(columns[name], places, texts)
        changed |= {*places}
    if accepted is None:
        those = pc.equal(columns["verdict"], _ACCEPTED)
    else:
        those = _mask(len(batch), range(len(batch)) if accepted else ())
    less = pc.and_(those, _mask(len(batch), changed))
    if "envelope" in columns:
        rows = gone["envelope"].tolist()
        lines = pc.and_(_mask(len(batch), rows), columns["envelope"].is_valid())
        less = pc.or_(less, pc.and_(those, lines))
        columns["envelope"] = _put(columns["envelope"], rows, [None] * len(rows))
    if less.true_count:
        bare = pc.replace_substring_regex(columns["identity"], CONTENT_HASH, "]")
        columns["identity"] = pc.if_else(less, bare, columns["identity"])
    hashed = pc.and_(those, _mask(len(batch), changed))
    if hashed.true_count:
        hashes = event_hashes(pa.table(columns).filter(hashed))
        columns["event_hash"] = pc.replace_with_mask(columns["event_hash"], hashed, hashes)
    return pa.RecordBatch.from_arrays(
        [columns[each.name].cast(each.type) for each in batch.schema], schema=batch.schema
    )


def emptied(text: str | None, table: SubjectTable) -> str | None:
    """Return an image without the values that an erasure of its subject removes: NULL in each such column
    that was sent. None of an image that cannot be read: nobody knows what in it is a value."""
    image = read_image(text)
    if image is None:
        return None
    gone = image.keys() - table.kept
    return compact(image | dict.fromkeys(gone)) if any(image[name] is not None for name in gone) else text


def _whose(images: pa.StringArray, keys: Sequence[str | None], table: SubjectTable) -> list[Of | None]:
    """Return the subject of each of ``images``, rows with ``keys`` of ``table``; None without an image."""
    if images.null_count == len(images):
        return [None] * len(images)
    flat = read_flat(images, [table.column])
    found: list[Of | None] = []
    proven, texts = flat.proven.to_pylist(), flat.texts[table.column].to_pylist()
    for row, key in enumerate(keys):
        text = texts[row]
        if not proven[row]:
            image = images[row].as_py()
            if image is None:
                found.append(None)
                continue
            text = (read_image(image) or {}).get(table.column)
        found.append(table.whose(text, key))
    return found


def _of_lines(lines: pa.StringArray, table: SubjectTable, subjects: ErasedSubjects) -> npt.NDArray[np.bool_]:
    """Return which of the delivered ``lines`` name an erased subject."""
    if lines.null_count == len(lines):
        return np.zeros(len(lines), np.bool_)
    said = [table.said_in_line(line) for line in lines.to_pylist()]
    distinct = [*{of for each in said for of in each}]
    known = dict(zip(distinct, subjects.among(distinct), strict=True))
    return np.array([any(known[of] for of in each) for each in said], np.bool_)


def _of_table(batch: pa.RecordBatch, table_name: TableName) -> npt.NDArray[np.bool_]:
    """Return which events of ``batch`` are of rows of the table."""
    schema, table = table_name
    here = pc.and_(
        pc.equal(batch.column("source_schema"), schema), pc.equal(batch.column("source_table"), table)
    )
    rows = pc.and_not(pc.fill_null(here, False), pc.is_in(batch.column("op"), _NO_ROW))
    found: npt.NDArray[np.bool_] = rows.to_numpy(zero_copy_only=False)
    return found


def _tables(batch: pa.RecordBatch, subjects: ErasedSubjects) -> dict[int, SubjectTable]:
    """Return the table of each event of ``batch`` that has a subject, by its number."""
    names = (batch.column(name).to_pylist() for name in ("source_schema", "source_table"))
    return {
        row: table
        for row, each in enumerate(zip(*names, strict=True))
        if (table := subjects.tables.get(each)) is not None
    }


def _put(column: pa.Array, rows: Sequence[int], values: Sequence[str | None]) -> pa.Array:
    """Return ``column`` with ``values`` in ``rows``, ascending."""
    if not rows:
        return column
    return pc.replace_with_mask(column, _mask(len(column), rows), pa.array(values, column.type))


def _mask(count: int, rows: Collection[int]) -> pa.BooleanArray:
    """Return ``count`` marks, true of ``rows``."""
    mask = np.zeros(count, np.bool_)
    mask[[*rows]] = True
    return pa.array(mask)
