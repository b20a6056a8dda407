"""Reads the rows of a data file: every format gives the same values, numbered in the same way.

Every value becomes a text that PostgreSQL reads. Times and booleans get the one text that it writes itself,
so a version of a row is the same in every format; Parquet's numbers do, too. An array of JSON Lines or
Parquet has all of its texts quoted, and any other text stays as it is written. So rows are judged,
typed and folded alike. A record that is no row comes with its fault, and the records after it are still read.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.csv as arrow_csv
import pyarrow.parquet as pq

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.foreign import Unreadable, is_fault_of_file, open_file, printable
from omnisupport_ingest.sources.manifests.arrow_values import (
    Convert,
    NoText,
    converter,
    names_a_field_twice,
    plain,
)
from omnisupport_ingest.sources.manifests.row_text import RowFault, read_row, row_of
from omnisupport_ingest.sources.packed import PACKED, PackedWrong, plain_name, unpacked
from omnisupport_ingest.sources.shown_columns import ShownColumn

MAX_LINE_BYTES = 256 * 1024 * 1024
"""A longer row is taken as a sign that the file does not have one row per line."""

_BLOCK = 1 << 20
_CSV_BLOCKS = (4 << 20, 32 << 20, MAX_LINE_BYTES)
_MOST_COLUMNS = 1600
"""The most columns that a table of PostgreSQL can have."""

Row = dict[str, str | None]


class _BlockTooSmall(Exception):
    """Raised when a record of a CSV file does not fit into a block."""


class FileUnreadable(ValueError):
    """Raised for a data file that is missing, incomplete or of another format. The text ends a sentence.

    ``fix``: empty where only the file itself can be wrong.
    """

    def __init__(self, problem: str, fix: str = "") -> None:
        super().__init__(problem)
        self.fix = fix


@dataclass(frozen=True, slots=True)
class Record:
    """One record of a file. ``number``: its line; for CSV and Parquet the number of the record, a header
    included.

    ``row``: column → text; None if the record is no row, and ``fault`` says why. A row of CSV or Parquet has
    only the columns that its file has. ``text``: the record as delivered.
    """

    number: int
    row: Row | None
    text: str
    fault: str | None = None


@dataclass(frozen=True, slots=True)
class Digests:
    """SHA-256 of a file as it is, and of its unpacked content."""

    file: str
    content: str


def digests(path: Path) -> Digests:
    """Return the digests of ``path``. Raises ``FileUnreadable``."""
    with _read_errors(path):
        with unpacked(path) as content:
            of_content = _sha256(content)
        if path.suffix not in PACKED:
            return Digests(of_content, of_content)
        with os.fdopen(open_file(path), "rb") as plain:
            return Digests(_sha256(plain), of_content)


def records(path: Path, contract: TableContract) -> Iterator[Record]:
    """Yield the records of ``path`` one by one. Raises ``FileUnreadable`` where it cannot be read on."""
    with _read_errors(path):
        yield from _READERS[format_of(path) or ".jsonl"](path, contract)


def columns_of(path: Path) -> tuple[ShownColumn, ...] | None:
    """Return the columns that the file ``path`` names for all of its rows; None if each row names its own.

    Raises ``FileUnreadable``.
    """
    with _read_errors(path):
        if format_of(path) == ".parquet":
            with unpacked(path) as content:
                return tuple(ShownColumn(each.name, _pg_type(each.type)) for each in pq.read_schema(content))
        for block_bytes in _CSV_BLOCKS if format_of(path) == ".csv" else ():
            with suppress(_BlockTooSmall), unpacked(path) as content:
                return _csv_columns(content, block_bytes)
    return None


def _csv_columns(content: IO[bytes], block_bytes: int) -> tuple[ShownColumn, ...]:
    for batch in _csv_batches(content, lambda _: "skip", block_bytes):
        if batch.num_rows:
            values = tuple(column[0].as_py() for column in batch.columns)
            return tuple(map(ShownColumn, _header(values)))
    return ()


def _pg_type(kind: pa.DataType) -> str:
    """Return the PostgreSQL type for values of ``kind``; empty if no type is certain."""
    if pa.types.is_decimal(kind):
        return f"numeric({kind.precision},{kind.scale})"
    if pa.types.is_timestamp(kind):
        return "timestamp without time zone" if kind.tz is None else "timestamp with time zone"
    for is_of, name in _PG_TYPES:
        if is_of(kind):
            return name
    return ""


_PG_TYPES: tuple[tuple[Callable[[pa.DataType], bool], str], ...] = (
    (pa.types.is_boolean, "boolean"),
    (pa.types.is_int8, "smallint"),
    (pa.types.is_int16, "smallint"),
    (pa.types.is_int32, "integer"),
    (pa.types.is_int64, "bigint"),
    (pa.types.is_float32, "real"),
    (pa.types.is_float64, "double precision"),
    (pa.types.is_string, "text"),
    (pa.types.is_large_string, "text"),
    (pa.types.is_binary, "bytea"),
    (pa.types.is_date, "date"),
    (pa.types.is_time, "time without time zone"),
)


def format_of(path: Path) -> str | None:
    """Return the format suffix of ``path``, without that of its packing; None if it is no known format."""
    suffix = Path(plain_name(path)).suffix
    return suffix if suffix in _READERS and not (suffix == ".parquet" and path.suffix in PACKED) else None


def _json_lines(path: Path, contract: TableContract) -> Iterator[Record]:
    with unpacked(path) as lines:
        number = 0
        while line := lines.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                raise FileUnreadable(f"line {number} is longer than {MAX_LINE_BYTES >> 20} MiB")
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.strip():
                continue
            text = line.decode(errors="backslashreplace").rstrip("\r\n")
            yield _record(number, text, lambda line=line: read_row(line, contract))  # type: ignore[misc]


def _csv(path: Path, contract: TableContract) -> Iterator[Record]:
    """Yield the records of a CSV file. An empty value is NULL; a quoted empty value is an empty text. The
    header is record 1. A record without any value, as of a blank line, is none.

    A record must fit into a block. Long records are rare, so blocks begin small. If one is too small, the
    file is read again with larger blocks, and reading continues after the records already yielded.
    """
    yielded = 1
    for block_bytes in _CSV_BLOCKS:
        with suppress(_BlockTooSmall):
            for record in _csv_by_blocks(path, contract, block_bytes):
                if record.number > yielded:
                    yield record
                    yielded = record.number
            return
    raise FileUnreadable(
        f"the record behind number {yielded} is longer than {_CSV_BLOCKS[-1] >> 20} MiB: is a quote not "
        "closed?"
    )


def _csv_by_blocks(path: Path, contract: TableContract, block_bytes: int) -> Iterator[Record]:
    wrong: list[Any] = []

    def skip(row: Any) -> str:
        wrong.append(row)
        return "skip"

    names: list[str] | None = None
    number = 0
    with unpacked(path) as content:
        for batch in _csv_batches(content, skip, block_bytes):
            for values in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                number += 1
                while wrong and wrong[0].number <= number:
                    yield _of_another_width(wrong.pop(0))
                    number += 1
                if names is None:
                    names = _header(values)
                    continue
                if len(values) > 1 and not any(value is not None for value in values):
                    # A blank line.
                    continue
                yield _csv_record(number, names, values, contract)
        yield from map(_of_another_width, wrong)


def _csv_batches(
    content: IO[bytes], skip: Callable[[Any], str], block_bytes: int
) -> Iterator[pa.RecordBatch]:
    kinds = {f"f{number}": pa.binary() for number in range(_MOST_COLUMNS)}
    try:
        batches = arrow_csv.open_csv(
            _with_end(content),
            arrow_csv.ReadOptions(use_threads=False, autogenerate_column_names=True, block_size=block_bytes),
            arrow_csv.ParseOptions(
                newlines_in_values=True, ignore_empty_lines=False, invalid_row_handler=skip
            ),
            arrow_csv.ConvertOptions(
                column_types=kinds,
                null_values=[""],
                strings_can_be_null=True,
                quoted_strings_can_be_null=False,
            ),
        )
        if len(batches.schema) > _MOST_COLUMNS:
            raise FileUnreadable(
                f"its header names more than {_MOST_COLUMNS:,} columns, the most that a table can have",
                "Deliver the columns of the contract, as CSV with commas.",
            )
        yield from batches
    except pa.ArrowInvalid as problem:
        if "straddling" in str(problem):
            raise _BlockTooSmall from None
        raise FileUnreadable("it is no CSV with a header") from None


class _WithEnd(io.RawIOBase):
    """``content`` with a line end behind it: the reader of CSV takes a file of one line without one for an
    empty file."""

    def __init__(self, content: IO[bytes]) -> None:
        self._content, self._last = content, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        part = self._content.read(len(buffer))
        if not part and self._last not in (b"", b"\n"):
            part = b"\n"
        buffer[: len(part)] = part
        self._last = part[-1:]
        return len(part)


def _with_end(content: IO[bytes]) -> IO[bytes]:
    return io.BufferedReader(_WithEnd(content), _BLOCK)


def _header(values: tuple[bytes | None, ...]) -> list[str]:
    try:
        names = [(value or b"").decode("utf-8-sig") for value in values]
    except UnicodeDecodeError:
        raise FileUnreadable("its header is not UTF-8") from None
    if "" in names or len(set(names)) != len(names):
        raise FileUnreadable("its header names a column twice, or one not at all")
    return names


def _csv_record(
    number: int, names: list[str], values: tuple[bytes | None, ...], contract: TableContract
) -> Record:
    decoded = [None if value is None else value.decode(errors="backslashreplace") for value in values]
    text = json.dumps(dict(zip(names, decoded, strict=True)), ensure_ascii=False)

    def read() -> Row:
        decoded_values: dict[str, Any] = {}
        for at, (name, value) in enumerate(zip(names, values, strict=True), 1):
            try:
                decoded_values[name] = None if value is None else value.decode()
            except UnicodeDecodeError:
                # Of a file without a header the first row is taken for it: its values must not be shown.
                contracted = any(name == column.name for column in contract.source_columns)
                shown = repr(name) if contracted else f"column {at}"
                raise RowFault(f"the value of {shown} is not UTF-8") from None
        return row_of(decoded_values, contract, declared=True)

    return _record(number, text, read)


def _of_another_width(row: Any) -> Record:
    fault = f"it has {row.actual_columns} values, and the header names {row.expected_columns} columns"
    return Record(row.number, None, _no_nul(row.text), fault)


def _parquet(path: Path, contract: TableContract) -> Iterator[Record]:
    columns = {column.name: column for column in contract.source_columns}
    number = 0
    with unpacked(path) as content, pq.ParquetFile(content) as file:
        schema = file.schema_arrow
        if len(set(schema.names)) != len(schema.names):
            raise FileUnreadable("it names a column twice", "Name each column once.")
        for field in schema:
            if names_a_field_twice(field.type):
                raise FileUnreadable(
                    f"an object in its column {field.name!r} names a field twice", "Name each field once."
                )
        converters = {each.name: converter(each.type, columns.get(each.name)) for each in schema}
        for batch in file.iter_batches(batch_size=_parquet_rows(file)):
            for values in _python_rows(plain(batch)):
                number += 1
                if values is None:
                    yield Record(number, None, "", "a map in it names a key twice")
                    continue
                yield _parquet_record(number, values, converters, contract)


def _parquet_record(
    number: int, values: Mapping[str, Any], converters: Mapping[str, Convert], contract: TableContract
) -> Record:
    row, fault = dict(values), ""
    for name, value in values.items():
        if value is not None:
            try:
                row[name] = converters[name](value)
            except NoText as why:
                fault = fault or f"the value of {name!r} {why}"

    def read() -> Row:
        if fault:
            raise RowFault(fault)
        return row_of(row, contract, declared=True)

    return _record(number, json.dumps(row, ensure_ascii=False, default=str), read)


def _parquet_rows(file: pq.ParquetFile) -> int:
    """Return how many rows to read at a time, fewer if they are large. A batch may hold a single row."""
    of_all = sum(file.metadata.row_group(each).total_byte_size for each in range(file.num_row_groups))
    rows: int = _BLOCK * 8 * file.metadata.num_rows // max(of_all, 1)
    return max(1, min(10_000, rows))


def _python_rows(batch: pa.RecordBatch) -> Iterator[dict[str, Any] | None]:
    """Yield the rows of ``batch``; None for a row with a map that names a key twice, which a JSON object
    cannot hold."""
    try:
        yield from batch.to_pylist(maps_as_pydicts="strict")
    except KeyError:
        for number in range(batch.num_rows):
            try:
                (row,) = batch.slice(number, 1).to_pylist(maps_as_pydicts="strict")
            except KeyError:
                row = None
            yield row


_READERS: Mapping[str, Callable[[Path, TableContract], Iterator[Record]]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json_lines,
    ".csv": _csv,
    ".parquet": _parquet,
}
"""Suffix of a name → function that reads the file."""

FORMATS = tuple(_READERS)
"""Suffixes of data files; the text formats may be packed (``PACKED``)."""


def _record(number: int, text: str, read: Callable[[], Row]) -> Record:
    try:
        return Record(number, read(), text)
    except RowFault as fault:
        return Record(number, None, _no_nul(text), str(fault))


def _no_nul(text: str) -> str:
    return text.replace("\0", "\\0")


def _sha256(content: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while block := content.read(_BLOCK):
        digest.update(block)
    return digest.hexdigest()


@contextmanager
def _read_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (PackedWrong, Unreadable) as problem:
        raise FileUnreadable(str(problem)) from None
    except pa.ArrowNotImplementedError:
        raise FileUnreadable(
            "a column of it has a type that cannot be read", "Write that column as text."
        ) from None
    except pa.ArrowInvalid:
        raise FileUnreadable(f"it is no {plain_name(path).rpartition('.')[2]} file") from None
    except OSError as problem:
        if not is_fault_of_file(problem):
            raise
        raise FileUnreadable(problem.strerror or f"{printable(path)} cannot be read") from None
