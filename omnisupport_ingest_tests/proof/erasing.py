"""Having rows erased in a home: which of them may be, and what of each is gone, by the oracle's words.

A row that has ended may be erased, under the key that it had last. Gone are the events of that key back to
where another row left it, and those of the keys that the row had before, back likewise.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from random import Random

from omnisupport_ingest.review.erasing import ErasureRefused
from omnisupport_ingest_tests.oracle.model import Event, Key, Position, TableShape
from omnisupport_ingest_tests.proof.compare import Difference
from omnisupport_ingest_tests.proof.expected import Expected
from omnisupport_ingest_tests.proof.platform import Platform

Span = tuple[Position | None, Position]
"""Events above the first position (null: from the first event on) and up to the second one."""

_AT_ONCE = 6
"""Rows of one table that are asked for in one step."""


@dataclass(frozen=True)
class Asked:
    """A row that was asked for: its table and key, and what was erased of it by key, nothing if refused."""

    table: str
    key: Key
    spans: frozenset[tuple[Key, Span]]


def erase_some(rng: Random, platform: Platform, expected: Expected) -> tuple[list[Asked], list[Difference]]:
    """Ask for some rows of each table, most of them ended ones; what was done and what should not have been.

    Everything that landed is taken in, and ``expected`` is what the layers hold.
    """
    asked, wrong = [], []
    for shape in expected.shapes:
        rows = expected.state(shape)
        ended = sorted(key for key, row in rows.items() if row.ended)
        living = sorted(rows.keys() - set(ended))
        chosen = rng.sample(ended, min(_AT_ONCE, len(ended))) + rng.sample(living, min(1, len(living)))
        for key in chosen:
            one, differs = _ask(platform, expected, shape, key)
            asked.append(one)
            wrong += differs
    return asked, wrong


def _ask(
    platform: Platform, expected: Expected, shape: TableShape, key: Key
) -> tuple[Asked, list[Difference]]:
    events = [event for _, event in expected.events(shape.name)]
    of_lane = [event for event in events if _is_near(event, key)]
    where, lane = f"erasing {shape.name}", int(key[0])
    try:
        done = platform.erase(shape.name, key_text(key))
    except ErasureRefused as refused:
        # Where something is in quarantine, whether the row has ended may be in doubt.
        plain = not any(event.quarantined for event in of_lane)
        if plain and expected.state(shape)[key].ended and not _has_left(of_lane, key):
            return Asked(shape.name, key, frozenset()), [
                Difference(where, str(key), str(refused), "erased, for the row has ended", lane)
            ]
        return Asked(shape.name, key, frozenset()), []
    if not expected.state(shape)[key].ended:
        return Asked(shape.name, key, frozenset()), [
            Difference(where, str(key), "erased", "refused, for the row has not ended", lane)
        ]
    spans = frozenset(_spans(of_lane, key))
    found = {(each.key_hash, (each.span.after, each.span.through)) for each in (*done.before, *done.recorded)}
    due = {(sha256(key_text(name).encode()).hexdigest(), span) for name, span in spans}
    if found != due:
        return Asked(shape.name, key, spans), [
            Difference(where, f"what is erased of {key}", found, sorted(spans, key=repr), lane)
        ]
    return Asked(shape.name, key, spans), []


def key_text(key: Key) -> str:
    return json.dumps(list(key), separators=(",", ":"))


def _is_near(event: Event, key: Key) -> bool:
    """Whether an event is of the history that a key is of, or about all of them."""
    return event.key[0] == key[0] if event.key is not None else event.reaches(key)


def _spans(events: Iterable[Event], key: Key) -> set[tuple[Key, Span]]:
    """By key, what of it belongs to the row that ended under ``key``."""
    events = list(events)
    left = {(each.moved_from, each.at.below()) for each in events if each.moved_from is not None}
    found: set[tuple[Key, Span]] = set()
    ends = {(key, _end(events, key))}
    while ends:
        name, end = ends.pop()
        above = max((at for old, at in left if old == name and at < end), default=None)
        found.add((name, (above, end)))
        came = (
            each
            for each in events
            if each.moved_from is not None
            and each.key == name
            and each.at <= end
            and not (above is not None and each.at <= above)
        )
        ends |= {
            (each.moved_from, each.at.below())
            for each in came
            if each.moved_from is not None
            and not any(n == each.moved_from and span[1] == each.at.below() for n, span in found)
        }
    return found


def _end(events: Iterable[Event], key: Key) -> Position:
    """Where the row of ``key`` ended: by the last event of the key, or by what ended it with others."""
    events = list(events)
    last = max((each for each in events if each.key == key), key=lambda each: each.at)
    if last.op == "d":
        return last.at
    return min(each.at for each in events if each.key is None and not each.quarantined and each.at > last.at)


def _has_left(events: Iterable[Event], key: Key) -> bool:
    """Whether what stood under ``key`` last is a row that has another key since."""
    events = list(events)
    left = max((each.at.below() for each in events if each.moved_from == key), default=None)
    return left is not None and not any(
        each.key == key and each.op in "cru" and each.at > left for each in events
    )
