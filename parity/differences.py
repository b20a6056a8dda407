"""One event as we tell it beside the same as Debezium tells it: what differs, and which is known.

A category takes a difference only where both sides are exactly as its explanation says; so a value that
is wrong in another way is never taken for a known loss.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from omnisupport_ingest.landing.debezium_envelope import UNAVAILABLE
from parity import categories
from parity.shapes import Shape
from parity.told import Document, OurEvent, Record
from parity.typed import Typed, comparable

_MISSING = "(missing)"
_MADE_UP = {"integer": 0, "date": 0, "text": ""}
"""What Debezium puts into a column that is not null and was not sent, by type."""


@dataclass(frozen=True, slots=True)
class Found:
    """A difference at ``path`` of an event. ``category``: the known one that it is; null: it is none."""

    path: str
    ours: Any
    theirs: Any
    category: str | None


@dataclass(frozen=True, slots=True)
class Neighbours:
    """What is around an event. ``commit_before``: commit LSN of the transaction before its own, 0 if
    there is none. ``next_key``: Debezium's key of the record after it."""

    commit_before: int
    next_key: Document | None


def differences(ours: OurEvent, theirs: Record, shape: Shape | None, around: Neighbours) -> Iterator[Found]:
    """Everything in which the two differ. ``shape``: of the event's table, null for a message."""
    told = theirs.value
    assert told is not None
    yield from _members("", ours.envelope, told, frozenset({"before", "after", "source", "transaction"}))
    yield from _members("source.", ours.envelope["source"], told["source"], frozenset({"sequence"}))
    yield _transaction(ours, told["transaction"])
    yield from _sequence(ours, told["source"]["sequence"], around)
    if shape is not None:
        yield from _key(ours, theirs, shape)
        yield from _headers(ours, theirs, shape, around)
        yield from _before(ours, told["before"], shape)
        yield from _after(ours, told["after"], shape)


def _members(prefix: str, ours: Document, theirs: Document, apart: frozenset[str]) -> Iterator[Found]:
    for name in sorted((ours.keys() | theirs.keys()) - apart):
        here, there = ours.get(name, _MISSING), theirs.get(name, _MISSING)
        if here == there:
            continue
        category = None
        if prefix == "source." and name == "version":
            category = categories.VERSION
        elif not prefix and name in ("ts_ms", "ts_us", "ts_ns"):
            committed = ours["source"][name]
            later = isinstance(here, int) and isinstance(there, int) and min(here, there) >= committed
            category = categories.PROCESSING_TIME if later else None
        yield Found(prefix + name, here, there, category)


def _transaction(ours: OurEvent, theirs: Document | None) -> Found:
    known = (
        ours.envelope["transaction"] is None
        and theirs is not None
        and theirs["total_order"] == ours.rank
        and str(theirs["id"]).startswith(f"{ours.event.tx_id}:")
    )
    return Found("transaction", {"rank": ours.rank}, theirs, categories.TRANSACTION_BLOCK if known else None)


def _sequence(ours: OurEvent, theirs: str, around: Neighbours) -> Iterator[Found]:
    (our_commit, our_lsn), (before, lsn) = json.loads(ours.envelope["source"]["sequence"]), json.loads(theirs)
    own = ours.event.commit_lsn
    # The end of the transaction before: above its commit record, at or below the next one.
    between = around.commit_before == 0 if before is None else around.commit_before < int(before) <= own
    known = our_lsn == lsn and our_commit == str(own) and between
    yield Found(
        "source.sequence", [our_commit, our_lsn], [before, lsn], categories.SEQUENCE if known else None
    )


def _key(ours: OurEvent, theirs: Record, shape: Shape) -> Iterator[Found]:
    values = json.loads(ours.event.key) if ours.event.key else None
    names = shape.key
    here = None if values is None else _values(dict(zip(names, values, strict=True)), shape)
    if here == theirs.key:
        return
    known = False
    if shape.primary_key and list(shape.primary_key) != list(names) and theirs.key is not None:
        row = json.loads(ours.event.after) if ours.event.after else {}
        named = {name: row.get(name) for name in shape.primary_key}
        made_up = {name: _MADE_UP.get(shape.types[name]) for name in shape.primary_key}
        known = theirs.key == (made_up if ours.event.op == "d" else _values(named, shape))
    yield Found("key", here, theirs.key, categories.PRIMARY_KEY if known else None)


def _headers(ours: OurEvent, theirs: Record, shape: Shape, around: Neighbours) -> Iterator[Found]:
    """The headers of a key change, held against our two events of one."""
    event, headers = ours.event, dict(theirs.headers)
    old, new = headers.pop("__debezium.oldkey", None), headers.pop("__debezium.newkey", None)
    if headers:
        yield Found("headers", {}, headers, None)
    moved = None if event.moved_from_key is None else json.loads(event.moved_from_key)
    if moved is None and old is None:
        here = None
    else:
        here = None if moved is None else _values(dict(zip(shape.key, moved, strict=True)), shape)
        by_primary_key = list(shape.key) != list(shape.primary_key)
        known = old is not None and here is not None and (old == here or by_primary_key)
        yield Found("headers.oldkey", here, old, categories.KEY_CHANGE_HEADERS if known else None)
    if new is not None:
        known = event.op == "d" and new == around.next_key
        yield Found("headers.newkey", None, new, categories.KEY_CHANGE_HEADERS if known else None)


def _before(ours: OurEvent, theirs: Document | None, shape: Shape) -> Iterator[Found]:
    here = ours.envelope["before"]
    if here is None or theirs is None:
        if here is not None or theirs is not None:
            yield Found("before", here, theirs, None)
        return
    for name in here.keys() | theirs.keys():
        if name in here and name in theirs:
            yield from _value(f"before.{name}", name, here[name], theirs[name], shape)
            continue
        made_up = shape.defaults.get(name)
        if made_up is None and name in shape.not_null:
            made_up = _MADE_UP.get(shape.types.get(name, ""))
        known = (
            name in theirs
            and ours.event.op in ("d", "u")
            and name not in shape.identity
            # Of a column that came with a transaction the connector may not know the default yet.
            and (theirs[name] == made_up or (name in shape.passing and theirs[name] is None))
        )
        yield Found(
            f"before.{name}",
            here.get(name, _MISSING),
            theirs.get(name, _MISSING),
            categories.MADE_UP_BEFORE if known else None,
        )


def _after(ours: OurEvent, theirs: Document | None, shape: Shape) -> Iterator[Found]:
    here = ours.envelope["after"]
    if here is None or theirs is None:
        if here is not None or theirs is not None:
            yield Found("after", here, theirs, None)
        return
    unsent = ours.event.unchanged or ()
    old = json.loads(ours.event.before) if ours.event.before else {}
    key = dict(zip(shape.key, json.loads(ours.event.key or "[]"), strict=False))
    for name in here.keys() | theirs.keys():
        path = f"after.{name}"
        if name not in here or name not in theirs:
            yield Found(path, here.get(name, _MISSING), theirs.get(name, _MISSING), None)
        elif name in unsent:
            yield from _unsent(path, name, theirs[name], {**key, **old}, shape)
        else:
            if theirs[name] == shape.typed(name, UNAVAILABLE).value:
                yield Found(path, here[name], theirs[name], categories.LIKE_THE_PLACEHOLDER)
            yield from _value(path, name, here[name], theirs[name], shape)


def _unsent(path: str, name: str, theirs: Any, old: Document, shape: Shape) -> Iterator[Found]:
    """A column that was not sent: Debezium has its placeholder, or the old row's value if that was sent."""
    if theirs == shape.typed(name, UNAVAILABLE).value:
        return
    known = name in old and theirs == shape.typed(name, old[name]).value
    yield Found(path, UNAVAILABLE, theirs, categories.FILLED_IN if known else None)


def _value(path: str, name: str, ours: str | None, theirs: Any, shape: Shape) -> Iterator[Found]:
    pg_type = shape.types[name]
    expected = shape.typed(name, ours)
    if _same(expected, theirs, pg_type):
        if expected.loss is not None:
            yield Found(path, ours, theirs, expected.loss)
        return
    known = ours is None and name in shape.defaults and theirs == shape.defaults[name]
    yield Found(path, ours, theirs, categories.DEFAULT_FOR_NULL if known else None)


def _same(expected: Typed, theirs: Any, pg_type: str) -> bool:
    if expected.loss == categories.NESTED_LIST:
        # Of a list of lists nothing is left: nulls, or the name of a Java object.
        return isinstance(theirs, list) and all(
            each is None or str(each).startswith("[Ljava.lang.") for each in theirs
        )
    here, there = expected.value, comparable(theirs, pg_type)
    # True is 1 in Python, and not in JSON.
    return type(here) is type(there) and bool(here == there)


def _values(texts: Mapping[str, str | None], shape: Shape) -> dict[str, Any]:
    return {name: shape.typed(name, text).value for name, text in texts.items()}
