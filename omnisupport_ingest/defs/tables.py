"""Tables of the lake as Dagster describes them: column schemas and column lineage."""

from __future__ import annotations

from typing import Any

import dagster as dg

from omnisupport_ingest.cdc.column_descriptions import described
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.defs.keys import deduped_key
from omnisupport_ingest.lake.table import TableSpec


def table_metadata(spec: TableSpec, contract: TableContract | None = None) -> dict[str, Any]:
    """Definition metadata of a table: its columns, described by ``contract`` where it knows them."""
    contracted = {column.name: column for column in contract.columns} if contract else {}
    system = described(spec.schema.names)
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


def dimension_lineage(contract: TableContract) -> dict[str, Any]:
    """Each column of a dimension comes from the images of the events, before and after the change."""
    upstream = deduped_key(contract.source)
    return {
        "dagster/column_lineage": dg.TableColumnLineage(
            {
                name: [dg.TableColumnDep(upstream, image) for image in ("after", "before")]
                for name in contract.column_names
            }
        )
    }
