"""Settings reach a child process as they are here."""

from __future__ import annotations

from pathlib import Path

import pytest

from omnisupport_ingest.runtime.environment import settings_environment
from omnisupport_ingest.settings import Settings


def test_settings_survive_the_way_through_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = Settings(home=Path("somewhere"), window="minutes:5", source_dsn="dbname=x password=y")
    for name, value in settings_environment(settings).items():
        monkeypatch.setenv(name, value)
    assert Settings() == settings.model_copy(update={"home": tmp_path / "somewhere"})
