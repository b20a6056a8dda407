"""Rows that are marked where they are, with new rows in fresh files, are the rows of files written anew."""

from __future__ import annotations

import inspect
import json
import resource
import tempfile
from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnisupport_ingest.cdc.updating import Updated, UpdateRules
from omnisupport_ingest.lake import fresh_files
from omnisupport_ingest.lake.contenthash import ContentHash
from omnisupport_ingest.lake.deletion_vectors import dead_rows_of, live_mask, write_vectors
from omnisupport_ingest.lake.key_files import KeyFile, is_fresh, range_numbers, ranges_of, write_rows
from omnisupport_ingest.lake.layout import unit_folder
from omnisupport_ingest.layers.dimension import range_update, tidying
from omnisupport_ingest.layers.dimension.range_update import RANGE, FilesToUpdate, Way, is_cut
from omnisupport_ingest.layers.dimension.tidying import Rewrites, moving_rows, rewrites_of, with_leaving
from omnisupport_ingest.layers.dimension.update_tasks import (
    FilesUpdated,
    _collected,
    _Sample,
    _Share,
    _shared_out,
)
from omnisupport_ingest_tests.cdc import kernels
from omnisupport_ingest_tests.cdc.kernels import Cut
from omnisupport_ingest_tests.cdc.test_kernel_fold import EXAMPLES, TABLE, drawn, in_windows, typed
from omnisupport_ingest_tests.cdc.test_kernel_update import SCHEMA, Held, randoms
from omnisupport_ingest_tests.examples import examples
from omnisupport_ingest_tests.layers.test_updating_ranges import ORDER, _has
from omnisupport_ingest_tests.oracle.histories import SHAPE
from omnisupport_ingest_tests.oracle.model import Event, Position


class InVectors(Held):
    """The same table in files with deletion vectors, in the folder ``draft``; tasks share each update."""

    def __init__(self, draft: Path, rng: Random, rows_per_file: float) -> None:
        super().__init__()
        self.draft, self.rng, self.rows_per_file = draft, rng, rows_per_file
        self.files: list[KeyFile] = []
        self.ways: set[Way] = set()
        self.moved_by_marking = 0
        self.marked = self.moved = self.updates = 0

    def _update(self, sent: pa.Table, rules: UpdateRules) -> Updated:
        sent = sent.take(pa.array(self.rng.sample(range(len(sent)), len(sent)), pa.int64()))
        way = self.rng.choice([Way.MARK] * 9 + [Way.ERASE, Way.RETURN, Way.REWRITE])
        look_at_all = _has(rules.new_ends)
        if look_at_all and way is Way.MARK:
            way = Way.REWRITE
        target = FilesToUpdate(
            [file for file in self.files if not is_fresh(file.path)],
            ORDER,
            self.draft,
            rules,
            self.rows_per_file,  # type: ignore[arg-type]
            fresh=[file for file in self.files if is_fresh(file.path)],
            way=way,
            rows_per_group=2,
        )
        target = with_leaving(target, ORDER.values(sent), look_at_all=look_at_all)
        found = self._found(sent, target, look_at_all=look_at_all or way is Way.RETURN)
        if found.refold:
            keys = pa.concat_tables([pq.read_table(path) for path in found.refold])["_cdc_key"]
            return Updated(self.rows, False, ContentHash(), ContentHash(), keys.combine_chunks())
        self.ways.add(way)
        self.marked += sum(map(len, found.dead.values()))
        self.moved += len(target.leaving)
        # The other ways write the rows of what leaves by ranges.
        leaving = [file for file in target.fresh if file.path in target.leaving and way is Way.MARK]
        self.moved_by_marking += sum(file.rows for file in leaving)
        before = self.rows["_cdc_row_hash"].to_numpy()
        self._apply(found)
        self._check(way, set(ORDER.values(sent).tolist()))
        rows = pa.concat_tables([SCHEMA.empty_table(), *map(self._live, self.files)])
        hashes = rows["_cdc_row_hash"].to_numpy()
        assert ContentHash.of(before) - found.removed + found.added == ContentHash.of(hashes)
        return Updated(rows, True, before, hashes, pa.array([], pa.string()))

    def _found(self, sent: pa.Table, target: FilesToUpdate, *, look_at_all: bool) -> FilesUpdated:
        rng = self.rng
        keys = sorted({*sent["_cdc_key"].to_pylist(), *self.rows["_cdc_key"].to_pylist()})
        cuts = rng.sample(keys, rng.randrange(len(keys) // 2 + 1)) if rng.random() < 0.3 else []
        ranges = ranges_of(target.files, cuts, rows_together=int(self.rows_per_file))
        places = range_numbers(ORDER.values(sent), ranges)
        rewrites = rewrites_of(target, ranges, np.bincount(places, minlength=len(ranges)))
        looks = [
            number
            for number in range(len(ranges))
            if look_at_all or number in (rewrites.rewritten or ()) or is_cut(ranges, number)
        ]
        share = _Share(None, target, ranges, rewrites, looks)  # type: ignore[arg-type]
        bounds = sorted({0, len(ranges), *rng.sample(range(len(ranges)), min(len(ranges), 2))})
        outcomes = []
        for low, high in pairwise(bounds):
            mine = pa.array((places >= low) & (places < high))
            part = sent.append_column(RANGE, pa.array(places)).filter(mine)
            outcomes += [row for batch in share.update(part, low, high) for row in batch.to_pylist()]
        return _collected(outcomes, ranges, target)

    def _apply(self, found: FilesUpdated) -> None:
        vectors = write_vectors(self.draft, "unit", found.dead)
        kept = [file for file in self.files if file.path not in found.replaced]
        kept = [
            replace(file, vector=vectors[file.path], rows=file.stored_rows - vectors[file.path].cardinality)
            if file.path in vectors
            else file
            for file in kept
        ]
        self.updates += 1
        folder = unit_folder("", self.updates, "unit")
        (self.draft / folder).mkdir()
        came = []
        for each in found.written:
            path, stats = f"{folder}/{each.name}", json.loads(each.stats)
            (self.draft / each.name).rename(self.draft / path)
            lowest = stats["minValues"]["_cdc_key"]
            came.append(KeyFile(path, str(self.draft / path), lowest, stats["numRecords"]))
        self.files = sorted([*kept, *came], key=lambda file: file.lowest)

    def _check(self, way: Way, sent: set[str]) -> None:
        base = [file for file in self.files if not is_fresh(file.path)]
        rows = [key for file in base for key in self._stored(file)["_cdc_key"].to_pylist()]
        assert rows == sorted(rows), "files that are not fresh hold ranges of keys"
        for file in self.files:
            assert file.rows == self._live(file).num_rows > 0
            if is_fresh(file.path):
                values = self._stored(file)["_cdc_key"].to_pylist()
                assert values == sorted(values)
            if way is Way.ERASE:
                dead = self._stored(file)["_cdc_key"].take(pa.array(dead_rows_of(file)))
                assert not sent & {*dead.to_pylist()}
        if way is Way.RETURN:
            assert all(file.vector is None and not is_fresh(file.path) for file in self.files)

    def _stored(self, file: KeyFile) -> pa.Table:
        return pq.read_table(file.stored).cast(SCHEMA)

    def _live(self, file: KeyFile) -> pa.Table:
        rows = self._stored(file)
        return rows.filter(pa.array(live_mask(dead_rows_of(file), rows.num_rows)))


def _marking_much(patch: pytest.MonkeyPatch, *, upkeep_too: bool) -> None:
    """Small tables are all dense and due: let their rows be marked, and their few fresh files be merged."""
    patch.setattr(tidying, "FRESH_GENERATIONS", 2)
    patch.setattr(tidying, "_FEW_FRESH_GENERATIONS", 1)
    patch.setattr(tidying, "DENSE", 100)
    if not upkeep_too:
        patch.setattr(tidying, "WASTE", 100)
        patch.setattr(tidying, "TOO_MUCH_WASTE", 100)


@settings(max_examples=examples(EXAMPLES // 2), deadline=None)
@given(randoms, st.integers(1, 15), st.sampled_from((1, 1 << 26)), st.sampled_from((0.5, 2, 5)))
def test_marked_rows_and_fresh_files_are_one_file_updated_alone(
    rng: Random, count: int, bytes_in_hand: int, rows_per_file: float
) -> None:
    events = drawn(rng)
    windows = in_windows(rng, events, 2)
    part_of = {at: rng.randrange(count) for at in windows}
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(range_update, "_BYTES_IN_HAND", bytes_in_hand)
        _marking_much(patch, upkeep_too=rng.random() < 0.5)
        one, many = Held(), InVectors(Path(folder), rng, rows_per_file)
        for part in range(count):
            told = [event for event in events if part_of[event.at[:2]] == part]
            if told:
                folded = kernels.fold(kernels.events_table(told, TABLE, windows), TABLE, Cut())
                one.take(folded)
                many.take(folded)
        assert many.content == one.content
        assert many.rows.sort_by("_cdc_key").equals(one.rows.sort_by("_cdc_key"))


@pytest.mark.full
def test_the_drawn_updates_mark_move_and_go_every_way() -> None:
    """The test above would hold of files that are written anew at every update."""
    ways, marked, moved, moved_by_marking = set(), 0, 0, 0
    for seed in range(60):
        rng = Random(seed)
        events = drawn(rng)
        windows = in_windows(rng, events, 2)
        part_of = {at: rng.randrange(15) for at in windows}
        with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
            _marking_much(patch, upkeep_too=seed % 2 == 0)
            many = InVectors(Path(folder), rng, 5)
            for part in range(15):
                told = [event for event in events if part_of[event.at[:2]] == part]
                if told:
                    many.take(kernels.fold(kernels.events_table(told, TABLE, windows), TABLE, Cut()))
            ways, marked, moved = ways | many.ways, marked + many.marked, moved + many.moved
            moved_by_marking += many.moved_by_marking
    assert ways == set(Way)
    assert marked > 20
    assert moved > 5
    assert moved_by_marking > 0


def of_many_keys(rng: Random, keys: int, changes: int) -> tuple[list[Event], list[Event]]:
    """Creations of ``keys``, and ``changes`` of any of them at any place in the log: most carry all columns,
    some leave some out, some are deletes."""

    def event(op: str, key: int, lsn: int, carried: Collection[str]) -> Event:
        image = {name: f"v {rng.randrange(100)}" for name in SHAPE.columns if name in carried}
        return Event(
            Position(1, lsn, 0),
            op,
            SHAPE.name,
            (str(key),),
            datetime(2026, 11, 1, tzinfo=UTC) + timedelta(seconds=lsn),
            after=None if op == "d" else image,
            unchanged=frozenset() if op == "d" else frozenset(SHAPE.columns) - image.keys(),
        )

    created = [event("c", 100 + number, 10 + number, SHAPE.columns) for number in range(keys)]
    changed = []
    for lsn in rng.sample(range(500, 500 + 2 * changes), changes):
        op = rng.choices("udc", (20, 2, 1))[0]
        carried = rng.sample(SHAPE.columns, rng.choice((2, 3, 3, 3, 3))) if op == "u" else SHAPE.columns
        changed.append(event(op, 100 + rng.randrange(keys), lsn, carried))
    return typed(created), typed(changed)


@pytest.mark.full
@settings(max_examples=examples(EXAMPLES // 2), deadline=None)
@given(randoms, st.integers(1, 4), st.sampled_from((0, 1000)))
def test_values_of_old_rows_that_some_of_the_replaced_rows_need_are_theirs(
    rng: Random, count: int, few: int
) -> None:
    created, changed = of_many_keys(rng, 40, 30)
    windows = in_windows(rng, [*created, *changed], 2)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        _marking_much(patch, upkeep_too=rng.random() < 0.5)
        one, many = Held(few), InVectors(Path(folder), rng, 15)
        many.few = few
        for part in (created, *(changed[start::count] for start in range(count))):
            folded = kernels.fold(kernels.events_table(part, TABLE, windows), TABLE, Cut())
            one.take(folded)
            many.take(folded)
        assert many.content == one.content
        assert many.rows.sort_by("_cdc_key").equals(one.rows.sort_by("_cdc_key"))


def columns_read(patch: pytest.MonkeyPatch) -> Counter[str]:
    """Count from now on the row groups that are read of each column of a Parquet file."""
    found = Counter[str]()
    for name in ("read_row_groups", "read", "iter_batches"):
        plain = getattr(pq.ParquetFile, name)

        def counted(parquet: pq.ParquetFile, *given: Any, plain: Any = plain, **named: Any) -> Any:
            told = inspect.signature(plain).bind(parquet, *given, **named).arguments
            groups = told.get("row_groups") or range(parquet.num_row_groups)
            columns = told.get("columns") or parquet.schema_arrow.names
            found.update(dict.fromkeys(columns, len(groups)))
            return plain(parquet, *given, **named)

        patch.setattr(pq.ParquetFile, name, counted)
    return found


def test_of_rows_that_are_just_replaced_only_what_decides_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    created, _ = of_many_keys(Random(1), 40, 0)
    changed = [
        replace(event, op="u", at=event.at._replace(commit_lsn=event.at.commit_lsn + 500))
        for event in created[10:30]
    ]
    # Of one row the new state needs the old body, of another one all values.
    after = {name: text for name, text in (changed[5].after or {}).items() if name != "body"}
    changed[5] = replace(changed[5], after=after, unchanged=frozenset({"body"}))
    changed[10] = replace(changed[10], op="d", after=None)
    windows = in_windows(Random(1), [*created, *changed], 1)
    held = Held()
    parts = [kernels.fold(kernels.events_table(each, TABLE, windows), TABLE) for each in (created, changed)]
    held.take(parts[0])
    [written] = write_rows(held.rows, ORDER, tmp_path, rows_per_group=2)
    file = KeyFile(written.name, str(tmp_path / written.name), '["100","elsewhere"]', written.rows)
    rules = UpdateRules(TABLE.shape, SCHEMA)
    target = FilesToUpdate([file], ORDER, tmp_path, rules, 100, way=Way.MARK, rows_per_group=2)
    ranges = ranges_of([file])
    share = _Share(None, target, ranges, Rewrites(frozenset()), [])  # type: ignore[arg-type]
    sent = held._sent(parts[1], set(), rules)
    sent = sent.append_column(RANGE, pa.array(np.zeros(sent.num_rows, np.int32)))
    with monkeypatch.context() as patch:
        reads = columns_read(patch)
        outcomes = [row for batch in share.update(sent, 0, 1) for row in batch.to_pylist()]
    assert {name: reads[name] for name in ("_cdc_state", "body", "status", "note", "_cdc_unresolved")} == {
        # 20 rows stand in ten row groups.
        "_cdc_state": 10,
        "body": 2,
        "status": 1,
        "note": 1,
        "_cdc_unresolved": 0,
    }
    found = _collected(outcomes, ranges, target)
    [fresh] = found.written
    stored = pq.read_table(tmp_path / file.path).cast(SCHEMA)
    left = stored.filter(pa.array(live_mask(found.dead[file.path], stored.num_rows)))
    rows = pa.concat_tables([left, pq.read_table(tmp_path / fresh.name).cast(SCHEMA)])
    held.take(parts[1])
    assert rows.sort_by("_cdc_key").equals(held.rows.sort_by("_cdc_key"))


def target_of(files: list[tuple[int, int, int]], folder: Path) -> FilesToUpdate:
    """Fresh files, for each its generation, its lowest key and how many keys follow it."""
    fresh = []
    for number, (generation, lowest, rows) in enumerate(files):
        path = folder / unit_folder("", generation, "unit") / f"fresh-{number}.parquet"
        path.parent.mkdir(exist_ok=True)
        pq.write_table(pa.table({"id": range(lowest, lowest + rows)}), path)
        fresh.append(KeyFile(path.relative_to(folder).as_posix(), str(path), lowest, rows))
    order = fresh_files.KeyOrder("id", whole_numbers=True)
    return FilesToUpdate([], order, folder, None, fresh=fresh, way=Way.MARK)  # type: ignore[arg-type]


def test_the_fresh_files_of_one_update_are_not_merged_for_being_many(tmp_path: Path) -> None:
    target = target_of([(1, 10 * number, 10) for number in range(40)], tmp_path)
    assert not with_leaving(target, target.order.no_values()).leaving
    target = target_of([(1 + number // 2, 10 * number, 10) for number in range(40)], tmp_path)
    left = {path.split("/")[0] for path in with_leaving(target, target.order.no_values()).leaving}
    assert 15 <= len(left) <= 20
    assert len(with_leaving(target, target.order.no_values()).leaving) == 2 * len(left)


def test_many_rows_of_fresh_files_that_leave_are_moved_by_several_tasks(tmp_path: Path) -> None:
    target = target_of([(1, 0, 500_000)], tmp_path)
    target = replace(target, leaving=frozenset({target.fresh[0].path}))
    ranges = ranges_of([KeyFile(f"{n}", f"{n}", 10_000 * n, 10_000) for n in range(50)])
    moving = moving_rows(target, ranges)
    assert moving.tolist() == [10_000] * 50
    few = _Sample(np.array([7]), 1)
    bounds = _shared_out(few, ranges, [], Rewrites(frozenset()), moving)
    most = max(moving[low:high].sum() for low, high in pairwise(bounds))
    assert (bounds[0], bounds[-1], most <= 120_000) == (0, 50, True)
    assert _shared_out(few, ranges, [], Rewrites(frozenset()), 0 * moving) == [0, 50]


def test_a_task_looks_into_more_files_than_a_process_may_have_open(tmp_path: Path) -> None:
    order, schema = fresh_files.KeyOrder("id", whole_numbers=True), pa.schema([("id", pa.int64())])
    rows = pa.table({"id": [1, 2]}, schema)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    try:
        finder = fresh_files.RowFinder(order, schema)
        for number in range(300):
            pq.write_table(rows, path := tmp_path / f"{number}.parquet")
            found = finder.find(KeyFile(path.name, str(path), 1, 2), fresh_files.Among(np.array([2])))
            assert found.numbers.tolist() == [1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_of_a_file_only_the_row_groups_of_wanted_keys_are_read(tmp_path: Path) -> None:
    rows = pa.table({"id": pa.array(range(100)), "text": [str(n) for n in range(100)]})
    order = fresh_files.KeyOrder("id", whole_numbers=True)
    pq.write_table(rows, tmp_path / "a.parquet", row_group_size=10)
    vectors = write_vectors(tmp_path, "unit", {"a.parquet": np.array([41])})
    file = KeyFile("a.parquet", str(tmp_path / "a.parquet"), 0, 99, vectors["a.parquet"])
    finder = fresh_files.RowFinder(order, rows.schema)
    found = finder.find(file, fresh_files.Among(np.array([3, 40, 41, 42, 99, 200])))
    assert found.numbers.tolist() == [3, 40, 42, 99]
    assert found.rows["text"].to_pylist() == ["3", "40", "42", "99"]
    between = finder.find(file, fresh_files.Between(38, 43))
    assert between.numbers.tolist() == [38, 39, 40, 42]
    assert not len(finder.find(file, fresh_files.Between(200, None)).numbers)


def test_of_each_column_only_the_row_groups_are_read_that_a_value_is_wanted_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = list(range(100))
    names = ("one", "two", "three")
    rows = pa.table({"id": numbers, **{name: [f"{name} {n}" for n in numbers] for name in names}})
    pq.write_table(rows, tmp_path / "a.parquet", row_group_size=10)
    file = KeyFile("a.parquet", str(tmp_path / "a.parquet"), 0, 100)
    finder = fresh_files.RowFinder(fresh_files.KeyOrder("id", whole_numbers=True), rows.schema)
    reads = columns_read(monkeypatch)
    wanted = {"one": np.array([3, 7, 55]), "two": np.array([4, 55]), "three": np.array([99])}
    found = finder.values(file, wanted)
    assert {name: values.to_pylist() for name, values in found.items()} == {
        name: [f"{name} {n}" for n in at] for name, at in wanted.items()
    }
    assert reads == {"one": 2, "two": 2, "three": 1}
