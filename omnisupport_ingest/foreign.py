"""Reads what other programs or people wrote: a file that may be anything, and JSON that may contain anything.

Both either return a result or raise one of two errors, ``OSError`` and ``Unreadable``. Neither waits or fills
the memory: a pipe in place of a file is refused, and JSON is limited before it is parsed.

JSON is read in the same way everywhere. Python's own reader accepts half of a surrogate pair, a repeated
name, ``NaN``, and bytes that are not UTF-8. It raises ``ValueError`` for a number of more than 4,300 digits,
and ``RecursionError`` at a depth that depends on its caller. None of these may decide what becomes of an
event.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

MAX_NESTING = 200
"""Most levels of nested objects and arrays. Code that walks the result may recurse, a few frames per
level."""

MAX_RECORD_BYTES = 256 * 1024 * 1024
"""The largest record or document that is read, in bytes."""

_BLOCK = 1 << 20

_SHOWN = 80
"""Letters of a value that a message shows."""

_SENTENCE = 600
"""Letters of a sentence that a message shows."""

_SURELY_INT = 640
"""Most digits that Python always converts to an ``int``, whatever its limit
(``sys.set_int_max_str_digits``)."""

# A text is one token, even without its end, so that a scan never starts again inside a text.
_TOKEN = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[\[{]|[\]}]', re.DOTALL)
_HALF = re.compile(r"\\u[dD][89a-fA-F]")


class Unreadable(ValueError):
    """Raised when content is not in the expected form.

    The text gives the reason, as the end of a sentence.
    """


def read_file(path: Path, *, limit: int = MAX_RECORD_BYTES) -> bytes:
    """Return the bytes of the regular file ``path``.

    Raises:
        OSError: the system's error (missing, not allowed, a loop of links).
        Unreadable: it is no regular file, or larger than ``limit`` bytes.
    """
    descriptor = open_file(path)
    try:
        content = bytearray()
        while block := os.read(descriptor, _BLOCK):
            content += block
            if len(content) > limit:
                raise Unreadable(f"it is larger than {limit:,} bytes")
        return bytes(content)
    finally:
        os.close(descriptor)


def open_file(path: Path) -> int:
    """Return a descriptor for reading the regular file ``path``. Raises the errors of ``read_file``.

    Never waits: opening a pipe for reading would wait until another process writes to it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError:
        raise Unreadable("its name holds a NUL character") from None
    if stat.S_ISREG(mode := os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise Unreadable("it is a folder" if stat.S_ISDIR(mode) else "it is no regular file")


_OF_FILES = frozenset(
    {errno.ENOENT, errno.EACCES, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR}
)


def is_fault_of_file(error: OSError) -> bool:
    """Whether ``error`` says that a file, or its path, is wrong. Another one (too many open files, no memory,
    a disk or server that fails) says nothing about the file: reading it may succeed later."""
    return error.errno is None or error.errno in _OF_FILES


def require_file(path: Path) -> None:
    """Require that ``path`` is a regular file, before a library opens it. Raises the errors of
    ``read_file``."""
    os.close(open_file(path))


def parse_json(content: bytes | str) -> Any:
    """Return the JSON document in ``content``, UTF-8, that a person or a program wrote.

    Raises:
        Unreadable: it is no such document; the message contains names of members, and no values.
    """
    try:
        return _parsed(content, _PLAIN)
    except _Twice as twice:
        raise Unreadable(f"the name {shortened(twice.name)} stands twice in one object") from None


def parse_row(line: bytes | str) -> Any:
    """Return the JSON document in ``line``, UTF-8, that holds values of rows: numbers keep every digit.

    A fraction is a ``Decimal``, and so is a whole number with more digits than Python converts to an ``int``.
    A NUL character is refused, because PostgreSQL's texts cannot have one.

    Raises:
        Unreadable: it is no such document; the message contains neither values nor names.
    """
    try:
        document = _parsed(line, _DIGITS)
    except _Twice:
        raise Unreadable("a name stands twice in one object") from None
    refuse_nul(line, document)
    return document


def texts_only(text: str) -> Any:
    """Return the JSON document in ``text``, with each number as its text. Raises ``Unreadable`` as
    ``parse_json``.

    For rows that have landed: of a repeated name, the last member counts.
    """
    refuse_depth(text)
    try:
        document = _TEXTS.decode(text)
    except (ValueError, RecursionError) as problem:
        raise Unreadable(_reason_of(problem)) from None
    if "\\ud" in text or "\\uD" in text:
        _refuse_halves(document)
    return document


def refuse_nul(content: bytes | str, document: Any) -> None:
    """Raise ``Unreadable`` if a text in ``document``, which was parsed from ``content``, has a NUL
    character."""
    escape = b"\\u0000" if isinstance(content, bytes) else "\\u0000"
    # The escape may itself be escaped, in JSON inside a text: then it is six characters and no NUL.
    if escape in content and any("\0" in text for text in _texts(document)):  # type: ignore[operator]
        raise Unreadable("it holds a NUL character, which no text of PostgreSQL does")


def printable(path: Path) -> str:
    """Return ``path`` for a message, which is UTF-8; a file name need not be."""
    return os.fsencode(path).decode(errors="backslashreplace")


def on_one_line(text: str) -> str:
    """Return ``text`` for a message: a foreign name may contain line ends, or control characters of a
    terminal."""
    return "".join(each if each.isprintable() else "�" for each in text)


def shortened(value: object) -> str:
    """``repr`` of ``value`` for a message, cut where it is longer than ``_SHOWN``."""
    text = repr(value[: _SHOWN + 1]) if isinstance(value, str | bytes) else repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def abridged(sentence: str) -> str:
    """Return ``sentence`` for a message; where it is longer than ``_SENTENCE``, its middle is left out.

    For sentences that quote several values of a file, each of which may be of any length.
    """
    left_out = len(sentence) - _SENTENCE
    half = _SENTENCE // 2
    return sentence if left_out <= 0 else f"{sentence[:half]}…({left_out} letters)…{sentence[-half:]}"


def _parsed(content: bytes | str, decoders: tuple[json.JSONDecoder, ...]) -> Any:
    try:
        text = content if isinstance(content, str) else content.decode()
    except UnicodeDecodeError as problem:
        raise Unreadable(f"byte {problem.start + 1} is not UTF-8") from None
    refuse_depth(text)
    try:
        document = _decoded(text, decoders)
    except _Twice:
        raise
    except (ValueError, ArithmeticError, RecursionError) as problem:
        raise Unreadable(_reason_of(problem)) from None
    # Valid UTF-8 can contain half of a surrogate pair only as an escape.
    if _HALF.search(text):
        _refuse_halves(document)
    return document


def _decoded(text: str, decoders: tuple[json.JSONDecoder, ...]) -> Any:
    for decoder in decoders[:-1]:
        try:
            return decoder.decode(text)
        except (json.JSONDecodeError, _Twice, _NoNumber):
            raise
        except ValueError:
            # A whole number has more digits than Python converts; the next decoder keeps them.
            continue
    return decoders[-1].decode(text)


def refuse_depth(text: str) -> None:
    """Raise ``Unreadable`` if the JSON in ``text`` is nested deeper than ``MAX_NESTING`` levels."""
    if text.count("[") + text.count("{") <= MAX_NESTING:
        return
    depth = 0
    for token in _TOKEN.finditer(text):
        first = text[token.start()]
        if first in "[{":
            depth += 1
            if depth > MAX_NESTING:
                raise Unreadable(f"it is nested deeper than {MAX_NESTING} levels")
        elif first != '"':
            depth -= 1


def _refuse_halves(document: Any) -> None:
    for text in _texts(document):
        try:
            text.encode()
        except UnicodeEncodeError:
            raise Unreadable("it holds half of a surrogate pair, which is no character") from None


def _texts(document: Any) -> Iterator[str]:
    pending = [document]
    while pending:
        value = pending.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            yield from value
            pending.extend(value.values())
        elif isinstance(value, list):
            pending.extend(value)


class _Twice(ValueError):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class _NoNumber(ValueError):
    pass


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        seen: set[str] = set()
        raise _Twice(next(name for name, _ in pairs if name in seen or seen.add(name)))  # type: ignore[func-returns-value]
    return members


def _finite(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise _NoNumber("a number is larger than any that is used")
    return value


def _whole(digits: str) -> int | Decimal:
    return int(digits) if len(digits) <= _SURELY_INT else Decimal(digits)


def _refuse_constant(name: str) -> None:
    raise _NoNumber(f"{name} is not JSON")


def _decoder(fraction: Callable[[str], Any], whole: Callable[[str], Any] = int) -> json.JSONDecoder:
    return json.JSONDecoder(
        object_pairs_hook=_object, parse_float=fraction, parse_int=whole, parse_constant=_refuse_constant
    )


_PLAIN = (_decoder(_finite),)
_DIGITS = (_decoder(Decimal), _decoder(Decimal, _whole))
_TEXTS = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=str)


def _reason_of(problem: Exception) -> str:
    """Return the reason, without values of the content."""
    if isinstance(problem, json.JSONDecodeError | _NoNumber):
        return str(problem)
    if isinstance(problem, RecursionError):
        return "it is nested too deeply"
    return "a number has too many digits"
