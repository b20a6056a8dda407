"""A home of folders is copied to a bucket, is shown equal, and goes on there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import obstore
import pytest

from omnisupport_ingest.bucket.storage import BucketStorage
from omnisupport_ingest.cli import doctor_home
from omnisupport_ingest.cli.doctor_machine import Level
from omnisupport_ingest.cli.home_copy import CopyDiffers, copy_home
from omnisupport_ingest.home import Home, HomeMismatch
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.storage import (
    LOCAL,
    StorageRefused,
    forget_home,
    open_storage,
    recorded_storage,
    storage_of,
)
from omnisupport_ingest.windows import WindowSize
from omnisupport_ingest_tests.cli.command import command, environment
from omnisupport_ingest_tests.landing.batches import land
from omnisupport_ingest_tests.storage.faulty_proxy import faulty_proxy
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
        diagnosed = " ".join(command("doctor").out.split())
    assert f"landing and lake in {place}" in diagnosed
    assert "refuses a put whose condition does not hold" in diagnosed
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


def test_a_copy_that_is_cut_off_at_its_last_step_is_ended_by_the_same_command(
    s3: S3Server, tmp_path: Path
) -> None:
    home, place = home_with_batches(tmp_path / "home"), s3.place()
    storage = open_storage(home.path, place)
    # What is there when the process dies between its two markers.
    storage.upload([home.path / "home.json"])
    assert copy_home(home, place).files == 5
    assert not storage_of(home.landing / "shop/epochs/000001.json").is_local


def test_a_home_that_another_put_there_meanwhile_is_refused(s3: S3Server, tmp_path: Path) -> None:
    home, place = home_with_batches(tmp_path / "home"), s3.place()
    storage = open_storage(home.path, place)
    Home.open(tmp_path / "there", HOURLY, storage=place)
    with pytest.raises(StorageRefused, match="already"):
        home.move_to(storage, place)
    assert recorded_storage(home.path) is None


def test_a_home_of_an_earlier_format_in_a_bucket_is_not_converted(s3: S3Server, tmp_path: Path) -> None:
    home = Home.open(tmp_path / "home", HOURLY, storage=s3.place())
    table = home.lake / "shop/dim_orders/_delta_log/00000000000000000000.json"
    storage_of(table).create(table, b"{}")
    marker = home.path / "home.json"
    marker.write_text(marker.read_text().replace('"format_version": 2', '"format_version": 1'))
    with environment(home=str(home.path)):
        refused = command("rebuild")
    assert refused.code == 3
    assert "cannot be converted" in refused.err
    assert storage_of(table).size(table)
    with pytest.raises(HomeMismatch, match="cannot be converted"):
        Home.open(home.path, HOURLY, earlier=True).adopt()


def test_a_bucket_that_has_a_home_already_is_refused(s3: S3Server, tmp_path: Path) -> None:
    place = s3.place()
    Home.open(tmp_path / "there", HOURLY, storage=place)
    with pytest.raises(StorageRefused, match="already"):
        copy_home(home_with_batches(tmp_path / "home"), place)
    with environment(home=str(tmp_path / "home"), storage=place):
        refused = command("landing", "list")
    assert refused.code == 2
    assert "home copy" in refused.err


@pytest.mark.parametrize("header", ["If-None-Match", "If-Match"])
def test_a_store_that_ignores_conditions_is_refused(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, header: str
) -> None:
    place = s3.place()
    there = cast(Workspace, SimpleNamespace(home=Home.open(tmp_path / "there", HOURLY, storage=place)))
    copied, elsewhere = home_with_batches(tmp_path / "home"), s3.place()
    with faulty_proxy(s3.port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        for home in (tmp_path / "there", copied.path, tmp_path / "new"):
            forget_home(home)
        proxy.ignored = {header.lower()}
        with pytest.raises(StorageRefused, match=f"ignores {header}:"):
            Home.open(tmp_path / "new", HOURLY, storage=elsewhere)
        assert not (tmp_path / "new/home.json").exists()
        with pytest.raises(StorageRefused, match=f"ignores {header}:"):
            copy_home(copied, elsewhere)
        # Not the command: delta-rs must not be called in the process of the proxy.
        [problem] = doctor_home._area("storage", lambda: doctor_home._bucket(there))
        assert problem.level is Level.PROBLEM
        assert f"ignores {header}:" in problem.seen
        proxy.ignored = set()
        storage = cast(BucketStorage, open_storage(tmp_path / "new", elsewhere))
        assert [each for page in obstore.list(storage.objects.store) for each in page] == []
