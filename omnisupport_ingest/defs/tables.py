"""What Dagster shows of the tables of the lake: column schemas and column lineage."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import dagster as dg

from omnisupport_ingest.cdc.column_descriptions import column_descriptions
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.defs.keys import deduped_key, landing_key
from omnisupport_ingest.lake.table import TableSpec


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
                description=column.description if column else system[field.name],
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

    A batch holds them within row images and not as columns of its own.
    """
    columns = [
        dg.TableColumn(
            _source_column(contract, column.name),
            column.pg_type,
            description=column.description,
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


def _source_column(contract: TableContract, name: str) -> str:
    return f"{contract.full_name}.{name}"
