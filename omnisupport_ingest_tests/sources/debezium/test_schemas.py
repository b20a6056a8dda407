"""Tables that change in the middle of Debezium's events: what the events tell of it is recorded, once."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from omnisupport_ingest.cli.contracts_changes import changes_of, show_changes
from omnisupport_ingest.contracts.learned import LearnedColumns
from omnisupport_ingest.landing import schema_changes
from omnisupport_ingest.landing.schema_changes import SchemaChange, SchemaChanges
from omnisupport_ingest.sources.debezium.handling import Handling
from omnisupport_ingest_tests.sources.debezium.recorded import (
    DEFAULTS,
    SOURCE,
    STRING_MODES,
    STRINGS,
    Recorder,
)
from omnisupport_ingest_tests.sources.debezium.told import TS, customer, envelope, flat, schema_of

TOKENS = {"policy": "tokenize", "note": "An address."}

WITHOUT_SCHEMA = [
    ("column_added", "phone", None, None),
    ("column_dropped", "name", None, None),
    ("column_added", "full_name", None, None),
    ("column_dropped", "phone", None, None),
]
"""What the recorded file shows of its ALTERs: a rename is a column less and one more, and no type is told."""

WITH_SCHEMA = [
    ("column_added", "phone", None, "text"),
    ("column_dropped", "name", "text", None),
    ("column_added", "full_name", None, "text"),
    ("column_widened", "org_id", "integer", "bigint"),
    ("column_dropped", "phone", "text", None),
]


def recorded(recorder: Recorder) -> tuple[SchemaChange, ...]:
    return SchemaChanges(recorder.inlet.store.folder).all()


def changes(recorder: Recorder) -> list[tuple[str, str | None, str | None, str | None]]:
    return [(each.kind, each.column, each.before or None, each.after or None) for each in recorded(recorder)]


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(tmp_path, "customers")


@pytest.mark.parametrize(
    ("path", "handling", "told"),
    [(DEFAULTS, Handling(), WITHOUT_SCHEMA), (STRINGS, STRING_MODES, WITH_SCHEMA)],
)
def test_recorded_alters_are_told_in_their_order(
    tmp_path: Path, path: Path, handling: Handling, told: list[Any]
) -> None:
    recorder = Recorder(tmp_path, "customers", handling=handling)
    recorder.land(path)
    assert changes(recorder) == told
    first = recorded(recorder)[0]
    assert first.place is not None and first.place.startswith(f"{path.name}, line ")
    line = json.loads(path.read_bytes().splitlines()[int(first.place.rpartition(" ")[2]) - 1])
    assert "phone" in json.dumps(line) and first.rows is not None and first.rows >= 1


@pytest.mark.parametrize("size", [5, 40, 100])
def test_recorded_alters_are_told_the_same_however_the_file_is_cut(tmp_path: Path, size: int) -> None:
    recorder = Recorder(tmp_path, "customers", handling=STRING_MODES)
    lines = STRINGS.read_bytes().splitlines()
    for start in range(0, len(lines), size):
        recorder.land_lines(f"{start}.jsonl", lines[start : start + size])
    assert changes(recorder) == WITH_SCHEMA


def test_a_file_that_comes_late_or_again_tells_nothing_of_the_table_as_it_is(recorder: Recorder) -> None:
    old = [envelope("c", customer(number), lsn=number, ts=TS + number) for number in range(1, 9)]
    new = [envelope("c", customer(number, more=1), lsn=number, ts=TS + number) for number in range(101, 109)]
    recorder.land_values("1.jsonl", *old[:4])
    recorder.land_values("3.jsonl", *new[4:])
    recorder.land_values("2.jsonl", *old[4:], *new[:4])
    recorder.land_values("again.jsonl", *new, *old)
    assert changes(recorder) == [("column_added", "more", None, None)]
    (change,) = recorded(recorder)
    assert (change.place, change.rows) == ("3.jsonl, line 1", 4)


def test_many_ordinary_lines_tell_their_columns_as_single_ones_do(recorder: Recorder) -> None:
    def lines(first: int, count: int, **more: Any) -> list[dict[str, Any]]:
        numbers = range(first, first + count)
        return [envelope("c", customer(n, **more), lsn=1000 + n, ts=TS + n) for n in numbers]

    recorder.land_values("1.jsonl", *lines(1, 200), *lines(201, 300, more=1))
    assert changes(recorder) == [("column_added", "more", None, None)]
    (change,) = recorded(recorder)
    assert (change.place, change.rows) == ("1.jsonl, line 201", 300)


def test_the_flat_form_tells_its_columns_without_what_it_says_about_them(recorder: Recorder) -> None:
    recorder.land_values("1.jsonl", flat("c", customer(1)))
    recorder.land_values("2.jsonl", flat("u", customer(1, more="x"), ts=TS + 1))
    recorder.land_values(
        "3.jsonl", flat("d", {"id": 1}, ts=TS + 2), flat("c", customer(2, more=1), ts=TS + 3)
    )
    assert changes(recorder) == [("column_added", "more", None, None)]


def test_one_flat_row_does_not_show_that_a_column_was_dropped(recorder: Recorder) -> None:
    recorder.land_values("1.jsonl", flat("c", customer(1, status="a")))
    recorder.land_values("2.jsonl", flat("u", customer(1), ts=TS + 1))
    assert changes(recorder) == []
    recorder.land_values("3.jsonl", *(flat("u", customer(n), ts=TS + n) for n in (2, 3)))
    assert changes(recorder) == [("column_dropped", "status", None, None)]


def test_a_bare_row_may_leave_columns_out_and_tells_new_ones_alone(tmp_path: Path) -> None:
    handling = Handling(bare_rows=True, time_columns=("at",))
    recorder = Recorder(tmp_path, "customers", handling=handling)
    start = datetime(2026, 11, 20, 16)
    for number, more in enumerate(({"status": "a"}, {}, {"new": 1}, {"status": "b"})):
        at = (start + timedelta(minutes=number)).isoformat()
        row = {"id": 1, "at": at, "__source_table": "customers", **more}
        recorder.land_values(f"{number}.jsonl", row)
    assert changes(recorder) == [("column_added", "new", None, None)]


def test_a_batch_that_does_not_land_records_its_change_once_it_does(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder.land_values("1.jsonl", envelope("c", customer(1), lsn=1))
    writer = "omnisupport_ingest.landing.writer.BatchWriter.seal"
    late = envelope("c", customer(2, more=1), lsn=2, ts=TS + 1)
    with monkeypatch.context() as patch:
        patch.setattr(writer, lambda *_, **__: (_ for _ in ()).throw(OSError("the disk is full")))
        with pytest.raises(OSError, match="disk is full"):
            recorder.land_values("2.jsonl", late)
    recorder.land_values("2.jsonl", late)
    assert changes(recorder) == [("column_added", "more", None, None)]


def test_an_additive_contract_learns_a_column_whose_type_its_events_tell(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, "customers", handling=STRING_MODES, evolution="additive")
    recorder.land(STRINGS)
    learned = LearnedColumns(recorder.workspace.home.path, SOURCE).of("customers")
    # Of phone nothing is learned: it is gone again when the file ends, and it is personal data by its name.
    assert learned == {}, "full_name is in the contract"
    plain = Recorder(tmp_path / "plain", "customers", evolution="additive")
    plain.land_values("1.jsonl", envelope("c", customer(1), lsn=1))
    plain.land_values("2.jsonl", envelope("c", customer(2, more=1), lsn=2, ts=TS + 1))
    assert LearnedColumns(plain.workspace.home.path, SOURCE).of("customers") == {}, "nothing tells its type"


def test_types_that_become_known_are_no_change_of_theirs(recorder: Recorder) -> None:
    recorder.land_values("1.jsonl", envelope("c", customer(1), lsn=1))
    fields = {"id": {"type": "int64", "optional": False}, "email": {"type": "string"}}
    for number, kind in ((2, "int64"), (3, "double")):
        row = envelope("c", customer(number), lsn=number, ts=TS + number)
        fields["id"]["type"] = kind
        recorder.land_values(f"{number}.jsonl", {"schema": schema_of(row, fields), "payload": row})
    assert changes(recorder) == [("column_retyped", "id", "bigint", "double precision")]


def test_of_bare_rows_no_new_name_of_a_personal_column_is_learned(tmp_path: Path) -> None:
    handling = Handling(bare_rows=True, time_columns=("at",))
    recorder = Recorder(tmp_path, "customers", handling=handling, evolution="additive", pii={"email": TOKENS})
    for number, name in enumerate(("email", "reach")):
        at = (datetime(2026, 11, 20, 16) + timedelta(minutes=number)).isoformat()
        row = {"id": 1, name: "a@example.com", "at": at, "__source_table": "customers"}
        fields = {each: {"type": "string"} for each in row} | {"id": {"type": "int64"}}
        recorder.land_values(f"{number}.jsonl", {"schema": schema_of(row, fields), "payload": row})
    assert changes(recorder) == [("column_added", "reach", None, "text")]
    assert LearnedColumns(recorder.workspace.home.path, SOURCE).of("customers") == {}


def test_the_name_of_a_column_is_shown_on_one_line(
    recorder: Recorder, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder.land_values("1.jsonl", envelope("c", customer(1), lsn=1))
    recorder.land_values("2.jsonl", envelope("c", customer(2, **{"a\n\x1b[2Jb": 1}), lsn=2, ts=TS + 1))
    show_changes(changes_of(recorder.workspace, []))
    assert "column added: a��[2Jb  (" in capsys.readouterr().out


def test_the_record_is_read_once_a_batch_however_many_tables_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(tmp_path, "customers", "gen", "uidx")
    tables = ("customers", "gen", "uidx")
    recorder.land_values("1.jsonl", *(envelope("c", {"id": 1}, lsn=1, table=each) for each in tables))
    read, count = schema_changes.content_of, []

    def counted(path: Path) -> bytes:
        count.append(path)
        return read(path)

    monkeypatch.setattr(schema_changes, "content_of", counted)
    rows = (envelope("c", {"id": 2, "new": 1}, lsn=2, ts=TS + 1, table=each) for each in tables)
    recorder.land_values("2.jsonl", *rows)
    assert len(count) == 1
    assert [(each.table, each.column) for each in recorded(recorder)] == [(each, "new") for each in tables]
