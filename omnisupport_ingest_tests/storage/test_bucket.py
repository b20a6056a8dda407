"""The promises of storage, on an S3 server: one writer wins, an answer may be lost, copies may be."""

from __future__ import annotations

import os
import resource
import socket
import threading
import traceback
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import obstore
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, QueryBuilder
from deltalake.exceptions import CommitFailedError, DeltaError

from omnisupport_ingest.bucket.records import Records
from omnisupport_ingest.bucket.storage import BucketStorage
from omnisupport_ingest.cdc.envelope import RAW_TYPE
from omnisupport_ingest.home import Home
from omnisupport_ingest.lake.commit import CommitConflict, commit_actions
from omnisupport_ingest.lake.delta import open_delta
from omnisupport_ingest.lake.file_tasks import Output
from omnisupport_ingest.lake.layout import WHOLE_TABLE, LakeFile
from omnisupport_ingest.lake.ledger import Ledger
from omnisupport_ingest.lake.log_files import LogUnreadable, files_in_log
from omnisupport_ingest.lake.schema import arrow_schema
from omnisupport_ingest.lake.snapshot import TableSnapshot
from omnisupport_ingest.lake.sweep import sweep, sweep_replaced
from omnisupport_ingest.lake.table import LakeTable
from omnisupport_ingest.landing.errors import DamagedBatch
from omnisupport_ingest.landing.lost_changes import LostChanges
from omnisupport_ingest.landing.schema_changes import Difference, Look, SchemaChanges, SeenTable
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.layers.events.event_tasks import LandedFile, take_in
from omnisupport_ingest.layers.ledgers import retention_ledger
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.sources.postgres.capture.parked import ParkedTables
from omnisupport_ingest.sources.postgres.catalog.partitions import KnownPartitions, PartitionRecords
from omnisupport_ingest.sources.postgres.catalog.published import (
    Published,
    PublishedTables,
    RecordedTable,
)
from omnisupport_ingest.storage import (
    StorageRefused,
    StorageUnreachable,
    at_hand,
    forget_home,
    has_landed,
    landed_sources,
    open_storage,
    parse_storage,
    put_back,
    storage_of,
    take_away,
)
from omnisupport_ingest.windows import WindowSize
from omnisupport_ingest.withdrawal import Data, _data, drop_data
from omnisupport_ingest_tests.cli.command import command, environment
from omnisupport_ingest_tests.lake.tables import unpartitioned
from omnisupport_ingest_tests.lake.test_marked_files import (
    ROWS,
    by_ours,
    first_files,
    marked_table,
    placed,
    put,
)
from omnisupport_ingest_tests.landing.batches import land
from omnisupport_ingest_tests.storage.faulty_proxy import (
    BUSY,
    CONFLICT,
    CUT,
    LOST,
    REFUSED,
    SLOW,
    FaultyProxy,
    faulty_proxy,
)
from omnisupport_ingest_tests.storage.s3_server import S3Server

HOURLY = WindowSize.parse("hourly")


def bucket(home: Path, s3: S3Server, place: str | None = None) -> BucketStorage:
    storage = open_storage(home, place or s3.place())
    assert isinstance(storage, BucketStorage)
    return storage


def landing_of(home: Path, place: str) -> LandingStore:
    return LandingStore(Home.open(home, HOURLY, storage=place).landing, "shop")


def ledger_row(ledger: Ledger) -> pa.Table:
    """A row of NULLs."""
    schema = arrow_schema(ledger.spec.schema, without=("sequence",))
    return pa.table([pa.nulls(1, each.type) for each in schema], schema=schema)


@pytest.fixture
def proxy(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> FaultyProxy:
    with faulty_proxy(s3.port) as between:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{between.port}")
        yield between


def test_of_two_who_create_one_object_one_does_and_the_other_has_its_content(
    s3: S3Server, tmp_path: Path
) -> None:
    place = s3.place()
    homes = [bucket(tmp_path / name, s3, place) for name in ("a", "b")]
    won: list[bool] = []
    threads = [
        threading.Thread(
            target=lambda at=number: won.append(
                homes[at % 2].create(tmp_path / "ab"[at % 2] / "landing/s/epochs/000001.json", b"%d" % at)
            )
        )
        for number in range(8)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert sorted(won) == [False] * 7 + [True]
    copies = {(tmp_path / name / "landing/s/epochs/000001.json").read_bytes() for name in "ab"}
    assert len(copies) == 1


def test_a_put_whose_answer_was_lost_is_known_to_be_ours(
    proxy: FaultyProxy, s3: S3Server, tmp_path: Path
) -> None:
    storage, path = bucket(tmp_path, s3), tmp_path / "landing/s/manifests/m.json"
    proxy.plan.append(LOST)
    assert storage.create(path, b"mine")
    assert not storage.create(path, b"another")
    assert path.read_bytes() == b"mine"
    assert len([each for each in proxy.requests if each.startswith("PUT")]) == 3


def test_a_put_that_met_another_is_tried_again(proxy: FaultyProxy, s3: S3Server, tmp_path: Path) -> None:
    storage, path = bucket(tmp_path, s3), tmp_path / "landing/s/manifests/m.json"
    proxy.plan.extend([CONFLICT] * 3)
    assert storage.create(path, b"mine")
    assert not proxy.plan
    proxy.plan.extend([CONFLICT] * 3)
    assert storage.first(tmp_path / "home.json", b"marker") == b"marker"
    proxy.plan.extend([CONFLICT] * 3)
    storage.update(path, lambda content: (content or b"") + b" now")
    assert storage.read(path) == b"mine now"


def test_a_cause_that_delta_rs_wraps_is_named(s3: S3Server, tmp_path: Path) -> None:
    wrapped = (
        "Generic S3 error\n   \x1b[31m↳\x1b[0m Error performing PUT http://key@host/x in 4 ms - "
        "Server returned non-2xx status code\n    \x1b[31m↳\x1b[0m 403 Forbidden\n     \x1b[31m↳\x1b[0m "
        "<Error>key</Error>\n"
    )
    named = str(bucket(tmp_path, s3).unreachable(OSError(wrapped)))
    assert "did not do what was asked: 403 Forbidden." in named
    assert "key" not in named


def test_a_copy_that_is_asked_for_outlives_a_sweep_and_a_download_that_was_cut_off_does_not(
    s3: S3Server, tmp_path: Path
) -> None:
    store = landing_of(tmp_path, s3.place())
    store.begin_epoch("the first", None)
    read, unread = ((land(store, start, start + 10)).files[0] for start in (10, 20))
    copies = [store.path_of(each) for each in (read, unread)]
    cut_off = copies[0].with_name(f".x.parquet.{'0' * 32}")
    cut_off.write_bytes(b"half")
    for each in (*copies, cut_off, *(copy.parent for copy in copies)):
        os.utime(each, (1, 1))
    # A file system that notes no reads: only asking for the copy shows it.
    copy = store.path_of(read)
    assert store.sweep(timedelta(days=1)) == []
    assert [each.exists() for each in (copy, copies[1], cut_off)] == [True, False, False]


@pytest.mark.parametrize("fault", [BUSY, CUT, LOST, SLOW])
def test_an_upload_that_fails_in_between_is_whole_at_last(
    proxy: FaultyProxy, s3: S3Server, tmp_path: Path, fault: str
) -> None:
    storage, path = bucket(tmp_path, s3), tmp_path / "landing/s/data/b/f.parquet"
    path.parent.mkdir(parents=True)
    path.write_bytes(os.urandom(12_000_000))
    proxy.plan.extend([fault, fault])
    storage.upload([path])
    assert storage.digest(path)[0] == 12_000_000
    copy = path.read_bytes()
    path.unlink()
    assert storage.at_hand(path).read_bytes() == copy


def test_a_bucket_that_is_not_there_is_an_error_and_no_file_is_made(s3: S3Server, tmp_path: Path) -> None:
    storage = bucket(tmp_path, s3, "s3://no-such-bucket-here/x")
    path = tmp_path / "landing/s/epochs/000001.json"
    with pytest.raises(StorageUnreachable, match="404"):
        storage.create(path, b"x")
    assert not path.exists()


def test_what_a_store_that_refuses_repeats_of_the_request_is_in_no_message(
    proxy: FaultyProxy, s3: S3Server, tmp_path: Path
) -> None:
    storage, path = bucket(tmp_path, s3), tmp_path / "landing/s/epochs/000001.json"
    proxy.plan.append(REFUSED)
    with pytest.raises(StorageUnreachable, match="403") as refused:
        storage.create(path, b"x")
    # What the library says holds it, so this can fail.
    assert s3.variables["AWS_ACCESS_KEY_ID"] in str(refused.value.__context__)
    told = "".join(traceback.format_exception(refused.value)) + str(refused.value) + repr(refused.value)
    assert s3.variables["AWS_ACCESS_KEY_ID"] not in told
    assert "Signature" not in told
    assert not path.exists()


def test_a_table_that_cannot_be_asked_is_neither_missing_nor_damaged(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home.open(tmp_path / "home", HOURLY, storage=s3.place())
    ledger = retention_ledger(home.lake, "shop")
    row = ledger_row(ledger)
    ledger.append(lambda _held: row)
    table = LakeTable(home.lake, ledger.spec)
    with socket.socket() as closed:
        # Nobody listens there.
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{closed.getsockname()[1]}")
        for look in (lambda: table.exists, table.open, ledger.entries, lambda: ledger.append(lambda _: row)):
            with pytest.raises(StorageUnreachable) as away:
                look()
            assert "127.0.0.1" not in str(away.value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.variables["AWS_ENDPOINT_URL"])
    assert ledger.entries().num_rows == 1


def test_a_hard_link_is_copied_by_the_store_itself(proxy: FaultyProxy, s3: S3Server, tmp_path: Path) -> None:
    storage = bucket(tmp_path, s3)
    landed, raw = tmp_path / "landing/s/data/b/f.parquet", tmp_path / "lake/s/raw/g/part.parquet"
    for each in (landed, raw):
        each.parent.mkdir(parents=True)
    landed.write_bytes(os.urandom(3_000_000))
    storage.upload([landed])
    raw.hardlink_to(landed)
    sent = len(proxy.requests)
    storage.upload([raw])
    storage.upload([raw])
    assert proxy.requests[sent:] == ["PUT 0", "HEAD 0", "HEAD 0"]
    assert storage.digest(raw) == storage.digest(landed)


def test_records_that_another_home_lands_are_brought_and_few_requests_are_made(
    proxy: FaultyProxy, s3: S3Server, tmp_path: Path
) -> None:
    place = s3.place()
    first = Home.open(tmp_path / "first", HOURLY, storage=place)
    store = LandingStore(first.landing, "shop")
    store.begin_epoch("the first", None)
    second = Home.open(tmp_path / "second", HOURLY, storage=place)
    assert second.grid == first.grid
    other = LandingStore(second.landing, "shop")
    assert [each.reason for each in other.epochs()] == ["the first"]
    seen = len(proxy.requests)
    for _ in range(50):
        other.landed()
    assert len(proxy.requests) == seen
    store.begin_epoch("the second", None)
    other.look_again()
    assert [each.reason for each in other.epochs()] == ["the first", "the second"]


def test_tasks_take_in_a_batch_that_another_machine_landed(s3: S3Server, tmp_path: Path) -> None:
    place = s3.place()
    ours, other = (landing_of(tmp_path / name, place) for name in ("ours", "other"))
    ours.begin_epoch("the first", None)
    land(ours, 10, 20)
    [batch] = other.manifests()
    [file] = batch.files
    arrival = {
        "batch_id": batch.batch_id,
        "window": file.window,
        "landed_at": batch.arrival.landed_at,
        "watermark_before": None,
        "newest_epoch_before": None,
        "file_name": None,
    }
    # As a task has it: no process here has had the file at hand.
    assert not (other.folder / file.path).exists()
    output = Output(tmp_path / "draft", 0, arrow_schema(RAW_TYPE, without=()), ("window",))
    assert take_in(output, [LandedFile(other.folder, file, arrival)]) == ""
    output.close()
    [written] = (tmp_path / "draft" / "rows").rglob("*.parquet")
    assert pq.read_metadata(written).num_rows == file.rows


def test_a_batch_takes_two_puts_and_two_looks_however_many_there_are(
    proxy: FaultyProxy, s3: S3Server, tmp_path: Path
) -> None:
    store = landing_of(tmp_path, s3.place())
    store.begin_epoch("the first", None)
    made = []
    for start in range(10, 100, 10):
        before = len(proxy.requests)
        land(store, start, start + 10)
        made.append([each.split()[0] for each in proxy.requests[before:]])
    assert made == [["HEAD", "PUT", "HEAD", "PUT"]] * 9


@pytest.mark.parametrize("fault", [BUSY, LOST, SLOW])
def test_what_is_read_of_a_store_that_answers_badly_is_whole(
    proxy: FaultyProxy, s3: S3Server, tmp_path: Path, fault: str
) -> None:
    place = s3.place()
    store = landing_of(tmp_path / "first", place)
    store.begin_epoch("the first", None)
    land(store, 10, 20)
    proxy.method = "GET"
    proxy.plan.extend([fault] * 4)
    other = landing_of(tmp_path / "second", place)
    [batch] = other.landed().batches
    assert not proxy.plan
    proxy.plan.append(fault)
    other.verify(batch)
    assert not proxy.plan


def test_a_batch_that_a_list_leaves_out_is_a_gap_and_no_loss(
    proxy: FaultyProxy, s3: S3Server, tmp_path: Path
) -> None:
    place = s3.place()
    ours, other = (landing_of(tmp_path / name, place) for name in ("ours", "other"))
    ours.begin_epoch("the first", None)
    first, second, third = [land(ours, start, start + 10) for start in (10, 20, 30)]
    proxy.unlisted = {f"{second.batch_id}.json".encode()}
    other.look_again()
    taken = other.landed()
    assert [each.batch_id for each in taken.batches] == [first.batch_id]
    assert taken.gap is not None
    # Whether data belongs to a batch is asked of the batch, not of a list.
    assert other.sweep(timedelta(seconds=-5)) == []
    proxy.unlisted = set()
    other.look_again()
    assert [each.batch_id for each in other.landed().batches] == [
        each.batch_id for each in (first, second, third)
    ]
    for each in other.manifests():
        other.verify(each)


def test_a_record_is_computed_from_what_the_store_has_and_overwrites_no_other(
    proxy: FaultyProxy, s3: S3Server, tmp_path: Path
) -> None:
    place = s3.place()
    ours, other = (landing_of(tmp_path / name, place).folder for name in ("ours", "other"))
    # Each has a copy of a time before the other wrote.
    LostChanges(ours, 1).add("orders", "unpublished", Lsn(5))
    LostChanges(other, 1).add("lines", "partition dropped", Lsn(6))
    LostChanges(ours, 1).was_mended("orders", Lsn(7))
    LostChanges(ours, 1).add("notes", "unpublished", Lsn(8))
    stretches = [each.table for each in LostChanges(ours, 1).all()]
    assert stretches == ["orders", "lines", "notes"]
    ParkedTables(ours, 1).park({"orders": "first"})
    ParkedTables(other, 1).park({"lines": "second"})
    ParkedTables(ours, 1).take_back(["orders"])
    assert [*ParkedTables(ours, 1).all()] == ["lines"]
    # What another machine has parked already is known here at once, and what it took back is gone.
    ParkedTables(other, 1).park({"notes": "third"})
    ParkedTables(ours, 1).park({"notes": "fourth"})
    assert {name: each.reason for name, each in ParkedTables(ours, 1).all().items()} == {
        "lines": "second",
        "notes": "third",
    }
    ParkedTables(ours, 1).take_back(["lines", "notes"])
    ParkedTables(other, 1).take_back(["notes"])
    assert ParkedTables(other, 1).all() == {}
    ParkedTables(ours, 1).park({"rows": "fifth"})
    ParkedTables(other, 1).take_back(["rows"])
    assert storage_of(ours / "manifests").read(ours / "parked-e000001.json").count(b"fifth") == 0
    LostChanges(other, 1).will_be_read("notes", Lsn(9))
    LostChanges(ours, 1).will_be_read("notes", Lsn(10))
    assert LostChanges(ours, 1).all() == LostChanges(other, 1).all()
    at = {name: KnownPartitions({}, Lsn(number)) for name, number in (("old", 5), ("new", 9))}
    for folder, name in ((ours, "new"), (other, "old")):
        PartitionRecords(folder, 1).write("orders", at[name])
    storage = storage_of(ours / "manifests")
    assert b"0/9" in storage.read(ours / "partitions-orders.json")

    changes = [SchemaChanges(folder) for folder in (ours, other)]
    look, table = Look(1, Lsn(5), Lsn(6)), SeenTable(1, "public.orders", (), (), None)
    gone = {"orders": (Difference("table_gone", None, None, None),)}
    changes[0].seen(look, {"orders": table}, {})
    assert [each.held().changes for each in changes] == [(), ()]
    [first] = changes[0].seen(look, {}, gone)
    [second] = changes[1].seen(look, {"lines": table}, {"lines": gone["orders"]})
    changes[0].accept(["orders", "lines"])
    assert (first.number, second.number) == (1, 2)
    assert SchemaChanges(ours).read().accepted == {"orders": 2, "lines": 2}
    # What both saw is recorded once.
    wider = replace(table, key=("id",))
    key = {"orders": (Difference("key_changed", None, None, None),)}
    assert len(changes[0].seen(look, {"orders": wider}, key)) == 1
    assert changes[1].seen(look, {"orders": wider}, key) == ()
    assert [*SchemaChanges(ours).read().tables] == ["orders", "lines"]

    published = [PublishedTables(folder, 1, "p", (), tuple) for folder in (ours, other)]
    early, late = (RecordedTable("public.orders", 1, f"at {at}", Lsn(at), None) for at in (5, 9))
    published[0]._write(Published(1, "1.1", {"orders": late}))
    published[1]._write(Published(1, "1.1", {"orders": early, "lines": early}))
    assert PublishedTables(other, 1, "p", (), tuple)._record == Published(
        1, "1.1", {"orders": late, "lines": early}
    )

    # Of two who change it at once both do, also if the answer to one is lost.
    path, tried = ours / "parked-e000002.json", []

    def change(content: bytes | None) -> bytes:
        tried.append(content)
        if len(tried) == 1:
            storage.replace(path, b"theirs")
            proxy.method = "PUT"
            proxy.plan.append(LOST)
        return (content or b"") + b" ours"

    storage.update(path, change)
    assert tried == [None, b"theirs"]
    path.write_bytes(b"an old copy")
    storage.update(path, lambda _: None)
    assert path.read_bytes() == b"theirs ours"
    storage.update(ours / "parked-e000003.json", lambda _: None)
    assert not (ours / "parked-e000003.json").exists()
    assert storage.read(path) == path.read_bytes() == b"theirs ours"


def test_what_another_machine_dropped_and_began_again_is_forgotten(s3: S3Server, tmp_path: Path) -> None:
    place = s3.place()
    ours, other = (landing_of(tmp_path / name, place) for name in ("ours", "other"))
    ours.begin_epoch("the first", None)
    dropped = [land(ours, start, start + 10) for start in (10, 20)]
    other.look_again()
    copies = [other.path_of(file) for batch in other.manifests() for file in batch.files]
    assert len(copies) == 2
    storage_of(ours.folder / "data").remove_folder(ours.folder)
    other.look_again()
    assert (other.landed().count, other.epochs(), other.names_on_disk()) == (0, (), [])
    assert not any(copy.exists() for copy in copies)

    ours = landing_of(tmp_path / "third", place)
    ours.begin_epoch("again", None)
    again = land(ours, 10, 20)
    assert again.batch_id == dropped[0].batch_id
    other.look_again()
    assert [each.reason for each in other.epochs()] == ["again"]
    assert other.manifests() == [again]
    other.verify(again)
    # What is dropped and landed again between two looks has the same names and other content.
    storage_of(ours.folder / "data").remove_folder(ours.folder)
    ours = landing_of(tmp_path / "fourth", place)
    ours.begin_epoch("once more", None)
    once_more = land(ours, 10, 20)
    other.look_again()
    assert [each.reason for each in other.epochs()] == ["once more"]
    assert other.manifests() == [once_more]


def test_a_record_that_a_list_leaves_out_or_that_is_put_meanwhile_stays(
    proxy: FaultyProxy, s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = landing_of(tmp_path, s3.place())
    store.begin_epoch("the first", None)
    first = land(store, 10, 20)
    proxy.unlisted = {f"{first.batch_id}.json".encode()}
    store.look_again()
    assert store.batch_ids() == [first.batch_id]
    proxy.unlisted = set()
    listed = Records._listed

    def landing_meanwhile(of: Records, folder: Path) -> list[Any]:
        found = list(listed(of, folder))
        patch.undo()
        of._storage.create(folder / "epochs" / "000002.json", b"{}")
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Records, "_listed", landing_meanwhile)
        store.look_again()
    assert (store.folder / "epochs" / "000002.json").exists()


def test_the_data_of_a_failed_attempt_goes_although_the_batch_landed_later(
    s3: S3Server, tmp_path: Path
) -> None:
    store = landing_of(tmp_path, s3.place())
    store.begin_epoch("the first", None)
    batch, unreadable = land(store, 10, 20), land(store, 20, 30)
    strays = [store.data_folder(each.batch_id) / "0123-stray.parquet" for each in (batch, unreadable)]
    storage = storage_of(store.folder / "data")
    for stray in strays:
        storage.create(stray, b"of a killed writer")
    manifest = store.folder / "manifests" / f"{unreadable.batch_id}.json"
    storage.replace(manifest, b"{}")
    assert store.sweep(timedelta(seconds=-5)) == [batch.batch_id]
    # What an unreadable manifest may name stays.
    assert [storage.size(each) for each in strays] == [None, len(b"of a killed writer")]
    for file in (*batch.files, *unreadable.files):
        assert storage.size(store.folder / file.path)


def test_a_source_that_another_machine_began_to_land_later_has_landed(s3: S3Server, tmp_path: Path) -> None:
    place = s3.place()
    ours, other = (Home.open(tmp_path / name, HOURLY, storage=place) for name in ("ours", "other"))
    assert not has_landed(other.path, "shop")
    assert landed_sources(other.path) == []
    land(LandingStore(ours.landing, "shop"), 10, 20)
    for home in (ours, other):
        assert has_landed(home.path, "shop")
        assert not has_landed(home.path, "sho")
        assert landed_sources(home.path) == ["shop"]
    assert not (other.landing / "shop").exists()
    with environment(home=str(other.path)):
        assert "1 batch, 1 file" in command("landing", "verify").out
        assert command("landing", "list", "--source", "shop").code == 0
        none = command("landing", "list", "--source", "elsewhere")
    assert (none.code, "there is: shop" in none.err) == (1, True)


def test_what_a_message_says_mends_a_damaged_batch_and_takes_one_away(s3: S3Server, tmp_path: Path) -> None:
    place = s3.place()
    ours, other = (landing_of(tmp_path / name, place) for name in ("ours", "other"))
    ours.begin_epoch("the first", None)
    batch, last = land(ours, 10, 20), land(ours, 20, 30)
    other.look_again()
    file = ours.folder / batch.files[0].path
    backup, storage = file.read_bytes(), storage_of(file)
    storage.unlink(file)
    with pytest.raises(DamagedBatch) as damaged:
        ours.verify(batch)
    uri = f"{place}/landing/shop/{batch.files[0].path}"
    assert f"Put {uri} back from a backup of the bucket" in damaged.value.fix
    away = f"move {place}/landing/shop/manifests/{batch.batch_id}.json out of the prefix"
    assert f"stop what runs on every machine, {away}" in damaged.value.fix
    # With the clients of the provider, which know no copies.
    client = cast(BucketStorage, storage).objects.store
    obstore.put(client, storage_of(file).table_uri(file).removeprefix(f"{place}/"), backup)
    ours.verify(batch)
    obstore.delete(client, f"landing/shop/manifests/{last.batch_id}.json")
    for store in (ours, other):
        store.look_again()
        assert store.batch_ids() == [batch.batch_id]
    assert put_back(Path("/a/landing/x"), "Restore it.") == "Restore it."
    assert take_away(Path("/a/landing/x"), "remove it") == "remove it"
    table = marked_table(Home.open(tmp_path / "ours", HOURLY).lake)
    first_files(table)
    storage.unlink(table.folder / "_delta_log" / f"{0:020d}.json")
    with pytest.raises(LogUnreadable) as unreadable:
        files_in_log(table.folder, table.open().version)
    assert f"Put {place}/lake/desk/dimension back" in unreadable.value.fix


def test_a_home_keeps_to_its_storage(s3: S3Server, tmp_path: Path) -> None:
    place = s3.place()
    Home.open(tmp_path / "there", HOURLY, storage=place)
    Home.open(tmp_path / "there", HOURLY)
    assert not storage_of(tmp_path / "there/landing/x").is_local
    assert storage_of(tmp_path / "there/landing/x/index/i").is_local
    assert storage_of(tmp_path / "there/logs/x").is_local
    Home.open(tmp_path / "here", HOURLY)
    assert storage_of(tmp_path / "here/lake/x").is_local
    for home, asked in (("here", place), ("there", s3.place())):
        with pytest.raises(StorageRefused, match="OMNISUPPORT_STORAGE is s3://"):
            Home.open(tmp_path / home, HOURLY, storage=asked)


@pytest.mark.parametrize(
    "url",
    ["", "/a/folder", "file:///a/folder", "s3://", "s3://key:secret@bucket/x", "s3://bucket/x?token=secret",
     "s3://bucket/a//b", "s3://bucket/../b", "http://bucket/x", "S3 bucket"],
)  # fmt: skip
def test_a_place_that_is_none_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(StorageRefused) as refused:
        parse_storage(url)
    assert "secret" not in str(refused.value)


def test_a_place_without_a_secret_is_shown() -> None:
    with pytest.raises(StorageRefused, match=r"^'x' is no URL for landing and lake"):
        parse_storage("x")


def test_a_copy_that_is_lost_is_brought_again_and_what_is_missing_stays_missing(
    s3: S3Server, tmp_path: Path
) -> None:
    home = Home.open(tmp_path / "home", HOURLY, storage=s3.place())
    LandingStore(home.landing, "shop").begin_epoch("first", None)
    record = home.landing / "shop/epochs/000001.json"
    content = record.read_bytes()
    record.unlink()
    assert at_hand(record).read_bytes() == content
    assert not at_hand(home.landing / "shop/epochs/000009.json").exists()


def test_a_forked_process_says_so_instead_of_waiting_for_ever(s3: S3Server, tmp_path: Path) -> None:
    storage = bucket(tmp_path, s3)
    assert storage.version(tmp_path / "landing/x") is None
    child = os.fork()
    if child == 0:
        try:
            storage.version(tmp_path / "landing/x")
        except RuntimeError:
            os._exit(3)
        os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3


def test_a_commit_of_another_machine_is_seen_by_tables_that_are_open(s3: S3Server, tmp_path: Path) -> None:
    place = s3.place()
    ours, other = (Home.open(tmp_path / name, HOURLY, storage=place) for name in ("ours", "other"))
    ledger = retention_ledger(other.lake, "shop")
    ledger.append(lambda _held: ledger_row(ledger))
    table = LakeTable(ours.lake, ledger.spec)
    held = table.open()
    mark = held.mark
    assert mark is not None
    assert table.opened() is not None
    assert held.is_newest()
    ledger.append(lambda _held: ledger_row(ledger))
    assert table.opened() is None
    assert not held.is_newest()
    assert table.open().version == held.version + 1

    # The table goes back in the bucket, and another way from there.
    log = other.lake / ledger.spec.path / "_delta_log"
    for number in (held.version, held.version + 1):
        storage_of(log).unlink(log / f"{number:020d}.json")
    ledger.append(lambda _held: ledger_row(ledger))
    again = table.open()
    assert again.version == held.version
    assert again.windows_since(mark) is None


def test_a_marker_that_cannot_be_opened_just_now_does_not_make_a_home_of_folders(
    s3: S3Server, tmp_path: Path
) -> None:
    home = Home.open(tmp_path / "home", HOURLY, storage=s3.place())
    forget_home(home.path)
    # No number that another thread frees meanwhile is below the limit.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, most[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            storage_of(home.lake / "x")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, most)
    assert not storage_of(home.lake / "x").is_local


def linked_draft(table: LakeTable) -> Path:
    """A draft of a running writer that takes over a file of another table, as judging does."""
    [file] = [Path(each.uri) for each in table.open().all_files()]
    draft = table.folder / ".staging" / "running" / "rows" / "part-00000.parquet"
    draft.parent.mkdir(parents=True)
    draft.hardlink_to(file)
    return draft


def test_a_running_writers_link_to_a_file_of_the_bucket_is_no_copy(s3: S3Server, tmp_path: Path) -> None:
    home = Home.open(tmp_path / "home", HOURLY, storage=s3.place())
    ledger = retention_ledger(home.lake, "shop")
    row = ledger_row(ledger)
    ledger.append(lambda _held: row)
    table = LakeTable(home.lake, ledger.spec)
    draft = linked_draft(table)
    stray = table.folder / "g0001-0123456789abcdef" / "source_table=a b%20c" / "part-0.parquet"
    storage_of(stray).create(stray, draft.read_bytes())
    assert sweep_replaced(table) == []
    assert draft.exists()
    # What another machine has swept, and this one has of it, goes.
    assert not stray.exists()
    # The linked file is old, and on some file systems nobody notes that it was read.
    os.utime(draft, (0, 0))
    assert sweep(table) == []
    assert draft.exists()
    os.utime(draft.parent, (0, 0))
    assert sweep(table) == []
    assert not draft.exists()
    assert ledger.entries().num_rows == 1


def test_vectors_in_a_bucket_are_committed_once_and_read_by_another_machine(
    s3: S3Server, tmp_path: Path
) -> None:
    place = s3.place()
    homes = [Home.open(tmp_path / name, HOURLY, storage=place) for name in ("ours", "other")]
    ours, other = (marked_table(home.lake) for home in homes)
    files = first_files(ours)
    late = other.open()
    put(ours.open(), "b", dead={files[0].path: range(0, ROWS, 3), files[1].path: [5]})
    with pytest.raises(CommitConflict):
        put(late, "c", dead={files[0].path: [1]})
    expected = [n for n in range(3 * ROWS) if not (n < ROWS and n % 3 == 0) and n != ROWS + 5]
    assert by_ours(other.open()) == by_ours(ours.open()) == expected
    theirs = QueryBuilder().register("t", open_delta(ours.folder)).execute("SELECT n FROM t ORDER BY n")
    assert pa.table(theirs.read_all())["n"].to_pylist() == expected
    put(other.open(), "d", dead={files[0].path: range(0, ROWS, 2)})
    old = {file.vector.path for file in files_at(ours, 3) if file.vector is not None}
    now = {file.vector.path for file in files_at(ours, 4) if file.vector is not None}
    assert set(sweep_replaced(ours)) >= old - now - {None}
    assert all(storage_of(ours.folder).size(ours.folder / str(path)) for path in now - {None})
    assert by_ours(ours.open()) == by_ours(other.open())


def test_a_table_that_another_machine_dropped_and_made_again_is_the_new_one(
    s3: S3Server, tmp_path: Path
) -> None:
    place = s3.place()
    homes = [Home.open(tmp_path / name, HOURLY, storage=place) for name in ("ours", "other")]
    ours, other = (marked_table(home.lake) for home in homes)
    first_files(ours)
    put(ours.open(), "b", [placed(ours, "b", range(3 * ROWS, 3 * ROWS + 9))])
    assert by_ours(other.open()) == [*range(3 * ROWS + 9)]
    storage_of(ours.folder).remove_folder(ours.folder)
    put(ours.open(), "c", [placed(ours, "c", range(5))])
    assert by_ours(other.open()) == [*range(5)]
    # Its log has as many entries now as the one of which the other machine has copies.
    put(ours.open(), "d", [placed(ours, "d", range(5, 7))])
    assert by_ours(other.open()) == [*range(7)]
    put(other.open(), "e", [placed(other, "e", range(7, 9))])
    assert by_ours(ours.open()) == by_ours(other.open()) == [*range(9)]


def test_a_table_whose_removal_is_cut_off_has_lost_its_log_and_the_next_one_ends_it(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = marked_table(Home.open(tmp_path / "home", HOURLY, storage=s3.place()).lake)
    first_files(table)
    storage = storage_of(table.folder)
    unlink, lost = BucketStorage.unlink, threading.Event()

    def cut_off(of: BucketStorage, path: Path) -> None:
        if path.suffix == ".parquet":
            lost.set()
        if lost.is_set():
            raise StorageUnreachable("The answer was lost.", fix="Try again.")
        unlink(of, path)

    with monkeypatch.context() as patch:
        patch.setattr(BucketStorage, "unlink", cut_off)
        with pytest.raises(StorageUnreachable):
            storage.remove_folder(table.folder)
    left = {each.path.suffix for each in storage.listed(table.folder)}
    assert left == {".parquet"}
    assert storage.remove_folder(table.folder)
    assert [*storage.listed(table.folder)] == []


def test_a_removal_that_is_cut_off_within_the_log_is_ended_by_the_same_command(
    s3: S3Server, tmp_path: Path
) -> None:
    place = s3.place()
    homes = [Home.open(tmp_path / name, HOURLY, storage=place) for name in ("ours", "other")]
    first = marked_table(homes[0].lake)
    first_files(first)
    # A process that has not opened the table yet.
    table = LakeTable(homes[1].lake, first.spec)
    storage = storage_of(table.folder)
    log = table.folder / "_delta_log"
    assert len([*storage.listed(log)]) > 1
    storage.unlink(log / f"{0:020d}.json")
    with pytest.raises((DeltaError, LogUnreadable)):
        table.open().all_files()
    [left] = _data([table])
    assert left == Data(table.folder, 0)
    assert drop_data([left]) == 1
    assert [*storage.listed(table.folder)] == []


def test_a_commit_that_met_another_is_a_conflict(s3: S3Server, tmp_path: Path) -> None:
    home = Home.open(tmp_path / "home", HOURLY, storage=s3.place())
    ledger = retention_ledger(home.lake, "shop")
    ledger.append(lambda _held: ledger_row(ledger))
    handle = open_delta(ledger.folder)

    class Refused:
        def __getattr__(self, name: str) -> object:
            return getattr(handle, name)

        def create_write_transaction(self, *given: Any, **named: Any) -> None:
            # What delta-rs makes of 409 Conflict.
            raise CommitFailedError("Failed to commit transaction: 0")

    with pytest.raises(CommitConflict):
        commit_actions(
            cast(DeltaTable, Refused()), [], folder=ledger.folder, app_id=ledger.spec.app_id, note={}
        )


def test_a_commit_that_others_followed_before_its_answer_is_ours(s3: S3Server, tmp_path: Path) -> None:
    """The library puts an entry, hears nothing, and is refused when it puts it again."""
    home = Home.open(tmp_path / "home", HOURLY, storage=s3.place())
    ledger = retention_ledger(home.lake, "shop")
    ledger.append(lambda _held: ledger_row(ledger))
    handle = open_delta(ledger.folder)

    class Unheard:
        def __getattr__(self, name: str) -> object:
            return getattr(handle, name)

        def create_write_transaction(self, *given: Any, **named: Any) -> None:
            handle.create_write_transaction(*given, **named)
            ledger.append(lambda _held: ledger_row(ledger))
            handle.create_write_transaction(*given, **named)

    ours = cast(DeltaTable, Unheard())
    version = commit_actions(ours, [], folder=ledger.folder, app_id=ledger.spec.app_id, note={})
    assert version == handle.version() + 1 == open_delta(ledger.folder).version() - 1


def test_a_table_that_got_vectors_meanwhile_is_a_conflict(s3: S3Server, tmp_path: Path) -> None:
    place = s3.place()
    homes = [Home.open(tmp_path / name, HOURLY, storage=place) for name in ("ours", "other")]
    ours, other = unpartitioned(homes[0].lake), marked_table(homes[1].lake)
    late = ours.open()
    assert other.open().version == late.version + 1
    with pytest.raises(CommitConflict):
        put(late, "b", [placed(ours, "b", [1])])
    put(ours.open(), "b", [placed(ours, "b", [1])])
    assert by_ours(other.open()) == [1]


def files_at(table: LakeTable, version: int) -> tuple[LakeFile, ...]:
    return TableSnapshot(table, open_delta(table.folder, version)).files(WHOLE_TABLE)
