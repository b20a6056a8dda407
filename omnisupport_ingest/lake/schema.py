"""The schema of a table on disk follows its spec: made with it, and widened when the spec grows.

A column that the spec adds is added at once. One whose type is another in the spec keeps its type on disk
until a commit replaces all that the table holds: readers of a Delta table take its files to be of its schema.
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
from omnisupport_ingest.lake.delta import is_delta, open_delta, reaching, table_uri
from omnisupport_ingest.storage import storage_of

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


class SchemaChanged(IngestError):
    """The table on disk cannot take what the spec says."""


@dataclass(frozen=True, slots=True)
class Retyped:
    """A column that is of another type on disk than in the spec; both as Delta writes them."""

    column: str
    on_disk: str
    wanted: str

    @property
    def widens(self) -> bool:
        """Whether every value on disk is the same value in the wanted type, so that no reader loses any."""
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
"""Delta types → those that hold each of their values exactly. (A whole number of 64 bits is no double.)"""

_DIGITS = {"short": 5, "integer": 10, "long": 19}
_DECIMAL = re.compile(r"decimal\((\d+),\s*(\d+)\)")


def retyped(on_disk_schema: str, schema: StructType) -> tuple[Retyped, ...]:
    """The columns that ``schema`` gives another type, by name. ``on_disk_schema``: the table's, as text of
    Delta."""
    on_disk = _types_in(on_disk_schema)
    return tuple(
        Retyped(name, _named(on_disk[name]), _named(of_type))
        for name, of_type in sorted(_asked(schema).types.items())
        if name in on_disk and on_disk[name] != of_type
    )


def _named(of_type: Any) -> str:
    return of_type if isinstance(of_type, str) else json.dumps(of_type)


def delta_schema(schema: StructType) -> Schema:
    """The Delta schema; every column may be NULL, as in what Spark writes.

    Delta serializes a schema exactly as Spark does (Delta protocol, schema serialization format).
    """
    return _asked(schema).delta


def arrow_schema(schema: StructType, *, without: tuple[str, ...]) -> pa.Schema:
    """The Arrow schema of the columns, ``without`` those named."""
    return pa.schema([field for field in _asked(schema).arrow if field.name not in without])


@dataclass(frozen=True)
class _Asked:
    """A schema of Spark in the words of others; ``spark`` is kept, so that nothing else is taken for it."""

    spark: StructType

    @cached_property
    def delta(self) -> Schema:
        return Schema.from_json(self.spark.toNullable().json())

    @cached_property
    def arrow(self) -> pa.Schema:
        return pa.schema(self.delta.to_arrow())

    @cached_property
    def types(self) -> Mapping[str, Any]:
        # What ``delta`` has, which takes six times as long to say so.
        return {each.name: _nullable(each.dataType.jsonValue()) for each in self.spark.fields}


def _nullable(of_type: Any) -> Any:
    """A type in Delta's words, whose values within may all be NULL."""
    if isinstance(of_type, dict):
        return {name: name in _MAY_BE_NULL or _nullable(each) for name, each in of_type.items()}
    return [_nullable(each) for each in of_type] if isinstance(of_type, list) else of_type


_MAY_BE_NULL = frozenset(("containsNull", "valueContainsNull", "nullable"))


def _asked(schema: StructType) -> _Asked:
    found = _known.get(id(schema))
    if found is None or found.spark is not schema:
        found = _known[id(schema)] = _Asked(schema)
        while len(_known) > _SCHEMAS_KEPT:
            _known.pop(next(iter(list(_known))), None)
    return found


_SCHEMAS_KEPT = 1024
_known: dict[int, _Asked] = {}
"""By the identity of a schema, which nobody changes once it is made: to put one in other words takes longer
than most of what asks for it."""


def open_with_schema(
    folder: Path,
    schema: StructType,
    partition_by: tuple[str, ...],
    name: str,
    description: str,
    *,
    configuration: Mapping[str, str] | None = None,
) -> DeltaTable:
    """The newest version of the table in ``folder``, made or widened as ``schema`` asks.

    A new table's folder is open to its owner only, and it has the Delta properties of
    ``configuration``. A column that has another type on disk keeps it (``retyped``). ``SchemaChanged`` if the
    partition columns differ.
    """
    wanted = delta_schema(schema)
    if not is_delta(folder):
        # No failpoint: a folder: one that is there already is as good.
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            with failpoint("lake.table", name), reaching(folder):
                DeltaTable.create(
                    table_uri(folder),
                    wanted,
                    mode="ignore",
                    partition_by=list(partition_by),
                    name=name,
                    description=description,
                    configuration=configuration,
                    # A retry would make the table again, with another id, over the one just made.
                    commit_properties=CommitProperties(max_commit_retries=0),
                )
        except DeltaError:
            # Another process made it in the same moment.
            if not is_delta(folder):
                raise
        # What Delta's library writes there has the rights that the process leaves it.
        if storage_of(folder).is_local:
            (folder / "_delta_log").chmod(0o700)
    handle = open_delta(folder)
    missing = _missing(handle, wanted, partition_by)
    if missing:
        # Another process may add them in the same moment; what is still missing shows below.
        with suppress(CommitFailedError), failpoint("lake.columns", name), reaching(folder):
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
    on_disk, asked = _types(handle.schema()), _types(wanted)
    partitioned = tuple(handle.metadata().partition_columns)
    if partitioned != partition_by:
        raise SchemaChanged(
            f"{handle.table_uri} is partitioned by {', '.join(partitioned) or 'nothing'}, not by "
            f"{', '.join(partition_by) or 'nothing'}.",
            fix="Use the version that made the table, or rebuild the lake from landing.",
        )
    return [name for name in asked if name not in on_disk]


def lacks_columns(on_disk_schema: str, schema: StructType) -> bool:
    """Whether a table with ``on_disk_schema``, as Delta writes it, has not every column of ``schema``."""
    return not set(schema.names) <= _types_in(on_disk_schema).keys()


def _types(schema: Schema) -> Mapping[str, Any]:
    return _types_in(schema.to_json())


@lru_cache(maxsize=_SCHEMAS_KEPT)
def _types_in(schema: str) -> Mapping[str, Any]:
    return {field["name"]: field["type"] for field in json.loads(schema)["fields"]}
