"""Manifests as files: what is written is read back, and nothing else is accepted."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnisupport_ingest.json_values import FieldProblem
from omnisupport_ingest.key_range import TEXT, KeyRange
from omnisupport_ingest.landing.encoding import decode_manifest, encode_manifest
from omnisupport_ingest.landing.errors import ManifestFromNewerVersion, ManifestUnreadable
from omnisupport_ingest.landing.manifest import (
    ArrivalFacts,
    ChunkSpan,
    DataFile,
    FileSpan,
    Manifest,
    OffsetSpan,
    RelationVersion,
    StreamSpan,
)
from omnisupport_ingest.landing.names import batch_id_of
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.position import Lsn, Position
from omnisupport_ingest_tests.landing.batches import land, manifest

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
zones = st.sampled_from([UTC, timezone(timedelta(hours=-9, minutes=-30))])
times = st.datetimes(datetime(1990, 1, 1), datetime(2200, 1, 1), timezones=zones)
lsns = st.integers(0, (1 << 64) - 1).map(Lsn)
positions = st.builds(Position, st.integers(1, 99), lsns, st.integers(-(1 << 60), 1 << 60))
hashes = st.text("0123456789abcdef", min_size=64, max_size=64)
arrivals = st.builds(
    ArrivalFacts,
    times,
    st.none() | times,
    st.none() | times,
    st.none() | times,
    st.none() | times,
    st.none() | st.integers(0, 99),
)


@st.composite
def streams(draw: st.DrawFn) -> StreamSpan:
    previous = draw(st.integers(0, 1 << 62))
    ends = Lsn(previous), Lsn(previous + draw(st.integers(1, 1 << 40)))
    if draw(st.booleans()):
        return StreamSpan(*ends, None, None, None, None, None)
    return StreamSpan(*ends, draw(lsns), draw(lsns), draw(st.integers(1, 1 << 32)), draw(times), draw(times))


@st.composite
def data_files(draw: st.DrawFn) -> DataFile:
    per_table = draw(st.dictionaries(text, st.integers(1, 1000), min_size=1, max_size=3))
    return DataFile(
        path="data/batch/file.parquet",
        window=draw(text),
        rows=sum(per_table.values()),
        bytes=draw(st.integers(0)),
        sha256=draw(hashes),
        first=draw(positions),
        last=draw(positions),
        ordered=draw(st.booleans()),
        rows_per_table=per_table,
    )


bounds = st.none() | st.lists(text, min_size=1, max_size=2).map(tuple)
chunks = st.builds(
    ChunkSpan,
    text,
    text,
    st.integers(0),
    st.integers(0),
    lsns,
    lsns,
    times,
    st.none() | text,
    st.none() | text,
    st.booleans(),
    st.none() | st.builds(KeyRange, st.just((TEXT, TEXT)), bounds, bounds),
)


@st.composite
def offset_spans(draw: st.DrawFn) -> tuple[OffsetSpan, ...]:
    places = draw(st.sets(st.tuples(text, st.integers(0, 9)), min_size=1, max_size=3))
    found = []
    for topic, partition in sorted(places):
        start, gone, records = (draw(st.integers(0, 1 << 40)) for _ in range(3))
        topic_id = draw(st.none() | text)
        end = start + gone + records
        found.append(OffsetSpan(topic, partition, start, end, records, topic_id, gone, draw(text)))
    return tuple(found)


snapshots = st.dictionaries(text, times, max_size=3)
files = st.builds(
    FileSpan, hashes, text, text, offsets=st.none() | offset_spans(), snapshots=st.none() | snapshots
)
texts = st.lists(text, max_size=3).map(tuple)
relations = st.builds(RelationVersion, text, text, texts, texts, texts, text)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    kind, spans = draw(st.sampled_from([("stream", streams()), ("chunk", chunks), ("file", files)]))
    fields: dict[str, Any] = {
        "source": draw(text),
        "epoch": draw(st.integers(1, 10**7)),
        "arrival": draw(arrivals),
        "files": draw(st.lists(data_files(), max_size=3).map(tuple)),
        "relations": draw(st.lists(relations, max_size=2).map(tuple)),
        "written_by": draw(text),
        kind: draw(spans),
    }
    return Manifest(batch_id=batch_id_of(Manifest(batch_id="", **fields)), **fields)


@given(manifests())
def test_manifest_reads_back_equal(manifest: Manifest) -> None:
    assert decode_manifest(encode_manifest(manifest), Path(f"{manifest.batch_id}.json")) == manifest


@given(manifests())
def test_name_is_a_plain_file_name(manifest: Manifest) -> None:
    assert len(manifest.batch_id) < 240
    assert set(manifest.batch_id) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")


def test_newer_format_version_is_named_before_its_unknown_fields(store: LandingStore) -> None:
    batch = land(store, 8, 20)
    file = store.folder / "manifests" / f"{batch.batch_id}.json"
    document = json.loads(file.read_bytes()) | {"format_version": 7, "compressed": True}
    file.unlink()
    file.write_text(json.dumps(document))
    with pytest.raises(ManifestFromNewerVersion, match="format version 7; this program reads up to 6"):
        LandingStore(store.folder.parent, store.source).landed()


def _forget(document: dict[str, Any], *fields: tuple[str, str]) -> None:
    for part, name in fields:
        if document[part] is not None:
            del document[part][name]


def _without_version_3(manifest: Manifest) -> Manifest:
    older = _without_version_4(manifest)
    file = replace(older.file, order=None) if older.file is not None else None
    stream = replace(older.stream, recovered_from=None) if older.stream is not None else None
    return replace(older, file=file, stream=stream)


def _without_version_4(manifest: Manifest) -> Manifest:
    chunk = replace(manifest.chunk, scope=None) if manifest.chunk is not None else None
    return replace(_without_version_6(manifest), chunk=chunk)


def _without_version_6(manifest: Manifest) -> Manifest:
    file = replace(manifest.file, snapshots=None) if manifest.file is not None else None
    return replace(manifest, file=file)


VERSION_6 = (("file", "snapshots"),)
VERSION_5 = (("file", "offsets"), *VERSION_6)
VERSION_4 = (("chunk", "scope"), *VERSION_5)
VERSION_3 = (("file", "order"), ("stream", "recovered_from"), *VERSION_4)


without_offsets = manifests().filter(lambda each: each.file is None or each.file.offsets is None)
"""Older versions had none, and named such a batch otherwise."""


@given(without_offsets)
def test_manifest_of_version_1_reads_as_one_that_did_not_record_the_newest_epoch(manifest: Manifest) -> None:
    document = json.loads(encode_manifest(manifest)) | {"format_version": 1}
    del document["arrival"]["newest_epoch_before"]
    _forget(document, *VERSION_3)
    read = decode_manifest(json.dumps(document).encode(), Path(f"{manifest.batch_id}.json"))
    arrival = replace(manifest.arrival, newest_epoch_before=None)
    assert read == replace(_without_version_3(manifest), arrival=arrival)
    assert decode_manifest(encode_manifest(read), Path(f"{manifest.batch_id}.json")) == read


@given(without_offsets)
def test_manifest_of_version_2_reads_as_one_that_did_not_record_an_order(manifest: Manifest) -> None:
    document = json.loads(encode_manifest(manifest)) | {"format_version": 2}
    _forget(document, *VERSION_3)
    read = decode_manifest(json.dumps(document).encode(), Path(f"{manifest.batch_id}.json"))
    assert read == _without_version_3(manifest)


@given(without_offsets)
def test_manifest_of_version_3_reads_as_one_of_whole_tables(manifest: Manifest) -> None:
    document = json.loads(encode_manifest(manifest)) | {"format_version": 3}
    _forget(document, *VERSION_4)
    read = decode_manifest(json.dumps(document).encode(), Path(f"{manifest.batch_id}.json"))
    assert read == _without_version_4(manifest)


@given(without_offsets)
def test_manifest_of_version_4_reads_as_one_of_no_topics(manifest: Manifest) -> None:
    document = json.loads(encode_manifest(manifest)) | {"format_version": 4}
    _forget(document, *VERSION_5)
    read = decode_manifest(json.dumps(document).encode(), Path(f"{manifest.batch_id}.json"))
    assert read == _without_version_6(manifest)


@given(manifests())
def test_manifest_of_version_5_reads_as_one_that_did_not_record_whole_snapshots(manifest: Manifest) -> None:
    document = json.loads(encode_manifest(manifest)) | {"format_version": 5}
    _forget(document, *VERSION_6)
    read = decode_manifest(json.dumps(document).encode(), Path(f"{manifest.batch_id}.json"))
    assert read == _without_version_6(manifest)


@pytest.mark.parametrize(
    ("spans", "named"),
    [
        ([], "are of no partition"),
        ([OffsetSpan("t", 0, 5, 4, 0)], r"\[0\] ends below its start"),
        ([OffsetSpan("t", 0, 5, 9, 3, gone=2)], r"\[0\] has more records than offsets"),
        ([OffsetSpan("t", 1, 0, 1, 1), OffsetSpan("t", 0, 0, 1, 1)], "are not in order"),
    ],
)
def test_offsets_that_contradict_themselves_are_refused(spans: list[OffsetSpan], named: str) -> None:
    whole = manifest(8, 20)
    span = FileSpan("0" * 64, "t", "", "lsn", tuple(spans))
    made = replace(whole, stream=None, file=span)
    with pytest.raises(FieldProblem, match=named):
        encode_manifest(replace(made, batch_id=batch_id_of(made)))


@pytest.mark.parametrize(
    ("version", "arrival", "named"),
    [
        (1, {"newest_epoch_before": 1}, "newest_epoch_before is not a field of this format version"),
        (2, {}, "newest_epoch_before is missing"),
    ],
)
def test_each_version_has_its_own_fields(version: int, arrival: dict[str, object], named: str) -> None:
    whole = manifest(8, 20)
    document = json.loads(encode_manifest(whole)) | {"format_version": version}
    del document["arrival"]["newest_epoch_before"]
    _forget(document, *VERSION_3)
    document["arrival"] |= arrival
    with pytest.raises(ManifestUnreadable, match=named):
        decode_manifest(json.dumps(document).encode(), Path(f"{whole.batch_id}.json"))


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        ({"format_version": "1"}, "format_version"),
        ({"format_version": True}, "format_version"),
        ({"surprise": 1}, "surprise is not a field"),
        ({"epoch": "1"}, "epoch must be int"),
        ({"epoch": None}, "epoch must be int"),
        ({"batch_id": "e000001-s-0000000000000001"}, "batch_id"),
        ({"stream": None}, "stream, chunk, file"),
        ({"arrival": {}}, "arrival."),
        ({"files": [1]}, r"files\[0\] must be dict"),
    ],
)
def test_malformed_manifest_names_file_and_field(damage: dict[str, object], named: str) -> None:
    whole = manifest(8, 20)
    file = Path(f"/landing/{whole.batch_id}.json")
    content = json.dumps(json.loads(encode_manifest(whole)) | damage).encode()
    with pytest.raises(ManifestUnreadable, match=named) as raised:
        decode_manifest(content, file)
    assert str(file) in raised.value.problem
    assert "backup" in raised.value.fix


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("end_lsn", "no lsn", "stream.end_lsn is 'no lsn', which is not a Lsn"),
        ("end_lsn", "0/8", "stream.end_lsn is 0/8, not above"),
        ("last_xid", 7, "in part"),
        ("last_commit_ts", "2026-03-02T12:00:00", "without a time zone"),
    ],
)
def test_malformed_span_names_its_field(field: str, value: object, named: str) -> None:
    whole = manifest(8, 20)
    document = json.loads(encode_manifest(whole))
    document["stream"][field] = value
    with pytest.raises(ManifestUnreadable, match=named):
        decode_manifest(json.dumps(document).encode(), Path(f"{whole.batch_id}.json"))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000])
def test_what_is_no_document_is_unreadable(content: bytes) -> None:
    with pytest.raises(ManifestUnreadable):
        decode_manifest(content, Path("e000001-s-0000000000000008.json"))


def test_data_outside_the_data_folder_is_refused() -> None:
    whole = manifest(8, 20)
    nowhere = Position(1, Lsn(9), 0)
    file = DataFile("data/../../secret", "w", 1, 1, "0" * 64, nowhere, nowhere, True, {"public.a": 1})
    with pytest.raises(FieldProblem, match="outside the data folder"):
        encode_manifest(
            Manifest(whole.batch_id, whole.source, 1, whole.arrival, stream=whole.stream, files=(file,))
        )
