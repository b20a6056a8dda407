"""Up to where the log is known to have changed nothing that a look at the catalogs does not show."""

from __future__ import annotations

from psycopg2.extensions import connection as Connection

from omnisupport_ingest.position import Lsn
from omnisupport_ingest.sources.postgres.snapshot.safe_watermark import (
    SafeWatermarks,
    read_mark,
    read_visibility,
)

REMEMBER_SECONDS = 60.0
"""How often it is written down that looks have found nothing new: more would be kept of history if it were
more often."""


class CatalogLooks:
    """Looks at the catalogs of one server, one after the other."""

    def __init__(self) -> None:
        self._marks = SafeWatermarks()

    def begin(self, connection: Connection) -> Lsn:
        """An LSN of which every statement from now on sees whatever committed below it; 0 if none is known.

        ``connection`` is in autocommit. ``SourceRefused`` on a standby.
        """
        known = self._marks.offer(read_mark(connection))
        # Of a snapshot before those that look: they see no less.
        mark = self._marks.newest_safe(known, read_visibility(connection))
        return Lsn(0) if mark is None else mark.lsn
