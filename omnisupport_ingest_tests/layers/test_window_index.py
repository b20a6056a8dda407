"""Processes go on from what a look noted of the windows, and never believe it where it may be wrong."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from deltalake import DeltaTable

from bench.history import SOURCE, History
from omnisupport_ingest.checks import lake_checks, quality_checks
from omnisupport_ingest.checks.window_checks import replays_explained, windows_settled
from omnisupport_ingest.failpoints import VARIABLE
from omnisupport_ingest.lake import delta, table
from omnisupport_ingest.lake.snapshot import TableSnapshot
from omnisupport_ingest.layers import survey_cache, window_index
from omnisupport_ingest.layers.dimension import dimensions
from omnisupport_ingest.layers.scheduling import pending
from omnisupport_ingest.layers.scheduling.pending import pending_windows, standing_of_windows
from omnisupport_ingest.layers.survey_cache import SurveyCache
from omnisupport_ingest.layers.window_index import DISCARDED_OF, HELD, UNSETTLED, WindowIndex
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.sqlite_index import IndexDamaged
from omnisupport_ingest_tests.layers.test_cost import READS

PER_WINDOW = 3


def noted(history: History) -> Path:
    return history.workspace.home.lake / SOURCE / "noted" / "windows.sqlite"


def without_note(history: History) -> object:
    """What a look finds that reads every window."""
    kept = noted(history)
    for suffix in ("", "-wal", "-shm"):
        Path(f"{kept}{suffix}").unlink(missing_ok=True)
    return standing_of_windows(history.opened(), SOURCE)


def first_tick(folder: Path, windows: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    history = History(folder, PER_WINDOW)
    history.grow(windows * PER_WINDOW)
    pending_windows(history.workspace, SOURCE)
    history.seal()
    workspace = history.opened()
    with READS.below(folder, monkeypatch) as seen:
        assert pending_windows(workspace, SOURCE).batches == 1
        assert windows_settled(workspace, SOURCE).numbers["windows_open"]
        assert replays_explained(workspace, SOURCE).passed
    return dict(seen)


@pytest.mark.full
def test_a_process_that_starts_in_a_home_with_400_windows_reads_as_many_states_as_in_one_with_40(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = first_tick(tmp_path / "few", 40, monkeypatch)
    many = first_tick(tmp_path / "many", 400, monkeypatch)
    assert many["states parsed"] == few["states parsed"]
    assert many["opened"] == few["opened"]


def read_by_checks(folder: Path, windows: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, int]]:
    """What each check of a run reads in a process of its own, of ``windows`` that are all taken in."""
    history = History(folder, PER_WINDOW)
    history.grow(windows * PER_WINDOW)
    pending_windows(history.workspace, SOURCE)
    checks: dict[str, Callable[[Workspace], object]] = {
        "no_collisions": lambda opened: lake_checks.no_collisions(opened, SOURCE),
        "epochs_in_order": lambda opened: lake_checks.epochs_in_order(opened, SOURCE),
        "quarantine_not_rising": lambda opened: lake_checks.quarantine_not_rising(
            opened, SOURCE, history.clock
        ),
        "tables_complete": lambda opened: lake_checks.tables_complete(opened, SOURCE),
        "tables_fresh": lambda opened: lake_checks.tables_fresh(opened, SOURCE, history.clock),
        "rules_kept": lambda opened: quality_checks.rules_kept(opened, SOURCE),
    }
    found = {}
    for name, check in checks.items():
        with READS.below(folder, monkeypatch) as seen:
            check(history.opened())
        found[name] = dict(seen)
    return found


@pytest.mark.full
def test_no_check_of_a_run_reads_more_of_400_windows_than_of_40(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = read_by_checks(tmp_path / "few", 40, monkeypatch)
    assert read_by_checks(tmp_path / "many", 400, monkeypatch) == few


def opened_by_checks(folder: Path, others: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, object]:
    """How many tables the checks of a run's process open, of which ``others`` have had no news."""
    history = History(folder, PER_WINDOW, others)
    history.grow(6 * PER_WINDOW)
    for number in range(4):
        history.close_others(number)
    history.seal()
    pending_windows(history.workspace, SOURCE)
    history.take_in([6])
    workspace, opened = history.opened(), []
    monkeypatch.setattr(table, "_opened", {})
    monkeypatch.setattr(delta, "DeltaTable", counting(opened))
    found = standing_of_windows(workspace, SOURCE)
    assert windows_settled(workspace, SOURCE).numbers["windows_open"]
    assert replays_explained(workspace, SOURCE).passed
    monkeypatch.undo()
    assert found == without_note(history)
    return len(opened), found


def counting(opened: list[str]) -> type[DeltaTable]:
    class Counting(DeltaTable):
        def __init__(self, folder: str, version: int | None = None) -> None:
            opened.append(folder)
            super().__init__(folder, version)

    return Counting


def test_the_checks_of_a_run_open_no_table_that_has_had_no_news(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few, _ = opened_by_checks(tmp_path / "few", 1, monkeypatch)
    many, standing = opened_by_checks(tmp_path / "many", 12, monkeypatch)
    assert many == few
    # What is pending is the batch that the other tables have to note when the window closes.
    assert standing.unsettled  # type: ignore[attr-defined]


def test_a_look_asks_a_table_without_news_for_the_state_of_a_window_twice_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For its layer and for the window's numbers: with hundreds of tables every question counts."""
    history = History(tmp_path, PER_WINDOW, 2)
    history.grow(6 * PER_WINDOW)
    for number in range(4):
        history.close_others(number)
    pending_windows(history.workspace, SOURCE)
    history.seal()
    workspace, asked = history.opened(), Counter[tuple[str, str]]()
    state = TableSnapshot.state

    def counted(snapshot: TableSnapshot, window: str) -> object:
        asked[snapshot.table.spec.path, window] += 1
        return state(snapshot, window)

    monkeypatch.setattr(TableSnapshot, "state", counted)
    standing_of_windows(workspace, SOURCE)
    of_others = {which: times for which, times in asked.items() if "net_changes/other" in which[0]}
    assert of_others and max(of_others.values()) <= 2


def after_a_run(folder: Path, others: int) -> History:
    """A home in which a run has taken in a batch of one table, and ``others`` have had no news. Two windows
    are not settled; in the later one the others hold nothing."""
    history = History(folder, PER_WINDOW, others)
    history.grow(6 * PER_WINDOW)
    for number in range(5):
        history.close_others(number)
    history.seal()
    pending_windows(history.workspace, SOURCE)
    history.take_in([6])
    return history


def read_after_a_run(folder: Path, others: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """What the checks of that run read, in a process that has opened nothing."""
    history = after_a_run(folder, others)
    workspace = history.opened().looking_once("a run")
    monkeypatch.setattr(table, "_opened", {})
    with READS.below(folder, monkeypatch) as seen:
        first = standing_of_windows(workspace, SOURCE)
        for _ in range(3):
            assert standing_of_windows(workspace, SOURCE) == first
    monkeypatch.undo()
    found = dict(seen)
    assert first == without_note(history)
    return found


@pytest.mark.full
def test_the_checks_of_a_run_read_nothing_of_tables_without_news(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = read_after_a_run(tmp_path / "few_", 2, monkeypatch)
    many = read_after_a_run(tmp_path / "many", 24, monkeypatch)
    assert many == few


def test_the_checks_of_a_run_look_at_each_table_without_news_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = after_a_run(tmp_path, 4)
    workspace, looked = history.opened().looking_once("a run"), Counter[str]()
    original = SurveyCache.newest

    def counted(seen: SurveyCache[object], of: table.LakeTable, fits: str = "") -> object:
        looked[of.spec.path] += 1
        return original(seen, of, fits)

    monkeypatch.setattr(SurveyCache, "newest", counted)
    for _ in range(4):
        standing_of_windows(workspace, SOURCE)
    of_others = [times for path, times in looked.items() if "net_changes/other" in path]
    assert len(of_others) == 4 and max(of_others) == 1


def test_the_index_knows_at_once_which_tables_have_nothing_of_a_window(tmp_path: Path) -> None:
    history = after_a_run(tmp_path, 3)
    history.workspace.net_changes(history.contract).open()
    tables = [history.workspace.net_changes(each) for each in history.workspace.contracts.of_source(SOURCE)]
    versions = {each.spec.path: each.open() for each in tables}
    entries = {path: each.mark.entry for path, each in versions.items() if each.mark is not None}
    for number in range(8):
        window = history.window(number)
        without = {
            each.spec.path
            for each in tables
            if not DeltaTable(str(each.folder)).file_uris(partition_filters=[("window", "=", window)])
        }
        assert tables[0].index.without(window, entries) == without
        assert bool(without) == (number > 4)
    assert not tables[0].index.without(history.window(7), dict.fromkeys(entries, "of another version"))


@pytest.mark.parametrize("change", ["a commit", "newest gone", "another entry", "another table", "older"])
def test_what_happens_to_a_table_without_news_is_found_by_the_next_process(
    tmp_path: Path, change: str
) -> None:
    history = after_a_run(tmp_path, 2)
    assert standing_of_windows(history.opened(), SOURCE) == standing_of_windows(history.opened(), SOURCE)
    contract = history.workspace.contracts.of_source(SOURCE)[1]
    folder = history.workspace.net_changes(contract).folder
    newest = max((folder / "_delta_log").glob("*.json"))
    noted = table.LakeTable(history.workspace.home.lake, history.workspace.net_changes(contract).spec)
    mark = noted.open().mark
    if change == "a commit":
        history.close_others(5)
    elif change == "newest gone":
        newest.unlink()
    elif change == "another entry":
        # Restored and changed in another way: the same version has another content.
        text = newest.read_bytes()
        newest.unlink()
        newest.write_bytes(text.replace(b"commitInfo", b"commitInfo", 1) + b"\n")
    elif change == "another table":
        other = history.workspace.net_changes(history.workspace.contracts.of_source(SOURCE)[2]).folder
        folder.rename(tmp_path / "away")
        shutil.copytree(other, folder)
    else:
        shutil.rmtree(folder)
    table._opened.clear()
    workspace = history.opened()
    found = standing_of_windows(workspace, SOURCE)
    with workspace.seen(SOURCE) as seen:
        now = seen.newest(workspace.net_changes(contract), contract.fingerprint)
    assert (now and now.mark) != mark
    assert found == without_note(history)


def test_a_table_whose_contract_changed_its_types_is_opened_and_waits(tmp_path: Path) -> None:
    history = after_a_run(tmp_path, 2)
    standing_of_windows(history.opened(), SOURCE)
    file = history._settings.contracts_dir / "other_000.json"
    document = json.loads(file.read_text())
    document["properties"]["id"] |= {"type": "string", "x-pg-type": "text"}
    file.write_text(json.dumps(document))
    workspace = history.opened()
    contract = workspace.contracts.of_source(SOURCE)[1]
    with workspace.seen(SOURCE) as seen:
        now = seen.newest(workspace.net_changes(contract), contract.fingerprint)
    assert now is not None and now.retyped
    assert standing_of_windows(workspace, SOURCE) == without_note(history)


def test_what_was_found_of_an_unsettled_window_counts_for_ten_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = after_a_run(tmp_path, 2)
    expected = standing_of_windows(history.opened(), SOURCE)
    assert expected.unsettled
    looked_at, original = [], pending._Survey._unsettled

    def counted(survey: pending._Survey, window: str) -> object:
        looked_at.append(window)
        return original(survey, window)

    monkeypatch.setattr(pending._Survey, "_unsettled", counted)
    assert standing_of_windows(history.opened(), SOURCE) == expected
    assert not looked_at
    # The first look of a process for what is pending takes nothing as noted.
    standing = history.opened()
    assert standing_of_windows(standing, SOURCE) == expected
    monkeypatch.setattr(SurveyCache, "_some_more", lambda _seen: set())
    pending.pending_windows(standing, SOURCE)
    assert set(looked_at) == set(expected.unsettled)
    looked_at.clear()
    held = history.opened()
    assert standing_of_windows(held, SOURCE) == expected and not looked_at
    now = time.time()
    # In the process that stands, and later in another one.
    for workspace, after in ((held, 601), (history.opened(), 1_300)):
        monkeypatch.setattr(survey_cache.time, "time", lambda after=after: now + after)
        assert standing_of_windows(workspace, SOURCE) == expected
        assert set(looked_at) == set(expected.unsettled)
        looked_at.clear()


def test_to_visit_a_table_without_news_as_its_window_closes_opens_no_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = History(tmp_path, PER_WINDOW, 3)
    history.grow(6 * PER_WINDOW)
    history.close_others(0)
    history.show_others()
    workspace, opened, window = history.opened(), [], history.window(1)
    monkeypatch.setattr(table, "_opened", {})
    monkeypatch.setattr(delta, "DeltaTable", counting(opened))
    for contract in workspace.contracts.of_source(SOURCE)[1:]:
        (made,) = dimensions.materialize(workspace, None, contract, [window], "run")  # type: ignore[arg-type]
        assert made.closed and made.window == window
    assert not opened


def test_a_table_with_a_newer_version_is_opened_whatever_is_noted_of_it(tmp_path: Path) -> None:
    history = History(tmp_path, PER_WINDOW, 2)
    history.grow(3 * PER_WINDOW)
    for number in (0, 1, 2):
        pending_windows(history.opened(), SOURCE)
        history.close_others(number)
        fresh = pending_windows(history.opened(), SOURCE)
        standing = standing_of_windows(history.opened(), SOURCE)
        assert standing == without_note(history)
        assert fresh == pending_windows(history.opened(), SOURCE)


@pytest.mark.parametrize("harm", ["gone", "garbage", "empty", "a row", "a flag"])
def test_a_note_that_is_missing_or_damaged_is_made_anew(tmp_path: Path, harm: str) -> None:
    import sqlite3

    history = History(tmp_path, PER_WINDOW)
    history.grow(4 * PER_WINDOW)
    history.seal()
    expected = standing_of_windows(history.workspace, SOURCE), pending_windows(history.workspace, SOURCE)
    history.workspace.seen(SOURCE).index.close()
    file = noted(history)
    if harm == "gone":
        file.unlink()
    elif harm in ("garbage", "empty"):
        file.write_bytes(b"no database" * 1000 if harm == "garbage" else b"")
    else:
        with sqlite3.connect(file) as db:
            db.execute("UPDATE \"window\" SET numbers = '{}'" if harm == "a row" else "DELETE FROM flagged")
        db.close()
    again = history.opened()
    assert (standing_of_windows(again, SOURCE), pending_windows(again, SOURCE)) == expected
    assert standing_of_windows(history.opened(), SOURCE) == without_note(history)


def test_a_table_that_went_another_way_since_is_looked_at_whole(tmp_path: Path) -> None:
    history = History(tmp_path, PER_WINDOW)
    history.grow(3 * PER_WINDOW)
    log = history.workspace.raw(SOURCE).folder / "_delta_log"
    history.seal()
    history.take_in([3])
    assert not pending_windows(history.workspace, SOURCE).batches
    # Restored from before: the last version of raw is gone, and another one is made in its place.
    newest = max(log.glob("*.json"))
    newest.unlink()
    assert pending_windows(history.opened(), SOURCE).batches == 1


def test_how_many_undiscarded_events_were_in_quarantine_is_known_of_the_last_two_days(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    day, index = 86_400.0, WindowIndex(tmp_path / "windows.sqlite")
    clock = [0.0]
    monkeypatch.setattr(window_index.time, "time", lambda: clock[0])

    def look(day_of_it: float, events: int, discarded: int = 0) -> None:
        clock[0] = day_of_it * day
        note = index.begin()
        numbers = {f"{HELD}collision": events, f"{DISCARDED_OF}collision": discarded}
        index.put("2026-01-31T0900", numbers)
        index.commit(replace(note, number=note.number + 1), note)

    def held(day_of_it: float) -> dict[str, int] | None:
        index.begin()
        found = index.held_at(datetime.fromtimestamp(day_of_it * day, UTC))
        index.rollback()
        return found

    look(1, 0)
    look(2, 3)
    look(2.5, 4, 1)
    look(3, 5)
    assert [held(at) for at in (0.9, 1.5, 2, 2.9, 3.5)] == [
        *(None, {}, {"collision": 3}, {"collision": 3}, {"collision": 5})
    ]
    look(5.5, 3, 2)
    # What stood two days before the newest look is known, and what stood earlier is not.
    assert [held(at) for at in (2.9, 3.4, 5.6)] == [None, {"collision": 5}, {"collision": 1}]


PROGRAM = """
import sys
from pathlib import Path
from datetime import UTC, datetime
from bench.history import SOURCE, START
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.lake import table
from omnisupport_ingest.layers.scheduling.pending import pending_windows
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.sqlite_index import IndexDamaged
folder = Path(sys.argv[1])
settings = Settings(
    home=folder / "home", window="minutes:60", first_window=START, contracts_dir=folder / "contracts",
    _env_file=None,
)
print(pending_windows(Workspace.open(settings), SOURCE).batches)
"""


@pytest.mark.crash
@pytest.mark.parametrize(
    "point", [f"lake.noted.{when}:{n}" for when in ("before", "after") for n in (1, 2, 3)]
)
def test_who_is_killed_while_noting_leaves_a_note_that_others_go_on_from(tmp_path: Path, point: str) -> None:
    history = History(tmp_path, PER_WINDOW)
    history.grow(2 * PER_WINDOW)
    history.seal()
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    killed = subprocess.run(command, env={**os.environ, VARIABLE: point}, check=False)
    assert killed.returncode == -9
    assert pending_windows(history.opened(), SOURCE).batches == 1
    assert standing_of_windows(history.opened(), SOURCE) == without_note(history)


def test_a_copy_of_pages_of_several_moments_is_not_believed(tmp_path: Path) -> None:
    main = tmp_path / "desk" / "noted" / "windows.sqlite"
    log = main.with_name("windows.sqlite-wal")
    index = WindowIndex(main)

    def look(number: int, unsettled: dict[str, int]) -> None:
        before = index.begin()
        for window, flag in unsettled.items():
            index.put(window, {UNSETTLED: flag})
        index.commit(replace(before, number=number), before)

    def checkpoint() -> None:
        with contextlib.closing(sqlite3.connect(main)) as db:
            assert db.execute("PRAGMA wal_checkpoint(RESTART)").fetchone()[0] == 0

    look(1, {"first": 1})
    checkpoint()
    copied = main.read_bytes()
    look(2, {"first": 0, "second": 1})
    checkpoint()
    look(3, {})
    copy = tmp_path / "restored" / "desk" / "noted" / main.name
    copy.parent.mkdir(parents=True)
    copy.write_bytes(copied)
    copy.with_name(log.name).write_bytes(log.read_bytes())
    index.close()
    of_copy = WindowIndex(copy)
    with pytest.raises(IndexDamaged):
        of_copy.begin()
        assert of_copy.flagged(UNSETTLED) == ["second"]
    of_copy.close()
