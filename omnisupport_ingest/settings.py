"""Every setting of the platform, and the only place that reads the environment or ``.env``."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, SecretStr, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from omnisupport_ingest.windows import WindowSize

PREFIX = "OMNISUPPORT_"


class Settings(BaseSettings):
    """Settings as typed values; each is the variable ``OMNISUPPORT_<NAME>`` or a line of ``.env``."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_file=".env", env_file_encoding="utf-8", extra="ignore", frozen=True
    )

    home: Path = Field(Path(".omnisupport"), description="Folder of landing, lake, Dagster home, logs.")
    contracts_dir: Path | None = Field(
        None, description="Folder of table contracts; default: contracts/data here, else the packaged ones."
    )
    window: str = Field("hourly", description="Window size: hourly, daily, or minutes:N (N divides 60).")
    source: str = Field("support_desk", description="Name of the PostgreSQL source in contracts and lake.")
    source_dsn: SecretStr | None = Field(
        None, description="libpq connection string of the source; unset: the embedded PostgreSQL."
    )
    slot: str = Field("omnisupport_ingest", description="Name of the replication slot.")
    publication: str = Field("omnisupport_ingest", description="Name of the publication.")
    batch_max_bytes: int = Field(
        64 * 1024 * 1024, ge=1, description="Cut a WAL batch at this size, in bytes."
    )
    batch_max_seconds: float = Field(5.0, gt=0, description="Cut a WAL batch at this age, in seconds.")
    max_clock_skew_seconds: float = Field(
        2.0, ge=0, description="How far commit times may run behind the clock, in seconds (watermark)."
    )
    dagster_pg_url: SecretStr | None = Field(
        None, description="PostgreSQL URL for Dagster's own storage; unset: SQLite in the home."
    )
    spark_master: str = Field(
        "local[2]", description="Spark master of the Connect server or classic session."
    )
    spark_remote: str | None = Field(
        None, description="Address of a running Spark Connect server, sc://host:port."
    )
    spark_driver_memory: str = Field("2g", description="Memory of the Spark driver, like 2g.")
    webserver_port: int = Field(3000, ge=0, le=65535, description="Port of the Dagster UI on loopback.")

    @field_validator("window")
    @classmethod
    def _window_is_a_size(cls, text: str) -> str:
        return str(WindowSize.parse(text))

    @property
    def window_size(self) -> WindowSize:
        return WindowSize.parse(self.window)
