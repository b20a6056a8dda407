"""Write the Parquet data files of one batch.

A file holds events of one window. It ends when it is large enough, when too many other files are open, or
with the batch; the window then continues in a new file.
"""

from __future__ import annotations

import secrets
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from omnisupport_ingest.landing.integrity import sha256_of
from omnisupport_ingest.landing.manifest import DataFile
from omnisupport_ingest.landing.rows import LANDED_SCHEMA
from omnisupport_ingest.position import Lsn, Position

MAX_OPEN_FILES = 64
"""Open files of one batch at most, so that it never runs out of file descriptors."""

_REPEATING = ["op", "source_schema", "source_table", "chunk_id", "batch_id"]
_WITH_STATISTICS = ["epoch", "commit_lsn", "ordinal", "op", "source_ts", "source_schema", "source_table"]


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Events of one window as a table, with the facts that the manifest records about them.

    ``first`` and ``last`` are the lowest and highest ``(epoch, commit_lsn, ordinal)``. ``ordered``: positions
    rise strictly. ``rows_per_table`` is keyed by ``schema.table``.
    """

    window: str
    table: pa.Table
    first: tuple[int, int, int]
    last: tuple[int, int, int]
    ordered: bool
    rows_per_table: dict[str, int]


class PartFiles:
    """Writes row groups to files of ``folder`` named ``<window>-<number>-<token>.parquet``.

    The token distinguishes the files of two writers of one batch. Not thread-safe: only one thread at a time
    may call it.
    """

    def __init__(self, folder: Path, max_file_bytes: int) -> None:
        """``max_file_bytes``: a file ends when it has this size in bytes."""
        self._folder = folder
        self._max_file_bytes = max_file_bytes
        self._token = secrets.token_hex(4)
        self._open: dict[str, _Part] = {}
        self.paths: list[Path] = []
        """Every file made so far, finished or not."""
        self._done: list[DataFile] = []

    def write(self, group: RowGroup) -> None:
        """Append ``group`` to the open file of its window."""
        part = self._open.get(group.window) or self._begin(group.window)
        part.write(group)
        if part.size >= self._max_file_bytes:
            self._end(group.window)

    def finish(self) -> tuple[DataFile, ...]:
        """End every file and return all of them in the order in which they were begun."""
        for window in list(self._open):
            self._end(window)
        return tuple(sorted(self._done, key=lambda file: file.path))

    def remove(self) -> None:
        """Delete everything written, finished or not."""
        for part in self._open.values():
            part.discard()
        self._open.clear()
        for path in self.paths:
            # No failpoint: files that no manifest names; what stays, landing.clear removes.
            path.unlink(missing_ok=True)

    def _begin(self, window: str) -> _Part:
        if len(self._open) >= MAX_OPEN_FILES:
            self._end(next(iter(self._open)))
        path = self._folder / f"{window}-{len(self.paths):05d}-{self._token}.parquet"
        # No failpoint: a file that no manifest names: it counts from landing.data on.
        path.touch(mode=0o600, exist_ok=False)
        self.paths.append(path)
        part = self._open[window] = _Part(path, window)
        return part

    def _end(self, window: str) -> None:
        self._done.append(self._open.pop(window).close())


@dataclass(eq=False)
class _Part:
    """One open file."""

    path: Path
    window: str
    rows: int = 0
    first: tuple[int, int, int] | None = None
    last: tuple[int, int, int] = (0, 0, 0)
    ordered: bool = True
    rows_per_table: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        # No failpoint: the same file, open for writing.
        self._sink = pa.OSFile(str(self.path), "wb")
        self._parquet = pq.ParquetWriter(
            self._sink,
            LANDED_SCHEMA,
            compression="zstd",
            compression_level=1,
            use_dictionary=_REPEATING,
            write_statistics=_WITH_STATISTICS,
        )

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return int(self._sink.tell())

    def write(self, group: RowGroup) -> None:
        self._parquet.write_table(group.table, row_group_size=group.table.num_rows)
        self.rows += group.table.num_rows
        self.ordered = self.ordered and group.ordered and (self.first is None or self.last < group.first)
        self.last = group.last if self.first is None else max(self.last, group.last)
        self.first = group.first if self.first is None else min(self.first, group.first)
        self.rows_per_table.update(group.rows_per_table)

    def close(self) -> DataFile:
        self._parquet.close()
        self._sink.close()
        return DataFile(
            path=f"data/{self.path.parent.name}/{self.path.name}",
            window=self.window,
            rows=self.rows,
            bytes=self.path.stat().st_size,
            sha256=sha256_of(self.path),
            first=_position(self.first or self.last),
            last=_position(self.last),
            ordered=self.ordered,
            rows_per_table=dict(sorted(self.rows_per_table.items())),
        )

    def discard(self) -> None:
        """Close the file without making its content durable."""
        try:
            self._parquet.close()
            self._sink.close()
        except (OSError, pa.ArrowException):
            pass


def _position(values: tuple[int, int, int]) -> Position:
    epoch, commit_lsn, ordinal = values
    return Position(epoch, Lsn(commit_lsn), ordinal)
