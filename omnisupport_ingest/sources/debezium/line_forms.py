"""The form of a line: what stands in all lines that were written alike, and which values stand between.

One line tells it: an envelope of PostgreSQL's connector (alone, or as the ``value`` of a record) of a table
with a contract, without schemas. Its names and what does not change from line to line are letters to be found
in the others too, in the same order; the rest are slots. A table has several forms: with ``before`` and
without, by each ``snapshot``, by the columns that were not sent.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.contracts.names import TableName
from omnisupport_ingest.foreign import Unreadable, refuse_depth
from omnisupport_ingest.sources.debezium.column_texts import Column, NotOrdinary, column_of
from omnisupport_ingest.sources.debezium.handling import Handling
from omnisupport_ingest.sources.debezium.json_walk import Slot, Walk
from omnisupport_ingest.sources.debezium.line_blocks import Block, Places
from omnisupport_ingest.sources.debezium.targets import Target
from omnisupport_ingest.sources.debezium.unavailable import is_unavailable

OP, SEQUENCE, TOTAL_ORDER = "op", "source.sequence", "transaction.total_order"
TS_MS, TS_US, TS_NS, TX_ID, LSN = (f"source.{each}" for each in ("ts_ms", "ts_us", "ts_ns", "txId", "lsn"))

_ENVELOPE = {"before", "after", "source", "transaction", "op", "ts_ms", "ts_us", "ts_ns"}
_RECORD = {"topic", "key", "value", "headers"}
_SAME = {"version", "connector", "name", "snapshot", "db", "schema", "table", "origin"}
_WHOLE = {"ts_ms", "ts_us", "ts_ns", "txId", "lsn", "xmin", "origin_lsn"}
_TRANSACTION = {"id", "total_order", "data_collection_order"}
_IMAGES = ("before", "after")
_TWO_LSNS = re.compile(r'\[(?:null|"([0-9]+)")(, ?)(?:null|"([0-9]+)")\]')
_OLD_KEY = b"__debezium.oldkey"

_Step = Callable[[Walk], None]
Contracts = Mapping[TableName, TableContract]


@dataclass(frozen=True)
class Form:
    """What the lines of ``contract``'s table are like.

    ``images``: which of ``before`` and ``after`` are there, and the columns that each has, in order, but
    those that were not sent; ``unsent``: such ones of ``after``, by name. ``slots``: what each slot of a walk
    is of.
    """

    contract: TableContract
    images: Mapping[str, tuple[Column, ...]]
    unsent: tuple[str, ...]
    slots: tuple[str, ...]
    steps: tuple[_Step, ...] = field(repr=False)

    def walk(self, block: Block, lines: Places) -> tuple[Places, dict[str, Slot]]:
        """Which of ``lines`` are of this form, and their slots."""
        walk = Walk(block, lines)
        for step in self.steps:
            if not len(walk.lines):
                return walk.lines, {}
            step(walk)
        walk.end()
        return walk.lines, {name: slot for name, slot in zip(self.slots, walk.slots, strict=True) if name}


def form_of(line: bytes, contracts: Contracts, handling: Handling, *, in_file: bool) -> Form:
    """The form of ``line``; ``NotOrdinary`` if it is one that is read by itself. ``in_file``: it may be a
    record."""
    try:
        refuse_depth(line.decode())
    except Unreadable:
        raise NotOrdinary from None
    document = orjson.loads(line)
    if not isinstance(document, dict):
        raise NotOrdinary
    value = document
    if "value" in document:
        # Without a topic it may be a row with a column called value.
        if not in_file or not document.keys() <= _RECORD or not isinstance(document.get("topic"), str):
            raise NotOrdinary
        if document.keys() & set(handling.fields.values()) or _OLD_KEY in orjson.dumps(
            document.get("headers")
        ):
            raise NotOrdinary
        value = document["value"]
    if not isinstance(value, dict) or not {"before", "after", "source", "op"} <= value.keys() <= _ENVELOPE:
        raise NotOrdinary
    contract = _contract_of(value["source"], contracts)
    row = value["after"] or value["before"]
    if not isinstance(row, dict) or not set(contract.key) <= row.keys():
        raise NotOrdinary
    images = tuple(each for each in _IMAGES if value[each] is not None)
    if any(not isinstance(value[each], dict) or list(value[each]) != list(row) for each in images):
        raise NotOrdinary
    known = {each.name: each.pg_type for each in contract.source_columns}
    columns = {
        name: column_of(name, Target.of(known.get(name)), _sample(name, value, images), handling)
        for name in row
    }
    sent = {
        image: tuple(columns[name] for name, held in value[image].items() if not is_unavailable(held))
        for image in images
    }
    if not all(sent.values()) or not set(contract.key) <= {each.name for each in sent[images[-1]]}:
        raise NotOrdinary
    builder = _FormBuilder(columns)
    if value is document:
        builder.envelope(value)
    else:
        builder.members(document, builder.of_record)
    unsent = sorted(row.keys() - {each.name for each in sent["after"]}) if "after" in sent else ()
    return Form(contract, sent, tuple(unsent), tuple(builder.slots), builder.whole())


def _contract_of(source: Any, contracts: Contracts) -> TableContract:
    if not isinstance(source, dict) or source.get("connector") not in (None, "postgresql"):
        raise NotOrdinary
    schema, table = source.get("schema"), source.get("table")
    contract = contracts.get((schema, table)) if isinstance(schema, str) and isinstance(table, str) else None
    if contract is None or "lsn" not in source or not source.keys() <= _SAME | _WHOLE | {"sequence"}:
        raise NotOrdinary
    return contract


def _sample(name: str, value: Mapping[str, Any], images: tuple[str, ...]) -> Any:
    held = (value[each][name] for each in reversed(images))
    return next((each for each in held if each is not None and not is_unavailable(each)), None)


class _FormBuilder:
    """Takes a line apart into steps of a walk."""

    def __init__(self, columns: Mapping[str, Column]) -> None:
        self.slots: list[str] = []
        self._columns, self._steps, self._letters = columns, list[_Step](), b""

    def whole(self) -> tuple[_Step, ...]:
        """The steps, in their order."""
        self._flush()
        return tuple(self._steps)

    def members(self, held: Mapping[str, Any], member: Callable[[str, Any], None]) -> None:
        """An object, whose values ``member`` takes."""
        start = b"{"
        for name, value in held.items():
            self._letters += start + orjson.dumps(name) + b":"
            member(name, value)
            start = b","
        self._letters += b"}" if held else b"{}"

    def of_record(self, name: str, value: Any) -> None:
        if name == "value":
            self.envelope(value)
        elif name == "key":
            self._anything("", value)
        else:
            self._same(value)

    def envelope(self, value: Mapping[str, Any]) -> None:
        self.members(value, self._of_envelope)

    def _of_envelope(self, name: str, value: Any) -> None:
        if name in _IMAGES and value is not None:
            self.members(value, lambda column, held: self._of_image(f"{name}.{column}", column, held))
        elif name == "source":
            self.members(value, self._of_source)
        elif name == "transaction" and isinstance(value, dict) and value.keys() <= _TRANSACTION:
            self.members(value, self._of_transaction)
        elif name == OP:
            self._slot(OP, Walk.text)
        elif name in _WHOLE:
            self._slot("", Walk.whole)
        elif value is None:
            self._same(None)
        else:
            raise NotOrdinary

    def _of_image(self, slot: str, column: str, value: Any) -> None:
        if is_unavailable(value):
            self._same(value)
        else:
            self._slot(slot, self._columns[column].step)

    def _of_source(self, name: str, value: Any) -> None:
        if name == "sequence":
            self._sequence(value)
        elif name in _WHOLE:
            self._slot(f"source.{name}", Walk.whole)
        else:
            self._same(value)

    def _sequence(self, value: Any) -> None:
        """``null``, or a list of two LSNs inside a text, each a text or null."""
        if value is None:
            self._same(None)
            return
        match = _TWO_LSNS.fullmatch(value) if isinstance(value, str) else None
        if match is None:
            raise NotOrdinary
        for start, lsn, name in ((b'"[', match[1], SEQUENCE), (match[2].encode(), match[3], "")):
            self._letters += start
            if lsn is None:
                self._letters += b"null"
            else:
                self._letters += b'\\"'
                self._slot(name, Walk.whole)
                self._letters += b'\\"'
        self._letters += b']"'

    def _of_transaction(self, name: str, _: Any) -> None:
        if name == "id":
            self._slot("", Walk.text)
        else:
            self._slot(f"transaction.{name}", Walk.whole)

    def _anything(self, _: str, value: Any) -> None:
        """A value that nothing is read of."""
        if isinstance(value, dict):
            self.members(value, self._anything)
        elif isinstance(value, str):
            self._slot("", Walk.text)
        elif type(value) is int:
            self._slot("", Walk.whole)
        else:
            self._same(value)

    def _same(self, value: Any) -> None:
        self._letters += orjson.dumps(value)

    def _slot(self, name: str, step: _Step) -> None:
        self._flush()
        self.slots.append(name)
        self._steps.append(step)

    def _flush(self) -> None:
        if letters := self._letters:
            self._steps.append(lambda walk: walk.expect(letters))
            self._letters = b""
