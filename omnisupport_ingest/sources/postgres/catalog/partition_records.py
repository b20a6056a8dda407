"""What a home remembers of the partitions of each table that it has read: a note for each, replaced whole.

Also of those that have left since: where changes of partitions are sent under their own names, those that
committed before that are the table's, however late they are read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from omnisupport_ingest.durable import replace
from omnisupport_ingest.failpoints import gate
from omnisupport_ingest.foreign import Unreadable
from omnisupport_ingest.json_values import read_note, to_plain
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.sources.postgres.catalog.partitions import Partition, Partitions


@dataclass(frozen=True, slots=True)
class Stay:
    """A table was a partition for what committed below ``end``, and not below ``start``.

    Both are of looks: it may have become one somewhat above ``start``, and have left somewhat above ``end``.
    """

    start: Lsn
    end: Lsn


@dataclass(frozen=True, slots=True)
class KnownPartitions:
    """``certain``: an LSN; whatever was done to partitions and committed below it is in ``partitions``.

    ``since``, by oid: no partition for what committed below (one that is missing: always). ``left``: the last
    stay of those that were partitions and are none any more, or were attached anew.
    """

    partitions: Partitions
    certain: Lsn
    since: Mapping[str, Lsn] = field(default_factory=dict)
    left: Mapping[str, Stay] = field(default_factory=dict)

    def stay_of(self, oid: str) -> Stay | None:
        """The stay that goes on, with ``certain`` as its end; null if ``oid`` is no partition now."""
        if oid not in self.partitions:
            return None
        return Stay(self.since.get(oid, Lsn(0)), self.certain)

    def followed_by(self, now: Partitions, before: Lsn, certain: Lsn, read_to: Lsn) -> KnownPartitions:
        """What is known once ``now`` was seen. ``before``: up to where the old is certain, ``certain``: the
        new. What committed below ``read_to`` is never read again."""
        left = dict(self.left)
        for oid in self.partitions.keys() - now.keys():
            left[oid] = Stay(self.since.get(oid, Lsn(0)), max(before, self.certain))
        since = {oid: self.since.get(oid, Lsn(0)) if oid in self.partitions else before for oid in now}
        return KnownPartitions(
            now,
            certain,
            {oid: lsn for oid, lsn in since.items() if lsn > read_to},
            {oid: stay for oid, stay in left.items() if stay.end > read_to},
        )


@dataclass(frozen=True, slots=True)
class _Note:
    table: str
    epoch: int
    partitions: dict[str, Partition]
    certain: Lsn = field(default_factory=partial(Lsn, 0))
    since: dict[str, Lsn] = field(default_factory=dict)
    left: dict[str, Stay] = field(default_factory=dict)


class PartitionRecords:
    """The notes of one epoch of one source, in its landing folder."""

    def __init__(self, folder: Path, epoch: int) -> None:
        """``folder``: the landing folder of the source."""
        self._folder, self._epoch = folder, epoch

    def read(self, table: str) -> KnownPartitions | None:
        """Those of ``table`` (a contract's name) that the lake knows the rows of; null if there is no note of
        this epoch, or none that can be read."""
        try:
            note = read_note(_Note, self._file(table))
        except (OSError, Unreadable):
            return None
        if note.epoch != self._epoch:
            return None
        return KnownPartitions(note.partitions, note.certain, note.since, note.left)

    def write(self, table: str, known: KnownPartitions) -> None:
        """Durable when this returns. Only once what tells them from the older note is in landing, or asked
        for."""
        partitions, since, left = dict(known.partitions), dict(known.since), dict(known.left)
        note = _Note(table, self._epoch, partitions, known.certain, since, left)
        with gate("source.partitions", table):
            replace(self._file(table), json.dumps(to_plain(note), indent=1).encode() + b"\n")

    def _file(self, table: str) -> Path:
        return self._folder / f"partitions-{table}.json"
