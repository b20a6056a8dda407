"""Records land the same, byte for byte, whether they are read many at once or one by one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnisupport_ingest.landing.columns import events_table
from omnisupport_ingest.landing.manifest import OffsetSpan
from omnisupport_ingest.sources.debezium import ordinary_lines
from omnisupport_ingest.sources.kafka import records as of_topics
from omnisupport_ingest.sources.kafka.record_columns import Records
from omnisupport_ingest.sources.kafka.records import Round, RoundReading, StopsHere
from omnisupport_ingest_tests.examples import examples
from omnisupport_ingest_tests.sources.debezium.recorded import TABLES, Recorder
from omnisupport_ingest_tests.sources.debezium.test_both_ways import (
    COLUMNS,
    ROW,
    change,
    changed,
    compact,
    values,
)
from omnisupport_ingest_tests.sources.debezium.told import customer, envelope, flattened

Headers = Sequence[tuple[str, bytes | str | None]]

_PLACE = ("shop.things", 3)
_KEYS: list[bytes | None] = [b'{"id":1}', None, b"", b"no JSON \xff", b'{"id":1,\n"x":"\\u0041"}', b"7"]
_HEADERS: list[Headers] = [
    (), (("a", b"b"),), (("a", None), ("b", b"\xff")), (("__op", b"d"),), (("__source_lsn", b"7"),),
]  # fmt: skip


class BothWays:
    """A round of one partition, read many records at once and one by one."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(TABLES, "things", (("id",), COLUMNS))
        self._inlet, self._monkeypatch = Recorder(folder, "things").inlet, monkeypatch
        self.blocks = 0

    def read(self, records: Records, at_once: int = 1 << 20) -> tuple[Any, Any]:
        """What comes of ``records`` in the one way and in the other.

        ``at_once``: how many bytes are looked at at once.
        """
        self._monkeypatch.setattr(of_topics, "_BYTES_AT_ONCE", at_once)
        return self._read(records, 1), self._read(records, 10**9)

    def _read(self, records: Records, least: int) -> object:
        self._monkeypatch.setattr(ordinary_lines, "LEAST_LINES", least)
        span = OffsetSpan(*_PLACE, 0, len(records), len(records), None)
        reading = RoundReading(
            Round({_PLACE: span}, {_PLACE: records}, {}, frozenset(), False), self._inlet, 3
        )
        rows: list[dict[str, Any]] = []
        for part in reading.parts(3):
            self.blocks += isinstance(part, pa.Table)
            rows += (part if isinstance(part, pa.Table) else events_table([part])).to_pylist()
        told = (str(reading.tally), str(reading.first_odd), reading._content.hexdigest())
        return (
            sorted(rows, key=lambda row: json.loads(row["envelope"])["offset"]),
            told,
            reading._round.highest,
        )


@pytest.fixture(scope="module")
def ways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BothWays]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield BothWays(tmp_path_factory.mktemp("both ways"), monkeypatch)


def records(lines: list[bytes | None], keys: list[bytes | None], headers: list[Headers]) -> Records:
    told = [compact(change("c", ROW)), *lines]
    numbers = range(len(told))
    return Records(
        [*numbers],
        [keys[i % len(keys)] for i in numbers],
        told,
        [headers[i % len(headers)] for i in numbers],
        [1_795_190_400_000 + i if i % 5 else -1 for i in numbers],
    )


@settings(max_examples=examples(100))
@given(
    lines=st.lists(st.one_of(st.none(), *[values().flatmap(changed)] * 5), min_size=1, max_size=12),
    keys=st.lists(st.sampled_from(_KEYS), min_size=1, max_size=3),
    headers=st.lists(st.sampled_from(_HEADERS), min_size=1, max_size=3),
    at_once=st.sampled_from([1, 2000, 1 << 20]),
)
def test_a_round_is_the_same_both_ways(
    ways: BothWays,
    lines: list[bytes | None],
    keys: list[bytes | None],
    headers: list[Headers],
    at_once: int,
) -> None:
    many, single = ways.read(records(lines, keys, headers), at_once)
    assert many == single


def test_ordinary_records_are_read_many_at_once(ways: BothWays) -> None:
    before = ways.blocks
    lines = [compact(change("u", ROW, order)) for order in range(2, 14)]
    many, single = ways.read(records([*lines], _KEYS, _HEADERS))
    assert many == single and ways.blocks > before


def test_flat_rows_are_read_many_at_once_but_for_those_of_which_headers_tell_more(ways: BothWays) -> None:
    before = ways.blocks
    values = [compact(flattened(change("u", ROW, order), op=False)) for order in range(2, 14)]
    many, single = ways.read(records([*values], [None], [(), (("__op", b"d"),)]))
    assert many == single and ways.blocks > before
    rows, _, _ = many
    assert [row["op"] for row in rows] == ["c", *["d", "u"] * 6]


def test_a_partition_stops_where_the_second_life_begins_both_ways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(tmp_path, "customers")
    recorder.land_lines("events.jsonl", [compact(envelope("c", customer(1), order=1, before_lsn=None))])
    read = [envelope("r", customer(id), order=1, lsn=5000, before_lsn=None) for id in range(3)]
    later = [envelope("c", customer(id), order=1, lsn=2000 + id, before_lsn=1900) for id in range(9)]
    lines = records([compact(each) for each in (*read, *later)], [None], [()]).part(1, 13)
    found = []
    # At 5 the few of the first life are read behind those of the second.
    for least in (1, 5, 1000):
        monkeypatch.setattr(ordinary_lines, "LEAST_LINES", least)
        of = Round({}, {_PLACE: lines}, {}, frozenset(), False)
        with pytest.raises(StopsHere, match="two lives") as stop:
            list(RoundReading(of, recorder.inlet, 3).parts(3))
        found.append(stop.value.offset)
    assert found == [4, 4, 4]
