"""The recorded events, contracts for their tables, and a home that they land in."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from omnisupport_ingest.contracts.learned import LearnedColumns
from omnisupport_ingest.contracts.load import TableContract, load_contracts
from omnisupport_ingest.home import Home
from omnisupport_ingest.lake.checkpoint import Checkpoint
from omnisupport_ingest.landing.manifest import Manifest
from omnisupport_ingest.layers.dimension import dimensions, net_changes
from omnisupport_ingest.layers.events import deduped, raw
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.sources.debezium.handling import Handling
from omnisupport_ingest.sources.debezium.land import FileLanding, Inlet, land
from omnisupport_ingest.windows import WindowSize, without_sentinel

DATA = Path(__file__).with_name("data")
DEFAULTS = DATA / "events.jsonl"
STRINGS = DATA / "events_string_modes_with_schema.jsonl"
STRING_MODES = Handling("string", "hex")

SOURCE = "recorded"
START = datetime(2026, 11, 20, 15, tzinfo=UTC)
"""Before all that was recorded."""

ALL_TYPES = {
    "id": "integer",
    "b": "boolean",
    "i2": "smallint",
    "i4": "integer",
    "i8": "bigint",
    "f4": "real",
    "f8": "double precision",
    "n": "numeric",
    "n10_2": "numeric(10,2)",
    "m": "money",
    "t": "text",
    "vc": "varchar(20)",
    "ch": "char(5)",
    "nm": "name",
    "by": "bytea",
    "u": "uuid",
    "js": "json",
    "jb": "jsonb",
    "d": "date",
    "tm": "time",
    "tmtz": "timetz",
    "ts": "timestamp",
    "ts3": "timestamp(3)",
    "tstz": "timestamptz",
    "iv": "interval",
    "ia": "int[]",
    "ta": "text[]",
    "na": "numeric[]",
    "tsa": "timestamptz[]",
    "ja": "jsonb[]",
    "ia2": "int[]",
    "e": "public.mood",
    "ea": "public.mood[]",
    "dom": "integer",
    "ip": "inet",
    "ci": "cidr",
    "mac": "macaddr",
    "bt": "bit(3)",
    "vb": "bit varying(10)",
    "pt": "point",
    "xm": "xml",
    "i4r": "int4range",
    "tsr": "tstzrange",
    "tv": "tsvector",
    "o": "oid",
}
TABLES: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "customers": (
        ("id",),
        {
            "id": "bigint",
            "email": "text",
            "name": "text",
            "full_name": "text",
            "status": "text",
            "org_id": "bigint",
            "updated_at": "timestamptz",
            "attrs": "jsonb",
        },
    ),
    "all_types": (("id",), ALL_TYPES),
    "toasty": (("id",), {"id": "integer", "big": "text", "small": "text"}),
    "toasty_full": (("id",), {"id": "integer", "big": "text", "small": "text"}),
    "compkey": (("a", "b"), {"a": "integer", "b": "text", "c": "text"}),
    "uidx": (("id",), {"id": "integer", "v": "text"}),
    "gen": (("id",), {"id": "integer", "a": "integer"}),
}
"""Table → its key, and its columns with their types."""


def contract(table: str, key: tuple[str, ...], columns: dict[str, str]) -> dict[str, Any]:
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": table,
        "description": "A recorded table.",
        "type": "object",
        "required": list(key),
        "additionalProperties": True,
        "properties": {
            name: {
                "type": _json_type(pg_type) if name in key else [_json_type(pg_type), "null"],
                "x-pg-type": pg_type,
                "description": "Recorded.",
            }
            for name, pg_type in columns.items()
        },
        "x-cdc": {
            "version": "1.0.0",
            "source": SOURCE,
            "schema": "public",
            "table": table,
            "owner": "team:tests",
            "key": list(key),
            "events": {"soft_delete_column": "deleted_at" if "deleted_at" in columns else None},
            "lateness": {"allowed": "PT1H", "max": "P7D"},
            "pii": {},
        },
    }


def _json_type(pg_type: str) -> str:
    plain = pg_type.partition("(")[0]
    if plain in ("smallint", "integer", "bigint"):
        return "integer"
    if plain in ("real", "double precision", "numeric"):
        return "number"
    return "boolean" if plain == "boolean" else "string"


class Recorder:
    """A home with the contracts of ``tables``, and the inlet of its source."""

    def __init__(
        self,
        folder: Path,
        *tables: str,
        handling: Handling | None = None,
        evolution: str | None = None,
        pii: dict[str, Any] | None = None,
    ) -> None:
        """``evolution``, ``pii``: the contracts' policies for schema changes and for personal columns."""
        self.folder = folder
        contracts = folder / "contracts"
        contracts.mkdir(parents=True, exist_ok=True)
        for table in tables or TABLES:
            document = contract(table, *TABLES[table])
            document["x-cdc"] |= {} if evolution is None else {"evolution": evolution}
            document["x-cdc"]["pii"] = pii or {}
            (contracts / f"{table}.json").write_text(json.dumps(document))
        settings = Settings(home=folder / "home", contracts_dir=contracts, _env_file=None)
        home = Home.open(settings.home, WindowSize(60), now=START)
        self.workspace = Workspace(settings, home, load_contracts(contracts))
        self.now = START + timedelta(hours=3)
        self.inlet = Inlet(
            store=self.workspace.landing(SOURCE),
            grid=self.workspace.grid,
            contracts=self.workspace.contracts,
            captured="support_desk",
            handling=handling or Handling(),
            clock=self._clock,
            learned=LearnedColumns(home.path, SOURCE),
        )

    def _clock(self) -> datetime:
        self.now += timedelta(seconds=1)
        return self.now

    def file(self, name: str, lines: Iterable[bytes]) -> Path:
        path = self.folder / name
        path.write_bytes(b"".join(line.rstrip(b"\n") + b"\n" for line in lines))
        return path

    def land(self, path: Path, new_epoch: str | None = None) -> FileLanding:
        return land(path, self.inlet, new_epoch=new_epoch)

    def land_lines(self, name: str, lines: Iterable[bytes], new_epoch: str | None = None) -> FileLanding:
        return self.land(self.file(name, lines), new_epoch)

    def land_values(self, name: str, *values: object, new_epoch: str | None = None) -> FileLanding:
        return self.land_lines(name, [json.dumps(each).encode() for each in values], new_epoch)

    def events(self, manifest: Manifest | None = None) -> list[dict[str, Any]]:
        """What has landed, by file and line."""
        store = self.inlet.store
        rows = [
            row
            for each in ([manifest] if manifest else store.manifests())
            for file in each.files
            for row in pq.ParquetFile(store.path_of(file)).read().to_pylist()
        ]
        return sorted(rows, key=lambda row: (row["batch_id"], row["file_row"]))

    def contract(self, table: str) -> TableContract:
        return next(each for each in self.workspace.contracts if each.table == table)

    def run(self, spark: SparkSession) -> list[Checkpoint]:
        """Everything that has landed, through every layer; the checkpoints of judging."""
        windows = sorted({w for each in self.inlet.store.manifests() for w in without_sentinel(each.windows)})
        raw.materialize(self.workspace, spark, SOURCE, windows, "run")
        judged = deduped.materialize(self.workspace, spark, SOURCE, windows, "run")
        for each in self.workspace.contracts:
            net_changes.materialize(self.workspace, spark, each, windows, "run")
            dimensions.update(self.workspace, spark, each, "run")
        return judged

    def state(self, spark: SparkSession, table: str) -> dict[tuple[Any, ...], dict[str, Any]]:
        """The rows of the dimension of ``table`` by their key, without what depends on when they landed."""
        of_table = self.contract(table)
        snapshot = self.workspace.dimension(of_table).open()
        names = [*of_table.column_names, "_cdc_is_deleted", "_cdc_unresolved"]
        frame = snapshot.read(spark, snapshot.files("")).select(*names)
        # Python has no time before year 1.
        times = {name: F.col(name).cast("string") for name, kind in frame.dtypes if kind == "timestamp"}
        rows = frame.withColumns(times).collect()
        return {tuple(row[name] for name in of_table.key): row.asDict() for row in rows}
