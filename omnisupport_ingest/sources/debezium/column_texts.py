"""PostgreSQL's texts of a column of many lines, from the letters that stand in the lines.

A text is taken as it stands: a plain line has no escape that ``json`` would not write. Times in UTC are
made by arithmetic; other types value by value, as of a single line.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from omnisupport_ingest.sources.debezium.handling import Handling
from omnisupport_ingest.sources.debezium.json_walk import Slot, Walk, cut
from omnisupport_ingest.sources.debezium.line_blocks import Block, Flags
from omnisupport_ingest.sources.debezium.pg_numbers import Schema
from omnisupport_ingest.sources.debezium.targets import Target
from omnisupport_ingest.sources.debezium.unavailable import DISGUISES, UNAVAILABLE_TEXTS
from omnisupport_ingest.sources.debezium.values import MEANS_TEXT, ZONED, has_meaning, text_of
from omnisupport_ingest.sources.postgres.protocol.text_columns import escape, escaped

PLAIN_TEXTS = frozenset(
    {"text", "character varying", "varchar", "uuid", "json", "jsonb", "xml", "inet", "cidr"}
)
_WHOLE_NUMBERS = frozenset({"smallint", "integer", "bigint"})
_ONE_BY_ONE = {"numeric": Walk.text, "bytea": Walk.text, "timestamp": Walk.whole, "date": Walk.whole}
"""Types whose texts are made value by value, and what they come as."""
_STEPS = {
    "string": Walk.text,
    "bytes": Walk.text,
    **dict.fromkeys(("int8", "int16", "int32", "int64"), Walk.whole),
}
"""Connect's type → what its values come as."""
_UNSENT = pa.array([escape(each) for each in UNAVAILABLE_TEXTS], pa.string())
_IN_A_LIST = "|".join(map(re.escape, sorted(DISGUISES)))
_UNSENT_LENGTHS = np.unique([len(escape(each)) for each in UNAVAILABLE_TEXTS])


class NotOrdinary(Exception):
    """Lines that are to be read one by one."""


@dataclass(frozen=True)
class Column:
    """A column called ``name``: what its values are in JSON, and what they become.

    ``schema``: what stands beside its values as theirs, empty if nothing does. ``as_it_is``: the text is the
    letters that it came as, but for the quotes of a JSON string.
    """

    name: str
    step: Callable[[Walk], None]
    target: Target
    handling: Handling
    schema: Schema = field(default_factory=dict)
    as_it_is: bool = False

    @property
    def verbatim(self) -> bool:
        """Whether its members are the same in a line and in an image, name, quotes and all."""
        return self.as_it_is and self.step is Walk.text

    def keep(self, block: Block, slot: Slot) -> Flags | None:
        """Which of the values surely were sent (no unchanged TOAST); None: all."""
        if self.step is Walk.text:
            return _is_sent(block, slot)
        if self.step in (Walk.texts, Walk.texts_apart):
            return ~np.asarray(pc.fill_null(pc.match_substring_regex(cut(block, slot), _IN_A_LIST), False))
        return None

    def texts(self, block: Block, slot: Slot) -> pa.StringArray:
        """PostgreSQL's texts, as they stand between the quotes of a JSON string. ``ValueFault``"""
        if self.as_it_is:
            return cut(block, slot, inside=1 if self.step is Walk.text else 0)
        if self.step is Walk.flag:
            return pc.binary_slice(cut(block, slot).cast(pa.binary()), 0, 1).cast(pa.string())
        if self.step is Walk.text and self._is_zoned:
            times = _zoned(block, slot)
            if times is not None:
                return times
        return escaped(self._each(cut(block, slot)))

    @property
    def _is_zoned(self) -> bool:
        """Whether ``text_of`` takes its values for times with a zone, and so writes them."""
        if meaning := self.schema.get("name"):
            return meaning == ZONED and self.target.name != "timestamp"
        return self.target.name == "timestamptz" and self.schema.get("type") != "bytes"

    def _each(self, values: pa.StringArray) -> pa.StringArray:
        read = (None if each is None else orjson.loads(each) for each in values.to_pylist())
        return pa.array(
            [text_of(each, self.schema, self.target, self.handling) for each in read], pa.string()
        )


def column_of(
    name: str, target: Target, sample: Any, handling: Handling, schema: Schema, *, separator: int = 1
) -> Column:
    """The column of ``target``; ``NotOrdinary`` for values that are read one by one. ``sample``: one of them.
    ``schema``: as of ``Column``. ``separator``: letters between the elements of a list."""
    column = partial(Column, name, target=target, handling=handling, schema=schema)
    is_text, kind = isinstance(sample, str), schema.get("type")
    if has_meaning(schema) or kind == "bytes":
        if kind not in _STEPS or isinstance(sample, dict | list | float | bool):
            raise NotOrdinary
        return column(step=_STEPS[kind], as_it_is=schema.get("name") in MEANS_TEXT)
    if target.name in PLAIN_TEXTS or (not target.name and (is_text or sample is None)):
        return column(step=Walk.text, as_it_is=True)
    if target.name in _WHOLE_NUMBERS:
        return column(step=Walk.whole, as_it_is=True)
    if target.name == "boolean":
        return column(step=Walk.flag)
    if target.name == "timestamptz":
        return column(step=Walk.text)
    if target.name in _ONE_BY_ONE:
        return column(step=Walk.text if is_text else _ONE_BY_ONE[target.name])
    if target.element is not None and target.element.name in PLAIN_TEXTS:
        return column(step=Walk.texts if separator == 1 else Walk.texts_apart)
    raise NotOrdinary


def _is_sent(block: Block, slot: Slot) -> Flags | None:
    suspicious = np.flatnonzero(np.isin(slot.ends - slot.begins - 2, _UNSENT_LENGTHS))
    if not len(suspicious):
        return None
    sent = np.ones(len(slot.begins), np.bool_)
    sent[suspicious] = ~np.asarray(pc.is_in(cut(block, slot[suspicious], inside=1), _UNSENT))
    return sent


_SHORTEST, _LONGEST = len('"2026-02-28T13:14:15Z"'), len('"2026-02-28T13:14:15.123456Z"')
_LIKE = np.frombuffer(b"0000-00-00 00:00:00.000000+00", np.uint8)
_DAYS = np.array([0, 31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31], np.uint8)


def _zoned(block: Block, slot: Slot) -> pa.StringArray | None:
    """``2026-02-28T13:14:15.120000Z`` as ``2026-02-28 13:14:15.12+00``; None if any is not of this form."""
    whole, count = slot, len(slot.begins)
    if slot.is_null.any():
        slot = slot[~slot.is_null]
    lengths = slot.ends - slot.begins
    if not len(lengths) or lengths.min() < _SHORTEST or lengths.max() > _LONGEST:
        return None
    letters = block.letters
    # Behind the shortest there may be other things, which are not looked at.
    window = np.ndarray((len(letters) - 27, 28), np.uint8, buffer=block.content, strides=(1, 1))[slot.begins]
    made = window[:, 1:]
    fraction_digits = np.maximum(lengths - _SHORTEST - 1, 0)
    digits = made - ord("0")
    places = np.arange(27)
    is_digit = np.broadcast_to(_LIKE[:27] == ord("0"), made.shape) & (places < 20 + fraction_digits[:, None])
    if (is_digit & (digits > 9)).any():
        return None
    numbers = {at: digits[:, at] * 10 + digits[:, at + 1] for at in (0, 2, 5, 8, 11, 14, 17)}
    year = numbers[0].astype(np.int16) * 100 + numbers[2]
    leap = (year % 4 == 0) & ((year % 100 != 0) | (year % 400 == 0))
    month, day = numbers[5], numbers[8]
    right = (year >= 1000) & (month >= 1) & (month <= 12) & (day >= 1)
    right &= day <= _DAYS[np.minimum(month, 12)] - ((month == 2) & ~leap)
    right &= (numbers[11] < 24) & (numbers[14] < 60) & (numbers[17] < 60)
    for at, letter in ((4, "-"), (7, "-"), (10, "T"), (13, ":"), (16, ":")):
        right &= made[:, at] == ord(letter)
    has_point = lengths > _SHORTEST
    right &= ~has_point | ((made[:, 19] == ord(".")) & (fraction_digits > 0))
    right &= letters[slot.ends - 2] == ord("Z")
    if not right.all():
        return None
    # The zeros at the end of a fraction go, and a point without one.
    in_fraction = (places >= 20) & is_digit & (digits != 0)
    kept = np.where(in_fraction.any(axis=1), 27 - in_fraction[:, ::-1].argmax(axis=1), 19)
    return _joined(made, kept, whole.is_null, count)


def _joined(
    made: npt.NDArray[np.uint8], kept: npt.NDArray[np.int64], is_null: Flags, count: int
) -> pa.StringArray:
    """The first ``kept`` letters of each row of ``made`` and the zone, null where ``is_null``."""
    full = np.empty((len(made), 30), np.uint8)
    full[:, :27] = made
    full[:, 10] = ord(" ")
    rows = np.arange(len(made))
    for number, letter in enumerate(b"+00"):
        full[rows, kept + number] = letter
    lengths = np.zeros(count, np.int64)
    lengths[~is_null] = kept + 3
    offsets = np.zeros(count + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    content = full[np.arange(30) < (kept + 3)[:, None]]
    validity = pa.py_buffer(np.packbits(~is_null, bitorder="little")) if is_null.any() else None
    return pa.StringArray.from_buffers(count, pa.py_buffer(offsets), pa.py_buffer(content), validity)
