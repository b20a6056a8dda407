"""What entered and left a table between two versions, whatever was compacted or replaced meanwhile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnisupport_ingest.lake.commit import WindowChange
from omnisupport_ingest.lake.layout import LakeFile, StagedFile
from omnisupport_ingest.lake.log import FileChanges, files_since
from omnisupport_ingest_tests.examples import examples
from omnisupport_ingest_tests.lake.tables import W1, W2, by_window, change, place_without_spark

pytestmark = pytest.mark.quick

randoms = st.integers(0, (1 << 32) - 1).map(Random)

Rows = Counter[tuple[str, int]]


class Windows:
    """A table with its rows at every version. A file has one row of its own, or those of the files that a
    compaction put together."""

    def __init__(self, root: Path) -> None:
        self.table = by_window(root)
        self.table.open()
        self.rows: list[Rows] = [Counter()]
        self._next = 0

    def append(self, window: str) -> None:
        self._commit(change(window, self._file(window), ["in"]))

    def compact(self, window: str, some: Iterable[LakeFile]) -> None:
        old = list(some)
        numbers = sorted(number for _, number in rows_in(old).elements())
        staged = self._file(window, numbers)
        self._commit(replace(change(window, staged, ["in"], remove=old), same_rows=True))

    def put(self, window: str, old: Iterable[LakeFile]) -> None:
        """Replace the files ``old`` by one with another row."""
        self._commit(change(window, self._file(window), ["in"], remove=list(old)))

    def held(self, window: str) -> list[LakeFile]:
        return list(self.table.open().files(window))

    def _file(self, window: str, numbers: Sequence[int] = ()) -> tuple[StagedFile, ...]:
        self._next += 1
        return place_without_spark(self.table, window, f"u{self._next}", numbers or [self._next])

    def _commit(self, changed: WindowChange) -> None:
        self.table.open().commit([changed])
        self.rows.append(rows_in(self.table.open().all_files()))

    def since(self, version: int) -> FileChanges:
        found = files_since(self.table.open(), version)
        assert found is not None
        return found


def rows_in(files: Iterable[LakeFile]) -> Rows:
    # A file that was compacted away is read from disk, where it stays.
    return Counter(
        (file.window, number) for file in files for number in pq.read_table(file.uri)["n"].to_pylist()
    )


@settings(max_examples=examples(20), deadline=None)
@given(randoms)
def test_what_a_window_held_without_what_left_and_with_what_entered_is_what_it_holds(
    tmp_path_factory: pytest.TempPathFactory, rng: Random
) -> None:
    windows = Windows(tmp_path_factory.mktemp("log"))
    for _ in range(rng.randrange(3, 12)):
        window = rng.choice((W1, W1, W2))
        held = windows.held(window)
        some = rng.sample(held, rng.randint(1, len(held))) if held else []
        match rng.choice(("append", "append", "compact", "put", "put all")):
            case "compact" if held:
                windows.compact(window, some)
            case "put" if held:
                windows.put(window, some)
            case "put all" if held:
                windows.put(window, held)
            case _:
                windows.append(window)
    for version, before in enumerate(windows.rows):
        changes = windows.since(version)
        gone, added = rows_in(changes.gone), rows_in(changes.added)
        assert gone <= before, "only rows that were there have left"
        assert before - gone + added == windows.rows[-1]


def test_a_compaction_alone_is_no_change_and_added_files_are_listed_as_they_came(tmp_path: Path) -> None:
    windows = Windows(tmp_path)
    windows.append(W1)
    windows.append(W1)
    came = windows.held(W1)
    windows.compact(W1, came)
    assert {each.path for each in windows.since(0).added} == {each.path for each in came}
    assert (windows.since(2).added, windows.since(2).gone) == ((), ())


def test_a_file_that_a_compaction_made_of_what_was_there_stands_for_it(tmp_path: Path) -> None:
    """The files before the compaction may have been swept."""
    windows = Windows(tmp_path)
    windows.append(W1)
    windows.append(W1)
    windows.compact(W1, windows.held(W1))
    compacted = windows.held(W1)
    windows.put(W1, compacted)
    assert [each.path for each in windows.since(2).gone] == [each.path for each in compacted]
    assert [each.path for each in windows.since(2).added] == [each.path for each in windows.held(W1)]
