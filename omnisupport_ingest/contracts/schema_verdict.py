"""Fast validation by our own JSON Schemas, without the place or reason of a problem.

A home with hundreds of contracts reads all of them in each process, and nearly always all are valid. So a
schema is compiled into functions that return True or False. jsonschema, which finds place and reason, runs if
they return False, and if a case is not covered here: then ``Unsure`` is raised. The keywords that our schemas
use (JSON Schema 2020-12, validation vocabulary) are covered; a schema with any other keyword is not compiled.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Verdict = Callable[[Any], bool]


class Unsure(Exception):
    """Raised for a schema or a value that only jsonschema can judge."""


def compile_schema(schema: Mapping[str, Any]) -> Verdict:
    """Return a function that returns whether a value is valid by ``schema``, or raises ``Unsure``.

    Raises ``Unsure`` itself if a keyword of ``schema`` is not covered.
    """
    return _Compiler(schema).compiled(schema)


_ANNOTATIONS = frozenset(("$schema", "$defs", "$comment", "title", "description", "writeOnly"))
_APART = frozenset(("then", "else"))
"""Read with ``if``."""


class _Compiler:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._defined: dict[str, Verdict] = {}

    def compiled(self, schema: Mapping[str, Any] | bool) -> Verdict:
        if isinstance(schema, bool):
            return lambda _: schema
        checks = [
            self._keyword(schema, word)
            for word in schema
            if word not in _ANNOTATIONS and word not in _APART and word != "additionalProperties"
        ]
        if "additionalProperties" in schema:
            checks.append(self._additional(schema))
        return _all(checks)

    def _keyword(self, schema: Mapping[str, Any], word: str) -> Verdict:
        given = schema[word]
        if word in _PLAIN:
            return _PLAIN[word](given)
        makers: Mapping[str, Callable[[Any], Verdict]] = {
            "$ref": self._reference,
            "properties": self._properties,
            "propertyNames": self._property_names,
            "items": self._items,
            "not": self._not,
            "allOf": lambda parts: _all([self.compiled(each) for each in parts]),
            "anyOf": lambda parts: self._counted(parts, lambda found: found >= 1),
            "oneOf": lambda parts: self._counted(parts, lambda found: found == 1),
            "if": lambda _: self._if(schema),
        }
        if word not in makers:
            raise Unsure(word)
        return makers[word](given)

    def _reference(self, name: str) -> Verdict:
        if not name.startswith("#/"):
            raise Unsure(name)
        if name not in self._defined:
            # Put there first, as a definition may refer to itself.
            self._defined[name] = lambda value: made(value)
            found: Any = self._root
            for part in name[2:].split("/"):
                found = found[part]
            made = self.compiled(found)
        return self._defined[name]

    def _properties(self, properties: Mapping[str, Any]) -> Verdict:
        checks = {name: self.compiled(each) for name, each in properties.items()}

        def check(value: Any) -> bool:
            return type(value) is not dict or all(
                checks[name](each) for name, each in value.items() if name in checks
            )

        return check

    def _additional(self, schema: Mapping[str, Any]) -> Verdict:
        if "patternProperties" in schema:
            raise Unsure("patternProperties")
        known, check = frozenset(schema.get("properties", ())), self.compiled(schema["additionalProperties"])
        return lambda value: (
            type(value) is not dict or all(check(each) for name, each in value.items() if name not in known)
        )

    def _property_names(self, schema: Mapping[str, Any]) -> Verdict:
        check = self.compiled(schema)
        return lambda value: type(value) is not dict or all(map(check, value))

    def _items(self, schema: Mapping[str, Any]) -> Verdict:
        check = self.compiled(schema)
        return lambda value: type(value) is not list or all(map(check, value))

    def _not(self, schema: Mapping[str, Any]) -> Verdict:
        check = self.compiled(schema)
        return lambda value: not check(value)

    def _counted(self, parts: Sequence[Mapping[str, Any]], enough: Callable[[int], bool]) -> Verdict:
        checks = [self.compiled(each) for each in parts]
        return lambda value: enough(sum(check(value) for check in checks))

    def _if(self, schema: Mapping[str, Any]) -> Verdict:
        holds = self.compiled(schema["if"])
        then, other = self.compiled(schema.get("then", True)), self.compiled(schema.get("else", True))
        return lambda value: then(value) if holds(value) else other(value)


def _all(checks: Sequence[Verdict]) -> Verdict:
    if len(checks) == 1:
        return checks[0]
    return lambda value: all(check(value) for check in checks)


_TYPES: Mapping[str, Callable[[Any], bool]] = {
    "object": lambda value: type(value) is dict,
    "array": lambda value: type(value) is list,
    "string": lambda value: type(value) is str,
    "boolean": lambda value: type(value) is bool,
    "null": lambda value: value is None,
    "integer": lambda value: type(value) is int or (type(value) is float and value.is_integer()),
    "number": lambda value: type(value) in (int, float),
}


def _type(given: str | Sequence[str]) -> Verdict:
    checks = [_TYPES[each] for each in ([given] if isinstance(given, str) else given)]
    return checks[0] if len(checks) == 1 else lambda value: any(check(value) for check in checks)


def _enum(given: Sequence[Any]) -> Verdict:
    # In JSON Schema true does not equal 1, and 1.0 does.
    scalars = frozenset((type(each) is bool, each) for each in given if type(each) not in (list, dict))
    only_scalars = len(scalars) == len(given)

    def check(value: Any) -> bool:
        if type(value) not in (list, dict):
            return (type(value) is bool, value) in scalars
        if only_scalars:
            return False
        raise Unsure("enum")

    return check


def _unique(given: bool) -> Verdict:
    def check(value: Any) -> bool:
        if type(value) is not list or not given:
            return True
        if any(type(each) in (list, dict) for each in value):
            raise Unsure("uniqueItems")
        return len({(type(each) is bool, each) for each in value}) == len(value)

    return check


def _pattern(given: str) -> Verdict:
    search = re.compile(given).search
    return lambda value: type(value) is not str or search(value) is not None


def _required(given: Sequence[str]) -> Verdict:
    return lambda value: type(value) is not dict or all(name in value for name in given)


def _sized(
    of: type[str] | type[list[Any]] | type[dict[str, Any]], enough: Callable[[int, int], bool]
) -> Callable[[int], Verdict]:
    return lambda given: lambda value: type(value) is not of or enough(len(value), given)


def _compared(enough: Callable[[float, float], bool]) -> Callable[[float], Verdict]:
    return lambda given: lambda value: type(value) not in (int, float) or enough(value, given)


_PLAIN: Mapping[str, Callable[[Any], Verdict]] = {
    "type": _type,
    "enum": _enum,
    "const": lambda given: _enum([given]),
    "pattern": _pattern,
    "required": _required,
    "uniqueItems": _unique,
    "minLength": _sized(str, lambda size, least: size >= least),
    "maxLength": _sized(str, lambda size, most: size <= most),
    "minItems": _sized(list, lambda size, least: size >= least),
    "maxItems": _sized(list, lambda size, most: size <= most),
    "minProperties": _sized(dict, lambda size, least: size >= least),
    "maxProperties": _sized(dict, lambda size, most: size <= most),
    "minimum": _compared(lambda value, least: value >= least),
    "maximum": _compared(lambda value, most: value <= most),
    "exclusiveMinimum": _compared(lambda value, least: value > least),
    "exclusiveMaximum": _compared(lambda value, most: value < most),
}
