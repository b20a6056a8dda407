"""An append-only table of people's decisions, each made with knowledge of all decisions before it.

A command writes its rows as one file in one commit, at exactly the version after the one it read. The second
of two commands is refused, reads what the other wrote, and decides again. So no decision rests on an old
view, and none is lost. Decisions cannot be rebuilt from landing: file and log entry are synced before a
command reports success.
"""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from omnisupport_ingest.durable import sync_file, sync_folder
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.foreign import Unreadable, require_file
from omnisupport_ingest.lake.commit import add_data, commit_actions, until_first
from omnisupport_ingest.lake.delta import (
    entry_file,
    is_delta,
    open_delta,
    translated_store_errors,
    upload_added,
)
from omnisupport_ingest.lake.layout import WHOLE_TABLE, StagedFile
from omnisupport_ingest.lake.looks import Looks, changed
from omnisupport_ingest.lake.schema import arrow_schema, open_with_schema
from omnisupport_ingest.lake.stats import delta_stats
from omnisupport_ingest.lake.table_spec import TableSpec
from omnisupport_ingest.storage import at_hand, create_exclusively, put_back, storage_of

SEQUENCE = "sequence"
"""The column that numbers commits from 1: a higher number is later, whatever the clocks said."""

_APPEND_ONLY = {"delta.appendOnly": "true"}
"""Writers that know the Delta protocol refuse to delete or change a row."""

_DIGEST = re.compile(r"-([0-9a-f]{64})\.parquet\Z")
"""The end of a file's name: the SHA-256 of its content. Files of earlier program versions have none."""

_TIMES = pa.scalar(-62_135_596_800_000_000), pa.scalar(253_402_300_799_999_999)
"""The first and the last time that Python's datetime can hold, in microseconds since 1970."""

_FILES_KEPT = 4096
"""Number of files whose rows a process caches; a file never changes."""


class LedgerUnreadable(IngestError):
    """A ledger of decisions (reviews, erasures, retention) is damaged, gone, or not ours. The decisions are
    unknown, so no work goes on.

    Fix: Restore its folder from a backup of the lake: there is no other copy.
    """

    exit_code = 3


@dataclass(frozen=True)
class Ledger:
    """The ledger ``spec`` below the folder ``root``; the first ``append`` creates it.

    ``spec`` has an int64 column ``sequence`` and no partitions. ``looks``: as of ``LakeTable``.
    """

    root: Path
    spec: TableSpec
    looks: Looks | None = field(default=None, repr=False, compare=False)

    @property
    def folder(self) -> Path:
        return self.root.absolute() / self.spec.path

    @property
    def exists(self) -> bool:
        return is_delta(self.folder)

    def entries(self) -> pa.Table:
        """Return all rows sorted by ``sequence``; none without a ledger. Raises ``LedgerUnreadable``."""
        return self._entries() if self.looks is None else self.looks.of(self.folder, self._entries)

    def _entries(self) -> pa.Table:
        log = self.folder / "_delta_log"
        try:
            handle = open_delta(self.folder) if self.exists else None
            # Delta reads an empty entry as an empty commit: its decision would be lost.
            kept = storage_of(log).listed(log) if handle is not None else ()
            empty = [each.path.name for each in kept if each.path.suffix == ".json" and not each.bytes]
            if empty:
                raise Unreadable(f"{empty[0]} is empty")
        except (DeltaError, OSError, ValueError, Unreadable) as error:
            raise LedgerUnreadable(
                f"The log of {self.folder} cannot be read: {type(error).__name__}.",
                fix=put_back(log, f"Restore {log} from a backup of the lake.")
                + " It holds people's decisions, and there is no other copy.",
            ) from error
        return self._schema.empty_table() if handle is None else self._rows(handle)

    def append(self, decide: Callable[[pa.Table], pa.Table], *, attempts: int = 8) -> pa.Table:
        """Append the rows that ``decide`` makes from all rows so far, in one commit; return the new rows.

        ``decide`` returns rows without ``sequence``. With no rows, nothing is committed. It is called again
        with the new rows of the ledger if another process committed first. Raises the last
        ``CommitConflict`` after ``attempts`` calls.
        """
        try:
            return until_first(lambda: self._append(decide), attempts)
        finally:
            changed(self.folder)

    def _append(self, decide: Callable[[pa.Table], pa.Table]) -> pa.Table:
        if not self.exists and not decide(self._schema.empty_table()).num_rows:
            # Without rows there is nothing to commit, and no table is created.
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
        added = [add_data(self.folder, file)]
        upload_added(self.folder, added, self.spec.app_id)
        with translated_store_errors(self.folder):
            commit_actions(handle, added, folder=self.folder, app_id=self.spec.app_id, note=note)
        if storage_of(self.folder).is_local:
            sync_file(entry_file(self.folder, version))
            sync_folder(self.folder / "_delta_log")
        return rows

    def _write(self, rows: pa.Table, version: int) -> StagedFile:
        """Write the rows to a file, durable and readable by its owner only.

        If the commit is refused, the file stays behind unread, a few kilobytes: it is never certain enough
        that the commit failed.
        """
        buffer = pa.BufferOutputStream()
        # No failpoint: a buffer in memory.
        pq.write_table(rows, buffer)
        content = buffer.getvalue().to_pybytes()
        name = f"entry-{version:08d}-{uuid.uuid4().hex}-{hashlib.sha256(content).hexdigest()}.parquet"
        path = self.folder / name
        with failpoint("lake.ledger", path):
            create_exclusively(path, content)
        count, stats = delta_stats(path)
        return StagedFile(name, WHOLE_TABLE, (), count, path.stat().st_size, stats)

    def _rows(self, handle: DeltaTable) -> pa.Table:
        listed = pa.table(handle.get_add_actions(flatten=True)).column("path").to_pylist()
        parts = [_read(at_hand(self.folder / unquote(path)), self._schema) for path in listed]
        return pa.concat_tables([self._schema.empty_table(), *parts]).sort_by(SEQUENCE)

    @property
    def _schema(self) -> pa.Schema:
        return arrow_schema(self.spec.schema, without=())


def require_rows(entries: pa.Table, ledger: str, required: Collection[str]) -> None:
    """Raise ``LedgerUnreadable`` naming the first row that is no complete decision.

    ``required``: columns that may not be NULL. Fields of a struct and items of a list may never be NULL, and
    every time must fit a datetime.
    """
    for name in entries.column_names:
        column = _one_chunk(entries[name])
        for what, wrong in _problems(column, name in required):
            rows = pc.indices_nonzero(wrong)
            if len(rows):
                refuse_row(entries, ledger, rows[0].as_py(), f"{name} is {what}")


def refuse_row(entries: pa.Table, ledger: str, row: int, what: str) -> None:
    """Raise ``LedgerUnreadable`` for row ``row`` of ``entries``; ``what``: the reason, without any value."""
    number = entries[SEQUENCE][row].as_py()
    raise LedgerUnreadable(
        f"Decision {number} in {ledger} cannot be read: {what}.",
        fix=f"Restore {ledger} from a backup of the lake, or use the version of omnisupport_ingest that "
        "wrote it. Nothing was changed.",
    )


def _one_chunk(column: pa.ChunkedArray) -> pa.Array:
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


def _problems(column: pa.Array, required: bool) -> Iterator[tuple[str, pa.BooleanArray]]:
    """Yield each possible problem of a column, with a mask of the rows that have it."""
    if required:
        yield "missing", column.is_null()
    if pa.types.is_struct(column.type):
        for field in column.type:
            yield (
                f"without its {field.name}",
                pc.and_(column.is_valid(), pc.struct_field(column, field.name).is_null()),
            )
    elif pa.types.is_list(column.type):
        missing = [items is not None and None in items for items in column.to_pylist()]
        yield "without one of its items", pa.array(missing, pa.bool_())
    elif pa.types.is_timestamp(column.type):
        at = column.cast(pa.timestamp("us", column.type.tz)).cast(pa.int64())
        outside = pc.or_(pc.less(at, _TIMES[0]), pc.greater(at, _TIMES[1]))
        yield "a time outside of the years 1 to 9999", pc.fill_null(outside, False)


@lru_cache(maxsize=_FILES_KEPT)
def _read(path: Path, schema: pa.Schema) -> pa.Table:
    try:
        require_file(path)
        content = path.read_bytes()
        digest = _DIGEST.search(path.name)
        if digest is not None and hashlib.sha256(content).hexdigest() != digest[1]:
            raise Unreadable("its content is not what was written")
        # Columns that an older version did not write are NULL.
        return pq.read_table(pa.BufferReader(content), schema=schema)
    except PermissionError:
        raise
    except (OSError, Unreadable, pa.ArrowException) as error:
        raise LedgerUnreadable(
            f"{path} holds people's decisions and cannot be read: {type(error).__name__}.",
            fix=put_back(Path(path), "Restore the file from a backup of the lake.")
            + " There is no other copy.",
        ) from error
