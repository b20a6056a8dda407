"""Converts value types to JSON and back, strictly: what a type does not allow is an error that names the
field.

Each dataclass is one object, each field one member. An unknown or missing member, or a value of another type,
is refused: reading a record wrongly is worse than not reading it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from enum import Enum
from typing import Any, TypeVar

from omnisupport_ingest.foreign import Unreadable, shortened
from omnisupport_ingest.position import Lsn, Position

T = TypeVar("T")

_LONGEST_FIELD = 120


class FieldProblem(Unreadable):
    """``field`` (a path like ``files[0].rows``) holds something it may not."""

    def __init__(self, field: str, problem: str) -> None:
        shown = field if len(field) <= _LONGEST_FIELD else f"{field[:_LONGEST_FIELD]}…"
        super().__init__(f"{shown or 'the document'} {problem}")
        self.field = field


def to_plain(value: object) -> Any:
    """Return ``value`` as objects, arrays, strings and numbers; times in UTC, positions as their text."""
    if dataclasses.is_dataclass(value) and not isinstance(value, Lsn | Position | type):
        return {each.name: to_plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if isinstance(value, Lsn | Position):
        return str(value)
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat()
    if isinstance(value, tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    return value


def compact(value: object) -> str:
    """``value``, of JSON alone, as text without blanks; images and identities of events are such texts."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def from_plain(kind: type[T], value: Any) -> T:
    """The value of type ``kind`` that ``to_plain`` gave ``value`` for; ``FieldProblem`` if none."""
    try:
        return typing.cast(T, _quick(typing.cast(Any, kind))(value))
    except (_NotPlain, ValueError, OverflowError):
        # Only the careful reader knows where the problem is, and whether it is one.
        return typing.cast(T, _Reader(tolerant=False).read(kind, value, ""))


def from_note(kind: type[T], value: Any, field: str = "") -> T:
    """Do the same for a record without a version, which programs of other versions write too.

    A member that ``kind`` does not have is ignored; a missing one gets its default, if it has one.
    """
    return typing.cast(T, _Reader(tolerant=True).read(kind, value, field))


@dataclasses.dataclass(frozen=True, slots=True)
class _Reader:
    tolerant: bool

    def read(self, kind: Any, value: Any, field: str) -> Any:
        form, inner = _form(kind)
        if form is _Form.OPTIONAL:
            return None if value is None else self.read(inner, value, field)
        if form is _Form.TUPLE:
            items = _of_type(list, value, field)
            if inner is str and all(type(item) is str for item in items):
                return tuple(items)
            return tuple(self.read(inner, item, f"{field}[{i}]") for i, item in enumerate(items))
        if form is _Form.MAPPING:
            members = _of_type(dict, value, field)
            return {key: self.read(inner, item, f"{field}.{key}") for key, item in members.items()}
        if form is _Form.TEXT:
            return _read_text(kind, _of_type(str, value, field), field)
        if form is _Form.OBJECT:
            return self._read_object(kind, _of_type(dict, value, field), field)
        if kind is float and type(value) is int:
            value = float(min(max(value, -(1 << 63)), 1 << 63))
        return _of_type(kind, value, field)

    def _read_object(self, kind: Any, members: dict[str, Any], field: str) -> Any:
        prefix = f"{field}." if field else ""
        hints = _hints(kind)
        for name in members.keys() - hints.keys():
            if not self.tolerant:
                raise FieldProblem(prefix + name, "is not a field of this format version")
        present = {name: hint for name, hint in hints.items() if name in members}
        for name in hints.keys() - present.keys():
            if not self.tolerant or name not in _with_default(kind):
                raise FieldProblem(prefix + name, "is missing")
        values = {name: self.read(hint, members[name], prefix + name) for name, hint in present.items()}
        try:
            return kind(**values)
        except FieldProblem:
            raise
        except ValueError as problem:
            # The value type itself refuses the values.
            raise FieldProblem(field, f"is no {kind.__name__}: {problem}") from None


class _NotPlain(Exception):
    """Raised by a quick reader for a value that the careful one has to judge."""


@functools.cache
def _quick(kind: Any) -> Callable[[Any], Any]:
    """Return a function that reads what ``to_plain`` writes of ``kind``, and refuses everything else.

    It returns what ``_Reader.read`` returns, in a third of the time: it looks up nothing by type and names no
    field. A start of capture reads some records of every table.
    """
    form, inner = _form(kind)
    if form is _Form.OPTIONAL:
        read = _quick(inner)
        return lambda value: None if value is None else read(value)
    if form is _Form.TUPLE:
        read = _quick(inner)
        return lambda value: tuple(map(read, _exactly(list, value)))
    if form is _Form.MAPPING:
        read = _quick(inner)
        return lambda value: {key: read(item) for key, item in _exactly(dict, value).items()}
    if form is _Form.TEXT:
        return lambda value: _read_text(kind, _exactly(str, value), "")
    if form is _Form.OBJECT:
        return _quick_object(kind)
    return lambda value: _exactly(kind, value)


def _quick_object(kind: Any) -> Callable[[Any], Any]:
    members = [(name, _quick(hint)) for name, hint in _hints(kind).items()]

    def read(value: Any) -> Any:
        if len(_exactly(dict, value)) != len(members):
            raise _NotPlain
        try:
            return kind(**{name: read(value[name]) for name, read in members})
        except KeyError:
            raise _NotPlain from None

    return read


def _exactly(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise _NotPlain
    return value


class _Form(Enum):
    """How a type is written in JSON."""

    OPTIONAL, TUPLE, MAPPING, TEXT, OBJECT, PLAIN = range(6)


@functools.cache
def _form(kind: Any) -> tuple[_Form, Any]:
    """Return how ``kind`` is written, and the type of its elements. Cached: inspecting a type takes longer
    than reading a value."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return _Form.OPTIONAL, next(each for each in arguments if each is not type(None))
    if origin is tuple:
        return _Form.TUPLE, arguments[0]
    if origin in (dict, Mapping):
        return _Form.MAPPING, arguments[1]
    if kind in (Lsn, Position, datetime):
        return _Form.TEXT, None
    return (_Form.OBJECT if dataclasses.is_dataclass(kind) else _Form.PLAIN), None


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


@functools.cache
def _with_default(kind: Any) -> frozenset[str]:
    missing = dataclasses.MISSING
    return frozenset(
        each.name
        for each in dataclasses.fields(kind)
        if each.default is not missing or each.default_factory is not missing
    )


def _read_text(kind: Any, text: str, field: str) -> Any:
    try:
        if kind is not datetime:
            return kind.parse(text)
        moment = datetime.fromisoformat(text)
        if moment.tzinfo is None:
            raise FieldProblem(field, f"is {shortened(text)}, a time without a time zone")
        return moment.astimezone(UTC)
    except FieldProblem:
        raise
    except (ValueError, OverflowError):
        # A time near an end of the calendar may lie beyond it in UTC.
        raise FieldProblem(field, f"is {shortened(text)}, which is not a {kind.__name__}") from None


def _of_type(kind: type, value: Any, field: str) -> Any:
    # In Python True is an int; in a record it is not a number.
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise FieldProblem(field, f"must be {kind.__name__}, not {type(value).__name__}")
    return value
