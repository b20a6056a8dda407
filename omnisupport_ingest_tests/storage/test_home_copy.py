"""A home of folders is copied to a bucket, is shown equal, and goes on there."""

from __future__ import annotations

from pathlib import Path

import pytest

from omnisupport_ingest.cli.home_copy import CopyDiffers, copy_home
from omnisupport_ingest.home import Home
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.storage import LOCAL, StorageRefused, open_storage, storage_of
from omnisupport_ingest.windows import WindowSize
from omnisupport_ingest_tests.cli.command import command, environment
from omnisupport_ingest_tests.landing.batches import land
from omnisupport_ingest_tests.storage.s3_server import S3Server

HOURLY = WindowSize.parse("hourly")


def home_with_batches(folder: Path) -> Home:
    home = Home.open(folder, HOURLY)
    store = LandingStore(home.landing, "shop")
    store.begin_epoch("first", None)
    for start in (10, 20):
        land(store, start, start + 10)
    store.landed()
    (home.landing / "shop" / "paused.json").write_text("{}")
    return home


def test_a_copied_home_is_equal_and_goes_on_in_the_bucket(s3: S3Server, tmp_path: Path) -> None:
    home, place = home_with_batches(tmp_path / "home"), s3.place()
    with environment(home=str(home.path)):
        done = command("home", "copy", place)
    assert done.code == 0, done.err
    assert "5 files" in done.out
    with environment(home=str(home.path)):
        assert f"landing and lake in {place}" in " ".join(command("status").out.split())
        assert f"landing and lake in {place}" in " ".join(command("doctor").out.split())
    store = LandingStore(Home.open(home.path, HOURLY, storage=place).landing, "shop")
    land(store, 30, 40)
    another = Home.open(tmp_path / "another", HOURLY, storage=place)
    assert another.grid == home.grid
    there = LandingStore(another.landing, "shop")
    assert there.landed().count == 3
    for batch in there.manifests():
        there.verify(batch)
    assert not (another.landing / "shop" / "paused.json").exists()


def test_what_the_bucket_holds_otherwise_is_found_before_the_home_is_switched(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, place = home_with_batches(tmp_path / "home"), s3.place()
    storage = open_storage(home.path, place)
    file = next(each.path for each in LOCAL.listed(home.landing) if each.path.suffix == ".parquet")
    content = file.read_bytes()
    storage.upload([file])
    # As long as it was, and another: what upload leaves alone.
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CopyDiffers, match="is another"):
        copy_home(home, place)
    assert storage_of(file).is_local
    file.write_bytes(content)
    assert copy_home(home, place).files == 5
    assert not storage_of(file).is_local


def test_a_bucket_that_has_a_home_already_is_refused(s3: S3Server, tmp_path: Path) -> None:
    place = s3.place()
    Home.open(tmp_path / "there", HOURLY, storage=place)
    with pytest.raises(StorageRefused, match="already"):
        copy_home(home_with_batches(tmp_path / "home"), place)
    with environment(home=str(tmp_path / "home"), storage=place):
        refused = command("landing", "list")
    assert refused.code == 2
    assert "home copy" in refused.err
