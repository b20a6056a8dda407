"""Rows of many small files that are updated together are the rows of one file that is updated alone."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnisupport_ingest.cdc.table_ends import TableEnds
from omnisupport_ingest.cdc.updating import Updated, UpdateRules
from omnisupport_ingest.lake.contenthash import ContentHash
from omnisupport_ingest.lake.key_files import KeyFile, KeyOrder, range_numbers, ranges_of
from omnisupport_ingest.layers.dimension import range_update
from omnisupport_ingest.layers.dimension.range_update import (
    RANGE,
    FilesToUpdate,
    by_place,
    is_cut,
    update_ranges,
)
from omnisupport_ingest.layers.dimension.update_tasks import _collected
from omnisupport_ingest_tests.cdc import kernels
from omnisupport_ingest_tests.cdc.kernels import Cut
from omnisupport_ingest_tests.cdc.test_kernel_fold import EXAMPLES, TABLE, drawn, in_windows
from omnisupport_ingest_tests.cdc.test_kernel_update import SCHEMA, Held, randoms
from omnisupport_ingest_tests.examples import examples

ORDER = KeyOrder("_cdc_key", whole_numbers=False)


class Watched:
    """Rules that note the keys of the rows that the kernel is sent: each row once, in one of its calls."""

    def __init__(self, rules: UpdateRules) -> None:
        self._rules = rules
        self.keys: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rules, name)

    def update(self, held: pa.Table, sent: pa.Table) -> Updated:
        self.keys += sent["_cdc_key"].to_pylist()
        return self._rules.update(held, sent)


def _has(ends: TableEnds) -> bool:
    return ends.last is not None or ends.last_ranged is not None


class InFiles(Held):
    """The same table in files of about ``rows_per_file`` rows, in the folder ``draft``.

    What is sent comes in any order, and some ranges of files are cut as those are that many rows are sent to.
    """

    def __init__(self, draft: Path, rng: Random, rows_per_file: float = 0.5) -> None:
        super().__init__()
        self.draft, self.rng, self.rows_per_file = draft, rng, rows_per_file
        self.files: list[KeyFile] = []

    def _update(self, sent: pa.Table, rules: UpdateRules) -> Updated:
        sent = sent.take(pa.array(self.rng.sample(range(len(sent)), len(sent)), pa.int64()))
        watched = Watched(rules)
        # Up to twice as many rows stay together.
        target = FilesToUpdate(self.files, ORDER, self.draft, watched, self.rows_per_file)  # type: ignore[arg-type]
        keys = sorted({*sent["_cdc_key"].to_pylist(), *self.rows["_cdc_key"].to_pylist()})
        cuts = self.rng.sample(keys, self.rng.randrange(len(keys) // 2 + 1))
        ranges = ranges_of(self.files, cuts, rows_together=int(self.rows_per_file))
        looks = [number for number in range(len(ranges)) if _has(rules.new_ends) or is_cut(ranges, number)]
        places = pa.array(range_numbers(ORDER.values(sent), ranges))
        batches = update_ranges(sent.append_column(RANGE, places), target, ranges, looks)
        found = _collected([row for batch in batches for row in batch.to_pylist()], ranges, target)
        assert sorted(watched.keys) == sorted(sent["_cdc_key"].to_pylist())
        if found.refold:
            keys = pa.concat_tables([pq.read_table(path) for path in found.refold])["_cdc_key"]
            return Updated(self.rows, False, ContentHash(), ContentHash(), keys.combine_chunks())
        before = ContentHash.of(self.rows["_cdc_row_hash"].to_numpy())
        stay = [file for file in self.files if file.path not in found.replaced]
        came = [self._file(each.name, each.stats) for each in found.written]
        self.files = sorted([*stay, *came], key=lambda file: file.lowest)
        rows = [pq.read_table(file.full_path).cast(SCHEMA) for file in self.files]
        rows = pa.concat_tables([SCHEMA.empty_table(), *rows])
        assert rows["_cdc_key"].to_pylist() == sorted(rows["_cdc_key"].to_pylist())
        hashes = rows["_cdc_row_hash"].to_numpy()
        assert before - found.removed + found.added == ContentHash.of(hashes)
        return Updated(rows, True, self.rows["_cdc_row_hash"].to_numpy(), hashes, pa.array([], pa.string()))

    def _file(self, name: str, stats: str) -> KeyFile:
        told = json.loads(stats)
        return KeyFile(name, str(self.draft / name), told["minValues"]["_cdc_key"], told["numRecords"])


@settings(max_examples=examples(EXAMPLES // 2), deadline=None)
@given(randoms, st.integers(1, 4), st.sampled_from((1, 1_000, 1 << 26)), st.sampled_from((0.5, 2, 5)))
def test_many_files_updated_together_are_one_file_updated_alone(
    rng: Random, count: int, bytes_in_hand: int, rows_per_file: float
) -> None:
    events = drawn(rng)
    windows = in_windows(rng, events, 2)
    part_of = {at: rng.randrange(count) for at in windows}
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(range_update, "_BYTES_IN_HAND", bytes_in_hand)
        one, many = Held(), InFiles(Path(folder), rng, rows_per_file)
        for part in range(count):
            told = [event for event in events if part_of[event.at[:2]] == part]
            if told:
                folded = kernels.fold(kernels.events_table(told, TABLE, windows), TABLE, Cut())
                one.take(folded)
                many.take(folded)
        assert many.content == one.content
        assert many.rows.sort_by("_cdc_key").equals(one.rows.sort_by("_cdc_key"))
        assert all(file.rows <= 2 * rows_per_file for file in many.files)


@pytest.mark.full
def test_what_was_taken_already_writes_no_file() -> None:
    files = 0
    for seed in range(40):
        rng = Random(seed)
        events = [each for each in drawn(rng, withheld=False) if not each.moved_from]
        folded = kernels.fold(kernels.events_table(events, TABLE, in_windows(rng, events, 1)), TABLE, Cut())
        with tempfile.TemporaryDirectory() as folder:
            many = InFiles(Path(folder), rng)
            many.take(folded)
            before = {file.path for file in many.files}
            many.take(folded)
            assert {file.path for file in many.files} == before
        files += len(before)
    assert files > 40


def test_rows_that_come_in_the_order_of_their_places_are_not_copied() -> None:
    rows = pa.table({"key": ["a", "b", "c", "d"]})
    places = np.array([0, 0, 2, 5], np.int32)
    assert by_place(rows, places)[0] is rows
    ordered, sorted_places = by_place(rows, places[::-1])
    assert ordered["key"].to_pylist() == ["c", "d", "b", "a"]
    assert sorted_places.tolist() == sorted(places)
