"""Rebuilds the rows of keys whose windows were made again, from the net changes of all windows.

Usually a row depends on nothing but the net changes of its key. Then Spark tasks find these, each in a share
of the files, and hand them to the update of the dimension, which folds them (``cdc.updating.AGAIN``).
Otherwise ``tied_keys`` folds the keys by joins.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession

from omnisupport_ingest.cdc import columnar
from omnisupport_ingest.cdc.event_fold import ENDED
from omnisupport_ingest.cdc.fold import table_columns_of
from omnisupport_ingest.cdc.folded import folded_type
from omnisupport_ingest.cdc.row_fold import merged_tables
from omnisupport_ingest.cdc.stored import from_folded, stored_type
from omnisupport_ingest.cdc.updating import AGAIN, CHANGE, GONE
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.lake.file_rows import live_pieces
from omnisupport_ingest.lake.file_tasks import Output, in_shares, made_by_tasks
from omnisupport_ingest.lake.layout import WHOLE_TABLE, LakeFile
from omnisupport_ingest.lake.schema import arrow_schema
from omnisupport_ingest.lake.table_spec import TablePlace
from omnisupport_ingest.lake.wanted_rows import Wanted, wanted_in
from omnisupport_ingest.layers.workspace import order_of

_KEY = pa.schema([pa.field("_cdc_key", pa.string())])

MOST_ROWS = 100_000
"""Most added or removed net changes for which tasks look up all net changes of their keys. Each task reads
these keys."""

_MOST_BYTES = 256 * 1024 * 1024
"""Most bytes of rows that are sent. Each task that finds a key sends it, and values may be long."""


@dataclass(frozen=True)
class KeysToMake:
    """The keys in ``changed``: files of net changes that rebuilt windows have lost or gained."""

    contract: TableContract
    changed: tuple[LakeFile, ...]

    @property
    def are_few(self) -> bool:
        return sum(file.rows for file in self.changed) <= MOST_ROWS

    @cached_property
    def keys(self) -> pa.Array:
        """The keys, each once. Truncates and snapshot ends have none."""
        found = [batch.column(0) for file in self.changed for batch in live_pieces(file, _KEY)]
        return pc.unique(pa.chunked_array(found, pa.string())).drop_null()

    @cached_property
    def wanted(self) -> Wanted:
        """Selects the net changes of these keys, and all that tie keys together."""
        keys = tuple(self.keys.to_pylist())
        return Wanted("_cdc_key", keys, "_cdc_moved_from_key", {"_cdc_kind": (ENDED,)}, keyless=False)

    def mine_in(self, file: LakeFile) -> pa.Table | None:
        """Return the net changes of the keys in ``file``; None if one of them ties its key to another key, or
        is in doubt."""
        found = []
        for rows in wanted_in(file, self.wanted, self._folded):
            mine = pc.is_in(rows["_cdc_key"], value_set=self.keys)
            from_mine = pc.is_in(rows["_cdc_moved_from_key"], value_set=self.keys)
            ties = pc.or_(pc.equal(rows["_cdc_kind"], ENDED), pc.is_valid(rows["_cdc_moved_from_key"]))
            in_doubt = pc.and_(mine, pc.is_valid(rows["_cdc_doubt"]))
            if pc.any(pc.or_(pc.and_(ties, pc.or_(mine, from_mine)), in_doubt)).as_py():
                return None
            # Drop the ties between other keys, of which there may be many.
            found.append(rows if pc.all(mine).as_py() else rows.filter(mine))
        return pa.Table.from_batches(found, self._folded).combine_chunks()

    def merged(self, rows: pa.Table) -> pa.Table:
        """Return rows for the update: ``rows`` of any windows folded to one row for each key."""
        place = rows.schema.get_field_index("window")
        once = rows.set_column(place, "window", pa.repeat(pa.scalar(""), len(rows))).combine_chunks()
        parts = [self._folded.empty_table()]
        if len(once):
            parts += merged_tables(once, table_columns_of(self.contract))
        sent = from_folded(columnar.concat(parts), self._stored)
        return sent.append_column(CHANGE, pa.repeat(pa.scalar(AGAIN), len(sent)))

    def forgotten(self) -> pa.Table:
        """Return rows for the update that discard the present row of each key."""
        order, count = order_of(self.contract), len(self.keys)
        known = {"_cdc_key": self.keys, CHANGE: pa.repeat(pa.scalar(GONE), count)}
        if order.whole_numbers:
            known[order.column] = pa.array([_whole_number(key) for key in self.keys.to_pylist()], pa.int64())
        columns = [
            known[field.name].cast(field.type) if field.name in known else pa.nulls(count, field.type)
            for field in self._sent
        ]
        return pa.Table.from_arrays(columns, schema=self._sent)

    @cached_property
    def _folded(self) -> pa.Schema:
        return arrow_schema(folded_type(self.contract), without=())

    @cached_property
    def _stored(self) -> pa.Schema:
        return arrow_schema(stored_type(self.contract), without=())

    @property
    def _sent(self) -> pa.Schema:
        return self._stored.append(pa.field(CHANGE, pa.string()))


@contextmanager
def made_again(
    spark: SparkSession, dimension: TablePlace, changed: KeysToMake, net_changes: Sequence[LakeFile]
) -> Iterator[tuple[LakeFile, ...] | None]:
    """Yield files of rows with ``CHANGE`` from which the update rebuilds the rows of the keys of ``changed``.

    ``net_changes``: all files of the net changes. The result is kept with the drafts of the ``dimension``
    until the ``with`` block ends. Yields None if it would be too large, or if a row may depend on more than
    the net changes of its key: on other keys (a key change that left a column unsent), or on a person (a
    quarantined delete).
    """
    # The first task also reports the keys that no file has any more.
    shares = in_shares(net_changes) or [[]]
    works = [
        partial(_sent_again, files=share, changed=changed, forgets=number == 0)
        for number, share in enumerate(shares)
    ]
    with made_by_tasks(spark, dimension, works, unit="again", generation={}) as made:
        if made is None:
            yield None
            return
        rows, size = (sum(of_task) for of_task in zip(*map(json.loads, made.results), strict=True))
        if size > _MOST_BYTES:
            yield None
            return
        files = max(1, len(made.aside))
        yield tuple(
            LakeFile(path, path, WHOLE_TABLE, (), rows // files, size // files) for path in made.aside
        )


def _sent_again(
    output: Output, files: Sequence[LakeFile], changed: KeysToMake, *, forgets: bool
) -> str | None:
    """Put aside the net changes of the keys in ``files``, merged, for the update; return the number of rows
    and bytes as JSON. Returns None if ``mine_in`` does.

    ``forgets``: also put aside the rows that discard the present row of each key.
    """
    found = []
    for file in files:
        rows = changed.mine_in(file)
        if rows is None:
            return None
        found.append(rows)
    sent = [changed.merged(columnar.concat(found))] if found else []
    if forgets:
        sent.append(changed.forgotten())
    rows = order_of(changed.contract).sort(columnar.concat(sent))
    output.put_aside(rows)
    return json.dumps([len(rows), rows.nbytes])


def _whole_number(key: str) -> int | None:
    try:
        return int(json.loads(key)[0])
    except ValueError:
        return None
