"""The proof: source and dimensions at one LSN, compared row by row and column by column.

A temporary slot exports a snapshot of the source and names the LSN it stands for. Once everything
below that LSN has gone through every layer, the rows of the dimension must be those of the source. Where the
source has moved on meanwhile, and the dimension with it, its rows are still what is compared: with
the source's rows after the events that the table has taken in since.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.position import Lsn, Position
from omnisupport_ingest.processes import ProcessIdentity
from omnisupport_ingest.stages.checkpoints import Counts
from omnisupport_ingest.stages.compare import Comparison

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from omnisupport_ingest.contracts.model import TableContract
    from omnisupport_ingest.sources.postgres.rows_at import RowsAt
    from omnisupport_ingest.stages.workspace import Workspace


_SCRATCH = "proof-"
"""Folders that rows of the source are put into for the comparison; the process that made one follows."""


class ProofNotReached(IngestError):
    """The lake did not get as far as the LSN of the proof in the time given."""


@dataclass(frozen=True)
class Proof:
    """What was compared, at which LSN, and what came out, per table.

    ``sample``: keys asked for per table; null if every row was compared. ``events`` is empty then.
    """

    lsn: Lsn
    events: dict[str, Counts]
    tables: dict[str, Comparison]
    sample: int | None = None

    @property
    def holds(self) -> bool:
        """Whether no table differs, no live row has an unresolved column, and the events add up."""
        return all(each.holds for each in self.tables.values()) and all(
            each.raw == each.deduped + each.duplicates + each.quarantined for each in self.events.values()
        )


@dataclass(frozen=True)
class _Expected:
    """The rows of one table of the source at the LSN of the proof."""

    contract: TableContract
    path: Path
    rows: RowsAt


def prove(
    workspace: Workspace,
    spark: Callable[[], SparkSession],
    *,
    advance: Callable[[Lsn], None] | None = None,
    seconds: float = 300.0,
    tables: Sequence[str] = (),
    sample: int | None = None,
) -> Proof:
    """Compare tables of the PostgreSQL source with their dimensions, at one LSN.

    ``spark`` is asked for a session only where a dimension has moved on: then the source's rows are
    brought forward by the events since. ``advance`` is called with the LSN again and again while the lake
    is behind it; without it capture and pipeline must be running. ``tables``: names of contracts, none for
    all. ``sample``: about so many keys per table, None for every row. ``ProofNotReached`` after
    ``seconds``; ``TableIncomplete`` if a table has no state at that LSN, because its snapshot was
    read later.
    """
    from omnisupport_ingest.sources.postgres.rows_at import write_rows_at
    from omnisupport_ingest.sources.postgres.slot import consistent_snapshot
    from omnisupport_ingest.sources.postgres.source_dsn import source_dsn
    from omnisupport_ingest.stages.event_counts import events_per_table
    from omnisupport_ingest.stages.protected_rows import protect_rows

    source, publication = workspace.settings.source, workspace.settings.publication
    dsn = source_dsn(workspace.settings, workspace.home)
    contracts = [each for each in workspace.contracts.of_source(source) if not tables or each.name in tables]
    secrets = workspace.secrets(contracts)
    _remove_left_behind(workspace.home.run)
    own = f"{_SCRATCH}{ProcessIdentity.current().text}-"
    with tempfile.TemporaryDirectory(prefix=own, dir=workspace.home.run) as scratch:
        expected = []
        with consistent_snapshot(dsn) as (lsn, snapshot):
            for contract in contracts:
                path = Path(scratch) / f"{contract.name}.parquet"
                rows = write_rows_at(dsn, publication, snapshot, contract, path, sample=sample)
                protect_rows(contract, path, secrets)
                expected.append(_Expected(contract, path, rows))
        # The slot of the snapshot is gone by now: waiting holds no WAL back.
        _wait_until(workspace, lsn, advance or (lambda _lsn: time.sleep(0.5)), seconds)
        _require_complete(workspace, source, contracts, lsn)
        compared = {each.contract.name: _compare(workspace, spark, each, lsn, sample) for each in expected}
    if sample is not None:
        return Proof(lsn, {}, compared, sample)
    counted = events_per_table(workspace, source)
    return Proof(lsn, {each.name: counted.get(each.table, Counts()) for each in contracts}, compared)


def _remove_left_behind(folder: Path) -> None:
    """Remove what killed comparisons left: it holds rows of the source."""
    for scratch in folder.glob(f"{_SCRATCH}*"):
        process = ProcessIdentity.parse(scratch.name.removeprefix(_SCRATCH).partition("-")[0])
        if process is None or not process.lives():
            shutil.rmtree(scratch, ignore_errors=True)


def _wait_until(workspace: Workspace, lsn: Lsn, advance: Callable[[Lsn], None], seconds: float) -> None:
    """Until all below ``lsn`` has landed and gone through every layer."""
    from omnisupport_ingest.stages.pending import pending_windows

    source = workspace.settings.source
    store, deadline = workspace.landing(source), time.monotonic() + seconds
    while True:
        epoch = store.current_epoch()
        last = store.last_stream(epoch.number) if epoch else None
        landed = last.stream.end_lsn if last and last.stream else None
        if landed is not None and landed >= lsn and pending_windows(workspace, source).nothing:
            return
        if time.monotonic() > deadline:
            raise ProofNotReached(
                f"After {seconds:.0f} s the lake is not at {lsn} of the source; "
                f"landing is at {landed or 'nothing'}.",
                fix="Start capture and the pipeline (omnisupport-ingest up), or look at their logs.",
            )
        advance(lsn)


def _require_complete(
    workspace: Workspace, source: str, contracts: Sequence[TableContract], lsn: Lsn
) -> None:
    """Refuse tables of which no state at ``lsn`` can be told: they would differ for no fault of the lake."""
    from omnisupport_ingest.stages.as_of import require_complete

    epoch = workspace.landing(source).current_epoch()
    assert epoch is not None, "the stream of an epoch has landed"
    require_complete(workspace, source, contracts, Position(epoch.number, lsn, 0))


def _compare(
    workspace: Workspace,
    spark: Callable[[], SparkSession],
    expected: _Expected,
    lsn: Lsn,
    sample: int | None,
) -> Comparison:
    from omnisupport_ingest.stages.brought_forward import MovedOn
    from omnisupport_ingest.stages.compare import Sample, changed_since, compare
    from omnisupport_ingest.stages.taken_in import DimensionVersion

    contract, rows = expected.contract, expected.rows
    dimension = DimensionVersion.newest(workspace, contract)
    # Once more, after what is compared is fixed: rows of a snapshot that it has taken in have landed by now.
    _require_complete(workspace, contract.source, [contract], lsn)
    epoch = workspace.landing(contract.source).current_epoch()
    assert epoch is not None
    chosen = Sample(rows.below, dimension.accepted, dimension.withheld, epoch.number, lsn.value)
    by_key, of_the_table = changed_since(contract, chosen)
    if not of_the_table and (sample is not None or not by_key):
        # Of a sample, keys that have changed since are left out, instead of bringing them forward.
        live = rows.live if sample is not None else None
        return compare(contract, expected.path, dimension.files, sample=chosen, source_live=live)
    return MovedOn(contract, expected.path, dimension.files, chosen, of_the_table > 0).compare(spark())


def print_proof(proof: Proof, console: Console | None = None) -> None:
    """The outcome as a table, with the keys that differ."""
    console = console or Console(highlight=False)
    console.print(f"\nSource and lake at LSN {proof.lsn}. {_legend(proof)}\n")
    shown = Table("table", box=None, header_style="bold", padding=(0, 0, 0, 1), pad_edge=False)
    numbers = {name: _numbers(proof, name) for name in proof.tables}
    for title in next(iter(numbers.values()), {}):
        shown.add_column(title, justify="right", no_wrap=True)
    for name, row in numbers.items():
        shown.add_row(name, *(f"{number:,}" for number in row.values()))
    console.print(shown)
    for name, table in proof.tables.items():
        if table.unresolved:
            console.print(f"  {name}: {table.unresolved} live rows have a column whose value is not known")
        if table.miscounted:
            few, many = ("lake", "source") if table.miscounted > 0 else ("source", "lake")
            console.print(f"  {name}: the {few} has {abs(table.miscounted):,} live rows less than the {many}")
        if table.forwarded:
            console.print(
                f"  {name}: {table.forwarded:,} keys have changed since that LSN; what it shows of them "
                "was compared with the source's rows after these changes"
            )
        for each in table.examples:
            console.print(f"  {name} {each.key}: {', '.join(each.columns)}", markup=False)
        if table.differences > len(table.examples):
            console.print(f"  {name}: {table.differences - len(table.examples):,} more keys differ")
    console.print(f"\n{_verdict(proof)}", style="bold")


def proof_document(proof: Proof) -> dict[str, Any]:
    """The outcome for a machine: counts alone, no key and no value of a row."""
    return {
        "lsn": str(proof.lsn),
        "mode": "full" if proof.sample is None else "sample",
        "sample_per_table": proof.sample,
        "holds": proof.holds,
        "tables": {
            name: {
                "source_rows_compared": table.source_rows,
                "lake_current_rows": table.current_rows,
                "lake_deleted_rows": table.deleted_rows,
                "lake_unresolved_rows": table.unresolved,
                "keys_changed_since_left_out": table.skipped,
                "keys_changed_since_compared": table.forwarded,
                "live_rows_source_minus_lake": table.miscounted,
                "keys_differing": table.differences,
                "events": asdict(proof.events[name]) if name in proof.events else None,
            }
            for name, table in proof.tables.items()
        },
    }


def _numbers(proof: Proof, name: str) -> dict[str, int]:
    table = proof.tables[name]
    if proof.sample is not None:
        return {
            "compared": table.source_rows,
            "current": table.current_rows,
            "deleted": table.deleted_rows,
            "changed": table.skipped,
            "differ": table.differences,
        }
    events = proof.events[name]
    return {
        "source": table.source_rows,
        "current": table.current_rows,
        "deleted": table.deleted_rows,
        "raw": events.raw,
        "dupl.": events.duplicates,
        "quar.": events.quarantined,
        "deduped": events.deduped,
        "differ": table.differences,
    }


def _legend(proof: Proof) -> str:
    if proof.sample is not None:
        return (
            "Rows: compared of the\nsource (a sample by key), current and softly deleted in the lake;\n"
            "keys that have changed since and are left out; keys that differ."
        )
    return (
        "Rows: source, current, softly deleted;\n"
        "events: raw, duplicate, quarantined, deduped; keys that differ."
    )


def _verdict(proof: Proof) -> str:
    if not proof.holds:
        return "The lake differs from the source."
    return "No difference." if proof.sample is None else "No difference in the sample."
