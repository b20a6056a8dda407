"""Find net changes that no fold needs any more, because a later row of the same key says all that they say.

A folded row says where the life of its key began, what ended it, and what each column was. A fold takes the
latest of each of these. So if a later row of the key knows **every** column, by accepted events alone, the
earlier row contributes nothing: not to the current state, not to a merge with later events, not to a rebuild.

Only two things could still need the earlier row. A key change between the two rows takes columns from just
below itself. And a fold looks for events that a window hides from a life that a key change ended. Therefore a
row stays if a key change ended a life of its key, or if events may still come between the two rows.
``find_superseded`` states the rule; ``test_superseded.py`` compares it with folds that keep every row.

The rule is SQL for DuckDB, which filters millions of rows without holding them in memory.
"""

from __future__ import annotations

from collections.abc import Mapping

import duckdb

from omnisupport_ingest.cdc.event_fold import ENDED, KEY
from omnisupport_ingest.cdc.life import PositionTuple

POSITIONS = ("_cdc_position", "_cdc_first", "_cdc_alive", "_cdc_doubt", "_cdc_vouched")

ASKED = ("_cdc_kind", "_cdc_key", *POSITIONS, "_cdc_moved_from_key", "_cdc_unresolved")
"""The columns of folded rows that the rule needs, beside ``window``."""

SUPERSEDED = "superseded"
"""The table that ``find_superseded`` makes: ``window`` and ``key`` of rows that may be removed."""

_RULE = f"""
CREATE OR REPLACE TEMP TABLE {SUPERSEDED} AS
WITH held AS (
    -- What a window has of a key goes together or not at all: it is one row once its parts are folded.
    SELECT "window", _cdc_key AS key, max(_cdc_position) AS last, max(_cdc_position).epoch AS epoch
    FROM net_rows WHERE _cdc_kind = '{KEY}' AND _cdc_key IS NOT NULL
    GROUP BY "window", _cdc_key HAVING min(_cdc_first).epoch = max(_cdc_position).epoch
), complete AS (
    SELECT rows._cdc_key AS key, rows._cdc_position.epoch AS epoch,
        max_by(rows."window", rows._cdc_first) AS "window", max(rows._cdc_first) AS first
    FROM net_rows AS rows LEFT JOIN events_above ON events_above.epoch = rows._cdc_position.epoch
    WHERE rows._cdc_kind = '{KEY}'
        AND rows._cdc_vouched = rows._cdc_alive
        AND rows._cdc_doubt IS NULL
        AND rows._cdc_moved_from_key IS NULL
        AND coalesce(len(rows._cdc_unresolved), 0) = 0
        AND rows._cdc_first.epoch = rows._cdc_position.epoch
        AND (events_above.epoch IS NULL
            OR (rows._cdc_position.commit_lsn, rows._cdc_position.ordinal)
                < (events_above.commit_lsn, events_above.ordinal))
    GROUP BY rows._cdc_key, rows._cdc_position.epoch
)
SELECT held."window", held.key
FROM held JOIN complete ON complete.key = held.key AND complete.epoch = held.epoch
WHERE held.last < complete.first
    AND held."window" <> complete."window"
    AND held.key NOT IN (SELECT key FROM taken_away WHERE key IS NOT NULL)
"""


def find_superseded(connection: duckdb.DuckDBPyConnection, above: Mapping[int, PositionTuple]) -> None:
    """Make the table ``SUPERSEDED`` from the rows of windows that are never judged again.

    Args:
        connection: has the relations ``net_rows`` (``window`` and ``ASKED``) of those windows, and
            ``taken_away``: its column ``key`` has every key of which a key change ended a life, in any
            window.
        above: by epoch, the lowest position of an event in all other windows. A release, or judging by
            another contract, may add any of these events. Later events of the log lie above all events of
            their epoch.
    """
    # No failpoint: tables of the caller's scratch database.
    connection.execute(
        "CREATE OR REPLACE TEMP TABLE events_above (epoch INTEGER, commit_lsn BIGINT, ordinal BIGINT)"
    )
    if above:
        connection.executemany(
            "INSERT INTO events_above VALUES (?, ?, ?)", [[*each] for each in above.values()]
        )
    connection.execute(_RULE)


def taken_away_in(rows: str) -> str:
    """Return the query for keys of which a key change ended a life, among the relation ``rows``."""
    return f"SELECT DISTINCT _cdc_key AS key FROM {rows} WHERE _cdc_kind = '{ENDED}'"
