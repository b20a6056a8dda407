"""Counting the events of a source in every layer, table by table, from the lake's files alone.

Duplicates are counted in raw itself, not taken as what is missing downstream, so that the sum
``raw = deduped + duplicates + quarantined`` says something.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import duckdb

from omnisupport_ingest.layers.checkpoints import Counts
from omnisupport_ingest.layers.event_files import EventFiles
from omnisupport_ingest.layers.removed import Removed
from omnisupport_ingest.layers.taken_in import files_named
from omnisupport_ingest.layers.workspace import Workspace


def events_per_table(workspace: Workspace, source: str) -> dict[str, Counts]:
    """The counts of each source table that has events; a message without a table counts as ``""``.

    Of raw, the events that were judged: those that landed since are not of this version. Sealed windows
    (``layers.removed``) are left out.
    """
    judged, raw = EventFiles.opened(workspace, source), workspace.raw(source).open()
    # Of a sealed window raw counts nothing any more, so nothing is held against it.
    sealed = Removed.open(workspace, source).sealed
    taken = [
        str(file)
        for window in judged.deduped.windows()
        if window not in sealed
        if (state := judged.deduped.state(window)) is not None
        for file in files_named(raw, window, state.inputs)
    ]
    distinct = "count(DISTINCT (epoch, commit_lsn, ordinal, event_hash))"
    found: dict[str, Counts] = {}
    for table, events, different in _ask(f"source_table, count(*), {distinct}", taken):
        found[table] = found.get(table, Counts()) + Counts(raw=events, duplicates=events - different)
    for table, events in _ask(
        "source_table, count(*)", [file.uri for file in judged.withheld if file.window not in sealed]
    ):
        found[table] = found.get(table, Counts()) + Counts(quarantined=events)
    for file in judged.deduped.all_files():
        if file.window in sealed:
            continue
        table = dict(file.partition)["source_table"] or ""
        found[table] = found.get(table, Counts()) + Counts(deduped=file.rows)
    return found


def _ask(columns: str, files: Iterable[str]) -> list[tuple[Any, ...]]:
    listed = ", ".join("'" + file.replace("'", "''") + "'" for file in files)
    if not listed:
        return []
    with duckdb.connect() as connection:
        query = f"SELECT {columns} FROM read_parquet([{listed}], hive_partitioning = false) GROUP BY 1"
        return connection.execute(query).fetchall()
