"""The file of subjects' keys: what is durable in it, and that one that is lost is missed."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import pytest

from omnisupport_ingest.contracts.erased_subjects import ErasedName
from omnisupport_ingest.contracts.subject_keys import SubjectKeys, SubjectKeysUnreadable

ADA, EVE = ("desk", "customer", "1"), ("desk", "customer", "2")


@pytest.fixture
def keys(tmp_path: Path) -> SubjectKeys:
    return SubjectKeys(tmp_path / "home" / "keys" / "subjects.sqlite")


def test_a_commit_is_durable_with_the_name_of_the_journal_gone(
    keys: SubjectKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    connect = sqlite3.connect

    class Watched(sqlite3.Connection):
        def close(self) -> None:
            told.extend(self.execute("PRAGMA synchronous").fetchone())
            super().close()

    keys.keys_of([ADA])
    monkeypatch.setattr(sqlite3, "connect", lambda *a, **named: connect(*a, factory=Watched, **named))
    (key,) = keys.keys_of([ADA])
    keys.destroy([key.id])
    assert told and set(told) == {3}, "EXTRA: the folder is synced once the journal is deleted"


def test_a_file_that_is_lost_is_not_begun_anew(keys: SubjectKeys, tmp_path: Path) -> None:
    (key,) = keys.keys_of([ADA])
    keys.destroy([key.id])
    kept = shutil.copytree(keys.path.parent, tmp_path / "kept")
    shutil.rmtree(keys.path.parent)
    with pytest.raises(SubjectKeysUnreadable, match="is not there") as lost:
        keys.keys_of([ADA])
    assert "Stop the capture" in lost.value.fix and not keys.made
    # Nor is that of another home taken for it.
    other = SubjectKeys(tmp_path / "other" / "keys" / "subjects.sqlite")
    other.keys_of([ADA])
    shutil.copytree(other.path.parent, keys.path.parent)
    for attempt in (
        lambda: keys.keys_of([ADA]),
        lambda: keys.destroy([key.id]),
        lambda: keys.name_windows("desk", {key.id: ["w"]}),
        lambda: keys.note_names("desk", {"public.people": ErasedName("customer", encrypted=True)}),
    ):
        with pytest.raises(SubjectKeysUnreadable, match="is not the one"):
            attempt()
    shutil.rmtree(keys.path.parent)
    shutil.copytree(kept, keys.path.parent)
    (again,) = keys.keys_of([ADA])
    assert (again.id, again.secret) == (key.id, None)


def test_looking_makes_no_key_and_destroying_leaves_none_to_make(keys: SubjectKeys) -> None:
    assert keys.ids_of([ADA]) == [] and not keys.made
    keys.keys_of([EVE])
    (ada,) = keys.ids_of([ADA])
    with pytest.raises(SubjectKeysUnreadable):
        keys.by_id([ada])
    assert keys.destroy([ada]) == 0
    (key,) = keys.keys_of([ADA])
    assert (key.id, key.secret) == (ada, None)


def test_windows_that_are_named_are_made_again_only_once_the_key_is_destroyed(keys: SubjectKeys) -> None:
    (ada,) = keys.keys_of([ADA])
    keys.name_windows("desk", {ada.id: ["w"]})
    assert keys.destroyed_by_window("desk") == {}, "a run that reads the value now must not count as new"
    keys.destroy([ada.id])
    assert keys.destroyed_by_window("desk").keys() == {"w"}
