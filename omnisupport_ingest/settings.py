"""Every setting of the platform, and the only place that reads the environment or ``.env``."""

from __future__ import annotations

import difflib
import io
import os
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.failpoints import VARIABLE as FAILPOINT
from omnisupport_ingest.storage import parse_storage
from omnisupport_ingest.windows import WindowSize

PREFIX = "OMNISUPPORT_"

ENV_FILE = ".env"
"""Read only in the working directory."""

STORAGE_URL = "OMNISUPPORT_DAGSTER_STORAGE_URL"
"""Passed by our processes to Dagster's; not a setting."""


_SPARK_REMOTE = re.compile(
    r"sc://(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?(?:/(?:;[^=;\s]+=[^=;\s]*)*)?"
)
"""The form that PySpark accepts; in its error about any other form PySpark repeats the text, the token
included."""

_ADDRESS = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}")

_HOST = re.compile(r"(?:[a-z0-9._-]+|\[[0-9a-f:.]+\])(?::[0-9]{1,5})?")


class SnapshotMode(StrEnum):
    """When capture reads whole tables.

    ``initial``: each table once in an epoch. ``when_needed``: also after a gap, by a new epoch, unless
    it may be a mistake (``SlotMoved``, ``AnotherSource``).

    ``schema_only``: no rows by itself, only the schema of each table. ``never``: nothing by itself.
    """

    INITIAL = "initial"
    WHEN_NEEDED = "when_needed"
    SCHEMA_ONLY = "schema_only"
    NEVER = "never"

    @property
    def reads_rows(self) -> bool:
        """Whether a table that this epoch has not read is read without being asked for."""
        return self in (SnapshotMode.INITIAL, SnapshotMode.WHEN_NEEDED)


class NightlyRetention(StrEnum):
    """What the job ``retention`` does: show what contracts give up by age, or remove it."""

    PLAN = "plan"
    APPLY = "apply"


class SettingUnknown(IngestError):
    """A variable or a line of ``.env`` begins with ``OMNISUPPORT_`` and is no setting.

    Fix: Correct the name; ``omnisupport-ingest settings`` lists every setting.
    """

    exit_code = 2


class Settings(BaseSettings):
    """Settings as typed values; each is the variable ``OMNISUPPORT_<NAME>`` or a line of ``.env``."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_file=ENV_FILE,
        env_file_encoding="utf-8",
        extra="ignore",
        frozen=True,
        # A refused value may be a secret.
        hide_input_in_errors=True,
    )

    home: Path = Field(
        Path(".omnisupport"),
        description="Folder of landing, lake, Dagster's files, logs and the embedded database.",
    )
    storage: str | None = Field(
        None,
        description="Where landing and lake are kept: a bucket, with copies in the home "
        "([storage](storage.md)). Fixed when the home is made. Unset: what the home records; for a new home "
        "its own folders.",
        examples=["s3://our-bucket/omnisupport"],
        json_schema_extra={"values": "URL"},
    )
    contracts_dir: Path | None = Field(
        None,
        description="Folder of table contracts. Unset: the one that the home records; for a new home "
        "contracts/data of the working directory, else the packaged ones. A new home for a database of "
        "[the demo](demo.md) gets the contracts of that database.",
        examples=["contracts/data"],
    )
    decision_table: Path | None = Field(
        None,
        description="What is done with late, repeated, disordered and wrong events. Unset: the file that "
        "the home records; for a new home reports/week03/late_arrival_decision_table.csv of the working "
        "directory, else the packaged one. [The demo](demo.md) takes the packaged one where the contracts of "
        "the working directory are of other tables.",
        examples=["reports/week03/late_arrival_decision_table.csv"],
    )
    window: str = Field(
        "hourly",
        description="Window size. Fixed when the home is made.",
        json_schema_extra={"values": "`hourly`, `daily`, `minutes:N` (N divides 60)"},
    )
    first_window: datetime | None = Field(
        None,
        description="Where windows begin, in UTC. Fixed when the home is made; earlier events have no "
        "window. Unset: an hour before the home is made.",
        examples=["2026-11-20T00:00"],
        json_schema_extra={"values": "time, ISO 8601"},
    )
    source: str = Field(
        "support_desk",
        description="The PostgreSQL source, as x-cdc.source in the contracts and as folder in landing and "
        "lake. Unset: the name that the home records; for a new home that of the database in "
        "OMNISUPPORT_SOURCE_DSN, without one support_desk.",
    )
    source_dsn: SecretStr | None = Field(
        None,
        description="The source database. Unset: the embedded PostgreSQL.",
        examples=["host=db.example port=5432 dbname=support user=capture password=…"],
        json_schema_extra={"values": "libpq connection string, secret"},
    )
    source_silence_seconds: float = Field(
        60.0,
        ge=1,
        description="How long the source may be silent where an answer is due, in seconds. Then it is asked "
        "on another connection what the silent session does, and one that is not at work is given up. "
        "`tcp_user_timeout` in the connection string, in milliseconds, wins.",
    )
    slot: str = Field(
        "omnisupport_ingest",
        description="The replication slot of the home's own source. That of another captured source has "
        "the name of its source behind it, unless the definition names one.",
    )
    publication: str = Field("omnisupport_ingest", description="The publication, in the same way.")
    batch_max_bytes: int = Field(
        64 * 1024 * 1024,
        ge=1,
        description="A batch is cut at the first commit at or above this size: bytes of its events' text, "
        "estimated before compression.",
    )
    batch_max_seconds: float = Field(
        1.0,
        gt=0,
        description="A batch is cut, too, at the first commit at or above this age, in seconds. `tune` "
        "measures what an age costs and brings on this machine.",
    )
    stream_transactions: bool = Field(
        True,
        description="Take large transactions while they are in progress, and keep each in the home until it "
        "commits (PostgreSQL 14 and newer). Off: the server keeps it, and sends it then.",
    )
    stream_above_bytes: int = Field(
        64 * 1024 * 1024,
        ge=64 * 1024,
        le=1024**4,
        description="Memory that the server may fill with what it decodes, in bytes; beyond it, the largest "
        "transaction is sent before it commits. It is the server's `logical_decoding_work_mem`, set for "
        "capture's session alone.",
    )
    max_row_bytes: int = Field(
        256 * 1024 * 1024,
        ge=1,
        description="The largest row that capture takes, in bytes as the source sends it. Capture needs "
        "about five times as much memory for one. The table of a larger one is left out by name, and the "
        "others go on; it is read again when that is asked for.",
    )
    max_clock_skew_seconds: float = Field(
        2.0, ge=0, description="What the watermark stays behind commit times and clocks, in seconds."
    )
    snapshot_mode: SnapshotMode = Field(
        SnapshotMode.INITIAL,
        description="When whole tables are read: `initial`: each once; `when_needed`: also after a gap, in "
        "a new epoch that begins by itself (not where somebody has moved the slot, or the server is "
        "another); `schema_only`: only their schema; `never`. `source snapshot` reads one in every mode.",
        json_schema_extra={"values": "`initial`, `when_needed`, `schema_only`, `never`"},
    )
    snapshot_threads: int = Field(
        2, ge=1, le=64, description="Chunks of a snapshot read at a time, each on a connection of its own."
    )
    snapshot_chunk_rows: int = Field(
        500_000, ge=1, description="Rows of a chunk of a snapshot, about. An interrupted one is read again."
    )
    snapshot_fetch_bytes: int = Field(
        6 * 1024 * 1024,
        ge=65536,
        description="What each connection of a snapshot reads at a time, in bytes.",
    )
    snapshot_rows_per_second: int | None = Field(
        None,
        ge=1,
        description="Rows that a snapshot may read a second, in all. Unset: as fast as it goes.",
        examples=["50000"],
    )
    slot_warning_bytes: int = Field(
        5_000_000_000,
        gt=0,
        description="WAL kept for the slot from which on to warn, in bytes.",
    )
    slot_alarm_bytes: int = Field(
        10_000_000_000, gt=0, description="WAL kept for the slot from which on to raise the alarm, in bytes."
    )
    pii_keys: str | None = Field(
        None,
        description="The keys that personal values are hashed with, as `id=env:VARIABLE` or `id=file:PATH`, "
        "the current one first; the secrets stand in those variables and files alone. Unset: none.",
        examples=["2026b=env:PII_2026B,2026a=file:/run/secrets/pii_2026a"],
        json_schema_extra={"values": "comma-separated"},
    )
    verify_minutes: int | None = Field(
        None,
        ge=1,
        le=60,
        description="Every how many minutes the platform compares the tables of each captured source with "
        "it, by checksums at one LSN. Unset: it does not, until somebody turns the schedule on.",
        examples=["5"],
    )
    verify_rows: int = Field(
        800_000,
        ge=10_000,
        description="Rows that one such comparison has a server read at most, about, of all its tables. "
        "Ranges of keys that have not changed since they were read cost a tenth; what has changed beyond "
        "that is read by the next comparisons, the oldest first.",
    )
    alarm_command: str | None = Field(
        None,
        description="Command line, run by `sh`, when what is wrong with the platform or a source changes: "
        "worse, better, or other problems ([alarms](operate.md#alarms)); it reads a JSON document on its "
        "standard input. Unset: none.",
        examples=["/usr/local/bin/page-on-call"],
        json_schema_extra={"values": "command line"},
    )
    alarm_webhook: SecretStr | None = Field(
        None,
        description="The same document is posted to this address. Unset: none.",
        examples=["https://hooks.example/…"],
        json_schema_extra={"values": "URL, secret"},
    )
    heartbeat_url: SecretStr | None = Field(
        None,
        description="Asked (GET) every minute while the platform runs and nothing is left to tell, so that "
        "who watches for it hears when the machine or `up` is gone. Unset: none.",
        examples=["https://watch.example/ping/…"],
        json_schema_extra={"values": "URL, secret"},
    )
    dagster_pg_url: SecretStr | None = Field(
        None,
        description="Dagster's own storage in PostgreSQL. Unset: SQLite in the home.",
        examples=["postgresql://dagster:…@db.example:5432/dagster"],
        json_schema_extra={"values": "URL, secret"},
    )
    retention: NightlyRetention = Field(
        NightlyRetention.PLAN,
        description="What the platform does every night with what contracts give up by age: `plan`: count "
        "it and remove nothing; `apply`: remove it ([retention](retention.md)).",
        json_schema_extra={"values": "`plan`, `apply`"},
    )
    runs_kept_days: int | None = Field(
        None,
        ge=1,
        description="After how many days the job `retention` removes finished runs from Dagster's records, "
        "where OMNISUPPORT_RETENTION is `apply`. Unset: without a limit.",
        examples=["90"],
    )
    spark_master: str = Field(
        "local[2]",
        description="Master of the Spark Connect server, and of a session without one.",
        json_schema_extra={"values": "Spark master"},
    )
    spark_remote: SecretStr | None = Field(
        None,
        description="A Spark Connect server that runs elsewhere.",
        examples=["sc://spark.example:15002/;token=…"],
        json_schema_extra={"values": "`sc://host:port`, options behind `/;`, secret"},
    )
    spark_properties: Path | None = Field(
        None,
        description="File with Spark's own settings, in the form of `spark-defaults.conf`: of a cluster its "
        "secret, its executors, Kubernetes or YARN. For the Spark that the program starts. One that decides "
        "about data is refused. Unset: none.",
        examples=["/etc/omnisupport/spark.conf"],
    )
    key_service: str | None = Field(
        None,
        description="Address of this machine at which executors that see no home ask for keys of subjects "
        "and for tokens. If the port is taken, one of the 15 after it is. Unset: the address that leads to "
        "the cluster, and any free port.",
        examples=["10.0.0.5:7099"],
        json_schema_extra={"values": "`host:port`"},
    )
    spark_driver_memory: str = Field(
        "2g", description="Memory of the Spark driver.", json_schema_extra={"values": "Spark size"}
    )
    spark_local_dir: Path | None = Field(
        None,
        description="Folder for what Spark spills and shuffles, in a private folder of its own there. Unset: "
        "in the home. With a master that does not begin with `local` the cluster decides.",
        examples=["/mnt/fast"],
    )
    webserver_port: int = Field(
        3000, ge=0, le=65535, description="Port of the Dagster UI on loopback; 0 takes a free one."
    )
    metrics_port: int | None = Field(
        None,
        ge=1,
        le=65535,
        description="Port on loopback on which `up` serves metrics for Prometheus, and health; needs the "
        "extra `metrics`. Unset: none.",
        examples=["9464"],
    )
    traces_endpoint: SecretStr | None = Field(
        None,
        description="Where runs send their traces, by OTLP over HTTP; needs the extra `traces`. What the "
        "collector wants besides is set by the variables of its library, such as "
        "`OTEL_EXPORTER_OTLP_HEADERS`. Unset: nowhere.",
        examples=["http://127.0.0.1:4318/v1/traces"],
        json_schema_extra={"values": "URL, secret"},
    )
    webserver_hosts: str | None = Field(
        None,
        description="Names under which a reverse proxy shows the Dagster UI, with the port if the browser "
        "shows one. Requests for any other name, and from pages of any other, are refused. Unset: "
        "`127.0.0.1` and `localhost` alone.",
        examples=["dagster.example,dagster.example:8443"],
        json_schema_extra={"values": "`name` or `name:port`, comma-separated"},
    )

    @model_validator(mode="before")
    @classmethod
    def _empty_is_unset(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Leave out empty values: an ``.env`` for Compose names variables that nobody has filled in. An empty
        variable of the environment still wins over ``.env``."""
        return {name: value for name, value in values.items() if value != ""}

    @field_validator("home", "contracts_dir", "decision_table", "spark_properties", "spark_local_dir")
    @classmethod
    def _tilde_is_the_users_folder(cls, path: Path | None) -> Path | None:
        # A shell does not replace it in a line of .env, or in a unit of systemd.
        if path is None:
            return None
        try:
            return path.expanduser()
        except RuntimeError:
            raise ValueError(f"nobody knows whose folder {path.parts[0]} is; write the whole path") from None

    @field_validator("storage")
    @classmethod
    def _storage_is_a_url(cls, value: str | None) -> str | None:
        if value is not None:
            parse_storage(value)
        return value

    @field_validator("window")
    @classmethod
    def _window_is_a_size(cls, text: str) -> str:
        return str(WindowSize.parse(text))

    @field_validator("first_window")
    @classmethod
    def _first_window_is_utc(cls, moment: datetime | None) -> datetime | None:
        if moment is None or moment.tzinfo is not None:
            return moment
        return moment.replace(tzinfo=UTC)

    @field_validator("spark_remote")
    @classmethod
    def _spark_remote_is_an_address(cls, address: SecretStr | None) -> SecretStr | None:
        if address is not None and not _SPARK_REMOTE.fullmatch(address.get_secret_value()):
            raise ValueError(
                "it is not sc://host:port, with options behind it as /;name=value;name=value (in a value "
                "write %3D for =)"
            )
        return address

    @field_validator("key_service")
    @classmethod
    def _key_service_is_an_address(cls, address: str | None) -> str | None:
        if address is None:
            return None
        host, _, port = address.rpartition(":")
        if not _ADDRESS.fullmatch(address) or int(port) > 65535 or host in ("0.0.0.0", "[::]"):  # noqa: S104
            raise ValueError(
                "it is not host:port, like 10.0.0.5:7099, with a host by which executors reach this machine"
            )
        return address

    @field_validator("webserver_hosts")
    @classmethod
    def _webserver_hosts_are_names(cls, text: str | None) -> str | None:
        for name in _names(text):
            if not _HOST.fullmatch(name):
                raise ValueError(
                    f"`{name}` is not a name of a host, with a port or without, like dagster.example:8443"
                )
        return text

    @property
    def ui_hosts(self) -> frozenset[str]:
        """The names in ``webserver_hosts``, in lower case."""
        return frozenset(_names(self.webserver_hosts))

    @property
    def spark_server(self) -> str | None:
        """``spark_remote`` for messages: without its options, one of which may be a token."""
        if self.spark_remote is None:
            return None
        return self.spark_remote.get_secret_value().partition("/;")[0]

    @property
    def window_size(self) -> WindowSize:
        return WindowSize.parse(self.window)


def _names(text: str | None) -> list[str]:
    """Return the names in a comma-separated list, in lower case."""
    return [name.strip().lower() for name in (text or "").split(",") if name.strip()]


def named_variable(name: str) -> str | None:
    """Return the value of the variable ``name``, which a source definition names, from the environment or
    ``.env``."""
    from dotenv import dotenv_values

    return os.environ.get(name) or dotenv_values(ENV_FILE, interpolate=False).get(name)


def require_known_variables() -> None:
    """Refuse a misspelled variable in the environment or in ``.env``; ``SettingUnknown`` names the nearest
    setting.

    A warning would not do: the setting would have its default, which may be another database or another home.
    """
    settings = [PREFIX + name.upper() for name in Settings.model_fields]
    for name, where in _variables():
        if name.upper() in (*settings, FAILPOINT, STORAGE_URL):
            continue
        near = difflib.get_close_matches(name.upper(), settings, n=1, cutoff=0.75)
        meant = f"Write {near[0]}, or take it out." if near else "Take it out."
        raise SettingUnknown(
            f"{name} {where} is no setting.",
            fix=f"{meant} `omnisupport-ingest settings` lists them all.",
        )


def _variables() -> Iterator[tuple[str, str]]:
    """Yield the variables with our prefix, each with where it is set."""
    from dotenv import dotenv_values

    for where, names in (
        ("in the environment", os.environ),
        (f"in {ENV_FILE}", dotenv_values(ENV_FILE, interpolate=False)),
    ):
        yield from ((name, where) for name in sorted(names) if name.upper().startswith(PREFIX))


def env_with(text: str, values: Mapping[str, str]) -> str:
    """Return the text of an ``.env`` with the variables of ``values`` set to them; the rest stays unchanged.

    A variable that the text has is changed where it stands, at every occurrence; others follow at the end.
    Names in the text count as if in capitals, as for ``Settings``. Values are plain words.
    """
    from dotenv.parser import parse_stream

    waiting, parts = dict(values), []
    for binding in parse_stream(io.StringIO(text)):
        part, name = binding.original.string, (binding.key or "").upper()
        if name in values:
            waiting.pop(name, None)
            # The empty lines before a variable belong to it.
            start = part[: len(part) - len(part.lstrip())]
            part = f"{start}{name}={values[name]}\n"
        parts.append(part)
    before = "".join(parts)
    if waiting and before and not before.endswith("\n"):
        before += "\n"
    return before + "".join(f"{name}={value}\n" for name, value in waiting.items())
