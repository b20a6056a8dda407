"""Looking through landing finds every damage, each by name, and changes nothing."""

from __future__ import annotations

import json
from pathlib import Path

from omnisupport_ingest.landing.damage import check_landing
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest_tests.landing.batches import land


def told(store: LandingStore) -> list[tuple[str, str | None]]:
    # A store keeps what it has read; damage is looked for in the files.
    fresh = LandingStore(store.folder.parent, store.source)
    return [(each.kind, each.batch_id) for each in check_landing(fresh).damage if each.kind != "epoch"]


def chain(store: LandingStore, ends: tuple[int, ...] = (100, 200, 300, 400)) -> list[str]:
    starts = (0, *ends[:-1])
    return [land(store, start, end).batch_id for start, end in zip(starts, ends, strict=True)]


def test_an_unharmed_chain_has_no_damage(store: LandingStore) -> None:
    chain(store)
    found = check_landing(store)
    assert (found.batches, found.files, told(store)) == (4, 4, [])


def test_every_damage_is_named_and_none_hides_another(store: LandingStore) -> None:
    first, second, third, fourth = chain(store)
    data = [store.path_of(store.read(each).files[0]) for each in (first, second)]
    data[0].write_bytes(data[0].read_bytes()[:-1])
    data[1].unlink()
    (store.folder / "manifests" / f"{fourth}.json").write_text("{")
    assert told(store) == [("manifest", fourth), ("file", first), ("file", second)]
    assert store.exists(third)


def test_every_break_of_a_chain_is_named_not_the_first_alone(store: LandingStore) -> None:
    names = chain(store, (100, 200, 300, 400, 500))
    for name in (names[1], names[3]):
        (store.folder / "manifests" / f"{name}.json").unlink()
    assert told(store) == [("chain", names[2]), ("chain", names[4])]


def test_a_manifest_that_counts_other_rows_than_its_file_has(store: LandingStore) -> None:
    (name,) = chain(store, (100,))
    path: Path = store.folder / "manifests" / f"{name}.json"
    document = json.loads(path.read_text())
    document["files"][0] |= {"rows": 2, "rows_per_table": {"public.tickets": 2}}
    path.write_text(json.dumps(document))
    assert told(store) == [("rows", name)]


def test_batches_of_an_epoch_without_a_record_are_told(store: LandingStore) -> None:
    chain(store, (100,))
    (damage,) = check_landing(store).damage
    assert (damage.kind, "Epoch 1" in damage.problem) == ("epoch", True)
