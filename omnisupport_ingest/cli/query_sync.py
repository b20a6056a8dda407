"""``sync NAME`` of a source that is read by cursors: land what is new, then take it through every layer."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from omnisupport_ingest.cli.counted import counted
from omnisupport_ingest.cli.one_pass import FinishedRun, OnePass

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omnisupport_ingest.contracts.model import TableContract
    from omnisupport_ingest.sources.query.compare import Comparison
    from omnisupport_ingest.sources.query.run import QuerySource
    from omnisupport_ingest.sources.query.sync import SyncReport
    from omnisupport_ingest.stages.workspace import Workspace


def sync_query(
    the_pass: OnePass, workspace: Workspace, source: QuerySource, anew: Sequence[TableContract], reason: str
) -> tuple[SyncReport, list[FinishedRun]]:
    """One pass over ``source``; ``anew``: tables that are read whole, in a new epoch with its ``reason``."""
    the_pass.say(f"Reading {source.definition.name} by its cursors …")
    report = source.sync(anew=anew, reason=reason, landed=lambda batch: _say(the_pass, batch.rows))
    return report, the_pass.materialize(workspace)


def _say(the_pass: OnePass, rows: int) -> None:
    if rows:
        the_pass.say(f"  landed {counted(rows, 'row')}")


def compare_query(
    the_pass: OnePass, workspace: Workspace, source: QuerySource
) -> tuple[Comparison, list[FinishedRun]]:
    """Compare the keys of ``source`` with the lake, which holds all that landed, and take in the rest."""
    from omnisupport_ingest.stages.lake_keys import dimension_keys

    the_pass.say(f"Comparing the keys of {source.definition.name} with the lake …")
    lake = dimension_keys(workspace, source.definition.name)
    try:
        found = source.compare(lake)
    finally:
        for each in lake.values():
            each.close()
    return found, the_pass.materialize(workspace)


def show_comparison(found: Comparison) -> None:
    """Say what a comparison found."""
    for each in found.tables:
        more = "; there are more: sync with --full-refresh" if each.more_missed else ""
        click.echo(
            f"{each.table}: keys compared by {counted(each.checksums, 'checksum')}, "
            f"{counted(each.keys_read, 'key')} read; {counted(each.deleted, 'delete')} noticed, "
            f"{counted(each.missed, 'missed row')} read{more}."
        )


def document(report: SyncReport, runs: Sequence[FinishedRun], compared: Comparison | None) -> dict[str, Any]:
    """What a machine is told of a sync: counts and names, no key and no value of a row but cursors."""
    return {
        "source": report.source,
        "clock": report.clock.isoformat(),
        "finished": report.finished,
        "batches": len(report.batches),
        "tables": [asdict(each) for each in report.tables],
        "compared": None if compared is None else [asdict(each) for each in compared.tables],
        "runs": [asdict(run) for run in runs],
    }


def show(report: SyncReport, runs: Sequence[FinishedRun]) -> None:
    """Say what a sync did."""
    for each in report.tables:
        how = "read whole" if each.full else "read from its cursor"
        met = f", {each.again} met again" if each.again else ""
        state = "" if each.finished else "; it goes on with the next sync"
        click.echo(f"{each.table}: {how}, {counted(each.landed, 'row')} landed{met}{state}.")
        if each.behind:
            click.echo(
                f"  {counted(each.behind, 'row')} came with a lower cursor than before; which version "
                "counts a person must say (quarantine list, out_of_order_event)."
            )
        if each.went_back:
            click.echo(
                "  Its highest cursor is below where it stood: the newest rows were deleted, or the source "
                f'was restored from a backup. If so: sync {report.source} --full-refresh "restored"'
            )
    click.echo(
        f"Source {report.source} is read up to {report.clock:%Y-%m-%d %H:%M:%S} UTC: "
        f"{counted(len(report.batches), 'batch')}, {counted(len(runs), 'run')}."
    )
