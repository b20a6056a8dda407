"""What Dagster shows of the tables of the lake: column schemas and column lineage.

The open-source UI draws no graph of columns: it shows ``dagster/column_lineage`` as JSON behind a button. So
the lineage also stands in the description of each column, which the list of columns on an asset's page shows:
a column of a dimension or history names its source column, and a column of landing names its columns in the
lake.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import dagster as dg

from omnisupport_ingest.cdc.column_descriptions import column_descriptions
from omnisupport_ingest.contracts.model import Column, TableContract
from omnisupport_ingest.contracts.pii_policies import DROP, HASH, KEEP, MASK, TOKENIZE
from omnisupport_ingest.defs.keys import deduped_key, landing_key
from omnisupport_ingest.lake.table_spec import TableSpec

_UNDER = {
    KEEP: "personal, kept as it is",
    MASK: "personal, masked",
    HASH: "personal, as a keyed hash",
    TOKENIZE: "personal, as a token",
}
"""What a policy for personal data leaves of the values, in words."""


def table_metadata(spec: TableSpec, contract: TableContract | None = None) -> dict[str, Any]:
    """Return the definition metadata of a table: its columns, described by ``contract`` where it has them."""
    contracted = {column.name: column for column in contract.columns} if contract else {}
    system = column_descriptions(spec.schema.names)
    columns = []
    for field in spec.schema.fields:
        column = contracted.get(field.name)
        columns.append(
            dg.TableColumn(
                field.name,
                field.dataType.simpleString(),
                description=_from_source(contract, column) if contract and column else system[field.name],
                constraints=dg.TableColumnConstraints(nullable=column.nullable if column else field.nullable),
                tags={"personal-data": ""} if column and column.personal else None,
            )
        )
    return {
        "dagster/column_schema": dg.TableSchema(columns),
        "dagster/table_name": spec.path.replace("/", "."),
        "partitioned_by": ", ".join(spec.partition_by) or "nothing",
    }


def source_metadata(contracts: Iterable[TableContract]) -> dict[str, Any]:
    """Return the columns that land, as ``<schema>.<table>.<column>``, by the contracts of the source.

    In a batch they are members of row images, not columns.
    """
    columns = [
        dg.TableColumn(
            _source_column(contract, column.name),
            column.pg_type,
            description=_to_lake(contract, column),
            constraints=dg.TableColumnConstraints(nullable=column.nullable),
            tags={"personal-data": ""} if column.personal else None,
        )
        for contract in contracts
        for column in contract.source_columns
    ]
    return {"dagster/column_schema": dg.TableSchema(columns)}


def source_lineage(contract: TableContract) -> dict[str, Any]:
    """Return the column lineage of a dimension or history: each column comes from the column of the source
    table, by the row images before and after each change."""
    landed, events = landing_key(contract.source), deduped_key(contract.source)
    return {
        "dagster/column_lineage": dg.TableColumnLineage(
            {
                name: [
                    dg.TableColumnDep(landed, _source_column(contract, name)),
                    *(dg.TableColumnDep(events, image) for image in ("after", "before")),
                ]
                for name in contract.column_names
            }
        )
    }


def _from_source(contract: TableContract, column: Column) -> str:
    """Return what a column of the lake means, and which column of the source it comes from."""
    return _joined(column.description, f"From {_source_column(contract, column.name)}{_policy(column)}.")


def _to_lake(contract: TableContract, column: Column) -> str:
    """Return what a column of the source means, and which columns of the lake come from it."""
    if column.pii == DROP:
        return _joined(column.description, "Personal, and not in the lake.")
    return _joined(column.description, f"Leads to dim_{contract.name}.{column.name}{_policy(column)}.")


def _policy(column: Column) -> str:
    return f" ({_UNDER[column.pii]})" if column.personal else ""


def _joined(*sentences: str) -> str:
    return " ".join(filter(None, sentences))


def _source_column(contract: TableContract, name: str) -> str:
    return f"{contract.full_name}.{name}"
