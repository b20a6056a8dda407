"""A home that reads a desk by its cursor, through every layer."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import Row, SparkSession

from omnisupport_ingest.contracts.in_force import contracts_in_force
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.contracts.sources import sources_in_force
from omnisupport_ingest.home import Home
from omnisupport_ingest.layers.dimension import dimensions, net_changes
from omnisupport_ingest.layers.events import deduped, raw
from omnisupport_ingest.layers.histories import history
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.read.schema_changes import judged_changes
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.sources.query.run import QuerySource
from omnisupport_ingest.sources.query.sync import SyncReport
from omnisupport_ingest.windows import WindowSize
from omnisupport_ingest_tests.sources.query.tickets import SOURCE, Desk, contract_document


class Platform:
    """A home that reads ``desk``'s tickets by their cursor, and takes them through every layer."""

    def __init__(self, desk: Desk, folder: Path, monkeypatch: pytest.MonkeyPatch, **policy: Any) -> None:
        contracts = folder / "contracts" / "data"
        contracts.mkdir(parents=True)
        document = contract_document()
        document["x-cdc"] |= policy
        (contracts / "tickets.json").write_text(json.dumps(document))
        definition = {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "name": SOURCE,
            "kind": "query",
            "description": "A desk.",
            "connection": {"env": "DESK_URL"},
        }
        (folder / "contracts" / "sources").mkdir()
        (folder / "contracts" / "sources" / f"{SOURCE}.json").write_text(json.dumps(definition))
        monkeypatch.setenv("DESK_URL", desk.dsn)
        monkeypatch.setenv("OMNISUPPORT_HOME", str(folder / "home"))
        monkeypatch.setenv("OMNISUPPORT_CONTRACTS_DIR", str(contracts))
        self.settings = Settings(_env_file=None)
        now = datetime.now(UTC) - timedelta(days=1)
        self.home = Home.open(self.settings.home, WindowSize(60), now=now)

    @property
    def workspace(self) -> Workspace:
        return Workspace(self.settings, self.home, contracts_in_force(self.settings))

    @property
    def contract(self) -> TableContract:
        return next(iter(self.workspace.contracts.of_source(SOURCE)))

    def edit_contract(self, edit: Callable[[dict[str, Any]], None]) -> None:
        path = self.settings.contracts_dir / "tickets.json"
        document = json.loads(path.read_text())
        edit(document)
        path.write_text(json.dumps(document))

    def sync(self, **how: Any) -> None:
        assert self.report(**how).finished

    def report(self, **how: Any) -> SyncReport:
        contracts = self.workspace.contracts
        definition = sources_in_force(self.settings, contracts).find(SOURCE)
        source = QuerySource.of(definition, contracts, self.home)
        if "reason" in how:
            how["anew"] = source.tables
        return source.sync(**how)

    def take_in(self, spark: SparkSession) -> None:
        workspace, contract = self.workspace, self.contract
        windows = workspace.landing(SOURCE).windows()
        for layer in (raw, deduped):
            layer.materialize(workspace, spark, SOURCE, windows, "run")
        net_changes.materialize(workspace, spark, contract, windows, "run")
        dimensions.update(workspace, spark, contract, "run")
        history.materialize(workspace, spark, contract, "run")

    def rows(self, spark: SparkSession, *, past: bool = False) -> list[Row]:
        table = self.workspace.history(self.contract) if past else self.workspace.dimension(self.contract)
        snapshot = table.open()
        place = ["id", "_cdc_valid_from_position"] if past else ["id"]
        return snapshot.read(spark, snapshot.all_files()).orderBy(*place).collect()

    def asked(self) -> list[tuple[str, str | None, str]]:
        found = judged_changes(self.workspace, SOURCE)
        return [(each.change.kind, each.change.column, each.edit) for each in found if each.asks]
