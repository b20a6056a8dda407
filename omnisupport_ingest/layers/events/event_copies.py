"""Finds the events of a window that repeat or collide: a task reads narrow columns of all its files.

If positions may not be distinct, all events of a window must be compared. The columns that decide are narrow,
so one task reads only these, from all files of the window, and lists the few rows that share their position.
Two tasks share a large window: each lists half of the positions. A task begins with the positions alone:
chunks that were read in parallel have alternating ordinals, but no position twice. The events themselves stay
in their files. The task that judges a file looks up the marks of its rows. A mark means the same as in
``cdc.dedupe.mark_copies``, which finds it by a shuffle of whole rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from omnisupport_ingest.cdc.contents import (
    ADDED,
    AS_LANDED,
    BARE,
    BY_BARE,
    BY_SHOWN,
    CONTENT,
    ERASED,
    PLACE,
    SHOWN,
    UNSORTED,
    Contents,
    with_contents,
)
from omnisupport_ingest.cdc.envelope import RAW_TYPE
from omnisupport_ingest.cdc.event_columns import EventId
from omnisupport_ingest.cdc.judging import DISCARD, DISCARD_COPIES, RELEASE
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.contracts.subject_ciphers import DIGEST
from omnisupport_ingest.contracts.subject_keys import SubjectKeys
from omnisupport_ingest.lake.file_rows import batches_of, rows_at
from omnisupport_ingest.lake.file_tasks import Output
from omnisupport_ingest.lake.layout import LakeFile
from omnisupport_ingest.lake.schema import arrow_schema
from omnisupport_ingest.landing.rows import EARLIER_IDENTITY
from omnisupport_ingest.storage import path_at_hand

_MEMORY = "1GB"
"""Memory of DuckDB for the narrow columns of a window; beyond, it writes to the task's scratch folder."""

_ROWS_AT_ONCE = 100_000

_PARTS, _ROWS_OF_PARTS = 2, 100_000
"""The parts in which events are compared of a window with at least so many."""

MOST_NUMBERED = 20_000_000
"""Most events of a window whose positions a task holds as numbers; with more events, all are compared."""

_RAW = arrow_schema(RAW_TYPE, without=())
_POSITION = ("epoch", "commit_lsn", "ordinal", "identity")
_ARRIVAL = ("newest_epoch_before", "watermark_before", "landed_at", "batch_id", "file_row")
_NUMBERS = pa.schema([_RAW.field(name) for name in ("epoch", "commit_lsn", "ordinal")])
_ODD = np.int64(0x1E3779B97F4A7C15)
_NARROW = (*_POSITION, *_ARRIVAL)
_COMPARED = pa.schema([*(_RAW.field(name) for name in _NARROW), *ADDED])
Rows = npt.NDArray[np.int64]
"""Numbers of rows of a file, ascending from 0."""

_ROW = (pa.field("file", pa.int32()), pa.field("row", pa.int64()))

# The identity as it would land today: an earlier version added a hash of the content.
_EVENTS = """
CREATE OR REPLACE TABLE events AS
SELECT * REPLACE (regexp_replace(identity, $earlier, '\\1]') AS identity) FROM read
"""
# NULL sorts first, as in Spark. For batches of capture the name of the batch counts before the watermark.
_MARKS = f"""
WITH places AS (SELECT epoch, commit_lsn, ordinal, identity, min(rowid) AS place, max({ERASED}) AS erased,
    CASE max({ERASED}) WHEN {BY_BARE} THEN min({BARE}) <> max({BARE})
        WHEN {BY_SHOWN} THEN min({SHOWN}) <> max({SHOWN})
        ELSE min({CONTENT}) <> max({CONTENT}) END AS collision
    FROM events GROUP BY epoch, commit_lsn, ordinal, identity HAVING count(*) > 1),
marked AS (SELECT file, row, row_number() OVER (
        PARTITION BY place, CASE places.erased WHEN {BY_BARE} THEN {BARE} WHEN {BY_SHOWN} THEN {SHOWN}
            ELSE {CONTENT} END
        ORDER BY newest_epoch_before NULLS FIRST,
        CASE WHEN file_row IS NULL AND NOT starts_with(batch_id, $unsorted) THEN batch_id END NULLS FIRST,
        watermark_before NULLS FIRST, landed_at NULLS FIRST, batch_id NULLS FIRST, file_row NULLS FIRST,
        file, row
    )::INTEGER AS copy, collision
    FROM events JOIN places ON events.epoch = places.epoch AND events.commit_lsn = places.commit_lsn
    AND events.ordinal = places.ordinal AND events.identity IS NOT DISTINCT FROM places.identity)
SELECT * FROM marked WHERE copy > 1 OR collision ORDER BY file, row
"""


@dataclass(frozen=True)
class Together:
    """The raw files of one window, each with a number. Their events are compared with one another.

    ``part`` of ``parts``: which of their positions are compared. It has ``rows`` and ``bytes``, so that
    ``file_tasks.in_shares`` can divide windows among tasks.
    """

    files: tuple[tuple[int, LakeFile], ...]
    part: int = 0
    parts: int = 1

    @classmethod
    def of(cls, files: tuple[tuple[int, LakeFile], ...]) -> list[Together]:
        """Return the parts in which the events of one window's ``files`` are compared: two of a large
        window."""
        rows = sum(file.rows for _, file in files)
        parts = _PARTS if _ROWS_OF_PARTS <= rows <= MOST_NUMBERED else 1
        return [cls(files, part, parts) for part in range(parts)]

    @property
    def rows(self) -> int:
        return sum(file.rows for _, file in self.files) // self.parts

    @property
    def bytes(self) -> int:
        return sum(file.bytes for _, file in self.files) // self.parts


def mark_windows(output: Output, windows: Sequence[Together], contents: Contents = AS_LANDED) -> str:
    """Do ``mark_copies`` for each of ``windows``, one after the other."""
    return str(sum(int(mark_copies(output, each, contents)) for each in windows))


def mark_copies(output: Output, window: Together, contents: Contents = AS_LANDED) -> str:
    """Put aside a row for each event of ``window`` that repeats another one or collides.

    Columns of a row: the number of the event's file (``file``), its own number in the file (``row``, from 0),
    and ``copy`` and ``collision`` as in ``dedupe.mark_copies``. Returns the number of rows as text.
    """
    schema, count = pa.schema([*_COMPARED, *_ROW]), 0
    compared = _rows_to_compare(window, by_identity=contents.keys is not None)
    if not any(len(rows) for rows in compared):
        return "0"
    narrow = _narrow(window.files, compared, contents, schema)
    with duckdb.connect(config={"temp_directory": str(output.scratch)}) as connection:
        connection.execute(f"SET threads = 1; SET memory_limit = '{_MEMORY}'")
        connection.register("read", pa.RecordBatchReader.from_batches(schema, narrow))
        # No failpoint: scratch files, which the next command removes if this process is killed.
        connection.execute(_EVENTS, {"earlier": EARLIER_IDENTITY})
        # Where nothing lands encrypted, copies are alike, and all names of batches count, as they always did.
        unsorted = "/" if contents.keys is None else UNSORTED
        found = connection.query(_MARKS, params={"unsorted": unsorted})
        assert found is not None, "a SELECT has a result"
        for batch in found.to_arrow_reader(_ROWS_AT_ONCE):
            output.put_aside(pa.Table.from_batches([batch]))
            count += batch.num_rows
    return str(count)


def _rows_to_compare(window: Together, *, by_identity: bool) -> list[Rows]:
    """Return for each file of ``window`` the numbers of the events in its part that may share their position
    with another event.

    Every other event surely has its position alone. ``by_identity``: compare identities too, if a comparison
    is expensive, because all rows of a snapshot may have one position.
    """
    files = [file for _, file in window.files]
    if sum(file.rows for file in files) > MOST_NUMBERED:
        return [np.arange(file.rows) for file in files]
    found = _sharing([_position_numbers(file) for file in files], window.part, window.parts)
    if not by_identity or not any(len(rows) for rows, _ in found):
        return [rows for rows, _ in found]
    numbers = [
        of_rows * _ODD + _identity_numbers(file, rows)
        for file, (rows, of_rows) in zip(files, found, strict=True)
    ]
    again = _sharing(numbers, 0, 1)
    return [rows[places] for (rows, _), (places, _) in zip(found, again, strict=True)]


def _sharing(numbers: Sequence[Rows], part: int, parts: int) -> list[tuple[Rows, Rows]]:
    """Return, for each file, the places in its ``numbers`` of those that occur more than once in all files,
    and the numbers there. Only numbers of ``part`` of ``parts`` count."""
    every: Rows = np.concatenate(numbers)
    # All events of a position are in one part. Multiplied, the upper bits of its number are mixed well.
    rows = np.flatnonzero((every * _ODD >> 32) % parts == part) if parts > 1 else np.arange(len(every))
    rows = rows[np.argsort(every[rows])]
    in_order = every[rows]
    alike = in_order[1:] == in_order[:-1]
    is_shared = np.append(alike, False) | np.append(False, alike)
    rows = np.sort(rows[is_shared[: len(rows)]])
    starts = np.cumsum([0, *map(len, numbers)])
    found = np.split(rows, np.searchsorted(rows, starts[1:-1]))
    return [(of_file - start, every[of_file]) for of_file, start in zip(found, starts[:-1], strict=True)]


def _identity_numbers(file: LakeFile, rows: Rows) -> Rows:
    """Return a number for the identity of each of ``rows``, the same in whatever form the event landed."""
    found = [np.zeros(0, np.int64)]
    for batch in rows_at(file.uri, pa.schema([_RAW.field("identity")]), rows):
        texts = pc.replace_substring_regex(pc.fill_null(_of_today(batch.column(0)), ""), DIGEST, "")
        found.append(np.fromiter(map(hash, texts.to_pylist()), np.int64, len(batch)))
    return np.concatenate(found)


def _of_today(identities: pa.Array) -> pa.Array:
    return pc.replace_substring_regex(identities, EARLIER_IDENTITY, r"\1]")


def _position_numbers(file: LakeFile) -> Rows:
    """Return a number for the position of each event; equal positions have equal numbers."""
    found = [np.zeros(0, np.int64)]
    for batch in batches_of(file.uri, _NUMBERS, {}):
        epoch, lsn, ordinal = (np.asarray(column.cast(pa.int64())) for column in batch.columns)
        # Overflow is harmless, as in a hash.
        found.append((epoch * _ODD + lsn) * _ODD + ordinal)
    return np.concatenate(found)


def _narrow(
    files: Sequence[tuple[int, LakeFile]], compared: Sequence[Rows], contents: Contents, schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """Yield the narrow columns of the ``compared`` rows of each file, and what ``contents`` makes of them."""
    read = pa.schema([_RAW.field(name) for name in dict.fromkeys((*_NARROW, *contents.needed))])
    for (number, file), rows in zip(files, compared, strict=True):
        start = 0
        for batch in rows_at(file.uri, read, rows):
            numbers = pa.array(rows[start : start + len(batch)])
            start += len(batch)
            file_column = pa.repeat(pa.scalar(number, pa.int32()), len(batch))
            if contents.keys is not None:
                place = batch.schema.get_field_index("identity")
                batch = batch.set_column(place, "identity", _of_today(batch.column("identity")))
                batch = batch.set_column(place, "identity", contents.place_of(batch))
            narrow = [batch.column(name) for name in _NARROW]
            yield pa.RecordBatch.from_arrays(
                [*narrow, *contents.of(batch), file_column, numbers], schema=schema
            )


def reviews_of_all_forms(
    files: Iterable[LakeFile], contents: Contents, reviews: Mapping[EventId, str]
) -> dict[EventId, str]:
    """Return ``reviews``, and the same decision for each copy of these events that landed in another form.

    A review names an event by the hash of one copy. Copies have different hashes if one landed plain and one
    encrypted, or if they were encrypted by different keys. Once a subject is erased, two contents that were
    reviewed one by one may be copies; of several decisions the strictest counts for the other copies, in
    whatever order the files have them. ``files``: all raw files of one window. ``reviews``: of this window.
    """
    found = dict(reviews)
    if contents.keys is None:
        return found
    narrow = pa.schema([_RAW.field(name) for name in dict.fromkeys((*_POSITION, *contents.needed))])
    positions = pc.field("commit_lsn").isin([lsn for _, lsn, _, _ in reviews])
    landed = ds.dataset([file.uri for file in files], narrow, format="parquet").to_table(filter=positions)
    place = narrow.get_field_index("identity")
    landed = landed.set_column(place, "identity", _of_today(landed["identity"]))
    copies: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for batch in with_contents(landed.to_batches(), contents):
        for copy in batch.select(_FORM).to_pylist():
            copies.setdefault((copy["epoch"], copy["commit_lsn"], copy["ordinal"], copy[PLACE]), []).append(
                copy
            )
    for (*position, _), of_place in copies.items():
        compared = (CONTENT, SHOWN, BARE)[max(copy[ERASED] for copy in of_place)]
        decided: dict[int, str] = {}
        for copy in of_place:
            if decision := reviews.get((*position, copy["event_hash"])):
                before = decided.get(copy[compared], decision)
                decided[copy[compared]] = min(before, decision, key=_STRICTEST_FIRST.index)
        for copy in of_place:
            if copy[compared] in decided:
                found.setdefault((*position, copy["event_hash"]), decided[copy[compared]])
    return found


_STRICTEST_FIRST = (DISCARD, DISCARD_COPIES, RELEASE)
_FORM = ["epoch", "commit_lsn", "ordinal", "event_hash", PLACE, *ADDED.names]


def duplicates_in_other_forms(
    files: Sequence[str], contracts: tuple[TableContract, ...], keys: SubjectKeys, spill: Path
) -> dict[str, int]:
    """Count by table (``schema.table``) the events in raw ``files`` that are duplicates with different
    hashes: one copy landed plain and one encrypted, or encrypted by the key of a subject that was erased
    since.

    ``spill``: a folder for what does not fit into memory.
    """
    if not files:
        return {}
    contents = Contents(contracts, keys)
    with duckdb.connect(config={"temp_directory": str(spill)}) as connection:
        # No failpoint: a database in memory.
        query = _FORMS.format(columns=", ".join(contents.needed))
        asked = connection.query(query, params={"files": [*files]})
        assert asked is not None, "a SELECT has a result"
        forms = with_contents(asked.to_arrow_reader(_ROWS_AT_ONCE), contents)
        first = next(forms, None)
        if first is None:
            return {}
        narrow = [name for name in _COUNTED if name in first.schema.names]
        table = pa.Table.from_batches([each.select(narrow) for each in chain([first], forms)])
        connection.register("forms", table)
        return dict(connection.execute(_IN_OTHER_FORMS).fetchall())


_COUNTED = ("source_schema", "source_table", *_FORM)
_FORMS = """
SELECT {columns} FROM read_parquet($files, hive_partitioning = false)
WINDOW row AS (PARTITION BY epoch, commit_lsn, ordinal, source_schema, source_table, key)
QUALIFY min(event_hash) OVER row <> max(event_hash) OVER row
"""
# The same comparison as in ``_MARKS``.
_IN_OTHER_FORMS = f"""
WITH compared AS (SELECT *, CASE max({ERASED}) OVER (PARTITION BY epoch, commit_lsn, ordinal, {PLACE})
    WHEN {BY_BARE} THEN {BARE} WHEN {BY_SHOWN} THEN {SHOWN} ELSE {CONTENT} END AS same FROM forms)
SELECT source_schema || '.' || source_table, count(DISTINCT (epoch, commit_lsn, ordinal, event_hash))
    - count(DISTINCT (epoch, commit_lsn, ordinal, {PLACE}, same))
FROM compared GROUP BY 1
"""


class Marks:
    """The marks of the rows of one file. A row without a mark counts as the only event of its position."""

    def __init__(self, marks: pa.Table) -> None:
        """``marks``: ``row``, ``copy`` and ``collision``."""
        self._rows: Rows = marks["row"].to_numpy()
        order = np.argsort(self._rows)
        self._rows = self._rows[order]
        self._copies = marks["copy"].to_numpy()[order]
        self._collisions = marks["collision"].to_numpy()[order]

    def __bool__(self) -> bool:
        return bool(len(self._rows))

    def between(self, start: int, end: int) -> tuple[pa.Array, pa.Array]:
        """Return ``copy`` and ``collision`` of the rows from ``start`` (inclusive) to ``end`` (exclusive)."""
        first, last = np.searchsorted(self._rows, [start, end])
        copies, collisions = np.ones(end - start, np.int32), np.zeros(end - start, np.bool_)
        places = self._rows[first:last] - start
        copies[places], collisions[places] = self._copies[first:last], self._collisions[first:last]
        return pa.array(copies), pa.array(collisions)


_NO_MARKS = pa.table(
    {"row": pa.array([], pa.int64()), "copy": pa.array([], pa.int32()), "collision": pa.array([], pa.bool_())}
)


@dataclass(frozen=True)
class Copies:
    """The marks that tasks found. ``marks``: the files that they put aside. ``numbers``: path of a raw file →
    its number. Without any, all positions are distinct."""

    marks: tuple[str, ...] = ()
    numbers: Mapping[str, int] = field(default_factory=dict)

    def of(self, files: Iterable[LakeFile]) -> dict[str, Marks]:
        """Return the marks of the rows of each of ``files``, by path. What tasks put aside is read once."""
        found = {file.full_path: Marks(_NO_MARKS) for file in files}
        numbers = sorted((self.numbers[path], path) for path in found.keys() & self.numbers.keys())
        if not self.marks or not numbers:
            return found
        among = (pc.field("file") >= numbers[0][0]) & (pc.field("file") <= numbers[-1][0])
        marks = (
            ds.dataset([path_at_hand(each) for each in self.marks], format="parquet")
            .to_table(filter=among)
            .sort_by("file")
        )
        of_file = marks["file"].to_numpy()
        for number, path in numbers:
            first, end = np.searchsorted(of_file, [number, number + 1])
            found[path] = Marks(marks.slice(first, end - first))
        return found
