"""Removing the values of withheld events that a contract no longer keeps; the events stay.

Of a withheld event the fold needs only the key, the position and the names of the columns; no row shows its
values. So once the window is sealed and nobody can release the event, removing its values changes no table
above. Before that, a replay from raw would bring the same values into quarantine again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from omnisupport_ingest.cdc.images import read_image
from omnisupport_ingest.cdc.judging import OPEN
from omnisupport_ingest.contracts.encrypted_images import MARK
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.json_values import compact
from omnisupport_ingest.lake.layout import LakeFile
from omnisupport_ingest.layers.events.quarantine_files import QuarantineFiles, withheld_of
from omnisupport_ingest.layers.events.rewriting import Rewriting, rewrite
from omnisupport_ingest.layers.removed import QUARANTINE
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.retention.rules import Answer, Verdict

_IMAGES = ("before", "after")
_DELIVERED = "envelope"
"""The column with the text of an event as it was delivered, for events that came as lines of a file."""

_OF_ROWS = pa.array(["t", "b"])
"""Operations whose images are not rows: the ``after`` of a snapshot end is a key range."""

_DOOMED_BY = (*_IMAGES, _DELIVERED, "op", "source_schema", "source_table")

_WITHOUT_VALUES = r'^\{("(?:[^"\\]|\\.)*":null,?)*\}$'
"""Matches an image that names columns without any value."""


@dataclass(frozen=True, slots=True)
class WithheldValues:
    """Values to remove: of ``events`` of ``table`` in the quarantine of ``window``, in ``files`` to rewrite.

    ``keep``: how long the contract keeps them. ``undecided``: events without a decision; they came after the
    window was sealed, when none was possible. ``landed_until``: when the last of the events landed.
    """

    table: str
    window: str
    keep: timedelta
    files: int
    events: int
    undecided: int
    landed_until: datetime


def withheld_values(
    files: QuarantineFiles, contract: TableContract, window: str, keep: timedelta
) -> WithheldValues | None:
    """Return the events of ``contract`` in quarantine of ``window`` that have values; None if there are none.

    Raises ``EventsGone`` if a quarantine file is missing on disk.
    """
    found, undecided, landed = 0, 0, list[datetime]()
    of_table = withheld_of(files.of(window), contract)
    with_values = 0
    for file in of_table:
        rows = _read(file, [*_DOOMED_BY, "review_state", "landed_at"])
        rows = rows.filter(_doomed(rows, [contract]))
        if rows.num_rows:
            with_values += 1
            found += rows.num_rows
            undecided += pc.sum(pc.equal(rows["review_state"], OPEN)).as_py() or 0
            landed.append(pc.max(rows["landed_at"]).as_py())
    if not found:
        return None
    return WithheldValues(contract.name, window, keep, with_values, found, undecided, max(landed))


def refused_values(window: str, of: str) -> Verdict:
    """The verdict that values of the table ``of`` stay, because ``window`` is not sealed."""
    why = f"raw has its events: a replay would quarantine those of {of} again, with their values"
    return Verdict(QUARANTINE, window, Answer.REFUSED, why)


def remove_values(
    workspace: Workspace, source: str, wanted: Mapping[str, Collection[TableContract]], run_id: str
) -> int:
    """Rewrite the quarantine files of windows without the values of some tables; return how many were
    rewritten.

    ``wanted``: window → the contracts of these tables. A second call changes nothing. The replaced files stay
    on disk until they are swept as old files. The net changes of the windows are folded again, from the same
    events.
    """
    rewritings = {
        window: Rewriting(partial(_without_values, contracts=contracts))
        for window, contracts in wanted.items()
    }
    return rewrite(workspace, source, wanted, lambda _: rewritings, run_id)


def _without_values(rows: pa.Table, contracts: Collection[TableContract]) -> pa.Table | None:
    """Return the ``rows`` of quarantine without the values of the tables of ``contracts``; None without any.

    The hashes that identify an event stay, as they do when it is protected or erased: a further copy of it
    must be recognized as the same event.
    """
    doomed = pc.fill_null(_doomed(rows, contracts), False)
    if not pc.any(doomed).as_py():
        return None
    for name in _IMAGES:
        place, images = rows.column_names.index(name), rows[name]
        emptied = [
            _emptied(text) if gone else text
            for text, gone in zip(images.to_pylist(), doomed.to_pylist(), strict=True)
        ]
        rows = rows.set_column(place, rows.schema.field(name), pa.array(emptied, images.type))
    place, delivered = rows.column_names.index(_DELIVERED), rows[_DELIVERED]
    left = pc.if_else(doomed, pa.scalar(None, delivered.type), delivered)
    return rows.set_column(place, rows.schema.field(_DELIVERED), left)


def _emptied(text: str | None) -> str | None:
    if text is None or MARK in text:
        return text
    image = read_image(text)
    # A text that is no image names no column, so nothing of it is kept.
    if image is None:
        return ""
    return compact(dict.fromkeys(image))


def _doomed(rows: pa.Table, contracts: Collection[TableContract]) -> pa.ChunkedArray:
    """Return which of ``rows`` belong to tables of ``contracts`` and have a value to remove.

    An image that stays encrypted because its key was destroyed has no readable value.
    """
    mine = pa.chunked_array([pa.array([False] * rows.num_rows, pa.bool_())])
    for each in contracts:
        here = pc.and_(
            pc.equal(rows["source_schema"], each.schema), pc.equal(rows["source_table"], each.table)
        )
        mine = pc.or_(mine, here)
    has = pc.is_valid(rows[_DELIVERED])
    for name in _IMAGES:
        image = rows[name]
        bare = pc.or_(pc.equal(image, ""), pc.match_substring_regex(image, _WITHOUT_VALUES))
        bare = pc.or_(bare, pc.match_substring(image, MARK))
        has = pc.or_(has, pc.fill_null(pc.invert(bare), False))
    return pc.and_(pc.and_(mine, has), pc.invert(pc.is_in(rows["op"], _OF_ROWS)))


def _read(file: LakeFile, columns: list[str]) -> pa.Table:
    return pq.ParquetFile(file.uri, pre_buffer=False).read(columns=columns)
