"""A table that only grows: what people decided, each decision on top of all that were made before it.

A command's rows are one file and one commit, at exactly the version after the one it was planned on.
Whoever comes second is refused, reads what the other wrote, and decides anew. So no decision is taken
on an old view, and none is lost. Nothing here can be made again from landing: file and log entry are
synced before a command says that it is done.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable

from omnisupport_ingest.durable import create_exclusively, sync_file, sync_folder
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.failpoints import gate
from omnisupport_ingest.foreign import Unreadable, require_file
from omnisupport_ingest.lake.commit import add_data, commit_actions, until_first
from omnisupport_ingest.lake.layout import WHOLE_TABLE, StagedFile
from omnisupport_ingest.lake.schema import arrow_schema, open_with_schema
from omnisupport_ingest.lake.stats import delta_stats
from omnisupport_ingest.lake.table import TableSpec

SEQUENCE = "sequence"
"""The column that numbers commits, from 1: a higher one is later, whatever the clocks said."""

_APPEND_ONLY = {"delta.appendOnly": "true"}
"""Writers that know the Delta protocol refuse to delete or change a row."""

_FILES_KEPT = 4096
"""Files whose rows a process remembers; none ever changes."""


class LedgerUnreadable(IngestError):
    """A file of a ledger is damaged or gone: what was decided is not known, so nothing may go on."""

    exit_code = 3


@dataclass(frozen=True)
class Ledger:
    """The ledger in the folder ``root``; nothing is made before the first ``append``.

    ``spec`` has an int64 column ``sequence`` and no partitions.
    """

    root: Path
    spec: TableSpec

    @property
    def folder(self) -> Path:
        return self.root.absolute() / self.spec.path

    @property
    def exists(self) -> bool:
        return DeltaTable.is_deltatable(str(self.folder))

    def entries(self) -> pa.Table:
        """Every row, by ``sequence``; none where there is no ledger. ``LedgerUnreadable``."""
        return self._rows(DeltaTable(str(self.folder))) if self.exists else self._schema.empty_table()

    def append(self, decide: Callable[[pa.Table], pa.Table], *, attempts: int = 8) -> pa.Table:
        """Add what ``decide`` makes of all rows so far, in one commit; returns what was added.

        ``decide`` gives rows without ``sequence``, none if there is nothing to add: then no version
        is made. It is called again, with the rows of the other, when another process was first. The
        last ``CommitConflict`` is raised after ``attempts`` calls.
        """
        return until_first(lambda: self._append(decide), attempts)

    def _append(self, decide: Callable[[pa.Table], pa.Table]) -> pa.Table:
        if not self.exists and not decide(self._schema.empty_table()).num_rows:
            # What leads to nothing leaves no table behind.
            return self._schema.empty_table()
        handle = open_with_schema(
            self.folder,
            self.spec.schema,
            self.spec.partition_by,
            self.spec.path,
            self.spec.description,
            configuration=_APPEND_ONLY,
        )
        version = handle.version() + 1
        decided = decide(self._rows(handle))
        if not decided.num_rows:
            return self._schema.empty_table()
        numbers = pa.array([version] * decided.num_rows, pa.int64())
        rows = decided.append_column(SEQUENCE, numbers).select(self._schema.names).cast(self._schema)
        file = self._write(rows, version)
        note = {"rows": rows.num_rows}
        commit_actions(handle, [add_data(self.folder, file)], app_id=self.spec.app_id, note=note)
        log = self.folder / "_delta_log"
        sync_file(log / f"{version:020d}.json")
        sync_folder(log)
        return rows

    def _write(self, rows: pa.Table, version: int) -> StagedFile:
        """The rows as a file, durable and readable by its owner only.

        One that loses its race stays behind unread, a few kilobytes: it is never sure enough that a
        commit failed to delete what it may have added.
        """
        buffer = pa.BufferOutputStream()
        pq.write_table(rows, buffer)
        name = f"entry-{version:08d}-{uuid.uuid4().hex}.parquet"
        path = self.folder / name
        with gate("lake.ledger", path):
            create_exclusively(path, buffer.getvalue().to_pybytes())
        count, stats = delta_stats(path)
        return StagedFile(name, WHOLE_TABLE, (), count, path.stat().st_size, stats)

    def _rows(self, handle: DeltaTable) -> pa.Table:
        listed = pa.table(handle.get_add_actions(flatten=True)).column("path").to_pylist()
        parts = [_read(self.folder / unquote(path), self._schema) for path in listed]
        return pa.concat_tables([self._schema.empty_table(), *parts]).sort_by(SEQUENCE)

    @property
    def _schema(self) -> pa.Schema:
        return arrow_schema(self.spec.schema, without=())


@lru_cache(maxsize=_FILES_KEPT)
def _read(path: Path, schema: pa.Schema) -> pa.Table:
    try:
        require_file(path)
        # Columns that an older program did not know are NULL.
        return pq.read_table(path, schema=schema, partitioning=None)
    except PermissionError:
        raise
    except (OSError, Unreadable, pa.ArrowException) as error:
        raise LedgerUnreadable(
            f"{path} holds decisions of people and cannot be read: {type(error).__name__}.",
            fix="Restore the file from a backup of the lake: nothing else knows what it said.",
        ) from error
