"""Rows of many small files that are updated together are the rows of one file that is updated alone."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from random import Random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnisupport_ingest.cdc.updating import Updated, UpdateRules
from omnisupport_ingest.lake.contenthash import ContentHash
from omnisupport_ingest.lake.key_files import KeyFile, KeyOrder, range_numbers, ranges_of
from omnisupport_ingest.layers import updating_ranges
from omnisupport_ingest.layers.updating_files import _collected
from omnisupport_ingest.layers.updating_ranges import RANGE, FilesToUpdate, update_ranges
from omnisupport_ingest_tests.cdc import kernels
from omnisupport_ingest_tests.cdc.kernels import Cut
from omnisupport_ingest_tests.cdc.test_kernel_fold import EXAMPLES, TABLE, drawn, in_windows
from omnisupport_ingest_tests.cdc.test_kernel_update import SCHEMA, Held, randoms
from omnisupport_ingest_tests.examples import examples

ORDER = KeyOrder("_cdc_key", whole_numbers=False)


class InFiles(Held):
    """The same table in files of one row, in the folder ``draft``."""

    def __init__(self, draft: Path) -> None:
        super().__init__()
        self.draft = draft
        self.files: list[KeyFile] = []

    def _update(self, sent: pa.Table, rules: UpdateRules) -> Updated:
        # Up to twice as many rows stay together.
        target = FilesToUpdate(self.files, ORDER, self.draft, rules, rows_per_file=0.5)  # type: ignore[arg-type]
        ranges = ranges_of(self.files)
        places = pa.array(range_numbers(ORDER.values(sent), ranges))
        batches = update_ranges(sent.append_column(RANGE, places), target, ranges, range(len(ranges)))
        found = _collected([row for batch in batches for row in batch.to_pylist()], ranges)
        if found.refold:
            keys = pa.concat_tables([pq.read_table(path) for path in found.refold])["_cdc_key"]
            return Updated(self.rows, False, ContentHash(), ContentHash(), keys.combine_chunks())
        before = ContentHash.of(self.rows["_cdc_row_hash"].to_numpy())
        stay = [file for file in self.files if file.path not in found.replaced]
        came = [self._file(each.name, each.stats) for each in found.written]
        self.files = sorted([*stay, *came], key=lambda file: file.lowest)
        rows = [pq.read_table(file.place).cast(SCHEMA) for file in self.files]
        rows = pa.concat_tables([SCHEMA.empty_table(), *rows])
        hashes = rows["_cdc_row_hash"].to_numpy()
        assert before - found.removed + found.added == ContentHash.of(hashes)
        return Updated(rows, True, self.rows["_cdc_row_hash"].to_numpy(), hashes, pa.array([], pa.string()))

    def _file(self, name: str, stats: str) -> KeyFile:
        told = json.loads(stats)
        return KeyFile(name, str(self.draft / name), told["minValues"]["_cdc_key"], told["numRecords"])


@settings(max_examples=examples(EXAMPLES // 4), deadline=None)
@given(randoms, st.integers(1, 4), st.booleans())
def test_many_files_updated_together_are_one_file_updated_alone(
    rng: Random, count: int, few_bytes: bool
) -> None:
    events = drawn(rng)
    windows = in_windows(rng, events, 2)
    part_of = {at: rng.randrange(count) for at in windows}
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        if few_bytes:
            patch.setattr(updating_ranges, "_BYTES_IN_HAND", 1_000)
        one, many = Held(), InFiles(Path(folder))
        for part in range(count):
            told = [event for event in events if part_of[event.at[:2]] == part]
            if told:
                folded = kernels.fold(kernels.events_table(told, TABLE, windows), TABLE, Cut())
                one.take(folded)
                many.take(folded)
        assert many.content == one.content
        assert many.rows.sort_by("_cdc_key").equals(one.rows.sort_by("_cdc_key"))
        assert all(file.rows == 1 for file in many.files)


def test_what_was_taken_already_writes_no_file() -> None:
    files = 0
    for seed in range(40):
        rng = Random(seed)
        events = [each for each in drawn(rng, withheld=False) if not each.moved_from]
        folded = kernels.fold(kernels.events_table(events, TABLE, in_windows(rng, events, 1)), TABLE, Cut())
        with tempfile.TemporaryDirectory() as folder:
            many = InFiles(Path(folder))
            many.take(folded)
            before = {file.path for file in many.files}
            many.take(folded)
            assert {file.path for file in many.files} == before
        files += len(before)
    assert files > 40
