"""The names of erased subjects: no name is missed because the file of keys is busy or damaged."""

from __future__ import annotations

import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import pytest

from omnisupport_ingest.contracts import erased_subjects
from omnisupport_ingest.contracts.erased_subjects import (
    TABLE,
    ErasedName,
    ErasedSubjectsUnreadable,
    names_once_erased,
    note,
)

PERSON = ErasedName("person", encrypted=True)
NAMES = {("shop", "public.customers"): PERSON}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of keys with the name of an erased subject."""
    path = tmp_path / "subjects.sqlite"
    with closing(sqlite3.connect(path, isolation_level=None)) as base:
        base.execute(TABLE)
        base.execute("BEGIN")
        note(base, "shop", {"public.customers": PERSON})
        base.execute("COMMIT")
    return path


def test_without_a_file_or_its_table_there_are_none(tmp_path: Path) -> None:
    assert names_once_erased(tmp_path / "keys" / "subjects.sqlite") == {}
    assert not (tmp_path / "keys").exists()
    with closing(sqlite3.connect(tmp_path / "former.sqlite")) as base:
        base.execute("CREATE TABLE keys (id BLOB)")
    assert names_once_erased(tmp_path / "former.sqlite") == {}


@pytest.mark.full
def test_a_busy_file_is_waited_for(path: Path) -> None:
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as writer:
        writer.execute("BEGIN EXCLUSIVE")
        # Longer than the five seconds that SQLite waits by itself.
        release = threading.Timer(6, writer.execute, ["ROLLBACK"])
        release.start()
        assert names_once_erased(path) == NAMES
        release.join()


def test_a_file_that_stays_busy_or_is_damaged_is_an_error(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(erased_subjects, "_WAIT_SECONDS", 0.1)
    with closing(sqlite3.connect(path, isolation_level=None)) as writer:
        writer.execute("BEGIN EXCLUSIVE")
        with pytest.raises(ErasedSubjectsUnreadable, match="locked") as refused:
            names_once_erased(path)
        assert refused.value.fix
    path.write_bytes(b"no database" * 100)
    with pytest.raises(ErasedSubjectsUnreadable, match="not a database"):
        names_once_erased(path)


def test_what_a_killed_writer_left_is_rolled_back(path: Path, tmp_path: Path) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as writer:
        writer.execute("PRAGMA cache_size = 1")
        writer.execute("BEGIN IMMEDIATE")
        writer.executemany(
            "INSERT INTO named VALUES ('other', ?, 'x')", ((f"{number}" * 50,) for number in range(900))
        )
        killed = tmp_path / "killed.sqlite"
        killed.write_bytes(path.read_bytes())
        Path(f"{killed}-journal").write_bytes(Path(f"{path}-journal").read_bytes())
        writer.execute("ROLLBACK")
    assert names_once_erased(killed) == NAMES


def test_a_table_that_was_plain_must_stay_encrypted_once_it_is(tmp_path: Path) -> None:
    path, plain = tmp_path / "subjects.sqlite", ErasedName("person", encrypted=False)
    found = []
    for name in (plain, PERSON, plain, ErasedName("client", encrypted=True)):
        with closing(sqlite3.connect(path)) as base:
            base.execute(TABLE)
            note(base, "shop", {"public.customers": name})
            base.commit()
        found.append(names_once_erased(path)["shop", "public.customers"])
    assert found == [plain, PERSON, PERSON, PERSON], "the first name counts"
