"""The sensor of the freshness policies: it records a change of the check, and no materialization fools it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import dagster as dg
import pytest

from omnisupport_ingest.definitions import build_definitions
from omnisupport_ingest.defs import keys
from omnisupport_ingest.read import freshness
from omnisupport_ingest_tests.layers.story import SOURCE, Change, Commit, Story

INSERT = Commit(10, 1, [Change("c", 1, {"title": "one", "body": None})])


class Ticks:
    """Ticks of the sensor on a real instance, and backfills as Dagster records them."""

    def __init__(self, story: Story, definitions: dg.Definitions, instance: dg.DagsterInstance) -> None:
        self._workspace, self._instance = story.workspace, instance
        self._sensor = definitions.get_repository_def().get_sensor_def(f"freshness_{SOURCE}")
        self.cursor: str | None = None

    def tick(self) -> dg.SensorResult:
        context = dg.build_sensor_context(self._instance, cursor=self.cursor)
        result = self._sensor(context, workspace=self._workspace)
        assert isinstance(result, dg.SensorResult)
        self.cursor = result.cursor
        return result

    def evaluated(self) -> list[tuple[str, bool, str]]:
        """Check, verdict and what it says, of the next tick."""
        found = [each for each in self.tick().asset_events if isinstance(each, dg.AssetCheckEvaluation)]
        return [(each.check_name, each.passed, each.description or "") for each in found]

    def backfill(self, contract_key: dg.AssetKey) -> None:
        event = dg.AssetMaterialization(contract_key, partition="2026-01-01T1200")
        self._instance.report_runless_asset_event(event)


@pytest.fixture
def ticks(story: Story, definitions: dg.Definitions) -> Iterator[Ticks]:
    with dg.DagsterInstance.ephemeral() as instance:
        yield Ticks(story, definitions, instance)


def test_a_source_in_which_nothing_landed_has_no_verdict(ticks: Ticks) -> None:
    result = ticks.tick()
    assert result.skip_reason is not None
    assert result.skip_reason.skip_message == f"Nothing of {SOURCE} has landed."
    assert result.asset_events == []


def test_a_dimension_that_falls_behind_is_red_once_and_no_backfill_makes_it_fresh(
    story: Story, ticks: Ticks, monkeypatch: pytest.MonkeyPatch
) -> None:
    story.land(INSERT)
    ((check, passed, says),) = ticks.evaluated()
    assert (check, passed) == ("fresh", False)
    assert "Landed with changes of the table, and not shown: 1 batch." in says
    assert ticks.evaluated() == [], "an unchanged verdict is no news"
    ticks.backfill(keys.dimension_key(story.contract))
    assert ticks.evaluated() == [], "it is red still"
    monkeypatch.setattr(freshness, "FRESH_WITHIN", timedelta(days=99_999))
    # A cursor that is lost loses no change: what was red is recorded as fresh.
    ticks.cursor = None
    ((_, passed, says),) = ticks.evaluated()
    assert ticks.evaluated() == []
    assert (passed, says.startswith("The default service level is kept")) == (True, True)
    allowed = timedelta(days=99_999).total_seconds()
    assert says.endswith(f" of {allowed:.0f} seconds.")


def test_the_page_of_a_dimension_says_its_policy(story: Story) -> None:
    graph = build_definitions(story.workspace).resolve_asset_graph()
    shown = graph.get(keys.dimension_key(story.contract)).metadata["freshness_policy"]
    assert shown == "at most 15 minutes behind its source (the default)"
