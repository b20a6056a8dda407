"""Compares a dimension with rows that its source had at an earlier LSN.

The source's rows at the LSN are treated as rows of a snapshot, and the events that the dimension consumed at
that LSN or above are folded onto them. The result must equal the dimension. Only the newer events come from
the lake, so a fault in the dimension's files, or in the events below the LSN, is found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import duckdb
from pyspark.sql import SparkSession
from pyspark.sql import types as T

from omnisupport_ingest.cdc.current import current_state
from omnisupport_ingest.cdc.envelope import LANDED_TYPE
from omnisupport_ingest.cdc.fold import fold_events, partitions_for
from omnisupport_ingest.contracts.model import Column, TableContract
from omnisupport_ingest.contracts.pii_policies import HASH
from omnisupport_ingest.lake.drafts import Drafts
from omnisupport_ingest.lake.layout import LakeFile
from omnisupport_ingest.lake.read import read_paths
from omnisupport_ingest.lake.staged_frames import write_frame
from omnisupport_ingest.lake.stats import rows_in
from omnisupport_ingest.read.compare import (
    SHOWN,
    Comparison,
    Difference,
    Sample,
    compare,
    events_since,
    key_hash,
    named_pairs,
)
from omnisupport_ingest.read.protected_rows import HASHES_PREFIX
from omnisupport_ingest.read.row_equality import (
    key_part,
    named,
    parts_of,
    same_key,
    select_lake,
    select_source,
    text,
)

_FROM_EVENTS = (
    *("key", "op", "epoch", "commit_lsn", "ordinal", "source_ts", "before", "after", "unchanged"),
    *("moved_from_key", "batch_id", "identity"),
)
_EVENT_TYPE = T.StructType(
    [
        T.StructField("window", T.StringType()),
        *(LANDED_TYPE[name] for name in _FROM_EVENTS),
        T.StructField("landed_at", T.TimestampType()),
        T.StructField("withheld", T.BooleanType()),
    ]
)
_WINDOW = "since"
"""The one window that everything is folded as; it is merged with nothing."""


@dataclass(frozen=True)
class MovedOn:
    """A dimension with events above the LSN of ``sample``, and the source's rows at it.

    ``expected``: a file of the source's rows as text, in a folder that only its owner can read. ``whole``: an
    event without a key exists, so every row may have changed; otherwise only the keys with events have.
    ``table``: the folder of the dimension.
    """

    contract: TableContract
    expected: Path
    files: Sequence[LakeFile | str]
    sample: Sample
    whole: bool
    table: Path

    def compare(self, spark: SparkSession) -> Comparison:
        """Compare rows without newer events as they are, and the others after folding the newer events.

        With a sample, keys with events are left out; the others are compared after the events without a key.
        """
        forward = self._fold(spark)
        stayed = None
        if not self.whole:
            stayed = compare(self.contract, self.expected, self.files, sample=self.sample)
        with self._connect() as connection:
            # No failpoint: nothing here outlives the process (a database or buffer in memory).
            connection.execute(f"CREATE VIEW lake AS {select_lake(connection, self.contract, self.files)}")
            connection.execute(f"CREATE VIEW forward AS {select_lake(connection, self.contract, forward)}")
            connection.execute(f"CREATE TABLE moved AS {self._keys()}")
            connection.execute(f"CREATE TABLE hashes AS {self._hashes()}")
            connection.execute(f"CREATE TABLE pairs AS {self._pairs()}")
            row = connection.execute(
                "SELECT (SELECT count(*) FROM pairs), (SELECT count(*) FROM moved),"
                f" (SELECT count(*) FROM read_parquet({text(str(self.expected))})),"
                " count(*) FILTER (NOT _cdc_is_deleted), count(*) FILTER (_cdc_is_deleted),"
                f" count(*) FILTER (NOT _cdc_is_deleted AND len(_cdc_unresolved) > 0 AND {self._compared})"
                " FROM lake r"
            ).fetchone()
            assert row is not None
            wrong, moved, source_rows, current, deleted, unresolved = row
            rows = connection.execute(
                f"SELECT key, differing FROM pairs ORDER BY key LIMIT {SHOWN}"
            ).fetchall()
        examples = [Difference(key, tuple(columns)) for key, columns in rows]
        if stayed is not None:
            wrong += stayed.differences
            examples = sorted([*examples, *stayed.examples], key=lambda each: each.key)[:SHOWN]
        left_out = moved if self.sample.below is not None else 0
        return Comparison(
            source_rows=source_rows,
            current_rows=current,
            deleted_rows=deleted,
            unresolved=unresolved,
            differences=wrong,
            examples=tuple(examples),
            skipped=left_out,
            forwarded=0 if left_out else moved,
        )

    def _fold(self, spark: SparkSession) -> list[str]:
        """Fold the newer events; return the files of the rows that the dimension should show now."""
        events, folder = self.expected.with_suffix(".events"), self.expected.with_suffix(".forward")
        with self._connect() as connection:
            # No failpoint: scratch files, which the next command removes if this process is killed.
            connection.execute(f"CREATE VIEW source AS {select_source(self.contract, self.expected)}")
            connection.execute(f"CREATE TABLE moved AS {self._keys()}")
            connection.execute(f"COPY ({self._events()}) TO {text(str(events))} (FORMAT parquet)")
        drafts = Drafts.beside(spark, self.table, folder)
        parts = partitions_for(rows_in(events), events.stat().st_size)
        try:
            rows = read_paths(spark, _EVENT_TYPE, [drafts.lend(events)])
            # Cached, because the state is made in two jobs, and each would fold the events again.
            folded = fold_events(rows, self.contract, partitions=parts).persist()
            try:
                whole = write_frame(current_state(folded, self.contract, partitions=parts), drafts, ())
            finally:
                folded.unpersist()
        finally:
            drafts.clear_objects()
        return [str(file) for file in sorted(whole.glob("*.parquet"))]

    def _keys(self) -> str:
        """SQL: the keys with events, as the parts of the key and as the events write them."""
        since = events_since(self.contract, self.sample, "key")
        return (
            f"SELECT {parts_of('key', self.contract)}, any_value(key) AS key FROM ({since})"
            f" WHERE key IS NOT NULL GROUP BY ALL"
        )

    def _hashes(self) -> str:
        """SQL: a map from hashes of the source's values by former keys to those by the current one.

        A window that was not made again since the key changed has hashes by a former key.
        """
        names = [each.name for each in self.contract.columns if each.pii == HASH]
        both = " UNION ".join(
            f"SELECT unnest(string_split({named(HASHES_PREFIX + name)}, ' ')) AS former,"
            f" {named(name)} AS current FROM read_parquet({text(str(self.expected))})"
            for name in names
        )
        both = both or "SELECT NULL::VARCHAR AS former, NULL::VARCHAR AS current"
        return f"SELECT map(list(former), list(current)) AS by_former FROM ({both}) WHERE former <> current"

    def _events(self) -> str:
        """SQL: the source's rows as rows of a snapshot just below the LSN, and the events at it and above."""
        contract, sample = self.contract, self.sample
        parts = ", ".join(f"s.{key_part(i)}" for i in range(len(contract.key)))
        image = ", ".join(f"{named(column.name)} := s.{named(column.name)}" for column in contract.columns)
        base = {
            "key": f"coalesce(m.key, to_json([{parts}])::VARCHAR)",
            "op": "'r'",
            "epoch": str(sample.epoch),
            "commit_lsn": str(sample.from_lsn - 1),
            "ordinal": "0",
            "source_ts": "'epoch'::TIMESTAMPTZ",
            "batch_id": "''",
            "after": f"to_json(struct_pack({image}))::VARCHAR",
        }
        types = {"epoch": "INTEGER", "unchanged": "VARCHAR[]", "source_ts": "TIMESTAMPTZ"} | dict.fromkeys(
            ("commit_lsn", "ordinal"), "BIGINT"
        )
        columns = ", ".join(
            f"({base.get(name, 'NULL')})::{types.get(name, 'VARCHAR')} AS {named(name)}"
            for name in _FROM_EVENTS
        )
        added = f"'epoch'::TIMESTAMPTZ AS landed_at, {text(_WINDOW)} AS \"window\""
        moved = "" if self.whole else " WHERE m.key IS NOT NULL"
        since = events_since(contract, sample, ", ".join(named(name) for name in _FROM_EVENTS), withheld=True)
        return (
            f"SELECT {columns}, {added}, false AS withheld FROM source s LEFT JOIN moved m"
            f" ON {same_key(contract, 's', 'm')}{moved}"
            f" UNION ALL BY NAME SELECT *, {added} FROM ({since})"
        )

    def _pairs(self) -> str:
        """Return the keys whose rows in the dimension differ from the folded ones, and in which columns."""
        contract, mark = self.contract, self.contract.soft_delete_column
        in_lake, in_source = "l._cdc_key IS NOT NULL", "f._cdc_key IS NOT NULL"
        both = f"{in_lake} AND {in_source}"
        marked = "false" if mark is None else f"f.{named(mark)} IS NOT NULL"
        # The source has no ended row any more, so the values of such rows are not compared.
        same_end = f"{both} AND l._cdc_is_deleted = f._cdc_is_deleted"
        at_source = f"{same_end} AND (NOT f._cdc_is_deleted OR {marked})"
        too_few = f"{both} AND l._cdc_is_deleted AND NOT f._cdc_is_deleted"
        too_many = f"{both} AND f._cdc_is_deleted AND NOT l._cdc_is_deleted"
        reasons = [
            f"CASE WHEN NOT ({in_lake}) AND NOT f._cdc_is_deleted THEN 'missing in the lake' END",
            f"CASE WHEN NOT ({in_source}) AND NOT l._cdc_is_deleted THEN 'not in the source' END",
            f"CASE WHEN {too_many} THEN 'not in the source' END",
            f"CASE WHEN {too_few} THEN 'deleted in the lake' END",
            *(
                f"CASE WHEN {at_source} AND ({_differs(column)}) THEN {text(column.name)} END"
                for column in contract.columns
            ),
            f"CASE WHEN {at_source} AND ({_unknown('l', '*')} <> {_unknown('f', '*')}) THEN 'in doubt' END",
        ]
        chosen = "true" if self.whole else self._has_events
        if self.sample.below is not None:
            of_sample = f"{key_hash(contract)} < {text(self.sample.below)}"
            chosen = f"{of_sample} AND {self._compared}" if self.whole else "false"
        forward = f"(SELECT * FROM forward r WHERE {chosen})"
        return named_pairs(contract, reasons, (forward, "f"), f"(SELECT * FROM lake r WHERE {chosen})")

    @property
    def _has_events(self) -> str:
        return f"EXISTS (SELECT 1 FROM moved m WHERE {same_key(self.contract, 'r', 'm')})"

    @property
    def _compared(self) -> str:
        """SQL: whether the row ``r`` is not left out."""
        return "true" if self.sample.below is None else f"NOT {self._has_events}"

    def _connect(self) -> duckdb.DuckDBPyConnection:
        connection = duckdb.connect()
        connection.execute("SET TimeZone = 'UTC'")
        connection.execute(f"SET temp_directory = {text(str(self.expected.parent / 'spill'))}")
        return connection


def _differs(column: Column) -> str:
    value, exact = named(column.name), f"_cdc_exact[{text(column.name)}]"
    here, there = f"l.{value}", f"f.{value}"
    if column.pii == HASH:
        here, there = (f"coalesce((SELECT by_former FROM hashes)[{each}], {each})" for each in (here, there))
    return (
        f"{here} IS DISTINCT FROM {there} OR l.{exact} IS DISTINCT FROM f.{exact}"
        f" OR {_unknown('l', column.name)} <> {_unknown('f', column.name)}"
    )


def _unknown(row: str, column: str) -> str:
    return f"coalesce(list_contains({row}._cdc_unresolved, {text(column)}), false)"
