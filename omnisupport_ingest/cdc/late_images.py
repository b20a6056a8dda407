"""Fold events and read only the row images that decide a row.

Images are nearly all of an event's size, and most events are followed by another event of their key. So the
narrow columns are read and sorted first. They name the events whose images are needed: the last living event
of each key, the events below it where it left a column unsent, and all events of a key that is not ordinary.
The result is that of ``event_fold.fold_groups`` on whole events.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from omnisupport_ingest.cdc import columnar
from omnisupport_ingest.cdc.event_fold import TableColumns, fold_groups
from omnisupport_ingest.cdc.ordinary import Taken
from omnisupport_ingest.cdc.ordinary_fold import SortedGroups, fold_sorted

IMAGES = ("before", "after")
"""The columns that are read later."""

ROW = "_row"
"""Column with the number by which the images of an event are read."""

_READ = "_read"
"""Column that says whether the images of an event were read."""

Numbers = npt.NDArray[np.int64]


def fold_late(
    events: pa.Table,
    images: Callable[[Numbers], pa.Table],
    table_columns: TableColumns,
    taken: Taken | None = None,
    moves: set[str] | None = None,
    *,
    most_images: int = sys.maxsize,
) -> Iterator[list[pa.RecordBatch]]:
    """Fold ``events`` in parts, by window and key, and read the images that are needed.

    Args:
        events: columns of ``typed_fold.EVENT_COLUMNS`` without ``IMAGES``, and ``ROW``.
        images: reads the columns ``IMAGES`` of the events with the given numbers, which are ascending and
            distinct.
        taken: counter to which the events are added.
        moves: set to which the windows are added in which a key change left a column unsent.
        most_images: about how many events' images are held at a time: those of a part.

    Returns:
        The folded rows of each part, as ``event_fold.fold_groups`` returns them. Parts come in the order of
            their windows and keys; keys have that of numbers if all are short ones, else that of their texts.
    """
    if not events.num_rows:
        return
    if taken is not None:
        taken.events += events.num_rows
    groups = SortedGroups(events)
    for part, needed in groups.parts(groups.needed_images(), most_images):
        part.events = _with_images(part.events, images, needed).append_column(_READ, pa.array(needed))
        ordinary, rest = fold_sorted(part, table_columns.names, table_columns.key, table_columns.defaults)
        folded: list[pa.RecordBatch] = [] if ordinary is None else ordinary.to_batches()
        if rest.num_rows:
            if moves is not None:
                moved = pc.and_not(pc.is_valid(rest["moved_from_key"]), rest["withheld"])
                moves.update(rest.filter(moved)["window"].unique().to_pylist())
            folded += fold_groups(_whole(rest, images).to_batches(), table_columns, taken=taken)
        yield folded


def _whole(events: pa.Table, images: Callable[[Numbers], pa.Table]) -> pa.Table:
    """Return ``events`` with all of their images."""
    if not pc.all(events[_READ]).as_py():
        # An image was not flat, or the group is odd: read every image.
        events = _with_images(events.drop_columns(list(IMAGES)), images, np.ones(events.num_rows, np.bool_))
    index = events.schema.get_field_index("after")
    events = events.set_column(index, "after", columnar.texts(events["after"]))
    return events.drop_columns([ROW, _READ])


def _with_images(
    events: pa.Table, images: Callable[[Numbers], pa.Table], needed: npt.NDArray[np.bool_]
) -> pa.Table:
    """Add the images of the ``needed`` events; the others get NULL.

    ``after`` is dictionary-encoded: images are long, so they stay where they were read.
    """
    rows = columnar.one_chunk(events[ROW]).to_numpy()
    wanted = np.zeros(rows.max() + 1, np.bool_)
    wanted[rows[needed]] = True
    numbers_read = np.flatnonzero(wanted)
    found = images(numbers_read)
    numbers = (np.cumsum(wanted) - 1)[rows]
    indices = pa.array(numbers.astype(np.int32), mask=~needed)
    old, new = (columnar.one_chunk(found[name]) for name in IMAGES)
    return events.append_column("before", old.take(indices)).append_column(
        "after", pa.DictionaryArray.from_arrays(indices, new)
    )
