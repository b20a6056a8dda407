"""How many changes of which kind a workload committed."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class WorkloadReport:
    """Committed row changes by kind; reports of parts add up with ``+``.

    ``changes`` is what logical decoding sends for them: one for each row inserted, updated or
    deleted, one for each TRUNCATE. The kinds marked *of which* count only the rows that were
    changed for that purpose; ordinary traffic may add more of the same.
    """

    inserts: int = 0
    updates: int = 0
    deletes: int = 0
    truncates: int = 0
    # Of which:
    reinserts: int = 0
    """Inserts of a key that was deleted before."""
    key_changes: int = 0
    """Updates of a primary key, those of a swap and with an unsent body included."""
    key_changes_with_unsent_body: int = 0
    key_swaps: int = 0
    """Pairs of rows that exchanged their keys, by three updates over a temporary key."""
    updates_with_unsent_body: int = 0
    """Updates that leave a long body, stored out of line, alone; key changes not included."""
    updates_of_long_body: int = 0
    """Updates that set a body that was or becomes long."""
    updates_to_null: int = 0
    soft_deletes: int = 0
    undeletes: int = 0
    awkward_texts: int = 0
    """Rows inserted for their quotes, backslashes, control characters, empty text and so on."""
    transactions: int = 0
    multi_table_transactions: int = 0
    largest_transaction: int = 0
    """Changes of the largest transaction (the larger of two, when reports are added)."""
    rolled_back_transactions: int = 0
    rolled_back_changes: int = 0
    """Row changes in rolled-back transactions and savepoints; not in ``changes``."""
    rolled_back_savepoints: int = 0

    @property
    def changes(self) -> int:
        return self.inserts + self.updates + self.deletes + self.truncates

    def __add__(self, other: WorkloadReport) -> WorkloadReport:
        sums = {field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)}
        sums["largest_transaction"] = max(self.largest_transaction, other.largest_transaction)
        return WorkloadReport(**sums)
