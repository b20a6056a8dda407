"""Keeps the schema of a table on disk in step with its spec.

A column that is new in the spec is added at once. A column whose type changed in the spec keeps its type on
disk until a commit replaces every row of the table: readers of a Delta table expect its files to have its
schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Schema
from deltalake.exceptions import CommitFailedError, DeltaError

from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.lake.delta import is_delta, open_delta, table_uri, translated_store_errors
from omnisupport_ingest.storage import storage_of

if TYPE_CHECKING:
    from pyspark.sql.types import StructField, StructType


class SchemaChanged(IngestError):
    """A table of the lake has columns of another type than its contract says, or is partitioned otherwise. It
    stays as it is, and takes in nothing more.

    Fix: Restore the type in the contract, or have the table made again: ``omnisupport-ingest contracts retype
    NAME``.
    """


@dataclass(frozen=True, slots=True)
class Retyped:
    """A column whose type on disk differs from that in the spec; types as Delta writes them."""

    column: str
    on_disk: str
    wanted: str

    @property
    def widens(self) -> bool:
        """Whether the wanted type holds every value of the type on disk exactly."""
        if self.wanted in _WIDER.get(self.on_disk, ()):
            return True
        narrow, wide = _DECIMAL.fullmatch(self.on_disk), _DECIMAL.fullmatch(self.wanted)
        if wide is None:
            return False
        digits, scale = int(wide[1]), int(wide[2])
        if narrow is not None:
            return scale >= int(narrow[2]) and digits - scale >= int(narrow[1]) - int(narrow[2])
        return digits - scale >= _DIGITS.get(self.on_disk, 39)

    def __str__(self) -> str:
        return f"{self.column} ({self.on_disk} on disk, {self.wanted} by its contract)"


_WIDER = {
    "short": ("integer", "long", "double"),
    "integer": ("long", "double"),
    "float": ("double",),
}
"""Delta types → types that hold each of their values exactly. (A double does not hold every 64-bit
number.)"""

_DIGITS = {"short": 5, "integer": 10, "long": 19}
_DECIMAL = re.compile(r"decimal\((\d+),\s*(\d+)\)")


def retyped(on_disk_schema: str, schema: StructType) -> tuple[Retyped, ...]:
    """Return the columns whose type differs in ``schema``, sorted by name.

    ``on_disk_schema``: the table's schema, as Delta's text.
    """
    on_disk = _types_in(on_disk_schema)
    return tuple(
        Retyped(name, _type_text(on_disk[name]), _type_text(of_type))
        for name, of_type in sorted(_converted(schema).types.items())
        if name in on_disk and on_disk[name] != of_type
    )


def _type_text(of_type: Any) -> str:
    return of_type if isinstance(of_type, str) else json.dumps(of_type)


def delta_schema(schema: StructType) -> Schema:
    """Return the Delta schema; every column may be NULL, as in files that Spark writes.

    Delta serializes a schema exactly as Spark does (Delta protocol, schema serialization format).
    """
    return _converted(schema).delta


def arrow_schema(schema: StructType, *, without: tuple[str, ...]) -> pa.Schema:
    """Return the Arrow schema of the columns, ``without`` those named."""
    return pa.schema([field for field in _converted(schema).arrow if field.name not in without])


@dataclass(frozen=True)
class _Converted:
    """A Spark schema and its conversions. It holds ``spark`` so that its ``id`` is not reused."""

    spark: StructType

    @cached_property
    def delta(self) -> Schema:
        return Schema.from_json(self.spark.toNullable().json())

    @cached_property
    def arrow(self) -> pa.Schema:
        return pa.schema(self.delta.to_arrow())

    @cached_property
    def types(self) -> Mapping[str, Any]:
        # The same as in ``delta``, in a sixth of the time.
        return {each.name: _field_type(each) for each in self.spark.fields}


def _field_type(field: StructField) -> Any:
    """Return the type of ``field`` in Delta's JSON form. Nested types are cached: every table of a kind has
    the same system columns, as the same objects."""
    known = _nested_types.get(id(field))
    if known is not None and known[0] is field:
        return known[1]
    found = _nullable(field.dataType.jsonValue())
    if not isinstance(found, str) and len(_nested_types) < _SCHEMAS_KEPT:
        _nested_types[id(field)] = field, found
    return found


def _nullable(of_type: Any) -> Any:
    """Return a type in Delta's JSON form with every nested value nullable."""
    if isinstance(of_type, dict):
        return {name: name in _MAY_BE_NULL or _nullable(each) for name, each in of_type.items()}
    return [_nullable(each) for each in of_type] if isinstance(of_type, list) else of_type


_MAY_BE_NULL = frozenset(("containsNull", "valueContainsNull", "nullable"))


def _converted(schema: StructType) -> _Converted:
    found = _conversions.get(id(schema))
    if found is None or found.spark is not schema:
        found = _conversions[id(schema)] = _Converted(schema)
        while len(_conversions) > _SCHEMAS_KEPT:
            _conversions.pop(next(iter(list(_conversions))), None)
    return found


_SCHEMAS_KEPT = 1024
_nested_types: dict[int, tuple[StructField, Any]] = {}
"""By the ``id`` of the field. The field is kept, so that its ``id`` is not reused."""
_conversions: dict[int, _Converted] = {}
"""By the ``id`` of the Spark schema; nobody changes a schema once it is made. A conversion takes longer than
most of the work that needs it."""


def open_with_schema(
    folder: Path,
    schema: StructType,
    partition_by: tuple[str, ...],
    name: str,
    description: str,
    *,
    configuration: Mapping[str, str] | None = None,
) -> DeltaTable:
    """Open the newest version of the table in ``folder``; create it, or add columns, to match ``schema``.

    ``configuration``: Delta properties of a new table, whose folder only its owner can open. A column that
    has another type on disk keeps it (``retyped``). Raises ``SchemaChanged`` if the partition columns differ.
    """
    wanted = delta_schema(schema)
    if not is_delta(folder):
        # No failpoint: making a folder that exists already does no harm.
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            with failpoint("lake.table", name), translated_store_errors(folder):
                DeltaTable.create(
                    table_uri(folder),
                    wanted,
                    mode="ignore",
                    partition_by=list(partition_by),
                    name=name,
                    description=description,
                    configuration=configuration,
                    # A retry would create the table again, with another id, over the existing one.
                    commit_properties=CommitProperties(max_commit_retries=0),
                )
        except DeltaError:
            # Another process created it at the same time.
            if not is_delta(folder):
                raise
        # delta-rs creates the folder with the process's default rights.
        if storage_of(folder).is_local:
            (folder / "_delta_log").chmod(0o700)
    handle = open_delta(folder)
    missing = _missing(handle, wanted, partition_by)
    if missing:
        # Another process may add them at the same time; what is still missing shows below.
        with suppress(CommitFailedError), failpoint("lake.columns", name), translated_store_errors(folder):
            handle.alter.add_columns([field for field in wanted.fields if field.name in missing])
        handle = open_delta(folder)
        missing = _missing(handle, wanted, partition_by)
        if missing:
            raise SchemaChanged(
                f"{folder} has no column {missing[0]}, and it could not be added.",
                fix="Run again; if it stays, another program is changing the table's schema.",
            )
    return handle


def _missing(handle: DeltaTable, wanted: Schema, partition_by: tuple[str, ...]) -> list[str]:
    on_disk = _types(handle.schema())
    partitioned = tuple(handle.metadata().partition_columns)
    if partitioned != partition_by:
        raise SchemaChanged(
            f"{handle.table_uri} is partitioned by {', '.join(partitioned) or 'nothing'}, not by "
            f"{', '.join(partition_by) or 'nothing'}.",
            fix="Use the version that made the table, or rebuild the lake from landing.",
        )
    return [name for name in _types(wanted) if name not in on_disk]


def lacks_columns(on_disk_schema: str, schema: StructType) -> bool:
    """Return whether a table with ``on_disk_schema`` (Delta's text) lacks a column of ``schema``."""
    return not set(schema.names) <= _types_in(on_disk_schema).keys()


def _types(schema: Schema) -> Mapping[str, Any]:
    return _types_in(schema.to_json())


@lru_cache(maxsize=_SCHEMAS_KEPT)
def _types_in(schema: str) -> Mapping[str, Any]:
    return {field["name"]: field["type"] for field in json.loads(schema)["fields"]}
