"""Names the columns of which sealed windows have values by another policy than the contract's.

What is masked, hashed or a token cannot be made anything else, and what a laxer policy would show is gone. So
these windows stay as they are until the column is dropped or rows are erased.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from omnisupport_ingest.contracts.pii_policies import DROP, KEEP
from omnisupport_ingest.contracts.stored_policies import UNKNOWN, policy_text
from omnisupport_ingest.layers.events.sealed_policies import UNCOVERED
from omnisupport_ingest.layers.removed import Removed
from omnisupport_ingest.layers.scheduling.pending import standing_of_windows
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.wording import agreeing, counted


@dataclass(frozen=True, slots=True)
class FormerPolicy:
    """How many sealed ``windows`` have values of a ``column`` by ``policy``; ``wanted``: what the contract
    says. ``table``: with its source. ``UNCOVERED`` stands for tables without a contract, and all columns."""

    table: str
    column: str
    policy: str
    wanted: str
    windows: int

    @property
    def sentence(self) -> str:
        """What is so, and what can be done."""
        of = counted(self.windows, "sealed window")
        if self.column == UNCOVERED:
            has = agreeing(self.windows, "was", "were")
            return (
                f"{self.table}: {of} with events of tables without a contract {has} judged by a contract "
                "that is not on record and may have named these; they keep their images."
            )
        has = agreeing(self.windows, "has", "have")
        known = "by a policy that is not on record" if self.policy == UNKNOWN else f"by {self.policy}"
        fix = (
            "nothing brings these back"
            if self.wanted == KEEP
            else "they stay until the policy is drop or the mask is text, or their rows are erased"
        )
        stored = f"{self.table}.{self.column}: {of} {has} values {known}"
        return f"{stored}, and the contract says {self.wanted}; {fix}."


def former_policies(workspace: Workspace, source: str) -> list[FormerPolicy]:
    """Return them for the tables of ``source``, by table and column. Raises ``LedgerUnreadable``."""
    if not Removed.open(workspace, source).sealed:
        return []
    return sorted(_found(workspace, source), key=lambda each: (each.table, each.column, each.policy))


def _found(workspace: Workspace, source: str) -> Iterator[FormerPolicy]:
    contracts = {each.name: each for each in workspace.contracts.of_source(source)}
    for name, windows in standing_of_windows(workspace, source).former.items():
        place, _, policy = name.partition(" ")
        table, _, column = place.partition(".")
        if column == UNCOVERED:
            yield FormerPolicy(f"{source}.{UNCOVERED}", column, policy, DROP, windows)
            continue
        wanted = next(each for each in contracts[table].source_columns if each.name == column)
        yield FormerPolicy(f"{source}.{table}", column, policy, policy_text(wanted), windows)
