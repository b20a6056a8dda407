"""PostgreSQL-to-lakehouse ingestion on Dagster and Spark.

The WAL becomes immutable batches; everything after that is a pure function of windows of those
batches. The promise: at-least-once ingest + idempotent write + dedupe + replayable recovery.
"""

__version__ = "0.1.0"
