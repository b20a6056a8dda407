"""Records of a partition as columns, and the line of JSON that is kept with the event of each.

The client's library makes a Python object for each record. What is needed of it goes into lists, a column at
a time, and from there into a block of bytes. A record becomes an object of ours only when it is read alone.
The line has topic, partition, offset, timestamp, key, value and headers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import chain, compress, groupby, repeat
from operator import ge, is_not, itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from omnisupport_ingest.foreign import Unreadable, parse_row
from omnisupport_ingest.sources.debezium.changes import Change, Passed
from omnisupport_ingest.sources.debezium.handling import Handling, LineContext
from omnisupport_ingest.sources.debezium.line_blocks import PADDING, Block
from omnisupport_ingest.sources.debezium.records import read_record, record_of, unwrapped
from omnisupport_ingest.sources.kafka.offsets import Partition

if TYPE_CHECKING:
    from confluent_kafka import Message

Headers: TypeAlias = Sequence[tuple[str, bytes | str | None]]

_START = datetime(1970, 1, 1, tzinfo=UTC)
_MILLIS_LIMIT = 1 << 47
"""A timestamp at or above it, or below 0, counts as none."""
_AT_ONCE = 10_000
"""Most records of a block."""

_LETTERS = r'"[ !#-\[\]-~]*"'
_SCALAR = rf"(?:null|0|-?[1-9][0-9]*|{_LETTERS})"
_MEMBER = rf"{_LETTERS}: ?{_SCALAR}"
_PLAIN_KEY = rf"^(?:{_SCALAR}|\{{{_MEMBER}(?:, ?{_MEMBER})*\}})$"
"""Keys that are certainly one line of JSON, as most are. The others are parsed, which takes far longer."""


class Record(NamedTuple):
    """A record of a partition. ``millis``: the timestamp of the cluster or the producer, in milliseconds
    since 1970; None if there is none."""

    offset: int
    key: bytes | None
    value: bytes | None
    headers: Headers
    millis: int | None

    @property
    def moment(self) -> datetime | None:
        """The timestamp of the record; None if it has none."""
        return None if self.millis is None else _START + timedelta(milliseconds=self.millis)

    def line(self, place: Partition) -> bytes:
        """Return the record as one line of JSON. Key and value stay as they are; if they are no JSON, each
        becomes a JSON string."""
        millis = b"null" if self.millis is None else b"%d" % self.millis
        members = (self.offset, millis, _as_json(self.key), _as_json(self.value), _tail(self.headers))
        return _line_start(place) + b'%d,"timestamp":%s,"key":%s,"value":%s%s' % members

    def read(self, place: Partition, handling: Handling, context: LineContext) -> Change | Passed:
        """Return the change in the record. Raises ``LineFault`` if it cannot be read."""
        headers = {name: _header(held) for name, held in self.headers}
        return read_record(record_of(place[0], self.key, self.value, headers), handling, context)


@dataclass
class Records:
    """Records of one partition, in the order of their offsets: a list for each part of a record.

    ``millis``: as the library gives them; those that are no time count as none.
    """

    offsets: list[int] = field(default_factory=list)
    keys: list[bytes | None] = field(default_factory=list)
    values: list[bytes | None] = field(default_factory=list)
    headers: list[Headers | None] = field(default_factory=list)
    millis: list[int] = field(default_factory=list)

    def add(self, messages: Sequence[Message], start: int) -> int:
        """Add ``messages`` (at least one, without errors), without those below offset ``start`` and those
        that do not rise. Returns the bytes of the keys and values that were added."""
        from confluent_kafka import Message as M

        offsets: list[Any] = [*map(M.offset, messages)]
        if offsets[0] < start or any(map(ge, offsets, offsets[1:])):
            highest = np.maximum.accumulate([start - 1, *offsets[:-1]])
            fresh = (np.array(offsets) > highest).tolist()
            messages, offsets = [*compress(messages, fresh)], [*compress(offsets, fresh)]
        headers: Iterator[Any] = map(M.headers, messages)
        keys, values = [*map(M.key, messages)], [*map(M.value, messages)]
        self.offsets += offsets
        self.keys += keys
        self.values += values
        self.headers += headers
        self.millis += map(itemgetter(1), map(M.timestamp, messages))
        return sum(map(len, filter(None, chain(keys, values))))

    def __len__(self) -> int:
        return len(self.offsets)

    def __getitem__(self, i: int) -> Record:
        millis = self.millis[i]
        known = millis if 0 <= millis < _MILLIS_LIMIT else None
        return Record(self.offsets[i], self.keys[i], self.values[i], self.headers[i] or (), known)

    def __iter__(self) -> Iterator[Record]:
        return map(self.__getitem__, range(len(self)))

    def part(self, start: int, stop: int) -> Records:
        """Return the records from number ``start`` to before number ``stop``, counted from 0."""
        if (start, stop) == (0, len(self)):
            return self
        return Records(
            self.offsets[start:stop],
            self.keys[start:stop],
            self.values[start:stop],
            self.headers[start:stop],
            self.millis[start:stop],
        )

    def below(self, offset: int) -> Records:
        """Return the records below ``offset``."""
        return self.part(0, int(np.searchsorted(self.offsets, offset)))

    def blocks(self, size: int) -> Iterator[Records]:
        """Yield the records in parts, each of which ends at 10,000 records, or when its keys and values have
        ``size`` bytes."""
        ends = np.cumsum(_lengths(self.keys) + _lengths(self.values))
        start = 0
        while start < len(self):
            full = np.searchsorted(ends, (ends[start - 1] if start else 0) + size) + 1
            stop = min(start + _AT_ONCE, int(full), len(self))
            yield self.part(start, stop)
            start = stop

    def block(self, place: Partition, telling: frozenset[str]) -> Block:
        """Return the values, each as one line, and as ``delivered`` the lines of the records (at least one).

        A record with one of the headers ``telling`` has an empty line, because its value alone does not say
        everything. The lines that are kept are right if key and headers are one line of JSON, and so is the
        value: the caller makes those of the other records.
        """
        count = len(self)
        parts: list[bytes] = [b""] * (3 * count)
        parts[::3] = self._heads(place).to_pylist()
        parts[1::3] = [each or b"" for each in self.values]
        headers = any(self.headers)
        parts[2::3] = map(_tail, self.headers) if headers else repeat(_tail(()), count)
        content = b"".join([*parts, PADDING])
        ends = np.cumsum(np.fromiter(map(len, parts), np.int64, 3 * count)).reshape(count, 3)
        starts, stops = ends[:, 0].copy(), ends[:, 1].copy()
        if headers:
            tells = [any(name in telling for name, _ in each or ()) for each in self.headers]
            stops = np.where(tells, starts, stops)
        bounds = np.zeros(count + 1, np.int32)
        bounds[1:] = ends[:, 2]
        buffers = [None, pa.py_buffer(bounds), pa.py_buffer(content)]
        delivered = pa.BinaryArray.from_buffers(pa.binary(), count, buffers)
        return Block(content, starts, stops, None, delivered, place[0])

    def _heads(self, place: Partition) -> pa.BinaryArray:
        """Return what stands before the value in the line of each record."""
        millis = pa.array(self.millis, pa.int64())
        known = pc.and_(pc.greater_equal(millis, 0), pc.less(millis, _MILLIS_LIMIT))
        return pc.binary_join_element_wise(
            _line_start(place),
            _written(pa.array(self.offsets, pa.int64())),
            b',"timestamp":',
            pc.if_else(known, _written(millis), pa.scalar(b"null", pa.binary())),
            b',"key":',
            _keys_as_json(self.keys),
            b',"value":',
            b"",
        )


def runs_of(messages: Sequence[Message]) -> Iterator[tuple[Partition, bool, Sequence[Message]]]:
    """Yield neighbouring messages of one partition together: the partition, whether they are errors, and the
    messages."""
    from confluent_kafka import Message as M

    is_error = map(is_not, map(M.error, messages), repeat(None))
    start = 0
    of_each = zip(map(M.topic, messages), map(M.partition, messages), is_error, strict=True)
    for (topic, partition, errors), same in groupby(of_each):
        stop = start + sum(1 for _ in same)
        yield (topic or "", partition or 0), errors, messages[start:stop]
        start = stop


def _lengths(texts: Sequence[bytes | None]) -> npt.NDArray[np.int64]:
    return np.fromiter(map(len, [each or b"" for each in texts]), np.int64, len(texts))


def _line_start(place: Partition) -> bytes:
    """Return the beginning of the line of each record of a partition; the offset follows."""
    return b'{"topic":%s,"partition":%d,"offset":' % (json.dumps(place[0]).encode(), place[1])


def _tail(headers: Headers | None) -> bytes:
    """Return what stands behind the value in the line of a record: its headers as JSON."""
    if not headers:
        return b',"headers":[]}'
    held = json.dumps([{"key": name, "value": _text(value)} for name, value in headers])
    return b',"headers":%s}' % held.encode()


def _written(numbers: pa.Int64Array) -> pa.BinaryArray:
    return numbers.cast(pa.string()).cast(pa.binary())


def _keys_as_json(keys: Sequence[bytes | None]) -> pa.BinaryArray:
    """Return each of ``keys`` as one line of JSON."""
    texts = pa.array(keys, pa.binary())
    others = np.asarray(pc.invert(pc.fill_null(pc.match_substring_regex(texts, _PLAIN_KEY), False)))
    if not others.any():
        return texts
    made = pa.array([_as_json(each) for each in compress(keys, others.tolist())], pa.binary())
    return pc.replace_with_mask(texts, pa.array(others), made)


def _text(value: bytes | str | None) -> str | None:
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else value


def _header(value: bytes | str | None) -> Any:
    """Return the value of a header, parsed if it is a JSON object or string, as the JSON converter writes."""
    text = _text(value)
    if text is not None and text[:1] in ("{", '"'):
        try:
            return unwrapped(parse_row(text))[0]
        except Unreadable:
            pass
    return text


def _as_json(value: bytes | None) -> bytes:
    if not value:
        return b"null" if value is None else b'""'
    try:
        orjson.loads(value)
    except orjson.JSONDecodeError:
        return json.dumps(_text(value)).encode()
    return value.replace(b"\n", b" ").replace(b"\r", b" ")
