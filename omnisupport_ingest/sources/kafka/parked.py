"""Partitions that wait before a row of a parked table: a note in the landing folder of the source names them.

A table is parked while its contract has another key than what has landed of it (``contracts.landed_keys``).
A partition that has a row of it stops there, whatever stands behind: its offset cannot pass the row, or the
row would be lost. The note decides nothing of what has landed. It spares the next sync from reading such
partitions again, lets people see which they are, and keeps the offsets of a topic of which no manifest tells
yet, so that what retention takes of it meanwhile is a gap. Where it is lost or wrong, the partition is read
again and stops at the same record.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from omnisupport_ingest.contracts.landed_keys import LandedKeyChanged, LandedKeys
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.foreign import Unreadable
from omnisupport_ingest.landing.manifest import OffsetSpan
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.records import decode_note, encode, read_note
from omnisupport_ingest.sources.kafka.offsets import Partition, landed_offsets
from omnisupport_ingest.storage import update
from omnisupport_ingest.wording import counted

_NAMED = 5
"""Number of partitions that a message names."""


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a partition stands of a topic that waits. ``offset``: the next to read. ``table``: the full name
    of the table whose row it holds; empty: this partition goes on, while another one of its topic waits."""

    topic: str
    partition: int
    offset: int
    table: str = ""
    topic_id: str | None = None

    @property
    def place(self) -> Partition:
        return self.topic, self.partition


@dataclass(frozen=True, slots=True)
class _Note:
    partitions: tuple[Standing, ...]


class ParkedPartitions:
    """The note of one epoch of the source that lands in ``store``. A new epoch begins without one."""

    def __init__(self, store: LandingStore, epoch: int) -> None:
        self._path = store.folder / f"parked-topics-e{epoch:06d}.json"

    def read(self) -> dict[Partition, Standing]:
        """Return where the partitions stand; nothing if the note is missing or cannot be read."""
        try:
            noted = read_note(_Note, self._path).partitions
        except (OSError, Unreadable):
            return {}
        return {each.place: each for each in noted}

    def write(self, standing: Iterable[Standing]) -> None:
        """Replace the note if it says something else; durable on return."""
        note = _Note(tuple(sorted(standing, key=lambda each: each.place)))
        if {each.place: each for each in note.partitions} == self.read():
            return

        def changed(content: bytes | None) -> bytes | None:
            try:
                same = content is not None and decode_note(_Note, content) == note
            except Unreadable:
                same = False
            return None if same else encode(note)

        with failpoint("kafka.parked"):
            update(self._path, changed)


def noted_partitions(store: LandingStore) -> dict[Partition, Standing]:
    """Return what the note of the current epoch says."""
    current = store.current_epoch()
    return {} if current is None else ParkedPartitions(store, current.number).read()


def standing_offsets(store: LandingStore) -> dict[Partition, OffsetSpan]:
    """Return what landed last of every partition; of a topic that waits and of which nothing has landed, an
    empty span where it stands."""
    noted = {
        place: OffsetSpan(*place, each.offset, each.offset, 0, each.topic_id)
        for place, each in noted_partitions(store).items()
    }
    return noted | landed_offsets(store)


@dataclass(frozen=True, slots=True)
class ParkedTables:
    """The parked tables of a source: why, by the names of their contracts and by their full names."""

    by_contract: Mapping[str, LandedKeyChanged]
    by_table: Mapping[str, LandedKeyChanged]

    @classmethod
    def of(cls, store: LandingStore, contracts: Iterable[TableContract]) -> ParkedTables:
        """Return those of ``contracts``, of the source that lands in ``store``."""
        tables = list(contracts)
        found = LandedKeys(store.folder).changed(tables)
        names = {each.full_name: found[each.name] for each in tables if each.name in found}
        return cls(found, names)

    def waiting(
        self, noted: Mapping[Partition, Standing], next_offsets: Mapping[Partition, int]
    ) -> dict[Partition, str]:
        """Return which partitions of those ``noted`` still wait, with the full names of the tables.

        ``next_offsets``: where the partitions go on. One that has been taken further does not wait.
        """
        return {
            place: each.table
            for place, each in noted.items()
            if each.table in self.by_table and next_offsets.get(place) == each.offset
        }

    def fault(self, table: str, waiting: Mapping[Partition, int]) -> LandedKeyChanged:
        """Return the error about ``table``. ``waiting``: the partitions that stand before a row of it, and at
        which offset."""
        why, places = self.by_table[table], sorted(waiting)
        named = ", ".join(f"{topic}[{n}] at offset {waiting[topic, n]}" for topic, n in places[:_NAMED])
        wait = "waits" if len(places) == 1 else "wait"
        more = f" and {counted(len(places) - _NAMED, 'more partition')}" if len(places) > _NAMED else ""
        return LandedKeyChanged(
            f"{why.problem} So {named}{more} {wait} before a row of it, with what stands behind; all "
            "others go on.",
            fix=f"{why.fix} The next sync goes on where they stand. What retention takes until then is a "
            "gap.",
        )
