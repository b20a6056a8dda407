"""How often a run looks whether its tables have changed follows the tables, not the checks that it makes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster_pyspark import LazyPySparkResource

from bench.history import SOURCE, History
from omnisupport_ingest.checks.findings import CheckFinding
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.definitions import build_definitions
from omnisupport_ingest.defs import checks, keys
from omnisupport_ingest.lake import ledger as lake_ledger
from omnisupport_ingest.lake import table as lake_table
from omnisupport_ingest.lake.file_index import FileIndex
from omnisupport_ingest.lake.file_index_tables import TableLog
from omnisupport_ingest.lake.log_entry import put_entry
from omnisupport_ingest.lake.snapshot import TableSnapshot
from omnisupport_ingest.layers.scheduling.pending import pending_windows
from omnisupport_ingest.layers.workspace import Workspace

CHECKS = ["counts_add_up", "no_collisions", "epochs_in_order", "windows_settled", "replays_explained"]


def looks_of(
    history: History, names: list[str], instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> Counter[str]:
    """How often a run of the checks ``names`` looks at each table, by its folder below the lake."""
    found: Counter[str] = Counter()
    lake = history.workspace.home.lake

    def count(where: object, name: str, folder: Callable[..., Path]) -> None:
        original: Callable[..., object] = getattr(where, name)

        def counted(*arguments: object) -> object:
            found[folder(*arguments).relative_to(lake).as_posix()] += 1
            return original(*arguments)

        patch.setattr(where, name, counted)

    def of_snapshot(snapshot: TableSnapshot) -> Path:
        return snapshot.table.folder

    def of_log(_: FileIndex, log: TableLog) -> Path:
        return log.folder

    job = build_definitions(history.workspace).resolve_job_def(keys.audit_job_name(SOURCE))
    chosen = {dg.AssetCheckKey(keys.deduped_key(SOURCE), name) for name in names}
    subset = job.get_subset(asset_selection=set(), asset_check_selection=chosen)
    with monkeypatch.context() as patch:
        count(TableSnapshot, "is_newest", of_snapshot)
        count(FileIndex, "newest", of_log)
        count(lake_table, "is_delta", lambda folder: folder)
        count(lake_ledger, "is_delta", lambda folder: folder)
        result = subset.execute_in_process(instance=instance)
    assert len(result.get_asset_check_evaluations()) == len(names)
    return found


def test_all_checks_of_a_run_look_at_each_table_as_often_as_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = History(tmp_path, 3)
    history.grow(6)
    pending_windows(history.workspace, SOURCE)
    with dg.DagsterInstance.ephemeral() as instance:
        # The first look of a process compares two tables once more.
        looks_of(history, CHECKS[:1], instance, monkeypatch)
        one = looks_of(history, CHECKS[:1], instance, monkeypatch)
        every = looks_of(history, CHECKS, instance, monkeypatch)
        # Another run sees what was committed meanwhile: it looks again.
        again = looks_of(history, CHECKS, instance, monkeypatch)
    ledgers = {f"{SOURCE}/{name}" for name in ("review_ledger", "erasure_ledger", "retention_ledger")}
    tables = {f"{SOURCE}/{name}" for name in ("raw_cdc_staging", "deduped_events", "net_changes/notes")}
    assert ledgers | tables <= one.keys()
    assert every == again == one
    assert set(one.values()) == {1}


def test_a_check_of_rows_looks_at_its_table_once_spark_is_there(tmp_path: Path) -> None:
    """A minute may have passed since somebody looked whether the run needs a Spark of its own."""
    history = History(tmp_path, 3)
    history.grow(3)
    contract, seen = history.contract, list[int]()

    def session(workspace: Workspace, _: LazyPySparkResource) -> Any:
        table = workspace.dimension(contract)
        assert table.look() is not None
        # Another run commits while Spark begins.
        newest = table.index.newest(table.log)
        assert newest is not None
        put_entry(table.log, newest, [], {})

    def finding(workspace: Workspace, _: Any, of: TableContract) -> CheckFinding:
        """Look at the table."""
        looked = workspace.dimension(of).look()
        assert looked is not None
        seen.append(looked.version)
        return CheckFinding(True, "seen")

    before = history.workspace.dimension(contract).open().version
    made = checks._content_check(contract=contract, name="seen", finding=finding, session=session)
    definitions = dg.Definitions(
        asset_checks=[made],
        jobs=[dg.define_asset_job("audit", selection=dg.AssetSelection.checks(made))],
        resources={"workspace": history.workspace, "pyspark": LazyPySparkResource(spark_config={})},
    )
    with dg.DagsterInstance.ephemeral() as instance:
        assert definitions.resolve_job_def("audit").execute_in_process(instance=instance).success
    assert seen == [before + 1]
