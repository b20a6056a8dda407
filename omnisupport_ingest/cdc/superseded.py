"""Net changes that nothing needs any more: a later row of the same key says all that any fold may ask.

A folded row says of its key where its life began, what ended it, and what each column was. A fold takes the
latest of each of these. So where a later row of the key knows **every** column by accepted events alone, the
earlier one has none of them to give: not to the current state, not to a merge with what may still come, and
not to a rebuild. What could still ask for it are a key change between the two, which takes columns from just
below itself, and the look for events that a window hides from a life that a key change ended. Therefore a row
stays where a key change took the key's row away, and where events may still come between both rows.
``find_superseded`` states the rule; ``test_superseded.py`` holds it against folds that keep every row.

It is written as SQL for DuckDB, which asks millions of rows without holding them.
"""

from __future__ import annotations

from collections.abc import Mapping

import duckdb

from omnisupport_ingest.cdc.event_fold import ENDED, KEY
from omnisupport_ingest.cdc.life import Position

POSITIONS = ("_cdc_position", "_cdc_first", "_cdc_alive", "_cdc_doubt", "_cdc_vouched")

ASKED = ("_cdc_kind", "_cdc_key", *POSITIONS, "_cdc_moved_from_key", "_cdc_unresolved")
"""The columns of folded rows that the rule asks for, beside ``window``."""

SUPERSEDED = "superseded"
"""The table that ``find_superseded`` makes: ``window`` and ``key`` of rows that may go."""

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


def find_superseded(connection: duckdb.DuckDBPyConnection, above: Mapping[int, Position]) -> None:
    """Make the table ``SUPERSEDED`` from the rows of windows that are never judged again.

    ``connection`` has the relations ``net_rows`` (``window`` and ``ASKED``) of those windows, and
    ``taken_away``: the column ``key`` has every key of the table of which a key change ended a life, in any
    window. ``above``: by epoch the lowest position of an event in all other windows, as released or judged by
    another contract it may be any event; of later events of the log an epoch has none below those it has.
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
    """The query for keys of which a key change ended a life, among the relation ``rows``."""
    return f"SELECT DISTINCT _cdc_key AS key FROM {rows} WHERE _cdc_kind = '{ENDED}'"
