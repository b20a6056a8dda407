"""Key changes whose new row carries every column, found by whole columns.

The fold sees a key change as two events: the ``c`` of the new key, which names the old key, and a copy of it
under the old key (``OLD_KEY_ENDED``). The copy keeps the ended life of the old key, so that the new key can
take columns from it that were not sent. Nearly always every column was sent. Then the copy is not needed, and
the ``c`` begins a life like any other. Before the fold, this module drops such copies and removes the old key
from their ``c``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from omnisupport_ingest.cdc import columnar
from omnisupport_ingest.contracts.flat_images import read_flat

OLD_KEY_ENDED = "left"
"""Operation of the copy of a key change's ``c`` under the old key, whose life ended. Only the fold makes and
uses it; no table holds it."""


def without_complete_key_changes(
    events: pa.Table, non_key: Sequence[str]
) -> tuple[pa.Table, npt.NDArray[np.bool_] | None]:
    """Treat key changes that carry every non-key column as events that changed no key.

    Args:
        events: the columns of ``fold.to_fold``; events that changed a key have their images.
        non_key: the columns that are not in the key.

    Returns:
        ``events`` without ``moved_from_key`` in such events and without their copies under the old key; and a
        mask of the rows that stayed, or None if all did.
    """
    moved = pc.and_not(events["moved_from_key"].is_valid(), events["withheld"])
    rows = np.flatnonzero(moved.to_numpy())
    if not len(rows) or not non_key:
        return events, None
    images = read_flat(columnar.texts(events["after"], pa.array(rows)), non_key)
    whole = images.proven
    for name in non_key:
        whole = pc.and_(whole, images.sent[name])
    complete = np.zeros(events.num_rows, np.bool_)
    complete[rows[whole.to_numpy(zero_copy_only=False)]] = True
    if not complete.any():
        return events, None
    index = events.schema.get_field_index("moved_from_key")
    none = pa.scalar(None, pa.string())
    events = events.set_column(
        index, events.schema.field(index), pc.if_else(pa.array(complete), none, events["moved_from_key"])
    )
    left = pc.equal(events["op"], OLD_KEY_ENDED).to_numpy()
    stay = ~(complete & left)
    return events.filter(pa.array(stay)).combine_chunks(), stay
