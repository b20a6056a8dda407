"""The batches of a home, copied to a home beside it that is to make everything of them anew."""

from __future__ import annotations

import shutil
from pathlib import Path

from omnisupport_ingest.home import Home
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.storage import storage_of
from omnisupport_ingest.verify.again import copy_batches
from omnisupport_ingest.windows import WindowSize
from omnisupport_ingest_tests.landing.batches import land


def test_the_home_beside_has_every_batch_in_folders_of_its_own_and_no_table(
    kept_in: str | None, tmp_path: Path
) -> None:
    home = Home.open(tmp_path / "home", WindowSize.parse("hourly"), storage=kept_in)
    store = LandingStore(home.landing, "shop")
    store.begin_epoch("first", None)
    for start in (10, 20):
        land(store, start, start + 10)
    (home.lake / "shop").mkdir()
    if kept_in is not None:
        # Copies here may be lost.
        shutil.rmtree(home.landing / "shop" / "data")

    copy_batches(home, tmp_path / "beside")
    beside = Home.open(tmp_path / "beside", WindowSize.parse("hourly"))
    assert storage_of(beside.lake / "any").is_local
    assert storage_of(beside.landing / "any").is_local
    assert not (beside.lake / "shop").exists()
    copied = LandingStore(beside.landing, "shop")
    assert [each.batch_id for each in copied.manifests()] == [each.batch_id for each in store.manifests()]
    for batch in copied.manifests():
        copied.verify(batch)
