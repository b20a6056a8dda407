"""Durable writes: created once, replaced whole, nothing left behind."""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from omnisupport_ingest.durable import create_exclusively, replace, sync_file, sync_folder


def test_only_the_first_creation_counts(tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    assert create_exclusively(file, b"first")
    assert not create_exclusively(file, b"second")
    assert file.read_bytes() == b"first"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [file]


def test_of_many_creators_at_once_one_wins(tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    with ThreadPoolExecutor(8) as pool:
        contents = [b"%d" % number * 1000 for number in range(32)]
        won = list(pool.map(lambda content: create_exclusively(file, content), contents))
    assert won.count(True) == 1
    assert file.read_bytes() == contents[won.index(True)]
    assert list(tmp_path.iterdir()) == [file]


def test_replacing_takes_the_place_of_the_old_file(tmp_path: Path) -> None:
    file = tmp_path / "lease.json"
    replace(file, b"old")
    replace(file, b"new")
    assert file.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [file]


def test_what_is_not_there_cannot_be_made_durable(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        sync_file(tmp_path / "missing")
    with pytest.raises(FileNotFoundError):
        sync_folder(tmp_path / "missing")
    with pytest.raises(FileNotFoundError):
        create_exclusively(tmp_path / "missing" / "record.json", b"")
