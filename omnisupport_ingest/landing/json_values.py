"""Value types as JSON and back, strictly: what a type does not allow is an error that names the field.

One object per dataclass, one member per field. An unknown or missing member, or a value of another
type, is refused: a record that is read wrongly is worse than one that is not read.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from datetime import UTC, datetime
from typing import Any, TypeVar

from omnisupport_ingest.position import Lsn, Position

T = TypeVar("T")


class FieldProblem(ValueError):
    """``field`` (a path like ``files[0].rows``) holds something it may not."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field or 'the document'} {problem}")
        self.field = field


def to_plain(value: object) -> Any:
    """``value`` as objects, arrays, strings and numbers; times in UTC, positions as their text."""
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


def from_plain(kind: type[T], value: Any, field: str = "") -> T:
    """The value of type ``kind`` that ``to_plain`` gave ``value`` for; ``FieldProblem`` if none."""
    return typing.cast(T, _read(kind, value, field))


def _read(kind: Any, value: Any, field: str) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        inner = next(each for each in arguments if each is not type(None))
        return None if value is None else _read(inner, value, field)
    if origin is tuple:
        items = _of_type(list, value, field)
        return tuple(_read(arguments[0], item, f"{field}[{i}]") for i, item in enumerate(items))
    if origin is dict:
        members = _of_type(dict, value, field)
        return {key: _read(arguments[1], item, f"{field}.{key}") for key, item in members.items()}
    if kind in (Lsn, Position, datetime):
        return _read_text(kind, _of_type(str, value, field), field)
    if dataclasses.is_dataclass(kind):
        return _read_object(kind, _of_type(dict, value, field), field)
    return _of_type(kind, value, field)


def _read_object(kind: Any, members: dict[str, Any], field: str) -> Any:
    prefix = f"{field}." if field else ""
    hints = _hints(kind)
    for name in members.keys() - hints.keys():
        raise FieldProblem(prefix + name, "is not a field of this format version")
    for name in hints.keys() - members.keys():
        raise FieldProblem(prefix + name, "is missing")
    return kind(**{name: _read(hint, members[name], prefix + name) for name, hint in hints.items()})


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _read_text(kind: Any, text: str, field: str) -> Any:
    try:
        if kind is not datetime:
            return kind.parse(text)
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise FieldProblem(field, f"is {text!r}, which is not a {kind.__name__}") from None
    if moment.tzinfo is None:
        raise FieldProblem(field, f"is {text!r}, a time without a time zone")
    return moment.astimezone(UTC)


def _of_type(kind: type, value: Any, field: str) -> Any:
    # In Python true is an int; in a record it is not a number.
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise FieldProblem(field, f"must be {kind.__name__}, not {type(value).__name__}")
    return value
