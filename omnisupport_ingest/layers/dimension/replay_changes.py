"""Counts the keys that a replay of windows changed, by comparing their net changes before and after it.

Spark tasks compare the windows, each task several; joins compare a window that is too large for a task.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from pyspark.sql import SparkSession

from omnisupport_ingest.cdc.fold import merge_rows, table_columns_of
from omnisupport_ingest.cdc.folded import folded_type
from omnisupport_ingest.cdc.row_fold import merged_tables
from omnisupport_ingest.cdc.stored import stored_hashes
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.lake.file_rows import rows_of
from omnisupport_ingest.lake.file_tasks import ROWS_OF_A_TASK, Output, in_shares, made_by_tasks
from omnisupport_ingest.lake.layout import LakeFile
from omnisupport_ingest.lake.schema import arrow_schema
from omnisupport_ingest.lake.snapshot import TableSnapshot
from omnisupport_ingest.lake.staging import StagedFiles
from omnisupport_ingest.layers.replay_reasons import changed

_BYTES_OF_A_TASK = 32 * 1024 * 1024
"""Most bytes of compressed files that a task holds: some hundred megabytes in memory."""


class ReplayChanges:
    """How many keys of the replayed ``windows`` have another state; counted once, and only if asked.

    ``staged``: their new files.
    """

    def __init__(
        self,
        spark: SparkSession,
        snapshot: TableSnapshot,
        contract: TableContract,
        windows: Sequence[str],
        staged: StagedFiles,
    ) -> None:
        self._spark, self._snapshot, self._contract = spark, snapshot, contract
        self._windows, self._staged = windows, staged

    def of(self, window: str) -> int:
        """Return the number of changed keys of ``window``."""
        return self._keys.get(window, 0)

    @cached_property
    def _keys(self) -> Mapping[str, int]:
        snapshot, folder = self._snapshot, self._snapshot.table.folder
        made_again = {
            window: _MadeAgain(
                tuple(snapshot.files(window)),
                tuple(file.in_table(folder) for file in self._staged.of(window)),
            )
            for window in self._windows
        }
        small = [each for each in made_again.values() if each.is_small]
        works = [
            partial(_count_differing, windows=each, contract=self._contract) for each in in_shares(small)
        ]
        found: dict[str, int] = {}
        with made_by_tasks(self._spark, snapshot.table, works, unit="", generation={}) as counted:
            assert counted is not None, "the tasks always count"
            for result in counted.results:
                found |= json.loads(result)
        large = [window for window, each in made_again.items() if not each.is_small]
        if large:
            found |= self._by_joins(large, made_again)
        return found

    def _by_joins(self, windows: Sequence[str], made_again: Mapping[str, _MadeAgain]) -> dict[str, int]:
        before = [file for window in windows for file in made_again[window].before]
        after = [file for window in windows for file in made_again[window].after]
        # The net changes of a window may be in parts.
        then, now = (
            merge_rows(self._snapshot.read(self._spark, files), self._contract) for files in (before, after)
        )
        state = ("_cdc_kind", "_cdc_key", "_cdc_ended_at", "_cdc_row_hash")
        counted = changed(then, now, windows, state).groupBy("window").count()
        return {row["window"]: row["count"] for row in counted.collect()}


@dataclass(frozen=True)
class _MadeAgain:
    """The net changes of a window ``before`` and ``after`` it was rebuilt.

    It has ``rows`` and ``bytes``, so that ``file_tasks.in_shares`` can divide windows among tasks.
    """

    before: tuple[LakeFile, ...]
    after: tuple[LakeFile, ...]

    @property
    def rows(self) -> int:
        return sum(file.rows for file in (*self.before, *self.after))

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in (*self.before, *self.after))

    @property
    def is_small(self) -> bool:
        """Whether a task can hold all of it."""
        return self.rows <= ROWS_OF_A_TASK and self.bytes <= _BYTES_OF_A_TASK


def _count_differing(_output: Output, windows: Sequence[_MadeAgain], contract: TableContract) -> str:
    """Count the keys of each of ``windows`` that have other net changes than before.

    Returns the number by window as JSON; windows without any are left out. Rows without a key (truncates,
    snapshot ends) count as one. Parts of a window are folded first.
    """
    now = _states([file for each in windows for file in each.after], contract)
    then = _states([file for each in windows for file in each.before], contract)
    places = {place for place, _ in (now - then) + (then - now)}
    return json.dumps(Counter(window for window, _ in places))


def _states(
    files: Sequence[LakeFile], contract: TableContract
) -> Counter[tuple[tuple[str, str | None], int]]:
    """Return a counter of (window and key, hash) over the folded rows of the net changes in ``files``."""
    rows = rows_of(files, arrow_schema(folded_type(contract), without=()))
    found = Counter[tuple[tuple[str, str | None], int]]()
    for merged in merged_tables(rows, table_columns_of(contract)) if len(rows) else ():
        places = zip(merged["window"].to_pylist(), merged["_cdc_key"].to_pylist(), strict=True)
        found.update(zip(places, stored_hashes(merged).tolist(), strict=True))
    return found
