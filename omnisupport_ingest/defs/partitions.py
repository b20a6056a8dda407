"""Windows as Dagster partitions: the same grid, the same keys."""

from __future__ import annotations

import dagster as dg

from omnisupport_ingest.windows import KEY_FORMAT, WindowGrid


def window_partitions(grid: WindowGrid) -> dg.TimeWindowPartitionsDefinition:
    """Every window of ``grid`` up to the one that is still open, which Dagster leaves out by default."""
    return dg.TimeWindowPartitionsDefinition(
        start=grid.first, fmt=KEY_FORMAT, cron_schedule=grid.size.cron, timezone="UTC", end_offset=1
    )
