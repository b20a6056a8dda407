"""``status``: the whole platform at a glance."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from omnisupport_ingest.cli.contracts_changes import changes_of, document_of, key_document, keys_that_wait
from omnisupport_ingest.cli.errors import FINDINGS, WARNED
from omnisupport_ingest.cli.opening import (
    contracted_source,
    existing_home,
    open_settings,
    open_workspace,
    sources_in_use,
)
from omnisupport_ingest.cli.render import echo_json, facts
from omnisupport_ingest.cli.status_health import (
    BROKEN,
    HEALTHY,
    WARNING,
    facts_document,
    health,
    unread_slots,
)
from omnisupport_ingest.cli.status_live import watch as watching
from omnisupport_ingest.cli.status_logs import log_document, log_probes, logs_without_contracts
from omnisupport_ingest.cli.status_platform import plain, platform_document, platform_facts
from omnisupport_ingest.cli.status_promised import promised_document
from omnisupport_ingest.cli.status_reading import ReadingLooks
from omnisupport_ingest.cli.status_targets import targets_document
from omnisupport_ingest.cli.status_text import show_status
from omnisupport_ingest.contracts.decision_table import DecisionTableRefused
from omnisupport_ingest.contracts.in_force import contracts_gone, in_force
from omnisupport_ingest.contracts.kept import Documents, usable
from omnisupport_ingest.contracts.model import ContractError
from omnisupport_ingest.contracts.withdrawn import readable_withdrawn
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.read.overview import SourceOverview, TableOverview, overview
from omnisupport_ingest.retention.forecast import disk_forecast
from omnisupport_ingest.retention.keeping import given_up
from omnisupport_ingest.sources.postgres.capture.outdated import differences
from omnisupport_ingest.storage import landed_sources, recorded_storage

if TYPE_CHECKING:
    from omnisupport_ingest.landing.chain import Gap
    from omnisupport_ingest.layers.workspace import Workspace

_SOURCE_SECONDS = 1.0
"""Seconds that the source may take to answer after everything else has been read."""

_EXIT_CODES = {HEALTHY: 0, WARNING: WARNED, BROKEN: FINDINGS}


@click.command()
@click.option("--source", metavar="NAME", help="Show only this source, in use or not.")
@click.option("--all", "everything", is_flag=True, help="Show every source, sensor and recent run.")
@click.option("--watch", is_flag=True, help="Show it again and again, in place, until Ctrl-C.")
@click.option(
    "--every",
    type=click.FloatRange(min=0.2),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="How often --watch looks.",
)
@click.option("--strict", is_flag=True, help="A warning has an exit code of its own, 8.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document; with --watch one per look and line."
)
def status(
    source: str | None, everything: bool, watch: bool, every: float, strict: bool, as_json: bool
) -> int:
    """Show what runs, how far the source has landed, and how far every table is.

    Reads landing, the tables' Delta logs and Dagster's files. Changes nothing, and needs neither Spark nor a
    running platform. The source gets a second to answer. Times are UTC.

    \b
    health    broken: capture has failed, landing, a table or files of quarantine cannot be read, a gap holds
              batches back, or Dagster's daemon hangs
              WARNING: a check, a sensor or the last run of a job failed, a slot is in danger, a table
              is left out, nobody will read a slot, a target is late or cannot be synced, or events in
              quarantine were not discarded; else healthy
    windows   open, closed, and late ones, which wait for a replay
    source    every source that is captured, or read by cursors or from topics, with how far it is behind
    changed   schema changes that need an action; contracts whose file is gone; files of a captured
              source that its capture does not use yet
    pending   windows and batches that have landed and are not in the table yet; "merged by" a time: they wait
              until then, as the contract of the table allows
    behind    age of the oldest commit that a dimension lacks; if it lacks none, age of the watermark
    target    how far a table of another PostgreSQL is behind its dimension, by its last syncs, and why the
              last one failed

    Sources of which nothing has landed are only counted, unless --all or --source names them.

    \b
    Examples:
      omnisupport-ingest status
      omnisupport-ingest status --watch --every 5
      omnisupport-ingest status --json | jq '.sources[].tables[] | {table, lag_seconds}'
      omnisupport-ingest status --strict > /dev/null || mail -s "look at the platform" ops

    Exit code: 0 healthy, also when --watch is ended; a warning is 0, too, and 8 with --strict; 1 broken,
    2 usage or settings, 3 no home or another home's contracts.
    """

    def look() -> dict[str, Any]:
        return status_document(source, everything=everything)

    def show(document: dict[str, Any]) -> None:
        show_status(document, everything=everything)

    if watch:
        # Usage, settings and home are checked once, before the first look.
        _chosen(open_workspace(usable(open_settings()).settings), source, everything=everything)
        watching(look, show, every, as_json=as_json)
        return 0
    try:
        document = look()
    except (ContractError, DecisionTableRefused):
        if not as_json:
            _show_what_runs(everything=everything)
        raise
    if as_json:
        echo_json(document)
    else:
        show(document)
    code = _EXIT_CODES[document["health"]["level"]]
    return code if strict or code != WARNED else 0


def _show_what_runs(*, everything: bool) -> None:
    """Print the platform alone: a document is wrong, and the home has no copy of right ones."""
    settings = open_settings()
    home = existing_home(settings)
    platform = platform_document(settings, home, None)
    facts([("home", str(home.path)), *platform_facts(platform, everything=everything)])


def status_document(source: str | None = None, *, everything: bool = False) -> dict[str, Any]:
    """Return everything that is shown of the selected sources, as JSON values.

    While a contract, a source or the decision table is wrong, by the documents that services go on with.
    """
    existing_home(open_settings())
    documents = usable(open_settings())
    settings = documents.settings
    workspace = open_workspace(settings)
    home = workspace.home
    shown, unused = _chosen(workspace, source, everything=everything)
    probes = log_probes(settings, home, workspace.contracts)
    probes += logs_without_contracts(settings, home, workspace.contracts)
    readings = ReadingLooks(settings, home, workspace.contracts)
    chosen = in_force(settings)
    sources = [
        _source_document(overview(workspace, each))
        | facts_document(workspace, each)
        | {"targets": targets_document(workspace, each)}
        for each in shown
    ]
    answered_by = time.monotonic() + _SOURCE_SECONDS
    logs = [log_document(each, home, probe, answered_by) for each, probe in probes]
    own = next((each for each in logs if each["name"] == settings.source), None)
    document: dict[str, Any] = {
        "home": str(home.path),
        "storage": recorded_storage(home.path),
        "window": str(home.grid.size),
        "first_window": home.grid.first.isoformat(),
        "in_force": {
            "contracts": str(chosen.contracts),
            "decision_table": str(chosen.decision_table),
            "tables": len(workspace.contracts),
        },
        "platform": platform_document(settings, home, workspace.contracts),
        "disk": asdict(disk_forecast(workspace, datetime.now(UTC))),
        "retention": _retention(workspace),
        "source": own,
        "other_logs": [each for each in logs if each is not own],
        "definition_changes": [asdict(each) for each in differences(settings, workspace.contracts)],
        "readings": list(readings.results(answered_by)),
        "sources": sources,
        "sources_not_in_use": unused,
        "schema_changes": _schema_changes(workspace),
        "documents_refused": _refused(documents),
        "contracts_gone": [
            *contracts_gone(settings, workspace.contracts),
            *_landed_without_contracts(workspace),
        ],
        "unread_slots": unread_slots(workspace, logs),
    }
    return document | {"health": health(document)}


def _refused(documents: Documents) -> dict[str, str] | None:
    """Return which document is wrong, what to do, and since when services go on with the copy; None if none
    is."""
    if documents.refused is None or documents.since is None:
        return None
    return {"problem": documents.refused.problem, "fix": documents.refused.fix, "since": documents.since}


def _landed_without_contracts(workspace: Workspace) -> list[dict[str, str]]:
    """Return each source that has landed and has no contract, in force or withdrawn, as ``contracts_gone``
    does."""
    contracts = workspace.contracts
    known = {each.source for each in (*contracts.all, *readable_withdrawn(workspace.settings, contracts))}
    return [
        {
            "source": source,
            "table": "",
            "what": f"{source} has landed, and none of its tables has a contract any more",
            "fix": "put its contracts back (omnisupport-ingest contracts use FOLDER); if its data is to go, "
            f"then omnisupport-ingest sources retire {source} --drop-data",
        }
        for source in landed_sources(workspace.home.path)
        if source not in known
    ]


def _retention(workspace: Workspace) -> dict[str, Any]:
    """Return what is removed by age, and whether the nightly job removes or only counts it."""
    contracts = workspace.contracts
    found = {source: given_up(contracts.of_source(source)) for source in contracts.sources()}
    return {
        "nightly": workspace.settings.retention.value,
        "gives_up": {source: layers for source, layers in found.items() if layers},
        "runs_kept_days": workspace.settings.runs_kept_days,
    }


def _schema_changes(workspace: Workspace) -> list[dict[str, Any]]:
    """Return the schema changes of captured tables that need an action."""
    try:
        judged = changes_of(workspace, ())
        keys = keys_that_wait(workspace, judged)
        return [
            *(document_of(source, each) | {"what": each.what} for source, each in judged if each.asks),
            *(key_document(*each) for each in keys),
        ]
    except IngestError as error:
        return [{"source": "", "table": "", "what": error.problem, "edit": error.fix}]


def _chosen(workspace: Workspace, source: str | None, *, everything: bool) -> tuple[list[str], list[str]]:
    """Return the sources to show, and the names of the others.

    By default, the sources in use are shown: those of which anything has landed, and the settings' own.
    """
    known = list(workspace.contracts.sources())
    if source is not None:
        return [contracted_source(workspace, source)], []
    if everything:
        return known, []
    used = {workspace.settings.source, *sources_in_use(workspace)}
    return [each for each in known if each in used], [each for each in known if each not in used]


# --- as JSON -----------------------------------------------------------------------------------------------


def _source_document(seen: SourceOverview) -> dict[str, Any]:
    """Return ``seen`` as JSON values: times in ISO 8601, positions and LSNs as text."""
    gap, problem = seen.landing.gap, seen.landing.problem
    landing = asdict(replace(seen.landing, gap=None, problem=None))
    landing["problem"] = {"problem": problem.problem, "fix": problem.fix} if problem else None
    landing["stream_end"] = str(seen.landing.stream_end) if seen.landing.stream_end else None
    landing["gap"] = _gap_document(gap)
    lag = (datetime.now(UTC) - seen.landing.watermark).total_seconds() if seen.landing.watermark else None
    landing["watermark_lag_seconds"] = round(lag, 1) if lag is not None else None
    tables = [_table_document(table) for table in seen.tables]
    return {"source": seen.source, "landing": plain(landing), "tables": tables}


def _gap_document(gap: Gap | None) -> dict[str, Any] | None:
    """Return the gap as JSON values. ``repaired``: a later epoch has begun, and nothing is held back."""
    if gap is None:
        return None
    return {"problem": str(gap), "fix": gap.fix, "repaired": gap.is_repaired}


def _table_document(table: TableOverview) -> dict[str, Any]:
    document = asdict(replace(table, freshness=None, level=None, verified=None, problem=None))
    for name in ("freshness", "waits", "scattered", "level", "verified"):
        del document[name]
    problem = table.problem
    document["problem"] = {"problem": problem.problem, "fix": problem.fix} if problem else None
    if (fresh := table.freshness) is None:
        # A broken promise stays one while landing or table cannot be read.
        document |= promised_document(table) if table.verified is not None else {}
    else:
        document |= {
            "complete_to": fresh.complete_to,
            "lag_seconds": fresh.lag_seconds(datetime.now(UTC)),
            "behind_landing_seconds": fresh.behind_landing_seconds,
            "unshown_batches": fresh.unshown_batches,
            "merge_waits": plain(asdict(table.waits)) if table.waits is not None else None,
            "recommended": _recommended(table),
            **promised_document(table),
        }
    return plain(document)


def _recommended(table: TableOverview) -> str | None:
    """Return the settings to consider if the last updates rewrote much of the table for few keys; None
    otherwise."""
    found = table.scattered
    if found is None:
        return None
    advice = (
        f"Writes are scattered: the last {found.updates} updates rewrote {found.files_share:.0%} of the "
        f"files for {found.keys_share:.3%} of the keys. "
    )
    if found.rows_per_file is not None:
        advice += (
            f'Of smaller files they rewrite less: "rows_per_file": {found.rows_per_file} in x-cdc of its '
            "contract. "
        )
    advice += (
        'By "deletion_vectors": true they rewrite none of them, if all that reads the table knows deletion '
        "vectors. "
    )
    return (
        f"{advice}A delayed merge lets many share an update: "
        '"delayed_merge": {"max_age": "PT10M", "max_share": 0.01} in x-cdc of its contract.'
    )
