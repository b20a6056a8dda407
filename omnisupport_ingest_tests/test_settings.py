"""Settings come from the environment and ``.env``, typed, and keep secrets out of sight."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.settings import PREFIX, Settings
from omnisupport_ingest.windows import WindowSize


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in Settings.model_fields:
        monkeypatch.delenv(PREFIX + name.upper(), raising=False)
    monkeypatch.chdir(tmp_path)


def test_defaults_need_no_environment() -> None:
    settings = Settings()
    assert settings.window_size == WindowSize(60)
    assert settings.source_dsn is None


def test_environment_wins_over_the_env_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("OMNISUPPORT_WINDOW=daily\nOMNISUPPORT_SLOT=from_file\nOTHER=1\n")
    monkeypatch.setenv("OMNISUPPORT_WINDOW", "minutes:15")
    settings = Settings()
    assert (settings.window_size, settings.slot) == (WindowSize(15), "from_file")


def test_passwords_are_not_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNISUPPORT_SOURCE_DSN", "postgresql://desk:hunter2@db/desk")
    settings = Settings()
    assert "hunter2" not in repr(settings) + str(settings)
    assert settings.source_dsn is not None
    assert settings.source_dsn.get_secret_value().endswith("@db/desk")


@pytest.mark.parametrize(
    ("name", "value"), [("BATCH_MAX_BYTES", "0"), ("BATCH_MAX_SECONDS", "0"), ("WEBSERVER_PORT", "65536")]
)
def test_value_out_of_range_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(PREFIX + name, value)
    with pytest.raises(ValidationError, match=name.lower()):
        Settings()


def test_unknown_window_size_names_the_accepted_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNISUPPORT_WINDOW", "weekly")
    with pytest.raises(IngestError, match="not a window size") as raised:
        Settings()
    assert "minutes:N" in raised.value.fix


def test_settings_do_not_change() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Settings().slot = "another"  # type: ignore[misc]


def test_the_names_of_a_proxy_are_taken_apart_and_what_is_no_name_is_refused() -> None:
    assert Settings(webserver_hosts=None).ui_hosts == frozenset()
    assert Settings(webserver_hosts="Dagster.example, dagster.example:8443,").ui_hosts == {
        "dagster.example",
        "dagster.example:8443",
    }
    for wrong in ("https://dagster.example", "dagster.example/ui", "*", "a b"):
        with pytest.raises(ValueError, match="is not a name of a host"):
            Settings(webserver_hosts=wrong)
