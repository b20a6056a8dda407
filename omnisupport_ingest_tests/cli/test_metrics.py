"""Metrics say what ``status`` says, on loopback alone; page and dashboard name just those that there are."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path

import pytest
import yaml

from omnisupport_ingest.cli import reference
from omnisupport_ingest.cli.main import cli
from omnisupport_ingest.cli.metrics import METRICS, PREFIX, Looks, metrics_page, serve
from omnisupport_ingest.cli.status import status
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.runtime.ports import LOOPBACK, free_port
from omnisupport_ingest_tests.cli.sample_home import SampleHome, document, tables

ROOT = Path(__file__).parents[2]


def test_a_reading_says_what_status_says(sample_home: SampleHome) -> None:
    seen = document(status)
    port = free_port()
    end = serve(port)
    try:
        with urllib.request.urlopen(f"http://{LOOPBACK}:{port}/metrics") as answer:
            read = answer.read().decode()
    finally:
        end()
    found = dict(line.rsplit(" ", 1) for line in read.splitlines() if not line.startswith("#"))
    name = seen["sources"][0]["source"]
    notes = tables(seen)["dim_notes"]
    assert found[f"{PREFIX}up"] == "1.0"
    assert (
        float(found[f'{PREFIX}landed_events{{source="{name}"}}']) == seen["sources"][0]["landing"]["events"]
    )
    of_notes = f'{{source="{name}",table="dim_notes"}}'
    assert float(found[f"{PREFIX}table_rows{of_notes}"]) == notes["rows"]
    assert float(found[f"{PREFIX}table_lag_seconds{of_notes}"]) == pytest.approx(notes["lag_seconds"], abs=60)
    assert float(found[f"{PREFIX}table_service_level_kept{of_notes}"]) == 0.0, "it has landed long ago"


def test_a_home_that_cannot_be_looked_at_is_a_metric_and_no_error() -> None:
    def look() -> dict[str, object]:
        raise IngestError("away", fix="none")

    (up,) = Looks(look).collect()
    assert [sample.value for sample in up.samples] == [0.0]


def test_page_dashboard_and_alerts_name_just_the_metrics_that_there_are() -> None:
    page = (ROOT / reference.METRICS_PAGE).read_text()
    assert page == metrics_page(), f"docs/metrics.md is old; make it again: {reference.REGENERATE}"
    names = {f"{PREFIX}{each.name}" for each in METRICS} | {f"{PREFIX}up"}
    dashboard = json.loads((ROOT / "deploy" / "grafana-dashboard.json").read_text())
    asked = " ".join(target["expr"] for panel in dashboard["panels"] for target in panel["targets"])
    assert set(re.findall(rf"{PREFIX}\w+", asked)) <= names
    of_a_source = {f"{PREFIX}{each.name}" for each in METRICS if "source" in each.labels}
    alerts = yaml.safe_load((ROOT / "deploy" / "prometheus-alerts.yaml").read_text())
    rules = [rule for group in alerts["groups"] for rule in group["rules"]]
    for rule in rules:
        used = set(re.findall(rf"{PREFIX}\w+", rule["expr"]))
        assert used and used <= names, rule["alert"]
        for line in rule["annotations"]["action"].split("; "):
            program, command, *_ = line.split()
            assert program == "omnisupport-ingest" and command in cli.listed, rule["alert"]
        if used & of_a_source:
            assert "{{ $labels.source }}" in rule["annotations"]["action"], rule["alert"]
    assert len(rules) == len({rule["alert"] for rule in rules})
    assert len(dashboard["panels"]) == len({panel["id"] for panel in dashboard["panels"]})
