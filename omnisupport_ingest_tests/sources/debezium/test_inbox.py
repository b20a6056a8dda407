"""The watched folder takes complete files, once, and loses none to a crash."""

from __future__ import annotations

import errno
import itertools
import json
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from omnisupport_ingest.landing.errors import LandingFailed
from omnisupport_ingest.sources import packed
from omnisupport_ingest.sources.debezium import land as land_module
from omnisupport_ingest.sources.debezium.handling import Handling
from omnisupport_ingest.sources.debezium.inbox import Inbox, NotTaken
from omnisupport_ingest.sources.debezium.land import FileLanding
from omnisupport_ingest_tests.foreign_bytes import IN_THE_PLACE, in_time
from omnisupport_ingest_tests.sources.debezium.recorded import SOURCE, Recorder
from omnisupport_ingest_tests.sources.debezium.told import customer, envelope


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(tmp_path, "customers")


@pytest.fixture(params=["linked", "renamed"])
def inbox(recorder: Recorder, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Inbox:
    if request.param == "renamed":
        without_links(monkeypatch)
    return Inbox(recorder.folder / "inbox", lambda path, source: recorder.land(path), settled_seconds=0.2)


def without_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the folders of the inbox refuse hard links, as Linux does for a file of another user."""
    link = os.link

    def refusing(file: Any, name: Any, **named: Any) -> None:
        if recorded_in := {Path(name).parent.name, Path(file).parent.name} & {"landed", "refused"}:
            raise PermissionError(errno.EPERM, f"a link into {recorded_in}")
        link(file, name, **named)

    monkeypatch.setattr(os, "link", refusing)


def put(inbox: Inbox, name: str, *values: object, age: float = 60.0) -> Path:
    folder = inbox.root / SOURCE
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text("".join(json.dumps(each) + "\n" for each in values))
    os.utime(path, (time.time() - age, time.time() - age))
    return path


def test_a_complete_file_lands_and_is_moved_away(inbox: Inbox, recorder: Recorder) -> None:
    path = put(inbox, "one.jsonl", envelope("c", customer(1)))
    (taken,) = inbox.look()
    assert taken.landing is not None
    assert (taken.source, taken.path) == (SOURCE, path.parent / "landed" / "one.jsonl")
    assert not path.exists()
    assert len(recorder.events()) == 1
    assert list(inbox.look()) == []


def test_a_file_that_is_still_written_waits(inbox: Inbox, recorder: Recorder) -> None:
    path = put(inbox, "growing.jsonl", envelope("c", customer(1)), age=0)
    assert list(inbox.look()) == []
    with path.open("a") as file:
        file.write(json.dumps(envelope("c", customer(2), lsn=1001)) + "\n")
    assert list(inbox.look()) == []
    time.sleep(0.3)
    (taken,) = inbox.look()
    assert taken.landing is not None
    assert taken.landing.manifest.rows == 2


def test_names_with_a_dot_other_endings_and_folders_are_left_alone(inbox: Inbox) -> None:
    hidden = put(inbox, ".hidden.jsonl", envelope("c", customer(1)))
    other = put(inbox, "notes.txt", envelope("c", customer(1)))
    (inbox.root / SOURCE / "folder.jsonl").mkdir()
    assert list(inbox.look()) == []
    assert hidden.exists()
    assert other.exists()


def test_a_refused_file_stands_aside_with_its_reason_for_the_owner_alone(inbox: Inbox) -> None:
    put(inbox, "bad.jsonl", {"not": "an event"})
    good = put(inbox, "good.jsonl", envelope("c", customer(1)))
    bad_taken, good_taken = inbox.look()
    assert bad_taken.landing is None
    assert bad_taken.path == good.parent / "refused" / "bad.jsonl"
    reason = bad_taken.path.with_name("bad.jsonl.reason.txt")
    assert "line 1" in reason.read_text()
    assert "Fix: " in reason.read_text()
    assert stat.S_IMODE(reason.stat().st_mode) == 0o600
    assert good_taken.landing is not None


def test_the_same_name_again_replaces_nothing(inbox: Inbox) -> None:
    for number in (1, 2, 3):
        put(inbox, "day.jsonl", envelope("c", customer(number), lsn=1000 + number))
        list(inbox.look())
    names = sorted(each.name for each in (inbox.root / SOURCE / "landed").iterdir())
    assert names == ["day.jsonl", "day.jsonl.1", "day.jsonl.2"]


def test_a_crash_between_landing_and_moving_is_harmless(inbox: Inbox, recorder: Recorder) -> None:
    path = put(inbox, "one.jsonl", envelope("c", customer(1)))
    recorder.land(path)
    (taken,) = inbox.look()
    assert taken.landing is not None
    assert taken.landing.already_landed
    assert len(recorder.inlet.store.batch_ids()) == 1


def test_what_is_not_the_files_fault_leaves_it_where_it_is(inbox: Inbox, recorder: Recorder) -> None:
    path = put(inbox, "one.jsonl", envelope("c", customer(1)))

    def full(path: Path, source: str) -> FileLanding:
        raise LandingFailed("No space left.", fix="Make room.")

    with pytest.raises(LandingFailed):
        list(Inbox(inbox.root, full).look())
    assert path.exists()
    (taken,) = inbox.look()
    assert taken.landing is not None


def test_a_file_that_can_never_be_taken_keeps_no_other_from_being_taken_at_any_look(
    inbox: Inbox, recorder: Recorder
) -> None:
    first = put(inbox, "a.jsonl", envelope("c", customer(1)))

    def poisoned(path: Path, source: str) -> FileLanding:
        if path == first:
            raise RecursionError("maximum recursion depth exceeded, secret-value")
        return recorder.land(path)

    watched = Inbox(inbox.root, poisoned, settled_seconds=0.2)
    for number in (2, 3):
        put(inbox, f"b{number}.jsonl", envelope("c", customer(number), lsn=1000 + number))
        time.sleep(0.3)
        with pytest.raises(NotTaken, match=r"a\.jsonl could not be taken: unexpected Rec") as failed:
            list(watched.look())
        assert "secret-value" not in str(failed.value)
        assert "wait" not in str(failed.value)
        assert first.exists()
        assert (inbox.root / SOURCE / "landed" / f"b{number}.jsonl").exists()
    assert len(recorder.inlet.store.batch_ids()) == 2


def test_a_folder_that_cannot_be_listed_keeps_no_other_from_being_taken(
    inbox: Inbox, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(inbox, "one.jsonl", envelope("c", customer(1)))
    locked = inbox.root / "another"
    locked.mkdir()
    listed = Path.iterdir

    def refusing(folder: Path) -> Iterator[Path]:
        if folder == locked:
            raise PermissionError(13, "Permission denied", str(folder))
        return listed(folder)

    monkeypatch.setattr(Path, "iterdir", refusing)
    with pytest.raises(PermissionError):
        list(inbox.look())
    assert len(recorder.inlet.store.batch_ids()) == 1


@pytest.mark.parametrize("what", IN_THE_PLACE)
def test_whatever_stands_in_the_folder_the_next_file_is_taken(
    inbox: Inbox, recorder: Recorder, what: str
) -> None:
    put(inbox, "b.jsonl", envelope("c", customer(1)))
    IN_THE_PLACE[what](inbox.root / SOURCE / "a.jsonl")
    time.sleep(0.3)
    with in_time():
        list(inbox.look())
        time.sleep(0.3)
        list(inbox.look())
    assert (inbox.root / SOURCE / "landed" / "b.jsonl").exists()
    assert len(recorder.inlet.store.batch_ids()) in (1, 2)


def test_a_name_that_is_not_utf_8_is_refused_by_name(inbox: Inbox) -> None:
    good = put(inbox, "z.jsonl", envelope("c", customer(1)))
    odd = put(inbox, os.fsdecode(b"day-\xff.jsonl"), envelope("c", customer(2), lsn=1001))
    refused, taken = inbox.look()
    assert taken.landing is not None and not good.exists()
    assert refused.refused is not None and "day-\\xff.jsonl" in refused.refused.problem
    assert refused.path == odd.parent / "refused" / odd.name
    refused.path.with_name(f"{odd.name}.reason.txt").read_text()


@pytest.mark.parametrize(
    "content",
    [b"[" * 100_000 + b"]" * 100_000, b"9" * 5000, b'{"a": "\\ud800"}', b"\xff\xfe", b"\0" * 5000],
    ids=["nesting", "number", "half a pair", "no UTF-8", "zeros"],
)
def test_poison_is_refused_with_its_reason_and_the_next_file_is_taken(inbox: Inbox, content: bytes) -> None:
    put(inbox, "a.jsonl").write_bytes(content)
    put(inbox, "b.jsonl", envelope("c", customer(1)))
    os.utime(inbox.root / SOURCE / "a.jsonl", (1, 1))
    with in_time():
        refused, taken = inbox.look()
    assert taken.landing is not None
    assert "a.jsonl, line 1: " in refused.path.with_name("a.jsonl.reason.txt").read_text()


def replaced(path: Path, *values: object) -> None:
    """Put another version onto the name of ``path``, as its writer is told to."""
    new = path.with_name(f".{path.name}")
    new.write_text("".join(json.dumps(each) + "\n" for each in values))
    os.utime(new, (1, 1))
    new.rename(path)


def appended(path: Path, *values: object) -> None:
    with path.open("a") as file:
        file.write("".join(json.dumps(each) + "\n" for each in values))
    os.utime(path, (1, 1))


@pytest.mark.parametrize("change", [replaced, appended])
def test_what_is_put_there_between_landing_and_moving_lands_with_the_next_look(
    inbox: Inbox, recorder: Recorder, change: Any
) -> None:
    path = put(inbox, "one.jsonl", envelope("c", customer(1)))

    def land(path: Path, source: str) -> FileLanding:
        landing = recorder.land(path)
        if not landing.already_landed and len(recorder.events()) == 1:
            change(path, envelope("c", customer(2), lsn=1001))
        return landing

    watched = Inbox(inbox.root, land, settled_seconds=0.0)
    (taken,) = watched.look()
    assert taken.landing is not None and taken.path == path and path.exists()
    list(watched.look())
    assert {each["key"] for each in recorder.events()} == {'["1"]', '["2"]'}
    assert not path.exists()
    assert [each.name for each in (path.parent / "landed").iterdir()] == ["one.jsonl"]


def touched(path: Path) -> None:
    os.utime(path, (1, next(TIMES)))


def copied_again(path: Path) -> None:
    new = path.with_name(f".{path.name}")
    new.write_bytes(path.read_bytes())
    new.rename(path)


TIMES = itertools.count(10)


@pytest.mark.parametrize("change", [touched, copied_again])
def test_a_file_that_shows_other_times_or_inodes_and_the_same_content_is_moved_away(
    inbox: Inbox, recorder: Recorder, change: Callable[[Path], None]
) -> None:
    path = put(inbox, "one.jsonl", envelope("c", customer(1)))

    def land(path: Path, source: str) -> FileLanding:
        landing = recorder.land(path)
        change(path)
        return landing

    (taken,) = Inbox(inbox.root, land).look()
    assert taken.landing is not None and not path.exists()
    assert taken.path == path.parent / "landed" / "one.jsonl" and taken.path.exists()


def test_a_file_of_the_same_size_and_another_content_stays_and_is_named(
    inbox: Inbox, recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    path = put(inbox, "one.jsonl", envelope("c", customer(1)))

    def land(path: Path, source: str) -> FileLanding:
        landing = recorder.land(path)
        if len(recorder.events()) == 1:
            replaced(path, envelope("c", customer(2)))
        return landing

    watched = Inbox(inbox.root, land)
    (taken,) = watched.look()
    assert taken.path == path and path.exists()
    assert "one.jsonl changed while it was taken, and stays in the inbox" in caplog.text
    assert not list((path.parent / "landed").iterdir())


def test_a_file_that_replaces_a_refused_one_is_not_refused_with_it(inbox: Inbox, recorder: Recorder) -> None:
    path = put(inbox, "one.jsonl", {"not": "an event"})

    def land(path: Path, source: str) -> FileLanding:
        try:
            return recorder.land(path)
        finally:
            if not recorder.inlet.store.batch_ids():
                replaced(path, envelope("c", customer(2)))

    watched = Inbox(inbox.root, land, settled_seconds=0.0)
    assert list(watched.look()) == [] and path.exists()
    assert [taken.path.parent.name for taken in watched.look()] == ["landed"]


def test_a_file_that_changes_while_it_is_read_stays_for_the_next_look(
    inbox: Inbox, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = put(inbox, "one.jsonl", envelope("c", customer(1)))
    content_of = land_module.content_of

    def changing(path: Path) -> land_module.Content:
        content = content_of(path)
        replaced(path, envelope("c", customer(2)))
        return content

    monkeypatch.setattr(land_module, "content_of", changing)
    with pytest.raises(land_module.FileRefused, match="has changed while it was read"):
        list(inbox.look())
    assert path.exists()
    monkeypatch.undo()
    time.sleep(0.3)
    assert [taken.path.parent.name for taken in inbox.look()] == ["landed"]


@pytest.mark.parametrize("why", ["failed", "not foreseen", "still written"])
def test_of_a_source_ordered_by_arrival_no_file_lands_below_a_later_one(tmp_path: Path, why: str) -> None:
    recorder = Recorder(tmp_path, "customers", handling=Handling(order="arrival"))
    failing = [True]

    def land(path: Path, source: str) -> FileLanding:
        if path.name == "001.jsonl" and why != "still written" and failing.pop():
            raise OSError(28, "No space left on device") if why == "failed" else RecursionError
        return recorder.land(path)

    inbox = Inbox(tmp_path / "inbox", land, settled_seconds=0.2, by_arrival=lambda source: source == SOURCE)
    age = 0 if why == "still written" else 60
    first = put(inbox, "001.jsonl", envelope("u", customer(1), lsn=None), age=age)
    put(inbox, "002.jsonl", envelope("u", customer(2), lsn=None))
    if why == "failed":
        failing[:] = [False, True]
        with pytest.raises(OSError, match="No space"):
            list(inbox.look())
    elif why == "not foreseen":
        failing[:] = [False, True]
        with pytest.raises(NotTaken, match="The files after it wait"):
            list(inbox.look())
    else:
        assert list(inbox.look()) == []
    assert recorder.events() == [] and first.exists()
    time.sleep(0.3)
    assert [taken.path.name for taken in inbox.look()] == ["001.jsonl", "002.jsonl"]
    assert [each["key"] for each in sorted(recorder.events(), key=lambda event: event["ordinal"])] == [
        '["1"]',
        '["2"]',
    ]


@pytest.mark.parametrize("why", [errno.EMFILE, errno.EIO, errno.ESTALE, errno.ENOMEM])
def test_an_error_that_is_not_of_the_file_leaves_it_where_it_is(
    inbox: Inbox, monkeypatch: pytest.MonkeyPatch, why: int
) -> None:
    path = put(inbox, "one.jsonl", envelope("c", customer(1)))

    def failing(path: Path) -> int:
        raise OSError(why, os.strerror(why))

    monkeypatch.setattr(packed, "open_file", failing)
    with pytest.raises(OSError, match=os.strerror(why)):
        list(inbox.look())
    assert path.exists()
    monkeypatch.undo()
    time.sleep(0.3)
    assert [taken.path.parent.name for taken in inbox.look()] == ["landed"]


def test_a_file_that_may_not_be_read_is_refused(inbox: Inbox, monkeypatch: pytest.MonkeyPatch) -> None:
    put(inbox, "one.jsonl", envelope("c", customer(1)))

    def failing(path: Path) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(packed, "open_file", failing)
    assert [taken.path.parent.name for taken in inbox.look()] == ["refused"]


def test_a_file_that_is_written_to_as_it_is_renamed_comes_back(
    inbox: Inbox, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_links(monkeypatch)
    path = put(inbox, "one.jsonl", envelope("c", customer(1)))
    rename = os.rename

    def late(source: Any, target: Any) -> None:
        moves = Path(target).parent.name == "landed"
        if moves:
            appended(source, envelope("c", customer(2), lsn=1001))
        rename(source, target)
        if moves:
            put(inbox, "one.jsonl", envelope("c", customer(3), lsn=1002))

    with monkeypatch.context() as once:
        once.setattr(os, "rename", late)
        list(inbox.look())
    assert sorted(each.name for each in path.parent.glob("*.jsonl")) == ["1-one.jsonl", "one.jsonl"]
    assert not list((path.parent / "landed").iterdir())
    time.sleep(0.3)
    list(inbox.look())
    time.sleep(0.3)
    list(inbox.look())
    assert {event["key"] for event in recorder.events()} == {f'["{n}"]' for n in (1, 2, 3)}


def test_a_file_that_may_not_leave_the_inbox_leaves_nothing_elsewhere(
    inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = put(inbox, "one.jsonl", envelope("c", customer(1)))

    def but_for_it(of_system: Callable[..., None]) -> Callable[..., None]:
        def refusing(file: Any, *others: Any, **named: Any) -> None:
            if file == path:
                raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(file))
            of_system(file, *others, **named)

        return refusing

    with monkeypatch.context() as sticky:
        sticky.setattr(os, "rename", but_for_it(os.rename))
        sticky.setattr(os, "unlink", but_for_it(os.unlink))
        with pytest.raises(PermissionError):
            list(inbox.look())
    assert path.exists() and not list((path.parent / "landed").iterdir())
