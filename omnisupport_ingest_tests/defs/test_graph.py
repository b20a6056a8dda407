"""The asset graph that the contracts make."""

from __future__ import annotations

import copy
import itertools
import json
import subprocess
import sys
from pathlib import Path

import dagster as dg
import pytest

from omnisupport_ingest.contracts.load import load_contracts
from omnisupport_ingest.contracts.model import ContractError
from omnisupport_ingest.definitions import build_definitions
from omnisupport_ingest.home import Home
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.windows import WindowSize
from omnisupport_ingest_tests.layers.story import CONTRACT, SOURCE, Story

pytestmark = pytest.mark.quick

REPOSITORY = Path(__file__).parents[2]


def graph_of(workspace: Workspace) -> dict[str, tuple[str | None, str | None, tuple[str, ...]]]:
    """The group, the layer and the kinds of every asset."""
    graph = build_definitions(workspace).resolve_asset_graph()
    nodes = {key.to_user_string(): graph.get(key) for key in graph.get_all_asset_keys()}
    return {
        name: (node.group_name, node.tags.get("layer"), tuple(sorted(node.kinds)))
        for name, node in nodes.items()
    }


def test_the_graph_of_the_shipped_contracts(tmp_path):
    settings = Settings(home=tmp_path / "home", _env_file=None)
    contracts = load_contracts(REPOSITORY / "contracts" / "data")
    workspace = Workspace(settings, Home.open(settings.home, WindowSize(60)), contracts)
    lake = ("deltalake", "spark")
    expected = {
        "report": ("reports", None, ("html",)),
        "support_desk/landing": ("support_desk", "landing", ("parquet", "postgres")),
        "support_files/landing": ("support_files", "landing", ("file", "parquet")),
        "support_files/raw_cdc_staging": ("support_files", "raw", lake),
        "support_files/deduped_events": ("support_files", "deduped", lake),
        "support_files/dim_legacy_tickets": ("support_files", "dimensions", lake),
        "support_files/history/dim_legacy_tickets_history": ("support_files", "history", lake),
        "omnisupport_files/landing": ("omnisupport_files", "landing", ("file", "parquet")),
        "omnisupport_files/raw_cdc_staging": ("omnisupport_files", "raw", lake),
        "omnisupport_files/deduped_events": ("omnisupport_files", "deduped", lake),
        "omnisupport_files/dim_omnisupport_tickets": ("omnisupport_files", "dimensions", lake),
        "omnisupport_files/history/dim_omnisupport_tickets_history": ("omnisupport_files", "history", lake),
        "partner_desk/landing": ("partner_desk", "landing", ("file", "parquet")),
        "partner_desk/raw_cdc_staging": ("partner_desk", "raw", lake),
        "partner_desk/deduped_events": ("partner_desk", "deduped", lake),
        "partner_desk/dim_partner_tickets": ("partner_desk", "dimensions", lake),
        "partner_desk/history/dim_partner_tickets_history": ("partner_desk", "history", lake),
        "support_desk/raw_cdc_staging": ("support_desk", "raw", lake),
        "support_desk/deduped_events": ("support_desk", "deduped", lake),
    }
    for table in ("agents", "customers", "organizations", "ticket_comments", "tickets"):
        expected[f"support_desk/dim_{table}"] = ("support_desk", "dimensions", lake)
        expected[f"support_desk/history/dim_{table}_history"] = ("support_desk", "history", lake)
    assert graph_of(workspace) == expected


def test_every_layer_reads_the_one_above_it(definitions):
    graph = definitions.resolve_asset_graph()
    chain = ["landing", "raw_cdc_staging", "deduped_events", "dim_notes"]
    keys = [dg.AssetKey(["desk", name]) for name in chain]
    for upstream, downstream in itertools.pairwise(keys):
        assert graph.get(downstream).parent_keys == {upstream}


def test_a_contract_file_adds_assets_checks_and_pools(story: Story):
    before = build_definitions(story.workspace).resolve_asset_graph()
    contract = copy.deepcopy(CONTRACT)
    contract["title"] = "Labels"
    contract["x-cdc"]["table"] = "labels"
    (story.contracts / "labels.json").write_text(json.dumps(contract))
    workspace = Workspace(story.workspace.settings, story.workspace.home, load_contracts(story.contracts))
    after = build_definitions(workspace).resolve_asset_graph()
    assert {key.to_user_string() for key in after.get_all_asset_keys() - before.get_all_asset_keys()} == {
        "desk/dim_labels",
        "desk/history/dim_labels_history",
    }
    assert {key.to_user_string() for key in after.asset_check_keys - before.asset_check_keys} == {
        "desk/dim_labels:complete",
        "desk/dim_labels:fresh",
        "desk/dim_labels:rules_kept",
        "desk/dim_labels:schema_as_contracted",
        "desk/dim_labels:keys_unique",
        "desk/dim_labels:no_unresolved_cells",
        "desk/dim_labels:meets_contract",
        "desk/history/dim_labels_history:open_rows_are_current_state",
        "desk/history/dim_labels_history:versions_do_not_overlap",
    }
    assert after.get(dg.AssetKey(["desk", "dim_labels"])).pools == {"desk/dim_labels"}


def test_the_partition_of_the_open_window_is_there(story: Story, definitions):
    partitions = (
        definitions.resolve_asset_graph().get(dg.AssetKey(["desk", "raw_cdc_staging"])).partitions_def
    )
    assert partitions.get_first_partition_key() == "2026-01-01T1100"
    assert partitions.end_offset == 1


def test_a_table_describes_its_columns(story: Story, definitions):
    schema = definitions.resolve_asset_graph().get(dg.AssetKey(["desk", "dim_notes"])).metadata
    columns = {column.name: column for column in schema["dagster/column_schema"].columns}
    assert columns["title"].type == "string"
    assert columns["title"].description == "Title. From public.notes.title."
    assert columns["id"].type == "bigint"
    assert not columns["id"].constraints.nullable
    system = [each for each in columns.values() if each.name.startswith("_cdc_")]
    assert len(system) == 15 and all(each.description for each in system)
    assert [each.name for each in system if each.type.startswith("struct")] == ["_cdc_state"]


@pytest.mark.parametrize(
    "key",
    [
        ["desk", "raw_cdc_staging"],
        ["desk", "deduped_events"],
        ["desk", "history", "dim_notes_history"],
    ],
)
def test_every_column_of_a_table_is_described(story: Story, definitions, key: list[str]):
    schema = definitions.resolve_asset_graph().get(dg.AssetKey(key)).metadata["dagster/column_schema"]
    assert all(each.description for each in schema.columns)


@pytest.mark.parametrize("table", [["dim_notes"], ["history", "dim_notes_history"]])
def test_columns_of_dimension_and_history_lead_back_to_those_of_the_source(definitions, table: list[str]):
    graph = definitions.resolve_asset_graph()
    metadata = graph.get(dg.AssetKey(["desk", *table])).metadata
    lineage = metadata["dagster/column_lineage"].deps_by_column
    assert set(lineage) == {"id", "title", "body"}
    schemas = {
        layer: {
            each.name: each
            for each in graph.get(dg.AssetKey(["desk", layer])).metadata["dagster/column_schema"].columns
        }
        for layer in ("landing", "deduped_events")
    }
    for name, deps in lineage.items():
        told = {(dep.asset_key.path[-1], dep.column_name) for dep in deps}
        assert told == {
            ("landing", f"public.notes.{name}"),
            ("deduped_events", "after"),
            ("deduped_events", "before"),
        }
        assert all(column in schemas[layer] for layer, column in told)
    shown = {each.name: each.description for each in metadata["dagster/column_schema"].columns}
    assert all(shown[name].endswith(f"From public.notes.{name}.") for name in lineage)
    landed = schemas["landing"]["public.notes.title"].description
    assert landed == "Title. Leads to dim_notes.title."


def test_a_broken_contract_names_its_file(tmp_path):
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ContractError, match=r"broken\.json"):
        Workspace.open(Settings(home=tmp_path / "home", contracts_dir=tmp_path, _env_file=None))


@pytest.mark.full
def test_loading_the_code_location_starts_no_jvm(tmp_path):
    code = (
        "from omnisupport_ingest.definitions import defs; defs().get_repository_def();"
        "from pyspark import SparkContext; assert SparkContext._gateway is None"
    )
    environment = {"OMNISUPPORT_HOME": str(tmp_path / "home"), "PATH": "/nowhere", "PYTHONWARNINGS": "ignore"}
    loaded = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, env=environment, capture_output=True, text=True
    )
    assert loaded.returncode == 0, loaded.stderr


def test_a_run_makes_every_table_before_any_check(definitions: dg.Definitions) -> None:
    """Steps that are ready are taken by their priority, and what people wait for are the tables."""
    job = definitions.resolve_job_def(f"ingest_{SOURCE}")
    checked = {key.to_user_string().replace("/", "__") for key in job.asset_layer.executable_asset_keys}
    priority = {node.name: int(node.tags.get("dagster/priority", "0")) for node in job.nodes}
    tables = {name for name in priority if name in checked}
    assert tables and priority.keys() - tables
    assert {priority[name] for name in tables} == {0}
    assert {priority[name] for name in priority.keys() - tables} == {-1}


@pytest.mark.full
def test_definitions_import_no_pandera() -> None:
    """Every process that runs a job makes them; only a gate or an audit that judges rows needs pandera."""
    code = "import sys, omnisupport_ingest.definitions; print('pandera' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert told.strip() == "False"
