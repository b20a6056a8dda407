"""Random values, as the text that PostgreSQL reads: mostly plain ones, now and then one at an edge."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import TypeVar

_T = TypeVar("_T")

_EDGE = 0.12
"""How often a value is taken from the edges."""

_WORDS = (
    "red",
    "Ñandú",
    "o'clock",
    'say "so"',
    "a,b",
    "{x}",
    "back\\slash",
    " spaced ",
    "line\nend",
    "😀",
    "0",
    "NULL",
)


def text(random: Random) -> str:
    return random.choice(_WORDS) + " " + str(random.randrange(1000))


def long_text(random: Random) -> str:
    """Long enough that it is kept outside of the row, mostly."""
    return "".join(f"{random.getrandbits(64):016x}" for _ in range(random.choice((1, 150, 300))))


def integer(bits: int) -> Callable[[Random], str]:
    edges = [str(each) for each in (0, -1, 2 ** (bits - 1) - 1, -(2 ** (bits - 1)))]
    return lambda random: _edge(random, edges) or str(random.randrange(-30_000, 30_000))


def decimal(digits: int, scale: int) -> Callable[[Random], str]:
    def drawn(random: Random) -> str:
        places = random.choice((1, 3, digits))
        number = random.randrange(-(10**places) + 1, 10**places)
        return f"{'-' if number < 0 else ''}{abs(number) // 10**scale}.{abs(number) % 10**scale:0{scale}d}"

    return drawn


def numeric(random: Random) -> str:
    if edge := _edge(random, ["NaN", "Infinity", "-Infinity", "0", "0.000", "1e40", "-1e-20"]):
        return edge
    whole, fraction = random.randrange(-(10**12), 10**12), random.randrange(10**6)
    return f"{whole}.{fraction:06d}"[: random.randrange(6, 20)].rstrip(".")


def floating(random: Random) -> str:
    edge = _edge(random, ["NaN", "Infinity", "-Infinity", "0", "-0", "1e-30", "1e30"])
    return edge or repr(random.uniform(-1e6, 1e6))


def boolean(random: Random) -> str:
    return random.choice("tf")


def date(random: Random) -> str:
    edges = ["infinity", "-infinity", "0001-01-01", "0300-02-28 BC", "9999-12-31", "1969-12-31"]
    return _edge(random, edges) or _day(random)


def clock(random: Random) -> str:
    edge = _edge(random, ["00:00:00", "24:00:00", "23:59:59.999999"])
    return edge or _clock(random) + random.choice(("", ".5", f".{random.randrange(10**6):06d}"))


def timestamp(random: Random) -> str:
    edge = _edge(random, ["infinity", "-infinity", "0001-01-01 00:00:00", "0044-03-15 12:00:00 BC"])
    if edge:
        return edge
    return f"{_day(random)} {_clock(random)}.{random.randrange(10**6):06d}"


def zoned(random: Random) -> str:
    found = timestamp(random)
    if "infinity" in found or found.endswith("BC"):
        return found
    return found + random.choice(("+00", "+02", "-09:30"))


def interval(random: Random) -> str:
    parts = [f"{random.randrange(-20, 20)} {unit}" for unit in ("years", "mons", "days", "hours", "minutes")]
    return (
        " ".join(random.sample(parts, random.randrange(1, 4)))
        + f" {random.randrange(60)}.{random.randrange(10**6):06d} seconds"
    )


def mood(random: Random) -> str:
    return random.choice(("sad", "ok", "happy"))


def document(random: Random) -> str:
    return json.dumps(
        random.choice(
            [None, True, 1.5, text(random), [], {}, {"b": [1, None, {"c": text(random)}], "a": 10**20}]
        )
    )


def raw_bytes(random: Random) -> str:
    return "\\x" + random.randbytes(random.choice((0, 1, 5, 40))).hex()


def list_of(element: Callable[[Random], str]) -> Callable[[Random], str]:
    def drawn(random: Random) -> str:
        items = [None if random.random() < 0.2 else element(random) for _ in range(random.randrange(4))]
        return "{" + ",".join("NULL" if each is None else _quoted(each) for each in items) + "}"

    return drawn


def _quoted(item: str) -> str:
    return '"' + item.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _day(random: Random) -> str:
    return f"{random.randrange(1900, 2100)}-{random.randrange(1, 13):02d}-{random.randrange(1, 29):02d}"


def _clock(random: Random) -> str:
    return f"{random.randrange(24):02d}:{random.randrange(60):02d}:{random.randrange(60):02d}"


def _edge(random: Random, edges: list[_T]) -> _T | None:
    return random.choice(edges) if random.random() < _EDGE else None
