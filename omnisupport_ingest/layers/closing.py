"""Closes windows: compacts the many small files of a window into one per partition, and marks it as closed.

Closing changes no row. Its commit says so (``dataChange`` is false), and the new files name the files that
they replace, so the layer below reads nothing again. The old files stay on disk until ``sweep`` deletes them;
readers of an older version find them there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from pyspark.sql import DataFrame, SparkSession

from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.lake.commit import WindowChange
from omnisupport_ingest.lake.contenthash import hash_of_files
from omnisupport_ingest.lake.layout import LakeFile, StagedFile
from omnisupport_ingest.lake.snapshot import TableSnapshot
from omnisupport_ingest.lake.staged_frames import stage_frame
from omnisupport_ingest.lake.staging import StagedFiles
from omnisupport_ingest.lake.state import WindowState
from omnisupport_ingest.lake.table import LakeTable, retrying
from omnisupport_ingest.layers.plan import InputFiles, WindowPlan, Work, unit_key


class CompactionDiffers(IngestError):
    """The files of a window do not hold the rows that its checkpoint says. The window was not closed.

    Fix: Materialize the window in the UI, which makes it again; then find out what changed a file of the
    table.
    """


def due(snapshot: TableSnapshot, windows: Iterable[str], is_past: Callable[[str], bool]) -> list[str]:
    """Return those of ``windows`` that are open in the table and for which ``is_past`` is true."""
    return [window for window in _open(snapshot, windows) if is_past(window)]


def close(
    table: LakeTable, windows: Sequence[str], run_id: str, compaction: Compaction | None = None
) -> None:
    """Close the due ``windows``. Without a ``compaction`` they are only marked as closed."""
    if not windows:
        return

    def attempt(snapshot: TableSnapshot) -> None:
        found = _open(snapshot, windows)
        if found:
            compacted = compaction.files(snapshot, found) if compaction is not None else {}
            snapshot.commit(
                [_change(snapshot, window, compacted.get(window, ()), run_id) for window in found],
                run_id=run_id,
            )

    retrying(attempt, table)


def _open(snapshot: TableSnapshot, windows: Iterable[str]) -> list[str]:
    return [
        window
        for window in sorted(set(windows))
        if (state := snapshot.state(window)) is not None and not state.closed
    ]


@dataclass(frozen=True, slots=True)
class Compaction:
    """Writes one file per partition for windows that have several.

    ``hash_column``: the column with each row's hash; None if the table's content hash is not made of these.
    ``merge``: reduces rows that mean the same to fewer (called with the rows and their number); None: rows
    stay as they are.
    """

    spark: SparkSession
    hash_column: str | None
    merge: Callable[[DataFrame, int], DataFrame] | None = None

    def files(self, snapshot: TableSnapshot, windows: Iterable[str]) -> Mapping[str, tuple[StagedFile, ...]]:
        """Return the new files, at their final paths, for those of ``windows`` with several files per
        partition.

        Raises ``CompactionDiffers`` if the files do not have the content hash of the window's checkpoint.
        """
        split = [window for window in windows if _is_split(snapshot.files(window))]
        if not split:
            return {}
        staged = self._stage(snapshot, split)
        for window in split:
            self._refuse_other_rows(snapshot, window, staged)
        return {window: staged.of(window) for window in split}

    def _stage(self, snapshot: TableSnapshot, windows: Sequence[str]) -> StagedFiles:
        spec = snapshot.table.spec
        files = {window: snapshot.files(window) for window in windows}
        generation = {window: _state(snapshot, window).generation for window in windows}
        unit = unit_key(
            (
                _state(snapshot, window).checkpoint.idempotency_key,
                WindowPlan(window, Work.CLOSE, frozenset(file.path for file in held), generation[window]),
            )
            for window, held in files.items()
        )
        every = [file for held in files.values() for file in held]
        # All rows of one partition go to one task, which writes one file for it.
        count, rows = sum(file.rows for file in every), snapshot.read(self.spark, every)
        if self.merge is not None:
            rows = self.merge(rows, count).select(*(f"`{name}`" for name in spec.schema.names))
        rows = rows.repartition(len({file.partition for file in every}), *spec.partition_by)
        return stage_frame(snapshot.table, rows, unit=unit, generation=generation, rows=count)

    def _refuse_other_rows(self, snapshot: TableSnapshot, window: str, staged: StagedFiles) -> None:
        folder = snapshot.table.folder
        expected = _state(snapshot, window).checkpoint
        if self.hash_column is None:
            return
        written = hash_of_files((folder / file.path for file in staged.of(window)), self.hash_column)
        if str(written) != expected.content_hash:
            raise CompactionDiffers(
                f"The files of window {window} in {folder} hold {written.count} rows that are not the "
                f"{expected.rows} of its checkpoint. The window was not closed.",
                fix="Materialize this window by hand: it is made again from the layer above. Then see why a "
                "file of the table was changed; nothing here does that.",
            )


def _change(
    snapshot: TableSnapshot, window: str, compacted: tuple[StagedFile, ...], run_id: str
) -> WindowChange:
    before = _state(snapshot, window)
    closed = replace(before, checkpoint=replace(before.checkpoint, closed=True, closed_by=run_id))
    if compacted:
        rows = sum(file.rows for file in compacted)
        closed = replace(closed, checkpoint=replace(closed.checkpoint, rows=rows))
        closed = replace(closed, compacted_units=_stands_for(snapshot.files(window), before, compacted))
    return WindowChange(window, compacted, (), closed, replaces=bool(compacted), same_rows=True)


def _stands_for(
    files: Sequence[LakeFile], before: WindowState, compacted: Iterable[StagedFile]
) -> dict[str, tuple[str, ...]]:
    """Return for each new file the names of all files that it replaces, directly or by earlier
    compactions."""
    held = InputFiles.of((file.path for file in files), before)
    return {
        new.path: tuple(sorted(held.names(file.path for file in files if file.partition == new.partition)))
        for new in compacted
    }


def _is_split(files: Sequence[LakeFile]) -> bool:
    return len(files) > len({file.partition for file in files})


def _state(snapshot: TableSnapshot, window: str) -> WindowState:
    state = snapshot.state(window)
    assert state is not None, "only windows with a state are due"
    return state
