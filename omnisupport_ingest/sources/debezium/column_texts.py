"""Makes PostgreSQL's texts of one column of many lines, from the bytes of the lines.

A text is taken over unchanged: a plain line has only escapes that ``json`` would write. Times, numbers and
bytes are converted together (``column_values``). Values that ``column_values`` does not know are converted
one by one, as in a single line.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from omnisupport_ingest.foreign import parse_row
from omnisupport_ingest.sources.debezium.column_values import converter_of, variable_decimals, zoned
from omnisupport_ingest.sources.debezium.handling import Handling
from omnisupport_ingest.sources.debezium.json_walk import Slot, Step, cut
from omnisupport_ingest.sources.debezium.line_blocks import Block, Flags
from omnisupport_ingest.sources.debezium.pg_numbers import Schema
from omnisupport_ingest.sources.debezium.targets import Target
from omnisupport_ingest.sources.debezium.unavailable import DISGUISES, UNAVAILABLE_TEXTS
from omnisupport_ingest.sources.debezium.values import (
    ISO_TIMESTAMP,
    MEANS_TEXT,
    VARIABLE_SCALE,
    ZONED,
    has_meaning,
    is_single,
    lands_as_it_comes,
    text_of,
)
from omnisupport_ingest.sources.postgres.protocol.text_columns import escape, escaped

_TEXTS = frozenset({"text", "character varying", "varchar", "uuid", "json", "jsonb", "xml", "inet", "cidr"})
"""Types whose arrays are read in bulk."""
_WHOLE_NUMBERS = frozenset({"smallint", "integer", "bigint", "oid"})
_CONVERTED = {
    **dict.fromkeys(("numeric", "bytea", "timestamptz", "timetz"), Step.TEXT),
    **dict.fromkeys(("timestamp", "date", "time", "interval"), Step.WHOLE),
}
"""Types whose values are converted → how a value without a Connect schema stands in the line."""
_STEPS = {
    "string": Step.TEXT,
    "bytes": Step.TEXT,
    **dict.fromkeys(("int8", "int16", "int32", "int64"), Step.WHOLE),
}
"""Connect's type → how its values stand in the line."""
_UNSENT = pa.array([escape(each) for each in UNAVAILABLE_TEXTS], pa.string())
_IN_A_LIST = "|".join(map(re.escape, sorted(DISGUISES)))
_UNSENT_LENGTHS = np.unique([len(escape(each)) for each in UNAVAILABLE_TEXTS])


class NotOrdinary(Exception):
    """Lines that are to be read one by one."""


@dataclass(frozen=True)
class Column:
    """The column ``name``: how its values stand in JSON, and the PostgreSQL type that they get.

    ``schema``: its Connect schema; empty if it has none. ``as_it_is``: PostgreSQL's text is the text in the
    line, without the quotes of a JSON string.
    """

    name: str
    step: Step
    target: Target
    handling: Handling
    schema: Schema = field(default_factory=dict)
    as_it_is: bool = False

    @property
    def verbatim(self) -> bool:
        """Whether a member stands in an image exactly as in the line, with its name and quotes."""
        return self.as_it_is and self.step is Step.TEXT

    def keep(self, block: Block, slot: Slot) -> Flags | None:
        """Return which values were certainly sent (are no unchanged TOAST); None: all."""
        if self.step is Step.TEXT:
            return _is_sent(block, slot)
        if self.step in (Step.TEXTS, Step.TEXTS_APART):
            return ~np.asarray(pc.fill_null(pc.match_substring_regex(cut(block, slot), _IN_A_LIST), False))
        return None

    def texts(self, block: Block, slot: Slot) -> pa.StringArray:
        """Return PostgreSQL's texts, as they stand between the quotes of a JSON string. Raises
        ``ValueFault``."""
        if self.as_it_is:
            return cut(block, slot, inside=1 if self.step is Step.TEXT else 0)
        if self.step is Step.FLAG:
            return pc.binary_slice(cut(block, slot).cast(pa.binary()), 0, 1).cast(pa.string())
        at_once = self._at_once(block, slot)
        if at_once is None:
            return escaped(self._each(block, slot))
        left = np.asarray(at_once.is_null()) & ~slot.is_null
        if not left.any():
            return at_once
        return pc.replace_with_mask(at_once, pa.array(left), escaped(self._each(block, slot[left])))

    def _at_once(self, block: Block, slot: Slot) -> pa.StringArray | None:
        """Return the texts of all values that can be converted in bulk, null for the others; None if no value
        can."""
        is_text = self.step is Step.TEXT
        if is_text and (zone := self._zone) is not None:
            return zoned(block, slot, zone)
        if self.step is Step.VARIABLE:
            return variable_decimals(cut(block, slot))
        if not is_text and self.step not in (Step.WHOLE, Step.NUMBER):
            return None
        convert = converter_of(self.schema, self.target, self.handling, is_text=is_text)
        return None if convert is None else convert(cut(block, slot, inside=1 if is_text else 0))

    @property
    def _zone(self) -> str | None:
        """Return what ``text_of`` appends to a UTC time that comes as a text; None: the text is not read as
        such a time."""
        if has_meaning(self.schema):
            meaning = self.schema["name"]
            has_zone = (
                self.target.name != "timestamp" if meaning == ZONED else self.target.name == "timestamptz"
            )
            return ("+00" if has_zone else "") if meaning in (ZONED, ISO_TIMESTAMP) else None
        if self.schema.get("type") == "bytes":
            return None
        return {"timestamptz": "+00", "timestamp": ""}.get(self.target.name)

    def _each(self, block: Block, slot: Slot) -> pa.StringArray:
        values = cut(block, slot).to_pylist()
        # Every digit of a fraction counts.
        read: Callable[[str], Any] = parse_row if self.step is Step.NUMBER else orjson.loads
        found = (None if each is None else read(each) for each in values)
        return pa.array(
            [text_of(each, self.schema, self.target, self.handling) for each in found], pa.string()
        )


def column_of(
    name: str, target: Target, sample: Any, handling: Handling, schema: Schema, *, separator: int = 1
) -> Column:
    """Return the column of ``target``. Raises ``NotOrdinary`` if its values must be read one by one.

    ``sample``: one of its values. ``schema``: as of ``Column``. ``separator``: the text between the elements
    of a list.
    """
    if not all(isinstance(schema.get(each, ""), str) for each in ("name", "type")):
        raise NotOrdinary
    column = partial(Column, name, target=target, handling=handling, schema=schema)
    is_text, kind = isinstance(sample, str), schema.get("type")
    if isinstance(sample, dict) and _is_variable(schema, target):
        return column(step=Step.VARIABLE)
    if has_meaning(schema) or kind == "bytes":
        if kind not in _STEPS or isinstance(sample, dict | list | float | bool):
            raise NotOrdinary
        return column(step=_STEPS[kind], as_it_is=schema.get("name") in MEANS_TEXT)
    is_number = isinstance(sample, int | float) and not isinstance(sample, bool)
    if is_single(schema, target) is not None and (is_text or is_number or sample is None):
        return column(step=Step.TEXT if is_text else Step.NUMBER)
    if target.name == "numeric" and is_number:
        return column(step=Step.NUMBER)
    if lands_as_it_comes(target) and (is_text or sample is None):
        return column(step=Step.TEXT, as_it_is=True)
    if target.name in _WHOLE_NUMBERS:
        return column(step=Step.WHOLE, as_it_is=True)
    if target.name == "boolean":
        return column(step=Step.FLAG)
    if target.name in _CONVERTED:
        return column(step=Step.TEXT if is_text else _CONVERTED[target.name])
    if target.element is not None and target.element.name in _TEXTS:
        return column(step=Step.TEXTS if separator == 1 else Step.TEXTS_APART)
    raise NotOrdinary


def _is_variable(schema: Schema, target: Target) -> bool:
    """Whether objects in the column are decimals, each with its own scale."""
    return schema["name"] == VARIABLE_SCALE if has_meaning(schema) else target.name == "numeric"


def _is_sent(block: Block, slot: Slot) -> Flags | None:
    suspicious = np.flatnonzero(np.isin(slot.ends - slot.begins - 2, _UNSENT_LENGTHS))
    if not len(suspicious):
        return None
    sent = np.ones(len(slot.begins), np.bool_)
    sent[suspicious] = ~np.asarray(pc.is_in(cut(block, slot[suspicious], inside=1), _UNSENT))
    return sent
