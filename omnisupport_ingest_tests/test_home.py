"""A home is made once and agrees with what opens it later."""

from __future__ import annotations

import errno
import json
import stat
from datetime import UTC, datetime
from pathlib import Path

import pytest

from omnisupport_ingest.home import Home, HomeMismatch, HomeUnwritable
from omnisupport_ingest.windows import WindowSize

NOW = datetime(2026, 3, 2, 0, 20, tzinfo=UTC)
HOURLY = WindowSize(60)


def test_windows_start_before_the_home_does(tmp_path: Path) -> None:
    home = Home.open(tmp_path / "home", HOURLY, now=NOW)
    assert home.grid.first == datetime(2026, 3, 1, 23, tzinfo=UTC)
    assert home.grid.size == HOURLY


@pytest.mark.parametrize("minutes", [1, 15, 60, 24 * 60])
def test_any_window_size_makes_a_home(tmp_path: Path, minutes: int) -> None:
    grid = Home.open(tmp_path, WindowSize(minutes), now=NOW).grid
    assert grid.first == grid.truncate(grid.first) < NOW


def test_opening_again_changes_nothing(tmp_path: Path) -> None:
    made = Home.open(tmp_path, HOURLY, now=NOW)
    marker = (tmp_path / "home.json").read_bytes()
    assert Home.open(tmp_path, HOURLY) == made
    assert (tmp_path / "home.json").read_bytes() == marker


def test_folders_are_for_the_owner_only(tmp_path: Path) -> None:
    home = Home.open(tmp_path / "home", HOURLY)
    folders = [home.path, home.landing, home.lake, home.dagster, home.logs, home.postgres, home.run]
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in folders} == {0o700}
    assert stat.S_IMODE((home.path / "home.json").stat().st_mode) == 0o600


def test_another_window_size_is_refused_with_the_one_it_has(tmp_path: Path) -> None:
    Home.open(tmp_path, HOURLY)
    with pytest.raises(HomeMismatch, match="hourly windows, but OMNISUPPORT_WINDOW is daily") as raised:
        Home.open(tmp_path, WindowSize(24 * 60))
    assert "OMNISUPPORT_WINDOW=hourly" in raised.value.fix


def test_newer_home_is_refused_whatever_else_it_says(tmp_path: Path) -> None:
    (tmp_path / "home.json").write_text(json.dumps({"format_version": 99}))
    with pytest.raises(HomeMismatch, match="format version 99; this program reads up to 2"):
        Home.open(tmp_path, HOURLY)


def test_home_of_an_earlier_format_is_refused_with_the_command_that_makes_it_one_of_this(
    tmp_path: Path,
) -> None:
    grid = Home.open(tmp_path, HOURLY).grid
    marker = tmp_path / "home.json"
    marker.write_text(json.dumps(json.loads(marker.read_text()) | {"format_version": 1}))
    with pytest.raises(HomeMismatch, match="has format version 1") as raised:
        Home.open(tmp_path, HOURLY)
    assert raised.value.fix.endswith("omnisupport-ingest rebuild")
    home = Home.open(tmp_path, HOURLY, earlier=True)
    assert home.is_earlier
    home.adopt()
    assert not home.is_earlier and Home.open(tmp_path, HOURLY).grid == grid


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"format_version": 2}',
        '{"format_version": 2, "window": "weekly", "first_window": "2026-03-01T00:00:00+00:00"}',
        '{"format_version": 2, "window": "hourly", "first_window": "2026-03-01T00:30:00+00:00"}',
    ],
)
def test_damaged_marker_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "home.json").write_text(content)
    with pytest.raises(HomeMismatch, match=r"home\.json cannot be read"):
        Home.open(tmp_path, HOURLY)


def test_windows_begin_where_the_setting_says_when_the_home_is_made(tmp_path):
    first = datetime(2026, 1, 1, 9, 30, tzinfo=UTC)
    home = Home.open(tmp_path, WindowSize(60), now=datetime(2026, 3, 1, tzinfo=UTC), first=first)
    assert home.grid.first == datetime(2026, 1, 1, 9, tzinfo=UTC)
    assert Home.open(tmp_path, WindowSize(60)).grid == home.grid


def test_another_first_window_than_the_home_s_is_refused(tmp_path):
    Home.open(tmp_path, WindowSize(60), now=datetime(2026, 3, 1, tzinfo=UTC))
    with pytest.raises(HomeMismatch, match="begin at 2026-02-28T2300") as refused:
        Home.open(tmp_path, WindowSize(60), first=datetime(2026, 1, 1, tzinfo=UTC))
    assert "OMNISUPPORT_FIRST_WINDOW" in str(refused.value)


@pytest.mark.parametrize("place", ["/proc/nobody/home", "file/home", "file"])
def test_a_home_that_cannot_be_made_is_named_with_its_setting(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HomeUnwritable, match="cannot be made or written") as refused:
        Home.open(tmp_path / place, HOURLY)
    assert str(tmp_path / place) in refused.value.problem
    assert "OMNISUPPORT_HOME" in refused.value.fix


def test_a_folder_of_a_home_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    home = Home.open(tmp_path / "home", HOURLY)
    (tmp_path / "home" / "landing").write_text("")
    with pytest.raises(HomeUnwritable, match="landing"):
        _ = home.landing


def test_a_full_disk_stays_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(OSError, match="No space left"):
        Home.open(tmp_path / "home", HOURLY)
