"""A table that only grows: what people decided, each decision on top of all that were made before it.

A command's rows are one file and one commit, at exactly the version after the one it was planned on.
Whoever comes second is refused, reads what the other wrote, and decides anew. So no decision is taken
on an old view, and none is lost. Nothing here can be made again from landing: file and log entry are
synced before a command says that it is done.
"""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
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
from omnisupport_ingest.lake.delta import is_delta, keep_added, open_delta, reaching
from omnisupport_ingest.lake.layout import WHOLE_TABLE, StagedFile
from omnisupport_ingest.lake.schema import arrow_schema, open_with_schema
from omnisupport_ingest.lake.stats import delta_stats
from omnisupport_ingest.lake.table import TableSpec
from omnisupport_ingest.storage import at_hand, create_exclusively, storage_of

SEQUENCE = "sequence"
"""The column that numbers commits, from 1: a higher one is later, whatever the clocks said."""

_APPEND_ONLY = {"delta.appendOnly": "true"}
"""Writers that know the Delta protocol refuse to delete or change a row."""

_DIGEST = re.compile(r"-([0-9a-f]{64})\.parquet\Z")
"""How the name of a file ends: with the SHA-256 of its content. (Files of earlier versions have none.)"""

_TIMES = pa.scalar(-62_135_596_800_000_000), pa.scalar(253_402_300_799_999_999)
"""Microseconds from 1970 to the first and the last moment that a date of Python has."""

_FILES_KEPT = 4096
"""Files whose rows a process remembers; none ever changes."""


class LedgerUnreadable(IngestError):
    """A file or a row of a ledger is damaged, gone, or not ours: what was decided is not known, so nothing
    may go on."""

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
        return is_delta(self.folder)

    def entries(self) -> pa.Table:
        """Every row, by ``sequence``; none where there is no ledger. ``LedgerUnreadable``."""
        log = self.folder / "_delta_log"
        try:
            handle = open_delta(self.folder) if self.exists else None
            # Delta takes an empty one for a commit of nothing: its decision would be forgotten.
            kept = storage_of(log).listed(log) if handle is not None else ()
            empty = [each.path.name for each in kept if each.path.suffix == ".json" and not each.bytes]
            if empty:
                raise Unreadable(f"{empty[0]} is empty")
        except (DeltaError, OSError, ValueError, Unreadable) as error:
            raise LedgerUnreadable(
                f"The log of {self.folder} cannot be read: {type(error).__name__}.",
                fix=f"Restore {log} from a backup of the lake: it holds decisions of people, and nothing "
                "else knows them.",
            ) from error
        return self._schema.empty_table() if handle is None else self._rows(handle)

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
        added = [add_data(self.folder, file)]
        keep_added(self.folder, added, self.spec.app_id)
        with reaching(self.folder):
            commit_actions(handle, added, app_id=self.spec.app_id, note=note)
        log = self.folder / "_delta_log"
        if storage_of(log).is_local:
            sync_file(log / f"{version:020d}.json")
            sync_folder(log)
        return rows

    def _write(self, rows: pa.Table, version: int) -> StagedFile:
        """The rows as a file, durable and readable by its owner only.

        One that loses its race stays behind unread, a few kilobytes: it is never sure enough that a
        commit failed to delete what it may have added.
        """
        buffer = pa.BufferOutputStream()
        # No failpoint: a database in memory, or a buffer: nothing of it outlives the process.
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
    """``LedgerUnreadable`` names the first row that says less than a decision has to.

    ``required``: columns without NULL, in their fields and items neither. Of a struct that may be NULL, the
    fields may not; and no time may be one that no date is made of.
    """
    for name in entries.column_names:
        column = _one_chunk(entries[name])
        for what, wrong in _wrong(column, name in required):
            rows = pc.indices_nonzero(wrong)
            if len(rows):
                refuse_row(entries, ledger, rows[0].as_py(), f"{name} is {what}")


def refuse_row(entries: pa.Table, ledger: str, row: int, what: str) -> None:
    """``LedgerUnreadable``: row ``row`` of ``entries`` is no decision, for ``what``. No value is repeated."""
    number = entries[SEQUENCE][row].as_py()
    raise LedgerUnreadable(
        f"Decision {number} in {ledger} cannot be read: {what}.",
        fix=f"Restore {ledger} from a backup of the lake, or use the version of omnisupport_ingest that "
        "wrote it. Nothing was changed.",
    )


def _one_chunk(column: pa.ChunkedArray) -> pa.Array:
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


def _wrong(column: pa.Array, required: bool) -> Iterator[tuple[str, pa.BooleanArray]]:
    """What may be wrong with a column, and in which rows it is."""
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
        yield "a time that no date is made of", pc.fill_null(outside, False)


@lru_cache(maxsize=_FILES_KEPT)
def _read(path: Path, schema: pa.Schema) -> pa.Table:
    try:
        require_file(path)
        content = path.read_bytes()
        digest = _DIGEST.search(path.name)
        if digest is not None and hashlib.sha256(content).hexdigest() != digest[1]:
            raise Unreadable("its content is not what was written")
        # Columns that an older program did not know are NULL.
        return pq.read_table(pa.BufferReader(content), schema=schema)
    except PermissionError:
        raise
    except (OSError, Unreadable, pa.ArrowException) as error:
        raise LedgerUnreadable(
            f"{path} holds decisions of people and cannot be read: {type(error).__name__}.",
            fix="Restore the file from a backup of the lake: nothing else knows what it said.",
        ) from error
