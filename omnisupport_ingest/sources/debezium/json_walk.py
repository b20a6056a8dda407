"""Reads many lines of JSON that one program wrote alike, in one compiled pass (``compiled_lines.c``).

The caller knows what comes next in each line: text that is the same in all of them, or a value. A line with
anything else is dropped. So every line that is left has been read byte by byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from omnisupport_ingest.compiled import Texts, buffer_of, compiled_lines, texts_of
from omnisupport_ingest.sources.debezium.line_blocks import Block, Flags, Places

VARIABLE_DECIMAL = (
    r'^\{"scale": ?(?P<scale>0|-?[1-9][0-9]{0,8}), ?"value": ?"(?P<unscaled>[A-Za-z0-9+/]*={0,2})"\}$'
)


class Step(IntEnum):
    """What comes next in a line: a text that is the same in all lines, or the kind of a value.

    Instead of a value ``null`` may stand.
    """

    EXPECT = 0
    TEXT = 1
    """A text without control characters, with no escapes but those that ``json`` writes."""

    WHOLE = 2
    """A whole number of 64 bits, as JSON writes it."""

    NUMBER = 3
    """A number of at most 40 characters, as JSON writes it."""

    VARIABLE = 4
    """A decimal that has its own scale (``VARIABLE_DECIMAL``)."""

    FLAG = 5
    TEXTS = 6
    """A list of at most 100 texts and nulls."""

    TEXTS_APART = 7
    """Such a list, with a blank after each comma."""


@dataclass(frozen=True)
class Slot:
    """A value in each line: bytes ``begins`` to ``ends`` of the block, a text with its quotes. ``is_null``:
    whether it is ``null``."""

    begins: Places
    ends: Places
    is_null: Flags

    def __getitem__(self, chosen: Any) -> Slot:
        return Slot(self.begins[chosen], self.ends[chosen], self.is_null[chosen])


@dataclass(frozen=True)
class Walk:
    """A walk through lines: what comes, one thing after the other. A text is expected as it is."""

    parts: tuple[bytes | Step, ...]

    def through(self, block: Block, lines: Places) -> tuple[Places, list[Slot]]:
        """Return which of ``lines`` (line numbers from 0) have exactly these parts, and their values."""
        values = len(self.parts) - len(self._expected)
        if compiled_lines is None or not len(lines):
            return lines[:0], [Slot(lines[:0], lines[:0], np.zeros(0, np.bool_))] * values
        starts, stops = (np.ascontiguousarray(each, np.int64) for each in (block.starts, block.stops))
        *found, count = compiled_lines.walk(
            block.content, starts, stops, np.ascontiguousarray(lines, np.int64), *self._program
        )
        kept, begins, ends = (np.frombuffer(buffer_of(each), np.int64) for each in found[:3])
        is_null = np.frombuffer(buffer_of(found[3]), np.bool_)
        tables = [each.reshape(values, len(lines))[:, :count] for each in (begins, ends, is_null)]
        return kept, [Slot(*each) for each in zip(*tables, strict=True)]

    @cached_property
    def _expected(self) -> Sequence[bytes]:
        return [each for each in self.parts if isinstance(each, bytes)]

    @cached_property
    def _program(self) -> tuple[bytes, Texts]:
        steps = bytes(Step.EXPECT if isinstance(each, bytes) else each for each in self.parts)
        places = np.cumsum([0, *map(len, self._expected)]).astype(np.int32)
        return steps, (b"".join(self._expected), places)


def cut(block: Block, slot: Slot, *, inside: int = 0) -> pa.StringArray:
    """Return the text of ``slot``, null where the slot is null. ``inside``: characters to leave out at each
    end."""
    assert compiled_lines is not None, "slots are found by compiled functions"
    found = compiled_lines.cut(block.content, *_arrays(slot), inside)
    return texts_of(found, len(slot.begins), is_utf8=True)


def numbers(block: Block, slot: Slot) -> pa.Int64Array:
    """Return the whole numbers of ``slot``, null where the slot is null."""
    assert compiled_lines is not None, "slots are found by compiled functions"
    found = np.frombuffer(buffer_of(compiled_lines.numbers(block.content, *_arrays(slot))), np.int64)
    return pa.array(found, mask=slot.is_null if slot.is_null.any() else None)


def _arrays(slot: Slot) -> tuple[Places, Places, Flags]:
    contiguous = np.ascontiguousarray
    return contiguous(slot.begins), contiguous(slot.ends), contiguous(slot.is_null)
