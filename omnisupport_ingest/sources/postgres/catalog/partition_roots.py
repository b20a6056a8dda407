"""Finds the table of a change if the publication sends partitions under their own names.

Without ``publish_via_partition_root``, the stream does not say to which table a described partition belongs.
The catalog says it only for the present, and the stream may be far behind. The home's records
(``partitions``) say for which positions it was true.

A description holds until the next ATTACH or DETACH of its table; after that, the server describes the table
again. If it is uncertain when a table was a partition, a present partition counts as one already, and a
former partition does not count. Otherwise later changes would land under the wrong table.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from pathlib import Path

from psycopg2.extensions import connection as Connection

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.contracts.names import TableName
from omnisupport_ingest.landing.lost_changes import LostChanges
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.sources.postgres.catalog.partitions import (
    PartitionRecords,
    read_partitions,
    read_root,
)
from omnisupport_ingest.sources.postgres.protocol.pgoutput import Relation

_log = logging.getLogger(__name__)


class PartitionRoots:
    """The partitioned tables among the tables with contracts, and their partitions, in one epoch."""

    def __init__(
        self,
        connection: Connection,
        folder: Path,
        epoch: int,
        tables: Sequence[TableContract],
        lost: LostChanges,
    ) -> None:
        """``connection`` is in autocommit. ``folder``: the landing folder of the source. ``lost``: gets a
        record of changes of partitions that cannot be assigned to a table."""
        self._connection, self._lost = connection, lost
        self._records = PartitionRecords(folder, epoch)
        self._tables = {each.table_name: each for each in tables}

    def add_tables(self, tables: Sequence[TableContract]) -> None:
        """Treat ``tables`` as tables with contracts from now on."""
        self._tables |= {each.table_name: each for each in tables}

    def name_among(self, relation: Relation, names: Collection[TableName]) -> TableName | None:
        """Return which of the tables ``names`` the rows of ``relation`` belong to now; None if to none.

        Use it only for tables that are not added yet: their former partitions are unknown.
        """
        own = relation.schema, relation.table
        if own in self._tables or own in names:
            return own if own in names else None
        root = read_root(self._connection, relation.oid)
        return root if root in names else None

    def name_of(self, relation: Relation, commit_lsn: int) -> TableName:
        """Return the table with a contract that the rows of ``relation`` belong to, else its own name.

        ``relation`` was described for a change of the transaction that committed at ``commit_lsn``.
        """
        own = relation.schema, relation.table
        if own in self._tables:
            return own
        root, at = read_root(self._connection, relation.oid), Lsn(commit_lsn)
        if root in self._tables:
            return root if self._is_in(relation, self._tables[root], at) else own
        for name, table in self._tables.items():
            if self._was_in(relation, table, at):
                return name
        return own

    def truncated(self, relations: Sequence[Relation], commit_lsn: int) -> list[TableName]:
        """Return the names of the tables that one TRUNCATE emptied.

        A partitioned table with a contract is among them only if all its leaves are. If only some are, the
        other rows stay, and the check of the partitions (``partition_watch``) finds the difference.
        """
        names, seen = [], set[TableName]()
        oids = {relation.oid for relation in relations}
        for relation in relations:
            own = relation.schema, relation.table
            root = None if own in self._tables else read_root(self._connection, relation.oid)
            if root in self._tables and root not in seen and self._all_in(root, oids, Lsn(commit_lsn)):
                seen.add(root)
                own = root
            names.append(own)
        return names

    def _all_in(self, root: TableName, oids: Collection[int], at: Lsn) -> bool:
        """Whether ``oids`` include every leaf that ``root`` may have had at ``at``."""
        now = read_partitions(self._connection, [root]).get(root, {})
        known = self._records.read(self._tables[root].name)
        had = {oid for oid, each in now.items() if each.leaf}
        if known is not None:
            had |= {oid for oid, each in known.partitions.items() if each.leaf}
            had |= {oid for oid, stay in known.left.items() if at < stay.end}
        return had <= {str(oid) for oid in oids}

    def _is_in(self, relation: Relation, table: TableContract, at: Lsn) -> bool:
        """Whether a present partition of ``table`` was already one at ``at``, or may have been."""
        known, oid = self._records.read(table.name), str(relation.oid)
        if known is None:
            return True
        stay, left = known.stay_of(oid), known.left.get(oid)
        if left is not None and left.start <= at < left.end:
            return True
        return at >= (known.certain if stay is None else stay.start)

    def _was_in(self, relation: Relation, table: TableContract, at: Lsn) -> bool:
        """Whether a table that is not a partition of ``table`` now certainly was one at ``at``."""
        known, oid = self._records.read(table.name), str(relation.oid)
        if known is None:
            return False
        left, stay = known.left.get(oid), known.stay_of(oid)
        if any(each is not None and each.start <= at < each.end for each in (left, stay)):
            return True
        if stay is not None and at >= stay.end:
            # It left after the last check, either before this change or after it. The next check requests a
            # snapshot of the table. Until then the history may lack this change.
            name = f"{relation.schema}.{relation.table}"
            _log.warning("changes of %s may be missing in the history of %s", name, table.full_name)
            self._lost.add(table.name, f"partition {name} was detached or dropped", at)
        return False
