"""Settings come from the environment and ``.env``, typed, and keep secrets out of sight."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.failpoints import VARIABLE
from omnisupport_ingest.runtime.connect_address import ConnectAddress
from omnisupport_ingest.settings import (
    PREFIX,
    STORAGE_URL,
    Settings,
    SettingUnknown,
    require_known_variables,
)
from omnisupport_ingest.windows import WindowSize
from omnisupport_ingest_tests.cli.command import command


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


def test_an_empty_variable_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OMNISUPPORT_SOURCE_DSN", "")
    monkeypatch.setenv("OMNISUPPORT_SNAPSHOT_CHUNK_ROWS", "")
    # It still wins over the file.
    (tmp_path / ".env").write_text("OMNISUPPORT_SOURCE_DSN=dbname=production\n")
    found = Settings(_env_file=tmp_path / ".env")
    assert found.source_dsn is None and "snapshot_chunk_rows" not in found.model_fields_set


def test_a_path_may_begin_with_a_persons_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "ana"))
    (tmp_path / ".env").write_text("OMNISUPPORT_HOME=~/lake\n")
    monkeypatch.setenv("OMNISUPPORT_CONTRACTS_DIR", "~/contracts")
    settings = Settings()
    assert settings.home == tmp_path / "ana" / "lake"
    assert settings.contracts_dir == tmp_path / "ana" / "contracts"


def test_the_folder_of_a_person_whom_nobody_knows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNISUPPORT_HOME", "~nobody-at-all/lake")
    with pytest.raises(ValidationError, match="nobody knows whose folder ~nobody-at-all is"):
        Settings()


def test_passwords_are_not_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNISUPPORT_SOURCE_DSN", "postgresql://desk:hunter2@db/desk")
    settings = Settings()
    assert "hunter2" not in repr(settings) + str(settings)
    assert settings.source_dsn is not None
    assert settings.source_dsn.get_secret_value().endswith("@db/desk")


@pytest.mark.parametrize(
    ("address", "server"),
    [
        ("sc://spark.example", "sc://spark.example"),
        ("sc://[::1]:15002/;token=hunter2;user_id=a%3Db", "sc://[::1]:15002"),
        (ConnectAddress("/a b/run/s=1.sock", "hunter2").url, "sc://localhost"),
    ],
)
def test_the_token_in_the_address_of_spark_is_not_printed(address: str, server: str) -> None:
    settings = Settings(spark_remote=address)
    assert "hunter2" not in repr(settings) + str(settings)
    assert settings.spark_server == server
    assert settings.spark_remote is not None
    assert settings.spark_remote.get_secret_value() == address


@pytest.mark.parametrize(
    "address",
    [
        "spark.example:15002/;token=hunter2",
        "sc://spark.example;token=hunter2",
        "sc://spark.example:port/;token=hunter2",
        "sc://spark.example/x;token=hunter2",
        "sc://me:hunter2@spark.example",
        "sc://spark.example/;token=hunter2==",
    ],
)
def test_an_address_that_pyspark_does_not_take_is_refused_without_its_token(address: str) -> None:
    with pytest.raises(ValidationError, match="sc://host:port") as refused:
        Settings(spark_remote=address)
    assert "hunter2" not in str(refused.value)


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


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("OMNISUPPORT_SOURCE_DNS", "OMNISUPPORT_SOURCE_DSN"),
        ("OMNISUPPORT_CONTRACT_DIR", "OMNISUPPORT_CONTRACTS_DIR"),
        ("omnisupport_hom", "OMNISUPPORT_HOME"),
        ("OMNISUPPORT_XYZZY", "omnisupport-ingest settings"),
    ],
)
def test_a_misspelled_variable_is_refused_with_the_one_that_was_meant(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, meant: str
) -> None:
    """Else its setting has silently its default: another database, another home."""
    monkeypatch.setenv(name, "hunter2")
    with pytest.raises(SettingUnknown, match=name) as refused:
        require_known_variables()
    assert meant in refused.value.fix
    assert refused.value.exit_code == 2
    assert "hunter2" not in str(refused.value)
    monkeypatch.delenv(name)
    require_known_variables()

    (tmp_path / ".env").write_text(f"{name}=hunter2\nOTHER=1\nOMNISUPPORT_SLOT=mine\n")
    with pytest.raises(SettingUnknown, match=r"in \.env") as refused:
        require_known_variables()
    assert meant in refused.value.fix
    done = command("settings")
    assert (done.code, name in done.err) == (2, True)


def test_variables_that_are_no_settings_and_known_are_let_be(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (VARIABLE, STORAGE_URL):
        monkeypatch.setenv(name, "x")
    require_known_variables()
