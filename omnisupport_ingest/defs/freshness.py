"""The freshness policy of every dimension: its service level, which a sensor watches.

Dagster's own freshness policies go by when an asset was materialized. So a backfill of an old window would
keep them, and a source in which nothing happens would break them. Here the lag counts from the oldest landed
change that the dimension does not show, whoever materialized what. Runs evaluate the check ``fresh`` as well;
the sensor records each change of its result, even while there are no runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import dagster as dg

from omnisupport_ingest.checks.lake_checks import tables_fresh
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.defs import keys
from omnisupport_ingest.defs.checks import FRESH, evaluation
from omnisupport_ingest.defs.tick_cursor import TickCursor
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.read.freshness import allowed_lag, in_words

_INTERVAL_SECONDS = 60


@dataclass(frozen=True, slots=True)
class FreshnessCursor(TickCursor):
    """The tables whose check had failed when the sensor last recorded it; None: it never did, or its cursor
    is lost."""

    red: tuple[str, ...] | None = None


def freshness_sensor(source: str, contracts: Sequence[TableContract]) -> dg.SensorDefinition:
    """Return the sensor of ``source``, whose ``contracts`` are given; it runs unless a person stops it."""
    asset_of = {contract.name: keys.dimension_key(contract) for contract in contracts}

    @dg.sensor(
        name=f"freshness_{source}",
        asset_selection=dg.AssetSelection.assets(*asset_of.values()),
        # A look takes a few milliseconds per table.
        minimum_interval_seconds=max(_INTERVAL_SECONDS, len(contracts)),
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=f"Keeps the check {FRESH} of the dimensions of {source}: what people read is not older "
        "than its service level allows. A backfill makes nothing fresher.",
    )
    def freshness_changes(
        context: dg.SensorEvaluationContext, workspace: dg.ResourceParam[Workspace]
    ) -> dg.SensorResult:
        seen = FreshnessCursor.from_text(context.cursor)
        workspace = workspace.current()
        if not workspace.landing(source).landed().count:
            return seen.skipping(f"Nothing of {source} has landed.")
        found = tables_fresh(workspace, source, datetime.now(UTC), asset_of)
        red = {name for name, finding in found.items() if not finding.passed}
        # Runs record the check of a table that was and is fresh.
        changed = sorted(found if seen.red is None else red.symmetric_difference(seen.red) & found.keys())
        cursor = FreshnessCursor(tuple(sorted(red)))
        if not changed:
            return cursor.skipping(_summary(len(found), red))
        return dg.SensorResult(
            skip_reason=dg.SkipReason(_summary(len(found), red)),
            cursor=cursor.to_text(),
            asset_events=[evaluation(found[name], asset_of[name], FRESH) for name in changed],
        )

    return freshness_changes


def service_level_metadata(contract: TableContract) -> dict[str, str]:
    """Return what the page of a dimension says of its freshness policy."""
    within, by_contract = allowed_lag(contract)
    why = "its contract says so" if by_contract else "the default"
    return {"freshness_policy": f"at most {in_words(within.total_seconds())} behind its source ({why})"}


def _summary(tables: int, red: set[str]) -> str:
    if not red:
        return f"The service level of each of {tables} dimensions is kept."
    return f"{len(red)} of {tables} dimensions break their service level: {', '.join(sorted(red))}."
