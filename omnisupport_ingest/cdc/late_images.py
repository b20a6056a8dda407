"""Folding events whose images are read late: only those that decide a row, once the order says which.

Images are nearly all that an event weighs, and most events are followed by another of their key. What is
narrow comes first, is sorted, and names the events whose images are needed: the last living one of each key,
those below it where it left a column unsent, and all of a key that is not plainly ordinary. What is folded is
what ``event_fold.fold_groups`` makes of the whole events.
"""

from __future__ import annotations

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
"""The columns that are read late."""

ROW = "_row"
"""The column with the number by which the images of an event are asked for."""

_READ = "_read"
"""Whether the images of an event have been asked for."""

Numbers = npt.NDArray[np.int64]


def fold_late(
    events: pa.Table,
    images: Callable[[Numbers], pa.Table],
    table_columns: TableColumns,
    taken: Taken | None = None,
    moves: set[str] | None = None,
) -> Iterator[pa.RecordBatch]:
    """Fold ``events``, which have the columns of ``typed_fold.EVENT_COLUMNS`` but ``IMAGES``, and ``ROW``.

    ``images``: gives the columns ``IMAGES`` of the events with the numbers asked for, which rise and are
    distinct. ``taken``: counts the events. ``moves``: gets the windows in which a key change left a column
    unsent. Out: as of ``event_fold.fold_groups``.
    """
    if not events.num_rows:
        return
    if taken is not None:
        taken.events += events.num_rows
    groups = SortedGroups(events)
    needed = groups.needed_images()
    groups.events = _with_images(groups.events, images, needed).append_column(_READ, pa.array(needed))
    ordinary, rest = fold_sorted(groups, table_columns.names, table_columns.key, table_columns.defaults)
    if ordinary is not None:
        yield from ordinary.to_batches()
    if rest.num_rows:
        if moves is not None:
            moved = pc.and_not(pc.is_valid(rest["moved_from_key"]), rest["withheld"])
            moves.update(rest.filter(moved)["window"].unique().to_pylist())
        if not pc.all(rest[_READ]).as_py():
            # Whatever was found odd in an image: here every image counts.
            rest = _with_images(rest.drop_columns(list(IMAGES)), images, np.ones(rest.num_rows, np.bool_))
        place = rest.schema.get_field_index("after")
        rest = rest.set_column(place, "after", columnar.texts(rest["after"]))
        yield from fold_groups(rest.drop_columns([ROW, _READ]).to_batches(), table_columns, taken=taken)


def _with_images(
    events: pa.Table, images: Callable[[Numbers], pa.Table], needed: npt.NDArray[np.bool_]
) -> pa.Table:
    """``events`` with their images, where ``needed``; elsewhere NULL.

    New images stay where they were read, and events name them: they are long, and few are asked for again.
    """
    rows = columnar.one_chunk(events[ROW]).to_numpy()
    wanted = np.zeros(rows.max() + 1, np.bool_)
    wanted[rows[needed]] = True
    asked = np.flatnonzero(wanted)
    found = images(asked)
    numbers = (np.cumsum(wanted) - 1)[rows]
    places = pa.array(numbers.astype(np.int32), mask=~needed)
    old, new = (columnar.one_chunk(found[name]) for name in IMAGES)
    return events.append_column("before", old.take(places)).append_column(
        "after", pa.DictionaryArray.from_arrays(places, new)
    )
