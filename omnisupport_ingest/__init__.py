"""PostgreSQL-to-lakehouse ingestion on Dagster and Spark.

The WAL becomes immutable batches; everything after them is a pure function of windows of these batches. The
guarantee: at-least-once ingest + idempotent write + dedupe + replayable recovery.
"""

__version__ = "0.1.0"
