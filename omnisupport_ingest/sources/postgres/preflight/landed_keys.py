"""Whether the contracts still give each table the key that its landed events bear."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.landing.manifest import Manifest
from omnisupport_ingest.landing.names import chunk_batch_id, chunk_prefix
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.sources.postgres.preflight.findings import Finding


def landed_key_findings(store: LandingStore, tables: Sequence[TableContract]) -> tuple[Finding, ...]:
    """A finding for each table whose contract has another key, or the same in another order.

    An event bears the values of its key alone: under another key they would be those of other rows.
    """
    landed: dict[tuple[str, str], tuple[str, ...]] = {}
    for batch in _that_describe(store):
        for relation in batch.relations:
            if relation.key_columns:
                landed.setdefault((relation.schema, relation.table), relation.key_columns)
    return tuple(
        _changed(table, landed[table.schema, table.table])
        for table in tables
        if landed.get((table.schema, table.table), table.key) != table.key
    )


def _that_describe(store: LandingStore) -> Iterator[Manifest]:
    """The end of the stream, and the first chunk of each snapshot that is finished, the newest first."""
    epoch = store.current_epoch()
    last = store.last_stream_until(epoch.number) if epoch is not None else None
    if last is not None:
        yield last
    chunks = [name for each in store.epoch_standings() for name in store.batch_ids(chunk_prefix(each.epoch))]
    for boundary_id in reversed([name for name in chunks if name.endswith("-boundary")]):
        boundary = store.read(boundary_id)
        if boundary.chunk is not None:
            first = chunk_batch_id(boundary.epoch, boundary.chunk.snapshot_id, boundary.chunk.table, 0, 1)
            if store.exists(first):
                yield store.read(first)


def _changed(table: TableContract, landed: tuple[str, ...]) -> Finding:
    return Finding(
        "landed_key",
        f"The contract {table.path} gives {table.full_name} the key ({', '.join(table.key)}), and what has "
        f"landed of it has the key ({', '.join(landed)}).",
        f"Give the contract the key ({', '.join(landed)}) again. To capture the table under another key, "
        "begin with a home of its own (OMNISUPPORT_HOME): the events that have landed cannot be told by it.",
        table=table.name,
    )
