"""Key changes whose new row came whole, told by whole columns.

The fold takes a key change as two events: the ``c`` of the new key, which names the old one, and a copy of it
under the old key, which tells that key where its life ended, so that the new one can take from there what was
not sent (``LEFT``). Nearly always all was sent. Then nothing is ever taken, the copy says nothing, and the
``c`` begins a life like any other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from omnisupport_ingest.cdc import columnar
from omnisupport_ingest.contracts.flat_images import read_flat

LEFT = "left"
"""Operation of a row that tells the old key of a key change that its life ended: the ``c`` again, under
the old key. It is in no table; the fold makes it for itself."""


def settled(events: pa.Table, plain: Sequence[str]) -> tuple[pa.Table, npt.NDArray[np.bool_] | None]:
    """``events`` as if those that brought all of ``plain``, the columns beside the key, had changed no key;
    and which of the rows stay, or None if all do.

    ``events``: as ``fold.to_fold`` gives them, with the images at least of those that changed a key.
    """
    moved = pc.and_not(events["moved_from_key"].is_valid(), events["withheld"])
    rows = np.flatnonzero(moved.to_numpy())
    if not len(rows) or not plain:
        return events, None
    images = read_flat(columnar.texts(events["after"], pa.array(rows)), plain)
    whole = images.proven
    for name in plain:
        whole = pc.and_(whole, images.sent[name])
    complete = np.zeros(events.num_rows, np.bool_)
    complete[rows[whole.to_numpy(zero_copy_only=False)]] = True
    if not complete.any():
        return events, None
    place = events.schema.get_field_index("moved_from_key")
    none = pa.scalar(None, pa.string())
    events = events.set_column(
        place, events.schema.field(place), pc.if_else(pa.array(complete), none, events["moved_from_key"])
    )
    left = pc.equal(events["op"], LEFT).to_numpy()
    stay = ~(complete & left)
    return events.filter(pa.array(stay)).combine_chunks(), stay
