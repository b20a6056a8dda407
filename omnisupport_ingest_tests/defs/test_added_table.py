"""A table is added by its contract file alone: assets, checks, pool, and a real run into its tables."""

from __future__ import annotations

import copy
import json
from uuid import uuid4

import dagster as dg
import pytest
from dagster._core.definitions.job_base import InMemoryJob
from dagster._core.execution.api import execute_run
from deltalake import DeltaTable

from omnisupport_ingest.definitions import build_definitions
from omnisupport_ingest.defs import keys
from omnisupport_ingest.landing.manifest import StreamSpan
from omnisupport_ingest.layers.scheduling.pending import pending_windows
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.position import Lsn
from omnisupport_ingest_tests.layers import story as stories
from omnisupport_ingest_tests.layers.story import CONTRACT, SOURCE, Change, Commit, Story, events

pytestmark = pytest.mark.usefixtures("spark")

NOTE = Commit(10, 1, [Change("c", 1, {"title": "note", "body": None})])
SECOND = Commit(20, 70, [Change("c", 2, {"title": "two", "body": None})])
RANGE = "dagster/asset_partition_range"
LABELS = Commit(
    20, 2, [Change("c", 1, {"title": "bug", "body": None}), Change("c", 2, {"title": "idea", "body": "x"})]
)


def land_of_both_tables(story: Story) -> str:
    """One batch with a row of ``notes`` and two of ``labels``; returns its window."""
    labels = [event._replace(source_table="labels") for event in events(LABELS)]
    start, end = Lsn(NOTE.lsn), Lsn(LABELS.lsn)
    span = StreamSpan(Lsn(0), end, start, end, LABELS.lsn, stories.START, stories.START)
    (window,) = story._seal([*events(NOTE), *labels], span).windows
    return window


def add_labels(story: Story) -> Workspace:
    contract = copy.deepcopy(CONTRACT)
    contract["title"] = "Labels"
    contract["x-cdc"]["table"] = "labels"
    (story.contracts / "labels.json").write_text(json.dumps(contract))
    return Workspace.open(story.workspace.settings)


def ingest(workspace: Workspace, window: str, instance: dg.DagsterInstance) -> dg.ExecuteInProcessResult:
    tags = {
        "dagster/asset_partition_range_start": window,
        "dagster/asset_partition_range_end": window,
    }
    job = build_definitions(workspace).resolve_job_def(f"ingest_{SOURCE}")
    done = job.execute_in_process(instance=instance, tags=tags)
    assert done.success
    return done


def shown(workspace: Workspace) -> dict[str, list[tuple[int, str]]]:
    """The rows of each dimension that is there, by table."""
    found = {}
    for contract in workspace.contracts.of_source(SOURCE):
        rows = DeltaTable(str(workspace.dimension(contract).folder)).to_pyarrow_table().to_pylist()
        found[contract.name] = sorted((row["id"], row["title"]) for row in rows)
    return found


def test_a_contract_file_brings_the_rows_that_landed_before_it_into_a_dimension(recent_story: Story):
    window = land_of_both_tables(recent_story)
    with dg.DagsterInstance.ephemeral() as instance:
        ingest(recent_story.workspace, window, instance)
        assert shown(recent_story.workspace) == {"notes": [(1, "note")]}
        assert pending_windows(recent_story.workspace, SOURCE).windows == ()

        workspace = add_labels(recent_story)
        assert pending_windows(workspace, SOURCE).windows == (window,)
        graph = build_definitions(workspace).resolve_asset_graph()
        dimension = dg.AssetKey([SOURCE, "dim_labels"])
        assert graph.get(dimension).pools == {f"{SOURCE}/dim_labels"}

        run = ingest(workspace, window, instance)
        assert shown(workspace) == {"notes": [(1, "note")], "labels": [(1, "bug"), (2, "idea")]}
        assert pending_windows(workspace, SOURCE).windows == ()
        assert instance.get_materialized_partitions(dimension) == {window}
        # Nobody has taken a snapshot of these tables, and the checks say so.
        failed = {check.check_name for check in run.get_asset_check_evaluations() if not check.passed}
        assert failed == {"complete"}

        audit = build_definitions(workspace).resolve_job_def(f"audit_{SOURCE}")
        verdicts = audit.execute_in_process(instance=instance).get_asset_check_evaluations()
        of_labels = {check.check_name: check.passed for check in verdicts if check.asset_key == dimension}
        assert of_labels.pop("complete") is False
        assert of_labels == {
            "keys_unique": True,
            "no_unresolved_cells": True,
            "meets_contract": True,
            "fresh": True,
            "schema_as_contracted": True,
            "rules_kept": True,
        }


class Served:
    """The sensor of a code server that loaded the definitions before the documents were edited; each run
    loads them again."""

    def __init__(self, story: Story, instance: dg.DagsterInstance) -> None:
        self._workspace = Workspace.open(story.workspace.settings)
        self._definitions = build_definitions(self._workspace)
        self._instance = instance

    def requests(self) -> list[dg.RunRequest]:
        sensor = self._definitions.get_repository_def().get_sensor_def(f"wal_batches_{SOURCE}")
        result = sensor(dg.build_sensor_context(self._instance), workspace=self._workspace)
        return result.run_requests or []

    def run(self, request: dg.RunRequest) -> None:
        """Execute the run as the daemon creates it, by the definitions of a new process."""
        name, only = f"ingest_{SOURCE}", request.asset_selection
        run = dg.DagsterRun(
            job_name=name,
            run_id=str(uuid4()),
            tags={keys.TAKE_NEW_TAG: "true", **request.tags, "dagster/run_key": request.run_key},
            asset_selection=None if only is None else frozenset(only),
        )
        self._instance.add_run(run)
        as_now = build_definitions(Workspace.open(self._workspace.settings)).resolve_job_def(name)
        execute_run(InMemoryJob(as_now), run, self._instance, raise_on_error=True)

    def settle(self) -> list[tuple[str, str]]:
        """Run what the sensor requests until it requests nothing; return the ranges of windows."""
        found = []
        while requests := self.requests():
            for each in requests:
                found.append((each.tags[f"{RANGE}_start"], each.tags[f"{RANGE}_end"]))
                assert len(found) < 5, found
                self.run(each)
        return found


def test_the_sensor_follows_a_contract_that_is_edited_while_it_runs(recent_story: Story):
    with dg.DagsterInstance.ephemeral() as instance:
        served = Served(recent_story, instance)
        (first,) = recent_story.land(NOTE).windows
        assert served.settle() == [(first, first)]
        contract = copy.deepcopy(CONTRACT)
        contract["properties"]["title"]["maxLength"] = 3
        recent_story.write_contract(contract)
        # What landed before is judged again, with what lands now.
        (second,) = recent_story.land(SECOND).windows
        assert {window for each in served.settle() for window in each} == {first, second}
        assert pending_windows(Workspace.open(recent_story.workspace.settings), SOURCE).nothing


def test_the_sensor_requests_a_table_that_was_added_while_it_runs(recent_story: Story):
    window = land_of_both_tables(recent_story)
    with dg.DagsterInstance.ephemeral() as instance:
        served = Served(recent_story, instance)
        assert served.settle() == [(window, window)]
        workspace = add_labels(recent_story)
        assert served.settle() == [(window, window)]
        assert shown(workspace) == {"notes": [(1, "note")], "labels": [(1, "bug"), (2, "idea")]}
