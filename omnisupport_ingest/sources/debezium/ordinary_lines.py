"""Reads ordinary lines in bulk: changes of one table that were written alike, without a Python object each.

A line is ordinary if it has, byte for byte, the form of another line (``line_forms``): the text between the
values is the same, and ``column_texts`` knows the types of the values. A line that may not be ordinary goes
through ``line_reader``, one by one. Both ways land the same text; generated lines in the tests prove that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from omnisupport_ingest.compiled import compiled_lines
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.landing.rows import EVENT_SCHEMA
from omnisupport_ingest.sources.debezium import line_forms
from omnisupport_ingest.sources.debezium.column_texts import Column, NotOrdinary
from omnisupport_ingest.sources.debezium.faults import ValueFault
from omnisupport_ingest.sources.debezium.handling import BY_POSITION, Handling
from omnisupport_ingest.sources.debezium.json_walk import Slot, cut, numbers
from omnisupport_ingest.sources.debezium.line_blocks import Block, Flags, Places
from omnisupport_ingest.sources.debezium.line_forms import Form, form_of
from omnisupport_ingest.sources.debezium.orders import Orders
from omnisupport_ingest.sources.debezium.positions import (
    LSN,
    LSN_LIMIT,
    ORDER_BITS,
    SNAPSHOT_BASE,
    TRANSACTION,
)
from omnisupport_ingest.sources.debezium.shown_schemas import First, ShownSchemas
from omnisupport_ingest.sources.postgres.protocol.text_columns import (
    escaped,
    json_arrays,
    json_objects,
    keep_freed_memory,
)

LEAST_LINES = 64
"""With fewer lines of one form in a block, reading them in bulk costs more than it saves."""

_MOST_FORMS = 64
_MOST_NEW = 16
"""After so many new forms are tried in a block, the lines that are left are read one by one."""

_LONGEST_MICROS = 253_402_300_800_000_000
"""Microseconds from 1970 to the end of the year 9999."""

_TEXT, _WHOLE = pa.string(), pa.int64()


class OrdinaryLines:
    """Reads the ordinary lines of one source."""

    def __init__(
        self,
        contracts: Sequence[TableContract],
        handling: Handling,
        orders: Orders,
        shown: ShownSchemas | None = None,
    ) -> None:
        """``shown``: collects the schemas of the rows that are read."""
        keep_freed_memory()
        self._shown = ShownSchemas() if shown is None else shown
        self._contracts = {each.table_name: each for each in contracts}
        self._handling, self._orders = handling, orders
        self._forms: dict[str, list[Form]] = {}
        self.tables: dict[str, TableContract] = {}
        """The contracts of the tables whose ordinary lines were read, by name."""

    def read(self, block: Block, epoch: int, start: int = 0) -> tuple[list[pa.Table], Sequence[int]]:
        """Return the events of the ordinary lines of ``block`` from line ``start`` on, as tables of
        ``EVENT_SCHEMA`` (none or one), and the numbers of the other lines.

        No line is ordinary until the source is known to have the order of a log.
        """
        others = np.arange(start, len(block))
        if self._orders.known not in (TRANSACTION, LSN) or self._handling.order != BY_POSITION:
            return [], others.tolist()
        if compiled_lines is None or not block.is_utf8:
            return [], others.tolist()
        left = others[block.stops[start:] > block.starts[start:]]
        taken: list[_Taken] = []
        forms = self._forms.setdefault(block.name, [])
        for form in forms:
            left = self._take(form, block, left, epoch, taken)
        for asked in range(_MOST_NEW):
            if len(left) < LEAST_LINES or len(forms) == _MOST_FORMS:
                break
            # The lines tried are spread over the block: neighbours often have the same form.
            at = asked * len(left) // _MOST_NEW
            new = self._form_of(block.line(left[at]), block)
            if new is None:
                left = np.delete(left, at)
                continue
            before = len(taken)
            left = self._take(new, block, left, epoch, taken)
            if len(taken) > before:
                forms.append(new)
        return self._all_of(taken, others, block)

    def _form_of(self, line: bytes, block: Block) -> Form | None:
        in_file = block.first_row is not None
        try:
            return form_of(line, self._contracts, self._handling, block.name, in_file=in_file)
        except (NotOrdinary, orjson.JSONDecodeError, UnicodeDecodeError):
            # Two values that are no UTF-8 may be UTF-8 side by side, as the block is looked at.
            return None

    def _take(self, form: Form, block: Block, lines: Places, epoch: int, taken: list[_Taken]) -> Places:
        """Read those of ``lines`` that have ``form``, if they are many. Returns the lines that may have
        another form."""
        if len(lines) < LEAST_LINES:
            return lines
        order = self._orders.known
        found, slots = form.walk(block, lines)
        if len(found) >= LEAST_LINES:
            try:
                changes = _Changes(form, block, found, slots).ordinary(order)
                if len(changes.lines) >= LEAST_LINES:
                    events = changes.events(epoch, order)
                    taken.append(_Taken(form, changes.lines, events, *changes.lives()))
                    # The other lines may have values that were not sent; such lines have a form of their own.
                    found = changes.lines
            except (ValueFault, pa.ArrowInvalid):
                pass
        return np.setdiff1d(lines, found, assume_unique=True)

    def _all_of(
        self, taken: Sequence[_Taken], others: Places, block: Block
    ) -> tuple[list[pa.Table], Sequence[int]]:
        highest = [each.highest for each in taken if each.highest is not None]
        lowest = [each.lowest for each in taken if each.lowest is not None]
        if not taken or not self._orders.take_all(max(highest, default=None), min(lowest, default=None)):
            return [], others.tolist()
        for each in taken:
            self.tables[each.form.contract.name] = each.form.contract
            self._note_schema(each, block)
        lines = np.concatenate([each.lines for each in taken])
        left = np.setdiff1d(others, lines, assume_unique=True).tolist()
        events = taken[0].events
        if len(taken) > 1:
            # In the order of the lines, so that columns that ascend in the file still ascend.
            events = (
                pa.concat_tables([each.events for each in taken]).combine_chunks().take(np.argsort(lines))
            )
        return [events], left

    def _note_schema(self, taken: _Taken, block: Block) -> None:
        schema, at = taken.form.schema, int(taken.lines.min())
        if schema is None:
            return
        if block.first_row is not None:
            first: First = block.first_row + at
        else:
            first = block.line(at) if block.delivered is None else block.delivered[at].as_py()
        latest = pc.max(taken.events.column("source_ts")).as_py()
        self._shown.add(taken.form.contract, schema, first, latest, len(taken.lines))


@dataclass(frozen=True, slots=True)
class _Taken:
    """Lines that were read; ``highest`` and ``lowest`` as of ``_Changes.lives``."""

    form: Form
    lines: Places
    events: pa.Table
    highest: int | None
    lowest: int | None


@dataclass(frozen=True)
class _Changes:
    """Lines of one form, as columns."""

    form: Form
    block: Block
    lines: Places
    slots: Mapping[str, Slot]

    def ordinary(self, order: str | None) -> _Changes:
        """Return those lines that are ordinary in a source of ``order``."""
        kept = self._ordinary(order)
        if kept.all():
            return self
        slots = {name: slot[kept] for name, slot in self.slots.items()}
        return _Changes(self.form, self.block, self.lines[kept], slots)

    def _ordinary(self, order: str | None) -> Flags:
        op, lsn, micros, total_order = self._op, self._lsn, self._micros, self._total_order
        sequence = self.slots.get(line_forms.SEQUENCE)
        kept = pc.is_in(op, pa.array(self._ops()))
        for each in (
            pc.and_kleene(pc.greater_equal(lsn, 0), pc.less(lsn, LSN_LIMIT)),
            pc.and_kleene(pc.greater(micros, 0), pc.less(micros, _LONGEST_MICROS)),
            pc.equal(pc.is_valid(total_order), order == TRANSACTION),
            # The identity of a row that a snapshot read has its content, which can only be hashed row by row.
            pc.or_kleene(pc.not_equal(op, "r"), pa.scalar(order == TRANSACTION)),
            pc.fill_null(pc.greater_equal(total_order, 0), True),
        ):
            kept = pc.and_kleene(kept, pc.fill_null(each, False))
        flags = np.asarray(pc.fill_null(kept, False)).copy()
        if sequence is not None:
            # It stands in quotes, where null does not mean NULL.
            flags &= ~sequence.is_null & (np.asarray(self._commit_before) >= 0)
        for image, columns in self.form.images.items():
            for column in columns:
                sent = column.keep(self.block, self._value(image, column))
                if sent is not None:
                    flags &= sent
        for name in self.form.contract.key:
            flags &= ~self.slots[f"{self._image_of_row}.{name}"].is_null
        return flags

    def lives(self) -> tuple[int | None, int | None]:
        """Return the highest LSN of those without ``sequence[0]``, and the lowest ``sequence[0]``."""
        before, lsn = self._commit_before, self._lsn
        first = pc.equal(before, 0)
        highest = pc.max(pc.if_else(first, lsn, None)).as_py()
        lowest = pc.min(pc.if_else(first, None, before)).as_py()
        return highest, lowest

    def events(self, epoch: int, order: str | None) -> pa.Table:
        """Return the events as a table of ``EVENT_SCHEMA``."""
        count, contract, op, before = len(self.lines), self.form.contract, self._op, self._commit_before
        lsn = self._lsn
        key_columns = [self._texts(self._image_of_row, each) for each in self._key()]
        keys = json_arrays(key_columns)
        ordinal = pc.bit_wise_or(
            pc.shift_left(lsn, pa.scalar(ORDER_BITS, _WHOLE)),
            pc.bit_wise_and(pc.fill_null(self._total_order, 0), pa.scalar((1 << ORDER_BITS) - 1, _WHOLE)),
        )
        first_read = pc.and_kleene(pc.equal(op, "r"), pc.equal(before, 0))
        ordinal = pc.if_else(first_read, pc.add(ordinal, pa.scalar(SNAPSHOT_BASE, _WHOLE)), ordinal)
        columns: dict[str, Any] = {
            "commit_lsn": before,
            "ordinal": ordinal,
            "op": op,
            "source_ts": self._micros.cast(EVENT_SCHEMA.field("source_ts").type),
            "tx_id": self._number(line_forms.TX_ID),
            "lsn": lsn,
            "key": keys,
            "envelope": self._delivered(),
        }
        if "after" not in self.form.images:
            columns["before"] = json_objects(contract.key, key_columns)
        else:
            columns["after"] = self._image("after")
            if "before" in self.form.images:
                columns["before"] = pc.if_else(pc.equal(op, "u"), self._image("before"), None)
        if order == LSN:
            start = orjson.dumps([contract.schema, contract.table]).decode()[:-1]
            columns["identity"] = pc.binary_join_element_wise(
                start + ',"', escaped(keys), '","', op, '"]', ""
            )
        if self.block.first_row is not None:
            columns["file_row"] = pa.array(self.lines + self.block.first_row, _WHOLE)
        unsent = list(self.form.unsent) or None
        same = {
            "epoch": epoch,
            "unchanged": unsent,
            "source_schema": contract.schema,
            "source_table": contract.table,
        }
        arrays = [
            columns[each.name]
            if each.name in columns
            else pa.repeat(pa.scalar(same.get(each.name), each.type), count)
            for each in EVENT_SCHEMA
        ]
        return pa.Table.from_arrays(arrays, schema=EVENT_SCHEMA)

    @property
    def _image_of_row(self) -> str:
        """The image with the key of the row: ``before`` for a delete."""
        return "after" if "after" in self.form.images else "before"

    def _ops(self) -> list[str]:
        return ["c", "u", "r"] if "after" in self.form.images else ["d"]

    def _number(self, name: str) -> pa.Int64Array:
        if name not in self._numbers:
            slot = self.slots.get(name)
            self._numbers[name] = (
                pa.nulls(len(self.lines), _WHOLE) if slot is None else numbers(self.block, slot)
            )
        return self._numbers[name]

    @cached_property
    def _numbers(self) -> dict[str, pa.Int64Array]:
        return {}

    @cached_property
    def _op(self) -> pa.StringArray:
        if self.form.op is not None:
            return pa.repeat(pa.scalar(self.form.op, _TEXT), len(self.lines))
        return cut(self.block, self.slots[line_forms.OP], inside=1)

    @cached_property
    def _lsn(self) -> pa.Int64Array:
        return self._number(line_forms.LSN)

    @cached_property
    def _total_order(self) -> pa.Int64Array:
        return self._number(line_forms.TOTAL_ORDER)

    @cached_property
    def _micros(self) -> pa.Int64Array:
        """The commit time in microseconds since 1970, at the finest resolution that the event has."""
        if line_forms.TS_US in self.slots and not self.slots[line_forms.TS_US].is_null.any():
            return self._number(line_forms.TS_US)
        # Checked: an overflow would give a wrong time.
        millis = pc.multiply_checked(self._number(line_forms.TS_MS), 1000)
        nanos = pc.divide(self._number(line_forms.TS_NS), 1000)
        return pc.coalesce(self._number(line_forms.TS_US), nanos, millis)

    @cached_property
    def _commit_before(self) -> pa.Int64Array:
        return pc.fill_null(self._number(line_forms.SEQUENCE), 0)

    def _delivered(self) -> pa.StringArray:
        delivered = self.block.delivered
        if delivered is not None:
            chosen = delivered if len(self.lines) == len(delivered) else delivered.take(pa.array(self.lines))
            return chosen.cast(_TEXT)
        starts, stops = self.block.starts[self.lines], self.block.stops[self.lines]
        return cut(self.block, Slot(starts, stops, np.zeros(len(starts), np.bool_)))

    def _key(self) -> list[Column]:
        columns = {each.name: each for each in self.form.images[self._image_of_row]}
        return [columns[name] for name in self.form.contract.key]

    def _value(self, image: str, column: Column) -> Slot:
        return self.slots[f"{image}.{column.name}"]

    def _texts(self, image: str, column: Column) -> pa.StringArray:
        return column.texts(self.block, self._value(image, column))

    def _image(self, image: str) -> pa.StringArray:
        """Return the image as it lands. Neighbouring members whose text lands unchanged are copied
        together."""
        parts: list[str | pa.StringArray] = []
        between, columns = "{", self.form.images[image]
        at = 0
        while at < len(columns):
            name = orjson.dumps(columns[at].name).decode() + ":"
            last = at
            if columns[at].verbatim and self.form.compact:
                while last + 1 < len(columns) and self._goes_on(image, *columns[last : last + 2]):
                    last += 1
                begins = self._value(image, columns[at]).begins - len(name.encode())
                ends = self._value(image, columns[last]).ends
                parts += [between, cut(self.block, Slot(begins, ends, np.zeros(len(begins), np.bool_)))]
                between = ","
            else:
                texts = self._texts(image, columns[at])
                if texts.null_count:
                    quoted = pc.fill_null(pc.binary_join_element_wise('"', texts, '"', ""), "null")
                    parts += [between + name, quoted]
                    between = ","
                else:
                    parts += [between + name + '"', texts]
                    between = '",'
            at = last + 1
        return pc.binary_join_element_wise(*parts, between[:-1] + "}", "")

    def _goes_on(self, image: str, column: Column, following: Column) -> bool:
        """Whether ``following`` is verbatim too, and its member comes directly after that of ``column``.

        A member that was not sent may stand between them.
        """
        # The text between them is the same in all lines.
        between = int(self._value(image, following).begins[0] - self._value(image, column).ends[0])
        return following.verbatim and between == len(b"," + orjson.dumps(following.name) + b":")
