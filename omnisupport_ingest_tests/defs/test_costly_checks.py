"""Which checks a run makes that makes tables, too: none that reads rows or asks the source."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import dagster as dg
import pytest
from dagster_pyspark import LazyPySparkResource

from omnisupport_ingest.checks.findings import CheckFinding
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.contracts.sources import SourceDefinition, SourceKind
from omnisupport_ingest.defs import checks, equality, keys
from omnisupport_ingest.equality.checking import Checked
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.read.verified import EQUAL, Moment, Verified
from omnisupport_ingest_tests.layers.story import SOURCE, Story

NAMES = {"rows_read", equality.CHECK}
NOW = datetime(2026, 11, 24, tzinfo=UTC)


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What the checks looked at."""
    found: list[str] = []

    def compare(*_: object) -> list[Checked]:
        found.append(equality.CHECK)
        (contract,) = _[2]  # type: ignore[misc]
        return [Checked(contract, Verified(contract.name, EQUAL, NOW, through=Moment(1, Lsn(1), NOW)))]

    monkeypatch.setattr(equality, "_checked", compare)
    yield found


def definitions(story: Story, looked: list[str]) -> dg.Definitions:
    """A dimension that costs nothing to make, with a check of each costly kind."""
    contract = story.contract

    @dg.asset(key=keys.dimension_key(contract))
    def dimension() -> None: ...

    def rows_read(workspace: Workspace, spark: Any, of: TableContract) -> CheckFinding:
        """Read rows."""
        looked.append("rows_read")
        return CheckFinding(True, "read")

    def session(workspace: Workspace, pyspark: LazyPySparkResource) -> Any:
        return None

    of_rows = checks._content_check(contract=contract, name="rows_read", finding=rows_read, session=session)
    of_source = equality.build_equality(
        story.workspace.settings, SourceDefinition(SOURCE, SourceKind.LOG, "A desk."), [contract]
    )
    own = dg.Definitions(
        assets=[dimension],
        asset_checks=[of_rows],
        jobs=[dg.define_asset_job("audit", selection=dg.AssetSelection.checks(of_rows))],
        resources={"workspace": story.workspace, "pyspark": LazyPySparkResource(spark_config={})},
    )
    return dg.Definitions.merge(own, of_source)


def test_a_materialization_makes_no_costly_check_and_their_last_results_stay(
    story: Story, looked: list[str]
) -> None:
    made = definitions(story, looked)
    with dg.DagsterInstance.ephemeral() as instance:
        for job in ("audit", f"verify_{SOURCE}"):
            run = made.resolve_job_def(job).execute_in_process(instance=instance)
            assert len(run.get_asset_check_evaluations()) == 1
        assert set(looked) == NAMES
        looked.clear()
        # As the daemon runs a backfill, and as the UI materializes one partition, which names the checks.
        asset = keys.dimension_key(story.contract)
        every = made.resolve_implicit_global_asset_job_def()
        named = every.get_subset(
            asset_selection={asset}, asset_check_selection={dg.AssetCheckKey(asset, name) for name in NAMES}
        )
        for job in (every.get_subset(asset_selection={asset}), named):
            run = job.execute_in_process(instance=instance)
            assert run.success and run.get_asset_materialization_events()
            assert looked == [] and run.get_asset_check_evaluations() == []


def test_a_check_that_somebody_executes_alone_is_made(story: Story, looked: list[str]) -> None:
    every = definitions(story, looked).resolve_implicit_global_asset_job_def()
    asset = keys.dimension_key(story.contract)
    chosen = {dg.AssetCheckKey(asset, name) for name in NAMES}
    alone = every.get_subset(asset_selection=set(), asset_check_selection=chosen)
    with dg.DagsterInstance.ephemeral() as instance:
        run = alone.execute_in_process(instance=instance)
    assert {each.check_name for each in run.get_asset_check_evaluations()} == NAMES == set(looked)
