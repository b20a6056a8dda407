"""A home that was copied, restored or moved: neither it nor the original takes the other's slot by itself."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from omnisupport_ingest.cli.main import cli
from omnisupport_ingest.home import Home
from omnisupport_ingest.settings import SnapshotMode
from omnisupport_ingest.sources.postgres.capture.drop import plan_drop
from omnisupport_ingest.sources.postgres.capture.status import source_status
from omnisupport_ingest.sources.postgres.preflight.source_check import check_source
from omnisupport_ingest.sources.postgres.session.errors import NotOurSlot, SlotInUse, SlotMoved
from omnisupport_ingest.sources.postgres.slot.home_identity import HomeCopied, HomeIdentity
from omnisupport_ingest.windows import WindowSize
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest, contract, folded

pytestmark = pytest.mark.full

COLUMNS = ("id", "v")
MODES = [SnapshotMode.INITIAL, SnapshotMode.WHEN_NEEDED]


@pytest.fixture(params=MODES, ids=str)
def original(source: SourceUnderTest, request: pytest.FixtureRequest) -> SourceUnderTest:
    """A captured table, in either mode."""
    source.overrides["snapshot_mode"] = request.param
    source.sql("CREATE TABLE tickets (id int PRIMARY KEY, v text)", "INSERT INTO tickets VALUES (1, 'one')")
    source.tables.append(contract("tickets", COLUMNS))
    source.catch_up()
    source.sql("INSERT INTO tickets VALUES (2, 'two')")
    source.catch_up()
    return source


def copied(source: SourceUnderTest) -> SourceUnderTest:
    """A copy of the home as ``cp -a`` makes it, of the same source and slot."""
    folder = source.home_folder.with_name("copy")
    subprocess.run(["cp", "-a", source.home_folder, folder], check=True)
    return replace(source, home_folder=folder, tables=list(source.tables), overrides=dict(source.overrides))


def right(source: SourceUnderTest) -> bool:
    return folded(source.events(), "tickets") == source.rows("tickets", COLUMNS)


def slot(source: SourceUnderTest) -> tuple[object, ...]:
    (found,) = source.query(
        "SELECT confirmed_flush_lsn, catalog_xmin FROM pg_replication_slots"
        f" WHERE slot_name = '{source.slot}'"
    )
    return found


def adopt(source: SourceUnderTest, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNISUPPORT_HOME", str(source.home_folder))
    monkeypatch.setenv("OMNISUPPORT_WINDOW", "minutes:1")
    done = CliRunner().invoke(cli, ["source", "adopt", how], standalone_mode=False)
    assert done.exception is None, done.output


def test_copy_touches_nothing_and_the_original_goes_on(original: SourceUnderTest) -> None:
    copy, before = copied(original), slot(original)
    original.sql("INSERT INTO tickets VALUES (3, 'three')")
    for attempt in (copy.catch_up, lambda: copy.capture().begin_new_epoch("no"), copy.capture().check):
        with pytest.raises(HomeCopied, match="copy"):
            attempt()
    with pytest.raises(HomeCopied):
        plan_drop(copy.dsn, copy.settings, copy.home)
    assert [each.check for each in check_source(copy.dsn, copy.settings, copy.home, copy.tables)] == [
        "home_copied"
    ]
    told = source_status(copy.dsn, copy.settings, copy.home, copy.tables).warnings
    assert "is a copy of another home" in told[0].problem and "source adopt" in told[0].fix
    assert slot(original) == before
    original.catch_up()
    assert right(original) and len(original.store.epochs()) == 1
    with pytest.raises(HomeCopied):
        copy.catch_up()
    assert right(original) and not list((copy.home.landing).glob("*/e000002*"))


def test_copy_that_is_to_live_beside_the_original_gets_a_slot_of_its_own(
    original: SourceUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = copied(original)
    adopt(copy, "--new-slot", monkeypatch)
    for _ in range(2):
        with pytest.raises((NotOurSlot, SlotInUse)):
            # By no mode: its name is still that of the slot of the original.
            copy.catch_up()
    with pytest.raises(SlotInUse):
        copy.capture().begin_new_epoch("a copy")
    copy.overrides["slot"] = f"{copy.slot}_own"
    copy.capture().begin_new_epoch("a copy")
    original.sql("INSERT INTO tickets VALUES (3, 'three')")
    for each in (copy, original, copy):
        each.catch_up()
        assert right(each)
    assert HomeIdentity(copy.home).id != HomeIdentity(original.home).id != ""
    assert len(original.store.epochs()) == 1


def test_copy_that_takes_over_is_noticed_by_the_original_which_never_drops_its_slot(
    original: SourceUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = copied(original)
    adopt(copy, "--take-over", monkeypatch)
    original.sql("INSERT INTO tickets VALUES (3, 'three')")
    copy.catch_up()
    assert right(copy)
    original.sql("INSERT INTO tickets VALUES (4, 'four')")
    before = slot(original)
    for _ in range(2):
        with pytest.raises(SlotMoved, match="somebody else"):
            original.catch_up()
    assert slot(original) == before and len(original.store.epochs()) == 1
    copy.catch_up()
    assert right(copy)


def test_home_that_was_restored_in_place_asks_and_goes_on_when_it_is_told(
    original: SourceUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    backup = copied(original)
    original.sql("INSERT INTO tickets VALUES (3, 'three')")
    shutil.rmtree(original.home_folder)
    subprocess.run(["cp", "-a", backup.home_folder, original.home_folder], check=True)
    with pytest.raises(HomeCopied):
        original.catch_up()
    adopt(original, "--take-over", monkeypatch)
    original.catch_up()
    assert right(original) and len(original.store.epochs()) == 1


def test_home_that_was_moved_goes_on(original: SourceUnderTest) -> None:
    moved = original.home_folder.with_name("moved")
    original.home_folder.rename(moved)
    original.home_folder = moved
    original.sql("INSERT INTO tickets VALUES (3, 'three')")
    original.catch_up()
    assert right(original) and len(original.store.epochs()) == 1


def test_home_of_an_older_version_gets_its_identity_at_the_next_start(original: SourceUnderTest) -> None:
    for file in original.home_folder.glob("identity*"):
        file.unlink()
    original.catch_up()
    assert len(HomeIdentity(original.home).id) == 32
    with pytest.raises(HomeCopied):
        copied(original).catch_up()


@pytest.mark.parametrize("point", ["home.identity.before", "home.identity.after"])
def test_first_start_killed_while_the_identity_is_made_is_an_original_at_the_next(
    source: SourceUnderTest, point: str
) -> None:
    source.sql("CREATE TABLE tickets (id int PRIMARY KEY, v text)", "INSERT INTO tickets VALUES (1, 'one')")
    source.tables.append(contract("tickets", COLUMNS))
    source.killed_at(point)
    source.catch_up()
    assert right(source)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    made = Home.open(tmp_path / "home", WindowSize(1))
    HomeIdentity(made).require_original()
    return made


def test_home_that_came_from_another_file_system_asks(home: Home) -> None:
    elsewhere = Path("/dev/shm") / f"omnisupport-{HomeIdentity(home).id}"
    if not elsewhere.parent.is_dir() or elsewhere.parent.stat().st_dev == home.path.stat().st_dev:
        pytest.skip("there is no second file system")
    try:
        shutil.move(home.path, elsewhere)
        with pytest.raises(HomeCopied):
            HomeIdentity(Home.open(elsewhere, WindowSize(1))).require_original()
    finally:
        shutil.rmtree(elsewhere, ignore_errors=True)


def test_owner_or_rights_that_change_are_no_copy(home: Home) -> None:
    (home.path / f"identity-{HomeIdentity(home).id}").chmod(0o640)
    HomeIdentity(home).require_original()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"id": 3}', '{"id": "x", "facts": {"inode": "?"}}'])
def test_identity_that_cannot_be_read_asks(home: Home, content: str) -> None:
    (home.path / "identity.json").write_text(content)
    with pytest.raises(HomeCopied):
        HomeIdentity(home).require_original()


def test_new_identity_keeps_which_slots_are_not_the_homes(home: Home) -> None:
    identity = HomeIdentity(home)
    identity.adopt({"desk": 3})
    identity.adopt({})
    assert [identity.owns("desk", epoch) for epoch in (3, 4)] == [False, True]
    assert identity.owns("other", 1) and len(list(home.path.glob("identity-*"))) == 1
