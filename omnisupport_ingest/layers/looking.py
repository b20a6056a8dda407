"""Opening a table of the lake to look at it: nothing is made, widened or committed."""

from __future__ import annotations

from omnisupport_ingest.lake.table import LakeTable, TableSnapshot


def look(table: LakeTable) -> TableSnapshot | None:
    """The newest version of ``table`` as it is on disk; None if the table is not there yet."""
    return table.look()
