"""What the lake works out of a schema of Spark, beside what Delta's library says of it."""

from __future__ import annotations

import json

import pytest
from pyspark.sql import types as T

from omnisupport_ingest.cdc.envelope import QUARANTINE_TYPE, RAW_TYPE
from omnisupport_ingest.cdc.folded import folded_type
from omnisupport_ingest.cdc.history import history_type
from omnisupport_ingest.cdc.stored import stored_type
from omnisupport_ingest.contracts.load import default_contracts_dir, load_contracts
from omnisupport_ingest.lake.schema import delta_schema, retyped

CONTRACTS = tuple(load_contracts(default_contracts_dir()))
NESTED = T.StructType(
    [
        T.StructField(
            "list", T.ArrayType(T.MapType(T.StringType(), T.DecimalType(9, 2), False), False), False
        ),
        T.StructField("part", T.StructType([T.StructField("at", T.TimestampType(), False)]), False),
        *(
            T.StructField(f"n{place}", each, False)
            for place, each in enumerate(
                (T.ShortType(), T.DateType(), T.BinaryType(), T.FloatType(), T.LongType())
            )
        ),
    ]
)
SCHEMAS = {
    **{
        f"{of.__name__} {each.name}": of(each)
        for each in CONTRACTS
        for of in (folded_type, stored_type, history_type)
    },
    "raw": RAW_TYPE,
    "quarantine": QUARANTINE_TYPE,
    "nested": NESTED,
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_table_made_by_a_schema_is_not_retyped_by_it(name: str):
    """Types are worked out without Delta's library, which would say the same."""
    assert retyped(delta_schema(SCHEMAS[name]).to_json(), SCHEMAS[name]) == ()


def test_another_type_on_disk_is_named_however_deep_it_is():
    other = json.loads(delta_schema(NESTED).to_json().replace("decimal(9,2)", "decimal(8,2)"))
    [found] = retyped(json.dumps(other), NESTED)
    assert found.column == "list" and "decimal(8,2)" in found.on_disk
