"""Noticing that the publication sends a partition's changes under the partition's own name.

Those are not taken for changes of the partitioned table, so its rows in the lake would go stale.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from psycopg2.extensions import connection as Connection

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.sources.postgres.connection import source_errors
from omnisupport_ingest.sources.postgres.errors import PreflightFailed
from omnisupport_ingest.sources.postgres.pgoutput import Relation
from omnisupport_ingest.sources.postgres.publication import read_publication, via_root_statement
from omnisupport_ingest.sources.postgres.row_events import Standing
from omnisupport_ingest.sources.postgres.snapshot_requests import SnapshotRequests


class PartitionNames:
    """Looks at each table that the stream describes. It describes partitions in any case."""

    def __init__(
        self,
        connection: Connection,
        publication: str,
        tables: Sequence[TableContract],
        requests: SnapshotRequests,
    ) -> None:
        self._connection, self._publication, self._requests = connection, publication, requests
        self._tables = {(each.schema, each.table): each for each in tables}

    def standing_of(self, relation: Relation) -> Standing:
        """Whether ``relation`` is partitioned, or a partition of a contracted table."""
        with source_errors("looking for partitions"), self._connection.cursor() as cursor:
            cursor.execute(
                "SELECT w.relkind = 'p', n.nspname::text, c.relname::text FROM pg_class w"
                " LEFT JOIN pg_class c ON c.oid = pg_partition_root(w.oid)"
                " LEFT JOIN pg_namespace n ON n.oid = c.relnamespace WHERE w.oid = %s",
                (relation.oid,),
            )
            found = cursor.fetchone()
        partitioned, *root = found or (False, None, None)
        table = self._tables.get(tuple(root))
        if table is None or (relation.schema, relation.table) in self._tables:
            return Standing(partitioned)
        sent = partial(self._sent_by_name, f"{relation.schema}.{relation.table}", table)
        return Standing(partitioned, sent)

    def _sent_by_name(self, partition: str, table: TableContract) -> None:
        """Have ``table`` read again. ``PreflightFailed`` while the publication goes on like that.

        A publication of all tables sends the changes of one that is attached later too: they are its own.
        """
        publication = read_publication(self._connection, self._publication)
        via_root = publication is not None and publication.via_root
        if via_root and publication is not None and publication.all_tables:
            return
        self._requests.write(table.name, f"partition {partition} was sent under its own name")
        if not via_root:
            raise PreflightFailed(
                f"Publication {self._publication} sends the changes of partition {partition} under its own "
                f"name, not as those of {table.full_name}.",
                fix=f"{via_root_statement(self._publication)}  -- {table.full_name} is then read again",
            )
