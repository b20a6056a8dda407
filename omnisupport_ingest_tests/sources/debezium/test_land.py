"""A file lands whole, once, and in the one order of its source; a faulty one leaves nothing."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from omnisupport_ingest.sources.debezium.faults import FileRefused, SourceTakesNoFiles
from omnisupport_ingest.sources.debezium.handling import REFUSE, Handling
from omnisupport_ingest.sources.debezium.land import LookThrough, check_source
from omnisupport_ingest.sources.debezium.lines import content_of
from omnisupport_ingest_tests.sources.debezium.recorded import DEFAULTS, SOURCE, START, STRINGS, Recorder
from omnisupport_ingest_tests.sources.debezium.told import TS, customer, envelope, flat


@pytest.fixture
def strict(tmp_path: Path) -> Recorder:
    """A source whose definition says that one odd line keeps its file out."""
    return Recorder(tmp_path / "strict", "customers", handling=Handling(odd_lines=REFUSE))


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(tmp_path, "customers", "toasty")


def test_the_same_content_again_changes_nothing_whatever_the_file_is_called(recorder: Recorder) -> None:
    first = recorder.land(DEFAULTS)
    packed = recorder.folder / "copy.jsonl.gz"
    packed.write_bytes(gzip.compress(DEFAULTS.read_bytes()))
    again = recorder.land(packed)
    assert again.already_landed
    assert again.manifest == first.manifest
    assert recorder.inlet.store.batch_ids() == [first.manifest.batch_id]


def test_what_is_no_row_is_dropped_and_counted(recorder: Recorder) -> None:
    tally = recorder.land(DEFAULTS).tally
    assert tally is not None
    assert tally.tombstones == 27
    assert tally.passed == {"heartbeat": 9, "logical message": 3, "transaction marker": 108}
    assert tally.uncontracted["public.compkey"] == 90
    assert "public.customers" not in tally.uncontracted


def test_a_file_without_a_row_lands_empty(recorder: Recorder) -> None:
    landing = recorder.land_values("empty.jsonl", None, {"ts_ms": 5})
    assert (landing.manifest.rows, landing.manifest.windows) == (0, ())


def test_an_event_keeps_what_was_delivered_and_where(recorder: Recorder) -> None:
    value = envelope("c", customer(1, unknown={"a": [1]}), order=1)
    landing = recorder.land_values("one.jsonl", None, value)
    (event,) = recorder.events()
    assert (event["file_row"], json.loads(event["envelope"])) == (2, value)
    assert (event["tx_id"], event["lsn"], event["commit_lsn"]) == (7, 1000, 900)
    assert json.loads(event["after"]) == {"id": "1", "email": "a@example.com", "unknown": '{"a":[1]}'}
    assert landing.manifest.file is not None
    assert (landing.manifest.file.name, landing.manifest.file.manifest) == ("one.jsonl", "")
    assert landing.manifest.windows == ("2026-11-20T1600",)


def test_an_unsent_column_is_told_and_left_out(recorder: Recorder) -> None:
    row = {"id": 1, "big": "__debezium_unavailable_value", "small": "v"}
    recorder.land_values("one.jsonl", envelope("u", row, table="toasty"))
    (event,) = recorder.events()
    assert (json.loads(event["after"]), event["unchanged"]) == ({"id": "1", "small": "v"}, ["big"])


def test_an_old_row_that_was_sent_whole_lands(recorder: Recorder) -> None:
    recorder.land_values("one.jsonl", envelope("u", customer(1), before=customer(1, email="old")))
    (event,) = recorder.events()
    assert json.loads(event["before"]) == {"id": "1", "email": "old"}


@pytest.mark.parametrize("wrapped", [True, False])
def test_records_and_plain_values_with_or_without_schemas_are_one(recorder: Recorder, wrapped: bool) -> None:
    value: Any = envelope("c", customer(1))
    if wrapped:
        value = {"schema": {"type": "struct"}, "payload": value}
        key = {"schema": {"type": "struct"}, "payload": {"id": 1}}
        value = {"topic": "sd.public.customers", "key": key, "value": value, "headers": {}}
    recorder.land_values("one.jsonl", value)
    (event,) = recorder.events()
    assert (event["key"], event["op"], event["source_table"]) == ('["1"]', "c", "customers")


def test_the_commit_time_is_as_fine_as_it_is_told(recorder: Recorder) -> None:
    value = envelope("c", customer(1))
    value["source"] |= {"ts_us": TS * 1000 + 7, "ts_ns": TS * 1_000_000 + 7001}
    recorder.land_values("one.jsonl", value)
    assert recorder.events()[0]["source_ts"].microsecond == 7


def test_the_flat_form_lands_like_the_envelope(recorder: Recorder) -> None:
    about = {"lsn": 1000, "sequence": '["900","1000"]', "schema": "public"}
    recorder.land_values("flat.jsonl", flat("u", customer(1), **about), flat("d", customer(1), **about))
    updated, deleted = recorder.events()
    assert (updated["commit_lsn"], updated["ordinal"], updated["op"]) == (900, 1000 << 14, "u")
    assert json.loads(updated["after"]) == {"id": "1", "email": "a@example.com"}
    assert (deleted["op"], deleted["after"], deleted["key"]) == ("d", None, '["1"]')


def test_a_rewritten_delete_is_one_even_if_its_op_is_not_told(recorder: Recorder) -> None:
    row = flat("d", customer(1))
    del row["__op"]
    recorder.land_values("flat.jsonl", row)
    assert recorder.events()[0]["op"] == "d"


def test_without_log_positions_the_time_orders_and_a_contradiction_is_marked(recorder: Recorder) -> None:
    landing = recorder.land_values(
        "flat.jsonl",
        flat("c", customer(1), ts=TS),
        flat("u", customer(1), ts=TS + 20),
        flat("u", customer(1), ts=TS + 10),
        flat("u", customer(2), ts=TS + 5),
        flat("u", customer(1), ts=TS + 20),
    )
    assert landing.manifest.file is not None
    assert landing.manifest.file.order == "time"
    events = recorder.events()
    assert [event["misplaced"] for event in events] == [False, False, True, False, False]
    assert [event["ordinal"] >> 14 for event in events] == [TS, TS + 20, TS + 10, TS + 5, TS + 20]
    assert events[1]["identity"] == '["public","customers","[\\"1\\"]"]'
    assert landing.tally is not None
    assert landing.tally.misplaced == 1


def test_a_snapshot_row_that_is_read_again_is_a_later_copy_not_a_collision(recorder: Recorder) -> None:
    row = envelope("r", customer(1), before_lsn=None)
    recorder.land_values("first.jsonl", row)
    recorder.land_values("again.jsonl", row, None)
    recorder.land_values("later.jsonl", envelope("r", customer(1), before_lsn=None, ts=TS + 5))
    once, twice, later = sorted(recorder.events(), key=lambda event: event["source_ts"])
    assert once["identity"] == twice["identity"] != later["identity"]
    assert {event["ordinal"] for event in (once, twice, later)} == {(1000 << 14) - (1 << 63)}


def test_rows_of_an_incremental_snapshot_stand_where_the_stream_had_them(recorder: Recorder) -> None:
    recorder.land_values("one.jsonl", envelope("r", customer(1)))
    assert (recorder.events()[0]["commit_lsn"], recorder.events()[0]["ordinal"]) == (900, 1000 << 14)


def test_a_file_of_snapshot_rows_alone_binds_its_source_to_no_order(recorder: Recorder) -> None:
    rows = [envelope("r", customer(id), before_lsn=None) for id in (1, 2)]
    recorder.land_values("rows.jsonl", *rows)
    landing = recorder.land_values(
        "changes.jsonl", envelope("u", customer(1), lsn=2000, before_lsn=1900, order=1)
    )
    assert landing.manifest.file is not None
    assert landing.manifest.file.order == "transaction"
    more = recorder.land_values("more.jsonl", envelope("r", customer(3), before_lsn=None, lsn=800))
    assert more.manifest.file is not None
    assert more.manifest.file.order == "transaction"


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (envelope("c", customer(1), order=1), envelope("c", customer(2)), "log position alone"),
        (envelope("c", customer(1)), flat("c", customer(2)), "commit time alone"),
        (envelope("r", customer(1), before_lsn=None), flat("c", customer(2)), "commit time alone"),
        (flat("c", customer(1)), envelope("r", customer(2)), "log position alone"),
    ],
)
def test_one_source_has_one_order(
    strict: Recorder, first: dict[str, Any], second: dict[str, Any], words: str
) -> None:
    with pytest.raises(FileRefused, match=rf"line 2: it is ordered by the {words}.*stands above it") as mixed:
        strict.land_values("mixed.jsonl", first, second)
    assert "new epoch does not help" in mixed.value.fix and "events.order" in mixed.value.fix
    assert strict.inlet.store.batch_ids() == []
    if first["op" if "op" in first else "__op"] != "r":
        strict.land_values("first.jsonl", first)
        for new_epoch in (None, "another try"):
            with pytest.raises(FileRefused, match=f"what has landed of {SOURCE}") as mixed:
                strict.land_values("second.jsonl", second, new_epoch=new_epoch)
            assert "events.order" not in mixed.value.fix


def test_a_connector_that_was_set_up_anew_needs_a_new_epoch(recorder: Recorder) -> None:
    recorder.land_values(
        "life.jsonl",
        envelope("r", customer(1), lsn=100, before_lsn=None),
        envelope("u", customer(1), lsn=200, before_lsn=None),
        envelope("u", customer(1), lsn=400, before_lsn=300),
    )
    again = [envelope("r", customer(1), lsn=900, before_lsn=None)]
    with pytest.raises(FileRefused, match="two lives of the connector") as refused:
        recorder.land_values("anew.jsonl", *again)
    assert "--new-epoch" in refused.value.fix
    landing = recorder.land_values("anew.jsonl", *again, new_epoch="offsets were lost")
    assert (landing.manifest.epoch, landing.began_epoch) == (2, 2)
    current = recorder.inlet.store.current_epoch()
    assert current is not None
    assert (current.reason, current.facts) == ("offsets were lost", None)
    assert (
        recorder.land_values("next.jsonl", envelope("u", customer(1), lsn=950, before_lsn=940)).manifest.epoch
        == 2
    )


def test_a_redelivery_of_the_first_life_is_not_taken_for_a_new_one(recorder: Recorder) -> None:
    first = envelope("u", customer(1), lsn=200, before_lsn=None)
    later = envelope("u", customer(1), lsn=400, before_lsn=300)
    recorder.land_values("later.jsonl", later)
    recorder.land_values("first.jsonl", first)
    recorder.land_values("both.jsonl", first, later)
    assert len(recorder.inlet.store.batch_ids()) == 3


def test_a_refused_file_begins_no_epoch_and_leaves_nothing(strict: Recorder) -> None:
    with pytest.raises(FileRefused):
        strict.land_values("bad.jsonl", envelope("c", customer(1)), {"not": "an event"}, new_epoch="why")
    assert strict.inlet.store.current_epoch() is None
    strict.land_values("good.jsonl", envelope("c", customer(1)))
    with pytest.raises(FileRefused):
        strict.land_values("bad.jsonl", envelope("c", customer(1)), {"not": "an event"})
    assert len(strict.inlet.store.batch_ids()) == 1
    assert len(list((strict.inlet.store.folder / "data").iterdir())) == 1


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"op": "c", "secret-value"', "not a JSON document"),
        (b'"secret-value"', "neither a Debezium change event"),
        (b'{"a": "secret-value"}', "neither a Debezium change event"),
        (envelope("x", customer(1, email="secret-value")), "its op is none of"),
        (envelope("c", customer(None, email="secret-value")), "key column 'id' has no value"),  # type: ignore[arg-type]
        (envelope("c", customer(1, org_id="secret-value")), "column 'org_id', bigint by its contract"),
        (envelope("c", customer(1, updated_at=5)), "column 'updated_at', timestamptz by its contract"),
        (envelope("c", customer(1, email="secret-value"), lsn=1 << 49), "49 bits"),
        (envelope("u", None), "it has no after"),
        (flat("c", customer(1, email="secret-value"), ts=None), "has no commit time"),  # type: ignore[arg-type]
    ],
)
def test_a_bad_line_is_told_with_file_line_and_fix_and_never_with_a_value(
    strict: Recorder, line: bytes | dict[str, Any], words: str
) -> None:
    text = line if isinstance(line, bytes) else json.dumps(line).encode()
    good = json.dumps(envelope("c", customer(1))).encode()
    path = strict.file("bad.jsonl", [good, b"", text])
    with pytest.raises(FileRefused, match=words) as refused:
        strict.land(path)
    assert f"{path}, line 3: " in refused.value.problem
    assert refused.value.fix
    assert "secret-value" not in str(refused.value)


def test_a_torn_gzip_file_and_a_missing_file_are_refused(recorder: Recorder) -> None:
    torn = recorder.folder / "torn.jsonl.gz"
    torn.write_bytes(gzip.compress(STRINGS.read_bytes())[:-2000])
    with pytest.raises(FileRefused, match="not a whole gzip file"):
        recorder.land(torn)
    with pytest.raises(FileRefused, match="No such file"):
        recorder.land(recorder.folder / "gone.jsonl")


def test_a_source_that_capture_owns_or_no_contract_names_takes_no_files(recorder: Recorder) -> None:
    contracts = recorder.workspace.contracts
    with pytest.raises(SourceTakesNoFiles, match="capture reads"):
        check_source(SOURCE, SOURCE, contracts)
    with pytest.raises(SourceTakesNoFiles, match=f"No contract names the source 'recorde'.*{SOURCE}"):
        check_source("recorde", "support_desk", contracts)


def test_the_watermark_follows_the_files_and_says_which_come_late(recorder: Recorder) -> None:
    first = recorder.land_values("first.jsonl", envelope("c", customer(1), ts=TS + 7_000_000))
    late = recorder.land_values("late.jsonl", envelope("c", customer(2), lsn=999))
    assert first.manifest.arrival.watermark_before is None
    assert late.manifest.arrival.watermark_before == first.manifest.arrival.watermark
    assert late.manifest.arrival.watermark_before > START


def test_without_order_in_the_transaction_an_identity_is_table_key_and_operation(recorder: Recorder) -> None:
    """Rows of one LSN (a bulk insert, the halves of a key change) differ in them; two contents do not."""
    told = [
        envelope("c", customer(1)),
        envelope("c", customer(2)),
        envelope("d", customer(1)),
        envelope("d", customer(1), lsn=1001),
        envelope("c", customer(3), lsn=1001),
        envelope("c", customer(1, name="another content")),
        envelope("t", None),
        envelope("t", None, table="toasty"),
    ]
    recorder.land_values("one.jsonl", *told)
    events = recorder.events()
    apart = {(each["commit_lsn"], each["ordinal"], each["identity"]) for each in events}
    assert len(apart) == len(told) - 1
    assert events[0]["identity"] == events[5]["identity"] == '["public","customers","[\\"1\\"]","c"]'


def test_rows_of_a_table_without_a_key_are_told_apart_by_what_they_hold(recorder: Recorder) -> None:
    rows = [envelope("c", {"a": value}, table="nopk") for value in (1, 2, 2)]
    recorder.land_values("one.jsonl", *rows)
    one, two, again = (event["identity"] for event in recorder.events())
    assert one != two == again


@pytest.mark.parametrize("op", ["c", "u", "d", "r"])
@pytest.mark.parametrize("missing", ["a", "b"])
def test_null_in_a_part_of_a_composite_key_refuses_the_file(tmp_path: Path, op: str, missing: str) -> None:
    recorder = Recorder(tmp_path, "compkey", handling=Handling(odd_lines=REFUSE))
    row = {"a": 1, "b": "x", "c": "y"} | {missing: None}
    with pytest.raises(FileRefused, match=f"key column '{missing}' has no value"):
        recorder.land_values("one.jsonl", envelope(op, row, table="compkey"))
    assert recorder.inlet.store.batch_ids() == []


@pytest.mark.parametrize("first", [envelope("r", customer(1), before_lsn=None, lsn=500), {"ts_ms": 5}])
def test_a_look_through_files_takes_the_order_from_them_as_landing_does(
    recorder: Recorder, first: dict[str, Any]
) -> None:
    """A first snapshot and heartbeats show no order: the next file may have any."""
    files = [recorder.folder / "first.jsonl", recorder.folder / "next.jsonl"]
    for file, line in zip(files, (first, envelope("c", customer(2), order=1)), strict=True):
        file.write_text(json.dumps(line) + "\n")
    look = LookThrough(recorder.inlet)
    looked = [look.read(file, content_of(file).sha256) for file in files]
    landed = [recorder.land(file).tally for file in files]
    assert [each.odd for each in looked] == [each.odd for each in landed if each is not None] == [0, 0]
