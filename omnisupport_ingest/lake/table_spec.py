"""The definition of a table of the lake, and where it is."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from omnisupport_ingest.lake import layout
from omnisupport_ingest.lake.file_index_tables import TableLog

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


@dataclass(frozen=True)
class TableSpec:
    """The definition of a table.

    ``path``: relative to the lake, like ``support_desk/raw_cdc_staging``. ``schema``: every column, partition
    columns included. ``partition_by``: empty, or begins with ``window``; partition columns are text.
    ``deletion_vectors``: whether commits may mark rows of its files as dead (``WindowChange.marked``).
    ``personal``: columns of which no value may stand in the log. ``ordered_by``: the column by which its
    files are ordered (``key_files``); None if they are not.
    """

    path: str
    schema: StructType
    partition_by: tuple[str, ...]
    description: str
    deletion_vectors: bool = False
    personal: frozenset[str] = frozenset()
    ordered_by: str | None = None

    def __post_init__(self) -> None:
        if self.partition_by and self.partition_by[0] != layout.WINDOW:
            raise ValueError(f"{self.path}: the first partition column is not {layout.WINDOW}")
        for name in self.partition_by:
            if self.schema[name].dataType.typeName() != "string":
                raise ValueError(f"{self.path}: the partition column {name} is not text")

    @property
    def app_id(self) -> str:
        """The application id that all writers of the table share (Delta protocol, ``txn``)."""
        return f"omnisupport_ingest/{self.path}"


@dataclass(frozen=True)
class TablePlace:
    """The table ``spec`` of the lake in the folder ``root``, whether it is there or not."""

    root: Path
    spec: TableSpec

    @cached_property
    def folder(self) -> Path:
        return self.root.absolute() / self.spec.path

    @property
    def log(self) -> TableLog:
        """The log of the table, as the index reads it."""
        return TableLog(self.spec.path, self.folder, self.spec.app_id, self.spec.ordered_by)
