"""Old files (files that no version in use holds): how long each table keeps them, and their deletion.

The contract says how long replaced files and those left by a crash stay (``x-cdc.retention.old_files``).
Tables that all contracts of a source share keep them for the longest of these times. Quarantine files that a
window names are never old. Existing tables of withdrawn contracts and retired sources have their old files
swept too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.contracts.withdrawn import readable_withdrawn
from omnisupport_ingest.lake.sweep import sweep, sweepable
from omnisupport_ingest.lake.table import LakeTable
from omnisupport_ingest.layers.events.quarantine_files import named_anywhere
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.processes import remove_all_left_behind
from omnisupport_ingest.retention.keeping import old_files_of, old_files_of_source


@dataclass(frozen=True, slots=True)
class OldFiles:
    """Old files of ``table`` (its path in the lake): ``count`` files of ``bytes``, kept for ``keep``."""

    table: str
    keep: timedelta
    count: int
    bytes: int


def swept_sources(workspace: Workspace) -> list[str]:
    """Return the sources with contracts, and those of which only withdrawn ones are left (``sources
    retire``): their tables may be there still."""
    withdrawn = readable_withdrawn(workspace.settings, workspace.contracts)
    return sorted({*workspace.contracts.sources(), *(each.source for each in withdrawn)})


def old_files(workspace: Workspace, source: str, only: TableContract | None = None) -> list[OldFiles]:
    """Return what a sweep of the tables of ``source`` would delete now; with ``only``, of that contract's
    tables.
    """
    found = []
    for table, keep, spare in _tables(workspace, source, only):
        count, size = sweepable(table, keep, spare=spare)
        if count:
            found.append(OldFiles(table.spec.path, keep, count, size))
    return found


def sweep_old_files(workspace: Workspace, source: str, only: TableContract | None = None) -> int:
    """Delete the old files; return how many folders and single files. The platform may run meanwhile. Scratch
    folders of killed processes go too."""
    remove_all_left_behind(workspace.home.run)
    return sum(
        len(sweep(table, keep, spare=spare)) for table, keep, spare in _tables(workspace, source, only)
    )


def _tables(
    workspace: Workspace, source: str, only: TableContract | None
) -> Iterator[tuple[LakeTable, timedelta, frozenset[str]]]:
    contracts = workspace.contracts.of_source(source)
    if only is None:
        withdrawn = [
            each
            for each in readable_withdrawn(workspace.settings, workspace.contracts)
            if each.source == source
        ]
        shared = old_files_of_source(contracts or withdrawn)
        yield workspace.raw(source), shared, frozenset()
        yield workspace.deduped(source), shared, frozenset()
        yield workspace.quarantine(source), shared, named_anywhere(workspace, source)
        contracts = (*contracts, *withdrawn)
    for contract in contracts if only is None else (only,):
        for table in (
            workspace.net_changes(contract),
            workspace.dimension(contract),
            workspace.history(contract),
        ):
            yield table, old_files_of(contract), frozenset()
