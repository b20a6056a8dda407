"""Find the rows of the current state that a target lacks.

When a row of the current state changes, the lake replaces the file that holds it. So the target lacks the
rows of the files that were added since its last sync, except those that the removed files had too. Nothing is
read from the target, and an update costs only what changed. If the files are not known (they were swept, or
the table was made again), the keys, positions and hashes in the target take the place of the removed files.
DuckDB compares; Spark is not needed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import duckdb
import pyarrow as pa

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.contracts.pg_types import Kind
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.lake.deletion_vectors import are_there
from omnisupport_ingest.lake.layout import WHOLE_TABLE, LakeFile
from omnisupport_ingest.lake.live_rows import live_sql
from omnisupport_ingest.lake.log import files_since
from omnisupport_ingest.lake.snapshot import TableSnapshot
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.read.row_equality import text as literal
from omnisupport_ingest.storage import at_hand
from omnisupport_ingest.targets.columns import POSITION, copy_line, escaped, target_columns

_ROWS_AT_ONCE = 8192

_EMPTY = {
    Kind.TEXT: "NULL::VARCHAR",
    Kind.NUMERIC_TEXT: "NULL::VARCHAR",
    Kind.BINARY: "NULL::BLOB",
    Kind.TEXT_ARRAY: "NULL::VARCHAR[]",
    Kind.INTEGER_ARRAY: "NULL::BIGINT[]",
    Kind.TIMESTAMP: "NULL::TIMESTAMPTZ",
}
"""SQL for DuckDB: NULL of the lake's type, for kinds whose text for COPY needs more than a cast."""

_KNOWN = ("_cdc_key", *POSITION, "_cdc_row_hash")


class NotThereYet(IngestError):
    """The lake has no current state of the table yet, or not since its contract named another column.

    Fix: Let the pipeline run, by ``omnisupport-ingest up`` or ``materialize``; then sync again.
    """


@dataclass(frozen=True)
class CurrentState:
    """The current state of a table at one version.

    ``entry``: SHA-256 of this version's entry in the log, which tells it from another version of the same
    number. ``position``: its last event, as text.
    """

    contract: TableContract
    snapshot: TableSnapshot
    entry: str
    position: str
    watermark: datetime | None

    @classmethod
    def of(cls, workspace: Workspace, contract: TableContract) -> CurrentState:
        """Return the newest one. Raises ``NotThereYet``."""
        snapshot = workspace.dimension(contract).look()
        state = snapshot.state(WHOLE_TABLE) if snapshot is not None else None
        if snapshot is None or state is None:
            raise NotThereYet(
                f"The lake has no current state of {contract.source}.{contract.name} yet.",
                fix="Let the pipeline take in what has landed (omnisupport-ingest up, or materialize).",
            )
        present = {field.name for field in snapshot.handle.schema().fields}
        missing = [name for name in contract.column_names if name not in present]
        if missing:
            raise NotThereYet(
                f"The current state of {contract.source}.{contract.name} was made before its contract named "
                f"the column {missing[0]!r}.",
                fix="Let the pipeline take in the changed contract (omnisupport-ingest up, or materialize).",
            )
        entry = entry_of(snapshot, snapshot.version) or ""
        return cls(contract, snapshot, entry, state.checkpoint.cursor, state.checkpoint.watermark)

    @property
    def files(self) -> tuple[LakeFile, ...]:
        return self.snapshot.files(WHOLE_TABLE)

    def since(self, version: int) -> tuple[tuple[LakeFile, ...], tuple[LakeFile, ...]] | None:
        """Return the files that were added after ``version`` and those that were removed; None if they are
        not known or cannot be read."""
        changes = files_since(self.snapshot, version)
        if changes is None:
            return None
        came, went = changes.added, changes.gone
        return (came, went) if are_there((*came, *went)) else None


def entry_of(snapshot: TableSnapshot, version: int) -> str | None:
    """Return the SHA-256 of the entry of ``version`` in the log; None if it is gone."""
    try:
        text = at_hand(snapshot.table.folder / "_delta_log" / f"{version:020d}.json").read_bytes()
    except FileNotFoundError:
        return None
    return hashlib.sha256(text).hexdigest()


class Difference:
    """Compares the rows of added files with what was known before. Use it as a context.

    ``known``: Parquet files with the columns ``_cdc_key``, position and ``_cdc_row_hash``, or a CSV file with
    these columns of a target. With ``again`` every row counts as changed.
    """

    def __init__(
        self,
        contract: TableContract,
        added: Sequence[LakeFile | str],
        known: Sequence[LakeFile | str] | Path,
        scratch: Path,
        *,
        again: bool = False,
    ) -> None:
        self._contract = contract
        self._connection = duckdb.connect()
        for setting in ("TimeZone = 'UTC'", f"temp_directory = {literal(str(scratch))}"):
            self._connection.execute(f"SET {setting}")
        self._connection.execute("SET arrow_large_buffer_size = true")
        names = ", ".join(_KNOWN)
        # No failpoint: nothing here outlives the process (a database or buffer in memory).
        self._connection.execute(f"CREATE VIEW came AS {self._rows(added)}")
        self._connection.execute(f"CREATE VIEW known AS SELECT {names} FROM {self._known(known)}")
        here, there = (", ".join(f"{side}.{name}" for name in POSITION) for side in "ck")
        other = f"c._cdc_row_hash IS DISTINCT FROM k._cdc_row_hash OR ({here}) IS DISTINCT FROM ({there})"
        self._connection.execute(
            "CREATE TEMP TABLE changed AS SELECT c._cdc_key,"
            # If there was no row before, it is new: a comparison of positions would treat NULL as the
            # highest.
            f" k._cdc_key IS NOT NULL AND ({here}) < ({there}) AS back"
            " FROM came c LEFT JOIN known k ON c._cdc_key = k._cdc_key"
            f" WHERE k._cdc_key IS NULL OR {'true' if again else other}"
        )

    def __enter__(self) -> Difference:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def counts(self) -> tuple[int, int]:
        """Return how many rows are new or changed, and how many are gone."""
        gone = f"SELECT count(*) FROM ({self._vanished()})"
        ((other, vanished),) = self._connection.execute(
            f"SELECT (SELECT count(*) FROM changed), ({gone})"
        ).fetchall()
        return other, vanished

    def highest(self) -> tuple[tuple[int, int, int] | None, tuple[int, int, int] | None]:
        """Return the highest position in the added files, and in what was known; None where there is none."""
        highest = []
        for view in ("came", "known"):
            highest += self._connection.execute(
                f"SELECT max(row({', '.join(POSITION)})) FROM {view}"
            ).fetchall()
        return highest[0][0], highest[1][0]

    def lines(self) -> Iterator[bytes]:
        """Yield the changed rows as lines for COPY, in blocks."""
        line = copy_line(target_columns(self._contract))
        return self._blocks(f"SELECT {line} FROM came WHERE _cdc_key IN (SELECT _cdc_key FROM changed)")

    def leaving(self) -> Iterator[bytes]:
        """Yield lines for COPY: the key of each row to delete, and whether the row is gone. Rows that now
        have an earlier position than before are deleted too, and written again."""
        key = escaped("_cdc_key")
        leaving = f"{self._vanished()} UNION ALL SELECT _cdc_key, false FROM changed WHERE back"
        return self._blocks(f"SELECT concat({key}, chr(9), vanished, chr(10)) FROM ({leaving})")

    def _vanished(self) -> str:
        return (
            "SELECT _cdc_key, true AS vanished FROM known WHERE _cdc_key NOT IN (SELECT _cdc_key FROM came"
            " WHERE _cdc_key IS NOT NULL)"
        )

    def _blocks(self, query: str) -> Iterator[bytes]:
        reader = self._connection.sql(query).to_arrow_reader(_ROWS_AT_ONCE)
        for batch in reader:
            lines = batch.column(0).cast(pa.large_string())
            if len(lines):
                # Arrow stores the texts of a column one after another: that is what COPY reads.
                bounds = pa.Array.from_buffers(
                    pa.int64(), len(lines) + 1, [None, lines.buffers()[1]], offset=lines.offset
                )
                yield lines.buffers()[2][bounds[0].as_py() : bounds[len(lines)].as_py()].to_pybytes()

    def _rows(self, files: Sequence[LakeFile | str]) -> str:
        columns = {column.name: _EMPTY.get(column.type.kind, "NULL") for column in self._contract.columns}
        columns |= dict.fromkeys(("_cdc_is_deleted", "_cdc_deleted_at", "_cdc_updated_at"), "NULL")
        nothing = [f'{value} AS "{name.replace(chr(34), chr(34) * 2)}"' for name, value in columns.items()]
        empty = (
            f"SELECT {', '.join(nothing)}, []::VARCHAR[] AS _cdc_unresolved, MAP {{}}::MAP(VARCHAR, VARCHAR)"
            f" AS _cdc_exact, {_nothing_known()}"
        )
        # A file may be older than a column that the contract has gained, so add the columns that it lacks.
        if not files:
            return empty
        return f"SELECT * FROM {live_sql(self._connection, files)} UNION ALL BY NAME {empty}"

    def _known(self, known: Sequence[LakeFile | str] | Path) -> str:
        if isinstance(known, Path):
            types = "{'_cdc_key': 'VARCHAR', '_cdc_epoch': 'INTEGER', '_cdc_commit_lsn': 'BIGINT', "
            types += "'_cdc_ordinal': 'BIGINT', '_cdc_row_hash': 'BIGINT'}"
            options = "header = false, auto_detect = false, delim = ',', quote = '\"', escape = '\"'"
            return f"read_csv({literal(str(known))}, {options}, parallel = false, columns = {types})"
        return live_sql(self._connection, known) if known else f"(SELECT {_nothing_known()})"


def _nothing_known() -> str:
    return (
        "NULL::VARCHAR AS _cdc_key, NULL::INTEGER AS _cdc_epoch, NULL::BIGINT AS _cdc_commit_lsn,"
        " NULL::BIGINT AS _cdc_ordinal, NULL::BIGINT AS _cdc_row_hash WHERE false"
    )
