"""Brings the values of sealed windows under the policies for personal data that are in force.

No run judges a sealed window again, so a stricter policy is applied to what its events have. A ledger says by
which policies each version of a contract protected; it is written before retention seals windows. The state
of a window names the versions that judged it and, once it was rewritten, the policies that its values have
since. Files and state change in one commit. So no value is protected twice, and what a killed run left undone
the next one does. What a window needs says ``contracts.stored_windows``.

A window counts as sealed once its removal from raw has begun. If that is given up, the window is judged again
from raw, whatever was applied to it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping
from functools import partial

import pyarrow as pa

from omnisupport_ingest.cdc.judging import ACCEPTED, QUARANTINED
from omnisupport_ingest.cdc.protecting import Protections, protect_batches
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.contracts.names import TableName
from omnisupport_ingest.contracts.pii_policies import KEEP
from omnisupport_ingest.contracts.protection import Secrets, needs_protection
from omnisupport_ingest.contracts.stored_policies import UNKNOWN, StoredColumn, StoredProtection, StoredTable
from omnisupport_ingest.contracts.stored_windows import Judging, Record, StoredWindow
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.lake.ledger import SEQUENCE, refuse_row, require_rows
from omnisupport_ingest.lake.schema import arrow_schema
from omnisupport_ingest.lake.snapshot import TableSnapshot
from omnisupport_ingest.lake.state import WindowState
from omnisupport_ingest.layers.events.quarantine_files import gone_from_disk
from omnisupport_ingest.layers.events.rewriting import Rewriting, rewrite
from omnisupport_ingest.layers.ledgers import POLICY_TYPE
from omnisupport_ingest.layers.removed import Removed
from omnisupport_ingest.layers.type_changes import waits
from omnisupport_ingest.layers.versions import CONTRACT, POLICIES, POLICY, RulesVersions
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.storage import storage_of
from omnisupport_ingest.wording import counted

_log = logging.getLogger(__name__)

_NAME = "policy_ledger"

UNCOVERED = "*"
"""Stands for the tables without a contract among the tables and columns of ``SealedPolicies.kept``."""


class PoliciesChanged(IngestError):
    """A sealed window does not have the policies for personal data of this run, which would add events to its
    quarantine: another run has applied others meanwhile, or a file of the window is gone. Nothing was
    committed.

    Fix: Run again: a run begins by applying the policies. If it fails again, its log names the window of
    which a file is gone: restore that from a backup of the lake.
    """


class SealedPolicies:
    """The policies by which the values of sealed windows were made, beside those of the contracts."""

    def __init__(self, workspace: Workspace, source: str, versions: RulesVersions) -> None:
        """``versions``: of ``source``. Raises ``LedgerUnreadable``."""
        self._workspace = workspace
        self._contracts = {each.name: each for each in workspace.contracts.of_source(source)}
        self._common = versions.common()
        self._known = _read(workspace.policies(source).entries())
        self.noted = frozenset(self._known)
        self._in_force = {
            version: (self._contracts[name].table_name, StoredTable.of(self._contracts[name]))
            for version, name in versions.of_contracts().items()
        }
        self._known |= self._in_force
        # Many windows were judged by the same versions.
        self._found: dict[tuple[str, ...], tuple[StoredWindow, StoredWindow]] = {}
        self._waiting: dict[str, bool] = {}

    def missing(self) -> pa.Table:
        """Return the rows that the ledger lacks: those of the contracts in force."""
        rows = [
            {
                "version": version,
                "source_schema": schema,
                "source_table": table,
                "policies": json.dumps(stored.to_plain(), sort_keys=True),
            }
            for version, ((schema, table), stored) in self._in_force.items()
            if version not in self.noted
        ]
        return pa.Table.from_pylist(rows, schema=arrow_schema(POLICY_TYPE, without=(SEQUENCE,)))

    def is_behind(self, state: WindowState) -> bool:
        """Whether the values of a sealed window do not have the policies of the contracts yet, as far as they
        can, or its state does not say so."""
        now, after = self._of(state)
        return now != after

    def behind(self, state: WindowState) -> list[TableContract]:
        """Return the contracts for which a sealed window ``is_behind``."""
        now, after = self._of(state)
        changed = now.changed(after)
        found = [each for each in self._contracts.values() if each.full_name in changed]
        return found or (list(self._contracts.values()) if now != after else [])

    def kept(self, state: WindowState, tables: Collection[str | None]) -> dict[str, str]:
        """Return the columns of ``tables`` (names at the source) of which accepted events of a sealed window
        have other values than their policy gives, and no run will change that: table and column → the policy
        that made the values. ``UNCOVERED``: events of tables without a contract may have their images."""
        _, after = self._of(state)
        found = {
            f"{name}.{column}": policy
            for name, each in self._contracts.items()
            if each.table in tables
            for column, policy in after.tables[each.full_name].kept(each).items()
            if not self._waits(each)
        }
        others = {*tables}.difference(each.table for each in self._contracts.values())
        if others and after.is_uncovered(self._contracts.values()):
            found[f"{UNCOVERED}.{UNCOVERED}"] = UNKNOWN
        return found

    def are_all_plain(self, state: WindowState, contract: TableContract, column: str) -> bool:
        """Whether the values of ``column`` in a sealed window, accepted and in quarantine, are certainly as
        they landed."""
        table = self._of(state)[0].tables.get(contract.full_name, StoredTable(default=UNKNOWN))
        return table.column(column) == StoredColumn.made_by(KEEP)

    def rewriting(self, state: WindowState, secrets: Secrets) -> Rewriting | None:
        """Return how to rewrite a sealed window; None if there is nothing to do."""
        now, after = self._of(state)
        if now == after:
            return None
        changed = now.changed(after)
        behind = [each for each in self._contracts.values() if each.full_name in changed]
        stored = {each.table_name: (each, now.tables[each.full_name]) for each in behind}
        taken = {place: each for place, each in stored.items() if not self._waits(each[0])}
        cover, cover_withheld = after.covered > now.covered, after.withheld_covered > now.withheld_covered
        known = frozenset(_place(name) for name in now.tables)
        in_force = frozenset(each.table_name for each in self._contracts.values())
        change = partial(_rewritten, secrets=secrets)
        record = self._recorded(state) or Record()
        tables = {**record.tables, **{name: after.tables[name] for name in changed}}
        record = Record(tables, after.covered, after.withheld_covered)
        others = (each for each in state.versions if not each.startswith(POLICIES))
        every = None if cover or cover_withheld else frozenset(each.table for each in behind)
        return Rewriting(
            # Nobody can release these events, so more may be covered than has to be.
            partial(change, stored=stored, described=in_force, cover=after.withheld_covered, accepted=False),
            partial(change, stored=taken, described=known, cover=cover, accepted=True),
            versions=(*others, f"{POLICIES}{record.to_text()}"),
            why=(POLICY,),
            tables=every,
            made_with=self._common,
        )

    def _of(self, state: WindowState) -> tuple[StoredWindow, StoredWindow]:
        """Return the policies of the window's values as they are, and as they should be."""
        found = self._found.get(state.versions)
        if found is None:
            contracts = list(self._contracts.values())
            now = StoredWindow.of(self._recorded(state), self._judging(state), contracts)
            after = now.after(contracts)
            if now != after and (waiting := [each.name for each in contracts if self._waits(each)]):
                after = now.after(contracts, waiting)
            found = self._found[state.versions] = now, after
        return found

    def _waits(self, contract: TableContract) -> bool:
        """Whether the table waits for a person to agree to other types. Until then nothing is done to its
        accepted events that cannot be taken back."""
        if not needs_protection(contract):
            return False
        if contract.name not in self._waiting:
            self._waiting[contract.name] = waits(self._workspace, contract) is not None
        return self._waiting[contract.name]

    def _recorded(self, state: WindowState) -> Record | None:
        texts = [each.removeprefix(POLICIES) for each in state.versions if each.startswith(POLICIES)]
        return Record.from_text(texts[0]) if texts else None

    def _judging(self, state: WindowState) -> Judging:
        of_contracts = [each for each in state.versions if each.startswith(CONTRACT)]
        known = dict(self._known[each] for each in of_contracts if each in self._known)
        unknown = (each.split(":")[1] for each in of_contracts if each not in self._known)
        return Judging(known, frozenset(unknown))


def _read(entries: pa.Table) -> dict[str, tuple[TableName, StoredTable]]:
    require_rows(entries, _NAME, frozenset(POLICY_TYPE.names))
    found = {}
    for number, row in enumerate(entries.to_pylist()):
        try:
            stored = StoredTable.from_plain(json.loads(row["policies"]))
        except ValueError:
            refuse_row(entries, _NAME, number, "its policies are no record that this version knows")
        found[row["version"]] = ((row["source_schema"], row["source_table"]), stored)
    return found


def note_policies(workspace: Workspace, source: str) -> None:
    """Record by which policies the contracts in force protect, before windows that they judged are sealed. A
    second call changes nothing."""
    versions = RulesVersions(workspace, source)
    if SealedPolicies(workspace, source, versions).missing().num_rows:
        workspace.policies(source).append(lambda _: SealedPolicies(workspace, source, versions).missing())


def apply_policies(workspace: Workspace, source: str, windows: Collection[str], run_id: str) -> None:
    """Rewrite those of ``windows`` that are sealed and not protected by the policies in force, in one commit.
    A second call changes nothing. A window of which a file is gone is left out, and named in the log."""
    sealed = Removed.open(workspace, source).sealed
    if sealed or any(each.retention.raw is not None for each in workspace.contracts.of_source(source)):
        # Each contract that judges windows which may be sealed; also if an earlier version has sealed some.
        note_policies(workspace, source)
    sealed = sealed.intersection(windows)

    def behind(judged: TableSnapshot) -> Mapping[str, Rewriting]:
        policies = SealedPolicies(workspace, source, RulesVersions(workspace, source))
        secrets = workspace.secrets(workspace.contracts.of_source(source))
        found = {}
        for window in sorted(sealed.intersection(judged.windows())):
            state = judged.state(window)
            if state is None or (rewriting := policies.rewriting(state, secrets)) is None:
                continue
            if _is_whole(workspace, source, judged, window):
                found[window] = rewriting
            else:
                _log.warning(
                    "A file of the sealed window %s of %s is gone, so the policies in force are not applied "
                    "to it. Restore the folders deduped_events and quarantine from a backup of the lake.",
                    window,
                    source,
                )
        return found

    judged = workspace.deduped(source).look() if sealed else None
    if judged is not None and (found := behind(judged)):
        _log.info("Applying the policies in force to %s of %s.", counted(len(found), "sealed window"), source)
        rewrite(workspace, source, found, behind, run_id)


def _is_whole(workspace: Workspace, source: str, judged: TableSnapshot, window: str) -> bool:
    """Whether all files of ``window`` are there."""
    folder = judged.table.folder
    there = storage_of(folder).exists
    accepted = all(there(folder / file.path) for file in judged.files(window))
    return accepted and not gone_from_disk(workspace.quarantine(source), judged.state(window))


def _place(full_name: str) -> TableName:
    schema, _, table = full_name.partition(".")
    return schema, table


def _rewritten(
    rows: pa.Table,
    *,
    stored: Mapping[TableName, tuple[TableContract, StoredTable]],
    secrets: Secrets,
    described: frozenset[TableName],
    cover: bool,
    accepted: bool,
) -> pa.Table | None:
    """Return ``rows`` with the policies of the contracts applied to values made as ``stored`` says; None if
    that changes none. ``cover``: whether events of tables not ``described`` lose their images."""
    protections = Protections(
        {
            place: StoredProtection(contract, secrets, was, accepted)
            for place, (contract, was) in stored.items()
            if needs_protection(contract)
        },
        described,
        undescribed=cover,
    )
    verdict = pa.array([ACCEPTED if accepted else QUARANTINED] * rows.num_rows, pa.string())
    judged = rows.append_column("verdict", verdict).combine_chunks().to_batches()
    left = pa.Table.from_batches(protect_batches(judged, protections)).drop_columns(["verdict"])
    return None if left.equals(rows) else left
