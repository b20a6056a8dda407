"""Tables of the lake as Dagster describes them: column schemas and column lineage."""

from __future__ import annotations

from typing import Any

import dagster as dg

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.defs.keys import dimension_key
from omnisupport_ingest.lake.table import TableSpec


def table_metadata(spec: TableSpec, contract: TableContract | None = None) -> dict[str, Any]:
    """Definition metadata of a table: its columns, described by ``contract`` where it knows them."""
    described = {column.name: column for column in contract.columns} if contract else {}
    columns = []
    for field in spec.schema.fields:
        column = described.get(field.name)
        columns.append(
            dg.TableColumn(
                field.name,
                field.dataType.simpleString(),
                description=column.description if column else None,
                constraints=dg.TableColumnConstraints(nullable=column.nullable if column else field.nullable),
                tags={"personal-data": ""} if column and column.personal else None,
            )
        )
    return {
        "dagster/column_schema": dg.TableSchema(columns),
        "dagster/table_name": spec.path.replace("/", "."),
        "partitioned_by": ", ".join(spec.partition_by) or "nothing",
    }


def published_lineage(contract: TableContract) -> dict[str, Any]:
    """Each column of the published table comes from the column of that name in the dimension."""
    upstream = dimension_key(contract)
    return {
        "dagster/column_lineage": dg.TableColumnLineage(
            {name: [dg.TableColumnDep(upstream, name)] for name in contract.column_names}
        )
    }
