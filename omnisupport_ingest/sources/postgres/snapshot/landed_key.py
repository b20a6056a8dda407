"""The key with which the changes of a table have landed, and the change to another key.

An event has the values of its key alone, so what has landed names its rows by the key that it landed with. A
contract with another key takes effect in three steps. The table is left out: its changes land without a key.
A person has it read again, and capture notes that the new key begins here (``begin_keys``). When the snapshot
end has landed, the new key comes into force (``settle_keys``), and nothing with the former one counts any
more (``contracts.landed_keys``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from omnisupport_ingest.contracts.landed_keys import KeysOfTable, LandedKeys
from omnisupport_ingest.contracts.model import KeyEra, TableContract
from omnisupport_ingest.contracts.names import TableName
from omnisupport_ingest.landing.epochs import EpochRecord
from omnisupport_ingest.landing.manifest import Manifest
from omnisupport_ingest.landing.names import chunk_prefix, first_chunk_of, is_snapshot_end
from omnisupport_ingest.landing.schema_changes import SchemaChanges, renamed_key
from omnisupport_ingest.landing.snapshot_plans import SnapshotPlans
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.sources.postgres.slot.home_slot import end_of_chain
from omnisupport_ingest.sources.postgres.snapshot.chunk_reader import Ordinals


def other_landed_keys(store: LandingStore, tables: Sequence[TableContract]) -> dict[str, tuple[str, ...]]:
    """Return, by contract name, the key with which each table landed last, if its contract has another one.

    The order of the columns counts. A key column that was only renamed at the source is the same column.
    """
    keys = {each.name: each_keys.newest for each, each_keys in _keys_of(store, tables)}
    others = {each.name: keys[each.name] for each in tables if each.key != keys[each.name]}
    changes = SchemaChanges(store.folder).read().changes if others else ()
    wanted = {each.name: each.key for each in tables}
    return {name: key for name, key in others.items() if wanted[name] != renamed_key(changes, name, key)}


def begin_keys(store: LandingStore, epoch: EpochRecord, tables: Sequence[TableContract]) -> None:
    """Record that changes of ``tables`` land with their contracts' keys from the end of the stream on.

    If the key is another one than before, none of their changes may have landed with a key since they were
    left out, and every snapshot of them must be below the end (``behind_their_snapshots``).
    """
    others = other_landed_keys(store, tables)
    now = dict[str, KeysOfTable]()
    for each, keys in _keys_of(store, tables):
        now[each.full_name] = keys
        if each.name in others:
            # Rows of an earlier snapshot may have been read at this very LSN.
            ordinal = Ordinals(store, epoch.number).take()
            era = KeyEra(each.key, epoch.number, end_of_chain(store, epoch).end, ordinal)
            now[each.full_name] = keys.begin(era)
        elif each.key != keys.newest:
            now[each.full_name] = keys.renamed(each.key)
    record = LandedKeys(store.folder)
    if {**record.all(), **now} != record.all():
        record.update(lambda _: now)


def behind_their_snapshots(store: LandingStore, epoch: EpochRecord, names: Collection[str]) -> dict[str, str]:
    """Return why tables called ``names`` cannot take another key yet, by name: the stream has not passed all
    rows that a snapshot of them read in ``epoch`` with the former key."""
    plans = [each for each in SnapshotPlans(store.folder).all(epoch.number) if each.table in names]
    if not plans:
        return {}
    end, waiting = end_of_chain(store, epoch).end, dict[str, str]()
    ids = {each.snapshot_id for each in plans}
    for batch_id in store.batch_ids(chunk_prefix(epoch.number)):
        chunk = store.read(batch_id).chunk if any(each in batch_id for each in ids) else None
        if chunk is not None and chunk.table in names and chunk.high > end:
            waiting[chunk.table] = (
                f"Its key has changed. It is read by the new one as soon as the stream, which is at {end}, "
                f"has passed what was read of it with the former key ({chunk.high})."
            )
    return waiting


def waiting_tables(store: LandingStore, tables: Iterable[TableContract]) -> set[str]:
    """Return the names of those of ``tables`` that have still to be read by the key with which they land."""
    keys = LandedKeys(store.folder).all()
    return {each.name for each in tables if each.full_name in keys and keys[each.full_name].waits}


def tables_without_read(store: LandingStore, tables: Iterable[TableContract]) -> set[str]:
    """Return the names of those of ``waiting_tables`` that no snapshot which has begun will read."""
    waiting, epoch = waiting_tables(store, tables), store.current_epoch()
    plans = SnapshotPlans(store.folder).all(epoch.number) if waiting and epoch is not None else []
    begun = {each.table for each in plans if each.scope is None and not store.exists(each.boundary_id)}
    return waiting - begun


def settle_keys(store: LandingStore, tables: Iterable[TableContract]) -> None:
    """Put the newest key of each table in force whose snapshot by it has ended."""
    record = LandedKeys(store.folder)
    pending = {name: each.eras[-1] for name, each in record.all().items() if each.waits}
    ended = {
        each.full_name
        for each in tables
        if each.full_name in pending and _was_read(store, each.name, pending[each.full_name])
    }
    if ended:
        record.update(lambda known: {name: known[name].settled for name in ended})


def _was_read(store: LandingStore, table: str, era: KeyEra) -> bool:
    """Whether a snapshot of all of ``table`` has ended that was read in ``era``."""
    plans = SnapshotPlans(store.folder)
    for epoch in (each.epoch for each in store.epoch_standings() if each.epoch >= era.epoch):
        for plan in plans.all(epoch):
            # A compared snapshot landed no rows that are in the lake, which has them by the former key.
            if plan.table != table or plan.scope is not None or plan.compared:
                continue
            end = store.read(plan.boundary_id).chunk if store.exists(plan.boundary_id) else None
            begins = era.epoch, era.commit_lsn, era.ordinal
            if end is not None and (plan.epoch, end.low, plan.boundary_ordinal) >= begins:
                return True
    return False


def _keys_of(
    store: LandingStore, tables: Sequence[TableContract]
) -> Iterator[tuple[TableContract, KeysOfTable]]:
    """Yield each table with its keys: as recorded, else as the newest batches describe them, and as its
    contract says if nothing has landed of it."""
    recorded = LandedKeys(store.folder).all()
    unknown = {each.table_name for each in tables if each.full_name not in recorded}
    landed = _landed_keys(store, unknown) if unknown else {}
    for each in tables:
        first = KeysOfTable.first(landed.get(each.table_name, each.key))
        yield each, recorded.get(each.full_name, first)


def _landed_keys(store: LandingStore, tables: Collection[TableName]) -> dict[TableName, tuple[str, ...]]:
    landed: dict[TableName, tuple[str, ...]] = {}
    for batch in _describing_batches(store):
        for relation in batch.relations:
            if relation.key_columns:
                landed.setdefault((relation.schema, relation.table), relation.key_columns)
        # Older batches would add nothing.
        if landed.keys() >= set(tables):
            break
    return landed


def _describing_batches(store: LandingStore) -> Iterator[Manifest]:
    """Yield batches that describe tables, newest first: the last batch of the stream, then the first chunk of
    each finished snapshot."""
    epoch = store.current_epoch()
    last = store.last_stream_until(epoch.number) if epoch is not None else None
    if last is not None:
        yield last
    chunks = [name for each in store.epoch_standings() for name in store.batch_ids(chunk_prefix(each.epoch))]
    for end_id in reversed([name for name in chunks if is_snapshot_end(name)]):
        first = first_chunk_of(end_id)
        if store.exists(first):
            yield store.read(first)
