"""Checks that read rows or query the source are made only in runs that make no table.

A backfill, and Materialize in the UI, select every check of their assets; Dagster has no way to select fewer.
So the step of a costly check tests whether its run makes tables. If so, it yields no result: Dagster shows
the check as skipped, and its last result still counts. The audit, the comparison, and a check that a person
executes alone select no asset.
"""

from __future__ import annotations

import dagster as dg


def leaves_out(context: dg.AssetCheckExecutionContext, why: str) -> bool:
    """Return whether the run makes tables, so that the step must check nothing; its log says so.

    The check must be allowed to yield no result (``can_subset``). ``why``: sentences that say what the check
    costs, and which job makes it.
    """
    graph = context.job_def.asset_layer.asset_graph
    if not graph.materializable_asset_keys:
        return False
    context.log.info(f"Not checked, as this run makes tables. {why}")
    return True
