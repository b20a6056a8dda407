"""Tasks over files of accepted and of quarantined events come to what the oracle comes to, without Spark."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from omnisupport_ingest.cdc.envelope import QUARANTINE_TYPE, RAW_TYPE
from omnisupport_ingest.cdc.folded import folded_type
from omnisupport_ingest.contracts.model import Column
from omnisupport_ingest.lake import file_rows
from omnisupport_ingest.lake.file_tasks import Output
from omnisupport_ingest.lake.layout import LakeFile
from omnisupport_ingest.lake.schema import arrow_schema
from omnisupport_ingest.layers.dimension import fold_tasks
from omnisupport_ingest.layers.dimension.fold_tasks import (
    FoldReport,
    Share,
    fold,
    in_key_shares,
    of_block,
    parts_agree,
    voided,
)
from omnisupport_ingest.layers.workspace import order_of
from omnisupport_ingest_tests.cdc import kernels, lanes
from omnisupport_ingest_tests.cdc.test_kernel_fold import TABLE, drawn, kernel_states, oracle_states
from omnisupport_ingest_tests.examples import examples
from omnisupport_ingest_tests.oracle.histories import KEYS, SHAPE
from omnisupport_ingest_tests.oracle.model import Event

WINDOW = "2026-11-01T0000"
CONTRACT = replace(
    lanes.CONTRACT,
    key=TABLE.key,
    columns=tuple(
        Column(name, "numeric(12,2)" if kind == "numeric" else kind, nullable=name not in TABLE.key)
        for name, kind in TABLE.types.items()
    ),
)
_RAW = arrow_schema(RAW_TYPE, without=())
_WITHHELD = arrow_schema(QUARANTINE_TYPE, without=())
_PLACE = ("window", "epoch", "commit_lsn", "ordinal", "identity")

randoms = st.integers(0, (1 << 32) - 1).map(Random)


def written(folder: Path, events: Sequence[Event], *, withheld: bool) -> LakeFile:
    """A file of ``events``, as the layer has it."""
    schema = (_WITHHELD if withheld else _RAW).remove(0)
    rows = [
        kernels._event_row(event, TABLE, WINDOW, number)
        | {"source_schema": CONTRACT.schema, "source_table": event.table, "identity": event.identity}
        for number, event in enumerate(events)
    ]
    path = folder / f"{len(list(folder.iterdir()))}.parquet"
    part = ("reason", "row_rule") if withheld else ("source_table", CONTRACT.table)
    table = pa.Table.from_pylist(rows, schema=schema)
    pq.write_table(table.drop_columns([part[0]]), path, row_group_size=3)
    return LakeFile(path.name, str(path), WINDOW, (("window", WINDOW), part), len(rows), path.stat().st_size)


def folded(folder: Path, share: Share) -> tuple[pa.Table, FoldReport] | None:
    """What a task makes of ``share``: its rows, and what it says."""
    output = Output(folder, 0, arrow_schema(folded_type(CONTRACT), without=()), ("window",))
    told = fold(output, share, CONTRACT, order_of(CONTRACT))
    output.close()
    if told is None:
        return None
    schema = arrow_schema(folded_type(CONTRACT), without=())
    parts = [pq.read_table(file, partitioning=None) for file in (folder / "rows").rglob("*.parquet")]
    windows = [part.add_column(0, schema.field(0), pa.array([WINDOW] * len(part))) for part in parts]
    return pa.concat_tables(
        [schema.empty_table(), *(part.cast(schema) for part in windows)]
    ), FoldReport.parse(told)


def with_voided(rng: Random, events: Sequence[Event]) -> list[Event]:
    """Withheld events at the places of accepted ones, which void them: of two that collided one was
    released."""
    accepted = [event for event in events if not event.quarantined and event.key and event.op in "cu"]
    return [
        replace(
            event,
            key=rng.choice((event.key, next(each for each in _KEYS if each != event.key))),
            after={"status": "withheld"},
            quarantined=True,
            moved_from=None,
        )
        for event in accepted
        if rng.random() < 0.2
    ]


_KEYS = tuple((*key, "elsewhere") for key in KEYS)


@settings(max_examples=examples(60), deadline=None)
@given(randoms, st.integers(1, 3), st.sampled_from((4, 1_000)), st.sampled_from((1, 200, 1 << 20)))
def test_files_of_accepted_and_withheld_events_come_to_what_the_oracle_comes_to(
    rng: Random, files: int, rows_of_a_block: int, bytes_of_images: int
) -> None:
    events = drawn(rng)
    events += with_voided(rng, events)
    accepted = [event for event in events if not event.quarantined]
    withheld = [event for event in events if event.quarantined]
    assume(accepted)
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patched:
        folder = Path(name)
        (folder / "events").mkdir()
        patched.setattr(fold_tasks, "ROWS_OF_A_BLOCK", rows_of_a_block)
        patched.setattr(fold_tasks, "_BYTES_OF_IMAGES", bytes_of_images)
        of_accepted = [
            written(folder / "events", accepted[number::files], withheld=False) for number in range(files)
        ]
        of_withheld = [written(folder / "events", withheld, withheld=True)] if withheld else []
        blocks = in_key_shares([*of_accepted, *of_withheld], 3, of_withheld)
        assert sum(len(share.withheld) for block in blocks for share in block[:1]) == len(of_withheld)
        found = [
            [folded(folder / f"{block}-{share.number}", share) for share in shares]
            for block, shares in enumerate(blocks)
        ]
        made = [each for block in found for each in block if each is not None]
        refused = len(made) < sum(map(len, found))
        assert not (refused and len(blocks) == 1)
        assume(not refused)
        agree = parts_agree(of_block(each[1].stretches for each in block if each) for block in found)
        assert agree or len(blocks) > 1
        assume(agree)
        rows = kernels.merged([table for table, _ in made], TABLE)
    assume(rows.num_rows)
    assert kernel_states(kernels.current(rows, TABLE), events) == oracle_states(events)


def test_a_withheld_event_that_another_block_voids_is_left_to_the_shuffle(tmp_path: Path) -> None:
    rng = Random(1)
    some = next(event for event in drawn(rng, withheld=False) if event.op == "c" and event.key)
    (tmp_path / "events").mkdir()
    accepted = written(tmp_path / "events", [some], withheld=False)
    withheld = written(tmp_path / "events", [replace(some, quarantined=True)], withheld=True)
    assert folded(tmp_path / "apart", Share((accepted,), elsewhere=(withheld,))) is None
    together = folded(tmp_path / "together", Share((accepted,), withheld=(withheld,)))
    assert together is not None
    assert together[0]["_cdc_unresolved"].to_pylist() != [list(SHAPE.columns)]


def test_only_an_event_at_the_very_place_of_a_withheld_one_voids_it() -> None:
    place = dict(zip(_PLACE, ("w1", 1, 5, 2, None), strict=True))
    schema = pa.schema([_RAW.field(name) for name in _PLACE])

    def events(*changes: dict[str, object]) -> pa.Table:
        return pa.Table.from_pylist([place | each for each in changes], schema=schema)

    others = ({"window": "w2"}, {"epoch": 2}, {"ordinal": 0}, {"identity": "[]"})
    # The last has the mark of the first.
    others = (*others, {"commit_lsn": 4, "ordinal": 1_000_005})
    assert voided(events({}), events(*others)).tolist() == [False]
    assert voided(events({}, {"ordinal": 0}), events({})).tolist() == [True, False]
    assert voided(events({"identity": "[]"}), events(*others)).tolist() == [True]


def test_a_key_change_of_any_share_counts_for_its_block() -> None:
    told = [json.dumps({"w": [[1, 2], [1, 9], moves]}) for moves in (False, True)]
    assert json.loads(of_block(told)) == {"w": [[1, 2], [1, 9], True]}
    assert json.loads(of_block(told[:1])) == {"w": [[1, 2], [1, 9], False]}


def test_a_share_of_very_many_parts_is_left_to_more_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = Random(1)
    events = [event for event in drawn(rng) if not event.quarantined]
    (tmp_path / "events").mkdir()
    share = Share((written(tmp_path / "events", events, withheld=False),))
    monkeypatch.setattr(fold_tasks, "_BYTES_OF_IMAGES", 1)
    assert folded(tmp_path / "all", share) is not None
    monkeypatch.setattr(fold_tasks, "_MOST_PARTS", 1)
    assert folded(tmp_path / "few", share) is None


def test_rows_of_many_windows_that_wait_for_more_are_written_once_they_are_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_rows, "MAX_BYTES_IN_MEMORY", 4_000)
    schema = pa.schema([("window", pa.string()), ("text", pa.string())])
    output = Output(tmp_path / "draft", 0, schema, ("window",))
    for number in range(50):
        output.add(pa.table({"window": [f"w{number % 10}"], "text": ["x" * 1_000]}, schema))
        assert sum(file.held_bytes for file in output._files.values()) <= 4_000
    output.close()
    files = [*(tmp_path / "draft" / "rows").rglob("*.parquet")]
    # One file of each window, all the same.
    assert len(files) == 10 and sum(pq.read_metadata(file).num_rows for file in files) == 50
