"""Checks that read rows or ask the source are made only in runs that make no table.

A backfill, and Materialize in the UI, select every check of their assets, and Dagster has no way to name
fewer. So the step of a costly check asks whether its run makes tables, and then yields no result: Dagster
shows the check as skipped, and its last result counts on. The audit, the comparison, and a check that
somebody executes by itself select no asset.
"""

from __future__ import annotations

import dagster as dg


def leaves_out(context: dg.AssetCheckExecutionContext, why: str) -> bool:
    """Return whether the run makes tables, so that the step looks at nothing; its log says so.

    The check must be one that may yield no result (``can_subset``). ``why``: what the check costs, and which
    job makes it, as sentences.
    """
    graph = context.job_def.asset_layer.asset_graph
    if not graph.materializable_asset_keys:
        return False
    context.log.info(f"Not checked, as this run makes tables. {why}")
    return True
