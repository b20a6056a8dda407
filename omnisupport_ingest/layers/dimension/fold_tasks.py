"""Folds files of events by Spark tasks: files form blocks, and several tasks share the keys of a block.

A task reads the narrow columns of its block and keeps the events of its share of the keys. Their order
decides which events make up a row, and only for those the row images are read (``cdc.late_images``). So each
block leaves one row per key, and no event is sent from one task to another.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from omnisupport_ingest.cdc import columnar
from omnisupport_ingest.cdc.envelope import RAW_TYPE
from omnisupport_ingest.cdc.fold import table_columns_of
from omnisupport_ingest.cdc.folded import STATE_NAMES, folded_type
from omnisupport_ingest.cdc.late_images import IMAGES, ROW, fold_late
from omnisupport_ingest.cdc.ordinary import Taken
from omnisupport_ingest.cdc.ordinary_fold import integer_keys
from omnisupport_ingest.cdc.typed_fold import EVENT_COLUMNS, events_to_fold
from omnisupport_ingest.cdc.typed_rows import typed_batches
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.lake import file_rows
from omnisupport_ingest.lake.file_rows import rows_at, rows_that_fit
from omnisupport_ingest.lake.file_tasks import FEW_FILES, Output, are_few
from omnisupport_ingest.lake.key_files import KeyOrder
from omnisupport_ingest.lake.layout import LakeFile
from omnisupport_ingest.lake.schema import arrow_schema

ROWS_OF_A_BLOCK = 1_000_000
"""Events of a block. The larger a block, the fewer rows are left."""

_BYTES_OF_A_BLOCK = 96 * 1024 * 1024
_BYTES_OF_IMAGES = 128 * 1024 * 1024
"""About how many bytes of images a task holds at a time."""

_MOST_PARTS = 16
"""Parts of a share beyond which more tasks share the block: each part may have to read all of its files."""

SHARES = (2, 16)
"""Tasks that share the keys of a block: usually, and if the images are too large for so few tasks."""

_RAW = arrow_schema(RAW_TYPE, without=())
_IMAGES = pa.schema([_RAW.field(name) for name in IMAGES])
_PLACES = pa.schema([_RAW.field(name) for name in ("window", "epoch", "commit_lsn", "ordinal", "identity")])
_APART = pa.schema([_RAW.field(name) for name in ("source_table", "identity")])
"""Further columns to read where some events are withheld."""

_NARROW = pa.schema([field for field in _RAW if field.name in {*EVENT_COLUMNS, "source_schema"} - {*IMAGES}])


class _TooLarge(Exception):
    """Raised if the images that a task needs are larger than it may hold; they are then folded otherwise."""


@dataclass(frozen=True)
class Share:
    """One task's part of a block: its files, and which share of their keys (number ``number`` of ``count``).

    ``files``: files of accepted events. ``withheld``: quarantine files, of all tables. ``elsewhere``:
    quarantine files of the same windows that other blocks have.
    """

    files: tuple[LakeFile, ...]
    number: int = 0
    count: int = 1
    withheld: tuple[LakeFile, ...] = ()
    elsewhere: tuple[LakeFile, ...] = ()


def in_key_shares(
    files: Sequence[LakeFile], count: int, withheld: Collection[LakeFile] = ()
) -> list[list[Share]]:
    """Return the blocks of ``files``, in their order, each as ``count`` shares of its keys.

    ``withheld``: those of ``files`` that are quarantine files.
    """
    if not files:
        return []
    if are_few(files) and count == SHARES[0]:
        blocks, count = [list(files)], 1
    else:
        blocks = _blocks(files)
    held, found = {file.full_path for file in withheld}, []
    for block in blocks:
        mine, windows = {file.full_path for file in block}, {file.window for file in block}
        found.append(
            [
                Share(
                    tuple(file for file in block if file.full_path not in held),
                    number,
                    count,
                    tuple(file for file in block if file.full_path in held),
                    tuple(file for file in withheld if file.window in windows and file.full_path not in mine),
                )
                for number in range(count)
            ]
        )
    return found


def _blocks(files: Sequence[LakeFile]) -> list[list[LakeFile]]:
    blocks: list[list[LakeFile]] = [[]]
    rows = size = 0
    for file in files:
        held = blocks[-1]
        full = rows + file.rows > ROWS_OF_A_BLOCK or size + file.bytes > _BYTES_OF_A_BLOCK
        if held and (full or len(held) == FEW_FILES):
            blocks.append([])
            rows = size = 0
        blocks[-1].append(file)
        rows, size = rows + file.rows, size + file.bytes
    return blocks


def fold(output: Output, share: Share, contract: TableContract, order: KeyOrder) -> str | None:
    """Fold the events of the contract's table in ``share``: ``folded_type`` rows, in ``order``.

    Returns the text that ``FoldReport`` parses. Returns None if the events are more than a task may hold, or
    if one of them voids a withheld event of another block.
    """
    # The partition names the table without its schema, so it may also hold a namesake in another schema.
    files = [file for file in share.files if dict(file.partition)["source_table"] == contract.table]
    known = _known(files, share, contract)
    if known is None:
        return None
    stretches, taken, moves = stretches_of(known), Taken(), set[str]()
    table_columns = table_columns_of(contract)
    read = [*files, *share.withheld]
    parts = fold_late(
        of_share(known, share),
        partial(_images_at, read),
        table_columns,
        taken,
        moves,
        most_images=max(1, int(_BYTES_OF_IMAGES / _bytes_of_an_image(read))),
    )
    kind = arrow_schema(folded_type(contract), without=())
    names = ("window", *table_columns.names, *STATE_NAMES)
    try:
        for number, folded in enumerate(parts):
            if number == _MOST_PARTS:
                return None
            typed = typed_batches(folded, contract.columns, names)
            if rows := [pa.Table.from_batches([batch]).cast(kind) for batch in typed]:
                output.add(order.sort(pa.concat_tables(rows)))
    except _TooLarge:
        return None
    # A key change that has every column needs nothing from the old key.
    found = {window: (first, last, window in moves) for window, (first, last, _) in stretches.items()}
    return json.dumps([json.dumps(found), taken.events, taken.exactly])


@dataclass(frozen=True)
class FoldReport:
    """The report of ``fold``. ``stretches``: the ranges of positions in its block (``parts_agree``), with the
    key changes of this share alone. ``taken``: how many events were folded, and how."""

    stretches: str
    taken: Taken

    @classmethod
    def parse(cls, text: str) -> FoldReport:
        stretches, events, exactly = json.loads(text)
        return cls(stretches, Taken(events, exactly))


def _known(files: Sequence[LakeFile], share: Share, contract: TableContract) -> pa.Table | None:
    """Return the columns that the fold needs of the contract's events in ``files`` and in the quarantine
    files of ``share``, each with the number of its row. Returns None as ``fold`` does."""
    narrow = pa.schema([*_NARROW, *_APART]) if share.withheld or share.elsewhere else _NARROW
    accepted = rows_that_fit(files, narrow)
    withheld, others = rows_that_fit(share.withheld, narrow), rows_that_fit(share.elsewhere, _PLACES)
    if accepted is None or withheld is None or others is None:
        return None
    if accepted.nbytes + withheld.nbytes > file_rows.MAX_BYTES_IN_MEMORY:
        return None
    numbers = np.arange(len(accepted) + len(withheld))
    known = _of_table(accepted, numbers[: len(accepted)], contract, withheld=False)
    if voided(others, known).any():
        return None
    if len(withheld):
        withheld = _of_table(withheld, numbers[len(accepted) :], contract, withheld=True)
        withheld = withheld.filter(pa.array(~voided(withheld, known)))
        known = pa.concat_tables([known, withheld]).combine_chunks()
    columns = [name for name in known.column_names if name not in _APART.names]
    return events_to_fold(known.select(columns), contract.other_keys)


def _of_table(
    events: pa.Table, numbers: npt.NDArray[np.int64], contract: TableContract, *, withheld: bool
) -> pa.Table:
    """Return those of ``events`` that are of the contract's table. ``numbers``: the row numbers of
    ``events``."""
    mine = pc.equal(events["source_schema"], contract.schema)
    if withheld:
        # Quarantine files have the events of all tables.
        mine = pc.and_(mine, pc.equal(events["source_table"], contract.table))
    events = events.append_column(ROW, pa.array(numbers))
    events = events.append_column("withheld", pa.repeat(pa.scalar(withheld), len(events)))
    return events if pc.all(mine).as_py() else events.filter(mine)


def voided(withheld: pa.Table, accepted: pa.Table) -> npt.NDArray[np.bool_]:
    """Return which of the ``withheld`` events have the position and identity of an ``accepted`` one, which
    voids them (``fold.without_voided``). Both tables have the columns ``_PLACES``."""
    found = np.zeros(len(withheld), np.bool_)
    if not len(withheld):
        return found
    marks, mine, theirs = np.unique(_marks_of(withheld)), _marks_of(withheld), _marks_of(accepted)
    # Withheld events are few. Equal marks do not prove equal positions, so candidates are compared in full.
    nearby = marks[np.minimum(np.searchsorted(marks, theirs), len(marks) - 1)] == theirs
    if not nearby.any():
        return found
    places = accepted.filter(pa.array(nearby)).select(_PLACES.names).to_pylist()
    taken = {tuple(place.values()) for place in places}
    for row in np.flatnonzero(np.isin(mine, theirs[nearby])):
        [place] = withheld.slice(row, 1).select(_PLACES.names).to_pylist()
        found[row] = tuple(place.values()) in taken
    return found


def _marks_of(events: pa.Table) -> npt.NDArray[np.int64]:
    lsn, ordinal = (columnar.one_chunk(events[name]).to_numpy() for name in ("commit_lsn", "ordinal"))
    marks: npt.NDArray[np.int64] = lsn * np.int64(1_000_003) + ordinal
    return marks


def of_share(known: pa.Table, share: Share) -> pa.Table:
    """The events of the keys of ``share``, in one chunk."""
    if share.count == 1:
        return known
    keys = integer_keys(columnar.one_chunk(known["key"]))
    if keys is None:
        # Every task of the block reads the same rows in the same order, so all assign the same codes.
        codes = columnar.one_chunk(known["key"]).dictionary_encode().indices
        keys = pc.fill_null(codes, -1).to_numpy().astype(np.int64)
    chosen = _between(keys, share)
    return known if chosen.all() else known.filter(pa.array(chosen)).combine_chunks()


def _between(keys: npt.NDArray[np.int64], share: Share) -> npt.NDArray[np.bool_]:
    if not len(keys):
        return np.ones(0, np.bool_)
    cuts = [len(keys) * number // share.count for number in range(1, share.count)]
    bounds = np.partition(keys, cuts)[cuts]
    return np.asarray(np.searchsorted(bounds, keys, side="right") == share.number)


def _images_at(files: Sequence[LakeFile], rows: npt.NDArray[np.int64]) -> pa.Table:
    """Return the images of the events with the numbers ``rows`` (ascending) in ``files``."""
    found: list[pa.Table] = []
    held = first = 0
    for file in files:
        low, high = np.searchsorted(rows, [first, first + file.rows])
        for wanted in rows_at(file.uri, _IMAGES, rows[low:high] - first) if high > low else ():
            held += wanted.nbytes
            if held > file_rows.MAX_BYTES_IN_MEMORY:
                raise _TooLarge
            found.append(pa.Table.from_batches([wanted]))
        first += file.rows
    return pa.concat_tables(found or [_IMAGES.empty_table()]).combine_chunks()


def _bytes_of_an_image(files: Sequence[LakeFile]) -> float:
    """Return about how many bytes the images of one event have in ``files``, at least 1."""
    size = rows = 0
    for file in files:
        footer = pq.read_metadata(file.stored)
        rows += footer.num_rows
        for group in map(footer.row_group, range(footer.num_row_groups)):
            columns = map(group.column, range(group.num_columns))
            size += sum(each.total_uncompressed_size for each in columns if each.path_in_schema in IMAGES)
    return max(1.0, size / max(1, rows))


def of_block(shares: Iterable[str]) -> str:
    """Return the stretches of a block, from those of its shares. A key change in any share counts for all."""
    together: dict[str, tuple[list[int], list[int], bool]] = {}
    for part in shares:
        for window, (first, last, moves) in json.loads(part).items():
            known = together.get(window, (first, last, False))
            together[window] = (first, last, moves or known[2])
    return json.dumps(together)


def parts_agree(blocks: Iterable[str]) -> bool:
    """Whether folding in blocks gives the same rows as folding all events at once, by the stretches of each
    block.

    It does in a window where no key change left a column unsent. It also does where the blocks' stretches of
    positions do not overlap: then no block splits what the old key of a change holds (``cdc.fold``).
    """
    by_window: dict[str, list[tuple[list[int], list[int], bool]]] = {}
    for part in blocks:
        for window, (first, last, moves) in json.loads(part).items():
            by_window.setdefault(window, []).append((first, last, moves))
    for parts in by_window.values():
        if any(moves for *_, moves in parts):
            parts.sort()
            if any(above[0] <= below[1] for below, above in pairwise(parts)):
                return False
    return True


def stretches_of(events: pa.Table) -> dict[str, tuple[list[int], list[int], bool]]:
    """Return by window of ``events`` (``EVENT_COLUMNS``): first and last position, whether a key changed."""
    found = {}
    epoch, lsn = (columnar.one_chunk(events[name]).to_numpy() for name in ("epoch", "commit_lsn"))
    moved = columnar.one_chunk(events["moved_from_key"]).is_valid().to_numpy(zero_copy_only=False)
    windows = columnar.one_chunk(events["window"]).dictionary_encode()
    numbers = windows.indices.to_numpy()
    for number, window in enumerate(windows.dictionary.to_pylist()):
        here = numbers == number
        epochs, lsns = epoch[here], lsn[here]
        low, high = epochs.min(), epochs.max()
        first, last = lsns[epochs == low].min(), lsns[epochs == high].max()
        found[window] = ([int(low), int(first)], [int(high), int(last)], bool(moved[here].any()))
    return found
