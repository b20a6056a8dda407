"""Records on disk come back, whichever version of the program wrote them, or are refused by their field."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnisupport_ingest import json_values
from omnisupport_ingest.contracts.learned import LearnedColumns
from omnisupport_ingest.defs.sensors import SensorCursor
from omnisupport_ingest.defs.source_health import HealthCursor
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.foreign import Unreadable
from omnisupport_ingest.home import Home
from omnisupport_ingest.json_values import FieldProblem
from omnisupport_ingest.layers.checkpoint_file import read_file
from omnisupport_ingest.locks import Holder
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.read.export_ledger import ExportedFile, exported_files
from omnisupport_ingest.read.verified import Moment, Verified
from omnisupport_ingest.records import (
    Document,
    Format,
    NewerFormat,
    decode_note,
    encode,
    encode_line,
    read_note,
)
from omnisupport_ingest.review.certificate import FORMAT as CERTIFICATE
from omnisupport_ingest.review.certificate import CertificateUnreadable
from omnisupport_ingest.review.certificate import _delivered as delivered
from omnisupport_ingest.review.certificate import read_earlier as read_certificate
from omnisupport_ingest.sources.postgres.capture.requests import Pause, PauseRequest, RestartRequest
from omnisupport_ingest.sources.postgres.capture.state import (
    CaptureRecord,
    CaptureRecords,
    LastError,
    recorded,
)
from omnisupport_ingest.sources.postgres.catalog.partitions import PartitionRecords, Stay
from omnisupport_ingest.sources.postgres.catalog.published import recorded_tables
from omnisupport_ingest.sources.postgres.embedded.files import Location
from omnisupport_ingest.sources.postgres.snapshot.requests import SnapshotRequests
from omnisupport_ingest.storage import recorded_storage
from omnisupport_ingest.windows import WindowSize

NOON = datetime(2026, 11, 20, 12, tzinfo=UTC)
AT = NOON.isoformat()
SHA = "0" * 64


@dataclass(frozen=True)
class Part:
    name: str
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Sample:
    at: datetime
    part: Part
    parts: dict[str, Part]
    lsn: Lsn | None = None
    share: float = 0.0
    format_version: int = 3


def _renamed(document: Document) -> Document:
    return {name: value for name, value in document.items() if name != "since"} | {"at": document["since"]}


FORMAT = Format(Sample, 3, {1: _renamed, 2: lambda document: document | {"lsn": None}})
TOLERANT = replace(FORMAT, strict=False)
SAMPLE = Sample(NOON, Part("a", (1, 2)), {"b": Part("b")})
WRITTEN: dict[str, Any] = json.loads(encode(SAMPLE))

texts = st.text(st.characters(exclude_categories=["Cs"]))
parts = st.builds(Part, texts, st.lists(st.integers()).map(tuple))
samples = st.builds(
    Sample,
    st.datetimes(timezones=st.just(UTC)),
    parts,
    st.dictionaries(texts, parts, max_size=3),
    st.none() | st.integers(0, (1 << 64) - 1).map(Lsn),
    st.floats(allow_nan=False, allow_infinity=False),
)


@given(samples)
def test_what_is_written_comes_back(sample: Sample) -> None:
    assert FORMAT.decode(encode(sample)) == sample
    assert decode_note(Sample, encode_line(sample)) == sample
    assert "\n" not in encode_line(sample)


def test_a_text_that_is_no_utf_8_keeps_no_record_from_being_written_or_read(tmp_path: Path) -> None:
    reason = os.fsdecode(b"for \xff")
    assert PauseRequest(tmp_path).write(reason).reason == "for ?" and PauseRequest(tmp_path).present
    assert decode_note(Holder, encode_line(Holder(reason))) == Holder("for ?")
    failed = IngestError(f"/home/{reason} cannot be read.", fix="Restore it.")
    with (
        pytest.raises(IngestError) as raised,
        recorded(CaptureRecords(tmp_path), follows=True, last_landed=lambda: None),
    ):
        raise failed
    assert raised.value is failed
    record = CaptureRecords(tmp_path).read()
    assert record and record.last_error and record.last_error.problem == "/home/for ? cannot be read."


def test_a_document_is_upgraded_from_its_own_version_on() -> None:
    third = {name: value for name, value in WRITTEN.items() if name != "format_version"}
    second = {name: value for name, value in third.items() if name != "lsn"}
    first = {name: value for name, value in second.items() if name != "at"} | {"since": AT}
    for version, members in ((1, first), (2, second), (3, third)):
        content = json.dumps(members | {"format_version": version}).encode()
        assert FORMAT.decode(content) == SAMPLE
        assert TOLERANT.decode(content) == replace(SAMPLE, format_version=version)


@pytest.mark.parametrize("version", ["3", None, 0, -1, 2.0, True])
def test_what_is_no_version_is_named(version: object) -> None:
    for form in (FORMAT, TOLERANT):
        with pytest.raises(FieldProblem, match="format_version is not a version number"):
            form.decode(json.dumps(WRITTEN | {"format_version": version}))


def test_a_newer_version_is_refused_before_its_members_are_read() -> None:
    for form in (FORMAT, TOLERANT):
        with pytest.raises(NewerFormat, match="has format version 4; this program reads up to 3"):
            form.decode('{"format_version": 4, "other": 1}')


@pytest.mark.parametrize("missing", ["lsn", "share", "parts"])
def test_a_strict_record_has_every_member_and_no_other(missing: str) -> None:
    without = {name: value for name, value in WRITTEN.items() if name != missing}
    with pytest.raises(FieldProblem, match=f"{missing} is missing"):
        FORMAT.decode(json.dumps(without))
    with pytest.raises(FieldProblem, match="more is not a field of this format version"):
        FORMAT.decode(json.dumps(WRITTEN | {"more": 1}))
    assert TOLERANT.decode(json.dumps(WRITTEN | {"more": 1})) == SAMPLE


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"at": "2026-11-20T12:00:00"}, "at is .*a time without a time zone"),
        ({"at": "1763640000"}, "at is '1763640000', which is not a datetime"),
        ({"part": {"name": "a", "sizes": [1, True]}}, r"part\.sizes\[1\] must be int, not bool"),
        ({"parts": {"b": []}}, r"parts\.b must be dict, not list"),
    ],
)
def test_a_value_of_another_type_is_named_by_its_field(changed: Document, problem: str) -> None:
    with pytest.raises(FieldProblem, match=problem):
        decode_note(Sample, json.dumps(WRITTEN | changed))


_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-1, 3),
    st.floats(allow_nan=False),
    st.sampled_from(["a", AT, "0/1", "2026-11-20T12:00:00", "9999-12-31T23:59:59-12:00"]),
    st.just([]),
    st.just([1, True]),
    st.just({}),
    st.just({"name": "a", "sizes": [1]}),
    st.just({"name": "a", "sizes": [1], "more": 1}),
    st.just({"b": {"name": "a", "sizes": []}}),
)


@given(
    changed=st.dictionaries(st.sampled_from([*WRITTEN, "more"]), _VALUES, max_size=2),
    without=st.sets(st.sampled_from([*WRITTEN]), max_size=1),
)
def test_the_quick_reader_and_the_careful_one_read_and_refuse_the_same(
    changed: Document, without: set[str]
) -> None:
    document = {name: value for name, value in (WRITTEN | changed).items() if name not in without}

    def outcome(read: Callable[[], object]) -> str:
        try:
            return repr(read())
        except FieldProblem as problem:
            return f"{problem.field}: {problem}"

    careful = outcome(lambda: json_values._Reader(tolerant=False).read(Sample, document, ""))
    assert outcome(lambda: json_values.from_plain(Sample, document)) == careful


def test_what_was_written_is_read_without_the_careful_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_values, "_Reader", None)
    assert FORMAT.decode(encode(SAMPLE)) == SAMPLE


def indented(members: Document) -> bytes:
    """As most records were written before."""
    return json.dumps(members, indent=2).encode() + b"\n"


OLD_FORMS: dict[str, tuple[type, object, bytes]] = {
    "lock": (
        Holder,
        Holder("up", 7, "host", NOON),
        b'{"pid": 7, "command": "up", "host": "host", "since": "2026-11-20T12:00:00+00:00"}'.ljust(4096),
    ),
    "pause": (Pause, Pause(NOON, "why"), b'{"since": "2026-11-20T12:00:00+00:00", "reason": "why"}\n'),
    "verdict": (
        Verified,
        Verified("tickets", "equal", NOON, 5, through=Moment(1, Lsn(9), NOON)),
        indented(
            {"table": "tickets", "state": "equal", "checked_at": AT, "rows": 5, "left_out": 0, "why": ""}
            | {"differing": 0, "seconds": 0.0, "through": {"epoch": 1, "lsn": "0/9", "at": AT}}
            | {"round": None, "resume_at": None, "waits_since": None}
        ),
    ),
    "sensor": (
        SensorCursor,
        SensorCursor("b", "0/9", 2),
        b'{"last_batch_id": "b", "lsn": "0/9", "attempt": 2}',
    ),
    "health": (
        HealthCursor,
        HealthCursor(2, ("a",), 5.0),
        b'{"level": 2, "problems": ["a"], "recorded_at": 5.0}',
    ),
    "capture": (
        CaptureRecord,
        CaptureRecord(5, "h", NOON, True, True, None, None, LastError("E", "p", "f", NOON)),
        indented(
            {"pid": 5, "host": "h", "started": AT, "follows": True, "ready": True, "ended": None}
            | {"failing_since": None}
            | {"last_error": {"error": "E", "problem": "p", "fix": "f", "at": AT}}
        ),
    ),
}
"""By record: its type, its value, and the bytes that versions before this mechanism wrote for it."""


@pytest.mark.parametrize("name", OLD_FORMS)
def test_bytes_of_earlier_versions_are_read_and_written_again(name: str, tmp_path: Path) -> None:
    kind, value, old = OLD_FORMS[name]
    (tmp_path / "old").write_bytes(old)
    (tmp_path / "new").write_bytes(encode(value))
    assert read_note(kind, tmp_path / "old") == value == read_note(kind, tmp_path / "new")
    assert decode_note(kind, old) == decode_note(kind, encode_line(value))


def test_files_of_earlier_versions_say_the_same(tmp_path: Path) -> None:
    for name, content in {
        "paused.json": f'{{"since": "{AT}", "reason": "why"}}\n',
        "restart.json": f'{{"at": "{AT}", "reason": "why"}}\n',
        "snapshot_requests/t.json": f'{{"table": "t", "reason": "why", "at": "{AT}", "scope": null}}\n',
        "location.json": '{"name": "0123456789abcdef", "outside": false}\n',
        "partitions-t.json": '{\n "table": "t",\n "epoch": 1,\n "partitions": {},\n "certain": "0/5",\n'
        ' "since": {},\n "left": {\n  "9": {\n   "start": "0/1",\n   "end": "0/2"\n  }\n }\n}\n',
        "published-e000001.json": '{\n "epoch": 1,\n "publication": "17.5",\n "tables": {\n  "t": {\n'
        '   "table": "public.t",\n   "relation": 5,\n   "entries": "all",\n   "since": "0/1"\n  }\n },\n'
        ' "format_version": 1\n}\n',
        "exports.jsonl": f'{{"at": "{AT}", "table": "s.t", "path": "/é", "rows": 2, "sha256": "{SHA}"}}\n',
        "learned/s.json": '{\n "tables": {\n  "t": {\n   "note": "{\\"type\\": \\"string\\"}"\n  }\n }\n}\n',
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    assert PauseRequest(tmp_path).read() == Pause(NOON, "why")
    assert RestartRequest(tmp_path).reason == "why"
    assert SnapshotRequests(tmp_path).whole_tables() == {"t": "why"}
    assert (found := Location.read(tmp_path)) is not None and found.shared.name == "0123456789abcdef"
    assert (known := PartitionRecords(tmp_path, 1).read("t")) is not None
    assert known.left == {"9": Stay(Lsn(1), Lsn(2))}
    assert recorded_tables(tmp_path, 1) == {"public.t"}
    assert exported_files(tmp_path) == [ExportedFile(NOON, "s.t", "/é", 2, SHA)]
    assert LearnedColumns(tmp_path, "s").of("t") == {"note": {"type": "string"}}


def test_a_home_of_an_earlier_version_is_opened_and_what_it_has_besides_stays(tmp_path: Path) -> None:
    home = Home.open(tmp_path, WindowSize(60), now=NOON)
    marker = tmp_path / "home.json"
    old = json.loads(marker.read_text()) | {"more": 1, "format_version": 1}
    marker.write_text(json.dumps(old, indent=2) + "\n")
    assert Home.open(tmp_path, WindowSize(60), earlier=True).grid == home.grid and home.is_earlier
    assert recorded_storage(tmp_path) is None
    home.adopt()
    assert not home.is_earlier
    written = json.loads(marker.read_text())
    assert written == old | {"format_version": written["format_version"]}


def test_a_file_of_checkpoints_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    path = tmp_path / "checkpoints.json"
    path.write_text(
        f'{{\n "format_version": 1,\n "made_at": "{AT}",\n "window": "hourly",\n "first_window": "{AT}",\n'
        ' "sources": {\n  "s": {\n   "epochs": {\n    "1": null\n   },\n   "batches": 1,\n'
        '   "last_batch_id": "b",\n   "stream_epoch": 1,\n   "stream_end": "0/9",\n'
        '   "watermark": null\n  }\n'
        ' },\n "checkpoints": []\n}\n'
    )
    said = read_file(path)
    assert (said.sources["s"].stream_end, said.first_window, said.made_at) == (Lsn(9), AT, NOON)


CERTIFIED = (
    f'{{"format_version": 1, "state": "pending", "asked": {{"by": "me", "why": "law", "at": "{AT}"}},'
    ' "before": [{"place": "landing", "path": "landing/a", "sha256": "00", "count": 2}],'
    ' "swept": ["lake/b"], "keys": {"of_the_subject": 1}, "remains": []}'
)


def test_a_certificate_of_an_earlier_version_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "certificate.json"
    assert read_certificate(path) is None
    path.write_text(CERTIFIED)
    assert (earlier := read_certificate(path)) is not None
    assert (earlier.asked.by, earlier.asked.at, earlier.swept) == ("me", NOON, ("lake/b",))
    assert [(each.place, each.count) for each in earlier.before] == [("landing", 2)]
    assert CERTIFICATE.decode(encode(json.loads(CERTIFIED))) == earlier


def test_a_certificate_names_delivered_files_whose_name_is_not_utf_8(tmp_path: Path) -> None:
    home = Home.open(tmp_path, WindowSize(60), now=NOON)
    file = home.inbox / "s" / "refused" / os.fsdecode(b"a\xff.jsonl")
    file.parent.mkdir(parents=True)
    file.touch()
    assert delivered(home, "t") == []
    assert json.loads(encode({"where": tuple(delivered(home, "s"))})) == {
        "where": ["inbox/s/refused/a\\xff.jsonl"]
    }


@pytest.mark.parametrize("content", ["", "[]", CERTIFIED[:-5], CERTIFIED.replace('"swept"', '"kept"')])
def test_a_certificate_that_cannot_be_read_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "certificate.json"
    path.write_text(content)
    with pytest.raises(CertificateUnreadable, match=r"certificate\.json.* cannot be read") as refused:
        read_certificate(path)
    assert refused.value.fix


def test_a_note_that_is_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omnisupport_ingest.records.MAX_NOTE_BYTES", 10)
    (tmp_path / "note").write_bytes(encode(SAMPLE))
    with pytest.raises(Unreadable, match="larger than 10 bytes"):
        read_note(Sample, tmp_path / "note")
