"""The relation that the manifest of a file's batch records: the table as its contract describes it."""

from __future__ import annotations

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
