"""Define the rows of ``dim_<table>`` as they are stored: what people read, and the state of the fold beside
it.

The column ``_cdc_state`` keeps what only a later merge needs. So net changes are merged into the rows of
their keys (``updating``), and no other row is read. Net changes are sent to these rows in the same schema
(``from_folded``), with NULL in the columns that follow from the merge.

``_cdc_state`` has the fields ``first``, ``alive``, ``life_start``, ``deletes``, ``doubt``, ``vouched``,
``column_positions`` and ``unresolved``, which ``folded`` describes, and ``refold``: the row depends on more
than its own state (the life of another key, a delete in quarantine), so it must be folded again from the net
changes of all windows.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql import types as T

from omnisupport_ingest.cdc import columnar
from omnisupport_ingest.cdc.current import current_type
from omnisupport_ingest.cdc.envelope import POSITION_TYPE
from omnisupport_ingest.cdc.event_fold import KEY
from omnisupport_ingest.cdc.folded import DELETE_TYPE
from omnisupport_ingest.cdc.row_hashes import row_hashes
from omnisupport_ingest.contracts.load import TableContract

STATE = "_cdc_state"
"""Column with the state of the fold."""

_FOLD_STATE = (
    ("first", POSITION_TYPE),
    ("alive", POSITION_TYPE),
    ("life_start", POSITION_TYPE),
    ("deletes", T.ArrayType(DELETE_TYPE)),
    ("doubt", POSITION_TYPE),
    ("vouched", POSITION_TYPE),
    ("column_positions", T.MapType(T.StringType(), POSITION_TYPE)),
    ("unresolved", T.ArrayType(T.StringType())),
)
_REFOLD = "refold"

STATE_TYPE = T.StructType(
    [
        *(T.StructField(name, of_type) for name, of_type in _FOLD_STATE),
        T.StructField(_REFOLD, T.BooleanType()),
    ]
)

_ORIGIN_COLUMNS = frozenset({"_cdc_batch_id", "_cdc_ingested_at"})
"""Columns that say where a row came from, not what it is: no hash includes them."""

_SHARED_COLUMNS = (
    "_cdc_op",
    "_cdc_source_ts",
    "_cdc_updated_at",
    "_cdc_exact",
    "_cdc_batch_id",
    "_cdc_ingested_at",
)
"""Columns that folded rows and stored rows share."""


def stored_type(contract: TableContract) -> T.StructType:
    """Schema of the stored current state: ``current_type`` and ``_cdc_state``."""
    return T.StructType([*current_type(contract).fields, T.StructField(STATE, STATE_TYPE)])


def from_folded(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return folded rows of kind ``key`` as stored rows (``schema``), to be merged with the rows of their
    keys.

    The hash, and whether a row is deleted, are NULL: they follow from the merge.
    """
    of_keys = columnar.one_chunk(pc.equal(rows["_cdc_kind"], KEY))
    rows = columnar.filter_slices(rows, of_keys.to_numpy(zero_copy_only=False)).combine_chunks()
    last = columnar.one_chunk(rows["_cdc_position"])
    values = {
        "_cdc_epoch": pc.struct_field(last, 0),
        "_cdc_commit_lsn": pc.struct_field(last, 1),
        "_cdc_ordinal": pc.struct_field(last, 2),
        "_cdc_row_hash": pa.nulls(rows.num_rows, pa.int64()),
        "_cdc_unresolved": pa.nulls(rows.num_rows, schema.field("_cdc_unresolved").type),
        STATE: state_column(rows, schema),
    }
    values |= {name: rows[name] for name in rows.column_names if name not in values}
    arrays = [
        values[field.name].cast(field.type) if field.name in values else pa.nulls(rows.num_rows, field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(arrays, schema=schema)


def state_of_fold(refold: Column) -> Column:
    """Return the ``_cdc_state`` of a folded row as a Spark column."""
    return F.struct(
        *(F.col(f"_cdc_{name}").cast(of_type).alias(name) for name, of_type in _FOLD_STATE),
        refold.alias(_REFOLD),
    )


def to_folded(rows: pa.Table, columns: tuple[str, ...]) -> pa.Table:
    """Return stored rows as folded rows without a window, with the columns of ``folded_type``.

    ``columns``: the contract's.
    """
    count = rows.num_rows
    state = columnar.one_chunk(rows[STATE])
    state_columns = {f"_cdc_{name}": _field(state, name) for name, _ in _FOLD_STATE}
    return pa.table(
        {
            "window": pa.array([""]).take(pa.array(np.zeros(count, np.int64))),
            **{name: rows[name] for name in columns},
            "_cdc_kind": pa.array([KEY]).take(pa.array(np.zeros(count, np.int64))),
            "_cdc_key": rows["_cdc_key"],
            "_cdc_ended_at": pa.nulls(count, columnar.POSITION),
            "_cdc_position": position_of(rows),
            "_cdc_moved_from_key": pa.nulls(count, pa.string()),
            "_cdc_scope": pa.nulls(count, pa.string()),
            "_cdc_row_hash": pa.nulls(count, pa.int64()),
            **{name: rows[name] for name in _SHARED_COLUMNS},
            **state_columns,
        }
    )


def position_of(rows: pa.Table) -> pa.Array:
    """Return the position of each row's last event."""
    return columnar.position_column(rows["_cdc_epoch"], rows["_cdc_commit_lsn"], rows["_cdc_ordinal"])


def state_column(folded: pa.Table, schema: pa.Schema) -> pa.Array:
    """Return the ``_cdc_state`` of folded rows. ``schema``: of stored rows."""
    of_state = schema.field(STATE).type
    arrays = [
        columnar.one_chunk(folded[f"_cdc_{field.name}"]).cast(field.type)
        if field.name != _REFOLD
        else pa.array(np.zeros(folded.num_rows, np.bool_))
        for field in of_state
    ]
    return pa.StructArray.from_arrays(arrays, fields=list(of_state))


def first_of(rows: pa.Table) -> pa.Array:
    """Return the lowest position folded into each row."""
    return _field(columnar.one_chunk(rows[STATE]), "first")


def life_start_of(rows: pa.Table) -> pa.Array:
    """Return the position at which the life of each row began."""
    return _field(columnar.one_chunk(rows[STATE]), "life_start")


def must_refold(rows: pa.Table) -> pa.Array:
    """Return whether each row depends on more than its own state."""
    return _field(columnar.one_chunk(rows[STATE]), _REFOLD)


def _field(state: pa.StructArray, name: str) -> pa.Array:
    return pc.struct_field(state, name)


def hashes_in(rows: pa.Table) -> npt.NDArray[np.int64]:
    """Return the hashes that ``rows`` hold."""
    found: npt.NDArray[np.int64] = columnar.one_chunk(rows["_cdc_row_hash"]).to_numpy()
    return found


def with_hashes(rows: pa.Table) -> pa.Table:
    """Return ``rows`` with their hashes in ``_cdc_row_hash``."""
    index = rows.schema.get_field_index("_cdc_row_hash")
    return rows.set_column(index, rows.schema.field(index), pa.array(stored_hashes(rows)))


def stored_hashes(rows: pa.Table) -> npt.NDArray[np.int64]:
    """Return the hash of each row (``row_hashes``), without the columns that say where it came from and
    without the state."""
    left_out = {*_ORIGIN_COLUMNS, STATE, "_cdc_row_hash"}
    return row_hashes(rows.select([name for name in rows.column_names if name not in left_out]))
