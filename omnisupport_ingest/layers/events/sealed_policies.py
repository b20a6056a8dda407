"""Brings the values of sealed windows under the policies for personal data that are in force.

No run judges a sealed window again, so a stricter policy is applied to what its events have. A ledger says by
which policies each version of a contract protected; it is written before retention seals windows. The state
of a window names the versions that judged it and, once it was rewritten, the policies that its values have
since. Files and state change in one commit. So no value is protected twice, and what a killed run left undone
the next one does.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial

import pyarrow as pa

from omnisupport_ingest.cdc.judging import ACCEPTED, QUARANTINED
from omnisupport_ingest.cdc.protecting import Protections, protect_batches
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.contracts.names import TableName
from omnisupport_ingest.contracts.protection import Secrets, needs_protection
from omnisupport_ingest.contracts.stored_policies import (
    UNKNOWN,
    StoredProtection,
    StoredTable,
    tables_from_text,
    tables_to_text,
)
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.lake.ledger import SEQUENCE, require_rows
from omnisupport_ingest.lake.schema import arrow_schema
from omnisupport_ingest.lake.snapshot import TableSnapshot
from omnisupport_ingest.lake.state import WindowState
from omnisupport_ingest.layers.events.rewriting import Rewriting, rewrite
from omnisupport_ingest.layers.ledgers import POLICY_TYPE
from omnisupport_ingest.layers.removed import Removed
from omnisupport_ingest.layers.versions import CONTRACT, POLICIES, POLICY, RulesVersions
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.wording import counted

_log = logging.getLogger(__name__)

_NAME = "policy_ledger"


class PoliciesChanged(IngestError):
    """A sealed window does not have the policies for personal data of this run, which would add events to its
    quarantine: another run has applied others meanwhile, or its removal from raw is not finished. Nothing was
    committed.

    Fix: Run again: a run begins by applying the policies. If it fails again, finish the removal by
    ``omnisupport-ingest retention apply --yes``.
    """


class SealedPolicies:
    """The policies by which the values of sealed windows were made, beside those of the contracts."""

    def __init__(self, workspace: Workspace, source: str, versions: RulesVersions) -> None:
        """``versions``: of ``source``. Raises ``LedgerUnreadable``."""
        self._contracts = {each.name: each for each in workspace.contracts.of_source(source)}
        entries = workspace.policies(source).entries()
        require_rows(entries, _NAME, frozenset(POLICY_TYPE.names))
        self.noted = frozenset(entries["version"].to_pylist())
        self._known: dict[str, tuple[TableName, StoredTable]] = {
            row["version"]: (
                (row["source_schema"], row["source_table"]),
                StoredTable.from_plain(json.loads(row["policies"])),
            )
            for row in entries.to_pylist()
        }
        self._in_force = {
            version: (self._contracts[name].table_name, StoredTable.of(self._contracts[name]))
            for version, name in versions.of_contracts().items()
        }
        self._known |= self._in_force
        # Many windows were judged by the same versions.
        self._found: dict[tuple[str, ...], _Window] = {}

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

    def behind(self, state: WindowState) -> list[TableContract]:
        """Return the contracts whose policies the values of a sealed window do not have yet, as far as they
        can."""
        stored = self._of(state).stored
        return [each for name, each in self._contracts.items() if stored[name].after(each) != stored[name]]

    def kept(self, state: WindowState, tables: Collection[str | None]) -> dict[str, str]:
        """Return the columns of ``tables`` (names at the source) of which accepted events of a sealed window
        have other values than their policy gives: table and column → the policy that made the values."""
        stored = self._of(state).stored
        return {
            f"{name}.{column}": policy
            for name, each in self._contracts.items()
            if each.table in tables
            for column, policy in stored[name].kept(each).items()
        }

    def rewriting(self, state: WindowState, secrets: Secrets) -> Rewriting | None:
        """Return how to rewrite a sealed window; None if there is nothing to do."""
        behind, window = self.behind(state), self._of(state)
        if not behind:
            return None
        stored = {each.table_name: (each, window.stored[each.name]) for each in behind}
        change = partial(_rewritten, stored=stored, secrets=secrets, described=window.described)
        after = {each.full_name: was.after(each) for each, was in stored.values()}
        others = (each for each in state.versions if not each.startswith(POLICIES))
        return Rewriting(
            partial(change, accepted=False, first=not window.withheld_covered),
            partial(change, accepted=True, first=not window.covered),
            versions=(*others, f"{POLICIES}{tables_to_text({**window.recorded, **after})}"),
            why=(POLICY,),
        )

    def _of(self, state: WindowState) -> _Window:
        found = self._found.get(state.versions)
        if found is None:
            found = self._found[state.versions] = self._read(state.versions)
        return found

    def _read(self, versions: tuple[str, ...]) -> _Window:
        recorded: dict[str, StoredTable] = {}
        for each in versions:
            if each.startswith(POLICIES):
                recorded = tables_from_text(each.removeprefix(POLICIES))
        of_contracts = [each for each in versions if each.startswith(CONTRACT)]
        judged = dict(self._known[each] for each in of_contracts if each in self._known)
        whole = len(judged) == len(of_contracts)
        # A table that no contract named had no policy; but one of these contracts may have named it.
        otherwise = StoredTable() if whole else StoredTable(default=UNKNOWN)
        stored = {
            name: recorded.get(each.full_name) or judged.get(each.table_name, otherwise)
            for name, each in self._contracts.items()
        }
        every = {".".join(place): each for place, each in judged.items()} | recorded
        return _Window(
            recorded,
            stored,
            frozenset((*judged, *(each.table_name for each in self._contracts.values()))),
            not whole or any(each.protected for each in every.values()),
            not whole or any(each.withheld_protected for each in every.values()),
        )


@dataclass(frozen=True, slots=True)
class _Window:
    """What is known of the values of a sealed window.

    ``recorded``: the policies that its state names, by full name of the table; ``stored``: those by which the
    values were made, by name of the contract. ``described``: the tables that a contract has named.
    ``covered``, ``withheld_covered``: whether accepted events of other tables, and those in quarantine, have
    lost their images, or nobody knows.
    """

    recorded: Mapping[str, StoredTable]
    stored: Mapping[str, StoredTable]
    described: frozenset[TableName]
    covered: bool
    withheld_covered: bool


def note_policies(workspace: Workspace, source: str) -> None:
    """Record by which policies the contracts in force protect, before windows that they judged are sealed. A
    second call changes nothing."""
    versions = RulesVersions(workspace, source)
    if SealedPolicies(workspace, source, versions).missing().num_rows:
        workspace.policies(source).append(lambda _: SealedPolicies(workspace, source, versions).missing())


def apply_policies(workspace: Workspace, source: str, windows: Collection[str], run_id: str) -> None:
    """Rewrite those of ``windows`` that are sealed and not protected by the policies in force, in one commit.
    A second call changes nothing. A window whose removal from raw is not finished waits for that."""
    removed = Removed.open(workspace, source)
    if not removed.sealed:
        return
    # Also for windows that an earlier version of the program has sealed.
    note_policies(workspace, source)
    sealed = removed.finally_sealed.intersection(windows)

    def behind(judged: TableSnapshot) -> Mapping[str, Rewriting]:
        policies = SealedPolicies(workspace, source, RulesVersions(workspace, source))
        secrets = workspace.secrets(workspace.contracts.of_source(source))
        states = {window: judged.state(window) for window in sorted(sealed.intersection(judged.windows()))}
        return {
            window: found
            for window, state in states.items()
            if state is not None and (found := policies.rewriting(state, secrets)) is not None
        }

    judged = workspace.deduped(source).look() if sealed else None
    if judged is not None and (found := behind(judged)):
        _log.info("Applying the policies in force to %s of %s.", counted(len(found), "sealed window"), source)
        rewrite(workspace, source, found, behind, run_id)


def _rewritten(
    rows: pa.Table,
    *,
    stored: Mapping[TableName, tuple[TableContract, StoredTable]],
    secrets: Secrets,
    described: frozenset[TableName],
    first: bool,
    accepted: bool,
) -> pa.Table | None:
    """Return ``rows`` with the policies of the contracts applied to values made as ``stored`` says; None if
    that changes none. ``first``: whether these are the first policies, so that events of tables not
    ``described`` lose their images."""
    protections = Protections(
        {
            place: StoredProtection(contract, secrets, was, accepted)
            for place, (contract, was) in stored.items()
            if needs_protection(contract)
        },
        described,
        undescribed=first,
    )
    verdict = pa.array([ACCEPTED if accepted else QUARANTINED] * rows.num_rows, pa.string())
    judged = rows.append_column("verdict", verdict).combine_chunks().to_batches()
    left = pa.Table.from_batches(protect_batches(judged, protections)).drop_columns(["verdict"])
    return None if left.equals(rows) else left
