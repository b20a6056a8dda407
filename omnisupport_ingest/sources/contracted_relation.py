"""The relations that the manifest of a batch of events or files records: tables as their contracts describe
them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from omnisupport_ingest.contracts.landed_keys import LandedKeys
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.landing.manifest import RelationVersion


def contracted_relation(contract: TableContract) -> RelationVersion:
    """Return columns, types and key of ``contract`` as a relation without a replica identity."""
    return RelationVersion(
        schema=contract.schema,
        table=contract.table,
        columns=tuple(column.name for column in contract.source_columns),
        types=tuple(column.pg_type for column in contract.source_columns),
        key_columns=contract.key,
        replica_identity="",
    )


def landed_relations(landing: Path, contracts: Sequence[TableContract]) -> tuple[RelationVersion, ...]:
    """Return the relations of ``contracts`` for a batch of events or files. ``landing``: of their source.

    Raises ``LandedKeyChanged`` for a contract that has another key than what has landed.
    """
    LandedKeys(landing).require(contracts)
    return tuple(contracted_relation(each) for each in contracts)
