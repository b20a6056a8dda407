"""Ordinary lines, many at once: changes of one table in Debezium's envelope, without a Python object each.

A line is ordinary if it is an envelope (alone, or as the ``value`` of a record) of PostgreSQL's connector, of
a table with a contract, written as the JSON converter writes it without schemas, its columns whole and of
types that are listed here. Arrow's reader takes such lines by a schema that it keeps to strictly: an unknown
or repeated name, or a value of another type, is an error, and then every line of that table in the block goes
through ``line_reader`` one by one. So does each line that this module is not sure of. What lands is the same
text for text, which generated lines prove.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.landing.rows import EVENT_SCHEMA
from omnisupport_ingest.sources.debezium.faults import ValueFault
from omnisupport_ingest.sources.debezium.handling import BY_POSITION, Handling
from omnisupport_ingest.sources.debezium.orders import Orders
from omnisupport_ingest.sources.debezium.positions import (
    LSN,
    LSN_LIMIT,
    ORDER_BITS,
    SNAPSHOT_BASE,
    TRANSACTION,
)
from omnisupport_ingest.sources.debezium.targets import Target
from omnisupport_ingest.sources.debezium.unavailable import DISGUISES
from omnisupport_ingest.sources.debezium.values import text_of
from omnisupport_ingest.sources.postgres.protocol.text_columns import escaped, json_arrays, json_objects

LEAST_LINES = 64
"""Lines of one table in a block below which reading them at once costs more than it saves."""

_TEXT, _WHOLE, _FLAG = pa.string(), pa.int64(), pa.bool_()
_PLAIN_TEXTS = frozenset(
    {"text", "character varying", "varchar", "uuid", "json", "jsonb", "xml", "inet", "cidr"}
)
_WHOLE_NUMBERS = {"smallint": 15, "integer": 31, "bigint": 63}
_ONE_BY_ONE = {"numeric": _TEXT, "bytea": _TEXT, "timestamptz": _TEXT, "timestamp": _WHOLE, "date": _WHOLE}
"""Types whose texts are made value by value, and the JSON that they come as."""

_SOURCE = dict.fromkeys(
    ("version", "connector", "name", "snapshot", "db", "sequence", "schema", "table", "origin"), _TEXT
) | dict.fromkeys(("ts_ms", "ts_us", "ts_ns", "txId", "lsn", "xmin", "origin_lsn"), _WHOLE)
_TRANSACTION = {"id": _TEXT, "total_order": _WHOLE, "data_collection_order": _WHOLE}
_TIMES = dict.fromkeys(("ts_ms", "ts_us", "ts_ns"), _WHOLE)

_TABLE = r'"schema":"(?P<schema>[^"\\]+)","table":"(?P<table>[^"\\]+)"'
_NOT_HERE = "|".join([r"\\u00", r"__debezium\.oldkey", *map(re.escape, sorted(DISGUISES))])
"""What is surely read well one by one: a NUL and other letters that may stand as themselves, the header of a
key change, the value of an unsent column in its disguises."""

_VALUE = r'(?:"(?:[^"\\]|\\.)*"|\[(?:"(?:[^"\\]|\\.)*"|[^"\]])*\]|[^",\[\]{}]+)'
_SEQUENCE = r'^\[(?:null|"(?P<before>[0-9]{1,18})"), ?(?:null|"[0-9]{1,18}")\]$'
_ZONED = r"^[12][0-9]{3}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]{1,6})?Z$"
_LONGEST_MICROS = 253_402_300_800_000_000
"""Microseconds from 1970 to the end of the year 9999."""

Flags = npt.NDArray[np.bool_]
_ToText = Callable[[pa.Array], pa.StringArray]


class NotOrdinary(Exception):
    """Lines that are to be read one by one."""


@dataclass(frozen=True)
class _Form:
    """What the lines of one table are like: ``columns`` and their JSON in the order of the lines, ``texts``
    makes PostgreSQL's text of each, ``record``: the envelope is the ``value`` of a record."""

    columns: tuple[str, ...]
    types: tuple[pa.DataType, ...]
    texts: tuple[_ToText, ...]
    record: bool
    schema: pa.Schema
    pattern: str


@dataclass(frozen=True, slots=True)
class Block:
    """Lines, a document each, and what lands as what was delivered (None: they themselves). ``rows``: their
    numbers in the file; None of what is of no file, whose documents are values and no records."""

    documents: Sequence[bytes]
    delivered: Sequence[bytes] | None = None
    rows: Sequence[int] | None = None


class OrdinaryLines:
    """Reads the ordinary lines of one source."""

    def __init__(self, contracts: Sequence[TableContract], handling: Handling, orders: Orders) -> None:
        self._contracts = {(each.schema, each.table): each for each in contracts}
        self._handling, self._orders = handling, orders
        self.tables: dict[str, TableContract] = {}
        """The contracts of tables that ordinary lines were read of, by name."""

    def read(self, lines: Block, epoch: int) -> tuple[list[pa.Table], Sequence[int]]:
        """Tables of ``EVENT_SCHEMA`` with what is ordinary in ``lines``, and the indices of the others.

        All of them are others until the order of the source is known to be that of a log.
        """
        count = len(lines.documents)
        if self._orders.known not in (TRANSACTION, LSN) or self._handling.order != BY_POSITION:
            return [], range(count)
        try:
            texts = pa.array(lines.documents, pa.binary()).cast(_TEXT)
        except pa.ArrowInvalid:
            return [], range(count)
        tables: list[pa.Table] = []
        is_left = np.ones(count, np.bool_)
        named = pc.extract_regex(texts, _TABLE)
        unsure = pc.fill_null(pc.match_substring_regex(texts, _NOT_HERE), True)
        table_names = pc.if_else(unsure, None, pc.binary_join_element_wise(
            named.field("schema"), named.field("table"), "\0")).dictionary_encode()  # fmt: skip
        codes = np.asarray(pc.fill_null(table_names.indices, -1))
        for code, name in enumerate(table_names.dictionary.to_pylist()):
            contract = self._contracts.get(tuple(name.split("\0")))
            of_table = np.flatnonzero(codes == code)
            if contract is None or len(of_table) < LEAST_LINES:
                continue
            try:
                events, taken = self._of_table(contract, lines, texts, of_table, epoch)
            except (NotOrdinary, ValueFault, pa.ArrowInvalid, orjson.JSONDecodeError):
                continue
            if events.num_rows:
                tables.append(events)
                is_left[of_table[taken]] = False
                self.tables[contract.name] = contract
        return tables, np.flatnonzero(is_left).tolist()

    def _of_table(
        self,
        contract: TableContract,
        lines: Block,
        texts: pa.StringArray,
        of_table: npt.NDArray[Any],
        epoch: int,
    ) -> tuple[pa.Table, Flags]:
        form = self._form(contract, lines.documents[of_table[0]], in_file=lines.rows is not None)
        regular = np.asarray(pc.match_substring_regex(texts.take(of_table), form.pattern))
        chosen = of_table[regular]
        documents = [lines.documents[i] for i in chosen]
        parsed = _parsed(documents, form.schema)
        value = parsed
        if form.record:
            values = parsed.column("value").combine_chunks()
            value = pa.Table.from_arrays(
                [*values.flatten(), parsed.column("topic").combine_chunks()],
                names=[*(each.name for each in values.type), "topic"],
            )
        one = _Envelopes(value, contract, form)
        keep = one.ordinary(self._orders.known)
        one = _Envelopes(value.filter(pa.array(keep)), contract, form)
        kept = chosen[keep]
        taken = regular.copy()
        taken[regular] = keep
        delivered = texts.take(kept)
        if lines.delivered is not None:
            delivered = pa.array([lines.delivered[i] for i in kept], pa.binary()).cast(_TEXT)
        events = one.events(epoch, self._orders.known, delivered)
        if lines.rows is not None:
            numbers = pa.array([lines.rows[i] for i in kept], _WHOLE)
            events = events.set_column(
                EVENT_SCHEMA.get_field_index("file_row"), EVENT_SCHEMA.field("file_row"), numbers
            )
        if len(kept) and not self._orders.take_all(*one.lives()):
            raise NotOrdinary
        return events, taken

    def _form(self, contract: TableContract, line: bytes, *, in_file: bool) -> _Form:
        """The form of the lines of ``contract``'s table, by one of them."""
        document = orjson.loads(line)
        record = "value" in document and "op" not in document
        value, key_of_record = (document["value"], document.get("key")) if record else (document, {})
        if not isinstance(value, dict) or not isinstance(key_of_record or {}, dict):
            raise NotOrdinary
        if record and not in_file:
            raise NotOrdinary
        row = value.get("after") or value.get("before")
        if not isinstance(row, dict) or not set(contract.key) <= row.keys():
            raise NotOrdinary
        known = {each.name: each.pg_type for each in contract.source_columns}
        readers = [
            _column(Target.of(known.get(name)), member, self._handling) for name, member in row.items()
        ]
        types = tuple(each for each, _ in readers)
        image = pa.struct(list(zip(row, types, strict=True)))
        envelope = {
            "before": image,
            "after": image,
            "source": pa.struct(list(_SOURCE.items())),
            "transaction": pa.struct(list(_TRANSACTION.items())),
            "op": _TEXT,
            **_TIMES,
        }
        members: Mapping[str, pa.DataType] = envelope
        if record:
            named = key_of_record or {}
            key = {name: kind for name, kind in zip(row, types, strict=True) if name in named}
            header = pa.struct([("key", _TEXT), ("value", _TEXT)])
            members = {
                "topic": _TEXT,
                "key": pa.struct(list(key.items())),
                "value": pa.struct(list(envelope.items())),
                "headers": pa.list_(header),
            }
        columns = ",".join(f"{re.escape(orjson.dumps(name).decode())}:{_VALUE}" for name in row)
        image_text = rf"(?:null|\{{{columns}\}})"
        # It proves that every column is there, in one order: a member that is left out is no NULL.
        pattern = rf'^\{{.*"before":{image_text},"after":{image_text},"source":\{{.*\}}$'
        return _Form(
            tuple(row),
            types,
            tuple(texts for _, texts in readers),
            record,
            pa.schema(list(members.items())),
            pattern,
        )


def _parsed(documents: Sequence[bytes], schema: pa.Schema) -> pa.Table:
    content = b"\n".join(documents)
    # A document within one line each: else two that share lines would be counted as two lines.
    table = pj.read_json(
        pa.BufferReader(content),
        pj.ReadOptions(use_threads=False, block_size=len(content) + 1),
        pj.ParseOptions(explicit_schema=schema, newlines_in_values=False, unexpected_field_behavior="error"),
    )
    if table.num_rows != len(documents):
        raise NotOrdinary
    return table


@dataclass(frozen=True)
class _Envelopes:
    """Parsed envelopes of one table, as columns."""

    table: pa.Table
    contract: TableContract
    form: _Form

    def ordinary(self, order: str | None) -> Flags:
        """Which of them are of ``order``, of PostgreSQL's connector, and whole."""
        op, lsn, before = self._member("op"), self._source("lsn"), self._images("before")
        kept = pc.is_in(op, pa.array(["c", "u", "d", "r"]))
        if self.form.record:
            # Without a topic it may be a row with a column called value.
            kept = pc.and_kleene(kept, pc.is_valid(self._member("topic")))
        connector = self._source("connector")
        for each in (
            pc.or_kleene(pc.is_null(connector), pc.equal(connector, "postgresql")),
            pc.equal(self._source("schema"), self.contract.schema),
            pc.equal(self._source("table"), self.contract.table),
            pc.and_kleene(pc.greater_equal(lsn, 0), pc.less(lsn, LSN_LIMIT)),
            pc.and_kleene(pc.greater(self._micros(), 0), pc.less(self._micros(), _LONGEST_MICROS)),
            pc.or_kleene(
                pc.is_null(self._source("sequence")),
                pc.match_substring_regex(self._source("sequence"), _SEQUENCE),
            ),
            pc.if_else(pc.equal(op, "d"), pc.is_valid(before), pc.is_valid(self._images("after"))),
            pc.equal(pc.is_valid(self._total_order()), order == TRANSACTION),
            # The identity of a row that a snapshot read has its content, which is hashed one by one.
            pc.or_kleene(pc.not_equal(op, "r"), pa.scalar(order == TRANSACTION)),
            pc.fill_null(pc.greater_equal(self._total_order(), 0), True),
        ):
            kept = pc.and_kleene(kept, pc.fill_null(each, False))
        for name, kind in zip(self.form.columns, self.form.types, strict=True):
            bits = _WHOLE_NUMBERS.get(Target.of(self._types.get(name)).name, 63)
            for image in (before, self._images("after")):
                values = pc.struct_field(image, name)
                if kind == _WHOLE and bits < 63:
                    within = pc.and_kleene(pc.greater_equal(values, -(1 << bits)), pc.less(values, 1 << bits))
                    kept = pc.and_kleene(kept, pc.fill_null(within, True))
        for column in self._key(self._rows()):
            kept = pc.and_kleene(kept, pc.is_valid(column))
        return np.asarray(pc.fill_null(kept, False))

    def lives(self) -> tuple[int | None, int | None]:
        """The highest LSN of those without ``sequence[0]``, and the lowest ``sequence[0]``."""
        before, lsn = self._commit_before(), self._source("lsn")
        first = pc.equal(before, 0)
        highest = pc.max(pc.if_else(first, lsn, None)).as_py()
        lowest = pc.min(pc.if_else(first, None, before)).as_py()
        return highest, lowest

    def events(self, epoch: int, order: str | None, delivered: pa.StringArray) -> pa.Table:
        """The events as a table of ``EVENT_SCHEMA``, without ``file_row``."""
        count, op, before = self.table.num_rows, self._member("op"), self._commit_before()
        after, rows = self._images("after"), self._rows()
        key_columns = [escaped(each) for each in self._key_texts(rows)]
        keys = json_arrays(key_columns)
        is_delete, is_update = pc.equal(op, "d"), pc.equal(op, "u")
        gone = json_objects(self.contract.key, key_columns)
        changed = pc.and_kleene(is_update, pc.is_valid(self._images("before")))
        of_before = pa.nulls(count, _TEXT)
        if pc.any(changed).as_py():
            of_before = pc.if_else(changed, self._image(self._images("before")), None)
        ordinal = pc.bit_wise_or(
            pc.shift_left(self._source("lsn"), pa.scalar(ORDER_BITS, _WHOLE)),
            pc.bit_wise_and(pc.fill_null(self._total_order(), 0), pa.scalar((1 << ORDER_BITS) - 1, _WHOLE)),
        )
        first_read = pc.and_kleene(pc.equal(op, "r"), pc.equal(before, 0))
        ordinal = pc.if_else(first_read, pc.add(ordinal, pa.scalar(SNAPSHOT_BASE, _WHOLE)), ordinal)
        columns: dict[str, Any] = {
            "commit_lsn": before,
            "ordinal": ordinal,
            "op": op,
            "source_ts": self._micros().cast(EVENT_SCHEMA.field("source_ts").type),
            "tx_id": self._source("txId"),
            "lsn": self._source("lsn"),
            "key": keys,
            "before": pc.if_else(is_delete, gone, of_before),
            "after": pc.if_else(is_delete, None, self._image(after)),
            "envelope": delivered,
        }
        if order == LSN:
            start = orjson.dumps([self.contract.schema, self.contract.table]).decode()[:-1]
            columns["identity"] = pc.binary_join_element_wise(
                start + ',"', escaped(keys), '","', op, '"]', ""
            )
        same = {"epoch": epoch, "source_schema": self.contract.schema, "source_table": self.contract.table}
        arrays = [
            columns[each.name]
            if each.name in columns
            else pa.repeat(pa.scalar(same.get(each.name), each.type), count)
            for each in EVENT_SCHEMA
        ]
        return pa.Table.from_arrays(arrays, schema=EVENT_SCHEMA)

    @property
    def _types(self) -> Mapping[str, str]:
        return {each.name: each.pg_type for each in self.contract.source_columns}

    def _member(self, name: str) -> pa.Array:
        return _whole_array(self.table.column(name))

    def _images(self, name: str) -> pa.StructArray:
        return _whole_array(self.table.column(name))

    def _source(self, name: str) -> pa.Array:
        return pc.struct_field(self._member("source"), name)

    def _total_order(self) -> pa.Array:
        return pc.struct_field(self._member("transaction"), "total_order")

    def _micros(self) -> pa.Int64Array:
        """The commit time in microseconds since 1970, at the finest resolution that the event has."""
        # Checked: what does not fit would come out as another time.
        millis = pc.multiply_checked(self._source("ts_ms"), 1000)
        nanos = pc.divide(self._source("ts_ns"), 1000)
        return pc.coalesce(self._source("ts_us"), nanos, millis)

    def _commit_before(self) -> pa.Int64Array:
        commit_before = pc.struct_field(pc.extract_regex(self._source("sequence"), _SEQUENCE), "before")
        # A group that matched nothing is an empty text.
        return pc.fill_null(pc.if_else(pc.equal(commit_before, ""), None, commit_before).cast(_WHOLE), 0)

    def _rows(self) -> pa.StructArray:
        """The image that says which row it is of: of a delete ``before``."""
        return pc.if_else(pc.equal(self._member("op"), "d"), self._images("before"), self._images("after"))

    def _key(self, rows: pa.StructArray) -> list[pa.Array]:
        return [pc.struct_field(rows, name) for name in self.contract.key]

    def _key_texts(self, rows: pa.StructArray) -> list[pa.StringArray]:
        makers = dict(zip(self.form.columns, self.form.texts, strict=True))
        return [makers[name](values) for name, values in zip(self.contract.key, self._key(rows), strict=True)]

    def _image(self, images: pa.StructArray) -> pa.StringArray:
        columns = [
            escaped(texts(pc.struct_field(images, name)))
            for name, texts in zip(self.form.columns, self.form.texts, strict=True)
        ]
        return json_objects(self.form.columns, columns)


def _whole_array(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _column(target: Target, sample: Any, handling: Handling) -> tuple[pa.DataType, _ToText]:
    """The JSON of a column's values, and what makes PostgreSQL's text of them; ``NotOrdinary`` for a type
    that is read one by one. ``sample``: a value of it."""
    if target.name in _PLAIN_TEXTS or (not target.name and isinstance(sample, str)):
        return _TEXT, lambda values: values
    if target.name in _WHOLE_NUMBERS:
        return _WHOLE, lambda values: values.cast(_TEXT)
    if target.name == "boolean":
        return _FLAG, lambda values: pc.if_else(values, "t", "f")
    if target.name in _ONE_BY_ONE:
        kind = _TEXT if isinstance(sample, str) else _ONE_BY_ONE[target.name]
        if kind == _TEXT and target.name == "timestamptz":
            return kind, lambda values: _zoned(values, target, handling)
        return kind, lambda values: _each(values, target, handling)
    if target.element is not None and target.element.name in _PLAIN_TEXTS:
        return pa.list_(_TEXT), lambda values: _each(values, target, handling)
    raise NotOrdinary


def _each(values: pa.Array, target: Target, handling: Handling) -> pa.StringArray:
    return pa.array([text_of(value, {}, target, handling) for value in values.to_pylist()], _TEXT)


def _zoned(values: pa.StringArray, target: Target, handling: Handling) -> pa.StringArray:
    """``2026-02-28T13:14:15.120000Z`` as ``2026-02-28 13:14:15.12+00``."""
    if not pc.all(pc.match_substring_regex(values, _ZONED)).as_py():
        return _each(values, target, handling)
    try:
        # Whether there is such a day and such a time.
        pc.utf8_slice_codeunits(values, 0, 19).cast(pa.timestamp("s"))
    except pa.ArrowInvalid:
        return _each(values, target, handling)
    texts = pc.replace_substring(pc.utf8_slice_codeunits(values, 0, -1), "T", " ")
    texts = pc.replace_substring_regex(texts, r"(\.[0-9]*?)0+$", r"\1")
    return pc.binary_join_element_wise(pc.replace_substring_regex(texts, r"\.$", ""), "+00", "")
