"""Bytes that somebody else may have written, for property tests: a valid document with something odd in it.

Every example has a time: a reader that hangs fails, it does not stop the suite.
"""

from __future__ import annotations

import copy
import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from omnisupport_ingest_tests.waiting import PATIENCE

SECONDS = 10.0
"""Of processor time, for one example; the slowest takes some tenths of a second."""


class Hangs(BaseException):
    """A reader worked longer than ``SECONDS``, or waited in vain. No handler for errors may catch it."""


@contextmanager
def in_time(seconds: float = SECONDS) -> Iterator[None]:
    """What is done inside ends within ``seconds`` of this process's processor time, or the test fails.

    Beside others a process may stand still, so of the clock it has the patience of every other test.
    """

    def stop(number: int, _: object) -> None:
        raise Hangs(f"still reading after {limits[signal.Signals(number)][1]:g} s")

    limits = {
        signal.SIGPROF: (signal.ITIMER_PROF, seconds),
        signal.SIGALRM: (signal.ITIMER_REAL, max(seconds, PATIENCE)),
    }
    before = {number: signal.signal(number, stop) for number in limits}
    for timer, limit in limits.values():
        signal.setitimer(timer, limit)
    try:
        yield
    finally:
        for timer, _ in limits.values():
            signal.setitimer(timer, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(frozen=True)
class Raw:
    """Text that stands in a document as it is, whether or not it is JSON."""

    text: str

    def __repr__(self) -> str:
        return f"Raw({self.text[:40]!r}, {len(self.text)})"


class Twice(dict[str, Any]):
    """An object whose first member stands twice."""


DEEP = 100_000

ODD_TEXTS = [
    "",
    " ",
    "x",
    "-",
    "9" * 5000,
    "-" + "0" * 5000 + "7",
    "9" * 100_000 + "x",
    "1" * 150_000,
    "1e999999999",
    "1e-999999999",
    "0e999999999",
    "1_000",
    "\u0663",
    "NaN",
    "sNaN",
    "Infinity",
    "infinity",
    "AAAA" * 30_000,
    "P" + "9" * 5000 + "Y",
    "PT" + "9" * 400 + "S",
    "2026-13-45",
    "0001-01-01T00:00:00+14:00",
    "9999-12-31T23:59:59-14:00",
    "99999-01-01 00:00:00+00",
    "{{{{",
    "{" * 5000,
    '"' * 5000,
    "[" * DEEP,
    "[" * DEEP + "]" * DEEP,
    '{"a":' * 1000 + "1" + "}" * 1000,
    "\\x" + "ab" * 50_000,
    "../../etc/passwd",
    "\U0001f600",
]

ODD_VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    1.5,
    2**31,
    2**63,
    2**64,
    -(2**63) - 1,
    10**30,
    [],
    {},
    [[]],
    [None],
    [1, "a", None],
    {"a": 1},
    {"scale": 5, "value": "AQ=="},
    {"scale": 10**30, "value": "AQ=="},
    Raw("1e400"),
    Raw("1e999999999"),
    Raw("-1e-999999999"),
    Raw("1e99999999999999999999"),
    Raw("9" * 700),
    Raw("9" * 5000),
    Raw("-" + "9" * 140_000),
    Raw("1." + "0" * 20_000),
    Raw("NaN"),
    Raw("-Infinity"),
    Raw('"\\ud800"'),
    Raw('"\\u0000"'),
    Raw('"\x00"'),
    Raw("[" * 150 + "]" * 150),
    Raw("[" * DEEP + "]" * DEEP),
    Raw('{"a":' * DEEP + "1" + "}" * DEEP),
    Raw("[" * DEEP),
    *ODD_TEXTS,
]

odd_values = st.sampled_from(ODD_VALUES).map(copy.deepcopy)
odd_texts = st.sampled_from(ODD_TEXTS) | st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@st.composite
def mutated(draw: st.DrawFn, documents: list[Any], *, most: int = 3, blanks: Sequence[str] = ("",)) -> bytes:
    """One of ``documents`` as JSON, up to ``most`` places of it changed, its end torn, or bytes changed.
    ``blanks``: one of them stands behind its commas and colons."""
    document = copy.deepcopy(draw(st.sampled_from(documents)))
    for _ in range(draw(st.integers(0, most))):
        document = _changed(draw, document)
    content = text_of(document, draw(st.sampled_from(blanks))).encode(errors="surrogatepass")
    return draw(_torn(content))


def _torn(content: bytes) -> st.SearchStrategy[bytes]:
    whole = st.just(content)
    cut = st.integers(0, len(content)).map(lambda at: content[:at])
    spot = st.tuples(st.integers(0, max(len(content) - 1, 0)), st.binary(max_size=4)).map(
        lambda change: content[: change[0]] + change[1] + content[change[0] + 1 :]
    )
    # As a rule it stays whole: else hardly anything would get past the first look at it.
    return st.one_of(whole, whole, whole, whole, cut, spot, st.binary(max_size=40))


def _changed(draw: st.DrawFn, document: Any) -> Any:
    """``document`` with one of its places changed, at whatever depth."""
    holders = [each for each in _holders(document) if each]
    if not holders or draw(st.integers(0, 30)) == 0:
        return draw(odd_values)
    holder = draw(st.sampled_from(holders))
    where = draw(st.sampled_from(list(holder) if isinstance(holder, dict) else range(len(holder))))
    what = draw(st.sampled_from(["odd", "odd", "odd", "drop", "nest", "text", "add", "twice"]))
    if what == "drop":
        del holder[where]
    elif what == "nest":
        holder[where] = draw(
            st.sampled_from([[holder[where]], {"a": holder[where]}, {"payload": holder[where]}])
        )
    elif what == "text":
        holder[where] = holder[where] if isinstance(holder[where], Raw) else text_of(holder[where])
    elif what == "add" and isinstance(holder, dict):
        holder[draw(st.sampled_from(["odd", "__op", "schema", "value", "payload", ""]))] = draw(odd_values)
    elif what == "twice" and isinstance(holder, dict):
        held = holder[where]
        holder[where] = Twice(held) if isinstance(held, dict) else held
    else:
        holder[where] = draw(odd_values)
    return document


def _holders(document: Any) -> list[Any]:
    found, left = [], [document]
    while left:
        value = left.pop()
        if isinstance(value, dict | list):
            found.append(value)
            left.extend(value.values() if isinstance(value, dict) else value)
    return found


def places(value: Any) -> Iterator[tuple[str | int, ...]]:
    """Yield the place of every value inside ``value``, as the names and numbers that lead to it."""
    if isinstance(value, dict | list):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield (key,)
            yield from ((key, *deeper) for deeper in places(each))


def with_value_at(document: Any, keys: Sequence[str | int], value: Any) -> Any:
    """Return a copy of ``document`` with ``value`` at the place ``keys``."""
    changed = holder = copy.deepcopy(document)
    for key in keys[:-1]:
        holder = holder[key]
    holder[keys[-1]] = value
    return changed


def text_of(value: Any, blank: str = "") -> str:
    """``value`` as JSON, with what is ``Raw`` as it is and ``blank`` behind each comma and colon."""
    comma = "," + blank
    if isinstance(value, Raw):
        return value.text
    if isinstance(value, dict):
        members = [f"{json.dumps(name)}:{blank}{text_of(each, blank)}" for name, each in value.items()]
        return "{" + comma.join([*members, *(members[:1] if isinstance(value, Twice) else [])]) + "}"
    if isinstance(value, list | tuple):
        return "[" + comma.join(text_of(each, blank) for each in value) + "]"
    return json.dumps(value)


IN_THE_PLACE: dict[str, Callable[[Path], None]] = {
    "a pipe": os.mkfifo,
    "a folder": lambda path: path.mkdir(),
    "a loop of links": lambda path: path.symlink_to(path),
    "a link to nothing": lambda path: path.symlink_to(path.with_name("gone")),
    "a link to an endless device": lambda path: path.symlink_to("/dev/zero"),
    "an empty file": lambda path: path.touch(),
    "a nesting": lambda path: _write(path, "[" * DEEP),
    "a long number": lambda path: _write(path, "9" * 5000),
    "no UTF-8": lambda path: _write(path, "\udcff\udcfe"),
}
"""What may stand in the place of a file that somebody reads: a name, and how to put it there."""


def _write(path: Path, text: str) -> None:
    path.write_bytes(text.encode(errors="surrogateescape"))
