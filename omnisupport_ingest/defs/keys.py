"""The names that assets, jobs, pools and tags have in Dagster, each in one place."""

from __future__ import annotations

import dagster as dg

from omnisupport_ingest.contracts.model import TableContract

TAKE_NEW_TAG = "omnisupport/take-new"
"""Run tag: take in what is new. A run without it (a backfill, a click on Materialize) replays."""

SOURCE_TAG = "omnisupport/source"
CURSOR_TAG = "omnisupport/cursor"
ATTEMPT_TAG = "omnisupport/attempt"
REASON_TAG = "omnisupport/reason"
PROCESS_TAG = "omnisupport/process"
"""Run tag: the process of this machine that executes a run outside of the code server."""

LANDING, RAW, DEDUPED, DIMENSIONS, PUBLISHED = "landing", "raw", "deduped", "dimensions", "published"
"""Asset groups, one per layer."""


def landing_key(source: str) -> dg.AssetKey:
    return dg.AssetKey([source, "landing"])


def raw_key(source: str) -> dg.AssetKey:
    return dg.AssetKey([source, "raw_cdc_staging"])


def deduped_key(source: str) -> dg.AssetKey:
    return dg.AssetKey([source, "deduped_events"])


def dimension_key(contract: TableContract) -> dg.AssetKey:
    return dg.AssetKey([contract.source, f"dim_{contract.name}"])


def published_key(contract: TableContract) -> dg.AssetKey:
    return dg.AssetKey([contract.source, "published", contract.name])


def pool_of(key: dg.AssetKey) -> str:
    """The pool that keeps two writers of one table apart; conflicts are safe, but cost a retry."""
    return "/".join(key.path)


def ingest_job_name(source: str) -> str:
    return f"ingest_{source}"


def audit_job_name(source: str) -> str:
    return f"audit_{source}"
