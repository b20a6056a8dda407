"""The names that assets, jobs, pools and tags have in Dagster, each in one place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import dagster as dg

from omnisupport_ingest.contracts.model import TableContract

TAKE_NEW_TAG = "omnisupport/take-new"
"""Run tag: ingest new batches. A run without it (a backfill, a click on Materialize) replays."""

MERGE_NOW_TAG = "omnisupport/merge-now"
"""Run tag: merge all net changes now, whatever delay the contracts allow: no run may follow this one."""

SOURCE_TAG = "omnisupport/source"
CURSOR_TAG = "omnisupport/cursor"
ATTEMPT_TAG = "omnisupport/attempt"
PENDING_TAG = "omnisupport/pending"
"""Run tag: a digest of what was pending when the sensor requested the run (``Pending.digest``)."""

REASON_TAG = "omnisupport/reason"
LATE_TAG = "omnisupport/late-events"
"""Run and backfill tag: how many events landed in the windows after they had closed."""

LATE_BATCHES_TAG = "omnisupport/late-batches"
PROCESS_TAG = "omnisupport/process"
"""Run tag: the process of this machine that executes the run (`processes.ProcessIdentity`)."""

LANDING, RAW, DEDUPED, DIMENSIONS = "landing", "raw", "deduped", "dimensions"
HISTORY, TARGETS = "history", "targets"
"""Values of the tag ``layer`` of an asset. Its group is its source."""

LAYER_TAG = "layer"

DOCUMENTATION = "/omnisupport"
"""Where the UI's webserver shows the documentation."""

NO_VALUE: Any = dg.Nothing
"""Type of an asset that yields its output by hand: it has no value, so no IO manager stores one."""


def docs_address(page: str) -> str:
    """Return the address, within the UI, of ``page`` of ``docs/``, such as ``history.md#as-of``."""
    return f"{DOCUMENTATION}/docs/{page}"


def landing_key(source: str) -> dg.AssetKey:
    return dg.AssetKey([source, "landing"])


def raw_key(source: str) -> dg.AssetKey:
    return dg.AssetKey([source, "raw_cdc_staging"])


def deduped_key(source: str) -> dg.AssetKey:
    return dg.AssetKey([source, "deduped_events"])


def dimension_key(contract: TableContract) -> dg.AssetKey:
    return dg.AssetKey([contract.source, f"dim_{contract.name}"])


def paths_to_tables(source: str, names: Iterable[str]) -> list[dg.AssetKey]:
    """Return the assets that the rows of the tables ``names`` pass through, dimensions included."""
    dimensions = (dg.AssetKey([source, f"dim_{name}"]) for name in names)
    return [raw_key(source), deduped_key(source), *dimensions]


def history_key(contract: TableContract) -> dg.AssetKey:
    return dg.AssetKey([contract.source, "history", f"dim_{contract.name}_history"])


def target_key(contract: TableContract) -> dg.AssetKey:
    return dg.AssetKey([contract.source, "target", contract.name])


def pool_of(key: dg.AssetKey) -> str:
    """Return the pool that keeps two writers of one table apart; a conflict is safe, but costs a retry."""
    return "/".join(key.path)


def ingest_job_name(source: str) -> str:
    return f"ingest_{source}"


def replay_job_name(source: str) -> str:
    return f"replay_{source}"


def audit_job_name(source: str) -> str:
    return f"audit_{source}"


def history_job_name(source: str) -> str:
    return f"history_{source}"


def review_job_name(source: str) -> str:
    return f"review_{source}"
