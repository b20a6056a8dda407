"""What a random workload may do with each table: how keys and values are drawn."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

from parity import random_values as draw

KEYS = 6
"""How many keys of a table one session of one seed knows: few, so that rows die and come back."""

Draw = Callable[[Random], str]
KeyOf = Callable[[int, int], tuple[str, ...]]
"""(lane, number) → the key's values as text. No two lanes share a key, so sessions never wait."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A table as the workload knows it. ``key``: its columns. ``columns``: the others, with how values are
    drawn. ``never_null``: columns that are not."""

    name: str
    key: tuple[str, ...]
    key_of: KeyOf
    columns: Mapping[str, Draw]
    never_null: frozenset[str] = frozenset()


def _number(lane: int, number: int) -> tuple[str, ...]:
    return (str(1000 + lane * 10 + number),)


def _uuid(lane: int, number: int) -> tuple[str, ...]:
    return (str(uuid.uuid5(uuid.NAMESPACE_OID, f"{lane} {number}")),)


def _text(lane: int, number: int) -> tuple[str, ...]:
    return (f"{lane} “{number}”",)


TABLES = (
    Drawn(
        "by_int",
        ("id",),
        _number,
        {"name": draw.text, "amount": draw.decimal(12, 2), "seen": draw.zoned, "flag": draw.boolean},
    ),
    Drawn(
        "by_bigint_full",
        ("id",),
        _number,
        {
            "small": draw.integer(16),
            "ratio": draw.floating,
            "value": draw.floating,
            "rate": draw.numeric,
            "note": draw.text,
        },
    ),
    Drawn(
        "by_uuid",
        ("id",),
        _uuid,
        {
            "doc": draw.document,
            "docb": draw.document,
            "raw": draw.raw_bytes,
            "tags": draw.list_of(draw.text),
            "counts": draw.list_of(draw.integer(32)),
            "wide": draw.list_of(draw.integer(64)),
        },
    ),
    Drawn(
        "by_text",
        ("id",),
        _text,
        {
            "day": draw.date,
            "at_time": draw.clock,
            "local": draw.timestamp,
            "local_ms": draw.timestamp,
            "zoned": draw.zoned,
            "span": draw.interval,
            "state": draw.mood,
            "padded": lambda random: draw.text(random)[:6],
        },
    ),
    Drawn(
        "by_pair",
        ("area", "number"),
        lambda lane, number: (f"lane {lane // 2} {number % 2}", str(lane * 10 + number)),
        {"label": draw.text, "amount": draw.decimal(6, 3)},
    ),
    Drawn("by_index", ("id",), _number, {"label": draw.text, "amount": draw.decimal(8, 2)}),
    Drawn(
        "by_other_index",
        ("id", "code"),
        lambda lane, number: (_number(lane, number)[0], _text(lane, number)[0]),
        {"label": draw.text},
    ),
    Drawn(
        "long_text",
        ("id",),
        _number,
        {
            "long": draw.long_text,
            "bytes": lambda random: "\\x" + draw.long_text(random),
            "list": draw.list_of(draw.long_text),
            "short": draw.text,
        },
    ),
    Drawn("long_text_full", ("id",), _number, {"long": draw.long_text, "short": draw.text}),
    Drawn(
        "with_defaults",
        ("id",),
        _number,
        {
            "label": draw.text,
            "amount": draw.integer(32),
            "day": lambda random: draw.date(random),
            "required": draw.text,
            "number": draw.integer(32),
        },
        frozenset({"day", "required", "number"}),
    ),
    Drawn("with_generated", ("id",), _number, {"amount": lambda random: str(random.randrange(10**6))}),
    Drawn("without_key", ("number",), _number, {"label": draw.text}),
    Drawn("Quoted Name", ("Id",), _number, {"select": draw.text, "Mixed": draw.text}),
    Drawn(
        "parts",
        ("id", "region"),
        lambda lane, number: (_number(lane, number)[0], str(number * 3)),
        {"label": draw.text},
    ),
)

ALONE = (
    Drawn("evolving", ("id",), _number, {"label": draw.text}),
    Drawn("emptied", ("id",), _number, {"label": draw.text}),
)
"""Tables of the first session alone, which alters the one and truncates the other: both lock them."""
