"""The check on schema changes: whether the contract of each table still says what its source does."""

from __future__ import annotations

from collections.abc import Collection

from omnisupport_ingest.checks.findings import CheckFinding
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.read.schema_changes import BREAKING, asking, judged_changes

_NAMED = 3
"""Changes that a summary names."""


def schemas_as_contracted(
    workspace: Workspace, source: str, names: Collection[str]
) -> dict[str, CheckFinding]:
    """Whether every schema change of the tables ``names`` at their source has been looked after.

    By name of the contract. Names of columns and types only; `contracts changes` has the rest.
    """
    changes = judged_changes(workspace, source)
    found = {}
    for contract in workspace.contracts.of_source(source):
        if contract.name not in names:
            continue
        open_ones = asking(changes, contract.name)
        numbers: dict[str, int | float] = {
            "schema_changes": sum(each.change.table == contract.name for each in changes),
            "to_be_looked_after": len(open_ones),
            "breaking": sum(each.compatibility == BREAKING for each in open_ones),
            "rows_affected": sum(each.change.rows or 0 for each in open_ones),
        }
        if not open_ones:
            found[contract.name] = CheckFinding(True, "The contract says what the source does.", numbers)
            continue
        told = "; ".join(
            f"{each.what} (before {each.change.below}, {each.compatibility}): {each.edit}"
            for each in open_ones[:_NAMED]
        )
        more = f"; and {len(open_ones) - _NAMED} more" if len(open_ones) > _NAMED else ""
        found[contract.name] = CheckFinding(
            False, f"{told}{more}. See: omnisupport-ingest contracts propose {contract.name}", numbers
        )
    return found
