"""What a task makes of the files that are its share."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from omnisupport_ingest.cdc.envelope import LANDED_TYPE, RAW_TYPE
from omnisupport_ingest.cdc.folded import folded_type
from omnisupport_ingest.cdc.judging import ACCEPTED, DUPLICATE, QUARANTINED, JudgingRules
from omnisupport_ingest.cdc.subject_values import ErasedSubjects
from omnisupport_ingest.contracts.at_rest import subject_tables
from omnisupport_ingest.contracts.decision_table import default_decision_table, load_decision_table
from omnisupport_ingest.contracts.model import Column, Subject
from omnisupport_ingest.contracts.pii_keys import SETTING
from omnisupport_ingest.contracts.pii_policies import lake_columns
from omnisupport_ingest.contracts.quality import Policies
from omnisupport_ingest.contracts.subject_keys import SubjectKeys
from omnisupport_ingest.lake import file_rows, file_tasks
from omnisupport_ingest.lake.file_rows import batches_of, rows_of
from omnisupport_ingest.lake.file_tasks import Output, in_shares
from omnisupport_ingest.lake.layout import LakeFile
from omnisupport_ingest.lake.schema import arrow_schema
from omnisupport_ingest.landing.integrity import sha256_of
from omnisupport_ingest.landing.manifest import DataFile
from omnisupport_ingest.layers.dimension import fold_tasks, update_tasks
from omnisupport_ingest.layers.dimension.fold_tasks import Share, fold
from omnisupport_ingest.layers.events import event_copies, event_tasks
from omnisupport_ingest.layers.events.event_copies import Copies
from omnisupport_ingest.layers.events.event_tasks import Judged, LandedFile, judge, take_in
from omnisupport_ingest.layers.events.scenarios import Group
from omnisupport_ingest.layers.workspace import order_of
from omnisupport_ingest.position import Lsn, Position
from omnisupport_ingest.settings import PREFIX
from omnisupport_ingest_tests.cdc.lanes import CONTRACT

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)
LANDED = arrow_schema(LANDED_TYPE, without=())
RAW = arrow_schema(RAW_TYPE, without=())
ARRIVAL = {
    "batch_id": "batch",
    "data_file": "part-0.parquet",
    "window": "2026-11-21T12",
    "landed_at": NOON,
    "watermark_before": None,
    "newest_epoch_before": 0,
    "file_name": None,
}
EVENT = {
    "epoch": 1,
    "commit_lsn": 7,
    "ordinal": 0,
    "op": "c",
    "source_ts": NOON,
    "source_schema": "public",
    "source_table": "tickets",
    "key": '["1"]',
    "after": '{"id":"1"}',
    "batch_id": "batch",
}


def as_landed(file: Path) -> DataFile:
    at = Position(1, Lsn(7), 0)
    return DataFile(
        path=file.name,
        window=ARRIVAL["window"],
        rows=1,
        bytes=file.stat().st_size,
        sha256=sha256_of(file),
        first=at,
        last=at,
        ordered=True,
        rows_per_table={"public.tickets": 1},
    )


def test_a_task_takes_in_no_file_that_is_not_what_its_manifest_says(tmp_path: Path) -> None:
    landed = tmp_path / "landed.parquet"
    pq.write_table(pa.Table.from_pylist([EVENT], schema=LANDED), landed)
    file = LandedFile(tmp_path, as_landed(landed), ARRIVAL)
    landed.write_bytes(landed.read_bytes()[:-1] + b"?")
    output = Output(tmp_path / "output", 0, RAW, ())
    assert take_in(output, [file]) is None


def taken_in(tmp_path: Path, landed: Path) -> pa.Table:
    output = Output(tmp_path / f"of {landed.stem}", 0, RAW, ())
    assert take_in(output, [LandedFile(tmp_path, as_landed(landed), ARRIVAL)]) is not None
    output.close()
    [written] = (tmp_path / f"of {landed.stem}" / "rows").iterdir()
    return pq.read_table(written)


def test_a_landed_file_of_an_earlier_version_has_null_where_it_lacks_a_column(tmp_path: Path) -> None:
    new = ("misplaced", "file_row", "envelope")
    pq.write_table(pa.Table.from_pylist([EVENT], schema=LANDED), tmp_path / "whole.parquet")
    earlier = pa.Table.from_pylist([EVENT], schema=LANDED).drop_columns(list(new))
    pq.write_table(earlier, tmp_path / "earlier.parquet")
    whole, found = (taken_in(tmp_path, tmp_path / f"{name}.parquet") for name in ("whole", "earlier"))
    assert found.schema == RAW and found.equals(whole)
    [row] = found.to_pylist()
    assert (row["window"], row["landed_at"], row["batch_id"]) == ("2026-11-21T12", NOON, "batch")
    assert row["event_hash"] is not None


def test_a_row_of_another_batch_than_its_manifest_names_is_not_taken_in(tmp_path: Path) -> None:
    rows = [EVENT, EVENT | {"batch_id": "another", "commit_lsn": 8}]
    pq.write_table(pa.Table.from_pylist(rows, schema=LANDED), tmp_path / "two.parquet")
    assert taken_in(tmp_path, tmp_path / "two.parquet")["commit_lsn"].to_pylist() == [7]


def test_a_file_of_a_table_that_has_gained_a_column_since_has_null_there(tmp_path: Path) -> None:
    path = tmp_path / "part-0.parquet"
    pq.write_table(pa.table({"n": pa.array([1, 2], pa.int32())}), path)
    file = LakeFile("part-0.parquet", str(path), "w1", (("window", "w1"), ("of", None)), 2, 1)
    schema = pa.schema(
        [("window", pa.string()), ("of", pa.string()), ("n", pa.int64()), ("new", pa.string())]
    )
    assert rows_of([file], schema).to_pylist() == [
        {"window": "w1", "of": None, "n": number, "new": None} for number in (1, 2)
    ]


def file_of(rows: int, size: int = 100, name: str = "f") -> LakeFile:
    return LakeFile(name, name, "w1", (), rows, size)


def test_batches_are_cut_by_the_bytes_of_their_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "part-0.parquet"
    pq.write_table(pa.table({"t": ["x" * 1_000] * 5_000}), path)
    schema = pa.schema([("t", pa.string())])
    assert path.stat().st_size < 100_000
    assert [batch.num_rows for batch in batches_of(str(path), schema, {})] == [5_000]
    monkeypatch.setattr(file_rows, "BYTES_OF_A_BATCH", 1_500_000)
    assert [batch.num_rows for batch in batches_of(str(path), schema, {})] == [2_000, 2_000, 1_000]


def test_few_files_are_one_share_and_many_rows_are_several_in_their_order() -> None:
    assert in_shares([]) == []
    few = [file_of(5_000)] * 4
    assert in_shares(few) == [few]
    many = [file_of(90_000, name=str(number)) for number in range(10)]
    shares = in_shares(many)
    assert shares == [[file] for file in many]
    assert [len(share) for share in in_shares([file_of(10_000)] * 30)] == [7, 7, 7, 7, 2]
    assert len(in_shares([file_of(1, file_tasks.FEW_BYTES)] * 3)) == 3
    assert len(in_shares([file_of(1)] * 1000)) == 4


def test_events_that_are_small_on_disk_but_large_in_memory_are_not_folded_by_a_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contract = CONTRACT
    path = tmp_path / "part-0.parquet"
    rows = [
        EVENT | {"source_schema": contract.schema, "source_table": contract.table, "before": "x" * 50_000}
        for _ in range(100)
    ]
    # The text stands in the file once.
    pq.write_table(pa.Table.from_pylist(rows, schema=LANDED), path)
    place = (("window", "w1"), ("source_table", contract.table))
    file = LakeFile(path.name, str(path), "w1", place, 100, path.stat().st_size)
    fold_it = partial(fold, share=Share((file,)), contract=contract, order=order_of(contract))
    schema = arrow_schema(folded_type(contract), without=())
    assert fold_it(Output(tmp_path / "whole", 0, schema, ("window",))) is not None
    monkeypatch.setattr(file_rows, "MAX_BYTES_IN_MEMORY", 4_000_000)
    assert fold_it(Output(tmp_path / "none", 0, schema, ("window",))) is None


RULES = JudgingRules((CONTRACT,), load_decision_table(default_decision_table()), timedelta(hours=1))
"""Row rules of the contract, and every scenario as the decision table has it."""


def judged(
    tmp_path: Path, name: str, events: list[dict[str, object]], by: JudgingRules = RULES
) -> tuple[Path, Path, list[Path]]:
    """The raw file of ``events``, the accepted file that judging them leaves, and those of the quarantine."""
    known = {"window": "2026-11-21T12", "landed_at": NOON, "event_hash": 1}
    of_table = {"source_schema": CONTRACT.schema, "source_table": CONTRACT.table}
    rows = [EVENT | of_table | known | event for event in events]
    path = tmp_path / f"{name}.parquet"
    pq.write_table(pa.Table.from_pylist(rows, schema=RAW).drop_columns("window"), path)
    place = (("window", "2026-11-21T12"),)
    file = LakeFile(path.name, str(path), place[0][1], place, len(rows), path.stat().st_size)
    output = Output(tmp_path / f"of {name}", 0, RAW, ("window", "source_table"))
    assert Judged.parse(judge(output, [file], by)).taken.events == len(rows)
    output.close()
    [accepted] = (tmp_path / f"of {name}" / "rows").rglob("*.parquet")
    return path, accepted, list((tmp_path / f"of {name}" / "beside").rglob("*.parquet"))


def test_a_raw_file_whose_every_event_is_accepted_is_linked_and_any_other_is_written(tmp_path: Path) -> None:
    row = {"after": '{"lane":"1","id":"1","status":"open","note":null,"body":null}', "key": '["1","1"]'}
    events = [row | {"commit_lsn": 7}, row | {"commit_lsn": 8}]
    raw, accepted, withheld = judged(tmp_path, "whole", events)
    assert accepted.samefile(raw) and not withheld
    assert accepted.parent.name == f"source_table={CONTRACT.table}"
    raw, accepted, withheld = judged(tmp_path, "refused", [*events, row | {"commit_lsn": 9, "after": "{"}])
    assert not accepted.samefile(raw)
    assert pq.read_table(accepted, partitioning=None)["commit_lsn"].to_pylist() == [7, 8]
    assert withheld[0].parent.name == "reason=malformed_image"
    assert pq.read_table(withheld[0], partitioning=None)["commit_lsn"].to_pylist() == [9]


def test_a_raw_file_is_not_linked_if_a_delivered_line_names_an_erased_subject(tmp_path: Path) -> None:
    keys = SubjectKeys(tmp_path / "keys" / "subjects.sqlite")
    keys.make()
    keys.destroy(keys.ids_of([(CONTRACT.source, "person", "ada")]))
    of_person = replace(CONTRACT, subject=Subject("person", "note", encrypted=False))
    subjects = ErasedSubjects(CONTRACT.source, subject_tables([of_person]), keys.erased())
    by = replace(RULES, contracts=(of_person,), subjects=subjects)
    row = {"after": '{"lane":"1","id":"1","status":"open","note":"eve","body":null}', "key": '["1","1"]'}
    for who, gone in (("eve", False), ("ada", True)):
        line = json.dumps({"op": "u", "before": {"note": who, "body": who}})
        raw, accepted, _ = judged(tmp_path, who, [row | {"envelope": line}], by)
        assert accepted.samefile(raw) is not gone
        assert pq.read_table(accepted, partitioning=None)["envelope"].to_pylist() == [None if gone else line]


def test_a_table_without_a_contract_loses_its_rows_though_one_of_its_name_has_a_contract(
    tmp_path: Path,
) -> None:
    secret = (Column("id", "bigint", nullable=False), Column("ssn", "text", pii="drop", personal=True))
    people = replace(
        CONTRACT, name="people", table="people", key=("id",), columns=lake_columns(secret), unprotected=secret
    )
    by = replace(RULES, contracts=(CONTRACT, people))
    row = {"after": '{"lane":"1","id":"1","status":"open","note":null,"body":null}', "key": '["1","1"]'}
    raw, accepted, _ = judged(tmp_path, "own", [row], by)
    assert accepted.samefile(raw), "no policy is about it"
    raw, accepted, _ = judged(tmp_path, "other", [row | {"source_schema": "archive"}], by)
    [found] = pq.read_table(accepted, partitioning=None).to_pylist()
    assert (found["source_schema"], found["key"], found["after"]) == ("archive", row["key"], None)
    # In one file with rows of the other too.
    both = [row, row | {"source_schema": "archive", "commit_lsn": 8}]
    _, accepted, _ = judged(tmp_path, "both", both, by)
    assert pq.read_table(accepted, partitioning=None)["after"].to_pylist() == [row["after"], None]


def test_no_event_is_judged_twice_where_a_later_one_is_refused_and_the_file_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"after": '{"lane":"1","id":"1","status":"open","note":null,"body":null}', "key": '["1","1"]'}
    of_table = {"source_schema": CONTRACT.schema, "source_table": CONTRACT.table, "landed_at": NOON}
    rows = [EVENT | row | of_table | {"commit_lsn": lsn, "event_hash": lsn} for lsn in range(60)]
    for lsn in (23, 24, 41):
        rows[lsn] |= {"after": "{"}
    path, window = tmp_path / "events.parquet", "2026-11-21T1200"
    pq.write_table(pa.Table.from_pylist(rows, schema=RAW).drop_columns("window"), path, row_group_size=5)
    file = LakeFile(path.name, str(path), window, (("window", window),), len(rows), path.stat().st_size)
    unwrapped, seen = event_tasks.judge_unprotected, []

    def counted(batches, *arguments, **named):  # type: ignore[no-untyped-def]
        seen.extend(lsn for batch in batches for lsn in batch.column("commit_lsn").to_pylist())
        return unwrapped(batches, *arguments, **named)

    monkeypatch.setattr(event_tasks, "judge_unprotected", counted)
    # Of what is looked at first, and of what is written, other rows come together.
    monkeypatch.setattr(file_rows, "BYTES_OF_A_BATCH", 2_000)
    output = Output(tmp_path / "of events", 0, RAW, ("window", "source_table"))
    told = Judged.parse(judge(output, [file], RULES))
    output.close()
    assert sorted(seen) == list(range(60))
    assert told.taken.events == 60
    assert told.groups == {Group(window, QUARANTINED, "malformed_image", "envelope", False): 3}
    [accepted] = (tmp_path / "of events" / "rows").rglob("*.parquet")
    [withheld] = (tmp_path / "of events" / "beside").rglob("*.parquet")
    found = pq.read_table(accepted, partitioning=None)
    whole = pa.Table.from_pylist(rows, schema=RAW).select(found.column_names)
    stays = [number for number in range(60) if number not in (23, 24, 41)]
    assert found.equals(whole.take(pa.array(stays)))
    assert pq.read_table(withheld, partitioning=None)["commit_lsn"].to_pylist() == [23, 24, 41]


def test_a_task_counts_what_it_refuses_and_writes_no_copy(tmp_path: Path) -> None:
    row = {"after": '{"lane":"1","id":"1","status":"open","note":null,"body":null}', "key": '["1","1"]'}
    of_table = {"source_schema": CONTRACT.schema, "source_table": CONTRACT.table, "landed_at": NOON}
    rows = [EVENT | row | of_table | {"commit_lsn": lsn // 2, "event_hash": lsn // 2} for lsn in range(200)]
    rows[0] |= {"watermark_before": NOON + timedelta(days=1)}
    rows += [EVENT | row | of_table | {"commit_lsn": 300, "after": "{"}]
    path, marks = tmp_path / "events.parquet", tmp_path / "marks.parquet"
    pq.write_table(pa.Table.from_pylist(rows, schema=RAW).drop_columns("window"), path)
    copies = [{"file": 0, "row": number, "copy": 2, "collision": False} for number in range(1, 200, 2)]
    schema = pa.schema(
        [("file", pa.int32()), ("row", pa.int64()), ("copy", pa.int32()), ("collision", pa.bool_())]
    )
    pq.write_table(pa.Table.from_pylist(copies, schema=schema), marks)
    window = "2026-11-21T1200"
    file = LakeFile(path.name, str(path), window, (("window", window),), len(rows), path.stat().st_size)
    output = Output(tmp_path / "of events", 0, RAW, ("window", "source_table"))
    told = Judged.parse(judge(output, [file], RULES, Copies((str(marks),), {file.uri: 0})))
    output.close()
    # The late event and the refused one go one by one, no copy does.
    assert (told.taken.events, told.taken.exactly) == (201, 2)
    assert told.groups == {
        Group(window, DUPLICATE, "duplicate_position", "dedupe_key", False): 100,
        Group(window, QUARANTINED, "malformed_image", "envelope", False): 1,
        Group(window, ACCEPTED, None, None, True): 1,
    }
    written = {
        name: sorted(
            lsn
            for each in (tmp_path / "of events" / name).rglob("*.parquet")
            for lsn in pq.read_table(each, partitioning=None)["commit_lsn"].to_pylist()
        )
        for name in ("rows", "beside")
    }
    assert written == {"rows": list(range(100)), "beside": [300]}


def test_an_identity_of_an_earlier_version_is_written_as_it_would_land_today(tmp_path: Path) -> None:
    row = {"after": '{"lane":"1","id":"1","status":"open","note":null,"body":null}', "key": '["1","1"]'}
    earlier = '["s","t",null,"t","0123456789abcdef"]'
    raw, accepted, _ = judged(tmp_path, "earlier", [row | {"identity": earlier}])
    assert not accepted.samefile(raw)
    assert pq.read_table(accepted, partitioning=None)["identity"].to_pylist() == ['["s","t",null,"t"]']


def test_a_rejected_batch_is_withheld_whole_whichever_task_has_its_files(tmp_path: Path) -> None:
    columns = tuple(
        replace(each, enum=("open",), policies=Policies((("enum", "reject_batch"),)))
        if each.name == "status"
        else each
        for each in CONTRACT.columns
    )
    judging_rules = replace(RULES, contracts=(replace(CONTRACT, columns=columns),))
    known = {"window": "2026-11-21T12", "landed_at": NOON, "event_hash": 1}
    of_table = {"source_schema": CONTRACT.schema, "source_table": CONTRACT.table}
    files = []
    for number, (batch, status) in enumerate([("a", "open"), ("a", "lost"), ("b", "open")]):
        row = {"after": json.dumps({"lane": "1", "id": "1", "status": status, "note": None, "body": None})}
        event = EVENT | of_table | known | row | {"key": '["1","1"]', "batch_id": batch, "commit_lsn": number}
        path = tmp_path / f"{number}.parquet"
        pq.write_table(pa.Table.from_pylist([event], schema=RAW).drop_columns("window"), path)
        place = (("window", "2026-11-21T12"),)
        files.append(LakeFile(path.name, str(path), place[0][1], place, 1, path.stat().st_size))

    def judged_by(by: JudgingRules, name: str) -> tuple[Judged, list[int], dict[int, str]]:
        """What a task for each file says, which events were accepted, and why others were not."""
        told, accepted, beside = Judged(), [], {}
        for number, file in enumerate(files):
            folder = tmp_path / f"{name} {number}"
            output = Output(folder, number, RAW, ("window", "source_table"))
            told += Judged.parse(judge(output, [file], by))
            output.close()
            for each in (folder / "rows").rglob("*.parquet"):
                accepted += pq.read_table(each, partitioning=None)["commit_lsn"].to_pylist()
            for each in (folder / "beside").rglob("*.parquet"):
                place = dict(part.split("=") for part in each.relative_to(folder).parts if "=" in part)
                rows = pq.read_table(each, partitioning=None)
                beside |= dict.fromkeys(rows["commit_lsn"].to_pylist(), place["reason"])
        return told, accepted, beside

    first, accepted, beside = judged_by(judging_rules, "first")
    assert (accepted, beside) == ([0, 2], {1: "row_rule"})
    place = ("2026-11-21T12", CONTRACT.schema, CONTRACT.table, "a")
    assert first.broken.rejected == {place: ("status:enum",)}
    again, accepted, beside = judged_by(replace(judging_rules, rejected=first.broken.rejected), "again")
    assert (accepted, beside) == ([2], {0: "batch_rejected", 1: "row_rule"})
    assert again.broken.counts == first.broken.counts


def test_a_worker_of_spark_imports_no_settings() -> None:
    """A worker needs what it is sent; pydantic and asyncio would cost each one a third of a second."""
    tasks = [event_tasks, fold_tasks, event_copies, update_tasks]
    code = f"import sys, {', '.join(each.__name__ for each in tasks)}; print(*sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not {"omnisupport_ingest.settings", "pydantic", "asyncio"} & set(told.split())
    assert f"{PREFIX}PII_KEYS" == SETTING
