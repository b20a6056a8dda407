"""The proof: source and dimensions at one LSN, compared row by row and column by column.

A temporary slot exports a snapshot of the source and names the LSN it stands for. Once everything
below that LSN has gone through every layer, the two must be the same, whether or not the source has
moved on meanwhile.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.position import Lsn, Position
from omnisupport_ingest.stages.checkpoints import Counts
from omnisupport_ingest.stages.compare import Comparison

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from omnisupport_ingest.contracts.model import TableContract
    from omnisupport_ingest.stages.workspace import Workspace


class ProofNotReached(IngestError):
    """The lake did not get as far as the LSN of the proof in the time given."""


@dataclass(frozen=True)
class Proof:
    """What was compared, at which LSN, and what came out, per table."""

    lsn: Lsn
    events: dict[str, Counts]
    tables: dict[str, Comparison]

    @property
    def holds(self) -> bool:
        """Whether no table differs, no live row has an unresolved column, and the events add up."""
        return all(not each.differences and not each.unresolved for each in self.tables.values()) and all(
            each.raw == each.deduped + each.duplicates + each.quarantined for each in self.events.values()
        )


def prove(
    workspace: Workspace,
    spark: SparkSession,
    *,
    advance: Callable[[], None] | None = None,
    seconds: float = 300.0,
) -> Proof:
    """Compare every table of the PostgreSQL source with its published table, at one LSN.

    ``advance`` is called again and again while the lake is behind that LSN; without it capture and
    pipeline must be running. ``ProofNotReached`` after ``seconds``.
    """
    from omnisupport_ingest.sources.postgres.capture import source_dsn
    from omnisupport_ingest.sources.postgres.rows_at import write_rows_at
    from omnisupport_ingest.sources.postgres.slot import consistent_snapshot
    from omnisupport_ingest.stages.event_counts import events_per_table

    source = workspace.settings.source
    dsn = source_dsn(workspace.settings, workspace.home)
    contracts = workspace.contracts.of_source(source)
    names = {contract.name: contract.table for contract in contracts}
    with tempfile.TemporaryDirectory(prefix="proof-", dir=workspace.home.run) as scratch:
        expected = {contract.name: Path(scratch) / f"{contract.name}.parquet" for contract in contracts}
        with consistent_snapshot(dsn) as (lsn, snapshot):
            for contract in contracts:
                write_rows_at(dsn, snapshot, contract, expected[contract.name])
        _wait_until(workspace, lsn, advance or (lambda: time.sleep(0.5)), seconds)
        tables = {
            contract.name: _compare(workspace, spark, contract, lsn, expected[contract.name], Path(scratch))
            for contract in contracts
        }
    counted = events_per_table(workspace, source)
    return Proof(lsn, {name: counted.get(table, Counts()) for name, table in names.items()}, tables)


def _wait_until(workspace: Workspace, lsn: Lsn, advance: Callable[[], None], seconds: float) -> None:
    """Until all below ``lsn`` has landed and gone through every layer."""
    from omnisupport_ingest.stages.pending import pending_windows

    source = workspace.settings.source
    store, deadline = workspace.landing(source), time.monotonic() + seconds
    while True:
        epoch = store.current_epoch()
        last = store.last_stream(epoch.number) if epoch else None
        landed = last.stream.end_lsn if last and last.stream else None
        if landed is not None and landed >= lsn and not pending_windows(workspace, source).windows:
            return
        if time.monotonic() > deadline:
            raise ProofNotReached(
                f"After {seconds:.0f} s the lake is not at {lsn} of the source; "
                f"landing is at {landed or 'nothing'}.",
                fix="Start capture and the pipeline (omnisupport-ingest up), or look at their logs.",
            )
        advance()


def _compare(
    workspace: Workspace,
    spark: SparkSession,
    contract: TableContract,
    lsn: Lsn,
    expected: Path,
    scratch: Path,
) -> Comparison:
    from omnisupport_ingest.stages.as_of import events_from, state_as_of
    from omnisupport_ingest.stages.compare import compare

    epoch = workspace.landing(contract.source).current_epoch()
    assert epoch is not None
    position = Position(epoch.number, lsn, 0)
    if not events_from(workspace, spark, contract, position):
        published = workspace.published(contract).open()
        return compare(contract, expected, [file.uri for file in published.all_files()])
    # The source has moved on: fold the events below the LSN instead of what is published by now.
    folder = scratch / f"{contract.name}-as-of"
    state_as_of(workspace, spark, contract, position).write.parquet(f"file://{folder}")
    return compare(contract, expected, [str(file) for file in sorted(folder.glob("*.parquet"))])


def print_proof(proof: Proof, console: Console | None = None) -> None:
    """The outcome as a table, with the keys that differ."""
    console = console or Console(highlight=False)
    shown = Table("table", box=None, header_style="bold", padding=(0, 0, 0, 1), pad_edge=False)
    titles = ("source", "current", "deleted", "raw", "dupl.", "quar.", "deduped", "differ")
    for title in titles:
        shown.add_column(title, justify="right", no_wrap=True)
    for name, table in proof.tables.items():
        events = proof.events[name]
        numbers = (
            table.source_rows,
            table.current_rows,
            table.deleted_rows,
            events.raw,
            events.duplicates,
            events.quarantined,
            events.deduped,
            table.differences,
        )
        shown.add_row(name, *(f"{number:,}" for number in numbers))
    console.print(f"\nSource and lake at LSN {proof.lsn}. Rows: source, current, softly deleted;")
    console.print("events: raw, duplicate, quarantined, deduped; keys that differ.\n")
    console.print(shown)
    for name, table in proof.tables.items():
        if table.unresolved:
            console.print(f"  {name}: {table.unresolved} live rows have a column whose value is not known")
        for each in table.examples:
            console.print(f"  {name} {each.key}: {', '.join(each.columns)}", markup=False)
    verdict = "No difference." if proof.holds else "The lake differs from the source."
    console.print(f"\n{verdict}", style="bold")
