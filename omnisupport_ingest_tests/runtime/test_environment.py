"""Settings reach a child process as they are here."""

from __future__ import annotations

from pathlib import Path

import pytest

from omnisupport_ingest.home import Home
from omnisupport_ingest.runtime.environment import settings_environment, with_window_of_home
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.windows import WindowSize


def test_settings_survive_the_way_through_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = Settings(home=Path("somewhere"), window="minutes:5", source_dsn="dbname=x password=y")
    for name, value in settings_environment(settings).items():
        monkeypatch.setenv(name, value)
    assert Settings() == settings.model_copy(update={"home": tmp_path / "somewhere"})


def test_the_home_decides_about_the_window_unless_one_is_set(tmp_path: Path) -> None:
    Home.open(tmp_path, WindowSize.parse("minutes:1"))
    assert with_window_of_home(Settings(home=tmp_path)).window == "minutes:1"
    assert with_window_of_home(Settings(home=tmp_path, window="daily")).window == "daily"
    assert with_window_of_home(Settings(home=tmp_path / "none")).window == "hourly"
