"""The form of a line: the text that all lines written alike have in common, and the values between.

One line gives the form: a change, in PostgreSQL's log, of a table with a contract; in the envelope or flat;
alone or as the ``value`` of a record; with or without a schema beside it. Its names, its schema and whatever
else is the same in every line must be found in the other lines too, in the same order and with the same
blanks. The rest are slots. A table has several forms: with and without ``before``, one for each ``snapshot``,
and one for each set of columns that were not sent.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.contracts.names import TableName
from omnisupport_ingest.foreign import Unreadable, refuse_depth
from omnisupport_ingest.sources.debezium import flat_form
from omnisupport_ingest.sources.debezium.column_texts import Column, NotOrdinary, column_of
from omnisupport_ingest.sources.debezium.faults import LineFault
from omnisupport_ingest.sources.debezium.flat_form import Flat
from omnisupport_ingest.sources.debezium.handling import Handling, LineContext
from omnisupport_ingest.sources.debezium.json_walk import Slot, Step, Walk
from omnisupport_ingest.sources.debezium.line_blocks import Block, Places
from omnisupport_ingest.sources.debezium.records import (
    OLD_KEY,
    Record,
    columns_of,
    flat_table,
    is_envelope,
    is_record,
    named_table,
    record_in,
    row_fields,
    unwrapped,
)
from omnisupport_ingest.sources.debezium.shown_schemas import RowSchema
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

Contracts = Mapping[TableName, TableContract]
Document = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Spacing:
    """The blanks that the program which wrote a line puts after each comma and each colon."""

    comma: str = ""
    colon: str = ""

    @classmethod
    def of(cls, line: str) -> Spacing:
        """Return the spacing of ``line``. Raises ``NotOrdinary`` if the line is not uniform."""
        outside = _STRING.sub("", line)
        commas, colons = (set(pattern.findall(outside)) for pattern in (_BEHIND_COMMA, _BEHIND_COLON))
        if len(commas) > 1 or len(colons) != 1:
            raise NotOrdinary
        return cls(*commas, *colons) if commas else cls(colon=colons.pop())

    def written(self, value: Any) -> bytes:
        """Return ``value`` as that program writes it."""
        separators = ("," + self.comma, ":" + self.colon)
        return json.dumps(value, ensure_ascii=False, separators=separators).encode()


_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_BEHIND_COMMA, _BEHIND_COLON = re.compile(r",(\s*)"), re.compile(r":(\s*)")


@dataclass(frozen=True)
class Form:
    """The form of lines of the table of ``contract``.

    ``images``: which of ``before`` and ``after`` exist, and the columns of each, in order, without those that
    were not sent. ``unsent``: names of columns of ``after`` that were not sent. ``op``: the operation, if no
    slot has it. ``compact``: no blanks after commas and colons. ``slots``: the name of each slot of a walk.
    ``schema``: of the rows; None for deletes.
    """

    contract: TableContract
    images: Mapping[str, tuple[Column, ...]]
    unsent: tuple[str, ...]
    op: str | None
    compact: bool
    slots: tuple[str, ...]
    steps: Walk = field(repr=False)
    schema: RowSchema | None = field(default=None, repr=False)

    def walk(self, block: Block, lines: Places) -> tuple[Places, dict[str, Slot]]:
        """Return which of ``lines`` have this form, and their slots by name."""
        kept, slots = self.steps.through(block, lines)
        return kept, {name: slot for name, slot in zip(self.slots, slots, strict=True) if name}


def form_of(line: bytes, contracts: Contracts, handling: Handling, name: str, *, in_file: bool) -> Form:
    """Return the form of ``line``. Raises ``NotOrdinary`` if the line must be read alone.

    ``name``: its file or topic. ``in_file``: the line may be a whole record.
    """
    try:
        text = line.decode()
        refuse_depth(text)
    except Unreadable:
        raise NotOrdinary from None
    document, spacing = orjson.loads(line), Spacing.of(text)
    around = in_file and is_record(document, handling)
    if around:
        record = record_in(document, handling)
        if not record.topic or not document.keys() <= _RECORD or OLD_KEY in record.headers:
            raise NotOrdinary
    else:
        # The name of a file is not the name of a topic.
        record = Record("" if in_file else name, None, {}, *unwrapped(document))
    if not isinstance(record.value, dict):
        raise NotOrdinary
    context = LineContext(record.topic or name)
    sample = (_of_envelope if is_envelope(record.value) else _of_flat)(record, handling, context)
    contract = _contract_of(*sample.table, contracts)
    row = next(iter(sample.images.values()))
    if not set(contract.key) <= row.keys() or any(list(each) != list(row) for each in sample.images.values()):
        raise NotOrdinary
    known_types = {each.name: each.pg_type for each in contract.source_columns}
    columns = {
        each: column_of(
            each,
            Target.of(known_types.get(each)),
            sample.value_of(each),
            handling,
            sample.fields.get(each, {}),
            separator=len("," + spacing.comma),
        )
        for each in row
    }
    sent = {
        image: tuple(columns[each] for each, held in row.items() if not is_unavailable(held))
        for image, row in sample.images.items()
    }
    if not all(sent.values()) or not set(contract.key) <= {each.name for each in [*sent.values()][-1]}:
        raise NotOrdinary
    builder = _FormBuilder(columns, spacing, sample)
    if around:
        builder.members(document, builder.of_record)
    else:
        builder.value(document)
    unsent = sorted(row.keys() - {each.name for each in sent["after"]}) if "after" in sent else ()
    return Form(
        contract,
        sent,
        tuple(unsent),
        sample.op,
        spacing == Spacing(),
        tuple(builder.slots),
        builder.whole(),
        RowSchema.of(sample.images["after"], sample.fields, flat=sample.about is not None)
        if "after" in sample.images
        else None,
    )


@dataclass(frozen=True, slots=True)
class _Sample:
    """The change in the line that gives a form.

    ``images``: those that it has, ``before`` first. ``fields``: the schemas of its columns. ``op``: as of
    ``Form``. ``about``: for the flat form, member → which metadata it holds; None for an envelope.
    """

    table: tuple[str | None, str]
    images: Mapping[str, Document]
    fields: Mapping[str, Document]
    op: str | None = None
    about: Mapping[str, str] | None = None

    def value_of(self, column: str) -> Any:
        """Return a value of ``column``; None if none was sent."""
        held = (each.get(column) for each in reversed([*self.images.values()]))
        return next((each for each in held if each is not None and not is_unavailable(each)), None)


def _of_envelope(record: Record, handling: Handling, context: LineContext) -> _Sample:
    value, source = record.value, record.value["source"]
    if not value.keys() <= _ENVELOPE or source.get("connector") not in (None, "postgresql"):
        raise NotOrdinary
    if "lsn" not in source or not source.keys() <= _SAME | _WHOLE | {"sequence"}:
        raise NotOrdinary
    images = {each: value[each] for each in _IMAGES if value.get(each) is not None}
    if not images or not all(isinstance(each, dict) and each for each in images.values()):
        raise NotOrdinary
    table = _table(named_table, source.get("schema"), source.get("table"), handling, context)
    return _Sample(table, images, row_fields(record.value_schema))


def _of_flat(record: Record, handling: Handling, context: LineContext) -> _Sample:
    flat = Flat(record.headers, record.value, handling)
    about = {flat.name_of(each): each for each in flat_form.METADATA}
    # Metadata in headers differs in every record; a column with the name of metadata is both.
    if not flat.is_flat or not flat.row or handling.bare_rows:
        raise NotOrdinary
    if about.keys() & (record.headers.keys() | flat.row.keys()):
        raise NotOrdinary
    deleted, op = flat.about(flat_form.DELETED), flat.about(flat_form.OP)
    if not (deleted is None or isinstance(deleted, bool) or deleted in ("true", "false")):
        raise NotOrdinary
    is_deleted = deleted is True or deleted == "true"
    if flat.name_of("lsn") not in record.value or not (is_deleted or isinstance(op, str) or op is None):
        raise NotOrdinary
    if op is None and deleted is None:
        raise NotOrdinary
    image = "before" if is_deleted or op == "d" else "after"
    fixed = "d" if is_deleted else "u" if op is None else None
    table = _table(flat_table, record, flat, handling, context)
    return _Sample(table, {image: flat.row}, columns_of(record, flat), fixed, about)


def _table(find: Callable[..., tuple[str | None, str]], *arguments: Any) -> tuple[str | None, str]:
    try:
        return find(*arguments)
    except LineFault:
        raise NotOrdinary from None


def _contract_of(schema: str | None, table: str, contracts: Contracts) -> TableContract:
    if schema is None:
        named = [each for name, each in contracts.items() if name[1] == table]
        contract = named[0] if len(named) == 1 else None
    else:
        contract = contracts.get((schema, table))
    if contract is None:
        raise NotOrdinary
    return contract


class _FormBuilder:
    """Splits a line into the parts of a walk."""

    def __init__(self, columns: Mapping[str, Column], spacing: Spacing, sample: _Sample) -> None:
        self.slots: list[str] = []
        self._columns, self._spacing, self._sample = columns, spacing, sample
        self._parts, self._letters = list[bytes | Step](), b""

    def whole(self) -> Walk:
        """Return the parts, in order."""
        self._flush()
        return Walk(tuple(self._parts))

    def members(self, held: Mapping[str, Any], member: Callable[[str, Any], None]) -> None:
        """Add an object; ``member`` adds each of its values."""
        start = b"{"
        for name, value in held.items():
            self._letters += start + orjson.dumps(name) + b":" + self._spacing.colon.encode()
            member(name, value)
            start = b"," + self._spacing.comma.encode()
        self._letters += b"}" if held else b"{}"

    def of_record(self, name: str, value: Any) -> None:
        if name == "value":
            self.value(value)
        elif name == "key":
            self._beside(value, self._anything)
        else:
            self._same(value)

    def value(self, document: Mapping[str, Any]) -> None:
        """Add a value: an envelope or a row, with or without a schema beside it."""
        member = self._of_envelope if self._sample.about is None else self._of_row
        self._beside(document, lambda _, value: self.members(value, member))

    def _beside(self, document: Any, payload: Callable[[str, Any], None]) -> None:
        """Add a document by ``payload``. A schema beside the payload must be the same in all lines."""
        if unwrapped(document)[0] is document:
            payload("", document)
        else:
            self.members(
                document, lambda name, held: payload("", held) if name == "payload" else self._same(held)
            )

    def _of_row(self, name: str, value: Any) -> None:
        """Add a member of the flat form: a column, or metadata of the row."""
        what = (self._sample.about or {}).get(name)
        if name in self._columns:
            self._of_image(f"{next(iter(self._sample.images))}.{name}", name, value)
        elif what is None:
            self._anything(name, value)
        elif what in ("schema", "table", flat_form.DELETED):
            self._same(value)
        elif what == "sequence":
            self._sequence(value)
        elif what == OP:
            self._slot(OP, Step.TEXT)
        else:
            self._slot(what if what == TOTAL_ORDER else f"source.{what}", Step.WHOLE)

    def _of_envelope(self, name: str, value: Any) -> None:
        if name in _IMAGES and value is not None:
            self.members(value, lambda column, held: self._of_image(f"{name}.{column}", column, held))
        elif name == "source":
            self.members(value, self._of_source)
        elif name == "transaction" and isinstance(value, dict) and value.keys() <= _TRANSACTION:
            self.members(value, self._of_transaction)
        elif name == OP:
            self._slot(OP, Step.TEXT)
        elif name in _WHOLE:
            self._slot("", Step.WHOLE)
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
            self._slot(f"source.{name}", Step.WHOLE)
        else:
            self._same(value)

    def _sequence(self, value: Any) -> None:
        """Add the sequence: ``null``, or a text with a list of two LSNs, each a text or null."""
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
                self._slot(name, Step.WHOLE)
                self._letters += b'\\"'
        self._letters += b']"'

    def _of_transaction(self, name: str, _: Any) -> None:
        if name == "id":
            self._slot("", Step.TEXT)
        else:
            self._slot(f"transaction.{name}", Step.WHOLE)

    def _anything(self, _: str, value: Any) -> None:
        """Add a value that nothing is read from."""
        if isinstance(value, dict):
            self.members(value, self._anything)
        elif isinstance(value, str):
            self._slot("", Step.TEXT)
        elif type(value) is int:
            self._slot("", Step.WHOLE)
        else:
            self._same(value)

    def _same(self, value: Any) -> None:
        self._letters += self._spacing.written(value)

    def _slot(self, name: str, step: Step) -> None:
        self._flush()
        self.slots.append(name)
        self._parts.append(step)

    def _flush(self) -> None:
        if self._letters:
            self._parts.append(self._letters)
            self._letters = b""
