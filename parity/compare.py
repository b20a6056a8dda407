"""Both captures, transaction by transaction and event by event."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from parity import categories
from parity.differences import Found, Neighbours, differences
from parity.marks import BEGIN
from parity.shapes import Shape
from parity.told import OurEvent, Record, Theirs, Transaction

_MESSAGES = "LogicalDecodingMessage"


@dataclass(frozen=True, slots=True)
class Unexplained:
    """A difference of no known category. ``scene``: the script or seed it was found in. ``ours`` and
    ``theirs``: the events, whole; null where one is missing."""

    scene: str
    what: str
    ours: Any
    theirs: Any


@dataclass(slots=True)
class Outcome:
    """``events``: pairs that were compared. ``keys``: keys that they are of. ``known``: category → how many
    differences it took. ``operations``: of the pairs."""

    transactions: int = 0
    events: int = 0
    keys: set[tuple[str, str]] = field(default_factory=set)
    operations: Counter[str] = field(default_factory=Counter)
    known: Counter[str] = field(default_factory=Counter)
    unexplained: list[Unexplained] = field(default_factory=list)


def compare(ours: Sequence[Sequence[OurEvent]], theirs: Theirs, shapes: Mapping[str, Shape]) -> Outcome:
    """Hold every event of ours against Debezium's at the same place of the same transaction."""
    outcome = Outcome()
    scene, commit, position = "the beginning", 0, (-1, -1)
    for here, there in zip_longest(ours, theirs.transactions):
        if here is None or there is None or here[0].event.tx_id != there.xid:
            outcome.unexplained.append(
                Unexplained(
                    scene,
                    "the next transaction; what follows is out of step and was not compared",
                    here[0] if here else None,
                    there.events[0] if there and there.events else there,
                )
            )
            return outcome
        scene = _scene(here) or scene
        outcome.transactions += 1
        outcome.unexplained += (
            Unexplained(scene, what, here, there.end) for what in _marker(here, there, outcome.known)
        )
        followers = [*there.events[1:], None]
        for mine, their, follower in zip_longest(here, there.events, followers[: len(there.events)]):
            if mine is None or their is None:
                outcome.unexplained.append(Unexplained(scene, "an event is missing", mine, their))
                continue
            if (mine.event.commit_lsn, mine.event.ordinal) <= position:
                outcome.unexplained.append(Unexplained(scene, "our positions do not rise", mine, their))
            position = mine.event.commit_lsn, mine.event.ordinal
            around = Neighbours(commit, None if follower is None else follower.key)
            _pair(mine, their, shapes, around, scene, outcome)
        commit = here[0].event.commit_lsn
    _beside(theirs, outcome)
    return outcome


def _pair(
    ours: OurEvent,
    theirs: Record,
    shapes: Mapping[str, Shape],
    around: Neighbours,
    scene: str,
    outcome: Outcome,
) -> None:
    event = ours.event
    outcome.events += 1
    outcome.operations[event.op] += 1
    if event.key is not None:
        outcome.keys.add((event.source_table, event.key))
    for found in differences(ours, theirs, shapes.get(event.source_table), around):
        if found.category is not None:
            outcome.known[found.category] += 1
        else:
            outcome.unexplained.append(Unexplained(scene, _what(found), ours, theirs))


def _what(found: Found) -> str:
    return f"{found.path}: {found.ours!r} here, {found.theirs!r} there"


def _marker(here: Sequence[OurEvent], there: Transaction, known: Counter[str]) -> Iterator[str]:
    """What the markers of a transaction count must be what we have of it."""
    if there.end is None:
        yield "the transaction has no end"
        return
    tables = Counter(
        _MESSAGES if each.event.op == "m" else f"{each.event.source_schema}.{each.event.source_table}"
        for each in here
    )
    told: Counter[str] = Counter()
    for each in there.end["data_collections"]:
        name = each["data_collection"]
        # A message is counted under the name of a Java object.
        told[_MESSAGES if _MESSAGES in name else name] += each["event_count"]
    if there.end["event_count"] != len(here) or told != tables:
        yield f"the transaction's marker counts {dict(told)}"
    known[categories.TRANSACTION_MARKER] += 2


def _beside(theirs: Theirs, outcome: Outcome) -> None:
    """What Debezium has beside the events of transactions."""
    for record in theirs.stray:
        outcome.unexplained.append(Unexplained("", "a record of no known kind", None, record))
    for record in theirs.outside:
        value = record.value
        inside = value is None or value["source"]["txId"] is not None
        if inside:
            outcome.unexplained.append(Unexplained("", "a message without a place", None, record))
        else:
            outcome.known[categories.MESSAGE_OUTSIDE] += 1
    for tombstone, before in theirs.tombstones:
        if before is None or before.value is None or before.value["op"] != "d" or before.key != tombstone.key:
            outcome.unexplained.append(Unexplained("", "a tombstone that follows no delete", None, tombstone))
        else:
            outcome.known[categories.TOMBSTONE] += 1
    deletes = sum(
        each.value is not None and each.value["op"] == "d"
        for transaction in theirs.transactions
        for each in transaction.events
    )
    if deletes != len(theirs.tombstones):
        outcome.unexplained.append(
            Unexplained("", f"{len(theirs.tombstones)} tombstones after {deletes} deletes", None, None)
        )


def _scene(here: Sequence[OurEvent]) -> str | None:
    """The script or seed that a transaction announces."""
    message = here[0].envelope.get("message")
    if message is None or message["prefix"] != BEGIN:
        return None
    return base64.b64decode(message["content"]).decode()
