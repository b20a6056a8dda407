"""Find positions that landed in another window before, so that collisions across windows are noticed.

Two events with the same position and identity are the same event, or collide. Dedupe compares events within
one window only. A captured transaction has one commit time, so one window; but a delivered file may repeat a
position with another time. Such an event lands in the window where its position landed first. There judging
compares it like any other two events of one position. Landed batches never change, so a rebuild judges the
same.

Files of other windows are read only if their range of positions overlaps that of the new files, and then only
the row groups that overlap. Of a file that retention removed, the narrow file is read that stands for it
(``kept_positions``). Results beyond a few megabytes are kept on disk.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from omnisupport_ingest.landing.errors import DamagedBatch
from omnisupport_ingest.landing.kept_positions import identity_hashes, kept_file
from omnisupport_ingest.landing.manifest import DataFile
from omnisupport_ingest.landing.rows import EARLIER_IDENTITY, LandedEvent
from omnisupport_ingest.landing.standing import LandedPart
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.position import Lsn, Position
from omnisupport_ingest.storage import at_hand
from omnisupport_ingest.windows import OUT_OF_RANGE

T = TypeVar("T")

_EVENT_IDENTITY = ["commit_lsn", "ordinal", "identity"]
"""Columns that identify an event within its epoch."""

_HASH = "identity_hash"

_BLOCK_ROWS = 500_000
"""Rows of the batch that are compared at a time; they take at most some 100 MB of memory."""

_IN_SENTINEL, _IN_SAME_BATCH = 1 << 62, 1 << 61
"""Added to a file's rank. Where a position has copies in several windows, the lowest rank decides its window:
real windows come before the sentinel, landed files before those of this batch."""

PositionInEpoch = tuple[int, int]
"""Commit LSN and ordinal: a position without its epoch."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A data file or one of its row groups, with its lowest and highest position, both inclusive.

    ``kept``: the narrow file that stands for it once it has left landing; its row groups are the same.
    """

    path: Path
    kept: Path
    window: str
    first: PositionInEpoch
    last: PositionInEpoch
    rank: int
    group: int = -1
    rows: int = 0

    def meets(self, first: PositionInEpoch, last: PositionInEpoch) -> bool:
        return self.first <= last and first <= self.last


class FirstWindows:
    """The first windows of the positions that one batch shares with other windows: usually none.

    Close it, or use it in ``with``.
    """

    def __init__(
        self, identity_as_landed: Callable[[LandedEvent], str | None] = lambda event: event.identity
    ) -> None:
        self._as_landed = identity_as_landed
        # With an empty name SQLite makes a temporary file that ends with the connection.
        self._base = sqlite3.connect("", isolation_level=None)
        self._base.execute("PRAGMA journal_mode = OFF")
        # No failpoint: a temporary database of one landing.
        self._base.execute(
            'CREATE TABLE home (lsn INTEGER, ordinal INTEGER, identity TEXT, rank INTEGER, "window" TEXT, '
            "PRIMARY KEY (lsn, ordinal, identity)) WITHOUT ROWID"
        )
        self._found = False

    @classmethod
    def of(cls, store: LandingStore, epoch: int, files: Sequence[DataFile]) -> Self:
        """Return the first windows for a batch of ``epoch`` with the data ``files``, before it lands.

        ``DamagedBatch`` names a landed file that cannot be read.
        """
        windows = cls(store.identity_as_landed)
        try:
            parts = [_part(store, file, _IN_SAME_BATCH + rank) for rank, file in enumerate(_by_window(files))]
            if parts:
                landed = _landed(store, epoch, min(part.first for part in parts), max(p.last for p in parts))
                for number, part in enumerate(parts):
                    windows._compare(part, [*landed, *parts[:number]])
        except BaseException:
            windows.close()
            raise
        return windows

    def __bool__(self) -> bool:
        return self._found

    def window_of(self, event: LandedEvent) -> str | None:
        """Return the window in which the position of ``event`` landed first; None if only one window has
        it."""
        row = self._base.execute(
            'SELECT "window" FROM home WHERE lsn = ? AND ordinal = ? AND identity = ?',
            (event.commit_lsn, event.ordinal, self._as_landed(event) or ""),
        ).fetchone()
        return None if row is None else str(row[0])

    def close(self) -> None:
        self._base.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _compare(self, part: _Part, others: Iterable[_Part]) -> None:
        """Find the positions that ``part`` shares with the files ``others`` of other windows."""
        near = [each for each in others if each.window != part.window and each.meets(part.first, part.last)]
        if not near:
            return
        reach = min(each.first for each in near), max(each.last for each in near)
        for groups in _blocks(group for group in _groups(part) if group.meets(*reach)):
            first, last = min(each.first for each in groups), max(each.last for each in groups)
            block = pa.concat_tables(map(_event_positions, groups))
            for other in near:
                windows = part.window, other.window
                if other.meets(first, last):
                    for group in _groups(other):
                        if group.meets(first, last):
                            shared = _shared(block, _event_positions(group), OUT_OF_RANGE in windows)
                            self._note(shared, part, other)

    def _note(self, shared: pa.Table, part: _Part, other: _Part) -> None:
        """Record in which window each of the ``shared`` positions landed first."""
        homes = [other, part] if other.rank & _IN_SAME_BATCH else [other]
        for home in homes:
            rank = home.rank + (_IN_SENTINEL if home.window == OUT_OF_RANGE else 0)
            # No failpoint: a temporary database of one landing.
            self._base.executemany(
                "INSERT INTO home VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET rank = excluded.rank, "
                '"window" = excluded."window" WHERE excluded.rank < rank',
                (
                    (*position, rank, home.window)
                    for position in zip(*shared.to_pydict().values(), strict=True)
                ),
            )
        self._found = self._found or bool(shared.num_rows)


def _by_window(files: Sequence[DataFile]) -> list[DataFile]:
    return sorted(files, key=lambda file: (file.window, file.path))


def _landed(store: LandingStore, epoch: int, first: PositionInEpoch, last: PositionInEpoch) -> list[_Part]:
    """Return the data files of ``epoch`` that overlap a range of positions, in landing order."""
    reaching = store.reaching(epoch, _position(epoch, first), _position(epoch, last))
    return [_part(store, file, rank) for rank, file in enumerate(reaching)]


def _position(epoch: int, position: PositionInEpoch) -> Position:
    return Position(epoch, Lsn(position[0]), position[1])


def _part(store: LandingStore, file: DataFile | LandedPart, rank: int) -> _Part:
    first, last = file.first, file.last
    return _Part(
        store.path_of(file),
        kept_file(store.folder, file.path),
        file.window,
        (first.commit_lsn.value, first.ordinal),
        (last.commit_lsn.value, last.ordinal),
        rank,
    )


def _groups(part: _Part) -> list[_Part]:
    """Return the row groups of a file, each with the range of positions in its statistics.

    The ranges may be too wide, because LSN and ordinal have separate statistics.
    """
    try:
        described = _reading(part, pq.read_metadata)
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(part, error) from error
    columns = [described.schema.names.index(name) for name in _EVENT_IDENTITY[:2]]
    groups = []
    for number in range(described.num_row_groups):
        group = described.row_group(number)
        lsn, ordinal = (group.column(column).statistics for column in columns)
        first, last = (lsn.min, ordinal.min), (lsn.max, ordinal.max)
        groups.append(replace(part, first=first, last=last, group=number, rows=group.num_rows))
    return groups


def _reading(part: _Part, read: Callable[[Path], T]) -> T:
    """Return what ``read`` returns of the data file of ``part``, or of the narrow file that stands for it if
    retention removed it."""
    try:
        return read(part.path)
    except FileNotFoundError:
        return read(at_hand(part.kept))


def _blocks(groups: Iterable[_Part]) -> Iterator[list[_Part]]:
    block: list[_Part] = []
    rows = 0
    for group in groups:
        block.append(group)
        rows += group.rows
        if rows >= _BLOCK_ROWS:
            yield block
            block, rows = [], 0
    if block:
        yield block


def _event_positions(group: _Part) -> pa.Table:
    """Return position and commit time of the events of a row group. Of a narrow file, ``identity`` has hashes
    (``identity_hashes``)."""
    try:
        with _reading(group, pq.ParquetFile) as file:
            table = file.read_row_group(group.group, columns=[*_EVENT_IDENTITY, "source_ts"])
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(group, error) from error
    if pa.types.is_integer(table.schema.field("identity").type):
        return table
    identity = pc.replace_substring_regex(table["identity"], EARLIER_IDENTITY, r"\1]")
    # A join never matches NULL.
    return table.set_column(2, "identity", pc.fill_null(identity, ""))


def _shared(block: pa.Table, other: pa.Table, in_sentinel: bool) -> pa.Table:
    """Return the positions that are in both tables, with the identities of ``block``.

    ``in_sentinel``: one table is of the sentinel window. Then only positions with different commit times are
    returned. With the same time it is the same event, which a wrong clock had put into the sentinel.
    """
    keys = _EVENT_IDENTITY
    if pa.types.is_integer(other.schema.field("identity").type):
        keys = [*_EVENT_IDENTITY[:2], _HASH]
        block = block.append_column(_HASH, identity_hashes(block["identity"]))
        other = other.rename_columns({"identity": _HASH})
    both = block.join(other, keys, join_type="inner", right_suffix="_there")
    if in_sentinel:
        both = both.filter(pc.not_equal(both["source_ts"], both["source_ts_there"]))
    return both.select(_EVENT_IDENTITY).group_by(_EVENT_IDENTITY).aggregate([])


def _unreadable(part: _Part, error: Exception) -> DamagedBatch:
    return DamagedBatch(
        f"Data file {part.path} cannot be read: {type(error).__name__}. Nothing lands that may share "
        "positions with it.",
        fix="Restore the file from a backup of the landing folder; `omnisupport-ingest landing verify` finds "
        "every damaged one.",
    )
