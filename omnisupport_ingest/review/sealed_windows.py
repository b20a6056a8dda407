"""Erases values from sealed windows, which no run judges again: their events are rewritten from themselves.

The ledger of erasures and the destroyed keys say which values these are, as for all other windows. An erased
event needs only its key's columns, so raw is not needed. The state of a window names the erasures that it was
rewritten with. So a command that was killed is repeated, and a run that has judged new events of the window
without knowing of the erasure cannot commit them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import pyarrow as pa
import pyarrow.compute as pc

from omnisupport_ingest.cdc.erasing import Erasures, erased_in, without_values
from omnisupport_ingest.cdc.event_hashes import event_hashes
from omnisupport_ingest.cdc.subject_values import ErasedSubjects, without_erased
from omnisupport_ingest.contracts.at_rest import subject_tables
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.contracts.subject_keys import SubjectKeys
from omnisupport_ingest.lake.snapshot import TableSnapshot
from omnisupport_ingest.layers.erasures import (
    SUBJECT_KEYS,
    VERSION,
    DestroyedKeysLost,
    ErasuresLost,
    refuse_lost,
)
from omnisupport_ingest.layers.events.rewriting import Rewriting, rewrite
from omnisupport_ingest.layers.events.sealed_policies import SealedPolicies
from omnisupport_ingest.layers.removed import Removed
from omnisupport_ingest.layers.versions import DESTROYED_KEY, ERASURE, RulesVersions
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.read.sealed_events import SealedEvents
from omnisupport_ingest.read.subject_traces import (
    Traced,
    contracts_with_events,
    found_by_keys_alone,
    subject_column_in_lake,
)

_IMAGES = ("before", "after")


def erase_in_sealed_windows(workspace: Workspace, source: str) -> None:
    """Rewrite the sealed windows of ``source`` that lack recorded erasures, in one commit. A second call
    changes nothing. A window whose removal from raw is not finished waits for that."""
    contracts = contracts_with_events(workspace, source)
    sealed = Removed.open(workspace, source).finally_sealed

    def behind(judged: TableSnapshot) -> Mapping[str, Rewriting]:
        # Read after the events. So what was judged without an erasure is rewritten, or its commit refused.
        versions = RulesVersions(workspace, source)
        values = _ErasedValues(source, contracts, versions.erasures.in_force(), workspace.subjects)
        found = {}
        for window in sorted(sealed.intersection(judged.windows())):
            state, erased = judged.state(window), versions.of_erased(window)
            if state is None or {*erased} <= {*state.versions}:
                continue
            try:
                refuse_lost(workspace, source, window, state.versions, versions.of(window))
            except (DestroyedKeysLost, ErasuresLost):
                # It was erased with more than is known now, and waits until all of that is known again.
                continue
            others = (each for each in state.versions if not each.startswith((VERSION, SUBJECT_KEYS)))
            new = {*erased} - {*state.versions}
            why = tuple(
                word
                for kind, word in ((VERSION, ERASURE), (SUBJECT_KEYS, DESTROYED_KEY))
                if any(each.startswith(kind) for each in new)
            )
            found[window] = Rewriting(
                values.removed, values.removed_of_accepted, versions=(*others, *erased), why=why
            )
        return found

    if sealed:
        rewrite(workspace, source, sealed, behind, "erase")


def tables_not_found(
    workspace: Workspace, contract: TableContract, of_subject: Traced
) -> list[TableContract]:
    """Return the tables in which nobody can find the rows of the subject in sealed windows: these do not name
    it as the source does, by the policy in force or by the one that made their values."""
    sealed, source = SealedEvents.of(workspace, contract.source), contract.source
    by_keys_alone = found_by_keys_alone(of_subject.contracts, contract.subject)
    found = [each for each in by_keys_alone if sealed.has_events_of(each)]
    judged = workspace.deduped(source).look() if sealed.windows else None
    if judged is None:
        return found
    policies = SealedPolicies(workspace, source, RulesVersions(workspace, source))
    for each in of_subject.contracts:
        column = subject_column_in_lake(each, contract.subject)
        # A window without a state is never rewritten, so it stays pending whatever its values are.
        states = map(judged.state, sealed.windows_of_table(each) if column is not None else ())
        if column is not None and not all(
            policies.are_all_plain(state, each, column) for state in states if state is not None
        ):
            found.append(each)
    return found


@dataclass(frozen=True)
class _ErasedValues:
    """The values that erasures remove from events of ``source``: by row, and by subject."""

    source: str
    contracts: Sequence[TableContract]
    erasures: Erasures
    keys: SubjectKeys

    def removed(self, rows: pa.Table) -> pa.Table | None:
        """Return ``rows`` of quarantine without the values, as ``rewriting.Emptied``. A quarantined event
        keeps its hash, because reviews name it by that."""
        return self._removed(rows, accepted=False)

    def removed_of_accepted(self, rows: pa.Table) -> pa.Table | None:
        """Return accepted ``rows`` without the values. Each changed event gets the hash of what is left."""
        left = self._removed(rows, accepted=True)
        if left is None:
            return None
        images = ([each[name].to_pylist() for name in _IMAGES] for each in (rows, left))
        before, after = (zip(*each, strict=True) for each in images)
        changed = pa.array([one != other for one, other in zip(before, after, strict=True)])
        place = left.column_names.index("event_hash")
        hashes = pc.if_else(changed, event_hashes(left), left["event_hash"].combine_chunks())
        return left.set_column(place, left.schema.field(place), hashes)

    def _removed(self, rows: pa.Table, *, accepted: bool) -> pa.Table | None:
        batch = rows.combine_chunks().to_batches()[0]
        left = batch
        erased = erased_in(batch, self.erasures)
        if any(erased):
            left = without_values(left, erased, {each.table_name: each.key for each in self.contracts})
        left = without_erased(left, self._subjects, accepted=accepted)
        return None if left.equals(batch) else pa.Table.from_batches([left])

    @cached_property
    def _subjects(self) -> ErasedSubjects:
        """The erased subjects, of the tables whose rows in the lake say whose they are."""
        named = [each for each in self.contracts if subject_column_in_lake(each, each.subject) is not None]
        return ErasedSubjects(self.source, subject_tables(named), self.keys.erased())
