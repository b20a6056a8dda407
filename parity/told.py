"""What each of the two has told: our landed events, and Debezium's records, one after the other."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omnisupport_ingest.landing.debezium_envelope import Origin, envelope
from omnisupport_ingest.landing.manifest import Manifest
from omnisupport_ingest.landing.rows import LandedEvent

Document = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class OurEvent:
    """A landed event. ``envelope``: the same in Debezium's shape, as ``landing tail`` prints it. ``rank``:
    how many of its transaction it is, from 1."""

    event: LandedEvent
    envelope: Document
    rank: int


@dataclass(frozen=True, slots=True)
class Record:
    """A record of Debezium's: ``value`` is null for a tombstone. ``headers``: without the context ones."""

    topic: str
    key: Document | None
    value: Document | None
    headers: Document


@dataclass(slots=True)
class Transaction:
    """One transaction as Debezium tells it. ``end``: its ``END`` marker, null if none came."""

    xid: int
    events: list[Record] = field(default_factory=list)
    end: Document | None = None


@dataclass(frozen=True, slots=True)
class Theirs:
    """All of Debezium's records. ``outside``: messages of no transaction. ``tombstones``: each with the
    record before it. ``stray``: what has no place here."""

    transactions: Sequence[Transaction]
    outside: Sequence[Record]
    tombstones: Sequence[tuple[Record, Record | None]]
    stray: Sequence[Record]


def our_transactions(
    landed: Sequence[tuple[Manifest, LandedEvent]], version: str, database: str
) -> list[list[OurEvent]]:
    """Our events, transaction by transaction, in the order of positions."""
    found: list[list[OurEvent]] = []
    commit = None
    for batch, event in landed:
        if event.commit_lsn != commit:
            found.append([])
            commit = event.commit_lsn
        origin = Origin(version, "postgresql", batch.source, database, batch.arrival.landed_at)
        found[-1].append(OurEvent(event, envelope(event, origin), len(found[-1]) + 1))
    return found


def read_records(path: Path) -> Theirs:
    """The records that the engine has written to ``path``."""
    transactions: list[Transaction] = []
    outside: list[Record] = []
    tombstones: list[tuple[Record, Record | None]] = []
    stray: list[Record] = []
    current: Transaction | None = None
    last: Record | None = None
    for record in _records(path):
        value = record.value
        if value is None:
            tombstones.append((record, last))
            continue
        if value.get("status") == "BEGIN":
            current = Transaction(_xid(value))
            transactions.append(current)
        elif value.get("status") == "END" and current is not None and current.xid == _xid(value):
            current.end, current = value, None
        elif value.get("op") == "m" and value["transaction"] is None:
            outside.append(record)
        elif current is not None and "op" in value:
            current.events.append(record)
            last = record
        else:
            stray.append(record)
    return Theirs(transactions, outside, tombstones, stray)


def _records(path: Path) -> Iterator[Record]:
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            document = json.loads(line)
            headers = {
                each["key"]: json.loads(each["value"])
                for each in document["headers"]
                if not each["key"].startswith("__debezium.context.")
            }
            yield Record(document["topic"], document["key"], document["value"], headers)


def _xid(marker: Document) -> int:
    return int(marker["id"].partition(":")[0])
