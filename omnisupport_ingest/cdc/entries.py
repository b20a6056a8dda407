"""Events as folded rows of their own: one entry per event, each column that it carried as a cell."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from omnisupport_ingest.cdc.envelope import POSITION_TYPE, image, position
from omnisupport_ingest.cdc.folded import BOUNDARY, DELETE_TYPE, KEY, TRUNCATE, cell_name
from omnisupport_ingest.contracts.load import TableContract
from omnisupport_ingest.contracts.pg_types import ALWAYS_FITS
from omnisupport_ingest.contracts.spark_types import typed


def entries_of(keyed: DataFrame, contract: TableContract) -> DataFrame:
    """Every row event as a folded row of its own, its columns packed as cells."""
    parsed = keyed.select(
        "*",
        position().alias("_p"),
        F.when(F.col("op") != "d", image(F.col("after"))).alias("_after"),
        # An unsent column may stand in the old image (replica identity full).
        F.when(
            (F.size("unchanged") > 0) & F.col("before").isNotNull(),
            F.map_filter(image(F.col("before")), lambda name, _: F.array_contains("unchanged", name)),
        ).alias("_before"),
    )
    alive = F.col("op").isin("c", "u", "r")
    starts = F.col("op").isin("c", "r")
    none = F.lit(None)
    plain = [column for column in contract.columns if column.name not in contract.key]
    sent = {
        column.name: F.coalesce(
            F.map_contains_key("_after", F.lit(column.name))
            | F.map_contains_key("_before", F.lit(column.name)),
            F.map_contains_key("_after", F.lit(column.name)),
            F.map_contains_key("_before", F.lit(column.name)),
            F.lit(False),
        )
        for column in plain
    }
    texts = parsed.select(
        "*",
        *(
            F.coalesce(F.col("_after")[column.name], F.col("_before")[column.name]).alias(
                f"_text_{column.name}"
            )
            for column in plain
        ),
        *(sent[column.name].alias(f"_sent_{column.name}") for column in plain),
    )
    # Columns of their own, so that each value is typed once.
    values = texts.select(
        "*",
        *(typed(F.col(f"_text_{column.name}"), column).alias(f"_value_{column.name}") for column in plain),
    )
    known = ~F.col("hole")
    cells = []
    complete = F.lit(True)
    for column in plain:
        text, value = F.col(f"_text_{column.name}"), F.col(f"_value_{column.name}")
        exact = F.lit(None).cast("string")
        if column.type.kind not in ALWAYS_FITS:
            exact = F.when(known & value.isNull(), text)
        cell = F.struct(
            F.col("_p").alias("p"),
            known.alias("known"),
            F.when(known, value).alias("v"),
            exact.alias("exact"),
        )
        cells.append(F.when(alive & F.col(f"_sent_{column.name}"), cell).alias(cell_name(column.name)))
        complete = complete & F.col(f"_sent_{column.name}")
    return values.select(
        "window",
        F.lit(KEY).alias("_cdc_kind"),
        F.col("key").alias("_cdc_key"),
        none.cast(POSITION_TYPE).alias("_cdc_ended_at"),
        F.col("op").alias("_cdc_op"),
        F.col("_p").alias("_cdc_position"),
        F.col("_p").alias("_cdc_first"),
        F.col("source_ts").alias("_cdc_source_ts"),
        F.when(alive, F.col("_p")).alias("_cdc_alive"),
        F.when(alive, F.col("source_ts")).alias("_cdc_updated_at"),
        F.when(starts, F.col("_p")).alias("_cdc_life_start"),
        # Where the image is complete, nothing will ever be taken from the old key.
        F.when(starts & ~complete & ~F.col("hole"), F.col("moved_from_key")).alias("_cdc_moved_from_key"),
        F.when(
            (F.col("op") == "d") & ~F.col("hole"),
            F.array(F.struct(F.col("_p").alias("position"), F.col("source_ts").alias("at"))),
        )
        .otherwise(F.array().cast(T.ArrayType(DELETE_TYPE)))
        .alias("_cdc_deletes"),
        F.when((F.col("op") == "d") & F.col("hole"), F.col("_p")).alias("_cdc_doubt"),
        F.col("batch_id").alias("_cdc_batch_id"),
        F.col("landed_at").alias("_cdc_ingested_at"),
        *cells,
    )


def keyless_of(events: DataFrame) -> DataFrame:
    """Truncates and boundaries as rows of their own."""
    none = F.lit(None)
    return events.select(
        "window",
        F.when(F.col("op") == "t", TRUNCATE).otherwise(BOUNDARY).alias("_cdc_kind"),
        none.cast("string").alias("_cdc_key"),
        none.cast(POSITION_TYPE).alias("_cdc_ended_at"),
        F.col("op").alias("_cdc_op"),
        position().alias("_cdc_position"),
        position().alias("_cdc_first"),
        F.col("source_ts").alias("_cdc_source_ts"),
        none.cast(POSITION_TYPE).alias("_cdc_alive"),
        none.cast("timestamp").alias("_cdc_updated_at"),
        none.cast(POSITION_TYPE).alias("_cdc_life_start"),
        none.cast("string").alias("_cdc_moved_from_key"),
        F.array().cast(T.ArrayType(DELETE_TYPE)).alias("_cdc_deletes"),
        none.cast(POSITION_TYPE).alias("_cdc_doubt"),
        F.col("batch_id").alias("_cdc_batch_id"),
        F.col("landed_at").alias("_cdc_ingested_at"),
    ).dropDuplicates(["window", "_cdc_kind", "_cdc_position"])
