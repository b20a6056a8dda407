"""Versions of many files updated together, sealed files among them, are those of one file updated alone."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnisupport_ingest.cdc.history_update import HistoryRules
from omnisupport_ingest.cdc.updating import Updated
from omnisupport_ingest.lake.contenthash import ContentHash
from omnisupport_ingest.lake.key_files import SEALED, KeyFile, KeyOrder, range_numbers, ranges_of
from omnisupport_ingest.layers.dimension import range_update
from omnisupport_ingest.layers.dimension.range_update import RANGE, FilesToUpdate, is_cut, update_ranges
from omnisupport_ingest.layers.dimension.update_tasks import _collected
from omnisupport_ingest_tests.cdc import test_kernel_history_update as alone
from omnisupport_ingest_tests.cdc.test_kernel_history import any_events
from omnisupport_ingest_tests.examples import examples

ORDER = KeyOrder("_cdc_key", whole_numbers=False)


class InFiles(alone.Held):
    """The same history in files of about ``rows_per_file`` versions, in the folder ``draft``."""

    def __init__(self, draft: Path, rng: Random, rows_per_file: int) -> None:
        super().__init__()
        self.draft, self.rng, self.rows_per_file = draft, rng, rows_per_file
        self.files: list[KeyFile] = []
        self.sealed_seen = 0

    def update(self, rules: HistoryRules, sent: pa.Table) -> Updated:
        sent = sent.take(pa.array(self.rng.sample(range(len(sent)), len(sent)), pa.int64()))
        sealed: dict[Any, tuple[KeyFile, ...]] = {}
        for file in self.files:
            if file.path.startswith(SEALED):
                sealed[file.lowest] = (*sealed.get(file.lowest, ()), file)
        self.sealed_seen += len(sealed)
        files = [file for file in self.files if not file.path.startswith(SEALED)]
        target = FilesToUpdate(files, ORDER, self.draft, rules, self.rows_per_file, seals=True, sealed=sealed)
        keys = sorted({*sent["_cdc_key"].to_pylist(), *self.rows["_cdc_key"].to_pylist()})
        cuts = self.rng.sample(keys, self.rng.randrange(len(keys) // 2 + 1))
        ranges = ranges_of(files, cuts, rows_together=self.rows_per_file)
        looks = [number for number in range(len(ranges)) if rules.new_ends or is_cut(ranges, number)]
        places = pa.array(range_numbers(ORDER.values(sent), ranges))
        batches = update_ranges(sent.append_column(RANGE, places), target, ranges, looks)
        found = _collected([row for batch in batches for row in batch.to_pylist()], ranges, target)
        nothing = pa.array([], pa.int64()).to_numpy()
        if found.refold:
            told = pa.concat_tables([pq.read_table(path) for path in found.refold])["_cdc_key"]
            return Updated(self.rows, False, nothing, nothing, told.combine_chunks())
        before = ContentHash.of(self.rows["_cdc_row_hash"].to_numpy())
        stay = [file for file in self.files if file.path not in found.replaced]
        came = [self._file(each.name, each.stats) for each in found.written]
        self.files = sorted([*stay, *came], key=lambda file: file.lowest)
        rows = pa.concat_tables(
            [
                alone.SCHEMA.empty_table(),
                *(pq.read_table(file.full_path).cast(alone.SCHEMA) for file in self.files),
            ]
        )
        hashes = rows["_cdc_row_hash"].to_numpy()
        assert before - found.removed + found.added == ContentHash.of(hashes)
        return Updated(rows, True, self.rows["_cdc_row_hash"].to_numpy(), hashes, pa.array([], pa.string()))

    def _put(self, rows: pa.Table) -> None:
        """All versions are made again."""
        super()._put(rows)
        rules = HistoryRules(alone.TABLE.shape, alone._COLUMNS, alone.SCHEMA, alone._EVENT, (0, 0, 0))
        put = [{**row, alone.CHANGE: alone.SET} for row in rows.to_pylist()]
        self.files, self.rows = [], alone.SCHEMA.empty_table()
        self.rows = self.update(rules, pa.Table.from_pylist(put, schema=rules.sent)).rows.combine_chunks()

    def _file(self, name: str, stats: str) -> KeyFile:
        told = json.loads(stats)
        return KeyFile(name, str(self.draft / name), told["minValues"]["_cdc_key"], told["numRecords"])


def updated(rng: Random, bytes_in_hand: int, rows_per_file: int) -> int:
    """Update both by the same events; how many sealed keys there were in all."""
    events = any_events(rng)
    if rng.random() < 0.7:
        events = sorted(events, key=lambda event: event.at)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(range_update, "_BYTES_IN_HAND", bytes_in_hand)
        one, many = alone.Held(), InFiles(Path(folder), rng, rows_per_file)
        plain = HistoryRules.update
        for part in alone.cut(events, rng):
            one.take(part)
            with pytest.MonkeyPatch.context() as through_files:

                def in_files(rules: HistoryRules, held: pa.Table, sent: pa.Table) -> Updated:
                    with pytest.MonkeyPatch.context() as kernel:
                        kernel.setattr(HistoryRules, "update", plain)
                        return many.update(rules, sent) if held is many.rows else plain(rules, held, sent)

                through_files.setattr(HistoryRules, "update", in_files)
                many.take(part)
        assert alone.content(many.rows) == alone.content(one.rows)
        assert many.content == one.content
    return many.sealed_seen


@settings(max_examples=examples(40), deadline=None)
@given(alone.randoms, st.sampled_from((1, 1 << 26)), st.sampled_from((1, 2, 4)))
def test_versions_of_many_files_updated_together_are_those_of_one(
    rng: Random, bytes_in_hand: int, rows_per_file: int
) -> None:
    updated(rng, bytes_in_hand, rows_per_file)


@pytest.mark.full
def test_keys_of_many_versions_have_sealed_files() -> None:
    assert sum(updated(Random(seed), 1 << 26, 1) for seed in range(20)) > 8
